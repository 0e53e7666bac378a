"""What a run does about a phase: say so, stop, raise lambda, or go back.

`Guard` is a value that a checkpoint keeps as JSON; together with the metrics written so
far it gives the same decisions after a kill.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lld_jax.diagnosis import phases
from lld_jax.diagnosis.phases import Phase, Thresholds, Watch

ACTIONS = ("none", "warn", "stop", "raise_lambda", "roll_back")
_ALARM = phases.PHASES.index("decay")
_LEAST_COEF, _MOST_COEF = 0.1, 10.0  # of lambda when it is raised
_FACTOR = 2.0  # lambda is multiplied, the learning rate divided by it


class Collapsing(RuntimeError):
    """`diagnostics.action` is 'stop' and the run decays; its state is saved."""


@dataclasses.dataclass(frozen=True)
class Guard:
    """The state of the watch over a run, and what it has changed so far."""

    coef: float  # lambda from here on
    lr_scale: float = 1.0
    since: int = 0  # the watch has seen the steps from here on
    healthy: int = 0  # finished steps when the run was last healthy or stagnating
    acted: int | None = None  # the step of the last action in the present alarm
    todo: str = "none"  # before the next step, one of ACTIONS
    notice: str = ""  # why, in words
    watch: Watch = dataclasses.field(default_factory=phases.start)


def to_json(guard: Guard) -> dict[str, Any]:
    """All but the watch, which the metrics bring back."""
    fields = dataclasses.asdict(guard)
    del fields["watch"]
    return fields


def from_json(
    saved: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    action: str,
    thresholds: Thresholds,
) -> Guard:
    """The guard that `to_json` wrote; `records` are the metrics of all steps so far.

    What was to be done is dropped if `action` is another one by now.
    """
    guard = Guard(**saved)
    watch = guard.watch
    for record in records:
        if record["step"] >= guard.since and "reward/mean" in record:
            watch, _ = phases.observe(watch, record, thresholds)
    todo = guard.todo if guard.todo == action else "none"
    return dataclasses.replace(guard, watch=watch, todo=todo)


def observe(
    guard: Guard,
    step: int,
    record: Mapping[str, Any],
    action: str,
    thresholds: Thresholds,
) -> tuple[Guard, Phase]:
    """Takes the metrics of `step`; returns the guard to go on with, and the phase.

    `action`, one of ACTIONS, becomes `todo` at the first step of an alarm (decay or
    collapse); all but a warning again after each further window of it. 'raise_lambda'
    is done with that, in `coef`; a caller that rolled back goes on with `rolled_back`.
    """
    watch, phase = phases.observe(guard.watch, record, thresholds)
    guard = dataclasses.replace(guard, watch=watch, todo="none", notice="")
    if phase.level < _ALARM:
        return dataclasses.replace(guard, healthy=step + 1, acted=None), phase
    again = guard.acted is not None and (
        action == "warn" or step < guard.acted + thresholds.window
    )
    if again or action == "none":
        return guard, phase
    coef = guard.coef
    if action == "raise_lambda":
        coef = min(max(coef, _LEAST_COEF) * _FACTOR, _MOST_COEF)
    done = {
        "warn": "",
        "stop": "; stopping",
        "raise_lambda": f"; llds.coef is {coef:g} from here on",
        "roll_back": "; going back to earlier weights with half the learning rate",
    }
    notice = f"step {step}: {phase.name}: {phase.evidence}{done[action]}"
    return dataclasses.replace(
        guard, coef=coef, acted=step, todo=action, notice=notice
    ), phase


def rolled_back(guard: Guard, step: int) -> Guard:
    """After the weights of an earlier step were put back before `step`.

    The learning rate is halved, and the watch starts anew.
    """
    return Guard(guard.coef, guard.lr_scale / _FACTOR, since=step, healthy=step)


def target(guard: Guard, saved: Sequence[int]) -> int:
    """Which of the checkpoints `saved` to go back to: the last that was healthy.

    If all are later, the earliest. Raises ValueError without any.
    """
    if not saved:
        raise ValueError("there is no checkpoint to go back to: checkpoint.every")
    return max((s for s in saved if s <= guard.healthy), default=min(saved))
