"""What is counted of a rollout, and of rollouts that ran beside each other."""

from collections.abc import Sequence

from lld_jax.rollout.slots import Run


def statistics(run: Run) -> dict[str, float]:
    stats, R = run.stats, run.programs.shapes.slots
    steps = run.queued_steps or 0
    held = sum(min(s.ended, steps) - min(s.began or 0, steps) for s in run.done)
    return dict(stats) | {
        "kept": sum(sum(slot.traj.mask) for slot in run.done),
        "steps": run.steps,
        "queued_steps": steps,
        "row_use": stats["decoded"] / max(1, run.steps * R),
        # Without a queue, what it was at the start.
        "occupancy": held / (steps * R) if steps else min(1.0, len(run.done) / R),
    }


def combined(stats: Sequence[dict[str, float]]) -> dict[str, float]:
    """The counters of rollouts that ran beside each other, each on as many slots.

    Counts add up, shares are means over the steps that they are of, and the seconds are
    those of the slowest.
    """
    if len(stats) == 1:
        return stats[0]

    def mean(name: str, over: str) -> float:
        weights = [some[over] for some in stats]
        if not any(weights):
            weights = [1] * len(stats)
        total = sum(w * some[name] for w, some in zip(weights, stats, strict=True))
        return total / sum(weights)

    found = {}
    for name in sorted(set().union(*stats)):
        values = [some.get(name, 0) for some in stats]
        found[name] = max(values) if name.startswith("seconds_") else sum(values)
    return found | {
        "row_use": mean("row_use", "steps"),
        "occupancy": mean("occupancy", "queued_steps"),
    }
