"""The jitted functions of a training step: log-probs, normalisers, one update.

Batches are stacked micro-batches `[n, m, T]` with m = `optim.micro_rows`. How many of
them count is a traced number, so a batch of another size needs no compilation; those
without a token are never computed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from lld_jax import losses, model, parallel
from lld_jax.diagnosis import signals
from lld_jax.model import logprobs
from lld_jax.rollout.policy import Policy

_QUERY_BLOCK = 64  # of attention on a CPU, where short blocks are fastest
_LOGITS = 1 << 25  # logits that one device holds at once
_LEAST = 128  # tokens that are worth a product with the head


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


def score_chunk(policy: Policy) -> int:
    """Positions whose logits live at once: of a row, with packing of a device."""
    config, layout = policy.config, policy.training
    rows, vocab = config.optim.micro_rows, policy.model.vocab
    if config.optim.packing:
        # Tokens of a device, so few that the last chunk is little to waste.
        own = rows // layout.size(layout.batch) * config.rollout.max_tokens
        return max(1, min(own, max(_LEAST, own // 16), _LOGITS // vocab))
    column = rows * vocab // layout.size(layout.vocab)
    return max(1, min(config.rollout.max_tokens, _LOGITS // column))


def forward_functions(policy: Policy) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`hidden(params, micro)` and `score(hidden, head, micro) -> logps, entropy`.

    `[m, T, D]` and `[m, T]`: of every training program. The numbers are the same in
    all of them only since they are these.
    """
    config, layout = policy.config, policy.training
    chunk = score_chunk(policy)

    def hidden(params, micro):
        return model.hidden_states(
            policy.model,
            params,
            micro["ids"],
            micro["positions"],
            micro["segments"],
            dtype=policy.dtype,
            layout=layout,
            remat=policy.remat,
            kernel=policy.attention,
            block=_QUERY_BLOCK if policy.on_cpu else 512,
        )

    def score(hidden, head, micro):
        return logprobs.token_logprobs(
            hidden,
            head,
            micro["ids"],
            temperature=config.rollout.temperature,
            valid_vocab=policy.valid_vocab,
            chunk=chunk,
            layout=layout,
            # Without packing as ever, bit for bit; and NTHR needs the forward mode.
            mask_BxT=micro["mask"] if config.optim.packing else None,
        )

    return hidden, score


def keep_reference(policy: Policy, params: Any) -> Any:
    """A copy of the parameters for `logps_fn`, in `model.dtype`.

    All but the head is cast to it anyway before it is multiplied with; weights that
    came in bfloat16, as Qwen2.5's do, lose nothing.
    """
    abstract = model.abstract_params(policy.model, policy.training)
    shardings = parallel.param_shardings(abstract, policy.training)

    def cast(params):
        return jax.tree.map(lambda x: x.astype(policy.dtype), params)

    return jax.jit(cast, out_shardings=shardings)(params)


def filled(batch: Any, start: Any, count: Any) -> tuple[jax.Array, jax.Array]:
    """Which of the micro-batches `start .. start + count` hold a token.

    Their numbers `[n]`, in order and before those of the others, and how many they are.
    """
    number = jnp.arange(batch["segments"].shape[0])
    chosen = (number >= start) & (number < start + count)
    chosen &= (batch["segments"] > 0).any((1, 2))
    return jnp.argsort(~chosen, stable=True), chosen.sum()


def make_functions(policy: Policy) -> tuple[Any, Any, Any, Any]:
    """`init(params) -> state`, `logps_fn`, `update_fn`, `weigh`, jitted for the config.

    `logps_fn(params, batch, start, count) -> [n, m, T]` float32: log-probs of micro-
    batches `start .. start + count`; the others are left 0, and with `optim.packing`
    all but action tokens.

    `weigh(batch) -> losses.Weights`, `[n, m, T]`: normalisers of an optimizer batch.

    `update_fn(state, batch, weights, scalars, lr, unmoved, count, beside=())`
    -> (state, metrics): one optimizer step on the first `count` micro-batches;
    `scalars` holds `valid_searches`, and `llds_coef` if lambda is not the config's. A
    gradient that is not finite changes nothing but the counter of bad steps. `beside`,
    what else lies on the devices meanwhile, is not read: a compiler that packs tighter
    where memory is short has to know of it.
    """
    config, layout = policy.config, policy.training
    settings = loss_config(config)
    hidden, score = forward_functions(policy)
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.optim.clip),
        optax.scale_by_adam(
            config.optim.b1, config.optim.b2, mu_dtype=jnp.dtype(config.optim.moment)
        ),
        optax.add_decayed_weights(config.optim.decay),
    )

    def forward(params, micro):
        # Float32 whatever the parameters are: rounded logits move the ratios off 1.
        head = model.head(params).astype(jnp.float32)
        return score(hidden(params, micro), head, micro)

    def init(params):
        return {"params": params, "opt": optimizer.init(params), "bad": jnp.int32(0)}

    def logps_fn(params, batch, start, count):
        order, number = filled(batch, start, count)

        def one(k, out):
            i = order[k]
            logps, _ = forward(params, jax.tree.map(lambda x: x[i], batch))
            return out.at[i].set(logps)

        out = jnp.zeros(batch["ids"].shape, jnp.float32)
        return jax.lax.fori_loop(0, number, one, out)

    def update_fn(state, batch, weights, scalars, lr, first, count, beside=()):
        del beside

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
            empty = (micro["segments"] == 0).sum()
            places = jnp.int32(micro["segments"].size)
            seen |= {"gap": gap, "padding": empty, "places": places}
            return loss, sums | seen

        order, number = filled(batch, 0, count)

        def one(k, carry):
            grads, sums = carry
            i = order[k]
            micro, w = jax.tree.map(lambda x: x[i], (batch, weights))
            new, more = jax.grad(loss_fn, has_aux=True)(state["params"], micro, w)
            return jax.tree.map(jnp.add, grads, new), losses.merge_metrics(sums, more)

        shapes = jax.eval_shape(
            lambda s: loss_fn(s, *jax.tree.map(lambda x: x[0], (batch, weights))),
            state["params"],
        )
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1])
        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        grads, sums = jax.lax.fori_loop(0, number, one, (zeros, sums))
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

    abstract = model.abstract_params(policy.model, layout)
    in_state = parallel.state_shardings(
        jax.eval_shape(init, abstract), abstract, layout
    )
    rows = layout.sharding(None, layout.batch)
    return (
        jax.jit(init, out_shardings=in_state),
        jax.jit(logps_fn, out_shardings=rows),
        jax.jit(
            update_fn,
            donate_argnums=0,
            keep_unused=True,
            out_shardings=(in_state, layout.sharding()),
        ),
        jax.jit(weigh, out_shardings=rows),
    )
