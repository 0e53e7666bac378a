"""Trajectories that share rows: padding on real lengths, training speed on tiny.

    python -m benchmarks.packing [--quick] [--json=FILE] [--rounds=5]

Padding: mini-batches of recorded responses (`real_lengths.json`) in rows of 4,096
tokens, as a share of the places of all micro-batches that are computed. Speed: what
training does with one rollout batch of `configs/tiny.py`, sampled once: log-probs of
the reference and of the old policy, and the updates. The ways of doing it run in turn,
round by round, and a ratio is the median over the rounds, so that other programs on the
same cores slow all of them down.
"""

import argparse
import copy
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import conditions, workloads
from lld_jax import agent as agent_lib
from lld_jax.config.overrides import load
from lld_jax.data.questions import question_of_draw
from lld_jax.rollout import Sampling
from lld_jax.run import host
from lld_jax.training import packing, update
from lld_jax.training.batch import make_batch

ROW = 4096
SIZES, MICRO_ROWS = (256, 128, 64), (1, 2, 4, 8, 16)
ALONE, SHARED, ACTIONS = "a row each", "shared rows", "shared rows, action tokens"


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train on a batch: `packed` rows, log-probs at action tokens `only`."""

    packed: bool
    only: bool
    micro_rows: int


def padding(size: int, micro_rows: int, batches: int) -> float:
    """The share of padding in mini-batches of `size` real responses, packed.

    0 rows of a micro-batch: a row for each response, and no packing.
    """
    rng, lengths = np.random.default_rng(0), workloads.real_lengths()
    shares = []
    for _ in range(batches):
        some = [lengths[i] for i in rng.choice(len(lengths), size, replace=False)]
        tokens = [sum(turns) for turns in some]
        rows = size
        if micro_rows:
            places = packing.shared_rows(
                tokens,
                [sum(turns[1::2]) for turns in some],
                tokens=ROW,
                updates=1,
                micro_rows=micro_rows,
                devices=micro_rows,
            )
            rows = (int(places[:, 0].max()) + 1) * micro_rows
        shares.append(1 - sum(tokens) / rows / ROW)
    return fmean(shares)


def ways(packed_rows: int) -> dict[str, Way]:
    return {
        ALONE: Way(False, False, 25),
        SHARED: Way(True, False, packed_rows),
        ACTIONS: Way(True, True, packed_rows),
    }


def make_step(
    agent: agent_lib.Agent, params: Any, batch: Any, scalars: Any, way: Way
) -> Callable[[], dict[str, float]]:
    """`step()`: one pass of training over the batch; its seconds and its padding."""
    config = copy.deepcopy(agent.config)
    config.optim.packing, config.optim.micro_rows = way.packed, way.micro_rows
    n, updates = agent.rows // way.micro_rows, config.optim.updates
    each = n // updates
    places = packing.places_of(batch, config, micro_rows=way.micro_rows, devices=1)
    laid = packing.lay_out(batch, places, (n, way.micro_rows))
    inputs = {name: jnp.asarray(x) for name, x in laid.items()}
    config = copy.deepcopy(config)
    config.optim.packing = way.only  # of the programs; the rows lie where they lie
    init, logps_fn, update_fn, weigh = update.make_functions(
        dataclasses.replace(agent, config=config)
    )
    kept = {"state": init(jax.tree.map(jnp.copy, params))}

    def step() -> dict[str, float]:
        began, cpu = time.perf_counter(), time.process_time()
        state, outs = kept["state"], []
        old = logps_fn(state["params"], inputs, each, n - each)
        known = {"old_logps": old, "ref_logps": logps_fn(params, inputs, 0, n)}
        stacked = inputs | known
        for j in range(updates):
            part = {k: x[j * each : (j + 1) * each] for k, x in stacked.items()}
            args = part, weigh(part), scalars, config.optim.lr, j == 0, each
            state, out = update_fn(state, *args)
            outs.append(out)
        outs = jax.device_get(outs)
        kept["state"] = state
        empty, all_of_them = (
            sum(int(out[name]) for out in outs) for name in ("padding", "places")
        )
        return {
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu,
            "padding": empty / all_of_them,
        }

    return step


def measure_speed(packed_rows: int, rounds: int) -> dict[str, Any]:
    """Each way of training on one rollout batch of `configs/tiny.py`."""
    config = load("configs/tiny.py")
    agent = agent_lib.open_agent(config)
    params = agent_lib.load_params(agent)
    questions = question_of_draw(agent.questions(config.questions.train), config.seed)
    trajectories, _ = agent_lib.sample(
        agent,
        agent_lib.publisher(agent)(params),
        [(i, questions[i]) for i in range(config.rollout.questions)],
        group=config.rollout.group,
        seed=config.seed,
        sampling=Sampling(config.rollout.temperature),
        max_turns=config.rollout.max_turns,
    )
    batch, scalars = make_batch(
        trajectories,
        tokens=config.rollout.max_tokens,
        token_bytes=agent.codec.token_bytes,
        std=config.loss.advantage_std,
    )
    tokens = int(np.count_nonzero(batch["segments"]))
    steps = {
        name: make_step(agent, params, batch, scalars, way)
        for name, way in ways(packed_rows).items()
    }
    for step in steps.values():  # compiles
        step()
    ran: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            ran[name].append(step())

    def faster(name: str, what: str) -> float:
        pairs = zip(ran[ALONE], ran[name], strict=True)
        return median(a[what] / b[what] for a, b in pairs)

    return {
        "tokens": tokens,
        "action_tokens": int(batch["mask"].sum()),
        "rounds": rounds,
        "ways": {
            name: {
                "micro_rows": ways(packed_rows)[name].micro_rows,
                "padding": rows[0]["padding"],
                "tokens_per_s": tokens / median(r["seconds"] for r in rows),
                "faster": faster(name, "seconds"),
                "faster_by_cpu_time": faster(name, "cpu_seconds"),
            }
            for name, rows in ran.items()
        },
    }


def targets(shares: dict[str, dict[str, float]], speed: dict[str, Any]) -> list[dict]:
    """The goals: little padding, and the speed that follows from it."""
    tiny = speed["ways"][ACTIONS]
    found = [
        ("padding of 256 real responses, 16 rows", shares["256"]["16"], 0.1, "lower"),
        ("tiny: training tokens/s to a row each", tiny["faster"], 1.5, "higher"),
    ]
    return [
        {
            "name": name,
            "value": value,
            "goal": goal,
            "better": better,
            "met": value >= goal if better == "higher" else value <= goal,
        }
        for name, value, goal, better in found
    ]


def main(args: argparse.Namespace) -> int:
    host.keep_freed_memory()
    machine = conditions.machine()
    batches = 5 if args.quick else 20
    shares = {
        str(size): {str(m): padding(size, m, batches) for m in (0, *MICRO_ROWS)}
        for size in SIZES
    }
    print("Padding of mini-batches of real responses, by rows of a micro-batch")
    print("| responses | unpacked | " + " | ".join(map(str, MICRO_ROWS)) + " |")
    print("|" + " --- |" * (len(MICRO_ROWS) + 2))
    for size, found in shares.items():
        print(f"| {size} | " + " | ".join(f"{x:.1%}" for x in found.values()) + " |")
    speed = measure_speed(args.micro_rows, 2 if args.quick else args.rounds)
    print("\n| tiny | padding | tokens/s | faster | by CPU time |\n|" + " --- |" * 5)
    for name, way in speed["ways"].items():
        print(
            f"| {name} | {way['padding']:.1%} | {way['tokens_per_s']:.0f} | "
            f"{way['faster']:.2f} | {way['faster_by_cpu_time']:.2f} |"
        )
    wanted = targets(shares, speed)
    print()
    for target in wanted:
        verdict = f"goal {target['goal']}, {'met' if target['met'] else 'missed'}"
        print(f"{target['name']}: {target['value']:.3g} ({verdict})")
    if args.json:
        report = {
            "targets": wanted,
            "padding": shares,
            "tiny": speed,
            "quick": args.quick,
            "machine": machine,
            "versions": conditions.versions(),
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 10 minutes")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--rounds", type=int, default=5, help="of each way on tiny")
    parser.add_argument(
        "--micro-rows", type=int, default=5, help="of shared rows on tiny"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(parse()))
