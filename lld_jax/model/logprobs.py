"""Embedding lookup and token log-probs over a vocabulary that stays split.

Neither the embedding nor the head is ever gathered, and no `[B, T, V]` array exists:
each device works on its own rows of the vocabulary, for all the tokens, chunk by chunk.
Log-probs at action tokens alone cost what these tokens cost.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from lld_jax.parallel import Layout

# Finite, so that 0 * _EXCLUDED is 0 and not NaN.
_EXCLUDED = -1e30


def _split(layout: Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Vocabulary axes that also split the batch, and those that do not."""
    both = tuple(a for a in layout.vocab if a in layout.batch)
    return both, tuple(a for a in layout.vocab if a not in layout.batch)


def embed(
    table_VxD: jax.Array,
    ids_BxT: jax.Array,
    *,
    layout: Layout,
    dtype: jnp.dtype | None = None,
    chunk: int | None = None,
) -> jax.Array:
    """Rows of an embedding `[V, D]` for ids `[B, T]` -> `[B, T, D]`.

    The ids travel, the table stays: every device looks up the ids that fall on its
    rows and the rest contribute 0 to a sum over the vocabulary axes. Rows are cast to
    `dtype` (default: the table's) before they travel, which is exact: of all that are
    summed one is not 0.

    Args:
      chunk: positions at once, all of them if None. A device holds those of the whole
        batch while they are summed.
    """
    both, only = _split(layout)
    T = ids_BxT.shape[1]
    pieces = 1 if chunk is None else -(-T // chunk)
    size = -(-T // pieces)

    def local(table, ids):
        def one(ids):
            ids = jax.lax.all_gather(ids, both, tiled=True) if both else ids
            own = table.shape[0]
            rows = ids - jax.lax.axis_index(layout.vocab) * own
            rows = jnp.where(rows < 0, own, rows)  # below 0 would count from the end
            x = table.at[rows].get(mode="fill", fill_value=0)
            x = x.astype(dtype or table.dtype)
            x = jax.lax.psum(x, only) if only else x
            if both:
                x = jax.lax.psum_scatter(x, both, scatter_dimension=0, tiled=True)
            return x

        if pieces == 1:
            return one(ids)
        b = ids.shape[0]
        ids = jnp.pad(ids, ((0, 0), (0, pieces * size - T)))
        x = jax.lax.map(one, ids.reshape(b, pieces, size).swapaxes(0, 1))
        return x.swapaxes(0, 1).reshape(b, pieces * size, -1)[:, :T]

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(P(layout.vocab, None), P(layout.batch, None)),
        out_specs=P(layout.batch, None, None),
    )(table_VxD, ids_BxT)


def local_logits(
    hidden: jax.Array,
    head: jax.Array,
    axes: tuple[str, ...],
    *,
    temperature: float | jax.Array,
    valid_vocab: int,
    vocab_first: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Inside a shard_map: this device's logits, float32, and its first vocabulary id.

    Args:
      hidden: `[..., D]`; head: `[V_local, D]`; axes: mesh axes that split V.

    Returns:
      logits / temperature `[..., V_local]` (`[V_local, ...]` if `vocab_first`), ids >=
      valid_vocab excluded, and the offset of the first.
    """
    offset = jax.lax.axis_index(axes) * head.shape[0]
    if vocab_first:
        operands, order = (head, hidden), "vd,...d->v..."
    else:
        operands, order = (hidden, head), "...d,vd->...v"
    logits = jnp.einsum(order, *operands, preferred_element_type=jnp.float32)
    valid = offset + jnp.arange(head.shape[0]) < valid_vocab
    if vocab_first:
        valid = valid.reshape(-1, *[1] * (hidden.ndim - 1))
    return jnp.where(valid, logits / temperature, _EXCLUDED), offset


def token_logprobs(
    hidden_BxTxD: jax.Array,
    head_VxD: jax.Array,
    ids_BxT: jax.Array,
    *,
    temperature: float,
    valid_vocab: int,
    chunk: int,
    layout: Layout,
    mask_BxT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of the tokens and entropies of their distributions.

    `logps[b, t] = log p(ids[b, t] | ids[b, < t])`: the shift by one between hidden
    states and tokens happens here and nowhere else. Position 0 has logp 0 and entropy
    0. The last hidden state is not used.

    Args:
      hidden_BxTxD: final hidden states; head_VxD: output rows (the embedding if tied).
      temperature: of the sampler; ids >= valid_vocab have probability 0, as there.
      chunk: positions whose logits are alive at once (recomputed in the backward
        pass): of each row; with a mask, of all rows of a device together.
      mask_BxT: where it is 0 nothing is computed, and both results are 0. Such a call
        can be differentiated backwards only.

    Returns:
      logps `[B, T]` and entropy `[B, T]` in nats, float32.
    """
    one = functools.partial(_one, layout, temperature, valid_vocab)
    if mask_BxT is not None:
        return _masked(one, chunk, layout)(head_VxD, hidden_BxTxD, ids_BxT, mask_BxT)
    T = ids_BxT.shape[1]
    pieces = -(-T // chunk)
    pad = pieces * chunk - T

    def local(head, hidden, ids):
        b, D = hidden.shape[0], hidden.shape[-1]
        target = jnp.pad(ids[:, 1:], ((0, 0), (0, pad + 1)))
        target = target.reshape(b, pieces, chunk).swapaxes(0, 1)
        hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
        hidden = hidden.reshape(b, pieces, chunk, D).swapaxes(0, 1)
        body = jax.checkpoint(functools.partial(one, head))
        out = jax.lax.map(lambda piece: body(*piece), (hidden, target))
        return tuple(
            jnp.pad(x.swapaxes(0, 1).reshape(b, -1)[:, : T - 1], ((0, 0), (1, 0)))
            for x in out
        )

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(P(layout.vocab, None), P(layout.batch), P(layout.batch)),
        out_specs=(P(layout.batch), P(layout.batch)),
    )(head_VxD, hidden_BxTxD, ids_BxT)


def _one(layout, temperature, valid_vocab, head, hidden, target):
    """Inside a shard_map: hidden `[..., D]`, target `[...]` -> two `[...]`."""
    both, only = _split(layout)
    if both:
        hidden = jax.lax.all_gather(hidden, both, tiled=True)
        target = jax.lax.all_gather(target, both, tiled=True)
    logits, offset = local_logits(
        hidden,
        head,
        layout.vocab,
        temperature=temperature,
        valid_vocab=valid_vocab,
    )
    peak = jax.lax.stop_gradient(logits.max(-1))
    peak = jax.lax.pmax(peak, layout.vocab)
    logits = logits - peak[..., None]
    exp = jnp.exp(logits)
    row = target - offset
    hit = (row >= 0) & (row < head.shape[0])
    at = jnp.take_along_axis(logits, jnp.where(hit, row, 0)[..., None], -1)[..., 0]
    sums = jnp.stack(
        [exp.sum(-1), (exp * logits).sum(-1), jnp.where(hit, at, 0.0)], axis=-1
    )
    sums = jax.lax.psum(sums, only) if only else sums
    if both:
        sums = jax.lax.psum_scatter(sums, both, scatter_dimension=0, tiled=True)
    total, weighted, at = jnp.moveaxis(sums, -1, 0)
    return at - jnp.log(total), jnp.log(total) - weighted / total


def _masked(one: Callable[..., Any], chunk: int, layout: Layout) -> Callable[..., Any]:
    """`f(head, hidden, ids, mask)` -> logps, entropy, computed where mask is not 0.

    A device takes the positions that it needs together, whichever row they lie in, and
    works through them in chunks. All devices take as many chunks as the one that needs
    most of them, since each works on its rows of the vocabulary for all of them. That
    number is traced; a loop of traced length has no derivative of its own, so the
    backward pass is written down: the same loop, with each chunk's logits once more.
    """

    rows, vocab = P(layout.batch), P(layout.vocab, None)
    sharded = functools.partial(jax.shard_map, mesh=layout.mesh)
    arrays = vocab, rows, rows, rows
    forward = sharded(
        functools.partial(_forward, one, chunk, layout),
        in_specs=arrays,
        out_specs=(rows, rows, P()),
    )
    backward = sharded(
        functools.partial(_backward, one, chunk, layout),
        in_specs=(*arrays, P(), rows, rows),
        out_specs=(vocab, rows),
    )
    f = jax.custom_vjp(lambda *args: forward(*args)[:2])

    def keep(*args):
        *out, pieces = forward(*args)
        return tuple(out), (*args, pieces)

    f.defvjp(keep, lambda kept, d_out: (*backward(*kept, *d_out), None, None))
    return f


def _plan(chunk, ids, mask):
    """How many positions this device needs; `part(i)`: some, and their targets."""
    N = ids.size
    target = jnp.roll(ids, -1, axis=1).reshape(N)
    needed = jnp.pad(mask[:, 1:] != 0, ((0, 0), (0, 1))).reshape(N)
    order = jnp.argsort(~needed, stable=True)
    # N is no position: reads 0 there, and writes nothing.
    order = jnp.where(jnp.arange(N) < needed.sum(), order, N)
    order = jnp.pad(order, (0, -N % chunk), constant_values=N)

    def part(i):
        at = jax.lax.dynamic_slice_in_dim(order, i * chunk, chunk)
        return at, target.at[at].get(mode="fill", fill_value=0)

    return needed.sum(), part


def _zeros(shape, axes, dtype=jnp.float32):
    return jax.lax.pcast(jnp.zeros(shape, dtype), axes, to="varying")


def _forward(one, chunk, layout, head, hidden, ids, mask):
    """Inside a shard_map: logps and entropy `[B, T]`, and how many chunks it took."""
    needed, part = _plan(chunk, ids, mask)
    flat = hidden.reshape(ids.size, -1)
    # With a hidden state beside it, only so that it comes after the layers: CPU
    # devices that begin independent collectives in different orders (this one, and
    # the gathering of weights) wait for each other for ever.
    pair = jnp.stack([-(-needed // chunk), flat[0, 0]], dtype=jnp.float32)
    pieces = jax.lax.pmax(pair, layout.batch)[0].astype(jnp.int32)

    def body(i, out):
        at, target = part(i)
        states = flat.at[at].get(mode="fill", fill_value=0)
        return out.at[:, at].set(jnp.stack(one(head, states, target)), mode="drop")

    out = _zeros((2, ids.size), layout.batch)
    out = jax.lax.fori_loop(0, pieces, body, out).reshape(2, *ids.shape)
    return *jnp.pad(out[..., :-1], ((0, 0), (0, 0), (1, 0))), pieces


def _backward(one, chunk, layout, head, hidden, ids, mask, pieces, d_logps, d_entropy):
    """Inside a shard_map: the derivatives by `head` and by `hidden`."""
    _, part = _plan(chunk, ids, mask)
    flat = hidden.reshape(ids.size, -1)
    d_out = jnp.stack([d_logps, d_entropy])[..., 1:]
    d_out = jnp.pad(d_out, ((0, 0), (0, 0), (0, 1))).reshape(2, ids.size)

    def body(i, carry):
        d_head, d_flat = carry
        at, target = part(i)
        states = flat.at[at].get(mode="fill", fill_value=0)
        _, back = jax.vjp(lambda h, x: one(h, x, target), head, states)
        more, d_states = back(tuple(d_out.at[:, at].get(mode="fill", fill_value=0)))
        return d_head + more, d_flat.at[at].set(d_states, mode="drop")

    d_flat = _zeros(flat.shape, layout.batch, flat.dtype)
    init = _zeros(head.shape, layout.vocab), d_flat
    d_head, d_flat = jax.lax.fori_loop(0, pieces, body, init)
    return d_head.astype(head.dtype), d_flat.reshape(hidden.shape)
