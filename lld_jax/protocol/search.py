"""The protocol of actions and observations, as text and as ids.

An action is what the policy writes in one turn, an observation what the environment
writes in return. Sampled token ids are stored as they are; text is decoded from them,
and never encoded again.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol

OPEN = "\n\n<information>"
CLOSE = "</information>\n\n"
RETRY = "\n\nNot a valid action. Use search or answer tags.\n\n"
NO_RESULTS = "No results."
UNAVAILABLE = "Search is not available now."
NOTICES = ((OPEN, NO_RESULTS, CLOSE), (OPEN, UNAVAILABLE, CLOSE), (RETRY,))
TEMPLATES = ("search", "short")
TOOLS = ("search",)  # tags of actions other than an answer

_TAG_START = re.compile(r"<(?=\s*/?\s*(?:think|search|answer|information)\b)", re.I)
_RETRY = re.compile(re.escape(RETRY))
# What may follow a closing tag before the observation: the rest of the token that
# completed it (`>.`, `></`, `>\n\n`). At the end of a text that was cut, one or two
# newlines rather begin an observation.
_STRADDLE = re.compile(
    rf"(?:(?!\n\n?\Z)\S{{0,16}}?[\r\n]*?(?={OPEN}|{re.escape(RETRY)}|\Z))?"
)
# A wrapped text, whole or cut anywhere, or the notice.
_REPLY = re.compile(
    rf"{re.escape(RETRY)}|{OPEN}.*?(?:</information>(?:\n\n|\n\Z|)|\Z)|"
    + "|".join(rf"{OPEN[:n]}\Z" for n in range(1, len(OPEN))),
    re.DOTALL,
)


class RetrievalError(RuntimeError):
    """The retriever could not answer; the environment replies neutrally."""


@dataclass(frozen=True)
class Passage:
    """One retrieved passage; `score` is higher for a better match."""

    id: str
    title: str
    text: str
    score: float


class Retriever(Protocol):
    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """One list per query, at most `k` long. Raises only RetrievalError."""


@dataclass(frozen=True)
class Codec:
    """What the protocol needs of a tokenizer.

    Attributes:
      encode: plain text to ids; never yields a control or added token, whatever the
        text says (retrieved text is untrusted).
      chat: one user message to ids through the model's chat template, up to and with
        the generation prompt; the message itself is encoded like plain text.
      token_bytes: the bytes of every id below the valid vocabulary. A control token
        has its literal text (`<|im_end|>`), so that no tag forms across one.
      end_ids: ids that end a sequence.
      pad_id: fills rows; may be an end id, so masks never come from it.
    """

    encode: Callable[[str], list[int]]
    chat: Callable[[str], list[int]]
    token_bytes: tuple[bytes, ...]
    end_ids: frozenset[int]
    pad_id: int


def decode(ids: Sequence[int], token_bytes: Sequence[bytes]) -> str:
    """Text of a whole turn at once, since a character may span tokens."""
    return b"".join(token_bytes[i] for i in ids).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Action:
    """`kind`: a tool, answer or invalid; `content`: the query or answer, stripped."""

    kind: str
    content: str


@dataclass(frozen=True)
class Piece:
    """A part of a conversation; `action` is set on actions only."""

    kind: str
    text: str
    action: Action | None = None


def closing_tag(tools: Sequence[str] = TOOLS) -> re.Pattern[str]:
    """Finds a completed `</answer>` or closing tag of a tool; group 1 is its kind."""
    return re.compile(f"</({'|'.join(map(re.escape, (*tools, 'answer')))})>")


def parse_action(text: str, tools: Sequence[str] = TOOLS) -> Action:
    """Reads the turn up to the first completed `</answer>` or closing tag of a tool.

    The content lies between that tag and the last opening tag of its kind before it.
    Invalid: no closing tag, no opening tag before it, or an empty query. An empty
    answer is an answer (and scores nothing).
    """
    close = closing_tag(tools).search(text)
    if close is None:
        return Action("invalid", "")
    kind = close.group(1)
    before, opening, content = text[: close.start()].rpartition(f"<{kind}>")
    content = content.strip()
    if not opening or (kind != "answer" and not content):
        return Action("invalid", "")
    return Action(kind, content)


def split_response(text: str) -> list[Piece]:
    r"""Splits what followed the prompt into actions and observations.

    The pieces join to `text` exactly. An observation is the retry notice, or a
    `\n\n<information>...</information>\n\n` block right after a completed `</search>`
    (the rest of the token that completed it may stand between); such a block anywhere
    else was written by the policy and is part of its action. The text may be cut
    anywhere: its last piece is then an invalid action or a partial observation. A
    notice that the policy copied looks like a real one: masks come from ids, not this.
    """
    pieces, at, closing = [], 0, closing_tag()
    while at < len(text):
        close = closing.search(text, at)
        notice = text.find(RETRY, at, close.start() if close else len(text))
        end, reply = len(text), _RETRY
        if notice >= 0:
            end = notice
        elif close:
            end = _STRADDLE.match(text, close.end()).end()
            reply = _REPLY if close.group(1) == "search" else _RETRY
        if end > at:
            pieces.append(Piece("action", text[at:end], parse_action(text[at:end])))
        at = end
        if observed := reply.match(text, end):
            at = observed.end()
            pieces.append(Piece("observation", observed.group()))
    return pieces


def load_template(name_or_path: str) -> str:
    """The prompt template 'search' or 'short', or else the file at a path.

    Raises:
      ValueError: no such file, or `{question}` does not stand in it exactly once.
    """
    path = Path(name_or_path)
    if name_or_path in TEMPLATES:
        path = resources.files("lld_jax") / f"assets/templates/{name_or_path}.txt"
    if not path.is_file():
        legal = f"{', '.join(TEMPLATES)} or the path of a file"
        raise ValueError(f"template={name_or_path!r}: legal are {legal}")
    text = path.read_text(encoding="utf-8").removesuffix("\n")
    if (count := text.count("{question}")) != 1:
        raise ValueError(
            f"template={name_or_path!r}: has {{question}} {count} times, legal is once"
        )
    return text


def clean_text(text: str) -> str:
    """Untrusted text on one line, unable to act as a protocol tag.

    Runs of white space become one space. The `<` of anything that reads as a think,
    search, answer or information tag, in any case or spacing, becomes `(`. Lone
    surrogates, which no UTF-8 tokenizer takes, become `?`.
    """
    text = text.encode("utf-8", errors="replace").decode("utf-8")
    return _TAG_START.sub("(", " ".join(text.split()))


def _shorten(text: str, limit: int, encode: Callable[[str], list[int]]) -> str:
    """The longest beginning found that encodes to `limit` ids; "" if none does."""

    def too_long(n: int) -> bool:
        return len(encode(text[:n].rstrip())) > limit

    if len(encode(text)) <= limit:
        return text
    # Token counts grow with the text, though not strictly: bisection finds a cut near
    # the best one, and only what was seen to fit is returned.
    near = bisect_right(range(1, len(text)), False, key=too_long)
    cut = next((n for n in range(near, 0, -1) if not too_long(n)), 0)
    return text[:cut].rstrip()


def _fit_lines(
    lines: Sequence[str], budget: int, encode: Callable[[str], list[int]]
) -> tuple[list[int], bool]:
    """Ids of the lines within `budget`, and whether any was shortened.

    Every line has an equal share; what a short line leaves goes to the longer ones.
    """
    ends = ["\n"] * (len(lines) - 1) + [""]
    ids = [encode(line + end) for line, end in zip(lines, ends, strict=True)]
    truncated = False
    for done, i in enumerate(sorted(range(len(lines)), key=lambda i: len(ids[i]))):
        share = budget // (len(lines) - done)
        if len(ids[i]) > share:
            truncated = True
            kept = _shorten(lines[i], share, lambda s, end=ends[i]: encode(s + end))
            ids[i] = encode(kept + ends[i]) if kept else []
        budget -= len(ids[i])
    return [token for line in ids for token in line], truncated


def prompt_ids(codec: Codec, template: str, question: str) -> list[int]:
    """The template with the question in its place, as a chat message."""
    return codec.chat(template.replace("{question}", question))


def fit_question(codec: Codec, template: str, question: str, max_prompt: int) -> str:
    """The question, cut at its end (then: another text) to fit `max_prompt`."""
    return _shorten(question, max_prompt, lambda q: prompt_ids(codec, template, q))


def observation_ids(
    codec: Codec,
    lines: Sequence[str],
    budget: int,
    opening: str = OPEN,
    closing: str = CLOSE,
) -> tuple[list[int], bool]:
    """Ids of the wrapped lines, `budget` at most, and whether a line was shortened.

    The wrapper is always whole, so `budget` must hold at least it.
    """
    # The wrapper is encoded apart from the body: its closing tag stays whole.
    first, last = codec.encode(opening), codec.encode(closing)
    body, truncated = _fit_lines(lines, budget - len(first) - len(last), codec.encode)
    return first + body + last, truncated


def check_budgets(
    codec: Codec,
    template: str,
    max_prompt: int,
    max_observation: int,
    notices: Iterable[Sequence[str]] = NOTICES,
) -> None:
    """Checks at start that the budgets hold the template and the notices.

    A notice is given in the parts that are encoded apart.

    Raises:
      ValueError: names the budget (`rollout.*`), its value and the least legal one.
    """
    observation = max(sum(len(codec.encode(s)) for s in parts) for parts in notices)
    prompt = len(prompt_ids(codec, template, ""))
    pairs = (max_prompt, prompt), (max_observation, observation)
    for name, (value, least) in zip(("prompt", "observation"), pairs, strict=True):
        if value < least:
            own = f"the protocol's own text takes {least} tokens"
            raise ValueError(
                f"rollout.max_{name}={value}: {own}, legal is that or more"
            )
