"""The statistics of a study over its questions, and a Markdown table of them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

_RESAMPLES = 10_000


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def mean_interval(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean of `values [N]` with a percentile bootstrap interval over them."""
    values = np.asarray(values, np.float64)
    rng = np.random.default_rng(seed)
    picked = rng.integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(values[picked].mean(axis=1), (0.025, 0.975))
    return Estimate(float(values.mean()), float(low), float(high))


def share_below_0(values: Sequence[float]) -> Estimate:
    """The share of `values [N]` that are negative, with Wilson's interval."""
    below = int(np.sum(np.asarray(values) < 0))
    interval = stats.binomtest(below, len(values)).proportion_ci(method="wilson")
    return Estimate(below / len(values), float(interval.low), float(interval.high))


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Spearman's rho and its p; NaN where one of both never changes."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return math.nan, math.nan
    result = stats.spearmanr(a, b)
    return float(result.statistic), float(result.pvalue)


def column(results: dict[str, Any], setting: str, what: str) -> list[float]:
    """`what` ('correct', 'wrong', ...) of each question under a setting."""
    return [q["settings"][setting][what] for q in results["questions"]]


def markdown(results: dict[str, Any]) -> str:
    """The table of a study: one line a setting, displacement per response.

    "less" is the mean of the differences, question by question, from the first
    setting. rho is the rank correlation of a question's displacement with the length
    of the action prefix that its correct and wrong responses share.
    """
    names = list(results["questions"][0]["settings"])
    prefix = [q["common_prefix"] for q in results["questions"]]
    base = np.array(column(results, names[0], "correct"))
    lines = [
        f"| setting | median, correct | mean, correct | below 0 | less {names[0]} | "
        "mean, wrong | rho with common prefix (p) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        values = column(results, name, "correct")
        rho, p = rank_correlation(prefix, values)
        cells = (
            name,
            _number(float(np.median(values))),
            _interval(mean_interval(values)),
            _percent(share_below_0(values)),
            "" if name == names[0] else _interval(mean_interval(values - base)),
            _interval(mean_interval(column(results, name, "wrong"))),
            "" if math.isnan(rho) else f"{rho:+.2f} ({p:.2g})",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _number(x: float) -> str:
    return f"{x:+.3g}"


def _interval(e: Estimate) -> str:
    return f"{_number(e.value)} [{_number(e.low)}, {_number(e.high)}]"


def _percent(e: Estimate) -> str:
    return f"{e.value:.0%} [{e.low:.0%}, {e.high:.0%}]"
