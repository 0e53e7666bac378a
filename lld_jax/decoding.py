"""The three compiled programs of a rollout: extend, decode, fork.

Their shapes never change, so nothing compiles after their first call. The slots hold
the key/value cache of the running trajectories; it covers every token of a slot, also
the last one sampled, so an observation is appended without reading anything again.

Axis letters: R slots, E slots extended in one call, N new tokens, S positions of a
slot, L layers, K kv heads, H head dim, D width, V vocab.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lld_jax import model
from lld_jax.logprobs import local_logits
from lld_jax.parallel import Layout
from lld_jax.stop import StopTable

_BLOCK = 128  # vocabulary entries per block of the two-level inverse CDF


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes that the programs are compiled for (tokens, slots)."""

    slots: int
    tokens: int  # positions of a slot, and the length of a training row
    extend_rows: int  # slots extended in one call
    extend_tokens: int  # new tokens of each
    block: int = 64  # key positions read at once

    @property
    def positions(self) -> int:
        """Positions of the cache: `tokens`, rounded up to whole blocks."""
        return -(-self.tokens // self.block) * self.block


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jitted functions over one slot state; each donates the state it is given."""

    shapes: Shapes
    layout: Layout
    init: Any  # () -> slots
    extend: Any  # (params, slots, request) -> slots
    decode: Any  # (params, slots, steps, wake, temperature, seed) -> slots
    fork: Any  # (slots, src[R], dst[R], sample[R]) -> slots

    def compilations(self) -> int:
        jitted = (self.init, self.extend, self.decode, self.fork)
        return sum(f._cache_size() for f in jitted)


def sample(
    hidden_RxD: jax.Array,
    head_VxD: jax.Array,
    uniform_R: jax.Array,
    temperature: jax.Array,
    *,
    valid_vocab: int,
    layout: Layout,
) -> tuple[jax.Array, jax.Array]:
    """One token a slot from one uniform number a slot; greedy at temperature 0.

    Inverse CDF in two levels: the sums of blocks of the vocabulary find the block, a
    cumulative sum inside it the token. The vocabulary stays split.

    Returns:
      tokens `[R]` int32 and their logps `[R]` float32 at `temperature` (1 if greedy).
    """
    axes = layout.vocab

    def local(hidden, head, uniform, temperature):
        logits, offset = local_logits(
            hidden,
            head,
            axes,
            temperature=jnp.where(temperature > 0, temperature, 1.0),
            valid_vocab=valid_vocab,
        )
        peak = jax.lax.pmax(logits.max(-1), axes)
        p = jnp.exp(logits - peak[:, None])
        p = jnp.pad(p, ((0, 0), (0, -p.shape[1] % _BLOCK)))
        p = p.reshape(p.shape[0], -1, _BLOCK)
        sums = p.sum(-1)
        mass = sums.sum(-1)
        total = jax.lax.psum(mass, axes)

        ends = jnp.cumsum(jax.lax.all_gather(mass, axes), axis=0)
        target = uniform * total
        owner = jnp.minimum((ends <= target).sum(0), ends.shape[0] - 1)
        mine = owner == jax.lax.axis_index(axes)
        target = target - (jnp.take_along_axis(ends, owner[None], 0)[0] - mass)
        ends = jnp.cumsum(sums, axis=-1)
        b = jnp.minimum((ends <= target[:, None]).sum(-1), sums.shape[1] - 1)[:, None]
        start = jnp.take_along_axis(ends - sums, b, -1)
        p = jnp.take_along_axis(p, b[..., None], 1)[:, 0]
        inside = (jnp.cumsum(p, axis=-1) > target[:, None] - start) & (p > 0)
        # Rounding can leave no entry beyond it: then the likeliest of the block.
        pick = jnp.where(inside.any(-1), inside.argmax(-1), p.argmax(-1))
        drawn = jnp.where(mine, offset + b[:, 0] * _BLOCK + pick, 0)
        drawn = jax.lax.psum(drawn, axes)

        # Not `==`: NaN, too, must give an id that the vocabulary has.
        best = jnp.where(
            logits.max(-1) < peak, np.iinfo(np.int32).max, offset + logits.argmax(-1)
        )
        token = jnp.where(temperature > 0, drawn, jax.lax.pmin(best, axes))
        row = token - offset
        hit = (row >= 0) & (row < logits.shape[1])
        at = jnp.take_along_axis(logits, jnp.where(hit, row, 0)[:, None], -1)[:, 0]
        at = jax.lax.psum(jnp.where(hit, at, 0.0), axes)
        return token.astype(jnp.int32), at - peak - jnp.log(total)

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(P(layout.batch), P(axes, None), P(layout.batch), P()),
        out_specs=(P(layout.batch), P(layout.batch)),
    )(hidden_RxD, head_VxD, uniform_R, temperature)


def _uniforms(seed, draw, sample, position):
    """One number a slot, a function of (seed, draw, sample, position) alone."""

    def one(draw, sample, position):
        key = jax.random.key(seed)
        for number in (draw, sample, position):
            key = jax.random.fold_in(key, number)
        return jax.random.uniform(key)

    return jax.vmap(one)(draw, sample, position)


def make_programs(
    config: model.ModelConfig,
    shapes: Shapes,
    stop: StopTable,
    *,
    dtype: jnp.dtype,
    valid_vocab: int,
    layout: Layout,
) -> Programs:
    """Builds the programs for one model, mesh and set of shapes.

    Raises:
      ValueError: slots or extended rows do not divide over the shards of the batch.
    """
    shards = layout.size(layout.batch)
    for name in ("slots", "extend_rows"):
        if getattr(shapes, name) % shards:
            raise ValueError(
                f"rollout {name}={getattr(shapes, name)}: legal is a multiple of "
                f"{shards} (mesh.data x mesh.fsdp)"
            )
    R, S, block = shapes.slots, shapes.positions, shapes.block
    kv = (config.layers, R, config.kv_heads, S, config.head_dim)
    table = np.asarray(stop.next_state)
    by_slot = layout.sharding(layout.batch)
    cached = layout.sharding(None, layout.batch, layout.heads)
    shardings = {"k": cached, "v": cached}

    def init():
        zeros = {name: jnp.zeros(R, jnp.int32) for name in _PER_SLOT}
        return zeros | {
            "k": jnp.zeros(kv, dtype),
            "v": jnp.zeros(kv, dtype),
            "hidden": jnp.zeros((R, config.width), dtype),
            "ids": jnp.zeros((R, S), jnp.int32),
            "logps": jnp.zeros((R, S), jnp.float32),
            "running": jnp.zeros(R, bool),
        }

    def extend(params, slots, request):
        """Appends `n` of `ids` to each of `rows`; `fresh` rows start over at 0."""
        n, rows = request["n"], request["rows"]
        start = jnp.where(request["fresh"], 0, slots["length"][rows])
        t = jnp.arange(shapes.extend_tokens)
        positions = jnp.where(t < n[:, None], start[:, None] + t, S)
        hidden, (k, v) = model.cached_hidden_states(
            config,
            params,
            request["ids"],
            positions,
            (slots["k"], slots["v"]),
            rows_E=rows,
            blocks=-(-jnp.max(jnp.where(n > 0, start + n, 0)) // block),
            block=block,
            dtype=dtype,
            layout=layout,
        )
        last = jnp.take_along_axis(hidden, jnp.maximum(n - 1, 0)[:, None, None], 1)
        rows = jnp.where(n > 0, rows, R)  # an unused entry writes nowhere
        new = {
            "length": start + n,
            "hidden": last[:, 0],
            "state": jnp.zeros_like(n),
            "running": request["run"],
        } | {name: request[name] for name in ("draw", "sample", "limit")}
        return (
            slots
            | {"k": k, "v": v}
            | {key: slots[key].at[rows].set(x, mode="drop") for key, x in new.items()}
        )

    def decode(params, slots, steps, wake, temperature, seed):
        """Samples until `steps` tokens or until `wake` of the running slots stopped."""
        began = slots["running"].sum()
        head = model.head(params)

        def more(carry):
            step, slots = carry
            running = slots["running"].sum()
            return (step < steps) & (running > 0) & (began - running < wake)

        def one(carry):
            step, slots = carry
            running, length = slots["running"], slots["length"]
            uniform = _uniforms(seed, slots["draw"], slots["sample"], length)
            token, logp = sample(
                slots["hidden"],
                head,
                uniform,
                temperature,
                valid_vocab=valid_vocab,
                layout=layout,
            )
            at = (jnp.arange(R), jnp.where(running, length, S))
            state = jnp.asarray(table)[slots["state"], token].astype(jnp.int32)
            hidden, (k, v) = model.cached_hidden_states(
                config,
                params,
                token[:, None],
                at[1][:, None],
                (slots["k"], slots["v"]),
                rows_E=None,
                blocks=jnp.max(jnp.where(running, length, 0)) // block + 1,
                block=block,
                dtype=dtype,
                layout=layout,
            )
            length = jnp.where(running, length + 1, length)
            stopped = (state == stop.stop) | (length >= slots["limit"])
            slots = slots | {
                "k": k,
                "v": v,
                "ids": slots["ids"].at[at].set(token, mode="drop"),
                "logps": slots["logps"].at[at].set(logp, mode="drop"),
                "hidden": jnp.where(running[:, None], hidden[:, 0], slots["hidden"]),
                "state": jnp.where(running, state, slots["state"]),
                "length": length,
                "running": running & ~stopped,
            }
            return step + 1, slots

        return jax.lax.while_loop(more, one, (0, slots))[1]

    def fork(slots, src, dst, sample):
        """Copies the state of slot `src[i]` to slot `dst[i]` of the same shard.

        `dst[i] = R` copies nothing. The copy differs in its sample number alone.
        """

        def copy(x, src, dst):
            first = jax.lax.axis_index(layout.batch) * x.shape[1]
            return x.at[:, jnp.where(dst < R, dst - first, x.shape[1])].set(
                x[:, jnp.where(src < R, src - first, 0)], mode="drop"
            )

        b, spec = P(layout.batch), P(None, layout.batch, layout.heads)
        copy = jax.shard_map(
            copy, mesh=layout.mesh, in_specs=(spec, b, b), out_specs=spec
        )
        out = slots | {name: copy(slots[name], src, dst) for name in ("k", "v")}
        for name in ("length", "hidden", "state", "draw", "limit", "running"):
            out[name] = slots[name].at[dst].set(slots[name][src], mode="drop")
        out["sample"] = slots["sample"].at[dst].set(sample, mode="drop")
        return out

    out = {name: shardings.get(name, by_slot) for name in jax.eval_shape(init)}
    return Programs(
        shapes=shapes,
        layout=layout,
        init=jax.jit(init, out_shardings=out),
        extend=jax.jit(extend, donate_argnums=1, out_shardings=out),
        decode=jax.jit(decode, donate_argnums=1, out_shardings=out),
        fork=jax.jit(fork, donate_argnums=0, out_shardings=out),
    )


_PER_SLOT = ("length", "state", "limit", "draw", "sample")
