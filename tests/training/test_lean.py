"""What makes a big run fit: a reference in bfloat16, a half moment, layers again."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from lld_jax import agent as agent_lib
from lld_jax.training import update


@pytest.fixture(scope="module")
def opened(tmp_path_factory, policy):
    config = tiny.make_config(tmp_path_factory.mktemp("lean"), policy)
    agent = agent_lib.open_agent(config)
    return agent, agent_lib.load_params(agent)


def changed(agent, **fields):
    config = copy.deepcopy(agent.config)
    for name, value in fields.items():
        group, field = name.split("__")
        config[group][field] = value
    return dataclasses.replace(agent, config=config)


def batch(agent, seed=0):
    rng = np.random.default_rng(seed)
    shape = (2, agent.config.optim.micro_rows, agent.config.rollout.max_tokens)
    at = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    mask = ((at > 5) & (at % 7 < 4)).astype(np.int32)
    return {
        "ids": rng.integers(0, agent.valid_vocab, shape, dtype=np.int32),
        "positions": at,
        "segments": np.ones(shape, np.int32),
        "mask": mask,
        "answer_mask": np.zeros(shape, np.int32),
        "advantages": rng.choice([-1.0, 0.0, 1.0], (*shape[:2], 1)).astype(np.float32)
        * np.ones(shape, np.float32),
        "sampler_logps": np.zeros(shape, np.float32),
    }


def test_a_reference_in_bfloat16_scores_as_the_weights_it_came_from(opened):
    agent, params = opened
    agent = changed(agent, model__dtype="bfloat16")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    reference = update.keep_reference(agent, rounded)
    assert {x.dtype for x in jax.tree.leaves(reference)} == {jnp.dtype("bfloat16")}
    _, logps_fn, _, _ = update.make_functions(agent)
    arrays = batch(agent)
    np.testing.assert_array_equal(
        logps_fn(reference, arrays, 0, 2), logps_fn(rounded, arrays, 0, 2)
    )


def step(agent, params):
    """State after one update, and its metrics."""
    init, logps_fn, update_fn, weigh = update.make_functions(agent)
    arrays = batch(agent)
    logps = logps_fn(params, arrays, 0, 2)
    arrays |= {"old_logps": logps - 0.1, "ref_logps": logps + 0.1}
    scalars = {"valid_searches": np.float32(1), "llds_coef": np.float32(0.2)}
    state = init(jax.tree.map(jnp.copy, params))
    return update_fn(state, arrays, weigh(arrays), scalars, 0.01, False, 2)


def largest(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.abs(jnp.float32(x) - jnp.float32(y)).max()) for x, y in pairs)


def test_a_moment_in_bfloat16_is_rounded_and_moves_the_same_way(opened):
    agent, params = opened
    whole, _ = step(agent, params)
    half, _ = step(changed(agent, optim__moment="bfloat16"), params)
    a, b = whole["opt"][1], half["opt"][1]
    assert {x.dtype for x in jax.tree.leaves(b.mu)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(b.nu)} == {jnp.dtype("float32")}
    for x, y in zip(jax.tree.leaves(a.mu), jax.tree.leaves(b.mu), strict=True):
        # Half a unit of bfloat16, and a last bit of float32 from another program.
        np.testing.assert_allclose(np.float32(y), x, rtol=2**-8 + 1e-4, atol=1e-9)
    # It is rounded to be kept: the step that made it is the same, but for gradients
    # next to 0. Rounded before, it would move each weight by up to 0.01 / 256 more.
    pairs = jax.tree.leaves(whole["params"]), jax.tree.leaves(half["params"])
    gaps = [np.abs(x - y).ravel() for x, y in zip(*jax.device_get(pairs), strict=True)]
    assert np.quantile(np.concatenate(gaps), 0.99) < 1e-6


@pytest.mark.parametrize("remat", ["layer", "attention"])
def test_what_is_computed_again_changes_no_gradient(opened, remat):
    agent, params = opened
    kept, kept_sums = step(changed(agent, model__remat="none"), params)
    again, sums = step(changed(agent, model__remat=remat), params)
    assert float(sums["norm"]) == pytest.approx(float(kept_sums["norm"]), rel=1e-5)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(kept["opt"][1].mu))
    assert largest(kept["opt"][1].mu, again["opt"][1].mu) < 1e-5 * scale
