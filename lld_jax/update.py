"""The jitted functions of a training step: log-probs, normalisers, one update.

Batches are stacked micro-batches `[n, m, T]` with m = `optim.micro_rows`. How many of
them count is a traced number, so a batch of another size needs no compilation.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from lld_jax import logprobs, losses, model, parallel, signals
from lld_jax.agent import Agent

_QUERY_BLOCK = 64  # of attention on a CPU, where short blocks are fastest
_LOGITS = 1 << 25  # logits that one device holds at once


def loss_config(config: ConfigDict) -> losses.LossConfig:
    """The loss settings of a config tree."""
    answer = {"none": 1.0, "constant": config.llds.answer_weight}
    return losses.LossConfig(
        policy=config.loss.policy,
        clip_low=config.loss.clip_low,
        clip_high=config.loss.clip_high,
        kl=config.loss.kl,
        entropy=config.loss.entropy,
        average=config.loss.average,
        llds_coef=config.llds.coef,
        llds_gate=config.llds.gate,
        llds_normalizer=config.llds.normalizer,
        llds_preserve=config.llds.preserve,
        llds_answer=answer.get(config.llds.answer, config.llds.answer),
    )


def forward_functions(agent: Agent) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`hidden(params, micro)` and `score(hidden, head, micro) -> logps, entropy`.

    `[m, T, D]` and `[m, T]`: of every training program. The numbers are the same in
    all of them only since they are these.
    """
    config, layout = agent.config, agent.training
    on_cpu = layout.mesh.devices.flat[0].platform == "cpu"
    column = config.optim.micro_rows * agent.model.vocab // layout.size(layout.vocab)
    chunk = max(1, min(config.rollout.max_tokens, _LOGITS // column))

    def hidden(params, micro):
        return model.hidden_states(
            agent.model,
            params,
            micro["ids"],
            micro["positions"],
            micro["segments"],
            dtype=agent.dtype,
            layout=layout,
            remat=not on_cpu,
            block=_QUERY_BLOCK if on_cpu else 512,
        )

    def score(hidden, head, micro):
        return logprobs.token_logprobs(
            hidden,
            head,
            micro["ids"],
            temperature=config.rollout.temperature,
            valid_vocab=len(agent.codec.token_bytes),
            chunk=chunk,
            layout=layout,
        )

    return hidden, score


def make_functions(agent: Agent) -> tuple[Any, Any, Any, Any]:
    """`init(params) -> state`, `logps_fn`, `update_fn`, `weigh`, jitted for the config.

    `logps_fn(params, batch, start, count) -> [n, m, T]` float32: log-probs of micro-
    batches `start .. start + count`; the others are left 0.

    `weigh(batch) -> losses.Weights`, `[n, m, T]`: normalisers of an optimizer batch.

    `update_fn(state, batch, weights, scalars, lr, unmoved, count)` -> (state, metrics):
    one optimizer step on the first `count` micro-batches; `scalars` holds
    `valid_searches`, and `llds_coef` if lambda is not the config's. A gradient that is
    not finite changes nothing but the counter of bad steps.
    """
    config, layout = agent.config, agent.training
    settings = loss_config(config)
    hidden, score = forward_functions(agent)
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.optim.clip),
        optax.scale_by_adam(config.optim.b1, config.optim.b2),
        optax.add_decayed_weights(config.optim.decay),
    )

    def forward(params, micro):
        return score(hidden(params, micro), model.head(params), micro)

    def init(params):
        return {"params": params, "opt": optimizer.init(params), "bad": jnp.int32(0)}

    def logps_fn(params, batch, start, count):
        def one(i, out):
            logps, _ = forward(params, jax.tree.map(lambda x: x[i], batch))
            return out.at[i].set(logps)

        out = jnp.zeros(batch["ids"].shape, jnp.float32)
        return jax.lax.fori_loop(start, start + count, one, out)

    def update_fn(state, batch, weights, scalars, lr, first, count):
        def loss_fn(params, micro, weights):
            logps, entropy = forward(params, micro)
            loss, sums = losses.objective(
                logps, entropy, micro | scalars, weights, settings, first=first
            )
            if config.loss.nll:
                right = (micro["mask"] > 0) & (micro["advantages"] > 0)
                nll = -jnp.where(right, weights.tokens * logps, 0.0).sum()
                loss += config.loss.nll * nll
            gap = jnp.abs(jax.lax.stop_gradient(logps) - micro["sampler_logps"])
            seen = signals.of_tokens(
                logps, micro | scalars, weights, settings, first=first
            )
            gap = jnp.where(micro["mask"] > 0, gap, 0.0).sum()
            return loss, sums | seen | {"gap": gap}

        def one(i, carry):
            grads, sums = carry
            micro, w = jax.tree.map(lambda x: x[i], (batch, weights))
            new, more = jax.grad(loss_fn, has_aux=True)(state["params"], micro, w)
            return jax.tree.map(jnp.add, grads, new), losses.merge_metrics(sums, more)

        shapes = jax.eval_shape(
            lambda s: loss_fn(s, *jax.tree.map(lambda x: x[0], (batch, weights))),
            state["params"],
        )
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1])
        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        grads, sums = jax.lax.fori_loop(0, count, one, (zeros, sums))
        norm = optax.tree.norm(grads)
        steps, opt = optimizer.update(grads, state["opt"], state["params"])
        params = jax.tree.map(lambda p, s: p - lr * s, state["params"], steps)
        good = jnp.isfinite(norm)
        new = {"params": params, "opt": opt}
        old = {name: state[name] for name in new}
        new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
        new["bad"] = jnp.where(good, 0, state["bad"] + 1).astype(jnp.int32)
        return new, sums | {"norm": norm, "skipped": 1 - good.astype(jnp.int32)}

    def weigh(batch):
        n, m, T = batch["mask"].shape
        flat = {k: batch[k].reshape(n * m, T) for k in ("mask", "advantages")}
        out = losses.weights(
            flat["mask"],
            flat["advantages"],
            settings,
            segments=batch["segments"].reshape(n * m, T),
            micro_ids=jnp.repeat(jnp.arange(n), m),
        )
        return jax.tree.map(lambda x: x.reshape(n, m, T), out)

    abstract = model.abstract_params(agent.model, layout)
    in_state = parallel.state_shardings(
        jax.eval_shape(init, abstract), abstract, layout
    )
    rows = layout.sharding(None, layout.batch)
    return (
        jax.jit(init, out_shardings=in_state),
        jax.jit(logps_fn, out_shardings=rows),
        jax.jit(
            update_fn, donate_argnums=0, out_shardings=(in_state, layout.sharding())
        ),
        jax.jit(weigh, out_shardings=rows),
    )
