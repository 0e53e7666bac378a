"""What a trajectory talks to between its actions: the contract, and the search one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lld_jax.protocol.search import (
    CLOSE,
    NO_RESULTS,
    OPEN,
    RETRY,
    TOOLS,
    UNAVAILABLE,
    Action,
    Codec,
    Passage,
    RetrievalError,
    Retriever,
    check_budgets,
    clean_text,
    closing_tag,
    decode,
    fit_question,
    observation_ids,
    parse_action,
    prompt_ids,
)
from lld_jax.protocol.trajectory import Search


@dataclass(frozen=True)
class Turn:
    """One finished action.

    `turn` counts from 0; `last` says that no generation follows; `room` is how many
    tokens the context can give an observation, whatever the budget of one allows;
    `cut` says that the action reached its token budget before it was complete.
    """

    question: str
    action_ids: list[int]
    turn: int
    last: bool
    room: int
    cut: bool = False


@dataclass(frozen=True)
class Reply:
    """Observation `ids`, or None and the `reason` why the trajectory ended.

    Reasons: `answered`; on the last generation `turns` (a call of a tool), `tokens`
    (cut by its budget, no complete action in it) or `invalid` (ended by itself without
    an action); `context`, no room for even an empty observation; `retriever`, which
    the rollout engine alone sets, where a reply failed or never came.

    Counters: `invalid_actions`, and of these `actions_cut`. Of search: `valid_searches`
    (well-formed, without a reply too), `no_results`, `retrieval_failed`, `truncated`
    (passages were shortened).
    """

    ids: list[int] | None
    reason: str | None
    counters: dict[str, int] = field(default_factory=dict)
    searches: tuple[Search, ...] = ()


class Environment(Protocol):
    """What the rollout engine asks of an environment."""

    def start(self, question: str) -> list[int]:
        """Prompt ids; equal questions have equal prompts."""

    def step(self, turns: Sequence[Turn]) -> Iterable[tuple[int, Reply]]:
        """Gives `(index into turns, reply)`: each once, in any order, when it is known.

        Called and read in worker threads, several at once; the reader may stop early.
        """


def settle(
    turn: Turn,
    codec: Codec,
    *,
    notice: Sequence[int],
    wrapper: int,
    counter: str,
    tools: Sequence[str] = TOOLS,
) -> Reply | Action:
    """The reply to a turn that no tool has to answer, or else the call of the tool.

    Args:
      notice: ids of the notice that follows an invalid action.
      wrapper: length of an empty observation, in tokens.
      counter: counts the well-formed calls of a tool.
      tools: tags of the calls.
    """
    text = decode(turn.action_ids, codec.token_bytes)
    action = parse_action(text, tools)
    if action.kind == "answer":
        return Reply(None, "answered")
    counters, least, ending = {counter: 1}, wrapper, "turns"
    if action.kind == "invalid":
        counters, least, ending = {"invalid_actions": 1}, len(notice), "invalid"
        # The last token that the budget allows may be one that ends the action anyway.
        tag = closing_tag(tools).search(text)
        if turn.cut and not tag and codec.end_ids.isdisjoint(turn.action_ids[-1:]):
            counters["actions_cut"], ending = 1, "tokens"
    if turn.last:
        return Reply(None, ending, counters)
    if turn.room < least:
        return Reply(None, "context", counters)
    if action.kind == "invalid":
        return Reply(list(notice), None, counters)
    return action


@dataclass(frozen=True)
class SearchEnvironment:
    """Search-R1's protocol (arXiv 2503.09516) with one retriever.

    `k` passages per query; an observation has at most `max_observation` tokens, a
    prompt at most `max_prompt`. Budgets are checked when it is made (`check_budgets`).
    As thread-safe as its codec and its retriever.
    """

    codec: Codec
    retriever: Retriever
    template: str
    k: int = 3
    max_observation: int = 500
    max_prompt: int = 2048

    def __post_init__(self):
        if self.k < 1:
            raise ValueError(f"retrieval.k={self.k}: legal is 1 or more")
        check_budgets(self.codec, self.template, self.max_prompt, self.max_observation)

    def fit_question(self, question: str) -> str:
        """The question, cut at its end (then: another text) to fit `max_prompt`."""
        return fit_question(self.codec, self.template, question, self.max_prompt)

    def start(self, question: str) -> list[int]:
        """Prompt ids, at most `max_prompt`; the template is always whole."""
        return prompt_ids(self.codec, self.template, self.fit_question(question))

    def step(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Reply]]:
        """First what needs no search, then the rest from one call of the retriever."""
        notice = self.codec.encode(RETRY)
        wrapper = len(self.codec.encode(OPEN)) + len(self.codec.encode(CLOSE))
        waiting: list[tuple[int, str, int]] = []
        for i, turn in enumerate(turns):
            settled = settle(
                turn,
                self.codec,
                notice=notice,
                wrapper=wrapper,
                counter="valid_searches",
            )
            if isinstance(settled, Reply):
                yield i, settled
            else:
                waiting.append((i, settled.content, turn.room))
        if not waiting:
            return
        queries = [query for _, query, _ in waiting]
        found: Sequence[list[Passage] | None]
        try:
            found = self.retriever.search(queries, self.k)
        except RetrievalError:
            found = [None] * len(queries)
        # As a list: answers of a wrong number are an error before one is given out.
        for (i, query, room), passages in list(zip(waiting, found, strict=True)):
            yield i, self._observe(query, passages, room)

    def _observe(self, query: str, passages: list[Passage] | None, room: int) -> Reply:
        """Renders what was found (None: retrieval failed) within the budget."""
        counters = {"valid_searches": 1}
        shown = (passages or ())[: self.k]
        lines = [
            f"Doc {i}(Title: {clean_text(p.title)}) {clean_text(p.text)}"
            for i, p in enumerate(shown, 1)
        ]
        if passages is None:
            counters["retrieval_failed"] = 1
            lines = [UNAVAILABLE]
        elif not shown:
            counters["no_results"] = 1
            lines = [NO_RESULTS]
        budget = min(self.max_observation, room)
        ids, truncated = observation_ids(self.codec, lines, budget)
        if truncated:
            counters["truncated"] = 1
        search = Search(query, tuple(passage.title for passage in shown))
        return Reply(ids, None, counters, (search,))
