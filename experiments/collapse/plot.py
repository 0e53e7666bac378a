"""Draws the runs in raw/: two settings side by side, and all of them at the end.

    python -m experiments.collapse.plot --settings=grpo,llds

writes collapse.png: a column a setting, thin lines a seed (the same colour in every
column), a thick line their mean, behind them the phases that the detector saw, deeper
where it saw one in more of the seeds. settings.png, beside it: exact match on held-out
questions after the last step, of every setting.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.collapse import analyse, judging, reading

PANELS = {
    "reward": "sampled reward\n(mean of 5 steps)",
    "seen_correct": "correct tokens, moved by\nother updates (nats)",
    "logp_correct": "log-prob. per token\nof correct answers",
    "grad_norm": "gradient norm",
    "entropy": "entropy (nats)",
}
SMOOTHED = {"reward": 5, "seen_correct": 10}  # steps
LOGARITHMIC = {"grad_norm"}
PHASES = {"stagnation": "#fff2b8", "decay": "#ffd3a1", "collapse": "#f4b6b6"}
SCORES = {"greedy": ("o", "C0", -0.14), "sampled": ("s", "C1", 0.14)}

Runs = Mapping[tuple[str, int], reading.Series]


def by_step(series: Sequence[reading.Series], column: str) -> np.ndarray:
    """`[seeds, steps]` from step 0 on; NaN where a run has no number."""
    last = max((int(one["step"][-1]) for one in series if len(one["step"])), default=0)
    values = np.full((len(series), last + 1), np.nan)
    for row, one in zip(values, series, strict=True):
        row[one["step"].astype(int)] = one[column]
    return values


def mean_of_seeds(values: np.ndarray) -> np.ndarray:
    """`[seeds, steps]` -> `[steps]`; NaN where fewer than half of the seeds have one.

    So the mean neither ends with the shortest run nor is one run's alone.
    """
    counts = (~np.isnan(values)).sum(axis=0)
    sums = np.nansum(values, axis=0)
    enough = (counts > 0) & (2 * counts >= len(values))
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=enough)


def phase_shares(
    series: Sequence[reading.Series], observe: judging.Observe | None = None
) -> np.ndarray:
    """`[phases, steps]`: share of the seeds still training that are in each phase."""
    seen = [judging.phases_of(one, observe) for one in series]
    last = max((phases[-1][0] for phases in seen if phases), default=0)
    shares = np.zeros((len(PHASES), last + 1))
    training = np.zeros(last + 1)
    for phases in seen:
        for step, name, _ in phases:
            training[step] += 1
            if name in PHASES:
                shares[list(PHASES).index(name), step] += 1
    return shares / np.maximum(training, 1)


def draw(
    runs: Runs,
    settings: Sequence[str],
    out: str | Path,
    observe: judging.Observe | None = None,
) -> None:
    """Writes the figure of `settings`, a column each, to `out`.

    Raises ValueError if a setting has no run in `runs`. `observe` as in
    `judging.phases_of`.
    """
    there = sorted({name for name, _ in runs})
    for name in settings:
        if name not in there:
            raise ValueError(f"settings: {name!r} has no runs; there are {there}")
    seeds = sorted({seed for name, seed in runs if name in settings})
    colours = {seed: f"C{i % 10}" for i, seed in enumerate(seeds)}
    figure, axes = plt.subplots(
        len(PANELS),
        len(settings),
        figsize=(max(10.0, 2.7 * len(settings)), 10),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for column, name in zip(axes.T, settings, strict=True):
        mine = {seed: runs[name, seed] for seed in seeds if (name, seed) in runs}
        for axis, panel in zip(column, PANELS, strict=True):
            _lines(axis, mine, panel, colours)
        fallen = {seed: _collapse(one) for seed, one in mine.items()}
        count = sum(step is not None for step in fallen.values())
        column[0].set_title(f"{name}: {count} of {len(mine)} collapsed", pad=10)
        column[-1].set_xlabel("step")
        for axis in column:
            _marks(axis, fallen, colours)
    for row, title in zip(axes, PANELS.values(), strict=True):
        row[0].set_ylabel(title, fontsize=9)
    # Only now, since all columns share their limits.
    for column, name in zip(axes.T, settings, strict=True):
        mine = [one for (other, _), one in runs.items() if other == name]
        shares = phase_shares(mine, observe)
        for axis in column:
            _shade(axis, shares)
    figure.legend(
        handles=_legend(colours), loc="outside lower center", ncols=7, fontsize=8
    )
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _collapse(series: reading.Series) -> int | None:
    line = judging.collapse_step(series["reward"])
    return None if line is None else int(series["step"][line])


def _lines(
    axis: Axes,
    mine: Mapping[int, reading.Series],
    panel: str,
    colours: Mapping[int, str],
) -> None:
    values = by_step(list(mine.values()), panel)
    if panel in SMOOTHED:
        values = np.stack(
            [judging.trailing_mean(row, SMOOTHED[panel]) for row in values]
        )
    if panel == "logp_correct":  # 0 is a mean of no correct trajectory
        values = np.where(values == 0, np.nan, values)
    logarithmic = panel in LOGARITHMIC
    if logarithmic:
        axis.set_yscale("log")
        values = np.log(np.where(values > 0, values, np.nan))
    mean = mean_of_seeds(values)  # of logarithms: where the eye sees the middle
    if logarithmic:
        values, mean = np.exp(values), np.exp(mean)
    for seed, row in zip(mine, values, strict=True):
        there = np.flatnonzero(~np.isnan(row))
        axis.plot(there, row[there], colours[seed], lw=0.7, alpha=0.75)
    axis.plot(mean, "black", lw=2)
    axis.tick_params(labelsize=8)


def _marks(
    axis: Axes, fallen: Mapping[int, int | None], colours: Mapping[int, str]
) -> None:
    """A triangle on the upper edge at each seed's step of collapse."""
    for seed, step in fallen.items():
        if step is not None:
            axis.plot(
                step,
                1,
                "v",
                color=colours[seed],
                markersize=6,
                markeredgecolor="white",
                markeredgewidth=0.5,
                transform=axis.get_xaxis_transform(),
                clip_on=False,
                zorder=5,
            )


def _shade(axis: Axes, shares: np.ndarray) -> None:
    axis.set(xlim=axis.get_xlim(), ylim=axis.get_ylim())  # fixed: an image moves them
    tints = np.array([to_rgb(colour) for colour in PHASES.values()]) - 1
    axis.imshow(
        1 + (shares.T @ tints)[None],  # white, tinted by each phase's share
        extent=(-0.5, shares.shape[1] - 0.5, 0, 1),
        transform=axis.get_xaxis_transform(),
        aspect="auto",
        interpolation="nearest",
        zorder=0,
    )


def _legend(colours: Mapping[int, str]) -> list:
    return [
        *(Patch(color=colour, label=name) for name, colour in PHASES.items()),
        Line2D([], [], color="black", lw=2, label="mean"),
        Line2D([], [], color="grey", ls="", marker="v", label="step of collapse"),
        *(Line2D([], [], color=c, label=f"seed {seed}") for seed, c in colours.items()),
    ]


def draw_settings(runs: Sequence[judging.Run], out: str | Path) -> None:
    """Writes a dot plot of final exact match to `out`: a line a setting.

    Rings are seeds, full marks their mean with its 95 % interval.
    """
    names = analyse.settings_of(runs)
    rows = [analyse.row_of(name, runs) for name in names]
    figure, axis = plt.subplots(
        figsize=(10, 1.3 + 0.42 * len(rows)), layout="constrained"
    )
    for score, (marker, colour, shift) in SCORES.items():
        for y, (name, row) in enumerate(zip(names, rows, strict=True)):
            estimate: analyse.Estimate = getattr(row, score)
            if estimate.value is None:
                continue
            seeds = [getattr(run, score) for run in runs if run.setting == name]
            seeds = [value for value in seeds if value is not None]
            ring = {"ms": 4, "mfc": "white", "mew": 0.8, "zorder": 4}
            axis.plot(seeds, [y + shift] * len(seeds), marker, color=colour, **ring)
            low = estimate.value if estimate.low is None else estimate.low
            high = estimate.value if estimate.high is None else estimate.high
            axis.errorbar(
                estimate.value,
                y + shift,
                # The mean of equal numbers may be off by a bit.
                xerr=[
                    [max(0.0, estimate.value - low)],
                    [max(0.0, high - estimate.value)],
                ],
                fmt=marker,
                color=colour,
                ms=7,
                capsize=3,
            )
    labels = [
        f"{row.setting} ({sum(row.leads.values())} of {row.collapsed.n} collapsed)"
        for row in rows
    ]
    axis.set_yticks(range(len(rows)), labels, fontsize=9)
    axis.set(xlabel="exact match, held-out questions, after the last step")
    axis.set(xlim=(-0.02, None), ylim=(len(rows) - 0.5, -0.5))
    axis.grid(axis="x", alpha=0.3)
    handles = [
        Line2D([], [], color=colour, marker=marker, ls="", label=score)
        for score, (marker, colour, _) in SCORES.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, fontsize=8)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", default="grpo,llds")
    parser.add_argument("--raw", type=Path, default=reading.RAW)
    parser.add_argument(
        "--out", type=Path, default=Path("experiments/collapse/collapse.png")
    )
    args = parser.parse_args()
    try:
        runs = reading.read_runs(args.raw)
    except ValueError as error:
        parser.error(f"--raw: {error}")
    draw(runs, args.settings.split(","), args.out)
    judged = [judging.judge(*key, series) for key, series in runs.items()]
    draw_settings(judged, args.out.with_name("settings.png"))


if __name__ == "__main__":
    main()
