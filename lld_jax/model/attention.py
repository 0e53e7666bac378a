"""Causal attention over whole rows, in query blocks that run anywhere.

Grouped heads, float32 scores; `[T, T]` of a long row is never built.
"""

import jax
import jax.numpy as jnp

_MASKED = -1e30


def row_attention(
    q_BxTxKxGxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxH: jax.Array,
    segments_BxT: jax.Array,
    *,
    block: int,
) -> jax.Array:
    """Causal attention inside segments, `[B, T, K, G, H]`.

    A block of `block` queries sees the keys up to its own end only, so half of the work
    of a long row is never done; each block is recomputed in the backward pass.
    """
    B, T, K, G, H = q_BxTxKxGxH.shape
    # Batch axes first: on a CPU the products are half again as fast as in any other
    # order of the axes.
    q_BxKxGxTxH = jnp.transpose(q_BxTxKxGxH * H**-0.5, (0, 2, 3, 1, 4))
    k_BxKxTxH, v_BxKxTxH = (jnp.swapaxes(x, 1, 2) for x in (k_BxTxKxH, v_BxTxKxH))

    @jax.checkpoint
    def one(q, k, v, q_segment, k_segment):
        t, s = q.shape[3], k.shape[2]
        scores = jnp.einsum(
            "bkth,bksh->bkts",
            q.reshape(B, K, G * t, H),
            k,
            preferred_element_type=jnp.float32,
        ).reshape(B, K, G, t, s)
        # The block's queries are the last t of the s positions that it sees.
        allowed = (jnp.arange(s) <= jnp.arange(s - t, s)[:, None]) & (
            q_segment[:, :, None] == k_segment[:, None, :]
        )
        scores = jnp.where(allowed[:, None, None], scores, _MASKED)
        peak = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
        p = jnp.exp(scores - peak)
        out = jnp.einsum(
            "bkts,bksh->bkth",
            p.astype(v.dtype).reshape(B, K, G * t, s),
            v,
            preferred_element_type=jnp.float32,
        ).reshape(B, K, G, t, H)
        return (out / p.sum(-1)[..., None]).astype(q.dtype)

    outs = [
        one(
            q_BxKxGxTxH[:, :, :, start : start + block],
            k_BxKxTxH[:, :, : start + block],
            v_BxKxTxH[:, :, : start + block],
            segments_BxT[:, start : start + block],
            segments_BxT[:, : start + block],
        )
        for start in range(0, T, block)
    ]
    return jnp.transpose(jnp.concatenate(outs, axis=3), (0, 3, 1, 2, 4))
