"""Attention of whole rows by the kernels that accelerators have.

The same numbers as `attention.row_attention`, up to rounding. `by_name` is the switch.
"""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jax.sharding import PartitionSpec as P

from lld_jax.model.attention import row_attention
from lld_jax.parallel import Layout

KINDS = ("blocked", "splash", "cudnn")
# What a remat policy keeps of a layer, so that attention is not computed again.
SAVED = "attention"
_LANES = 128

# (q [B, T, K, G, H], k [B, T, K, H], v, segments [B, T]) -> [B, T, K, G, H]
RowAttention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def by_name(kind: str, *, layout: Layout, block: int) -> RowAttention:
    """Causal attention inside segments, of the kind that `model.attention` names.

    Args:
      kind: 'blocked' runs anywhere, 'splash' on TPUs, 'cudnn' on NVIDIA GPUs, in
        bfloat16, and for rows of one trajectory each: it does not look at segments.
      block: queries of a block of 'blocked'.

    Raises ValueError for another kind.
    """
    if kind == "blocked":
        return lambda q, k, v, segments: checkpoint_name(
            row_attention(q, k, v, segments, block=block), SAVED
        )
    if kind == "splash":
        return partial(splash_attention, layout=layout)
    if kind == "cudnn":
        return lambda q, k, v, segments: checkpoint_name(
            dense_attention(q, k, v, layout=layout, implementation="cudnn"), SAVED
        )
    raise ValueError(f"model.attention: {kind!r}; legal are {', '.join(KINDS)}")


def splash_attention(
    q_BxTxKxGxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxH: jax.Array,
    segments_BxT: jax.Array,
    *,
    layout: Layout,
    interpret: bool = False,
) -> jax.Array:
    """Splash attention, a Pallas kernel for TPUs; `interpret` runs it anywhere.

    Raises ValueError if T is no multiple of 128.
    """
    _, T, _, G, H = q_BxTxKxGxH.shape
    if T % _LANES:
        raise ValueError(
            f"model.attention: 'splash' takes rows of a multiple of {_LANES} tokens, "
            f"but rollout.max_tokens is {T}; legal is also 'blocked'"
        )
    size = next(b for b in (512, 256, _LANES) if T % b == 0)
    sizes = splash.BlockSizes(
        **dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), size),
        **dict.fromkeys(("block_q_dkv", "block_kv_dkv"), size),
        **dict.fromkeys(("block_kv_dkv_compute", "block_q_dq", "block_kv_dq"), size),
    )
    kernel = splash.make_splash_mqa_single_device(
        masks.MultiHeadMask([masks.CausalMask((T, T))] * G),
        block_sizes=sizes,
        residual_checkpoint_name=SAVED,
        interpret=interpret,
    )

    def local(q, k, v, segments):
        def heads(q, k, v, segments):  # [K, G, T, H], [K, T, H], [T]
            ids = splash.SegmentIds(segments, segments)
            return jax.vmap(lambda *qkv: kernel(*qkv, segment_ids=ids))(q, k, v)

        q = q.transpose(0, 2, 3, 1, 4) * np.asarray(H**-0.5, q.dtype)
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        return jax.vmap(heads)(q, k, v, segments).transpose(0, 3, 1, 2, 4)

    rows = P(layout.batch)
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(rows,) * 4,
        out_specs=rows,
        check_vma=False,  # a Pallas kernel does not say over which axes it varies
    )(q_BxTxKxGxH, k_BxTxKxH, v_BxTxKxH, segments_BxT)


def dense_attention(
    q_BxTxKxGxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxH: jax.Array,
    *,
    layout: Layout,
    implementation: str,
) -> jax.Array:
    """`jax.nn.dot_product_attention`, causal over a whole row.

    Padding stands at the end of a row, where no token before it looks.
    """

    def local(q, k, v):
        b, t, K, G, H = q.shape
        q = q.reshape(b, t, K * G, H)
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=implementation
        )
        return out.reshape(b, t, K, G, H)

    rows = P(layout.batch)
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(rows,) * 3,
        out_specs=rows,
        check_vma=False,
    )(q_BxTxKxGxH, k_BxTxKxH, v_BxTxKxH)
