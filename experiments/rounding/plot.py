"""Draws what `run.py` measured: DIR/results.json as DIR/rounding.png.

python -m experiments.rounding.plot [--out=DIR]
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS: dict[str, Callable[[dict[str, Any]], float]] = {
    "mean |difference| of log-probs": lambda row: row["mean_difference"],
    "open action gates": lambda row: row["open_gates"]["action"],
    "LLDS gradient / surrogate's": lambda row: row["gradient"]["preserved"],
}
STYLES = {"float32": "o", "bfloat16": "s"}
SMALLEST = 1e-9  # of the logarithmic axis; what is smaller stands left of it


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """One panel a quantity, one line a condition, one mark a policy and dtype."""
    conditions = list(dict.fromkeys(row["old"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    series = [(policy, dtype) for policy in policies for dtype in STYLES]
    figure, axes = plt.subplots(
        1, 3, figsize=(15, 4), sharey=True, constrained_layout=True
    )
    for axis, (title, value) in zip(axes, PANELS.items(), strict=True):
        for number, (policy, dtype) in enumerate(series):
            mine = [r for r in rows if (r["policy"], r["dtype"]) == (policy, dtype)]
            axis.plot(
                [value(row) for row in mine],
                # Side by side, so that equal values are all seen.
                [conditions.index(r["old"]) + 0.15 * number - 0.2 for r in mine],
                STYLES[dtype],
                color=f"C{policies.index(policy)}",
                mfc="none" if dtype == "float32" else None,
                label=f"{policy}, {dtype}",
            )
        axis.set(title=title)
        axis.grid(axis="y", lw=0.4)
    axes[0].set_xscale("symlog", linthresh=SMALLEST, linscale=0.5)
    axes[0].set_xticks([0, *(10.0**power for power in (-8, -6, -4, -2))])
    axes[0].set_yticks(range(len(conditions)), [c.replace("`", "") for c in conditions])
    axes[0].invert_yaxis()
    axes[0].set_ylabel("old log-probs from")
    axes[1].set_xlim(-0.02, 1)
    axes[2].set_xlim(left=-0.02)
    axes[2].legend(fontsize=8)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    folder = parser.parse_args().out
    report = json.loads((folder / "results.json").read_text())
    draw(report["rows"], folder / "rounding.png")


if __name__ == "__main__":
    main()
