"""Jitted functions beside the update: what diagnostics look at, what a rival needs.

Their log-probs come from the forward pass of the update (`update.forward_functions`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lld_jax import model, parallel
from lld_jax.diagnosis import signals
from lld_jax.rollout.policy import Policy
from lld_jax.training import nthr
from lld_jax.training.update import filled, forward_functions, loss_config


def make_nthr(policy: Policy) -> Any:
    """`nthr_fn(params, batch) -> advantages`, `[n, m, T]`: see `nthr.py`.

    A micro-batch holds whole groups, which `config.check` saw to.
    """
    hidden, score = forward_functions(policy)
    group, rows = policy.config.rollout.group, policy.config.optim.micro_rows

    def one(params, micro):
        states = hidden(params, micro)
        return nthr.nthr_advantages(
            lambda head: score(states, head, micro)[0],
            model.head(params),
            micro["advantages"],
            micro["mask"],
            jnp.arange(rows) // group,
            number=rows // group,
        )

    def nthr_fn(params, batch):
        return jax.lax.map(lambda micro: one(params, micro), batch)

    sharding = policy.training.sharding(None, policy.training.batch)
    return jax.jit(nthr_fn, out_shardings=sharding)


def make_probes(policy: Policy) -> tuple[Any, Any]:
    """`norms_fn` and `moved_fn`, jitted: what diagnostics look at now and then.

    `norms_fn(params, batch, weights, scalars, count, beside=())`: norms of the
    gradients, with respect to the parameters, of the surrogate (`grad/policy`) and of
    lambda times LLDS (`grad/llds`), on the first `count` micro-batches of an optimizer
    batch, and the cosine between the two (`grad/cosine`, 0 if one vanishes). `beside`
    is as in `update.make_functions`.

    `moved_fn(new, old, mask, segments, places)`: `signals.displacements`.
    """
    settings, (hidden, score) = loss_config(policy.config), forward_functions(policy)
    layout = policy.training
    # Nothing of it leaves the program: unasked, a compiler keeps the sums whole.
    split = parallel.param_shardings(
        model.abstract_params(policy.model, layout), layout
    )

    def norms_fn(params, batch, weights, scalars, count, beside=()):
        del beside
        order, number = filled(batch, 0, count)

        def one(k, grads):
            micro, w = jax.tree.map(lambda x: x[order[k]], (batch, weights))

            def two(params):
                states = hidden(params, micro)
                logps, _ = score(states, model.head(params), micro)
                return signals.terms(logps, micro | scalars, w, settings)

            _, back = jax.vjp(two, params)
            new = [back((jnp.float32(i == 0), jnp.float32(i == 1)))[0] for i in (0, 1)]
            new = jax.lax.with_sharding_constraint(new, [split, split])
            return jax.tree.map(jnp.add, grads, new)

        zeros = [jax.tree.map(jnp.zeros_like, params)] * 2
        zeros = jax.lax.with_sharding_constraint(zeros, [split, split])
        policy, llds = jax.lax.fori_loop(0, number, one, zeros)
        a, b = optax.tree.norm(policy), optax.tree.norm(llds)
        both = optax.tree.vdot(policy, llds)
        cosine = jnp.where(a * b > 0, both / jnp.where(a * b > 0, a * b, 1.0), 0.0)
        return {"grad/policy": a, "grad/llds": b, "grad/cosine": cosine}

    whole = layout.sharding()
    return (
        jax.jit(norms_fn, keep_unused=True, out_shardings=whole),
        jax.jit(signals.displacements, out_shardings=whole),
    )
