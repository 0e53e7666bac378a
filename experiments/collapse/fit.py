"""Fits the detector's thresholds on some seeds, tests them on others.

    python -m experiments.collapse.fit [--settings=grpo,...] [--fit=0,1] [--raw=DIR]
        [--json=FILE]

A set of thresholds is better if more collapsed runs are warned in the first half of the
time from the peak to the halving, less twice the false alarms; of equals, the one that
changes least from the present defaults. The seeds not in `--fit` have no part in it,
nor has a setting that acts on warnings: none of its runs shows what was warned of.
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from experiments.collapse.config import SETTINGS
from experiments.collapse.judging import Run, judge
from experiments.collapse.reading import RAW, read_runs
from lld_jax.diagnosis import phases
from lld_jax.diagnosis.phases import Thresholds

GRID: dict[str, Sequence[float]] = {
    "patience": (3, 5),
    "displaced": (0.006, 0.008, 0.01, 0.012),
    "fall": (0.15, 0.25),
    "fall_relative": (0.5, 1.0),
    "reward_fall": (0.2, 0.25, 0.3, 0.4),
    "gradient": (3.0, 5.0),
    "entropy": (1.5, 2.0, 3.0),
}


@dataclasses.dataclass(frozen=True)
class Score:
    """Runs of some seeds under one set of thresholds."""

    collapsed: int
    in_time: int  # of those
    early: int  # warned before the peak
    living: int
    false_alarms: int  # of those

    @property
    def value(self) -> int:
        return self.in_time - 2 * self.false_alarms - self.early


def candidates() -> Iterator[Thresholds]:
    """The grid, those with the fewest changes from the defaults first."""
    default = Thresholds()
    made = [
        dataclasses.replace(default, **dict(zip(GRID, values, strict=True)))
        for values in itertools.product(*GRID.values())
    ]
    made.sort(
        key=lambda t: sum(getattr(t, name) != getattr(default, name) for name in GRID)
    )
    yield from made


def judged(
    runs: Mapping[tuple[str, int], Mapping[str, np.ndarray]], thresholds: Thresholds
) -> list[Run]:
    """What each run came to if these thresholds had watched it."""

    def observe(watch, record):
        watch = phases.start() if watch is None else watch
        return phases.observe(watch, record, thresholds)

    return [judge(*key, series, observe) for key, series in runs.items()]


def score(runs: Sequence[Run]) -> Score:
    """Counts the warnings of judged runs; those that go on still are left out."""
    fallen = [run for run in runs if run.collapse_step is not None]
    living = [run for run in runs if run.living]
    leads = [run.lead for run in fallen]
    return Score(
        collapsed=len(fallen),
        in_time=leads.count("first half"),
        early=leads.count("before the peak"),
        living=len(living),
        false_alarms=sum(run.warning_step is not None for run in living),
    )


def fit(runs: Mapping[tuple[str, int], Mapping[str, np.ndarray]]) -> Thresholds:
    """The best of the grid on these runs."""
    best, value = Thresholds(), None
    for thresholds in tqdm(list(candidates()), desc="thresholds", disable=None):
        found = score(judged(runs, thresholds)).value
        if value is None or found > value:
            best, value = thresholds, found
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--fit",
        type=lambda text: {int(seed) for seed in text.split(",")},
        default={0, 1},
        help="seeds to fit on",
    )
    parser.add_argument("--settings", help="some of those in raw; default all")
    parser.add_argument("--raw", type=Path, default=RAW)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        runs = read_runs(args.raw)
    except ValueError as error:
        parser.error(f"--raw: {error}")
    acting = {name for name, it in SETTINGS.items() if "diagnostics.action" in it}
    there = {setting for setting, _ in runs} - acting
    chosen = set(args.settings.split(",")) if args.settings else there
    if unknown := chosen - there:
        parser.error(
            f"--settings: {', '.join(sorted(unknown))}; legal: some of "
            f"{','.join(sorted(there))}"
        )
    runs = {key: series for key, series in runs.items() if key[0] in chosen}
    mine = {key: series for key, series in runs.items() if key[1] in args.fit}
    others = {key: series for key, series in runs.items() if key[1] not in args.fit}
    if not mine or not others:
        parser.error(f"--fit={sorted(args.fit)}: seeds are needed on both sides")
    best = fit(mine)
    report = {"thresholds": dataclasses.asdict(best), "fitted on": sorted(args.fit)}
    print(
        "thresholds:", ", ".join(f"{k} {v:g}" for k, v in report["thresholds"].items())
    )
    for name, some in (("fit", mine), ("test", others)):
        for label, thresholds in (("default", Thresholds()), ("fitted", best)):
            found = score(judged(some, thresholds))
            report[f"{name}, {label}"] = dataclasses.asdict(found)
            print(
                f"{name} seeds, {label} thresholds: {found.in_time} of "
                f"{found.collapsed} warned in time ({found.early} before the peak), "
                f"{found.false_alarms} of {found.living} false alarms"
            )
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
