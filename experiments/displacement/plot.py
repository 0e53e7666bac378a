"""Draws the displacement of each question, sorted, one panel a setting.

    python -m experiments.displacement.plot [RESULTS.json]

writes RESULTS.png beside it; by default the results of this folder.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.displacement import table


def draw(results: dict[str, Any], out: Path) -> None:
    """Bars of all settings of a study on one scale, saved as `out`."""
    names = list(results["questions"][0]["settings"])
    figure, axes = plt.subplots(
        1,
        len(names),
        figsize=(1.5 + 2.8 * len(names), 2.9),
        sharey=True,
        squeeze=False,
        constrained_layout=True,
    )
    for axis, name in zip(axes[0], names, strict=True):
        values = sorted(table.column(results, name, "correct"))
        colours = ["C3" if value < 0 else "C0" for value in values]
        axis.bar(range(len(values)), values, color=colours, width=0.8)
        axis.axhline(0, color="black", lw=0.6)
        share = table.share_below_0(values).value
        axis.set(title=f"{name}: {share:.0%} below 0", xlabel="questions, sorted")
        axis.set_xticks([])
    axes[0, 0].set_ylabel("displacement of\ncorrect responses (nats)")
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).with_name("results.json")
    parser.add_argument("results", nargs="?", type=Path, default=default)
    args = parser.parse_args()
    draw(json.loads(args.results.read_text()), args.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
