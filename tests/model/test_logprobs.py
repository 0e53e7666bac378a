"""Token log-probs and the embedding against their dense forms, gradients included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import one_device

from lld_jax.model import logprobs

B, T, D, V, VALID = 3, 11, 8, 20, 17


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    return {
        "hidden": rng.normal(size=(B, T, D)).astype(np.float32),
        "head": rng.normal(size=(V, D)).astype(np.float32),
        "ids": rng.integers(0, VALID, (B, T)),
        # What the outputs are multiplied with before they are added up.
        "weight": rng.normal(size=(2, B, T)).astype(np.float32),
    }


def dense(hidden, head, ids, temperature):
    """The definition: softmax over the valid ids, shifted by one position."""
    logits = jnp.einsum("btd,vd->btv", hidden, head[:VALID]) / temperature
    logp = jax.nn.log_softmax(logits[:, :-1])
    picked = jnp.take_along_axis(logp, ids[:, 1:, None], -1)[..., 0]
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (picked, entropy))


def split(hidden, head, ids, temperature, chunk):
    return logprobs.token_logprobs(
        hidden,
        head,
        ids,
        temperature=temperature,
        valid_vocab=VALID,
        chunk=chunk,
        layout=one_device(),
    )


@pytest.mark.parametrize(
    ("chunk", "temperature"), [(1, 1.0), (3, 0.7), (11, 1.0), (16, 2.0)]
)
def test_against_the_dense_form(case, chunk, temperature):
    @functools.partial(jax.jit, static_argnums=0)
    def both(function, hidden, head):
        def total(hidden, head):
            out = jnp.stack(function(hidden, head, case["ids"], temperature))
            return (out * case["weight"]).sum(), out

        return jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, head)

    chunked = functools.partial(split, chunk=chunk)
    grads, (logps, entropy) = both(chunked, case["hidden"], case["head"])
    expected, (dense_logps, dense_entropy) = both(dense, case["hidden"], case["head"])
    assert logps.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logps, dense_logps, atol=2e-6)
    np.testing.assert_allclose(entropy, dense_entropy, atol=2e-6)
    assert not logps[:, 0].any() and not entropy[:, 0].any()
    for found, wanted in zip(grads, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert not grads[1][VALID:].any()  # rows that are never sampled get no gradient
    assert not grads[0][:, -1].any()  # nothing follows the last position


MASKS = {
    "some": lambda rng: rng.integers(0, 2, (B, T)),
    "a row without": lambda rng: rng.integers(0, 2, (B, T)) * [[1], [0], [1]],
    "one": lambda rng: np.eye(B, T, T - 1, dtype=int),
    "all": lambda rng: np.ones((B, T), int),
    "none": lambda rng: np.zeros((B, T), int),
}


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize("name", MASKS)
def test_at_some_positions_against_the_dense_form(case, name, chunk):
    mask = MASKS[name](np.random.default_rng(2))
    mask[0, 0] = 1  # nothing comes before it

    def masked(hidden, head, ids, temperature):
        return logprobs.token_logprobs(
            hidden,
            head,
            ids,
            temperature=temperature,
            valid_vocab=VALID,
            chunk=chunk,
            layout=one_device(),
            mask_BxT=mask,
        )

    def expected(*args):
        return tuple(jnp.where(mask, x, 0.0) for x in dense(*args))

    @functools.partial(jax.jit, static_argnums=0)
    def both(function, hidden, head):
        def total(hidden, head):
            out = jnp.stack(function(hidden, head, case["ids"], 0.7))
            return (out * case["weight"]).sum(), out

        return jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, head)

    hidden = case["hidden"].copy()
    grads, out = both(masked, hidden, case["head"])
    wanted, dense_out = both(expected, hidden, case["head"])
    np.testing.assert_allclose(out, dense_out, atol=2e-6)
    assert out.dtype == jnp.float32 and not out[:, mask == 0].any()
    for a, b in zip(grads, wanted, strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)
    # What stands before other tokens is not even read.
    hidden[:, :-1][mask[:, 1:] == 0] = hidden[:, -1] = np.nan
    again, same = both(masked, hidden, case["head"])
    jax.tree.map(np.testing.assert_array_equal, (again, same), (grads, out))


def test_the_work_follows_the_number_of_positions(case):
    """No logits of more than a chunk of positions, and the loop's length is traced."""
    args = jnp.asarray(case["hidden"]), case["head"], case["ids"]

    def run(hidden, head, ids, mask):
        return logprobs.token_logprobs(
            hidden,
            head,
            ids,
            temperature=1.0,
            valid_vocab=VALID,
            chunk=5,
            layout=one_device(),
            mask_BxT=mask,
        )

    text = str(jax.make_jaxpr(run)(*args, np.ones((B, T), int)))
    assert f"f32[5,{V}]" in text and f",{T},{V}]" not in text
    assert "while[" in text and "scan[" not in text


def test_uniform_hidden_states_give_the_log_of_the_valid_vocabulary(case):
    hidden = np.zeros_like(case["hidden"])
    logps, entropy = split(hidden, case["head"], case["ids"], 1.0, 4)
    np.testing.assert_allclose(logps[:, 1:], -np.log(VALID), rtol=1e-6)
    np.testing.assert_allclose(entropy[:, 1:], np.log(VALID), rtol=1e-6)


def test_an_id_beyond_the_valid_vocabulary_has_no_probability(case):
    ids = case["ids"].copy()
    ids[1, 4] = VALID
    logps, _ = split(case["hidden"], case["head"], ids, 1.0, 4)
    assert logps[1, 4] < -1e9 and np.isfinite(logps).all()
    rest = np.delete(logps.ravel(), 1 * T + 4)
    assert (rest > -50).all()


def test_logits_are_accumulated_in_float32(case):
    """bfloat16 states and head: products of exact inputs, no rounding of the logits."""
    hidden, head = (jnp.bfloat16(case[name]) for name in ("hidden", "head"))
    logps, _ = split(hidden, head, case["ids"], 1.0, 4)
    exact, _ = dense(np.float32(hidden), np.float32(head), case["ids"], 1.0)
    np.testing.assert_allclose(logps, exact, atol=1e-5)


@pytest.mark.parametrize("chunk", [None, 1, 4, 5, 100])
def test_embed_looks_up_and_scatters_its_gradient(case, chunk):
    weight = np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32)

    @jax.jit
    def run(table):
        def total(table):
            layout = one_device()
            x = logprobs.embed(table, case["ids"], layout=layout, chunk=chunk)
            return (x * weight).sum(), x

        return jax.grad(total, has_aux=True)(table)

    grad, x = run(case["head"])
    np.testing.assert_array_equal(x, case["head"][case["ids"]])
    expected = np.zeros((V, D), np.float32)
    np.add.at(expected, case["ids"], weight)
    np.testing.assert_allclose(grad, expected, atol=1e-5)


def test_embedded_rows_are_cast_before_they_travel(case):
    x = logprobs.embed(
        case["head"], case["ids"], layout=one_device(), dtype=jnp.bfloat16, chunk=2
    )
    assert x.dtype == jnp.bfloat16
    np.testing.assert_array_equal(x, jnp.bfloat16(case["head"])[case["ids"]])
