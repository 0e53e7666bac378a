"""Losses against the reference PyTorch code of arXiv 2512.04220.

data/llds_golden_public.npz holds inputs, losses and gradients that the code gave for
17 small batches, c00 to c16. Places where lld_jax differs on purpose have own tests.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import DATA

from lld_jax import losses
from lld_jax.losses import LossConfig

GOLDEN = DATA / "llds_golden_public.npz"
CASES = [f"c{n:02d}" for n in range(17)]
ROWS, TOKENS = 16, 64  # the largest case; the others are padded to it, to compile once
LAMBDA = 0.2
MASKED_ANSWER = {"": 0.2, "_mw0": 0.0, "_mw0.1": 0.1, "_mw0.2": 0.2, "_mw0.5": 0.2}
AUTHORS = dict(entropy=0.001, llds_normalizer="all")
BY_ACTION = LossConfig()
BY_RESPONSE = LossConfig(policy="gspo", llds_gate="response")


@functools.cache
def golden(case: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        names = [key for key in file.files if key.startswith(case + "/")]
        return {key.split("/")[1]: file[key] for key in names}


def padded(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, ROWS - x.shape[0]), (0, TOKENS - x.shape[1])))


def reference_batch(case: str) -> dict[str, np.ndarray]:
    g = golden(case)
    batch = {
        "logps": g["log_prob"],
        "old_logps": g["old_log_prob"],
        "ref_logps": g["ref_log_prob"],
        "entropy": g["entropy"],
        "mask": g["loss_mask"],
        "answer_mask": 1 - g["answer_mask"],  # theirs is 0 on the answer
        "advantages": g["advantages"],
    }
    half = np.zeros(ROWS, np.int32)
    half[len(g["log_prob"]) // 2 :] = 1
    return {key: padded(x) for key, x in batch.items()} | {"half": half}


@functools.partial(jax.jit, static_argnames="config")
def total(logps, batch, config):
    w = losses.weights(
        batch["mask"], batch["advantages"], config, micro_ids=batch["half"]
    )
    return losses.objective(logps, batch["entropy"], batch, w, config)


@jax.jit
def everything(batch):
    """All losses of the golden file, with gradients: {name: (loss, gradient)}."""
    mask, advantages = batch["mask"], batch["advantages"]
    old, half = batch["old_logps"], batch["half"]
    functions = {}

    def policy(logps, name):
        config = LossConfig(policy=name)
        ratio = {"grpo": losses.token_ratio, "gspo": losses.sequence_ratio}[name]
        loss, _ = losses.clipped_surrogate(
            ratio(logps, old, mask), advantages, mask, 0.2, 0.2
        )
        w = losses.weights(mask, advantages, config, micro_ids=half)
        return jnp.sum(w.policy * loss)

    def kl(logps):
        loss = losses.kl_penalty(logps, batch["ref_logps"], mask)
        return jnp.sum(loss) / jnp.maximum(jnp.sum(mask), 1)

    def llds(logps, beta, gate):
        return LAMBDA * losses.llds_loss(
            logps,
            old,
            advantages,
            mask,
            gate=gate,
            answer_mask=batch["answer_mask"],
            answer_weight=beta / LAMBDA,
            normalizer="all",
        )

    functions["pg_loss"] = functools.partial(policy, name="grpo")
    functions["gspo_loss"] = functools.partial(policy, name="gspo")
    functions["kl_loss"] = kl
    configs = {
        "grpo_nollds": LossConfig(llds_coef=0.0, **AUTHORS),
        "grpo_a": LossConfig(**AUTHORS),
        "grpo_r": LossConfig(llds_gate="response", **AUTHORS),
        "gspo_a": LossConfig(policy="gspo", **AUTHORS),
        "gspo_r": LossConfig(policy="gspo", llds_gate="response", **AUTHORS),
        "grpo_a_mw0": LossConfig(llds_answer=0.0, **AUTHORS),
        "grpo_a_accum2": LossConfig(average="microbatch", **AUTHORS),
    }
    for name, config in configs.items():
        functions[f"total_{name}"] = lambda logps, config=config: total(
            logps, batch, config
        )[0]
    logps = batch["logps"]
    results = {k: jax.value_and_grad(f)(logps) for k, f in functions.items()}
    betas = jnp.array(list(MASKED_ANSWER.values()))
    for letter, gate in (("a", "action"), ("r", "response")):
        f = functools.partial(llds, gate=gate)
        loss, gradient = jax.vmap(jax.value_and_grad(f), (None, 0))(logps, betas)
        for n, suffix in enumerate(MASKED_ANSWER):
            results[f"llds_{letter}{suffix}_loss"] = loss[n], gradient[n]
    return results


@functools.cache
def ours(case: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return jax.tree.map(np.asarray, everything(reference_batch(case)))


def assert_loss(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6)


def assert_grad(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-7)


def real_part(case: str, gradient: np.ndarray) -> np.ndarray:
    rows, tokens = golden(case)["log_prob"].shape
    rest = gradient.copy()
    rest[:rows, :tokens] = 0
    assert not rest.any()
    return gradient[:rows, :tokens]


@pytest.mark.parametrize("case", [c for c in CASES if c != "c15"])
def test_losses_and_gradients_are_the_references(case):
    g = golden(case)
    tie = (g["loss_mask"] == 1) & (g["old_log_prob"] == g["log_prob"])
    compared = 0
    for name, (loss, gradient) in ours(case).items():
        if name in g:
            assert_loss(loss, g[name])
        if name == "total_grpo_a_accum2" and case == "c14":
            continue  # half of it is NaN there; test_micro_batch_without_actions
        if case == "c12" and ("llds_r" in name or name.endswith("_r")):
            continue  # the reference's gate leaks there; test_closed_response_gate
        # At exact ties the reference passes half a gradient; test_ties below.
        keep = ~tie if "llds" in name or "_a" in name or "_r" in name else True
        gradient = real_part(case, gradient)
        assert_grad(np.where(keep, gradient, 0), np.where(keep, g["grad_" + name], 0))
        compared += 1
    assert compared >= 13


def test_every_loss_of_the_reference_is_compared():
    for case in CASES:
        names = {k for k in golden(case) if k.startswith("grad_")}
        assert names == {"grad_" + k for k in ours(case)}


def test_ties_inside_an_open_action_have_no_gradient():
    g = golden("c09")
    tie = (g["a_token_gate"] == 1) & (g["old_log_prob"] == g["log_prob"])
    assert tie.sum() > 0 and np.all(g["grad_llds_a_loss"][tie] < 0)
    for name, (_, gradient) in ours("c09").items():
        if name.startswith("llds"):
            assert np.all(real_part("c09", gradient)[tie] == 0)
    # The rest of the total's gradient at ties is that of the total without LLDS.
    with_llds = real_part("c09", ours("c09")["total_grpo_a"][1])
    assert_grad(with_llds[tie], g["grad_total_grpo_nollds"][tie])


def test_closed_response_gate_is_a_constant():
    """A summed drop of exactly 0 closes the gate, and nothing leaks through it."""
    g = golden("c12")
    assert np.abs(g["grad_llds_r_loss"]).max() > 0  # the leak
    for name, (loss, gradient) in ours("c12").items():
        if name.startswith("llds_r"):
            assert loss == 0 and not gradient.any()
    assert_grad(
        real_part("c12", ours("c12")["total_grpo_r"][1]), g["grad_total_grpo_nollds"]
    )


def test_micro_batch_without_actions_does_not_count():
    """One action token in the batch: its micro-batch's mean is the mean of means."""
    whole, split = ours("c14")["total_grpo_a"], ours("c14")["total_grpo_a_accum2"]
    assert np.isnan(golden("c14")["grad_total_grpo_a_accum2"]).any()
    assert split[0] == whole[0] != 0
    np.testing.assert_array_equal(split[1], whole[1])


def test_batch_without_action_tokens_gives_zero():
    assert np.isnan(golden("c15")["pg_loss"])
    for loss, gradient in ours("c15").values():
        assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("case", CASES)
def test_advantages_are_the_references(case):
    g = golden(case)
    rewards = g["token_level_rewards"].sum(axis=1)
    actual = jax.jit(losses.group_advantages)(rewards, g["group_index"])
    expected = np.asarray(actual)[:, None] * g["attn_mask"]
    np.testing.assert_allclose(expected, g["advantages"], rtol=1e-5, atol=2e-6)
    if case == "c03":
        assert np.all(np.asarray(actual) == 0)


@pytest.mark.parametrize("case", CASES)
def test_actions_and_gates_are_the_references(case):
    g, batch = golden(case), reference_batch(case)
    preserved = (g["loss_mask"] == 1) & (g["advantages"] >= 0)
    actions = np.asarray(jax.jit(losses.action_ids)(padded(preserved)))
    actions = actions[: preserved.shape[0], : preserved.shape[1]]
    np.testing.assert_array_equal(actions, g["a_chunk_id"])
    rows = preserved.any(axis=1)
    for config, gates, opened in (
        (BY_ACTION, g["a_chunk_count"].sum(), g["a_chunk_gate"].sum()),
        (BY_RESPONSE, rows.sum(), g["r_row_gate"][rows].sum()),
    ):
        _, sums = total(batch["logps"], batch, config)
        assert sums["gates"] == gates and sums["open_gates"] == opened


@pytest.mark.parametrize("case", [c for c in CASES if c != "c15"])
def test_sums_are_the_references_means(case):
    g, batch = golden(case), reference_batch(case)
    for config, prefix in ((BY_ACTION, "pg"), (BY_RESPONSE, "gspo")):
        _, sums = total(batch["logps"], batch, config)
        sums = {key: float(x) for key, x in sums.items()}
        n = g["loss_mask"].sum()
        assert sums["tokens"] == n
        assert_loss(sums["clipped"] / n, g[f"{prefix}_clipfrac"])
        assert_loss(sums["drop"] / n, g["ppo_kl"])
        assert_loss(sums["kl"] / n, g["kl_loss"])
        assert_loss(sums["entropy"] / n, g["entropy_loss"])
        assert_loss(sums["loss_policy"], g[f"{prefix}_loss"])
    mask = g["loss_mask"] == 1
    for name, part in (
        ("correct", mask & (g["advantages"] > 0)),
        ("zero", mask & (g["advantages"] == 0)),
        ("wrong", mask & (g["advantages"] < 0)),
    ):
        assert sums[f"tokens_{name}"] == part.sum()
        np.testing.assert_allclose(
            sums[f"logp_{name}"], g["log_prob"][part].sum(), rtol=1e-5
        )
    kl = losses.kl_penalty(batch["logps"], batch["ref_logps"], batch["mask"])
    np.testing.assert_allclose(kl, padded(g["kl_token"] * mask), rtol=1e-5, atol=2e-6)
