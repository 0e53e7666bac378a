"""Trajectories: what a sample of a draw holds, how it grows, and its row in a file.

Token ids, mask and log-probs are appended together; nothing is encoded again.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise

from lld_jax.protocol.search import decode, parse_action

_ANSWER = re.compile(rb"<answer>(?:(?!<answer>).)*?</answer>", re.DOTALL)
_STORED = ("draw", "sample", "question", "ids", "mask", "sampler_logps", "reason")


@dataclass(frozen=True)
class Span:
    """Tokens `[start, end)`; `kind` is `action` or `observation`."""

    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class Search:
    """One query that got a reply, and the titles of what was found."""

    query: str
    titles: tuple[str, ...]


@dataclass
class Trajectory:
    """One sample of one draw; grows by `append_action` and `append_observation`.

    `ids`, `mask` (1 on tokens that the policy sampled) and `sampler_logps` (0 where
    mask is 0) are lists of equal length; the prompt is their first `prompt_length`
    items. `reason` is None until the trajectory ends.
    """

    draw: int
    sample: int
    question: str
    golden_answers: tuple[str, ...]
    ids: list[int]
    mask: list[int]
    sampler_logps: list[float]
    prompt_length: int
    spans: list[Span] = field(default_factory=list)
    searches: list[Search] = field(default_factory=list)
    reason: str | None = None
    reward: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)


def new_trajectory(
    draw: int,
    sample: int,
    question: str,
    golden_answers: Sequence[str],
    prompt_ids: Sequence[int],
) -> Trajectory:
    """A trajectory that holds only its prompt."""
    ids, gold, n = list(map(int, prompt_ids)), tuple(golden_answers), len(prompt_ids)
    return Trajectory(draw, sample, question, gold, ids, [0] * n, [0.0] * n, n)


def append_action(traj: Trajectory, ids: Sequence[int], logps: Sequence[float]) -> None:
    """Appends sampled tokens, an end token included, and their log-probs."""
    assert len(ids) == len(logps), f"{len(ids)} ids but {len(logps)} logps"
    _append(traj, Span("action", len(traj.ids), len(traj.ids) + len(ids)), ids, logps)


def append_observation(traj: Trajectory, ids: Sequence[int]) -> None:
    """Appends tokens that the environment wrote: mask 0, log-prob 0."""
    span = Span("observation", len(traj.ids), len(traj.ids) + len(ids))
    _append(traj, span, ids, [0.0] * len(ids))


def _append(traj, span, ids, logps):
    traj.ids += map(int, ids)
    traj.mask += [int(span.kind == "action")] * len(ids)
    traj.sampler_logps += map(float, logps)
    traj.spans.append(span)
    assert len(traj.ids) == len(traj.mask) == len(traj.sampler_logps) == span.end


def _action_runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """`(start, end)` of the maximal runs of ones."""
    return [run.span() for run in re.finditer(b"\x01+", bytes(map(bool, mask)))]


def answer_mask(
    ids: Sequence[int], mask: Sequence[int], token_bytes: Sequence[bytes]
) -> list[int]:
    """1 on each token that shares a byte with the last `<answer>...</answer>`.

    The tags belong to it. The block must lie inside one run of ones of `mask` (what
    the policy wrote); without one, all zeros. `ids`, `mask` and the result are `[T]`.
    """
    out = [0] * len(ids)
    for start, end in reversed(_action_runs(mask)):
        pieces = [token_bytes[i] for i in ids[start:end]]
        blocks = list(_ANSWER.finditer(b"".join(pieces)))
        if blocks:
            first, last = blocks[-1].span()
            stops = accumulate(len(piece) for piece in pieces)
            for i, (piece, stop) in enumerate(zip(pieces, stops, strict=True), start):
                out[i] = int(bool(piece) and stop - len(piece) < last and stop > first)
            break
    return out


def final_answer(traj: Trajectory, token_bytes: Sequence[bytes]) -> str | None:
    """The answer of a trajectory that ended by answering, else None."""
    if traj.reason != "answered":
        return None
    last = traj.ids[traj.spans[-1].start : traj.spans[-1].end]
    # The environment found an answer before any other action: whatever its tools are,
    # the first closing tag of an answer is the one that it read.
    return parse_action(decode(last, token_bytes), tools=()).content


def to_json(traj: Trajectory) -> dict:
    """The row of a trajectory file; floats keep every digit."""
    row = {name: getattr(traj, name) for name in _STORED}
    searches = [asdict(search) for search in traj.searches]
    gold = list(traj.golden_answers)
    return row | {"gold": gold, "reward": float(traj.reward), "searches": searches}


def from_json(row: dict) -> Trajectory:
    """Inverse of `to_json`: spans come from the mask; counters are not stored."""
    ids, runs = row["ids"], _action_runs(row["mask"])
    edges = [edge for run in runs for edge in run]
    if edges and edges[-1] < len(ids):
        edges.append(len(ids))
    kinds = ("action", "observation")
    return Trajectory(
        **{name: row[name] for name in _STORED},
        golden_answers=tuple(row["gold"]),
        prompt_length=edges[0] if edges else len(ids),
        spans=[Span(kinds[i % 2], *ends) for i, ends in enumerate(pairwise(edges))],
        searches=[Search(s["query"], tuple(s["titles"])) for s in row["searches"]],
        reward=row["reward"],
    )
