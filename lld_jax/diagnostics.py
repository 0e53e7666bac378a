"""What the metrics of a step say: names, and how each comes from sums.

Names are `area/name`. Every mean has its own denominator: the log-prob of correct
trajectories is over the action tokens of correct trajectories.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from lld_jax.losses import LossConfig
from lld_jax.search import Trajectory

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


def of_updates(
    outs: Sequence[Mapping[str, Any]], settings: LossConfig
) -> dict[str, float]:
    """Metrics of all the updates of a rollout batch, from their sums.

    Args:
      outs: of each update, the sums of `losses.objective` with `gap` (sum over action
        tokens of |sampler logp - training logp|), `norm` and `skipped`.
    """
    total = {k: float(sum(out[k] for out in outs)) for k in outs[0]}
    tokens = total["tokens"]

    def share(name: str, of: str) -> float:
        return total[name] / total[of] if total[of] else 0.0

    effective = settings.llds_coef
    if settings.llds_normalizer == "all":
        effective *= share("preserved", "tokens")
    first = outs[0]["tokens"]
    return {
        "loss/total": total["loss"] / len(outs),
        "loss/policy": total["loss_policy"] / len(outs),
        "loss/kl": total["loss_kl"] / len(outs),
        "loss/llds": total["loss_llds"] / len(outs),
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
        "grad/norm": total["norm"] / len(outs),
        "grad/norm_max": float(np.max([out["norm"] for out in outs])),
        "grad/skipped": total["skipped"],
        "batch/action_tokens": tokens,
    }


def speeds(record: Mapping[str, float], read: int) -> dict[str, float]:
    """Tokens per second: sampled in the rollout; read (`read` tokens) in training."""
    training = record["time/logps"] + record["time/update"]
    return {
        "tokens_per_s/rollout": record["rollout/kept"] / record["time/rollout"],
        "tokens_per_s/train": read / training,
    }
