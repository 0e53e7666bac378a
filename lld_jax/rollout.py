"""The host loop of a rollout: slots, turns and an environment.

A trajectory takes a slot, alternates decoding with replies of the environment and
frees the slot when it ends; the next one in the queue takes it at once. A group's
prompt is computed once and copied to its other samples. Every sampled token is a
function of (weights, seed, draw, sample, position): slots and order change nothing.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from lld_jax.decoding import Programs
from lld_jax.search import (
    Reply,
    Trajectory,
    Turn,
    append_action,
    append_observation,
    new_trajectory,
)


class Environment(Protocol):
    """What trajectories talk to; `search.SearchEnvironment` is one."""

    def start(self, question: str) -> list[int]: ...

    def step(self, turns: Sequence[Turn]) -> list[Reply]: ...


@dataclass(frozen=True)
class Task:
    """One trajectory to make: a sample of a draw of a question."""

    draw: int
    sample: int
    question: str
    golden_answers: tuple[str, ...]


@dataclass(frozen=True)
class _Append:
    """Tokens that a slot takes before it decodes again; `fresh` starts it over."""

    slot: int
    ids: list[int]
    fresh: bool


@dataclass(frozen=True)
class Limits:
    """`max_turns` search turns (one more generation follows), tokens per action."""

    max_turns: int
    max_action: int


def tasks_of(draws: Iterable[tuple[int, Any]], group: int) -> list[Task]:
    """`group` samples of each `(draw, question)`; a question as in `questions`."""
    return [
        Task(draw, sample, q.question, q.golden_answers)
        for draw, q in draws
        for sample in range(group)
    ]


def rollout(
    programs: Programs,
    params: Any,
    environment: Environment,
    tasks: Sequence[Task],
    limits: Limits,
    *,
    seed: int,
    temperature: float,
    on_progress: Callable[[int], None] = lambda done: None,
) -> tuple[list[Trajectory], dict[str, float]]:
    """Runs every task to its end.

    Args:
      params: in the rollout layout and dtype.
      temperature: 0 is greedy.
      on_progress: called with the number of trajectories that just ended.

    Returns:
      trajectories in the order of `tasks`, unscored, and counters of the run: seconds
      by phase, tokens decoded and kept, decode steps, occupancy (the share of slots
      that a decode step moves on).
    """
    shapes, S = programs.shapes, programs.shapes.tokens
    slots = programs.init()
    queue = deque(enumerate(tasks))
    live: dict[int, tuple[int, Trajectory]] = {}
    done: dict[int, Trajectory] = {}
    prompts: dict[str, list[int]] = {}
    stats: Counter[str] = Counter()
    appends: list[_Append] = []
    held = np.zeros(shapes.slots, int)  # tokens of each slot that are counted
    while queue or live:
        began = time.perf_counter()
        leaders: dict[tuple[int, int], int] = {}  # of (draw, shard)
        forks: list[tuple[int, int]] = []
        free = (slot for slot in range(shapes.slots) if slot not in live)
        for slot in free:
            if not queue:
                break
            index, task = queue.popleft()
            if task.question not in prompts:
                prompts[task.question] = environment.start(task.question)
            prompt = prompts[task.question]
            if len(prompt) + limits.max_action > S:
                raise ValueError(
                    f"rollout.max_tokens={S} cannot hold a prompt of {len(prompt)} "
                    f"tokens and an action of rollout.max_action={limits.max_action}"
                )
            traj = new_trajectory(
                task.draw, task.sample, task.question, task.golden_answers, prompt
            )
            live[slot] = index, traj
            shard = slot * _shards(programs) // shapes.slots
            leader = leaders.setdefault((task.draw, shard), slot)
            if leader == slot:
                appends.append(_Append(slot, prompt, True))
            else:
                forks.append((leader, slot))
        slots = _extend(programs, params, slots, appends, live, limits)
        slots = _fork(programs, slots, forks, live)
        for slot, (_, traj) in live.items():
            held[slot] = max(held[slot], len(traj.ids))
        slots = programs.decode(
            params,
            slots,
            limits.max_action,
            min(shapes.extend_rows, len(live)),
            np.float32(temperature),
            np.uint32(seed),
        )
        read = ("running", "length", "ids", "logps")
        running, length, ids, logps = jax.device_get([slots[name] for name in read])
        grown = [int(length[slot] - held[slot]) for slot in live]
        held = np.array(length)
        stats["decoded"] += sum(grown)
        stats["steps"] += max(grown)
        stats["seconds_device"] += time.perf_counter() - began

        began = time.perf_counter()
        stopped = [slot for slot in live if not running[slot]]
        turns = []
        for slot in stopped:
            traj = live[slot][1]
            new = slice(len(traj.ids), int(length[slot]))
            append_action(traj, ids[slot, new].tolist(), logps[slot, new].tolist())
            turn = sum(span.kind == "action" for span in traj.spans) - 1
            turns.append(
                Turn(
                    question=traj.question,
                    action_ids=traj.ids[new],
                    turn=turn,
                    last=turn >= limits.max_turns,
                    room=S - len(traj.ids) - limits.max_action,
                )
            )
        appends = []
        for slot, reply in zip(stopped, environment.step(turns), strict=True):
            index, traj = live[slot]
            traj.counters.update(reply.counters)
            traj.searches.extend(reply.searches)
            if reply.ids is None:
                traj.reason = reply.reason
                done[index] = live.pop(slot)[1]
                held[slot] = 0
            else:
                append_observation(traj, reply.ids)
                appends.append(_Append(slot, reply.ids, False))
        on_progress(len(stopped) - len(appends))
        stats["seconds_environment"] += time.perf_counter() - began
    stats["kept"] = sum(sum(traj.mask) for traj in done.values())
    stats["occupancy"] = stats["decoded"] / max(1, stats["steps"] * shapes.slots)
    return [done[i] for i in range(len(tasks))], dict(stats)


def _shards(programs: Programs) -> int:
    return programs.layout.size(programs.layout.batch)


def _by_shard(programs: Programs, items: list, slot_of: Callable) -> Iterator[list]:
    """Batches of (position in the call, item): each shard has its own positions."""
    shapes, shards = programs.shapes, _shards(programs)
    room = shapes.extend_rows // shards
    waiting = [deque() for _ in range(shards)]
    for item in items:
        waiting[slot_of(item) * shards // shapes.slots].append(item)
    while any(waiting):
        yield [
            (shard * room + i, queue.popleft())
            for shard, queue in enumerate(waiting)
            for i in range(min(room, len(queue)))
        ]


def _extend(programs, params, slots, appends, live, limits):
    """Appends prompts and observations, long ones in pieces; then the slots run."""
    shapes = programs.shapes
    E, N = shapes.extend_rows, shapes.extend_tokens
    first_slot = np.arange(E) * shapes.slots // E  # of the shard that owns an entry
    shard_size = shapes.slots // _shards(programs)
    first_slot -= first_slot % shard_size
    start = 0
    while appends:
        for batch in _by_shard(programs, appends, lambda a: a.slot):
            request = {
                "rows": first_slot.astype(np.int32),
                "ids": np.zeros((E, N), np.int32),
                "n": np.zeros(E, np.int32),
                "fresh": np.zeros(E, bool),
                "run": np.zeros(E, bool),
                "draw": np.zeros(E, np.int32),
                "sample": np.zeros(E, np.int32),
                "limit": np.zeros(E, np.int32),
            }
            for e, append in batch:
                traj, piece = live[append.slot][1], append.ids[start : start + N]
                request["rows"][e] = append.slot
                request["ids"][e, : len(piece)] = piece
                request["n"][e] = len(piece)
                request["fresh"][e] = append.fresh and start == 0
                request["run"][e] = start + N >= len(append.ids)
                request["draw"][e], request["sample"][e] = traj.draw, traj.sample
                request["limit"][e] = len(traj.ids) + limits.max_action
            slots = programs.extend(params, slots, request)
        start += N
        appends = [a for a in appends if len(a.ids) > start]
    return slots


def _fork(programs, slots, forks, live):
    """Copies a group's prompt from its first slot to the others of the shard."""
    if not forks:
        return slots
    # Entry r copies into slot r, which keeps every entry on its own shard.
    R = programs.shapes.slots
    src, dst = np.full(R, R, np.int32), np.full(R, R, np.int32)
    sample = np.zeros(R, np.int32)
    for leader, slot in forks:
        src[slot], dst[slot], sample[slot] = leader, slot, live[slot][1].sample
    return programs.fork(slots, src, dst, sample)
