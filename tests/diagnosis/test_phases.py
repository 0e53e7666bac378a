"""Phases of made-up runs: each kind of evidence, alone and together."""

import math

import numpy as np
import pytest

from lld_jax.diagnosis import phases
from lld_jax.diagnosis.phases import Thresholds

W = Thresholds().window


def run(steps, reward, logp=-0.5, gradient=1.0, entropy=1.0, repeated=2.0, seen=0.0):
    """The phases of a run; each series is a number or a function of the step."""

    def at(series, step):
        return series(step) if callable(series) else series

    watch, found = phases.start(), []
    for step in range(steps):
        record = {
            "step": step,
            "reward/mean": at(reward, step),
            "lld/logp_correct": at(logp, step),
            "lld/seen_correct": at(seen, step),
            "grad/norm": at(gradient, step),
            "policy/entropy": at(entropy, step),
            "rollout/repeated_ngram": at(repeated, step),
            "phase/name": "text is no evidence",
        }
        watch, phase = phases.observe(watch, record, Thresholds())
        found.append(phase)
    return found


def rising(step):
    return min(0.8, 0.2 + 0.01 * step)


def names(found):
    return [phase.name for phase in found]


def test_a_run_that_learns_is_healthy():
    found = run(100, rising, logp=lambda s: -0.9 + 0.005 * s)
    assert set(names(found)) == {"healthy"}
    noisy = np.random.default_rng(0).normal(0, 0.05, 300)
    found = run(300, lambda s: 0.5 + noisy[s], gradient=lambda s: 1 + 4 * noisy[s])
    assert not {"decay", "collapse"} & set(names(found))


def test_the_reward_rises_and_the_likelihood_does_not():
    found = run(60, rising, logp=lambda s: -0.5 - 0.0005 * s)
    assert found[-1].name == "stagnation" and found[-1].level == 1
    assert "the reward rose by 0.10" in found[-1].evidence


def test_displacement_by_other_updates_is_decay_while_the_reward_rises():
    limit = Thresholds().displaced
    found = run(60, rising, logp=lambda s: -0.9 + 0.005 * s, seen=-1.2 * limit)
    assert found[-1].name == "decay"
    assert "take 0.010 nats a token from correct answers" in found[-1].evidence
    # As soon as there is a window, and it has lasted.
    assert names(found).index("decay") == W - 1 + Thresholds().patience - 1
    assert set(names(run(60, rising, logp=-0.5, seen=-0.8 * limit))) == set(
        names(run(60, rising, logp=-0.5))
    )
    gained = run(60, rising, logp=lambda s: -0.9 + 0.005 * s, seen=1.0)
    assert set(names(gained)) == {"healthy"}


def test_the_likelihood_falls_and_entropy_grows():
    found = run(
        120,
        rising,
        logp=lambda s: -0.3 - max(0, s - 60) * 0.02,
        entropy=lambda s: 0.5 + max(0, s - 60) * 0.02,
    )
    first = names(found).index("decay")
    assert 60 < first < 90
    assert set(names(found[:60])) <= {"healthy", "stagnation"}
    assert "log-prob" in found[-1].evidence and "entropy" in found[-1].evidence


def test_the_reward_falls_to_nothing():
    found = run(150, lambda s: rising(s) if s < 80 else max(0, 0.8 - 0.02 * (s - 80)))
    order = names(found)
    assert order.index("decay") < order.index("collapse")
    assert order[-1] == "collapse" and found[-1].level == 3
    # A window's mean is under half of its peak.
    assert 80 + 20 <= order.index("collapse") <= 80 + 20 + W


def test_a_reward_that_never_rose_is_no_collapse():
    found = run(100, lambda s: 0.3 if s < 15 else 0.1)
    assert set(names(found)) == {"healthy"}


def test_two_odd_steps_are_not_believed():
    found = run(80, lambda s: rising(s) * (s not in (60, 61)))
    assert not {"decay", "collapse"} & set(names(found))


def test_a_gradient_that_is_not_finite_is_an_explosion():
    found = run(60, rising, gradient=lambda s: math.inf if s > 40 else 1.0)
    assert "the gradient is inf" in found[-1].evidence


def test_a_run_that_recovers_is_healthy_again():
    found = run(200, lambda s: 0.2 if s < 10 else 0.3 if 60 <= s < 90 else 0.8)
    assert "decay" in names(found) or "collapse" in names(found)
    assert found[-1].name == "healthy"


def test_metrics_that_are_missing_leave_their_evidence_out():
    watch = phases.start()
    for step in range(50):
        watch, phase = phases.observe(
            watch, {"reward/mean": rising(step)}, Thresholds()
        )
    assert phase.name == "healthy"


@pytest.mark.parametrize("step", range(W - 1))
def test_the_first_steps_say_nothing(step):
    assert run(step + 1, 0.0)[-1].name == "healthy"
