"""Made-up raw files of the collapse experiment."""

import math

from experiments.collapse import analyse

RISE = [0.1] * 10 + [0.6] * 20  # peak .6, first reached by the mean at step 19


def write_run(folder, name, reward, *, final=None, **columns):
    """A CSV as a run writes it: 4 digits, empty cells, the last evaluation alone."""
    folder.mkdir(exist_ok=True)
    header = [*analyse.COLUMNS, "extra"]
    lines = [",".join(header)]
    for step, value in enumerate(reward):
        cells = {"step": step, "reward": value, "extra": 7}
        cells |= {column: values[step] for column, values in columns.items()}
        lines.append(
            ",".join(
                f"{cells[c]:.4g}" if c in cells and not math.isnan(cells[c]) else ""
                for c in header
            )
        )
    if final is not None:
        cells = {"step": len(reward), "greedy": final[0], "sampled": final[1]}
        lines.append(",".join(str(cells.get(column, "")) for column in header))
    path = folder / f"{name}.csv"
    path.write_text("\n".join(lines) + "\n")
    return path
