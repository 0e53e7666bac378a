"""What the metrics of a step say: names, and how each comes from sums.

Names are `area/name`. Every mean has its own denominator: the log-prob of correct
trajectories is over the action tokens of correct trajectories.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from lld_jax.diagnosis import signals
from lld_jax.losses import LossConfig
from lld_jax.protocol.trajectory import Trajectory

REASONS = ("answered", "turns", "tokens", "context", "invalid", "retriever")
_COUNTERS = {
    "valid_searches": "rollout/searches",
    "invalid_actions": "rollout/invalid_actions",
    "actions_cut": "rollout/actions_cut",
    "prompts_truncated": "rollout/prompts_truncated",
    "truncated": "rollout/observations_truncated",
    "no_results": "rollout/searches_empty",
    "retrieval_failed": "rollout/searches_failed",
}


def of_rollout(
    trajectories: Sequence[Trajectory], stats: Mapping[str, float]
) -> dict[str, float]:
    """Rewards, lengths, searches and reasons for ending of a rollout batch.

    Counts are per trajectory; `end/*` are shares of the trajectories; `reward/mixed`
    is the share of groups with right and wrong answers, the ones that teach.
    """
    reasons = Counter(t.reason for t in trajectories)
    groups: dict[int, set[float]] = {}
    for t in trajectories:
        groups.setdefault(t.draw, set()).add(t.reward)
    return {
        "reward/mean": fmean(t.reward for t in trajectories),
        "reward/mixed": fmean(len(rewards) > 1 for rewards in groups.values()),
        "rollout/length": fmean(len(t.ids) for t in trajectories),
        "rollout/action_tokens": fmean(sum(t.mask) for t in trajectories),
        "rollout/turns": fmean(
            sum(span.kind == "action" for span in t.spans) for t in trajectories
        ),
        "rollout/repeated_ngram": fmean(map(repeated_ngram, trajectories)),
        "rollout/decoded": float(stats["decoded"]),
        "rollout/kept": float(stats["kept"]),
        "rollout/occupancy": stats["occupancy"],
        "rollout/row_use": stats["row_use"],
        **{
            f"time/rollout_{what}": float(stats.get(f"seconds_{what}", 0.0))
            for what in ("extend", "decode", "host", "wait")
        },
        **{
            metric: fmean(t.counters[name] for t in trajectories)
            for name, metric in _COUNTERS.items()
        },
        **{
            f"end/{reason}": reasons[reason] / len(trajectories)
            for reason in sorted(reasons.keys() | set(REASONS))
        },
    }


def repeated_ngram(traj: Trajectory) -> int:
    """The longest n-gram, in tokens, that an action of a trajectory holds twice."""
    actions = [span for span in traj.spans if span.kind == "action"]
    return max((longest_repeat(traj.ids[s.start : s.end]) for s in actions), default=0)


def longest_repeat(ids: Sequence[int]) -> int:
    """The length of the longest run of `ids` that occurs twice; the two may overlap.

    n-grams get numbers by doubling their length; exact, in O(n log n) steps.
    """

    def joined(first: np.ndarray, second: np.ndarray) -> np.ndarray | None:
        """Numbers of the joined n-grams, None if all differ."""
        pairs = first.astype(np.int64) * len(ids) + second
        names, numbers = np.unique(pairs, return_inverse=True)
        return numbers if len(names) < len(pairs) else None

    names, numbers = np.unique(np.asarray(ids, np.int64), return_inverse=True)
    if len(names) == len(ids):
        return 0
    doubled = [numbers]  # of the n-grams of 1, 2, 4, ... tokens
    while 2 ** len(doubled) < len(ids):
        size = 2 ** (len(doubled) - 1)
        longer = joined(doubled[-1][:-size], doubled[-1][size:])
        if longer is None:
            break
        doubled.append(longer)
    best, numbers = 2 ** (len(doubled) - 1), doubled[-1]
    for power in reversed(range(len(doubled) - 1)):
        if best + 2**power < len(ids):
            tail = doubled[power][best:]
            longer = joined(numbers[: len(tail)], tail)
            if longer is not None:
                best, numbers = best + 2**power, longer
    return best


def of_updates(
    outs: Sequence[Mapping[str, Any]], settings: LossConfig, coef: float | None = None
) -> dict[str, float]:
    """Metrics of all the updates of a rollout batch, from their sums.

    Args:
      outs: of each update, the sums of `losses.objective` and `signals.of_tokens` with
        `gap` (sum over action tokens of |sampler logp - training logp|), `padding` (of
        the `places` that were computed, those without a token), `norm` and `skipped`.
      coef: lambda of these updates; None: the settings'.
    """
    total = {k: sum(np.asarray(out[k], float) for out in outs) for k in outs[0]}
    tokens = total["tokens"]

    def share(name: str, of: str) -> float:
        return float(total[name] / total[of]) if total[of] else 0.0

    effective = settings.llds_coef if coef is None else coef
    if settings.llds_normalizer == "all":
        effective *= share("preserved", "tokens")
    first = outs[0]["tokens"]
    found = {
        f"loss/{name}": float(total[key] / len(outs))
        for name, key in (
            ("total", "loss"),
            ("policy", "loss_policy"),
            ("kl", "loss_kl"),
            ("llds", "loss_llds"),
        )
    }
    return (
        found
        | _of_signals(outs, total)
        | {
            "lld/logp_correct": share("logp_correct", "tokens_correct"),
            "lld/logp_zero": share("logp_zero", "tokens_zero"),
            "lld/logp_wrong": share("logp_wrong", "tokens_wrong"),
            "lld/drop": share("drop", "tokens"),
            "llds/open_gates": share("open_gates", "gates"),
            "llds/penalised": share("penalised", "preserved"),
            "llds/preserved": share("preserved", "tokens"),
            "llds/effective_lambda": effective,
            "ratio/mean": share("ratio", "tokens"),
            "ratio/max": float(max(out["ratio_max"] for out in outs)),
            "ratio/clipped": share("clipped", "tokens"),
            "policy/kl": share("kl", "tokens"),
            "policy/entropy": share("entropy", "tokens"),
            # Only the first update sees the weights that sampled.
            "policy/sampler_gap": float(outs[0]["gap"] / first) if first else 0.0,
            "grad/norm": float(total["norm"] / len(outs)),
            "grad/norm_max": float(np.max([out["norm"] for out in outs])),
            "grad/skipped": float(total["skipped"]),
            "batch/action_tokens": float(tokens),
            "batch/padding": share("padding", "places"),
        }
    )


def _of_signals(
    outs: Sequence[Mapping[str, Any]], total: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """What `signals.of_tokens` counted. A mean over no token is left out."""
    found = {}
    for z, sign in enumerate(signals.SIGNS):
        if total["seen_tokens"][z]:
            moved = total["seen_displacement"][z] / total["seen_tokens"][z]
            found[f"lld/seen_{sign}"] = float(moved)
        for a in range(signals.ACTIONS):
            if count := total["by_action_tokens"][z, a]:
                logp = total["by_action_logp"][z, a] / count
                found[f"lld/logp_{sign}_action{a + 1}"] = float(logp)
    product = np.sqrt(total["slope_policy"] * total["slope_llds"])
    return found | {
        "grad/logps_policy": fmean(float(out["slope_policy"]) ** 0.5 for out in outs),
        "grad/logps_llds": fmean(float(out["slope_llds"]) ** 0.5 for out in outs),
        "grad/logps_cosine": float(total["slope_both"] / product) if product else 0.0,
        "ratio/p05": signals.ratio_quantile(total["ratios"], 0.05),
        "ratio/p95": signals.ratio_quantile(total["ratios"], 0.95),
    }


def of_displacement(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray,
    moved: np.ndarray,
    tokens: np.ndarray,
) -> dict[str, float]:
    """What all the updates of a step did to its own trajectories.

    Args:
      advantages, moved, tokens: `[B]` in the order of `trajectories`; the last two
        from `signals.displacements` of the log-probs after the updates and before.

    Returns:
      `lld/displacement_*`, the mean of `new - old` over action tokens by sign;
      `lld/response_displacement`, the mean over correct trajectories of its sum; and
      `lld/questions_displaced`, of the questions with a correct answer, the share whose
      correct answers lost likelihood on average. A mean over nothing is left out.
    """
    found = {}
    by_sign = advantages > 0, advantages == 0, advantages < 0
    for name, rows in zip(signals.SIGNS, by_sign, strict=True):
        if count := tokens[rows].sum():
            found[f"lld/displacement_{name}"] = float(moved[rows].sum() / count)
    correct: dict[int, list[float]] = {}
    for traj, sum_moved in zip(trajectories, moved, strict=True):
        if traj.reward > 0:
            correct.setdefault(traj.draw, []).append(float(sum_moved))
    if correct:
        every = [x for some in correct.values() for x in some]
        found["lld/response_displacement"] = fmean(every)
        lost = [fmean(some) < 0 for some in correct.values()]
        found["lld/questions_displaced"] = fmean(lost)
    return found


def speeds(record: Mapping[str, float], read: int) -> dict[str, float]:
    """Tokens per second: sampled in the rollout; read (`read` tokens) in training."""
    training = record["time/logps"] + record["time/update"]
    return {
        "tokens_per_s/rollout": record["rollout/kept"] / record["time/rollout"],
        "tokens_per_s/train": read / training,
    }
