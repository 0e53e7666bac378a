"""Training: rollouts, advantages, log-probs, updates, metrics; one page, top down.

The paper (arXiv 2512.04220) is in `losses.py`; this file feeds it.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from lld_jax import agent as agent_lib
from lld_jax import (
    checkpoint,
    diagnostics,
    evaluate,
    hf,
    logprobs,
    losses,
    metrics,
    model,
    parallel,
)
from lld_jax.agent import Agent
from lld_jax.batch import make_batch
from lld_jax.questions import question_of_draw
from lld_jax.workdir import (
    Preempted,
    Stop,
    claim,
    examine,
    write_summary,
    write_trajectories,
)

_QUERY_BLOCK = 64  # of attention on a CPU, where short blocks are fastest
_LOGITS = 1 << 25  # logits that one device holds at once


class Diverged(RuntimeError):
    """Too many updates in a row had no finite gradient."""


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
        llds_answer=answer.get(config.llds.answer, config.llds.answer),
    )


def make_functions(agent: Agent) -> tuple[Any, Any, Any, Any]:
    """`init(params) -> state`, `logps_fn`, `update_fn`, `weigh`, jitted for the config.

    A batch here is stacked micro-batches, `[n, m, T]` with m = `optim.micro_rows`.

    `logps_fn(params, batch, start, count) -> [n, m, T]` float32: log-probs of micro-
    batches `start .. start + count`; the others are left 0.

    `weigh(batch) -> losses.Weights`, `[n, m, T]`: normalisers of an optimizer batch.

    `update_fn(state, batch, weights, scalars, lr, unmoved, count)` -> (state, metrics):
    one optimizer step on the first `count` micro-batches. A gradient that is not finite
    changes nothing but the counter of bad steps.
    """
    config, layout = agent.config, agent.training
    settings = loss_config(config)
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.optim.clip),
        optax.scale_by_adam(config.optim.b1, config.optim.b2),
        optax.add_decayed_weights(config.optim.decay),
    )
    on_cpu = layout.mesh.devices.flat[0].platform == "cpu"
    column = config.optim.micro_rows * agent.model.vocab // layout.size(layout.vocab)
    chunk = max(1, min(config.rollout.max_tokens, _LOGITS // column))

    def forward(params, micro):
        hidden = model.hidden_states(
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
        return logprobs.token_logprobs(
            hidden,
            model.head(params),
            micro["ids"],
            temperature=config.rollout.temperature,
            valid_vocab=len(agent.codec.token_bytes),
            chunk=chunk,
            layout=layout,
        )

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
            gap = jnp.abs(jax.lax.stop_gradient(logps) - micro["sampler_logps"])
            return loss, sums | {"gap": jnp.where(micro["mask"] > 0, gap, 0.0).sum()}

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


def train(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Trains until `config.steps`, resuming what `workdir` holds; returns the summary.

    A run that was killed and starts again gives the metrics and the parameters of one
    that was not. `workdir.py` says what the folder holds.

    Raises:
      ConfigError: the config cannot work, or `workdir` holds another or a finished run.
      Preempted: SIGTERM or Ctrl-C came; the finished steps are saved.
      Diverged: `optim.max_bad_steps` updates in a row had no finite gradient.
    """
    # ------------------------------------------------------------------ work folder
    workdir = examine(config, workdir)
    began = time.perf_counter()
    timers = metrics.Timers()
    with contextlib.ExitStack() as stack:
        compiled = stack.enter_context(metrics.CompileCounter())

        # -------------------------------------------------------- agent, questions
        agent = agent_lib.open_agent(config)
        draws = question_of_draw(agent.questions(config.questions.train), config.seed)
        eval_sets = evaluate.load_sets(agent)
        claim(config, workdir)
        settings = loss_config(config)
        init, logps_fn, update_fn, weigh = make_functions(agent)
        publish = agent_lib.publisher(agent)
        rows = agent.training.sharding(None, agent.training.batch)
        micro, updates = config.optim.micro_rows, config.optim.updates
        n = agent.rows // micro  # micro-batches of a rollout batch
        each = n // updates  # and of an update

        # ------------------------------------------------------------ state, resume
        reference = agent_lib.load_params(agent)
        state = init(reference)
        checkpoints = stack.enter_context(
            checkpoint.open_checkpoints(
                workdir / "checkpoints", keep=config.checkpoint.keep
            )
        )
        start, info = 0, {"seconds": 0.0}
        if checkpoint.latest_step(workdir / "checkpoints") is not None:
            saved, info = checkpoint.restore(checkpoints, {"state": state, "step": 0})
            state, start = saved["state"], saved["step"]
        began -= info["seconds"]
        writer = stack.enter_context(metrics.MetricsWriter(workdir, start_step=start))
        bar = stack.enter_context(metrics.progress_bar(config.steps, start))
        stop = stack.enter_context(Stop())

        def save(metric: float | None = None) -> None:
            info["seconds"] = time.perf_counter() - began
            checkpoint.save(
                checkpoints, step, {"state": state, "step": step}, info, metric=metric
            )

        def score() -> dict[str, float]:
            total = sum(map(len, eval_sets.values())) * len(evaluate.MODES)
            with timers.phase("evaluation"), metrics.work_bar(total, "eval") as moved:
                published = publish(state["params"])
                on_progress = stop.watch(moved)
                return evaluate.evaluate(
                    agent, published, eval_sets, on_progress=on_progress
                )[0]

        for step in range(start, config.steps):
            record: dict[str, float] = {}
            compiled_before = compiled.count
            try:
                # ----------------------------------- evaluation of the last step
                if _due(step, config.eval.every) or step == 0:
                    record |= (scores := score())
                    if step == 0:
                        info["before"] = scores
                    save(metric=scores["eval/greedy/exact_match"])
                elif _due(step, config.checkpoint.every):
                    save()

                # ------------------------------------------------------- rollouts
                first = step * config.rollout.questions
                drawn = range(first, first + config.rollout.questions)
                with (
                    timers.phase("rollout"),
                    metrics.work_bar(agent.rows, "rollout") as moved,
                ):
                    trajectories, stats = agent_lib.sample(
                        agent,
                        publish(state["params"]),
                        [(i, draws[i]) for i in drawn],
                        group=config.rollout.group,
                        seed=config.seed,
                        temperature=config.rollout.temperature,
                        max_turns=config.rollout.max_turns,
                        on_progress=stop.watch(moved),
                    )
            except Preempted:
                save()
                raise
            write_trajectories(workdir, step, trajectories)
            record |= diagnostics.of_rollout(trajectories, stats)

            # ------------------------------- batch, weights, old and reference logps
            with timers.phase("logps"):
                batch, scalars = make_batch(
                    trajectories,
                    tokens=config.rollout.max_tokens,
                    token_bytes=agent.codec.token_bytes,
                    std=config.loss.advantage_std,
                )
                stacked = {
                    name: jax.device_put(x.reshape(n, micro, -1), rows)
                    for name, x in batch.items()
                }
                # The first update needs no old logps: its own are the same numbers.
                # Both calls see the same names: another tree would compile anew.
                stacked |= {
                    "old_logps": logps_fn(state["params"], stacked, each, n - each),
                    "ref_logps": logps_fn(
                        reference, stacked, 0, n if settings.kl else 0
                    ),
                }
                jax.block_until_ready(stacked)

            # ----------------------------------------------------------------- updates
            with timers.phase("update"):
                lr = config.optim.lr
                if step < config.optim.warmup:
                    lr *= step / config.optim.warmup
                outs = []
                for j in range(updates):
                    part = {k: x[j * each : (j + 1) * each] for k, x in stacked.items()}
                    unmoved = j == 0 or lr == 0
                    state, out = update_fn(
                        state, part, weigh(part), scalars, lr, unmoved, each
                    )
                    outs.append(out)
                outs = jax.device_get(outs)
            if int(state["bad"]) >= config.optim.max_bad_steps:
                raise Diverged(
                    f"step {step}: {int(state['bad'])} updates in a row had a gradient "
                    "that is not finite, and changed nothing. Look at ratio/max, "
                    "grad/norm and policy/entropy of the last steps in "
                    f"{workdir / 'metrics.jsonl'}; a lower optim.lr or fewer "
                    "optim.updates is the usual cure"
                )

            # ----------------------------------------------------------------- metrics
            record |= diagnostics.of_updates(outs, settings) | {"optim/lr": lr}
            record |= timers.collect()
            record |= diagnostics.speeds(record, int(batch["segments"].sum()))
            record["compile/count"] = compiled.count - compiled_before
            writer.write(step, record)
            metrics.show_progress(bar, record)

        # ------------------------------------------------------ the end: score, export
        step = config.steps
        try:
            scores = score()
            save(metric=scores["eval/greedy/exact_match"])
        except Preempted:
            save()
            raise
        writer.write(step, scores | timers.collect())
        hf.save(workdir / "export", state["params"], agent.model, agent.folder)
        info["seconds"] = time.perf_counter() - began
    return write_summary(workdir, info, scores, mean_speeds(workdir))


def mean_speeds(workdir: Path) -> dict[str, float]:
    """Tokens per second over the steps of a run but the first, which compiles."""
    lines = metrics.read(workdir / "metrics.jsonl")
    lines = [line for line in lines if "tokens_per_s/train" in line]
    lines = lines[1:] or lines
    return {
        part: sum(line[f"tokens_per_s/{part}"] for line in lines) / len(lines)
        for part in ("rollout", "train")
    }


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
