"""What one run came to: its peak, its collapse, its warnings.

The definitions were fixed before the first run:

- start: mean reward of the first 3 steps;
- peak: the highest mean of 10 steps, and the last of these steps (the first such
  window, if several are as high);
- collapsed: after the peak, rewards under half of it at 20 steps in a row, and the
  peak is at least twice the start. Step of collapse: the first of the 20 (a run that
  falls and later climbs above its old peak has recovered);
- halving: the first step after the peak at which the mean of the last 10 steps is
  under half of it;
- first warning: the first step at which `diagnosis.phases` says decay or collapse. It
  came in time if it came in the first half of the time from the peak to the halving;
- living: ended, and not collapsed. A living run with a warning is a false alarm.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from experiments.collapse.reading import METRICS, Series

PEAK_STEPS, COLLAPSED_STEPS, START_STEPS = 10, 20, 3
WARNINGS = ("decay", "collapse")

# (watch or None, record) -> (watch, phase with `name` and `evidence`)
Observe = Callable[[Any, Mapping[str, float]], tuple[Any, Any]]


# Up to `halving_step` a step is a position in `reward`, `[lines]`; steps in a row are
# measured ones: NaN are passed over.


def _measured(values: np.ndarray) -> np.ndarray:
    return np.flatnonzero(~np.isnan(values))


def trailing_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last `width` measured values, `[lines]`.

    NaN where nothing was measured and before there are `width` values.
    """
    means = np.full(len(values), np.nan)
    measured = _measured(values)
    if len(measured) >= width:
        windows = sliding_window_view(values[measured], width)
        # Rounded: ten times .6 has to be .6, or "under half" would depend on bits.
        means[measured[width - 1 :]] = windows.mean(axis=1).round(9)
    return means


def peak(reward: np.ndarray) -> tuple[int, float] | None:
    """Step and height of the peak; None for a run of fewer than 10 steps."""
    means = trailing_mean(reward, PEAK_STEPS)
    if np.isnan(means).all():
        return None
    step = int(np.nanargmax(means))
    return step, float(means[step])


def collapse_step(reward: np.ndarray) -> int | None:
    """Step of collapse, None for a run that has not collapsed."""
    top = peak(reward)
    measured = _measured(reward)
    if top is None:
        return None
    if top[1] < 2 * reward[measured[:START_STEPS]].mean().round(9):
        return None
    after = measured[measured > top[0]]
    low = reward[after] < top[1] / 2
    if len(low) < COLLAPSED_STEPS:
        return None
    fallen = sliding_window_view(low, COLLAPSED_STEPS).all(axis=1)
    return int(after[fallen.argmax()]) if fallen.any() else None


def halving_step(reward: np.ndarray) -> int | None:
    """Step of halving, None for a run whose mean reward stays above half its peak."""
    top = peak(reward)
    if top is None:
        return None
    low = np.flatnonzero(trailing_mean(reward, PEAK_STEPS) < top[1] / 2)
    low = low[low > top[0]]
    return int(low[0]) if len(low) else None


def _detector() -> Observe:
    from lld_jax.diagnosis import phases

    thresholds = phases.Thresholds()

    def observe(watch, record):
        watch = phases.start() if watch is None else watch
        return phases.observe(watch, record, thresholds)

    return observe


def phases_of(
    series: Series, observe: Observe | None = None
) -> list[tuple[int, str, str]]:
    """(step, phase, evidence) of each training step, as seen while the run goes on.

    Args:
      series: of one run. Its lines without a reward are no training steps.
      observe: takes the place of `lld_jax.diagnosis.phases`; its first watch is None.
    """
    observe, watch, seen = observe or _detector(), None, []
    for line in _measured(series["reward"]):
        record = {
            metric: float(series[column][line])
            for column, metric in METRICS.items()
            if not np.isnan(series[column][line])
        }
        step = int(series["step"][line])
        watch, phase = observe(watch, {"step": step} | record)
        seen.append((step, phase.name, phase.evidence))
    return seen


def warnings_of(
    series: Series, observe: Observe | None = None
) -> list[tuple[int, str, str]]:
    """Those of `phases_of` that are a warning; the first one is the first warning."""
    return [seen for seen in phases_of(series, observe) if seen[1] in WARNINGS]


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run came to. Steps as in its file; None is: did not happen (yet)."""

    setting: str
    seed: int
    steps: int  # trained so far
    ended: bool
    peak_step: int | None
    peak: float | None
    collapse_step: int | None
    halving_step: int | None
    warning_step: int | None
    evidence: str | None
    greedy: float | None  # exact match at the end
    sampled: float | None
    reward: float | None  # mean over its steps

    @property
    def living(self) -> bool:
        return self.ended and self.collapse_step is None

    @property
    def lead(self) -> str:
        """When the first warning came, in words."""
        if self.warning_step is None:
            return "no warning"
        if self.halving_step is None:
            return "nothing to warn of"
        if self.warning_step < self.peak_step:
            return "before the peak"
        if self.warning_step > self.halving_step:
            return "after the halving"
        middle = (self.peak_step + self.halving_step) / 2
        return "first half" if self.warning_step <= middle else "second half"


def judge(
    setting: str, seed: int, series: Series, observe: Observe | None = None
) -> Run:
    """The facts of a run. It has ended if its last line is a final evaluation."""
    reward = series["reward"]

    def step(line: int | None) -> int | None:
        return None if line is None else int(series["step"][line])

    top = peak(reward) or (None, None)
    warning, _, evidence = (*warnings_of(series, observe), (None, None, None))[0]
    ended = bool(
        len(reward) and np.isnan(reward[-1]) and not np.isnan(series["sampled"][-1])
    )
    return Run(
        setting=setting,
        seed=seed,
        steps=len(_measured(reward)),
        ended=ended,
        peak_step=step(top[0]),
        peak=top[1],
        collapse_step=step(collapse_step(reward)),
        halving_step=step(halving_step(reward)),
        warning_step=warning,
        evidence=evidence,
        greedy=_or_none(series["greedy"][-1]) if ended else None,
        sampled=_or_none(series["sampled"][-1]) if ended else None,
        reward=float(np.nanmean(reward)) if len(_measured(reward)) else None,
    )


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
