"""Reads the raw files: a run's metrics, a line a step, as columns of numbers."""

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from experiments.collapse import columns

RAW = Path(__file__).with_name("raw")
EVALUATED = ("greedy", "sampled")  # at some steps, and on the last line
# What a training step has measured itself: column -> name in metrics.jsonl.
METRICS = {k: v for k, v in columns.COLUMNS.items() if k not in EVALUATED}
COLUMNS = ("step", *METRICS, *EVALUATED)  # that a raw file has to have

Series = Mapping[str, np.ndarray]  # of a run: column -> one number a line, or NaN


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
