"""Sampling one token a slot: temperature, top-k, top-p, inverse CDF.

The vocabulary stays split; logits are neither gathered nor sorted. What top-k and top-p
leave out is what lies below a floor, one a row, that is searched for digit by digit.

Axis letters: R slots, D width, V vocab; a device's share of V in N blocks of B entries.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from lld_jax.model.logprobs import local_logits
from lld_jax.parallel import Layout

_BLOCK = 128  # entries per block
_DIGIT = 2  # bits of the floor that one pass over the logits finds


def sample(
    hidden_RxD: jax.Array,
    head_VxD: jax.Array,
    uniform_R: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    *,
    valid_vocab: int,
    layout: Layout,
) -> tuple[jax.Array, jax.Array]:
    """One token a slot from one uniform number a slot.

    First the temperature; then the `top_k` likeliest are kept; then, of those, the
    smallest set of the likeliest with `top_p` of their probability. Ties with the last
    one kept are kept. What is left out has probability 0.

    Args:
      uniform_R: in [0, 1), float32.
      temperature: scalar; 0 is greedy, and then nothing is left out.
      top_p: float32 scalar; 1 is off, 0 keeps the likeliest.
      top_k: int32 scalar; 0 is off.
      valid_vocab: ids from here on are never sampled.

    Returns:
      tokens `[R]` int32 and their logps `[R]` float32 in the distribution that they
      were drawn from (greedy: in the whole one, at temperature 1).
    """
    slots, scalar = P(layout.batch), P()
    return jax.shard_map(
        functools.partial(_local, layout.vocab, valid_vocab),
        mesh=layout.mesh,
        in_specs=(slots, P(layout.vocab, None), slots, scalar, scalar, scalar),
        out_specs=(slots, slots),
    )(hidden_RxD, head_VxD, uniform_R, temperature, top_p, top_k)


def uniforms(
    seed: jax.Array, draw_R: jax.Array, sample_R: jax.Array, position_R: jax.Array
) -> jax.Array:
    """One number in [0, 1) a slot, a function of the four arguments alone.

    Args:
      seed: uint32 scalar; the others are int32 `[R]`.

    Returns:
      `[R]` float32.
    """

    def one(draw, sample, position):
        key = jax.random.key(seed)
        for number in (draw, sample, position):
            key = jax.random.fold_in(key, number)
        return jax.random.uniform(key)

    return jax.vmap(one)(draw_R, sample_R, position_R)


def _local(axes, valid_vocab, hidden, head, uniform, temperature, top_p, top_k):
    """Inside a shard_map: tokens `[R]` and logps `[R]`, the same on all of `axes`."""
    drawing = temperature > 0
    logits, offset = _blocks(
        hidden, head, axes, jnp.where(drawing, temperature, 1.0), valid_vocab
    )
    tops = logits.max(1)
    best = jax.lax.all_gather(tops.max(0), axes)
    peak = best.max(0)
    floor = _floor(
        logits,
        peak,
        jnp.where(drawing, top_p, 1.0),
        jnp.where(drawing, top_k, 0),
        axes,
    )
    p = _weights(logits, peak, floor)

    # Inverse CDF in three levels: device, block, entry.
    sums = p.sum(1).T
    mass = jax.lax.all_gather(sums.sum(-1), axes, axis=1)
    total = mass.sum(-1)
    target = uniform * total
    owner, before = _find(mass, target)
    owner = jnp.where(drawing, owner, best.argmax(0))
    target = target - before
    n, before = _find(sums, target)
    n = jnp.where(drawing, n, tops.argmax(0))
    logits = jnp.take_along_axis(logits, n[None, None], 0)[0].T
    p = jnp.take_along_axis(p, n[None, None], 0)[0].T
    beyond = (jnp.cumsum(p, -1) > (target - before)[:, None]) & (p > 0)
    # Rounding can leave no entry beyond it: then the likeliest of the block.
    entry = jnp.where(beyond.any(-1), beyond.argmax(-1), p.argmax(-1))
    entry = jnp.where(drawing, entry, logits.argmax(-1))

    token = (offset + n * _BLOCK + entry).astype(jnp.int32)
    # NaN, too, must give an id that the vocabulary has.
    token = jnp.minimum(token, valid_vocab - 1)
    logit = jnp.take_along_axis(logits, entry[:, None], -1)[:, 0]
    logp = logit - peak - jnp.log(total)
    mine = owner == jax.lax.axis_index(axes)
    out = jnp.where(mine, token, 0), jnp.where(mine, logp, 0.0)
    return jax.lax.psum(out, axes)


def _blocks(
    hidden: jax.Array,
    head: jax.Array,
    axes: Sequence[str],
    temperature: jax.Array,
    valid_vocab: int,
) -> tuple[jax.Array, jax.Array]:
    """This device's logits `[N, B, R]`, filled up with -inf, and its first id."""
    # The vocabulary first: for few slots a CPU does this product in half the time.
    logits, offset = local_logits(
        hidden,
        head,
        axes,
        temperature=temperature,
        valid_vocab=valid_vocab,
        vocab_first=True,
    )
    pad = -logits.shape[0] % _BLOCK
    logits = jnp.pad(logits, ((0, pad), (0, 0)), constant_values=-jnp.inf)
    logits = logits.reshape(-1, _BLOCK, logits.shape[1])
    # Computed once: the floor is one of these very numbers.
    return jax.lax.optimization_barrier(logits), offset


def _weights(logits: jax.Array, peak: jax.Array, floor: jax.Array) -> jax.Array:
    """Probabilities `[N, B, R]` but for a factor, 0 below the floor.

    NaN is not below it and stays, to be seen in the logps.
    """
    p = jnp.exp(logits - peak)
    return jnp.where(logits < floor, 0.0, p)


def _find(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first of `[R, N]` whose cumulative sum exceeds `[R]`; the sum before it.

    Only weights above 0 count. If rounding leaves none beyond, it is the last of them.
    """
    ends = jnp.cumsum(weights, -1)
    some = weights > 0
    beyond = some & (ends > target[:, None])
    last = jnp.where(some, jnp.arange(weights.shape[1]), 0).max(-1)
    n = jnp.where(beyond.any(-1), beyond.argmax(-1), last)
    return n, jnp.take_along_axis(ends - weights, n[:, None], -1)[:, 0]


# ----------------------------------------------------------------------- truncation


def _floor(
    logits: jax.Array,
    peak: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    axes: Sequence[str],
) -> jax.Array:
    """The smallest logit `[R]` that top-k and top-p keep, -inf if both are off.

    The predicates are the same on all devices, so collectives may be in the branches.
    """

    def by_k(floor):
        ones = jnp.ones_like(logits, dtype=jnp.int32)
        return _search(logits, ones, jnp.full_like(floor, top_k, jnp.int32), axes)

    def by_p(floor):
        p = _weights(logits, peak, floor)
        total = jax.lax.psum(p.sum(1).sum(0), axes)
        # More than 0, so that one token is kept.
        share = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
        return _search(logits, p, share * total, axes)

    # The barrier: branches wait for the collective that gave the peak. On CPU devices
    # two independent collectives can take each other's messages.
    floor, _ = jax.lax.optimization_barrier((jnp.full_like(peak, -jnp.inf), peak))
    floor = jax.lax.cond(top_k > 0, by_k, lambda floor: floor, floor)
    return jax.lax.cond(top_p < 1, by_p, lambda floor: floor, floor)


def _search(
    logits: jax.Array, weights: jax.Array, goal: jax.Array, axes: Sequence[str]
) -> jax.Array:
    """The highest floor `[R]` at or above which the weights sum to the goal `[R]`.

    Exact: it is found among all float32 values, from its first digit to its last. If
    all the weights together fall short, nothing is below what is returned.
    """
    digits = jnp.arange(1, 2**_DIGIT, dtype=jnp.uint32)

    def more(i, low):
        shift = (32 - _DIGIT * (i + 1)).astype(jnp.uint32)
        floors = _float(low[:, None] + (digits << shift))
        kept = [jnp.where(logits < f, 0, weights) for f in floors.T]
        # All of them in one pass. By blocks: long float32 sums lose too much.
        sums = jax.lax.reduce(
            kept,
            [weights.dtype.type(0)] * len(kept),
            lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
            (1,),
        )
        sums = jax.lax.psum(jnp.stack(sums, -1).sum(0), axes)
        digit = (sums >= goal[:, None]).sum(-1, dtype=jnp.uint32)
        return low + (digit << shift)

    low = jnp.zeros_like(logits[0, 0], dtype=jnp.uint32)
    return _float(jax.lax.fori_loop(0, 32 // _DIGIT, more, low))


def _float(place: jax.Array) -> jax.Array:
    """The float32 at a place (uint32) in the order of them all."""
    middle = jnp.uint32(1 << 31)
    bits = jnp.where(place < middle, ~place, place ^ middle)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
