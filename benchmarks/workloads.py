"""Scripted rollouts: how many tokens each turn of each trajectory has.

Engines sample real tokens, but an action ends after the number of tokens that stands
here, so that all of them do equal work. Imports numpy and the standard library alone:
engines in other environments read it too.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

NAMES = ("A", "B", "C")
GROUP = 5  # samples of one prompt
LATENCY = 0.05  # seconds of a retrieval call in works B and C
_PROMPT, _OBSERVATION = 1, 2  # streams of random ids


@dataclass(frozen=True)
class Script:
    """One trajectory, as lengths.

    `draw` counts the groups and `sample` within one; `prompt` holds token ids, equal
    for all samples of a draw. `actions` and `observations` are numbers of tokens; an
    observation stands between every two actions.
    """

    draw: int
    sample: int
    prompt: list[int]
    actions: list[int]
    observations: list[int]

    @property
    def length(self) -> int:
        """Tokens of the whole trajectory, prompt included."""
        return len(self.prompt) + sum(self.actions) + sum(self.observations)


@dataclass(frozen=True)
class Work:
    """Trajectories to roll out; `latency` is seconds of a batched retrieval call."""

    name: str
    scripts: list[Script]
    latency: float


@cache
def real_lengths() -> tuple[tuple[int, ...], ...]:
    """Tokens of prompt, action, observation, action, ... of each recorded response."""
    text = Path(__file__).with_name("real_lengths.json").read_text("utf-8")
    rows = [row for rows in json.loads(text)["lengths"].values() for row in rows]
    return tuple(map(tuple, rows))


def _lengths(name: str, trajectories: int) -> Sequence[Sequence[int]]:
    """`[prompt, action, observation, action, ...]` of each trajectory.

    Fewer trajectories are the first ones of more.
    """
    rng = np.random.default_rng(0)
    if name == "A":
        return [[200, 64, 256, 64, 256, 64]] * trajectories
    if name == "B":
        drawn = rng.lognormal(np.log(48), 0.8, size=(trajectories, 3))
        actions = np.clip(np.rint(drawn), 1, 256).astype(int)
        return [[200, a, 256, b, 256, c] for a, b, c in actions.tolist()]
    rows = [row for row in real_lengths() if all(row)]
    if trajectories > len(rows):
        raise ValueError(f"trajectories={trajectories}; work C has {len(rows)} at most")
    return [rows[i] for i in rng.permutation(len(rows))[:trajectories]]


def make_work(name: str, *, vocab: int, trajectories: int = 64) -> Work:
    """One of the three works; prompts are random ids below `vocab`.

    A: prompt 200, three actions of 64, observations of 256 between them, retrieval
    takes no time. B: as A, but the actions are log-normal (median 48, sigma 0.8, from
    1 to 256) and retrieval takes `LATENCY`. C: as B, with the lengths of recorded
    responses; the prompt of a group is as long as its first one's.

    Raises:
      ValueError: no such work, or fewer than one trajectory, or more than C has.
    """
    if name not in NAMES:
        raise ValueError(f"work={name!r}; legal: {', '.join(NAMES)}")
    if trajectories < 1:
        raise ValueError(f"trajectories={trajectories}; legal: 1 or more")
    scripts: list[Script] = []
    for i, (prompt, *turns) in enumerate(_lengths(name, trajectories)):
        draw, sample = divmod(i, GROUP)
        if sample:
            ids = scripts[-1].prompt
        else:
            rng = np.random.default_rng((_PROMPT, draw))
            ids = rng.integers(vocab, size=prompt).tolist()
        scripts.append(Script(draw, sample, ids, turns[::2], turns[1::2]))
    return Work(name, scripts, 0.0 if name == "A" else LATENCY)


def observation_ids(script: Script, turn: int, vocab: int) -> list[int]:
    """The observation after action `turn` (from 0): the same ids in every engine."""
    rng = np.random.default_rng((_OBSERVATION, script.draw, script.sample, turn))
    return rng.integers(vocab, size=script.observations[turn]).tolist()


def save(work: Work, path: str | Path) -> None:
    """Writes the work as JSON."""
    Path(path).write_text(json.dumps(asdict(work)), encoding="utf-8")


def load(path: str | Path) -> Work:
    """What `save` wrote."""
    fields = json.loads(Path(path).read_text(encoding="utf-8"))
    return Work(**fields | {"scripts": [Script(**s) for s in fields["scripts"]]})
