"""Log-probs of the same policy by programs that differ in their arithmetic."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.rounding.cases import Case, layout
from lld_jax import losses, model, parallel
from lld_jax.model import logprobs

# Of the loss nothing but the surrogate and LLDS, as the paper has them.
SETTINGS = losses.LossConfig(kl=0.0)
_INPUTS = ("ids", "positions", "segments")


@dataclasses.dataclass(frozen=True)
class Program:
    """What may differ between two programs that compute the same log-probs."""

    dtype: str
    rows: int = 4  # of a micro-batch
    block: int = 64  # queries of attention at once
    chunk: int | None = None  # positions whose logits are alive at once; None: all
    padding: int = 0  # positions added to a row


def forward(
    case: Case, how: Program, params: Any, micro: Mapping[str, Any]
) -> jax.Array:
    """Log-probs `[rows, T]` of a micro-batch, as in a training step."""
    hidden = model.hidden_states(
        case.model,
        params,
        *(micro[name] for name in _INPUTS),
        dtype=jnp.dtype(how.dtype),
        layout=layout(),
        block=how.block,
    )
    return _logps(case, how, params, hidden, micro["ids"], layout())


def _logps(case, how, params, hidden, ids, layout):
    logps, _ = logprobs.token_logprobs(
        hidden,
        model.head(params),
        ids,
        temperature=1.0,
        valid_vocab=case.valid_vocab,
        chunk=how.chunk or ids.shape[1],
        layout=layout,
    )
    return logps


def _stack(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """`[B, ...]` as micro-batches, `[B / rows, rows, ...]`."""
    return {name: x.reshape(-1, rows, *x.shape[1:]) for name, x in batch.items()}


def score(case: Case, how: Program) -> jax.Array:
    """Log-probs `[B, T]` of a program that computes nothing else."""
    B, T = case.batch["ids"].shape
    width = T + how.padding
    batch = {
        name: np.pad(case.batch[name], ((0, 0), (0, how.padding))) for name in _INPUTS
    }
    batch["positions"] = np.tile(np.arange(width, dtype=np.int32), (B, 1))

    @jax.jit
    def scored(params, stacked):
        return jax.lax.map(lambda micro: forward(case, how, params, micro), stacked)

    return scored(case.params, _stack(batch, how.rows)).reshape(B, width)[:, :T]


def score_cached(case: Case, how: Program) -> jax.Array:
    """Log-probs `[B, T]` on a rollout's way: all rows token by token over a cache.

    The weights are a rollout's too, cast to `how.dtype`.
    """
    ids = jnp.asarray(case.batch["ids"])
    (B, T), dtype, c = ids.shape, jnp.dtype(how.dtype), case.model
    serving = parallel.rollout_layout(layout().mesh)
    kv = (c.layers, -(-T // how.block), B, c.kv_heads)

    @jax.jit
    def scored(params, ids):
        cache = (
            jnp.zeros((*kv, c.head_dim, how.block), dtype),
            jnp.zeros((*kv, how.block, c.head_dim), dtype),
        )

        def one(cache, new):
            token, at = new
            hidden, cache = model.cached_hidden_states(
                c,
                params,
                token[:, None],
                jnp.full((B, 1), at),
                cache,
                rows_E=None,
                end=at + 1,
                at_once=1,
                head_last=False,
                dtype=dtype,
                layout=serving,
            )
            return cache, hidden[:, 0]

        _, hidden = jax.lax.scan(one, cache, (ids.T, jnp.arange(T)))
        return _logps(case, how, params, hidden.swapaxes(0, 1), ids, serving)

    published = model.publisher(c, dtype, serving)(case.params)
    return scored(published, ids)


def trainer(case: Case, how: Program) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`train(weights, old [B, T], first) -> logps [B, T], gradient norm`.

    A training step up to its gradient, summed over micro-batches: the weights decide
    which terms of the loss there are, and one compiled program serves them all.
    """
    B, T = case.batch["ids"].shape

    @jax.jit
    def train(params, batch, weights, first):
        def loss_fn(params, micro, weights):
            logps = forward(case, how, params, micro)
            loss, _ = losses.objective(
                logps, jnp.zeros_like(logps), micro, weights, SETTINGS, first=first
            )
            return loss, logps

        def one(grads, part):
            new, logps = jax.grad(loss_fn, has_aux=True)(params, *part)
            return jax.tree.map(jnp.add, grads, new), logps

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, logps = jax.lax.scan(one, zeros, (batch, weights))
        return logps.reshape(B, T), optax.tree.norm(grads)

    def call(weights, old, first):
        batch = case.batch | {"old_logps": old, "ref_logps": jnp.zeros((B, T))}
        parts = losses.Weights(**_stack(weights._asdict(), how.rows))
        return train(case.params, _stack(batch, how.rows), parts, first)

    return call
