"""Qwen2 in Flax Linen: embeddings in, hidden states out.

Axis letters: B batch, T time, D width, F mlp, K kv heads, G query heads per kv head,
H head dim, L layers. The embedding and the head are not modules: they stay split by
vocabulary and belong to `logprobs`. Kernels are `[in, out]`, layers stacked on L.
"""

import dataclasses
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lld_jax import parallel
from lld_jax.model import cached, kernels, logprobs
from lld_jax.parallel import Layout

# attend(q, k, v, cache, layer) -> (out, cache): the only thing that training,
# extension and decoding do differently.
Attend = Callable[..., tuple[jax.Array, Any]]
# Positions of a batch of whole rows whose embeddings are looked up at once.
_EMBEDDED = 512


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Qwen2 model (V is the padded number of embedding rows)."""

    vocab: int
    width: int
    mlp: int
    layers: int
    kv_heads: int
    group: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    tied: bool


class Norm(nn.Module):
    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + self.eps)
        return x32.astype(x.dtype) * scale.astype(x.dtype)


def _angles(c: ModelConfig, positions_BxT: jax.Array) -> jax.Array:
    half = jnp.arange(0, c.head_dim, 2, dtype=jnp.float32)
    return positions_BxT[..., None].astype(jnp.float32) * c.rope_theta ** (
        -half / c.head_dim
    )


def _rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    """Rotary positions on `[B, T, ..., H]`, first half paired with second half."""
    shape = sin.shape[:2] + (1,) * (x.ndim - 3) + sin.shape[-1:]
    sin, cos = sin.reshape(shape), cos.reshape(shape)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return out.astype(x.dtype)


class Block(nn.Module):
    config: ModelConfig
    attend: Attend
    layout: Layout

    @nn.compact
    def __call__(self, carry, layer, sin_BxTxH, cos_BxTxH):
        c, (x_BxTxD, cache) = self.config, carry
        B, T, _ = x_BxTxD.shape

        def dense(name: str, features: int, bias: bool = False):
            return nn.Dense(
                features,
                use_bias=bias,
                dtype=x_BxTxD.dtype,
                kernel_init=nn.initializers.normal(0.02),
                name=name,
            )

        y = Norm(c.rms_eps, name="attention_norm")(x_BxTxD)
        heads = c.kv_heads * c.head_dim
        q = dense("query", c.group * heads, bias=True)(y)
        k = dense("key", heads, bias=True)(y).reshape(B, T, c.kv_heads, c.head_dim)
        v = dense("value", heads, bias=True)(y).reshape(B, T, c.kv_heads, c.head_dim)
        q = q.reshape(B, T, c.kv_heads, c.group, c.head_dim)
        q, k = _rotate(q, sin_BxTxH, cos_BxTxH), _rotate(k, sin_BxTxH, cos_BxTxH)
        out, cache = self.attend(q, k, v, cache, layer)
        x_BxTxD += dense("output", c.width)(out.reshape(B, T, -1))

        y = Norm(c.rms_eps, name="mlp_norm")(x_BxTxD)
        y = nn.silu(dense("gate", c.mlp)(y)) * dense("up", c.mlp)(y)
        x_BxTxD += dense("down", c.width)(y)
        return (self.layout.constrain(x_BxTxD), cache), None


class Qwen2(nn.Module):
    """Embeddings `[B, T, D]`, positions `[B, T]` -> hidden `[B, T, D]`, cache."""

    config: ModelConfig
    attend: Attend
    layout: Layout
    remat: str = "none"

    @nn.compact
    def __call__(self, x_BxTxD, positions_BxT, cache=None):
        c = self.config
        angle = _angles(c, positions_BxT)
        block = Block
        if self.remat != "none":
            # Of a layer, its input is kept for the backward pass, and for 'attention'
            # what attention gave.
            kept = [kernels.SAVED] if self.remat == "attention" else []
            policy = jax.checkpoint_policies.save_only_these_names(*kept)
            block = nn.remat(Block, prevent_cse=False, policy=policy)
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=c.layers,
        )(c, self.attend, self.layout, name="layers")
        (x, cache), _ = layers(
            (x_BxTxD, cache), jnp.arange(c.layers), jnp.sin(angle), jnp.cos(angle)
        )
        return Norm(c.rms_eps, name="final_norm")(x), cache


def init(config: ModelConfig, key: jax.Array, layout: Layout) -> Any:
    """Random float32 parameters: normal(0.02) kernels, zero biases, unit scales."""

    def attend(q, k, v, cache, layer):
        return q, cache

    keys = jax.random.split(key, 3)
    x = jnp.zeros((layout.size(layout.batch), 1, config.width))
    body = Qwen2(config, attend, layout).init(keys[0], x, jnp.zeros(x.shape[:2], int))
    normal = nn.initializers.normal(0.02)
    params = dict(body["params"])
    params["embedding"] = normal(keys[1], (config.vocab, config.width))
    if not config.tied:
        params["head"] = normal(keys[2], (config.vocab, config.width))
    return params


def abstract_params(config: ModelConfig, layout: Layout) -> Any:
    """The parameter tree as `jax.ShapeDtypeStruct`s, computed without any weight."""
    return jax.eval_shape(lambda key: init(config, key, layout), jax.random.key(0))


def publisher(
    config: ModelConfig, dtype: jnp.dtype, layout: Layout
) -> Callable[[Any], Any]:
    """`publish(params)`: the weights that rollouts run on, one jitted copy.

    They are cast to `dtype` and laid out by `layout`. For CPUs the layers become a
    list: in a scan over stacked ones a CPU copies each layer's weights before it
    multiplies with them, a fifth of a decode step. An accelerator reads them in place,
    and a scan compiles faster.
    """
    on_cpu = layout.mesh.devices.flat[0].platform == "cpu"

    def publish(params):
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        if not on_cpu:
            return params
        numbers = range(config.layers)
        each = [jax.tree.map(itemgetter(i), params["layers"]) for i in numbers]
        return params | {"layers": each}

    published = jax.eval_shape(publish, abstract_params(config, layout))
    shardings = parallel.param_shardings(published, layout)
    return jax.jit(publish, out_shardings=shardings)


def head(params: Any) -> jax.Array:
    """The output rows `[V, D]`: the embedding itself where the model ties them."""
    return params.get("head", params["embedding"])


def hidden_states(
    config: ModelConfig,
    params: Any,
    ids_BxT: jax.Array,
    positions_BxT: jax.Array,
    segments_BxT: jax.Array,
    *,
    dtype: jnp.dtype,
    layout: Layout,
    remat: str = "none",
    kernel: str = "blocked",
    block: int = 512,
) -> jax.Array:
    """Whole rows at once: hidden states `[B, T, D]` in `dtype`.

    Tokens see the earlier tokens of their own segment only (0 is padding). `kernel` and
    `block` as in `kernels.by_name`. `remat` says what the backward pass computes again:
    'none', 'layer', or 'attention', a layer but what attention gave.
    """
    row_attention = kernels.by_name(kernel, layout=layout, block=block)

    def attend(q, k, v, cache, layer):
        return row_attention(q, k, v, segments_BxT), cache

    x = logprobs.embed(
        params["embedding"], ids_BxT, layout=layout, dtype=dtype, chunk=_EMBEDDED
    )
    body = {"layers": params["layers"], "final_norm": params["final_norm"]}
    model = Qwen2(config, attend, layout, remat)
    hidden, _ = model.apply({"params": body}, layout.constrain(x), positions_BxT)
    return hidden


def cached_hidden_states(
    config: ModelConfig,
    params: Any,
    ids_ExN: jax.Array,
    positions_ExN: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    *,
    rows_E: jax.Array | None,
    end: jax.Array,
    at_once: int,
    head_last: bool,
    dtype: jnp.dtype,
    layout: Layout,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Appends tokens to cached slots: hidden states `[E, N, D]` and the new cache.

    `params` come from a `publisher`. Other arguments as in `cached.cache_attention`.
    """

    def attend(q, k, v, cache, layer):
        return cached.cache_attention(
            q,
            k,
            v,
            cache,
            layer,
            rows_E=rows_E,
            positions_ExN=positions_ExN,
            end=end,
            at_once=at_once,
            head_last=head_last,
            layout=layout,
        )

    x = logprobs.embed(params["embedding"], ids_ExN, layout=layout, dtype=dtype)
    x, layers = layout.constrain(x), params["layers"]
    if not isinstance(layers, list):
        body = {"layers": layers, "final_norm": params["final_norm"]}
        model = Qwen2(config, attend, layout)
        return model.apply({"params": body}, x, positions_ExN, cache)
    angle = _angles(config, positions_ExN)
    turn = jnp.sin(angle), jnp.cos(angle)
    block = Block(config, attend, layout)
    for i, layer in enumerate(layers):
        (x, cache), _ = block.apply({"params": layer}, (x, cache), jnp.int32(i), *turn)
    norm = Norm(config.rms_eps)
    return norm.apply({"params": params["final_norm"]}, x), cache
