"""The three compiled programs of a rollout: extend, decode, fork.

Their shapes never change, so nothing compiles after their first call. The slots hold
the key/value cache of the running trajectories; it covers every token of a slot, also
the last one sampled, so an observation is appended without reading anything again. The
prompt stays at the head of a slot, with the hidden state behind it, so the rest of its
group starts from a copy. What was sampled leaves a call as a report, which no later
call takes back: the host reads it while the next one runs.

Axis letters: R slots, E slots extended or forked in one call, N new tokens, C decode
steps of a call, S positions of a slot, L layers, K kv heads, H head dim, D width,
V vocab.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lld_jax import model
from lld_jax.parallel import Layout
from lld_jax.protocol.stop import StopTable
from lld_jax.rollout import sampling


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes that the programs are compiled for (tokens, slots)."""

    slots: int
    tokens: int  # positions of a slot, and the length of a training row
    extend_rows: int  # slots extended, or forked, in one call
    extend_tokens: int  # new tokens of each
    block: int = 64  # key positions read at once; an extension reads four times that
    steps: int = 8  # at most, of one decode call
    # Rows of narrower decode steps, for when few slots run. A row's last bits depend
    # on how many there are: with widths, log-probs depend on the time replies take.
    widths: tuple[int, ...] = ()
    head_last: bool = False  # keys lie as values do, which accelerators want

    @property
    def positions(self) -> int:
        """Positions of the cache: `tokens`, rounded up to whole blocks."""
        return -(-self.tokens // self.block) * self.block


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jitted functions over one slot state; each donates the state it is given.

    Attributes:
      init: () -> slots.
      extend: (params, slots, request) -> slots, done. Request, all `[E]` but ids:
        `rows` (slots, each entry one of its own shard), `ids [E, N]`, `n` (0: unused),
        `fresh` (starts the slot over), `run` (decodes from here on), `prompt` (the
        prompt ends here), `draw`, `sample`, `limit` (the slot's length at which its
        action is cut). `done` is a scalar that is there once the call has run.
      decode: (params, slots, order, width) -> slots, report. Order: `steps` (at most
        `shapes.steps`), `wake` (returns once so many have stopped), `temperature`,
        `top_p`, `top_k`, `seed`. Width: `slots`, or one of `widths` that the running
        slots of every shard fit into. Report: `ids [R, C]`, `logps [R, C]`, `n [R]`
        (how many of these a slot took), `stopped [R]`, `cut [R]` (stopped by the
        limit), `steps`.
      fork: (slots, request) -> slots, done. Request, all `[E]`: `src`, `dst` (slots of
        the entry's shard), `used`, `draw`, `sample`, `limit`. `dst` starts over with
        the prompt of `src`, which may be itself, and runs.
    """

    shapes: Shapes
    layout: Layout
    init: Any
    extend: Any
    decode: Any
    fork: Any

    def compilations(self) -> int:
        jitted = (self.init, self.extend, self.decode, self.fork)
        return sum(f._cache_size() for f in jitted)


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
    sizes = [("slots", shapes.slots), ("extend_rows", shapes.extend_rows)]
    for name, size in sizes + [("widths", width) for width in shapes.widths]:
        if size % shards or not 0 < size <= shapes.slots:
            raise ValueError(
                f"rollout {name}={size}: legal is a multiple of {shards} (mesh.data x "
                f"mesh.fsdp) up to slots={shapes.slots}"
            )
    R, S, block = shapes.slots, shapes.positions, shapes.block
    kv = (config.layers, S // block, R, config.kv_heads)
    table = np.asarray(stop.next_state)

    sides = (config.head_dim, block)
    sides = sides[::-1] if shapes.head_last else sides

    def init():
        zeros = {name: jnp.zeros(R, jnp.int32) for name in _PER_SLOT}
        return zeros | {
            "k": jnp.zeros((*kv, *sides), dtype),
            "v": jnp.zeros((*kv, block, config.head_dim), dtype),
            "hidden": jnp.zeros((R, config.width), dtype),
            "prompt_hidden": jnp.zeros((R, config.width), dtype),
            "running": jnp.zeros(R, bool),
        }

    def extend(params, slots, request):
        n, rows = request["n"], request["rows"]
        start = jnp.where(request["fresh"], 0, slots["length"][rows])
        t = jnp.arange(shapes.extend_tokens)
        hidden, (k, v) = model.cached_hidden_states(
            config,
            params,
            request["ids"],
            jnp.where(t < n[:, None], start[:, None] + t, S),
            (slots["k"], slots["v"]),
            rows_E=rows,
            end=jnp.max(jnp.where(n > 0, start + n, 0)),
            # The softmax of many tokens over few keys is dearer than its products.
            at_once=min(4, S // block),
            head_last=shapes.head_last,
            dtype=dtype,
            layout=layout,
        )
        last = jnp.take_along_axis(hidden, jnp.maximum(n - 1, 0)[:, None, None], 1)
        prompt = request["prompt"]
        new = {
            "length": start + n,
            "hidden": last[:, 0],
            "state": jnp.full_like(n, stop.start),
            "running": request["run"],
            "prompt_hidden": jnp.where(
                prompt[:, None], last[:, 0], slots["prompt_hidden"][rows]
            ),
            "prompt_length": jnp.where(prompt, start + n, slots["prompt_length"][rows]),
        } | {name: request[name] for name in _IDENTITY}
        slots = slots | {"k": k, "v": v}
        return _write(slots, jnp.where(n > 0, rows, R), new), n.sum()

    def decode(params, slots, order, width):
        before, was_running = slots["length"], slots["running"]
        rows = None if width == R else _running_rows(slots["running"], width, shards)
        names = ("draw", "sample", "limit", "length", "state", "hidden", "running")
        own = {
            name: slots[name] if rows is None else slots[name][rows] for name in names
        }
        began = own["running"].sum()
        head = model.head(params)

        def more(carry):
            step, own, *_ = carry
            running = own["running"].sum()
            few = began - running < order["wake"]
            return (step < order["steps"]) & (running > 0) & few

        def one(carry):
            step, own, cache, ids, logps = carry
            running, length = own["running"], own["length"]
            token, logp = sampling.sample(
                own["hidden"],
                head,
                sampling.uniforms(order["seed"], own["draw"], own["sample"], length),
                order["temperature"],
                order["top_p"],
                order["top_k"],
                valid_vocab=valid_vocab,
                layout=layout,
            )
            state = jnp.asarray(table)[own["state"], token].astype(jnp.int32)
            hidden, cache = model.cached_hidden_states(
                config,
                params,
                token[:, None],
                jnp.where(running, length, S)[:, None],
                cache,
                rows_E=rows,
                end=jnp.max(jnp.where(running, length, 0)) + 1,
                at_once=1,
                head_last=shapes.head_last,
                dtype=dtype,
                layout=layout,
            )
            length = jnp.where(running, length + 1, length)
            stopped = (state == stop.stop) | (length >= own["limit"])
            own = own | {
                "hidden": jnp.where(running[:, None], hidden[:, 0], own["hidden"]),
                "state": jnp.where(running, state, own["state"]),
                "length": length,
                "running": running & ~stopped,
            }
            ids, logps = ids.at[:, step].set(token), logps.at[:, step].set(logp)
            return step + 1, own, cache, ids, logps

        sampled = jnp.zeros((width, shapes.steps))
        start = (0, own, (slots["k"], slots["v"]), sampled.astype(jnp.int32), sampled)
        step, own, (k, v), ids, logps = jax.lax.while_loop(more, one, start)
        slots, report = slots | {"k": k, "v": v}, {"ids": ids, "logps": logps}
        if rows is None:
            slots |= own
        else:
            slots = _write(slots, rows, own)
            whole = {
                k: jnp.zeros((R, *x.shape[1:]), x.dtype) for k, x in report.items()
            }
            report = _write(whole, rows, report)
        stopped = was_running & ~slots["running"]
        return slots, report | {
            "n": slots["length"] - before,
            "stopped": stopped,
            "cut": stopped & (slots["state"] != stop.stop),
            "steps": step,
        }

    def fork(slots, request):
        src, dst, used = request["src"], request["dst"], request["used"]
        length = slots["prompt_length"][src]
        k, v = _copy_prompts(
            (slots["k"], slots["v"]),
            src,
            dst,
            jnp.where(used, -(-length // block), 0),
            layout=layout,
        )
        hidden = slots["prompt_hidden"][src]
        new = {
            "length": length,
            "hidden": hidden,
            "state": jnp.full_like(src, stop.start),
            "running": jnp.ones_like(used),
            "prompt_hidden": hidden,
            "prompt_length": length,
        } | {name: request[name] for name in _IDENTITY}
        slots = slots | {"k": k, "v": v}
        return _write(slots, jnp.where(used, dst, R), new), used.sum()

    by_slot, whole = layout.sharding(layout.batch), layout.sharding()
    cached = layout.sharding(None, None, layout.batch, layout.heads)
    out = dict.fromkeys(jax.eval_shape(init), by_slot) | {"k": cached, "v": cached}
    report = dict.fromkeys(("ids", "logps", "n", "stopped", "cut"), by_slot)
    report |= {"steps": whole}
    return Programs(
        shapes=shapes,
        layout=layout,
        init=jax.jit(init, out_shardings=out),
        extend=jax.jit(extend, donate_argnums=1, out_shardings=(out, whole)),
        decode=jax.jit(
            decode, static_argnums=3, donate_argnums=1, out_shardings=(out, report)
        ),
        fork=jax.jit(fork, donate_argnums=0, out_shardings=(out, whole)),
    )


_IDENTITY = ("draw", "sample", "limit")
_PER_SLOT = (*_IDENTITY, "length", "state", "prompt_length")


def _running_rows(running, width, shards):
    """`[width]`: the running slots of each shard, and others to fill its entries."""
    by_shard = running.reshape(shards, -1)
    first = jnp.argsort(~by_shard, axis=1)[:, : width // shards]
    return (first + jnp.arange(shards)[:, None] * by_shard.shape[1]).reshape(-1)


def _write(slots, rows, new):
    """The slots with `new` values at `rows`; row R, one too many, writes nowhere."""
    return slots | {
        name: slots[name].at[rows].set(x, mode="drop") for name, x in new.items()
    }


def _copy_prompts(cache, src, dst, blocks, *, layout):
    """Copies the first `blocks[e]` key blocks of slot `src[e]` to slot `dst[e]`.

    The cache is as in `cached.cache_attention`. Only what is there is read, and the
    cache is written in place.
    """

    def local(k, v, src, dst, blocks):
        first = jax.lax.axis_index(layout.batch) * k.shape[2]

        def one_block(x):
            return (x.shape[0], 1, 1, *x.shape[3:])

        def entry(e, cache):
            def one(i, cache):
                at = (0, i, src[e] - first, 0, 0, 0)
                to = (0, i, dst[e] - first, 0, 0, 0)
                return tuple(
                    jax.lax.dynamic_update_slice(
                        x, jax.lax.dynamic_slice(x, at, one_block(x)), to
                    )
                    for x in cache
                )

            return jax.lax.fori_loop(0, blocks[e], one, cache)

        return jax.lax.fori_loop(0, src.shape[0], entry, (k, v))

    b, cached = P(layout.batch), P(None, None, layout.batch, layout.heads)
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(cached, cached, b, b, b),
        out_specs=(cached, cached),
    )(*cache, src, dst, blocks)
