"""What the rows of the rollout benchmark say: rates, ratios of ours to others, targets.

A row is what one engine did in one case. A target is a least ratio of our rate to
another engine's, or a limit for our own engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

# Least ratios of our rate to another engine's, by engine and work.
FASTER = {"transformers": {"A": 3, "B": 5, "C": 5}, "tunix": {"B": 5}}


@dataclass(frozen=True)
class Row:
    """What one engine did in one case.

    `result` is the JSON of the engine (see `benchmarks.engines`), or None, and then
    `error` says why.
    """

    shape: str
    work: str
    engine: str
    trajectories: int
    result: dict | None
    error: str | None = None


def rate(result: dict, unit: str) -> float:
    """'trajectories' (finished ones) or 'tokens' (of actions) per second."""
    return result[unit] / result["seconds"]


def wasted(result: dict) -> float | None:
    """The share of the decode steps, summed over rows, that gave no token.

    None if the engine could not count its steps.
    """
    steps = result["row_steps"]
    return 1 - result["tokens"] / steps if steps else None


def occupancy(result: dict) -> float | None:
    """The share of the rows that hold a trajectory; None if it was not counted."""
    return result["detail"].get("occupancy")


def ratio(ours: dict, other: dict) -> tuple[float, str]:
    """Our rate through another's, and its unit.

    The unit is trajectories, or tokens if one of the two was cut: a static batch that
    is nearly done has finished nothing.
    """
    unit = "trajectories" if ours["complete"] and other["complete"] else "tokens"
    return rate(ours, unit) / rate(other, unit), unit


def ratios(rows: Sequence[Row]) -> dict[tuple[str, str, str], tuple[float, str] | None]:
    """`ratio` by (shape, work, other engine); None where one of the two failed."""
    ours = {(r.shape, r.work): r.result for r in rows if r.engine == "ours"}
    found = {}
    for row in rows:
        if row.engine != "ours" and (row.shape, row.work) in ours:
            mine = ours[row.shape, row.work]
            ran = mine is not None and row.result is not None
            key = row.shape, row.work, row.engine
            found[key] = ratio(mine, row.result) if ran else None
    return found


def fewer_products(ours: dict, other: dict, layers: int, head: int) -> float:
    """How many times fewer products ours needs: the ratio if both made them as fast.

    Products with the weights alone, per token of an action: a token that is read meets
    those of the layers, a row of a decode step those of the head as well; all rows of
    the other engine count, and of ours those that gave a token. A higher ratio of rates
    says that a product, or what lies around it, takes the other engine longer.
    """
    read = other["detail"]["padded"] * layers
    theirs = read + other["row_steps"] * (layers + head)
    needed = ours["detail"]["extended"] * layers + ours["tokens"] * (layers + head)
    return theirs / other["tokens"] / (needed / ours["tokens"])


def middle(rows: Sequence[Row]) -> Row:
    """The row in the middle by rate, with the `rates` of all; a failed one if any."""
    failed = [row for row in rows if row.result is None]
    if failed:
        return failed[0]
    rows = sorted(rows, key=lambda row: rate(row.result, "tokens"))
    rates = [rate(row.result, "trajectories") for row in rows]
    row = rows[len(rows) // 2]
    return replace(row, result=row.result | {"rates": rates})


def _target(name: str, value: float | None, goal: float, better: str) -> dict:
    sign = 1 if better == "higher" else -1
    met = value is not None and sign * value >= sign * goal
    return dict(name=name, value=value, goal=goal, better=better, met=met)


def targets(rows: Sequence[Row]) -> list[dict]:
    """The targets that these rows are about; `value` is None where an engine failed."""
    found = []
    for (shape, work, other), measured in ratios(rows).items():
        goal = FASTER[other].get(work)
        if goal is not None:
            value, unit = measured or (None, "trajectories")
            name = f"{shape} {work}: {unit}/s, ours to {other}"
            found.append(_target(name, value, goal, "higher"))
    ours = [row for row in rows if row.engine == "ours"]

    large = [row for row in ours if row.shape == "0.2b"]
    busy = [row for row in large if row.work == "B"]
    for name, chosen, measure, combine, goal, better in (
        ("0.2b B: occupancy of the rows", busy, occupancy, min, 0.9, "higher"),
        ("0.2b: share of time that the host costs", large, _host, max, 0.1, "lower"),
        ("tokens thrown away after a stop", ours, _thrown, sum, 0, "lower"),
        ("compilations after the warm-up", ours, _compilations, sum, 0, "lower"),
    ):
        if chosen:
            values = [row.result and measure(row.result) for row in chosen]
            value = None if None in values else combine(values)
            found.append(_target(name, value, goal, better))
    return found


def _host(result: dict) -> float | None:
    return result["detail"].get("host_exposed")


def _thrown(result: dict) -> int | None:
    decoded, kept = (result["detail"].get(name) for name in ("decoded", "kept"))
    return None if None in (decoded, kept) else decoded - kept


def _compilations(result: dict) -> int:
    return result["compilations"]
