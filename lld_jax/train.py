"""Training: rollouts, advantages, log-probs, updates, metrics; one page, top down.

The paper (arXiv 2512.04220) is in `losses.py`; this file feeds it.
"""

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from lld_jax import agent as agent_lib
from lld_jax import evaluate, parallel
from lld_jax.data.questions import question_of_draw
from lld_jax.diagnosis import diagnostics, guard
from lld_jax.diagnosis.phases import Thresholds
from lld_jax.parallel import exchange
from lld_jax.parallel.preemption import Preempted, Stop
from lld_jax.rollout import Sampling
from lld_jax.run import checkpoint, metrics
from lld_jax.run.workdir import (
    claim,
    examine,
    hold,
    write_summary,
    write_trajectories,
)
from lld_jax.training import packing
from lld_jax.training.batch import make_batch
from lld_jax.training.probes import make_nthr, make_probes
from lld_jax.training.update import keep_reference, loss_config, make_functions


class Diverged(RuntimeError):
    """Too many updates in a row had no finite gradient."""


def train(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Trains until `config.steps`, resuming what `workdir` holds; returns the summary.

    A run that was killed and starts again gives the metrics and the parameters of one
    that was not. `workdir.py` says what the folder holds. Several processes call this
    together and see the same numbers; the first one writes.

    Raises:
      ConfigError: the config cannot work, or `workdir` holds another or a finished run.
      Preempted: SIGTERM or Ctrl-C came; the finished steps are saved.
      Diverged: `optim.max_bad_steps` updates in a row had no finite gradient.
      Collapsing: the run decays and `diagnostics.action` is 'stop'.
      PeerFailed: another process failed.
    """
    # ------------------------------------------------------------------ work folder
    workdir = exchange.first(lambda: examine(config, workdir))
    writes = exchange.is_first()
    began = time.perf_counter()
    timers = metrics.Timers()
    with contextlib.ExitStack() as stack:
        compiled = stack.enter_context(metrics.CompileCounter())

        # -------------------------------------------------------- agent, questions
        agent = exchange.agree(lambda: agent_lib.open_agent(config, trains=True))
        draws, eval_sets = exchange.agree(
            lambda: (
                question_of_draw(agent.questions(config.questions.train), config.seed),
                evaluate.load_sets(agent),
            )
        )
        exchange.first(lambda: stack.enter_context(hold(claim(config, workdir))))
        settings = loss_config(config)
        init, logps_fn, update_fn, weigh = make_functions(agent)
        norms_fn, moved_fn = make_probes(agent)
        nthr_fn = make_nthr(agent) if config.loss.negatives == "nthr" else None
        publish = agent_lib.publisher(agent)
        rows = agent.training.sharding(None, agent.training.batch)
        micro, updates = config.optim.micro_rows, config.optim.updates
        n = agent.rows // micro  # micro-batches of a rollout batch, at most
        each = n // updates  # and of an update

        # ------------------------------------------------------------ state, resume
        params = agent_lib.load_params(agent)
        reference = keep_reference(agent, params) if settings.kl else None
        # The old policy of LLDS, where it is not the one that sampled.
        lagged = {"anchor": params} if config.llds.anchor else {}
        state = init(params)
        del params
        checkpoints = stack.enter_context(
            checkpoint.open_checkpoints(
                workdir / "checkpoints", keep=config.checkpoint.keep
            )
        )
        start, info = 0, {"seconds": 0.0}
        last = exchange.first(lambda: checkpoint.latest_step(workdir / "checkpoints"))
        if last is not None:
            saved, info = checkpoint.restore(
                checkpoints, {"state": state, "step": 0} | lagged, last
            )
            state, start = saved.pop("state"), saved.pop("step")
            lagged = saved
        began -= info["seconds"]
        thresholds, action = Thresholds(), config.diagnostics.action
        watch = guard.Guard(settings.llds_coef)
        if "guard" in info:
            done = exchange.first(lambda: metrics.read(workdir / "metrics.jsonl"))
            done = done[:start]
            watch = guard.from_json(info["guard"], done, action, thresholds)
        writer = stack.enter_context(
            metrics.MetricsWriter(workdir, start_step=start, active=writes)
        )
        bar = stack.enter_context(
            metrics.progress_bar(config.steps, start, active=writes)
        )
        stop = stack.enter_context(Stop())

        def save(metric: float | None = None) -> None:
            info["seconds"] = time.perf_counter() - began
            info["guard"] = guard.to_json(watch)
            kept = {"state": state, "step": step} | lagged
            checkpoint.save(checkpoints, step, kept, info, metric=metric)

        def score() -> dict[str, float]:
            total = sum(map(len, eval_sets.values())) * len(evaluate.MODES)
            with (
                timers.phase("evaluation"),
                metrics.work_bar(total, "eval", active=writes) as moved,
            ):
                published = publish(state["params"])
                on_progress = stop.watch(moved)
                return evaluate.evaluate(
                    agent, published, eval_sets, on_progress=on_progress
                )[0]

        for step in range(start, config.steps):
            record: dict[str, Any] = {}
            compiled_before = compiled.count
            try:
                # ----------------------------------- evaluation of the last step
                if _due(step, config.eval.every) or step == 0:
                    record |= (scores := score())
                    if step == 0:
                        info["before"] = scores
                    save(metric=scores["eval/greedy/exact_match"])
                elif _due(step, config.checkpoint.every) or watch.todo == "stop":
                    save()
                if watch.todo == "stop":
                    raise guard.Collapsing(watch.notice)
                if watch.todo == "roll_back":
                    checkpoints.wait()
                    old = guard.target(watch, [c.step for c in checkpoints.checkpoints])
                    target = {"state": state, "step": 0} | lagged
                    state = checkpoint.restore(checkpoints, target, old)[0]["state"]
                    watch = guard.rolled_back(watch, step)

                # ------------------------------------------------------- rollouts
                first = step * config.rollout.questions
                drawn = range(first, first + config.rollout.questions)
                with (
                    timers.phase("rollout"),
                    metrics.work_bar(agent.rows, "rollout", active=writes) as moved,
                ):
                    trajectories, stats = agent_lib.sample(
                        agent,
                        publish(state["params"]),
                        [(i, draws[i]) for i in drawn],
                        group=config.rollout.group,
                        seed=config.seed,
                        sampling=Sampling(config.rollout.temperature),
                        max_turns=config.rollout.max_turns,
                        on_progress=stop.watch(moved),
                    )
            except Preempted:
                save()
                raise
            if writes:
                write_trajectories(workdir, step, trajectories)
            record |= diagnostics.of_rollout(trajectories, stats)
            probe = _due(step, config.diagnostics.every)

            # ------------------------------- batch, weights, old and reference logps
            with timers.phase("logps"):
                batch, scalars = make_batch(
                    trajectories,
                    tokens=config.rollout.max_tokens,
                    token_bytes=agent.codec.token_bytes,
                    std=config.loss.advantage_std,
                )
                places = packing.places_of(
                    batch, config, micro_rows=micro, devices=rows.num_devices
                )
                inputs = {
                    name: parallel.global_array(x, rows)
                    for name, x in packing.lay_out(batch, places, (n, micro)).items()
                }
                if nthr_fn:
                    inputs["advantages"] = nthr_fn(state["params"], inputs)
                scalars |= {"llds_coef": np.float32(watch.coef)}
                # The first update needs no old logps: its own are the same numbers.
                skip = 0 if probe else each
                stacked = inputs | {
                    "old_logps": logps_fn(state["params"], inputs, skip, n - skip),
                    "ref_logps": logps_fn(reference, inputs, 0, n)
                    if settings.kl
                    else logps_fn(state["params"], inputs, 0, 0),
                }
                if lagged:
                    if step % config.llds.anchor == 0:
                        lagged = {"anchor": jax.tree.map(jnp.copy, state["params"])}
                    stacked["anchor_logps"] = logps_fn(lagged["anchor"], inputs, 0, n)
                jax.block_until_ready(stacked)

            # ----------------------------------------------------------------- updates
            with timers.phase("update"):
                lr = config.optim.lr * watch.lr_scale
                if step < config.optim.warmup:
                    lr *= step / config.optim.warmup
                outs, beside = [], (reference, lagged)
                for j in range(updates):
                    part = {k: x[j * each : (j + 1) * each] for k, x in stacked.items()}
                    args = part, weigh(part), scalars
                    if probe and j == updates - 1:  # those that the weights moved from
                        norms = norms_fn(
                            state["params"], *args, each, (state["opt"], beside)
                        )
                    unmoved = j == 0 or lr == 0
                    state, out = update_fn(state, *args, lr, unmoved, each, beside)
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

            # -------------------------------------------------- displacement, phase
            record |= diagnostics.of_updates(outs, settings, watch.coef)
            record["optim/lr"] = lr
            if probe:
                with timers.phase("diagnostics"):
                    new = logps_fn(state["params"], inputs, 0, n)
                    old, mask, segments = (
                        stacked[name] for name in ("old_logps", "mask", "segments")
                    )
                    moved = moved_fn(new, old, mask, segments, places)
                    record |= diagnostics.of_displacement(
                        trajectories,
                        batch["advantages"][:, 0],
                        *jax.device_get(moved),
                    ) | {k: float(x) for k, x in norms.items()}
            watch, phase = guard.observe(watch, step, record, action, thresholds)
            record |= {"phase/name": phase.name, "phase/level": phase.level}
            if watch.todo != "none" and writes:
                bar.write(watch.notice, file=sys.stderr)

            # ----------------------------------------------------------------- metrics
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
        agent_lib.save_params(agent, state["params"], workdir / "export")
        info["seconds"] = time.perf_counter() - began
    return exchange.first(
        lambda: write_summary(workdir, info, scores, mean_speeds(workdir))
    )


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
