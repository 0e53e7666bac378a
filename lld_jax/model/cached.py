"""Causal attention over a cache, in key blocks under a running softmax.

Grouped heads, float32 scores; new keys and values are written on the way.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from lld_jax.parallel import Layout

_MASKED = -1e30


def cache_attention(
    q_ExNxKxGxH: jax.Array,
    k_ExNxKxH: jax.Array,
    v_ExNxKxH: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    layer: jax.Array,
    *,
    rows_E: jax.Array | None,
    positions_ExN: jax.Array,
    end: jax.Array,
    at_once: int,
    head_last: bool,
    layout: Layout,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Writes new keys and values into the cache, then attends to what it holds.

    Args:
      cache: keys `[L, C, R, K, H, S]`, or with `head_last` as values, and values
        `[L, C, R, K, S, H]`: C blocks of S positions, so that what a step reads of a
        layer lies together; layer: which L.
      rows_E: the slot of each entry; None when entry e is slot e (decode). Entries
        are grouped by the shard that owns their slot.
      positions_ExN: where each new token stands in its slot; C S or more: not written.
      end: how many positions must be read, a traced scalar. Positions beyond a slot's
        own end change none of its bits: they add exact zeros.
      at_once: blocks under one softmax, at most C.
      head_last: how keys lie. A CPU's product takes `[H, S]` as it is; a TPU would turn
        the whole cache around before it writes a column there, and back.

    Returns:
      attention output `[E, N, K, G, H]` and the cache.
    """
    b, h = layout.batch, layout.heads
    kv, cached = P(b, None, h), P(None, None, b, h)
    local = functools.partial(
        _local, at_once=at_once, head_last=head_last, batch=layout.batch
    )
    out, *cache = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(kv, kv, kv, cached, cached, P(), P(b), P(b), P()),
        out_specs=(kv, cached, cached),
    )(
        q_ExNxKxGxH,
        k_ExNxKxH.astype(cache[0].dtype),
        v_ExNxKxH.astype(cache[1].dtype),
        *cache,
        layer,
        rows_E,
        positions_ExN,
        end,
    )
    return out, tuple(cache)


def _local(
    q, k, v, k_cache, v_cache, layer, rows, positions, end, *, at_once, head_last, batch
):
    """Inside a shard_map: `cache_attention` over the slots of one device."""
    R, H = v_cache.shape[2], v_cache.shape[5]
    # Batch axes first: in another order a CPU has no bfloat16 product.
    q = jnp.swapaxes(q * H**-0.5, 1, 2)
    if rows is None:
        at = jnp.arange(R)
    else:
        at = rows = rows - jax.lax.axis_index(batch) * R
    k_cache, v_cache = _write(
        k_cache, v_cache, k, v, layer, at, positions, head_last=head_last
    )
    read = functools.partial(
        _read, layer=layer, rows=rows, at_once=at_once, head_last=head_last
    )
    out = _attend(
        q,
        lambda first: read(k_cache, first, 2 if head_last else 3),
        lambda first: read(v_cache, first, 2),
        positions,
        end,
        "ekngh,eksh->ekngs" if head_last else "ekngh,ekhs->ekngs",
        blocks=v_cache.shape[1],
        size=v_cache.shape[4],
        at_once=at_once,
    )
    return jnp.swapaxes(out, 1, 2).astype(q.dtype), k_cache, v_cache


def _write(k_cache, v_cache, k, v, layer, at, positions, *, head_last):
    """The caches with `k` and `v` `[E, N, K, H]` in slots `at` at `positions`."""
    S = v_cache.shape[4]
    to, place, every = positions // S, positions % S, slice(None)
    to = (layer, to, at[:, None], every)
    to_key = (*to, place) if head_last else (*to, every, place)
    k_cache = k_cache.at[to_key].set(k, mode="drop")
    v_cache = v_cache.at[*to, place].set(v, mode="drop")
    return k_cache, v_cache


def _read(cache, first, axis, *, layer, rows, at_once, head_last):
    """Blocks from `first` on, joined at `axis`, of all slots or of those in `rows`."""

    def some(row, number):
        start = (layer, first, row, 0, 0, 0)
        size = (1, at_once, number, *cache.shape[3:])
        piece = jax.lax.dynamic_slice(cache, start, size)[0]
        shape = [number, *cache.shape[3:]]
        shape[axis] *= at_once
        return jnp.moveaxis(piece, 0, axis).reshape(shape)

    if rows is None:
        return some(0, cache.shape[2])
    if not head_last:
        return jax.vmap(lambda row: some(row, 1)[0])(rows)

    # A block at a time: for a gather, or for several blocks in one piece, a TPU
    # would turn the whole cache around first.
    def blocks(row):
        size = (1, 1, 1, *cache.shape[3:])
        starts = [(layer, first + i, row, 0, 0, 0) for i in range(at_once)]
        each = [jax.lax.dynamic_slice(cache, at, size) for at in starts]
        return jnp.concatenate([x[0, 0, 0] for x in each], axis=axis - 1)

    return jax.lax.map(blocks, rows)


def _attend(q, keys, values, positions, end, product, *, blocks, size, at_once):
    """The running softmax: `q` `[E, K, N, G, H]` -> float32 of the same shape.

    `keys(first)` and `values(first)` read `at_once` of the `blocks` blocks, each of
    `size` positions; `product` gives the scores of queries and keys.
    """
    block = at_once * size

    def body(i, carry):
        peak, total, out = carry
        # The last blocks may be some that were read before: not seen again.
        first = jnp.minimum(i * at_once, blocks - at_once)
        s = first * size + jnp.arange(block)
        scores = jnp.einsum(product, q, keys(first), preferred_element_type=jnp.float32)
        seen = (s >= i * block) & (s <= positions[:, :, None])
        seen = seen[:, None, :, None]
        scores = jnp.where(seen, scores, _MASKED)
        # Position 0 is seen by all, so the peak is never that of a masked score.
        top = jnp.maximum(peak, scores.max(-1))
        shrink = jnp.exp(peak - top)
        p = jnp.exp(scores - top[..., None])
        total = total * shrink + p.sum(-1)
        value = values(first)
        out = out * shrink[..., None] + jnp.einsum(
            "ekngs,eksh->ekngh",
            p.astype(value.dtype),
            value,
            preferred_element_type=jnp.float32,
        )
        return top, total, out

    # Derived from q, so that shard_map knows over which axes the carry varies.
    zero = q[..., 0].astype(jnp.float32) * 0
    init = (zero + _MASKED, zero, q.astype(jnp.float32) * 0)
    _, total, out = jax.lax.fori_loop(0, -(-end // block), body, init)
    return out / total[..., None]
