"""What the runs in raw/ came to: which collapsed, when, and which were warned in time.

    python -m experiments.collapse.analyse --json=experiments/collapse/summary.json

prints two Markdown tables, a line a setting: the runs, and their difference from plain
GRPO. `judging.py` has the definitions. A run that goes on still counts once it has
collapsed; before, it is only listed.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from experiments.collapse.config import SETTINGS
from experiments.collapse.judging import Run, judge
from experiments.collapse.reading import RAW, read_runs

BASE = "grpo"
# Compared on equal seeds: field of `Run` -> heading.
PAIRED = {"reward": "mean reward of all steps", "sampled": "sampled exact match"}


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
