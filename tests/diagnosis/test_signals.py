"""Sums of an update against definitions and against the objective's own gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lld_jax import losses
from lld_jax.diagnosis import signals
from lld_jax.losses import LossConfig

B, T = 4, 12


def make_batch(seed=0, spread=0.3):
    rng = np.random.default_rng(seed)
    mask = np.zeros((B, T), np.int32)
    mask[:, 2:5] = mask[:, 7:9] = 1
    mask[1, 7:9], mask[2, 10:12] = 0, 1
    old = -rng.exponential(1.0, (B, T)).astype(np.float32)
    logps = old + rng.normal(0, spread, (B, T)).astype(np.float32)
    advantages = np.array([1.0, 0.0, -1.0, 0.5], np.float32)[:, None] * np.ones((1, T))
    batch = {
        "mask": mask,
        "advantages": advantages.astype(np.float32),
        "old_logps": old,
        "ref_logps": old,
        "segments": np.ones((B, T), np.int32),
    }
    return logps, batch


def test_sums_by_sign_and_action():
    logps, batch = make_batch()
    found = signals.of_tokens(
        logps, batch, losses.weights(**weigh(batch), config=LossConfig()), LossConfig()
    )
    tokens = np.zeros((3, 4))
    tokens[0, :2] = 3 + 3, 2 + 2  # rows 0 and 3 are correct, with two actions each
    tokens[1, 0] = 3
    tokens[2, :3] = 3, 2, 2
    np.testing.assert_array_equal(found["by_action_tokens"], tokens)
    first = logps[0, 2:5].sum() + logps[3, 2:5].sum()
    np.testing.assert_allclose(found["by_action_logp"][0, 0], first, rtol=1e-6)
    np.testing.assert_allclose(
        found["by_action_logp"][2, 2], logps[2, 10:12].sum(), rtol=1e-6
    )
    np.testing.assert_array_equal(found["seen_tokens"], tokens.sum(1))
    moved = np.where(batch["mask"] > 0, logps - batch["old_logps"], 0).sum(1)
    np.testing.assert_allclose(
        found["seen_displacement"], [moved[0] + moved[3], moved[1], moved[2]], rtol=1e-5
    )


def weigh(batch):
    return {"mask": batch["mask"], "advantages": batch["advantages"]}


def test_nothing_is_displaced_while_the_weights_have_not_moved():
    logps, batch = make_batch()
    batch["old_logps"] = np.full((B, T), np.nan, np.float32)  # not computed then
    weights = losses.weights(**weigh(batch), config=LossConfig())
    found = signals.of_tokens(logps, batch, weights, LossConfig(), first=True)
    for name in ("seen_tokens", "seen_displacement", "slope_llds", "slope_both"):
        assert not np.any(found[name]), name
    assert found["slope_policy"] > 0
    assert signals.ratio_quantile(np.asarray(found["ratios"]), 0.5) == pytest.approx(
        1, abs=1e-4
    )


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from(["grpo", "gspo"]),
    st.sampled_from(losses.GATES),
    st.sampled_from(losses.NORMALIZERS),
)
def test_the_slopes_are_those_of_the_objective(seed, policy, gate, normalizer):
    """Without KL and entropy the objective's gradient is the sum of the two."""
    logps, batch = make_batch(seed)
    config = LossConfig(
        policy=policy, llds_gate=gate, llds_normalizer=normalizer, kl=0.0
    )
    weights = losses.weights(**weigh(batch), config=config)

    def loss(logps):
        return losses.objective(logps, 0 * logps, batch, weights, config)[0]

    both = jnp.sum(jax.grad(loss)(logps) ** 2)
    found = signals.of_tokens(logps, batch, weights, config)
    total = found["slope_policy"] + found["slope_llds"] + 2 * found["slope_both"]
    np.testing.assert_allclose(total, both, rtol=1e-4)
    assert found["slope_llds"] >= 0


def test_another_lambda_than_the_settings():
    logps, batch = make_batch()
    config = LossConfig()
    weights = losses.weights(**weigh(batch), config=config)
    one = signals.of_tokens(logps, batch, weights, config)["slope_llds"]
    batch |= {"llds_coef": np.float32(0.6)}
    three = signals.of_tokens(logps, batch, weights, config)["slope_llds"]
    np.testing.assert_allclose(three, 9 * one, rtol=1e-5)
    loss, _ = losses.objective(logps, 0 * logps, batch, weights, config)
    parts = losses.objective(logps, 0 * logps, batch, weights, config)[1]
    np.testing.assert_allclose(
        loss,
        parts["loss_policy"] + config.kl * parts["loss_kl"] + 0.6 * parts["loss_llds"],
        rtol=1e-5,
    )


def test_actions_are_counted_anew_in_each_packed_trajectory():
    mask = np.array([[0, 1, 1, 0, 1, 0, 1, 0, 1, 1]])
    segments = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 0]])
    np.testing.assert_array_equal(
        signals.action_numbers(mask, segments), [[0, 1, 1, 0, 2, 0, 1, 0, 2, 1]]
    )
    np.testing.assert_array_equal(
        signals.action_numbers(mask), [[0, 1, 1, 0, 2, 0, 3, 0, 4, 4]]
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.01, 1.0), st.floats(0.02, 0.98))
def test_quantiles_of_the_ratios(seed, spread, share):
    ratios = np.exp(np.random.default_rng(seed).normal(0, spread, 5000))
    edges = signals.ratio_edges()
    assert edges[0] == pytest.approx(0.01) and edges[-1] == pytest.approx(100)
    counts, _ = np.histogram(ratios, edges)
    found = signals.ratio_quantile(counts, share)
    assert np.log(found) == pytest.approx(
        np.log(np.quantile(ratios, share)), abs=0.08 * spread + 2e-3
    )
    assert signals.ratio_quantile(np.zeros(256), share) == 1.0


def test_displacements_count_action_tokens_of_each_trajectory():
    """Two in the first row, one in the second, and none in the third."""
    new = np.array([[[1.0, 2.0, np.nan, 7.0], [5.0] * 4], [[np.nan] * 4] * 2])
    old = np.array([[[0.5, 1.0, 0.0, 4.0], [5.0] * 4], [[0.0] * 4] * 2])
    mask = np.array([[[1, 1, 0, 1], [0, 1, 1, 0]], np.zeros((2, 4))], int)
    segments = np.array([[[1, 1, 2, 2], [1, 1, 1, 0]], np.zeros((2, 4))], int)
    places = np.array([[0, 0, 2, 2], [0, 1, 1, 0], [0, 0, 1, 0]])
    moved, tokens = signals.displacements(new, old, mask, segments, places)
    np.testing.assert_array_equal(moved, [3.0, 0.0, 1.5])
    np.testing.assert_array_equal(tokens, [1, 2, 2])
