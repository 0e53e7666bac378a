"""What goes into one call of a rollout's programs: plain numpy, no device.

Each shard of the batch has its own entries of a call, and only they may name its slots.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lld_jax.rollout.decoding import Shapes


@dataclass(frozen=True)
class Piece:
    """Tokens that a slot appends in one call.

    `fresh` starts the slot over, after `last` it decodes, and then, if `prompt`, the
    prompt is complete.
    """

    ids: Sequence[int]
    fresh: bool
    last: bool
    prompt: bool


@dataclass(frozen=True)
class Run:
    """Whose tokens a slot samples next, and the length at which they are cut."""

    draw: int
    sample: int
    limit: int


def place(shapes: Shapes, shards: int, slots: Iterable[int]) -> dict[int, int]:
    """`{entry: slot}` of the first slots that fit into one call, in their order."""
    room = shapes.extend_rows // shards
    entries: dict[int, int] = {}
    taken = [0] * shards
    for slot in slots:
        shard = slot * shards // shapes.slots
        if taken[shard] < room:
            entries[shard * room + taken[shard]] = slot
            taken[shard] += 1
    return entries


def extend_request(
    shapes: Shapes,
    shards: int,
    entries: Mapping[int, int],
    pieces: Mapping[int, Piece],
    runs: Mapping[int, Run],
) -> dict[str, np.ndarray]:
    """A request of `Programs.extend`; `pieces` and `runs` are by slot."""
    E, N = shapes.extend_rows, shapes.extend_tokens
    request = _identity(E, entries, runs) | {
        "rows": _first_slots(shapes, shards),
        "ids": np.zeros((E, N), np.int32),
        "n": np.zeros(E, np.int32),
        "fresh": np.zeros(E, bool),
        "run": np.zeros(E, bool),
        "prompt": np.zeros(E, bool),
    }
    for e, slot in entries.items():
        piece = pieces[slot]
        request["rows"][e] = slot
        request["ids"][e, : len(piece.ids)] = piece.ids
        request["n"][e] = len(piece.ids)
        request["fresh"][e] = piece.fresh
        request["run"][e] = piece.last
        request["prompt"][e] = piece.last and piece.prompt
    return request


def fork_request(
    shapes: Shapes,
    shards: int,
    entries: Mapping[int, int],
    sources: Mapping[int, int],
    runs: Mapping[int, Run],
) -> dict[str, np.ndarray]:
    """A request of `Programs.fork`; `sources` says which slot each one copies."""
    E = shapes.extend_rows
    first = _first_slots(shapes, shards)
    request = _identity(E, entries, runs)
    request |= {"src": first, "dst": first.copy(), "used": np.zeros(E, bool)}
    for e, slot in entries.items():
        request["src"][e], request["dst"][e] = sources[slot], slot
        request["used"][e] = True
    return request


def _first_slots(shapes: Shapes, shards: int) -> np.ndarray:
    """`[E]`: the first slot of the shard that owns each entry."""
    shard = np.arange(shapes.extend_rows) * shards // shapes.extend_rows
    return (shard * (shapes.slots // shards)).astype(np.int32)


def _identity(E: int, entries, runs) -> dict[str, np.ndarray]:
    out = {name: np.zeros(E, np.int32) for name in ("draw", "sample", "limit")}
    for e, slot in entries.items():
        run = runs[slot]
        out["draw"][e], out["sample"][e] = run.draw, run.sample
        out["limit"][e] = run.limit
    return out
