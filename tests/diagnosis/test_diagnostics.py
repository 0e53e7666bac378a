"""Metrics of a step from trajectories and sums, by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lld_jax.diagnosis import diagnostics
from lld_jax.losses import LossConfig
from lld_jax.protocol.trajectory import (
    append_action,
    append_observation,
    new_trajectory,
)

STATS = {
    "decoded": 30,
    "kept": 30,
    "occupancy": 0.6,
    "row_use": 0.25,
    "seconds_extend": 1.5,
    "seconds_decode": 2.5,
    "seconds_wait": 0.25,
}


def make(draw, reward, reason, lengths, **counters):
    traj = new_trajectory(draw, 0, "q", ("gold",), [1] * 4)
    for i, n in enumerate(lengths):
        if i % 2:
            append_observation(traj, [1] * n)
        else:
            append_action(traj, [1] * n, [-1.0] * n)
    traj.reward, traj.reason = reward, reason
    traj.counters.update(counters)
    return traj


def test_of_rollout():
    found = diagnostics.of_rollout(
        [
            make(0, 1.0, "answered", [3, 5, 2], valid_searches=1, truncated=1),
            make(0, 0.0, "turns", [6], valid_searches=1),
            make(1, 0.0, "answered", [1]),
            make(1, 0.0, "vanished", [1, 1, 1], invalid_actions=2, no_results=1),
        ],
        STATS,
    )
    assert found == {
        "reward/mean": 0.25,
        "reward/mixed": 0.5,
        "rollout/length": (14 + 10 + 5 + 7) / 4,
        "rollout/action_tokens": (5 + 6 + 1 + 2) / 4,
        "rollout/turns": 6 / 4,
        "rollout/repeated_ngram": (2 + 5 + 0 + 0) / 4,
        "rollout/decoded": 30.0,
        "rollout/kept": 30.0,
        "rollout/occupancy": 0.6,
        "rollout/row_use": 0.25,
        "time/rollout_extend": 1.5,
        "time/rollout_decode": 2.5,
        "time/rollout_host": 0.0,
        "time/rollout_wait": 0.25,
        "rollout/searches": 0.5,
        "rollout/invalid_actions": 0.5,
        "rollout/actions_cut": 0.0,
        "rollout/prompts_truncated": 0.0,
        "rollout/observations_truncated": 0.25,
        "rollout/searches_empty": 0.25,
        "rollout/searches_failed": 0.0,
        "end/answered": 0.5,
        "end/turns": 0.25,
        "end/context": 0.0,
        "end/retriever": 0.0,
        "end/tokens": 0.0,
        "end/invalid": 0.0,
        "end/vanished": 0.25,  # a reason that nobody foresaw still shows
    }


def sums(**changes):
    base = dict(
        loss=0.5,
        loss_policy=0.25,
        loss_kl=0.1,
        loss_entropy=2.0,
        loss_llds=0.05,
        tokens=100,
        drop=-4.0,
        kl=3.0,
        entropy=150.0,
        ratio=101.0,
        ratio_max=1.5,
        clipped=5,
        preserved=60,
        penalised=12,
        gates=10,
        open_gates=4,
        tokens_correct=20,
        logp_correct=-10.0,
        tokens_zero=40,
        logp_zero=-80.0,
        tokens_wrong=40,
        logp_wrong=-120.0,
        gap=0.02,
        padding=30,
        places=120,
        norm=1.0,
        skipped=0,
        by_action_tokens=np.array([[15, 5, 0, 0], [40, 0, 0, 0], [10, 10, 10, 10]]),
        by_action_logp=np.array([[-6, -4, 0, 0], [-80, 0, 0, 0], [-30.0] * 4]),
        seen_tokens=np.array([20, 0, 40]),
        seen_displacement=np.array([-2.0, 0.0, -8.0]),
        slope_policy=4.0,
        slope_llds=1.0,
        slope_both=-1.0,
        ratios=np.eye(256)[128] * 100,
    )
    return {k: np.asarray(v, np.float32) for k, v in (base | changes).items()}


def test_of_updates_divides_by_its_own_denominators():
    second = sums(
        loss=0.7, tokens=300, tokens_correct=0, logp_correct=0, gap=9.0, norm=3.0
    )
    found = diagnostics.of_updates([sums(), second], LossConfig())
    expected = {
        "loss/total": 0.6,
        "loss/policy": 0.25,
        "loss/kl": 0.1,
        "loss/llds": 0.05,
        "lld/logp_correct": -10 / 20,  # over tokens of correct trajectories alone
        "lld/logp_zero": -160 / 80,
        "lld/logp_wrong": -240 / 80,
        "lld/drop": -8 / 400,
        "llds/open_gates": 8 / 20,
        "llds/penalised": 24 / 120,
        "llds/preserved": 120 / 400,
        "llds/effective_lambda": 0.2,
        "ratio/mean": 202 / 400,
        "ratio/max": 1.5,
        "ratio/clipped": 10 / 400,
        "policy/kl": 6 / 400,
        "policy/entropy": 300 / 400,
        "policy/sampler_gap": 0.02 / 100,  # of the first update alone
        "grad/norm": 2.0,
        "grad/norm_max": 3.0,
        "grad/skipped": 0.0,
        "batch/action_tokens": 400.0,
        "batch/padding": 60 / 240,
        "lld/logp_correct_action1": -6 / 15,
        "lld/logp_correct_action2": -4 / 5,
        "lld/logp_zero_action1": -80 / 40,
        "lld/logp_wrong_action4": -30 / 10,
        "lld/seen_correct": -2 / 20,
        "lld/seen_wrong": -8 / 40,
        "grad/logps_policy": 2.0,
        "grad/logps_llds": 1.0,
        "grad/logps_cosine": -0.5,
        "ratio/p95": 1.0,
    }
    # Of no token there is no mean.
    assert not found.keys() & {"lld/logp_correct_action3", "lld/seen_zero"}
    assert all(isinstance(value, float) for value in found.values())
    assert {k: found[k] for k in expected} == pytest.approx(expected, rel=1e-4)


def test_the_effective_lambda_follows_the_normalizer():
    found = diagnostics.of_updates([sums()], LossConfig(llds_normalizer="all"))
    assert found["llds/effective_lambda"] == pytest.approx(0.2 * 60 / 100)


def test_empty_batches_and_sick_gradients():
    zeros = {k: 0 * x for k, x in sums().items()}
    found = diagnostics.of_updates([zeros], LossConfig(llds_normalizer="all"))
    assert (found.pop("ratio/p05"), found.pop("ratio/p95")) == (1.0, 1.0)
    assert set(found.values()) == {0.0}
    bad = sums(norm=math.nan, skipped=1)
    found = diagnostics.of_updates([sums(), bad], LossConfig())
    assert math.isnan(found["grad/norm"]) and math.isnan(found["grad/norm_max"])
    assert found["grad/skipped"] == 1.0


def test_speeds():
    record = {"rollout/kept": 600.0, "time/rollout": 2.0}
    record |= {"time/logps": 0.5, "time/update": 1.5}
    found = diagnostics.speeds(record, 5000)
    assert found == {"tokens_per_s/rollout": 300.0, "tokens_per_s/train": 2500.0}


def brute_force(ids):
    n = len(ids)
    grams = {k: [tuple(ids[i : i + k]) for i in range(n - k + 1)] for k in range(1, n)}
    return max((k for k, g in grams.items() if len(set(g)) < len(g)), default=0)


@given(
    st.lists(st.integers(0, 2), max_size=40)
    | st.lists(st.integers(0, 200_000), max_size=20)
)
def test_the_longest_repeat_against_all_ngrams(ids):
    assert diagnostics.longest_repeat(ids) == brute_force(ids)


def test_the_longest_repeat_of_a_loop():
    assert diagnostics.longest_repeat([7, 8, 9] * 200) == 597
    assert diagnostics.longest_repeat(list(range(1000))) == 0


def test_of_displacement():
    trajs = [make(0, 1.0, "answered", [3]), make(0, 0.0, "answered", [2])]
    trajs += [make(1, 1.0, "answered", [4]), make(1, 1.0, "answered", [1])]
    found = diagnostics.of_displacement(
        trajs,
        np.array([1.0, -1.0, 0.0, 0.0]),
        np.array([-3.0, 1.0, 2.0, -1.0]),
        np.array([3, 2, 4, 1]),
    )
    assert found == {
        "lld/displacement_correct": -1.0,
        "lld/displacement_zero": 1 / 5,
        "lld/displacement_wrong": 0.5,
        "lld/response_displacement": pytest.approx((-3 + 2 - 1) / 3),
        "lld/questions_displaced": 0.5,
    }
    none = [make(0, 0.0, "answered", [3])]
    empty = diagnostics.of_displacement(none, np.zeros(1), np.zeros(1), np.zeros(1))
    assert empty == {}
