"""Draws the curves of runs of configs/tiny.py, and keeps their numbers in a CSV.

    python -m experiments.tiny.plot --out=experiments/tiny/curves \\
        LLDS=runs/tiny GRPO=runs/tiny-llds.coef=0

writes OUT.csv, one line a step and run, and OUT.png from it.
"""

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from lld_jax.run import metrics

PANELS = {
    "reward/mean": "reward (exact match, sampled)",
    "rollout/searches": "searches per question",
    "lld/logp_correct": "log-prob. per token, correct",
    "policy/entropy": "entropy (nats)",
}
SCORES = {"eval/greedy/exact_match": "o-", "eval/sampled/exact_match": "s--"}


def collect(runs: dict[str, Path]) -> list[dict[str, str | float]]:
    """Rows of all runs: run, step, and the metrics that are drawn (rounded)."""
    return [
        {"run": name, "step": line["step"]}
        | {
            key: round(line[key], 5) if key in line else ""
            for key in (*PANELS, *SCORES)
        }
        for name, folder in runs.items()
        for line in metrics.read(folder / "metrics.jsonl")
    ]


def draw(rows: list[dict], out: Path) -> None:
    figure, axes = plt.subplots(1, 5, figsize=(15, 2.9), constrained_layout=True)
    for colour, name in enumerate(dict.fromkeys(row["run"] for row in rows)):
        mine = [row for row in rows if row["run"] == name]
        for axis, (key, title) in zip(axes[1:], PANELS.items(), strict=True):
            steps = [row["step"] for row in mine if row[key] != ""]
            values = [row[key] for row in mine if row[key] != ""]
            axis.plot(steps, values, f"C{colour}", lw=1.2, label=name)
            axis.set(title=title, xlabel="step")
        for key, style in SCORES.items():
            steps = [row["step"] for row in mine if row[key] != ""]
            values = [row[key] for row in mine if row[key] != ""]
            label = f"{name}, {key.split('/')[1]}"
            axes[0].plot(steps, values, style, color=f"C{colour}", label=label)
    axes[0].set(title="exact match, held-out questions", xlabel="step", ylim=(0, 1))
    axes[0].legend(fontsize=7, loc="lower right")
    axes[1].legend(fontsize=8)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    pairs = (run.partition("=") for run in args.runs)
    rows = collect({name: Path(folder) for name, _, folder in pairs})
    with args.out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
