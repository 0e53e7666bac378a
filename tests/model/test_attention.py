"""Attention over rows and over a cache against the dense definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import serving_device

from lld_jax.model import attention
from lld_jax.model import cached as cached_lib

B, T, K, G, H = 2, 13, 2, 3, 6


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    shapes = {"q": (B, T, K, G, H), "k": (B, T, K, H), "v": (B, T, K, H)}
    qkv = [rng.normal(size=shape).astype(np.float32) for shape in shapes.values()]
    segments = np.array([[1] * 5 + [2] * 6 + [0] * 2, [1] * 13])
    return qkv, segments


def dense(q, k, v, segments):
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) / np.sqrt(H)
    allowed = np.tril(np.ones((T, T), bool)) & (
        segments[:, :, None] == segments[:, None, :]
    )
    scores = jnp.where(allowed[:, None, None], scores, -jnp.inf)
    return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), v)


@pytest.mark.parametrize("block", [3, 4, 64])
def test_rows_against_the_dense_form(case, block):
    qkv, segments = case
    weight = np.random.default_rng(1).normal(size=(B, T, K, G, H)).astype(np.float32)

    def run(function):
        def total(qkv):
            out = function(*qkv)
            return (out * weight).sum(), out

        return jax.jit(jax.grad(total, has_aux=True))(qkv)

    grads, out = run(
        lambda q, k, v: attention.row_attention(q, k, v, segments, block=block)
    )
    expected, wanted = run(lambda q, k, v: dense(q, k, v, segments))
    np.testing.assert_allclose(out, wanted, atol=1e-6)
    for a, b in zip(grads, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_large_scores_stay_finite(case):
    (q, k, v), segments = case
    out = attention.row_attention(q * 1e4, k, v, segments, block=4)
    assert np.isfinite(out).all()


L, R, S, BLOCK = 2, 4, 16, 4


@pytest.fixture(scope="module", params=[False, True], ids=["cpu", "head_last"])
def cached(request):
    """A cache of noise (stale keys of earlier trajectories), and jitted attention."""
    rng = np.random.default_rng(2)
    shape = (L, S // BLOCK, R, K)
    noise = [
        rng.normal(size=(*shape, *last)).astype(np.float32)
        for last in ((H, BLOCK), (BLOCK, H))
    ]
    if request.param:
        noise[0] = np.ascontiguousarray(np.swapaxes(noise[0], 4, 5))

    @functools.partial(jax.jit, static_argnames="at_once")
    def attend(q, k, v, cache, rows, positions, end, at_once=1):
        return cached_lib.cache_attention(
            q,
            k,
            v,
            cache,
            jnp.int32(1),
            rows_E=rows,
            positions_ExN=positions,
            end=end,
            at_once=at_once,
            head_last=request.param,
            layout=serving_device(),
        )

    return tuple(noise), attend


def flat(k, v):
    """Keys and values of a cache as `[L, R, K, S, H]`."""
    k = np.asarray(k) if k.shape[5] == H else np.swapaxes(k, 4, 5)
    return [np.moveaxis(x, 1, 3).reshape(L, R, K, S, H) for x in (k, np.asarray(v))]


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_a_row_appended_in_pieces_to_a_dirty_cache(case, cached, at_once):
    """5, then 8 tokens in slots 3 and 1 give what the whole rows give at once."""
    (q, k, v), _ = case
    noise, attend = cached
    wanted = dense(q, k, v, np.ones((B, T), int))
    rows, cache, outs = np.array([3, 1]), noise, []
    for start, stop in ((0, 5), (5, 13)):
        positions = np.full((B, 8), S)
        positions[:, : stop - start] = np.arange(start, stop)
        piece = [
            np.pad(
                x[:, start:stop],
                ((0, 0), (0, 8 - stop + start)) + ((0, 0),) * (x.ndim - 2),
                constant_values=9.0,
            )
            for x in (q, k, v)
        ]
        out, cache = attend(*piece, cache, rows, positions, stop, at_once)
        outs.append(out[:, : stop - start])
    np.testing.assert_allclose(np.concatenate(outs, 1), wanted, atol=1e-6)
    for before, after, new in zip(flat(*noise), flat(*cache), (k, v), strict=True):
        expected = before.copy()
        expected[1][rows, :, :T] = np.swapaxes(new, 1, 2)
        np.testing.assert_array_equal(after, expected)  # nothing else was written


def test_bfloat16_products_exist_on_a_cpu(case, cached):
    """For one new token a slot and for several, accumulated in float32."""
    (q, k, v), _ = case
    noise, attend = cached
    half = [jnp.bfloat16(x) for x in (q, k, v)]
    at = np.tile(np.arange(T), (2, 1))
    rows = np.array([0, 2])
    exact, _ = attend(*map(np.float32, half), noise, rows, at, T)
    rough = tuple(jnp.bfloat16(x) for x in noise)
    out, cache = attend(*half, rough, rows, at, T)
    np.testing.assert_allclose(np.float32(out), exact, atol=0.03)
    one = [x[:, 5:6].repeat(2, axis=0) for x in half]
    out, _ = attend(*one, cache, None, np.full((4, 1), 5), 6)
    # Slots 0 and 2 hold their row's first five tokens.
    np.testing.assert_allclose(np.float32(out[0, 0]), exact[0, 5], atol=0.03)


def test_blocks_beyond_the_end_of_a_slot_change_no_bit(case, cached):
    (q, k, v), _ = case
    noise, attend = cached
    piece = [x[:, :1].repeat(2, axis=0) for x in (q, k, v)]  # slots 0..3, decode
    positions = np.array([[2], [7], [S], [5]])  # slot 2 does not run
    short, _ = attend(*piece, noise, None, positions, 8)
    long, cache = attend(*piece, noise, None, positions, S)
    running = np.array([0, 1, 3])
    np.testing.assert_array_equal(short[running], long[running])
    keys, before = flat(*cache)[0], flat(*noise)[0]
    np.testing.assert_array_equal(keys[:, 2], before[:, 2])
    np.testing.assert_array_equal(keys[1, 3, :, 5], piece[1][3, 0])
