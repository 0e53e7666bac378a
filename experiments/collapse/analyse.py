"""What the runs in raw/ came to: which collapsed, when, and which were warned in time.

    python -m experiments.collapse.analyse --json=experiments/collapse/summary.json

prints two Markdown tables, a line a setting: the runs, and their difference from plain
GRPO. The definitions were fixed before the first run:

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

A run that goes on still counts once it has collapsed; before, it is only listed.
"""

import argparse
import csv
import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy import stats

from experiments.collapse import columns
from experiments.collapse.config import SETTINGS

RAW = Path(__file__).with_name("raw")
BASE = "grpo"
EVALUATED = ("greedy", "sampled")  # at some steps, and on the last line
# What a training step has measured itself: column -> name in metrics.jsonl.
METRICS = {k: v for k, v in columns.COLUMNS.items() if k not in EVALUATED}
COLUMNS = ("step", *METRICS, *EVALUATED)  # that a raw file has to have
PEAK_STEPS, COLLAPSED_STEPS, START_STEPS = 10, 20, 3
WARNINGS = ("decay", "collapse")
# Compared on equal seeds: field of `Run` -> heading.
PAIRED = {"reward": "mean reward of all steps", "sampled": "sampled exact match"}

Series = Mapping[str, np.ndarray]  # of a run: column -> one number a line, or NaN
# (watch or None, record) -> (watch, phase with `name` and `evidence`)
Observe = Callable[[Any, Mapping[str, float]], tuple[Any, Any]]


# Reading


def read_runs(folder: str | Path) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """All `<setting>-<seed>.csv` of a folder: (setting, seed) -> column -> `[lines]`.

    An empty cell (not measured) is NaN. Raises ValueError, with the file and the line
    or column, if one is not as it should be.
    """
    runs = {}
    for path in sorted(Path(folder).glob("*.csv")):
        setting, _, seed = path.stem.rpartition("-")
        if not (setting and seed.isdecimal()):
            raise ValueError(
                f"{path}: the name is not <setting>-<seed>.csv with a whole number"
            )
        runs[setting, int(seed)] = _read_run(path)
    if not runs:
        raise ValueError(f"{folder}: no <setting>-<seed>.csv in this folder")
    return runs


def _read_run(path: Path) -> dict[str, np.ndarray]:
    lines = path.read_text("utf-8").splitlines()
    header, *rows = list(csv.reader(lines)) or [[]]
    if missing := [column for column in COLUMNS if column not in header]:
        raise ValueError(f"{path}: no column {', '.join(missing)} in the header")
    for line, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ValueError(
                f"{path}, line {line}: {len(row)} cells; the header has "
                f"{len(header)}, from {header[0]} to {header[-1]}"
            )
    cells = zip(*rows, strict=True) if rows else [()] * len(header)
    series = {
        column: np.array([_number(path, *item, column) for item in enumerate(mine, 2)])
        for column, mine in zip(header, cells, strict=True)
    }
    steps = series["step"]
    for line, step in enumerate(steps, 2):
        if step != int(step) or (line > 2 and step <= steps[line - 3]):
            raise ValueError(
                f"{path}, line {line}, column step: {step:g} is not a whole number "
                "above that of the line before"
            )
    return series


def _number(path: Path, line: int, cell: str, column: str) -> float:
    try:
        value = float(cell) if cell.strip() else np.nan
    except ValueError:
        value = None
    if value is None or (column == "step" and not np.isfinite(value)):
        raise ValueError(
            f"{path}, line {line}, column {column}: {cell!r} is not a number"
        )
    return value


# Definitions. A step is a position in `reward`, `[lines]`; steps in a row are
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


# Runs and settings


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


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number from `n` runs with its 95 % interval; None where n is too small."""

    value: float | None
    low: float | None
    high: float | None
    n: int


def share(count: int, n: int) -> Estimate:
    """`count` of `n` with Wilson's interval."""
    if n == 0:
        return Estimate(None, None, None, 0)
    interval = stats.binomtest(count, n).proportion_ci(method="wilson")
    return Estimate(count / n, float(interval.low), float(interval.high), n)


def mean(values: Sequence[float]) -> Estimate:
    """Mean with the percentile bootstrap's interval, which is narrow for few runs."""
    if len(values) < 2:
        value = float(values[0]) if len(values) else None
        return Estimate(value, None, None, len(values))
    rng = np.random.default_rng(0)
    interval = stats.bootstrap(
        (np.asarray(values),), np.mean, method="percentile", rng=rng
    ).confidence_interval
    low, high = float(interval.low), float(interval.high)
    return Estimate(float(np.mean(values)), low, high, len(values))


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting. Medians and leads are over the collapsed runs."""

    setting: str
    going: int  # runs that neither ended nor collapsed; in none of the other numbers
    collapsed: Estimate
    greedy: Estimate
    sampled: Estimate
    peak: float | None  # mean over runs
    collapse_step: float | None
    warning_step: float | None
    leads: dict[str, int]  # `Run.lead` -> collapsed runs
    false_alarms: int
    living: int


def row_of(setting: str, runs: Sequence[Run]) -> Row:
    """The table's row of one setting, from its runs."""
    runs = [run for run in runs if run.setting == setting]
    known = [run for run in runs if run.ended or run.collapse_step is not None]
    fallen = [run for run in known if run.collapse_step is not None]
    living = [run for run in known if run.living]
    warned = [run.warning_step for run in fallen if run.warning_step is not None]
    leads = [run.lead for run in fallen]
    return Row(
        setting=setting,
        going=len(runs) - len(known),
        collapsed=share(len(fallen), len(known)),
        greedy=mean(_present(run.greedy for run in known)),
        sampled=mean(_present(run.sampled for run in known)),
        peak=mean(_present(run.peak for run in known)).value,
        collapse_step=_median([run.collapse_step for run in fallen]),
        warning_step=_median(warned),
        leads={lead: leads.count(lead) for lead in sorted(set(leads))},
        false_alarms=sum(run.warning_step is not None for run in living),
        living=len(living),
    )


def _present(values) -> list[float]:
    return [value for value in values if value is not None]


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def settings_of(runs: Sequence[Run]) -> list[str]:
    """Names of the settings, `grpo` and `llds` first."""
    names = {run.setting for run in runs}
    first = [name for name in (BASE, "llds") if name in names]
    return first + sorted(names - set(first))


def paired(
    runs: Sequence[Run], setting: str, what: str = "sampled", base: str = BASE
) -> Estimate:
    """`what` (of `Run`) less that of `base`: mean over the ended runs of both."""
    ends = {(run.setting, run.seed): getattr(run, what) for run in runs if run.ended}
    seeds = sorted(seed for name, seed in ends if name == setting)
    return mean([ends[setting, s] - ends[base, s] for s in seeds if (base, s) in ends])


# Output


def _decimal(value: float | None) -> str:
    if value is None:
        return "–"
    text = f"{value:.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def _with_interval(estimate: Estimate) -> str:
    if estimate.low is None:
        return _decimal(estimate.value)
    low, high = _decimal(estimate.low), _decimal(estimate.high)
    return f"{_decimal(estimate.value)} ({low} to {high})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _alarms(row: Row) -> str:
    if "diagnostics.action" in SETTINGS.get(row.setting, ()):
        return "acts on them"  # who knows what would have been
    return f"{row.false_alarms}/{row.living}" if row.living else "–"


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line a setting."""
    head = (
        "setting",
        "collapsed",
        "95 % interval",
        "greedy exact match",
        "sampled exact match",
        "peak reward",
        "step of collapse",
        "step of first warning",
        "warned in time",
        "false alarms",
    )
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        fallen = sum(row.leads.values())
        counts = f"{fallen}/{row.collapsed.n}"
        in_time = f"{row.leads.get('first half', 0)}/{fallen}" if fallen else "–"
        if early := row.leads.get("before the peak"):
            in_time += f", {early} before the peak"
        low, high = _decimal(row.collapsed.low), _decimal(row.collapsed.high)
        cells = (
            row.setting,
            counts + (f", {row.going} going" if row.going else ""),
            f"{low} to {high}" if row.collapsed.n else "–",
            _with_interval(row.greedy),
            _with_interval(row.sampled),
            _decimal(row.peak),
            "–" if row.collapse_step is None else f"{row.collapse_step:g}",
            "–" if row.warning_step is None else f"{row.warning_step:g}",
            in_time,
            _alarms(row),
        )
        lines.append(_line(cells))
    return "\n".join(lines)


def paired_table(differences: Mapping[str, Mapping[str, Estimate]]) -> str:
    """Markdown, a line a setting: what it has more than `grpo` on equal seeds.

    `differences`: setting -> each of PAIRED -> its mean difference.
    """
    head = ("setting", "seeds", *(f"{x}, less {BASE}" for x in PAIRED.values()))
    lines = [_line(head), _line(["---"] * len(head))]
    for setting, found in differences.items():
        cells = [_with_interval(found[what]) for what in PAIRED]
        lines.append(_line((setting, str(found["sampled"].n), *cells)))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--raw", type=Path, default=RAW)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        found = read_runs(args.raw)
    except ValueError as error:
        parser.error(f"--raw: {error}")
    runs = [judge(*key, series) for key, series in found.items()]
    names = settings_of(runs)
    rows = [row_of(name, runs) for name in names]
    differences = {
        name: {what: paired(runs, name, what) for what in PAIRED}
        for name in names
        if name != BASE
    }
    print(table(rows), paired_table(differences), sep="\n\n")
    if args.json:
        summary = {
            "settings": [dataclasses.asdict(row) for row in rows],
            "paired": {
                name: {what: dataclasses.asdict(x) for what, x in found.items()}
                for name, found in differences.items()
            },
            "runs": [dataclasses.asdict(r) | {"lead": r.lead} for r in runs],
        }
        args.json.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
