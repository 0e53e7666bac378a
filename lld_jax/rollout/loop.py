"""The host loop of a rollout: slots, turns and an environment.

A trajectory takes a slot, alternates decoding with replies of the environment and
frees the slot when it ends; the next one in the queue takes it at once. The host reads
what one decode call sampled while the device runs another, a short one; replies come
from threads, and whoever waits for one holds up nobody else. A group's prompt is
computed once and copied. Every sampled token is a function of (weights, seed, draw,
sample, position): slots, order and delays change nothing.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lld_jax.protocol import ask
from lld_jax.protocol.environment import Environment, Turn
from lld_jax.protocol.trajectory import (
    Trajectory,
    append_action,
    append_observation,
    new_trajectory,
)
from lld_jax.rollout import schedule
from lld_jax.rollout.counters import statistics
from lld_jax.rollout.decoding import Programs
from lld_jax.rollout.slots import Call, Limits, Run, Sampling, Slot, Task

_COVER = 1  # decode steps that run while the host reads those before them
_GRACE = 0.005  # seconds that a reply may take and still join the next call
_PULSE = 0.1  # seconds between calls of on_progress while all wait for replies


def rollout(
    programs: Programs,
    params: Any,
    environment: Environment,
    tasks: Sequence[Task],
    limits: Limits,
    sampling: Sampling,
    *,
    seed: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> tuple[list[Trajectory], dict[str, float]]:
    """Runs every task to its end.

    Args:
      params: in the rollout layout and dtype.
      on_progress: called with the number of trajectories that just ended, also with
        0 and while all wait for replies: what it raises ends the rollout.

    Returns:
      trajectories in the order of `tasks`, unscored, and counters of the run: tokens
      `decoded` and `kept`, decode `steps` and their rows `row_steps`, `occupancy` (the
      share of slots that hold an unfinished trajectory, while others wait for a slot:
      for `queued_steps`),
      `row_use` (the share of the slots that a decode step moves on), and the seconds of
      the run by what the
      device did: `seconds_extend`, `seconds_decode`, nothing for want of work
      (`seconds_host`) or of a reply (`seconds_wait`).

    Raises:
      ValueError: a prompt or an observation does not fit `rollout.max_tokens`.
      whatever the environment raises, RetrievalError left out.
    """
    run = Run(
        programs=programs,
        params=params,
        limits=limits,
        order={
            "temperature": np.float32(sampling.temperature),
            "top_p": np.float32(sampling.top_p),
            "top_k": np.int32(sampling.top_k),
            "seed": np.uint32(seed),
        },
        asked=ask.Asked(environment, limits.timeout),
        queue=deque(enumerate(tasks)),
        slots=programs.init(),
        done=[None] * len(tasks),
    )
    # Every width is compiled by now, whenever it comes to be used.
    idle = run.order | {"steps": np.int32(0), "wake": np.int32(1)}
    for width in (programs.shapes.slots, *programs.shapes.widths):
        run.slots, _ = programs.decode(params, run.slots, idle, width)
    while run.queue or run.live:
        on_progress(_take_replies(run))
        _fork(run, _fill(run))
        _extend(run)
        _decode(run)
        _read(run)
    trajectories = [slot.traj for slot in run.done]
    return trajectories, statistics(run)


def _take_replies(run: Run) -> int:
    """Observations to append, and ends, whose number is returned."""
    now = time.perf_counter()
    if run.calls or run.decoding() or any(s.append for s in run.live.values()):
        decoding = sum(slot.since is not None for slot in run.live.values())

        def wait(got: int) -> bool:
            """For replies that are nearly there: the device works, or has little to do.

            Slots that go on together fill the calls; stragglers would not.
            """
            busy = bool(run.calls) and not run.calls[-1].is_over()
            soon = time.perf_counter() - now < _GRACE
            return soon and (busy or len(run.asking) - got > decoding)

        came = ask.replies(run.asked, wait)
    else:
        run.stats["seconds_host"] += now - run.clock
        end = now + _PULSE
        came = ask.replies(run.asked, lambda got: not got and time.perf_counter() < end)
        run.clock = time.perf_counter()
        run.stats["seconds_wait"] += run.clock - now
    ended = 0
    for name, reply in came:
        at = run.asking.pop(name)
        slot = run.live[at]
        slot.traj.counters.update(reply.counters)
        slot.traj.searches.extend(reply.searches)
        if reply.ids is None:
            slot.traj.reason = reply.reason
            run.done[slot.index] = run.live.pop(at)
            ended += 1
        else:
            append_observation(slot.traj, reply.ids)
            _check_fits(run, slot.traj, "an observation", len(reply.ids))
            slot.append, slot.ready = list(reply.ids), run.steps
    return ended


def _fill(run: Run) -> dict[int, int]:
    """Trajectories take the free slots.

    Returns `{slot: source}`, the slots that copy a prompt which is there already. The
    others read theirs, or wait for a slot of their group that does.
    """
    size = run.programs.shapes.slots // run.shards
    forks: dict[int, int] = {}
    for at in range(run.programs.shapes.slots):
        if at in run.live or not run.queue:
            continue
        index, task = run.queue.popleft()
        if task.question not in run.prompts:
            prompt = run.asked.environment.start(task.question)
            run.prompts[task.question] = list(prompt)
        traj = new_trajectory(
            task.draw,
            task.sample,
            task.question,
            task.golden_answers,
            run.prompts[task.question],
        )
        _check_fits(run, traj, "a prompt", traj.prompt_length)
        slot = Slot(index, traj, list(traj.ids), ready=run.steps, taken=run.decodes)
        shard = range(at // size * size, at // size * size + size)
        same = (x for x in (at, *shard) if run.holds.get(x) == task.draw)
        source = next(same, None)
        if source is None:
            reads = (x for x in shard if x not in forks and _reads(run, x, task.draw))
            slot.leader = next(reads, None)
        else:
            forks[at] = source
        if source != at:
            run.holds.pop(at, None)
        run.live[at] = slot
    return forks


def _reads(run: Run, at: int, draw: int) -> bool:
    """Whether the slot is about to read the whole prompt of a draw."""
    slot = run.live.get(at)
    if slot is None or slot.traj.draw != draw or slot.traj.spans:
        return False
    return slot.leader is None and bool(slot.append)


def _fork(run: Run, forks: dict[int, int]) -> None:
    """Copies prompts, `{slot: source}`; the slots decode from then on."""
    shapes = run.programs.shapes
    while forks:
        entries = schedule.place(shapes, run.shards, forks)
        runs = {at: _run_of(run, at) for at in entries.values()}
        request = schedule.fork_request(shapes, run.shards, entries, forks, runs)
        run.slots, over = run.programs.fork(run.slots, request)
        _dispatched(run, "extend", over)
        for at in entries.values():
            slot = run.live[at]
            slot.append, slot.leader, slot.since = [], None, run.decodes
            slot.fresh = False
            run.holds[at] = slot.traj.draw
        forks = {at: x for at, x in forks.items() if at not in runs}


def _extend(run: Run) -> None:
    """Gives prompts and observations to the device, piece by piece.

    A call costs the same for one slot as for all of its entries, and a slot that waits
    for a fuller one sits out decode steps. It is made when it is full, when nobody
    decodes, or once the steps sat out cost more than the empty entries (a row of a
    decode step costs about as much as four tokens of an extension).
    """
    shapes = run.programs.shapes
    E, N = shapes.extend_rows, shapes.extend_tokens
    while entries := schedule.place(shapes, run.shards, _waiting(run)):
        sat_out = sum(run.steps - run.live[at].ready for at in entries.values())
        if run.decoding() and sat_out < (E - len(entries)) * N // 4:
            return
        pieces = {
            at: schedule.Piece(
                ids=slot.append[:N],
                fresh=slot.fresh,
                last=len(slot.append) <= N,
                prompt=not slot.traj.spans,
            )
            for at, slot in ((at, run.live[at]) for at in entries.values())
        }
        runs = {at: _run_of(run, at) for at in pieces}
        request = schedule.extend_request(shapes, run.shards, entries, pieces, runs)
        run.slots, over = run.programs.extend(run.params, run.slots, request)
        _dispatched(run, "extend", over)
        run.stats["extended"] += sum(len(piece.ids) for piece in pieces.values())
        run.stats["extend_calls"] += 1
        for at, piece in pieces.items():
            slot = run.live[at]
            slot.append, slot.fresh = slot.append[N:], False
            if piece.last:
                slot.since = run.decodes
            if piece.last and piece.prompt:
                run.holds[at] = slot.traj.draw
                _fork(run, {x: at for x, s in run.live.items() if s.leader == at})


def _waiting(run: Run) -> list[int]:
    """Slots with something to append, the one that has waited longest first."""
    waiting = [at for at, s in run.live.items() if s.append and s.leader is None]
    return sorted(waiting, key=lambda at: (run.live[at].ready, at))


def _decode(run: Run) -> None:
    """A decode call, and behind it a short one that runs while the host reads it."""
    if not run.decoding():
        return
    shapes = run.programs.shapes
    wake = max(1, shapes.extend_rows - len(_waiting(run)))
    for steps, stops in ((shapes.steps, wake), (_COVER, shapes.slots)):
        order = run.order | {"steps": np.int32(steps), "wake": np.int32(stops)}
        width = _width(run)
        run.slots, report = run.programs.decode(run.params, run.slots, order, width)
        _dispatched(run, "decode", report, width)
        run.decodes += 1


def _width(run: Run) -> int:
    """Rows of a decode step that have room for the slots that may run."""
    R = run.programs.shapes.slots
    counts = Counter(
        at * run.shards // R for at, slot in run.live.items() if slot.since is not None
    )
    needed = max(counts.values(), default=1) * run.shards
    return min(w for w in (R, *run.programs.shapes.widths) if w >= needed)


def _read(run: Run) -> None:
    """Reads the calls that were made, the last one left out if slots still decode."""
    keep = 1 if run.decoding() else 0
    while len(run.calls) > keep:
        call = run.calls.popleft()
        jax.block_until_ready(call.handle)
        now = time.perf_counter()
        run.stats[f"seconds_{call.kind}"] += now - run.clock
        run.clock = now
        if call.kind == "decode":
            report = jax.device_get(call.handle)
            ask.ask(run.asked, _take_sampled(run, call, report))
            run.steps += int(report["steps"])
            run.stats["row_steps"] += int(report["steps"]) * call.width


def _take_sampled(
    run: Run, call: Call, report: dict[str, np.ndarray]
) -> list[tuple[tuple[int, int], Turn]]:
    """Appends what a call sampled, and returns the turns of the actions that ended."""
    if not call.queued and run.queued_steps is None:
        run.queued_steps = run.steps
    turns = []
    for at, slot in run.live.items():
        if slot.began is None and slot.taken <= call.number:
            slot.began = run.steps
        if slot.since is None or slot.since > call.number:
            continue
        n, traj = int(report["n"][at]), slot.traj
        slot.ids += report["ids"][at, :n].tolist()
        slot.logps += report["logps"][at, :n].tolist()
        run.stats["decoded"] += n
        if not report["stopped"][at]:
            continue
        append_action(traj, slot.ids, slot.logps)
        number = sum(span.kind == "action" for span in traj.spans) - 1
        turn = Turn(
            question=traj.question,
            action_ids=slot.ids,
            turn=number,
            last=number >= run.limits.max_turns,
            room=run.programs.shapes.tokens - len(traj.ids) - run.limits.max_action,
            cut=bool(report["cut"][at]),
        )
        slot.ids, slot.logps, slot.since = [], [], None
        slot.ended = run.steps + n
        run.asking[slot.index, number] = at
        turns.append(((slot.index, number), turn))
    return turns


def _dispatched(run: Run, kind: str, handle: Any, width: int = 0) -> None:
    """Notes a call; the device had nothing to do if its last one is over by now."""
    now = time.perf_counter()
    if not run.calls or run.calls[-1].is_over():
        run.stats["seconds_host"] += now - run.clock
        run.clock = now
    run.calls.append(Call(kind, handle, run.decodes, bool(run.queue), width))


def _run_of(run: Run, at: int) -> schedule.Run:
    traj, most = run.live[at].traj, run.limits.max_action
    if run.limits.budget:
        most = min(most, run.limits.budget(traj))
    return schedule.Run(traj.draw, traj.sample, len(traj.ids) + most)


def _check_fits(run: Run, traj: Trajectory, what: str, tokens: int) -> None:
    most, action = run.programs.shapes.tokens, run.limits.max_action
    if not tokens or len(traj.ids) + action > most:
        raise ValueError(
            f"{what} of {tokens} tokens in a trajectory of {len(traj.ids)}; legal are "
            f"1 or more, and an action of rollout.max_action={action} must fit behind "
            f"it into rollout.max_tokens={most}"
        )
