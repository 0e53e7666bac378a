"""What a rollout is asked for, and the host's side of its slots while it runs."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax

from lld_jax.protocol import ask
from lld_jax.protocol.trajectory import Trajectory
from lld_jax.rollout.decoding import Programs


@dataclass(frozen=True)
class Task:
    """One trajectory to make: a sample of a draw of a question."""

    draw: int
    sample: int
    question: str
    golden_answers: tuple[str, ...]


@dataclass(frozen=True)
class Limits:
    """`max_turns` search turns (one more generation follows), tokens per action.

    A turn without a reply after `timeout` seconds ends its trajectory. `budget` may
    give the next action of a trajectory fewer tokens than `max_action`.
    """

    max_turns: int
    max_action: int
    timeout: float = 60.0
    budget: Callable[[Trajectory], int] | None = None


@dataclass(frozen=True)
class Sampling:
    """Temperature (0 is greedy); `top_p` 1 and `top_k` 0 leave nothing out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def tasks_of(draws: Iterable[tuple[int, Any]], group: int) -> list[Task]:
    """`group` samples of each `(draw, question)`; a question as in `questions`."""
    return [
        Task(draw, sample, q.question, q.golden_answers)
        for draw, q in draws
        for sample in range(group)
    ]


@dataclass
class Slot:
    """A trajectory in a slot: it takes `append`, then decodes, then waits."""

    index: int  # of its task
    traj: Trajectory
    append: list[int]  # what the device has not been given yet
    ready: int  # decode steps that were over when `append` came
    taken: int  # the first decode call after it took the slot
    leader: int | None = None  # the slot that reads the prompt it will copy
    fresh: bool = True  # the device still holds what was in the slot before
    since: int | None = None  # the first decode call that it runs in
    ids: list[int] = field(default_factory=list)  # of its action so far
    logps: list[float] = field(default_factory=list)
    began: int | None = None  # decode steps that were over when it took the slot
    ended: int = 0  # and when its last action stopped


@dataclass(frozen=True)
class Call:
    """A call under way; `handle` is on the device once it has run."""

    kind: str
    handle: Any
    number: int  # of the next decode call, or of this one
    queued: bool  # trajectories waited for a slot
    width: int = 0  # rows of each of its decode steps

    def is_over(self) -> bool:
        return all(x.is_ready() for x in jax.tree.leaves(self.handle))


@dataclass
class Run:
    """A rollout under way: the host's side of the slots, and what it waits for."""

    programs: Programs
    params: Any
    limits: Limits
    order: dict[str, Any]  # the part of a decode call's order that does not change
    asked: ask.Asked
    queue: deque[tuple[int, Task]]
    slots: Any  # on the device
    done: list[Slot | None]
    live: dict[int, Slot] = field(default_factory=dict)
    holds: dict[int, int] = field(default_factory=dict)  # slot: draw of a whole prompt
    asking: dict[tuple[int, int], int] = field(default_factory=dict)  # turn: slot
    prompts: dict[str, list[int]] = field(default_factory=dict)
    calls: deque[Call] = field(default_factory=deque)
    decodes: int = 0  # calls that were made
    steps: int = 0  # decode steps that were read
    queued_steps: int | None = None  # those that had somebody in the queue
    stats: Counter[str] = field(default_factory=Counter)
    clock: float = field(default_factory=time.perf_counter)  # accounted until here

    @property
    def shards(self) -> int:
        return self.programs.layout.size(self.programs.layout.batch)

    def decoding(self) -> bool:
        return any(slot.since is not None for slot in self.live.values())
