"""Kernels of whole rows against the blocked form, values and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lld_jax import parallel
from lld_jax.model import attention, kernels

B, T, K, G, H = 2, 256, 2, 3, 128


@pytest.fixture(scope="module")
def layout():
    return parallel.train_layout(parallel.make_mesh(1, 1, 1, jax.devices()[:1]))


def inputs(packed):
    rng = np.random.default_rng(0)
    shapes = (B, T, K, G, H), (B, T, K, H), (B, T, K, H)
    qkv = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
    ends = [(100, 230), (256, 256)] if packed else [(200, 200), (256, 256)]
    at = np.arange(T)
    segments = np.stack([np.where(at < a, 1, np.where(at < b, 2, 0)) for a, b in ends])
    return qkv, jnp.asarray(segments, jnp.int32)


def value_and_gradients(attend, qkv, segments, real):
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, K, G, H)))

    def loss(*qkv):
        out = jnp.where(real[..., None, None, None], attend(*qkv, segments), 0.0)
        return (out * weight).sum(), out

    (_, out), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*qkv)
    return [out, *grads]


@pytest.mark.parametrize(
    ("kind", "packed"), [("splash", True), ("splash", False), ("dense", False)]
)
def test_kernels_give_what_the_blocked_form_gives(layout, kind, packed):
    qkv, segments = inputs(packed)
    blocked = partial(attention.row_attention, block=64)
    attend = {
        "splash": partial(kernels.splash_attention, layout=layout, interpret=True),
        # The call that GPUs get, made by XLA; cuDNN's kernel needs a GPU.
        "dense": lambda q, k, v, _: kernels.dense_attention(
            q, k, v, layout=layout, implementation="xla"
        ),
    }[kind]
    real = segments > 0
    for a, b in zip(
        value_and_gradients(attend, qkv, segments, real),
        value_and_gradients(blocked, qkv, segments, real),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * float(abs(b).max()))


def test_rows_that_no_kernel_takes_are_refused(layout):
    qkv, segments = inputs(packed=False)
    short = [x[:, :200] for x in (*qkv, segments)]
    with pytest.raises(ValueError, match="multiple of 128.*max_tokens is 200"):
        kernels.splash_attention(*short, layout=layout, interpret=True)
    with pytest.raises(ValueError, match="'flash'; legal are blocked, splash, cudnn"):
        kernels.by_name("flash", layout=layout, block=64)
