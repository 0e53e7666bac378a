"""Rollouts with lld_jax's own engine.

    python -m benchmarks.engines.ours --model DIR --work FILE --out FILE

Slots with continuous batching; a conversation is never read twice. The stop automaton
looks for nothing here: an action ends at the budget that its script gives it.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import workloads
from benchmarks.workloads import Script, Work
from lld_jax import model, parallel
from lld_jax.model import hf
from lld_jax.protocol.environment import Reply, Turn
from lld_jax.protocol.stop import StopTable
from lld_jax.protocol.trajectory import Trajectory
from lld_jax.rollout import Limits, Sampling, Task, decoding, rollout
from lld_jax.run.host import keep_freed_memory, peak_memory_gib
from lld_jax.run.metrics import CompileCounter

SLOTS, EXTEND_ROWS, EXTEND_TOKENS = 48, 4, 128
WIDTHS = (32, 24, 16, 12, 8, 4)


class Late(Exception):
    """The time is over."""


@dataclass
class Scripted:
    """The environment of a work: a task's question is the number of its script."""

    work: Work
    vocab: int
    deadline: float
    tokens: int = 0  # of the actions that ended
    finished: int = 0

    def start(self, question: str) -> list[int]:
        return self.work.scripts[int(question)].prompt

    def step(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Reply]]:
        asking = []
        for i, turn in enumerate(turns):
            script = self.work.scripts[int(turn.question)]
            assert len(turn.action_ids) == script.actions[turn.turn]
            self.tokens += len(turn.action_ids)
            if turn.turn + 1 == len(script.actions):
                yield i, Reply(None, "answered")
            else:
                asking.append((i, script, turn.turn))
        if asking:
            time.sleep(self.work.latency)
        for i, script, turn in asking:
            yield i, Reply(workloads.observation_ids(script, turn, self.vocab), None)

    def on_progress(self, ended: int) -> None:
        self.finished += ended
        if time.monotonic() > self.deadline:
            raise Late

    def budget(self, traj: Trajectory) -> int:
        actions = sum(span.kind == "action" for span in traj.spans)
        return self.work.scripts[int(traj.question)].actions[actions]


def length_of(scripts: Sequence[Script]) -> tuple[int, int]:
    """Positions of a slot, and tokens of an action, that hold every script."""
    action = max(max(script.actions) for script in scripts)
    return max(script.length for script in scripts) + action, action


@dataclass(frozen=True)
class Engine:
    """Programs for one shape of slots, and the weights that they run on."""

    programs: decoding.Programs
    params: Any
    vocab: int


def open_engine(
    folder: Path,
    slots: int,
    tokens: int,
    extend_rows: int,
    extend_tokens: int,
    *,
    block: int = decoding.Shapes.block,
    steps: int = decoding.Shapes.steps,
    widths: tuple[int, ...] = (),
) -> Engine:
    """Loads a model in float32; arguments as in `decoding.Shapes`."""
    config = hf.read_config(folder)
    layout = parallel.rollout_layout(parallel.make_mesh(1, 1, 1))
    abstract = model.abstract_params(config, layout)
    params = hf.load(folder, config, parallel.param_shardings(abstract, layout))
    programs = decoding.make_programs(
        config,
        decoding.Shapes(
            slots, tokens, extend_rows, extend_tokens, block, steps, widths
        ),
        StopTable(np.zeros((2, config.vocab), np.int8), start=0, stop=1),
        dtype=jnp.float32,
        valid_vocab=config.vocab,
        layout=layout,
    )
    publish = model.publisher(config, jnp.dtype(jnp.float32), layout)
    return Engine(programs, publish(params), config.vocab)


def run(
    engine: Engine, work: Work, tasks: int, action: int, seconds: float
) -> tuple[Scripted, dict[str, float]]:
    """The first `tasks` scripts: what the environment saw, and the engine's counts.

    There are no counts if the run was cut after `seconds`. `action`: the most tokens
    of one.
    """
    env = Scripted(work, engine.vocab, time.monotonic() + seconds)
    limits = Limits(max_turns=1000, max_action=action, budget=env.budget)
    scripts = list(enumerate(work.scripts))[:tasks]
    todo = [Task(s.draw, s.sample, str(i), ()) for i, s in scripts]
    try:
        _, stats = rollout(
            engine.programs,
            engine.params,
            env,
            todo,
            limits,
            Sampling(),
            seed=0,
            on_progress=env.on_progress,
        )
    except Late:
        stats = {}
    return env, stats


def measure(engine: Engine, work: Work, action: int, seconds: float) -> dict[str, Any]:
    """The result of a timed run after a warm-up; `action` as in `run`."""
    run(engine, work, 2, action, seconds)
    with CompileCounter() as compiled:
        began = time.perf_counter()
        env, stats = run(engine, work, len(work.scripts), action, seconds)
        took = time.perf_counter() - began
    rows = engine.programs.shapes.slots
    detail = dict(stats)
    if stats:
        detail["host_exposed"] = stats.get("seconds_host", 0.0) / took
        # The last token of an action is kept like every other one.
        assert stats["kept"] == env.tokens
    return {
        "engine": "ours",
        "trajectories": env.finished,
        "tokens": env.tokens,
        "seconds": took,
        "row_steps": int(stats.get("row_steps", 0)),
        "compilations": compiled.count,
        "peak_memory_gib": peak_memory_gib(),
        "complete": bool(stats),
        "detail": detail | {"rows": rows, "devices": jax.device_count()},
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=SLOTS, help="slots")
    parser.add_argument("--extend-rows", type=int, default=EXTEND_ROWS)
    parser.add_argument("--extend-tokens", type=int, default=EXTEND_TOKENS)
    parser.add_argument(
        "--widths", type=int, nargs="*", help="rows of narrower decode steps"
    )
    parser.add_argument("--steps", type=int, default=decoding.Shapes.steps)
    parser.add_argument("--block", type=int, default=decoding.Shapes.block)
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    keep_freed_memory()
    work = workloads.load(args.work)
    tokens, action = length_of(work.scripts)
    slots = min(args.rows, len(work.scripts))
    widths = WIDTHS if args.widths is None else args.widths
    engine = open_engine(
        args.model,
        slots,
        tokens,
        args.extend_rows,
        args.extend_tokens,
        block=args.block,
        steps=args.steps,
        widths=tuple(width for width in widths if width < slots),
    )
    result = measure(engine, work, action, args.seconds)
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
