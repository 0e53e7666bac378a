"""Embedding lookup and token log-probs over a vocabulary that stays split.

Neither the embedding nor the head is ever gathered, and no `[B, T, V]` array exists:
each device works on its own rows of the vocabulary, for all the tokens, chunk by chunk.
"""

import functools

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


def embed(table_VxD: jax.Array, ids_BxT: jax.Array, *, layout: Layout) -> jax.Array:
    """Rows of an embedding `[V, D]` for ids `[B, T]` -> `[B, T, D]`.

    The ids travel, the table stays: every device looks up the ids that fall on its
    rows and the rest contribute 0 to a sum over the vocabulary axes.
    """
    both, only = _split(layout)

    def local(table, ids):
        ids = jax.lax.all_gather(ids, both, tiled=True) if both else ids
        rows = ids - jax.lax.axis_index(layout.vocab) * table.shape[0]
        hit = (rows >= 0) & (rows < table.shape[0])
        x = jnp.where(hit[..., None], table[jnp.where(hit, rows, 0)], 0)
        x = jax.lax.psum(x, only) if only else x
        if both:
            x = jax.lax.psum_scatter(x, both, scatter_dimension=0, tiled=True)
        return x

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
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of the tokens and entropies of their distributions.

    `logps[b, t] = log p(ids[b, t] | ids[b, < t])`: the shift by one between hidden
    states and tokens happens here and nowhere else. Position 0 has logp 0 and entropy
    0. The last hidden state is not used.

    Args:
      hidden_BxTxD: final hidden states; head_VxD: output rows (the embedding if tied).
      temperature: of the sampler; ids >= valid_vocab have probability 0, as there.
      chunk: positions whose logits are alive at once (recomputed in the backward pass).

    Returns:
      logps `[B, T]` and entropy `[B, T]` in nats, float32.
    """
    both, only = _split(layout)
    T = ids_BxT.shape[1]
    pieces = -(-T // chunk)
    pad = pieces * chunk - T

    def one(head, hidden, target):
        """hidden `[b, c, D]`, target `[b, c]` -> two `[b, c]`."""
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
