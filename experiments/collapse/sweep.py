"""Draws how LLDS does against its dose, under both normalisers.

    python -m experiments.collapse.sweep

writes sweep.png from the runs in raw/: mean reward of all steps, and exact match on
held-out questions after the last one, against the effective lambda: what multiplies the
mean penalty of a preserved token. `normalizer=preserved` makes it the `llds.coef` that
was asked for; `normalizer=all` divides by all tokens, so it is smaller the fewer
trajectories are preserved, and is the mean over the run's steps.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from experiments.collapse import judging, reading
from experiments.collapse.config import SETTINGS

NORMALIZERS = {"preserved": ("o", "C0"), "all": ("s", "C1")}
SCORES = {
    "reward": "mean reward of all steps",
    "sampled": "sampled exact match, held-out",
}
# LLDS and nothing else: the settings whose dose is all that they change.
DOSE = {"llds.coef", "llds.normalizer"}


def doses(
    runs: Mapping[tuple[str, int], reading.Series],
) -> dict[str, dict[float, list[tuple[float, judging.Run]]]]:
    """normalizer -> `llds.coef` -> (effective lambda, run) of each ended seed."""
    found: dict[str, dict[float, list]] = {name: {} for name in NORMALIZERS}
    for (setting, seed), series in sorted(runs.items()):
        changes = SETTINGS.get(setting, {"": None})
        coef = float(changes.get("llds.coef", 0.2))
        run = judging.judge(setting, seed, series)
        if not changes.keys() <= DOSE or not coef or not run.ended:
            continue
        normalizer = changes.get("llds.normalizer", "preserved")
        dose = float(np.nanmean(series["effective_lambda"]))
        found[normalizer].setdefault(coef, []).append((dose, run))
    return found


def draw(runs: Mapping[tuple[str, int], reading.Series], out: str | Path) -> None:
    """Writes the figure to `out`: rings are seeds, full marks means of a coef's."""
    found = doses(runs)
    base = [judging.judge(*key, one) for key, one in runs.items() if key[0] == "grpo"]
    figure, axes = plt.subplots(1, len(SCORES), figsize=(10, 4), layout="constrained")
    for axis, (score, title) in zip(axes, SCORES.items(), strict=True):
        for normalizer, (marker, colour) in NORMALIZERS.items():
            means = []
            for _, points in sorted(found[normalizer].items()):
                x, y = zip(
                    *[(d, getattr(run, score)) for d, run in points], strict=True
                )
                axis.plot(x, y, marker, color=colour, mfc="white", ms=4, zorder=3)
                means.append((np.exp(np.mean(np.log(x))), np.mean(y)))
            if means:
                axis.plot(
                    *zip(*means, strict=True),
                    f"{marker}-",
                    color=colour,
                    label=f"normalizer={normalizer}",
                )
        plain = [y for run in base if (y := getattr(run, score)) is not None]
        if plain:
            axis.axhline(np.mean(plain), color="grey", ls="--", label="plain GRPO")
        axis.set(xscale="log", xlabel="effective lambda", ylabel=title, ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--raw", type=Path, default=reading.RAW)
    parser.add_argument(
        "--out", type=Path, default=Path("experiments/collapse/sweep.png")
    )
    args = parser.parse_args()
    try:
        runs = reading.read_runs(args.raw)
    except ValueError as error:
        parser.error(f"--raw: {error}")
    draw(runs, args.out)


if __name__ == "__main__":
    main()
