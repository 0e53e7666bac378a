"""The report of the rollout benchmark: its tables, and the file of all its numbers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import comparison
from benchmarks.comparison import Row
from benchmarks.conditions import versions

COLUMNS = {
    "shape": 5,
    "work": 4,
    "engine": 12,
    "trajectories/s": 14,
    "tokens/s": 8,
    "wasted steps": 12,
    "peak GiB": 8,
    "compilations": 12,
    "occupancy": 9,
    "finished": 10,
}


def _line(cells: Sequence[object], widths: Sequence[int]) -> str:
    pairs = zip(cells, widths, strict=True)
    return "| " + " | ".join(str(cell).ljust(width) for cell, width in pairs) + " |"


def _head(names: Sequence[str], widths: Sequence[int]) -> None:
    print(_line(names, widths))
    print(_line(["-" * width for width in widths], widths), flush=True)


def print_head() -> None:
    """The head of the table that `print_row` continues."""
    _head(list(COLUMNS), list(COLUMNS.values()))


def print_row(row: Row) -> None:
    """One line: what the engine did, or that it failed."""
    first = [row.shape, row.work, row.engine]
    result = row.result
    if result is None:
        cells = first + ["failed"] + ["-"] * (len(COLUMNS) - 4)
    else:
        waste, occupancy = comparison.wasted(result), comparison.occupancy(result)
        cells = first + [
            f"{comparison.rate(result, 'trajectories'):.3f}",
            f"{comparison.rate(result, 'tokens'):.1f}",
            "-" if waste is None else f"{waste:.1%}",
            f"{result['peak_memory_gib']:.2f}",
            result["compilations"],
            "-" if occupancy is None else f"{occupancy:.3f}",
            f"{result['trajectories']} of {row.trajectories}",
        ]
    print(_line(cells, list(COLUMNS.values())), flush=True)


def print_comparison(
    rows: Sequence[Row], wanted: Sequence[dict], sizes: dict[str, tuple[int, int]]
) -> None:
    """The ratios of ours to the others, and the targets.

    `sizes`: what `models.parameters` says of each shape.
    """
    widths = 5, 4, 22, 7, 12, 9
    results = {(row.shape, row.work, row.engine): row.result for row in rows}
    compared = comparison.ratios(rows)
    if compared:
        print()
        names = "shape", "work", "ours to", "ratio", "rates of", "products"
        _head(names, widths)
    for (shape, work, other), measured in compared.items():
        value, unit, most = "-", "-", "-"
        if measured:
            value, unit = f"{measured[0]:.2f}", measured[1]
            both = results[shape, work, "ours"], results[shape, work, other]
            # An engine that was cut counts by what it had done: early turns are short,
            # so it is the least that it would come to.
            if both[0]["complete"] and both[1]["tokens"]:
                most = f"{comparison.fewer_products(*both, *sizes[shape]):.2f}"
        print(_line((shape, work, other, value, unit, most), widths))
    widths = max([6, *(len(target["name"]) for target in wanted)]), 8, 8, 3
    if wanted:
        print()
        _head(("target", "value", "goal", "met"), widths)
    for target in wanted:
        sign = "≥" if target["better"] == "higher" else "≤"
        value = "-" if target["value"] is None else f"{target['value']:.3g}"
        met = "yes" if target["met"] else "no"
        print(_line((target["name"], value, f"{sign} {target['goal']}", met), widths))


def write(
    path: Path,
    rows: Sequence[Row],
    sizes: dict[str, tuple[int, int]],
    quick: bool,
    host: dict,
) -> None:
    """All numbers as JSON; `host` is what `conditions.machine` said before the run."""
    report = {
        "targets": comparison.targets(rows),
        "rows": [asdict(row) for row in rows],
        "parameters": sizes,
        "quick": quick,
        "machine": host,
        "versions": versions(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def show(path: Path) -> int:
    """Prints the tables of a file that a run wrote."""
    report = json.loads(path.read_text("utf-8"))
    rows = [Row(**row) for row in report["rows"]]
    print_head()
    for row in rows:
        print_row(row)
    print_comparison(rows, report["targets"], report["parameters"])
    return 0
