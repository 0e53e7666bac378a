"""Is a run healthy, stagnating, decaying or collapsed? Told step by step, with reasons.

The paper's phases (arXiv 2512.04220): the likelihood of correct answers stagnates
though the reward rises; then it falls steadily while all else looks well; then it falls
fast, gradients and entropy explode and the reward goes to zero. A pure function of the
records of `metrics.jsonl`, so a run that goes on after a kill sees the same phases.

What tells first is lazy likelihood displacement itself: what the updates before its own
did to a correct answer (`lld/seen_correct`). Healthy runs lose next to nothing there.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

PHASES = ("healthy", "stagnation", "decay", "collapse")


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """When a phase begins; means are over the last `window` steps.

    `experiments/collapse` compares them with others, and says how often they err.
    """

    window: int = 10
    patience: int = 3  # steps in a row before a phase is believed
    rise: float = 0.02  # of the reward over a window that is called a rise
    fall: float = 0.15  # nats a token that correct answers are below their best mean
    fall_relative: float = 0.5  # and that as a share of the best mean
    displaced: float = 0.008  # nats a token that correct answers lose to other updates
    learned: float = 1.25  # times its start that the reward's peak is, to be a loss
    reward_fall: float = 0.25  # share of its peak that the reward has lost
    gradient: float = 3.0  # times its median so far
    entropy: float = 1.5  # times its least mean so far
    repeated: float = 2.0  # times the first window's longest repeated n-gram


@dataclasses.dataclass(frozen=True)
class Phase:
    """`name` is one of PHASES; `evidence` says in words what it rests on."""

    name: str
    evidence: str

    @property
    def level(self) -> int:
        """0 healthy to 3 collapse."""
        return PHASES.index(self.name)


@dataclasses.dataclass(frozen=True)
class Watch:
    """What `observe` remembers of the steps so far."""

    recent: tuple[dict[str, float], ...] = ()  # at most two windows
    gradients: tuple[float, ...] = ()
    start_rewards: tuple[float, ...] = ()  # of the first steps
    peak_reward: float = -math.inf
    best_logp: float = -math.inf
    least_entropy: float = math.inf
    first_repeated: float = math.nan
    suspects: tuple[str, int] = ("healthy", 0)  # a phase, and for how many steps
    phase: str = "healthy"


_START = 3  # steps whose mean reward is the start

_SERIES = {
    "reward": "reward/mean",
    "logp": "lld/logp_correct",
    "seen": "lld/seen_correct",
    "gradient": "grad/norm",
    "entropy": "policy/entropy",
    "repeated": "rollout/repeated_ngram",
}


def start() -> Watch:
    """The watch before the first step."""
    return Watch()


def observe(
    watch: Watch, record: Mapping[str, Any], thresholds: Thresholds
) -> tuple[Watch, Phase]:
    """Takes the metrics of one step; returns the watch to go on with, and the phase.

    A metric that is missing, or not finite, leaves its kind of evidence out, save a
    gradient that is not finite, which counts as an explosion. The first `window` steps
    are healthy: there is nothing yet to compare with.
    """
    t = thresholds
    now = {name: _number(record.get(key)) for name, key in _SERIES.items()}
    if "grad/norm" in record and math.isnan(now["gradient"]):
        now["gradient"] = math.inf
    if not now["logp"]:  # no correct trajectory: a mean of nothing is written as 0
        now["logp"] = math.nan
    recent = (*watch.recent, now)[-2 * t.window :]
    means = {name: _mean(recent[-t.window :], name) for name in _SERIES}
    gradients = watch.gradients + (
        (now["gradient"],) if math.isfinite(now["gradient"]) else ()
    )
    full = len(recent) >= t.window
    starts = watch.start_rewards
    if len(starts) < _START and math.isfinite(now["reward"]):
        starts += (now["reward"],)
    watch = dataclasses.replace(
        watch, recent=recent, gradients=gradients, start_rewards=starts
    )
    if not full:
        return watch, Phase("healthy", "the first steps")
    watch = dataclasses.replace(
        watch,
        first_repeated=_first(watch.first_repeated, means["repeated"]),
        peak_reward=_most(watch.peak_reward, means["reward"]),
        best_logp=_most(watch.best_logp, means["logp"]),
        least_entropy=-_most(-watch.least_entropy, -means["entropy"]),
    )
    name, evidence = _judge(watch, means, t)
    # A phase that is worse has to last; one that is better is believed at once.
    if PHASES.index(name) <= PHASES.index(watch.phase):
        return dataclasses.replace(watch, phase=name, suspects=(name, 0)), Phase(
            name, evidence
        )
    before, steps = watch.suspects
    worse = PHASES.index(before) >= PHASES.index("decay") <= PHASES.index(name)
    steps = steps + 1 if before == name or worse else 1
    watch = dataclasses.replace(watch, suspects=(name, steps))
    if steps >= t.patience:
        return dataclasses.replace(watch, phase=name), Phase(name, evidence)
    return watch, Phase(watch.phase, f"{steps} of {t.patience} steps: {evidence}")


def _judge(watch: Watch, means: dict[str, float], t: Thresholds) -> tuple[str, str]:
    """The phase that the last window looks like, and why."""
    signs = []
    lost = watch.best_logp - means["logp"]
    if lost > max(t.fall, t.fall_relative * abs(watch.best_logp)):
        signs.append(
            f"correct answers have log-prob {means['logp']:.2f} a token, after "
            f"{watch.best_logp:.2f} at best"
        )
    displaced = means["seen"] < -t.displaced
    if displaced:
        signs.append(
            f"updates on other questions take {-means['seen']:.3f} nats a token from "
            "correct answers"
        )
    peak, start = watch.peak_reward, statistics.fmean(watch.start_rewards or (0.0,))
    learned = peak >= t.learned * start
    fell = peak > 0 and learned and means["reward"] < (1 - t.reward_fall) * peak
    if fell:
        signs.append(f"the reward is {means['reward']:.2f}, after {peak:.2f} at best")
    median = statistics.median(watch.gradients or (math.inf,))
    exploded = means["gradient"] > t.gradient * median or math.isinf(means["gradient"])
    if exploded:
        signs.append(f"the gradient is {means['gradient']:.3g}, usually {median:.3g}")
    wild = means["entropy"] > t.entropy * watch.least_entropy
    if wild:
        signs.append(
            f"the entropy is {means['entropy']:.2f}, after {watch.least_entropy:.2f} "
            "at least"
        )
    if means["repeated"] > t.repeated * max(watch.first_repeated, 1.0):
        signs.append(
            f"actions repeat {means['repeated']:.0f} tokens, at first "
            f"{watch.first_repeated:.0f}"
        )
    halved = peak > 0 and learned and means["reward"] < 0.5 * peak
    if halved or (fell and exploded and wild):
        return "collapse", "; ".join(signs)
    if fell or displaced or len(signs) > 1:
        return "decay", "; ".join(signs)
    if signs:
        return "stagnation", signs[0]
    before = watch.recent[: -t.window]
    if len(before) < t.window:
        return "healthy", "the first steps"
    rose = means["reward"] - _mean(before, "reward")
    gained = means["logp"] - _mean(before, "logp")
    if rose > t.rise and gained <= 0:
        return "stagnation", (
            f"the reward rose by {rose:.2f} in {t.window} steps, the log-prob of "
            f"correct answers by {gained:.2f}"
        )
    return "healthy", f"reward {means['reward']:.2f}, {peak:.2f} at best"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _mean(records: tuple[dict[str, float], ...], name: str) -> float:
    """Of what was measured; infinite where a value is, NaN without any."""
    values = [r[name] for r in records if not math.isnan(r[name])]
    return sum(values) / len(values) if values else math.nan


def _first(old: float, new: float) -> float:
    return new if math.isnan(old) else old


def _most(old: float, new: float) -> float:
    return new if new > old else old  # NaN is never more
