"""Where the time of a decode step and of a read token goes, ours and transformers'.

    python -m benchmarks.operations [--shapes=tiny,0.2b] [--json=FILE] [--quick]

All slots hold a conversation of the same length. What is read are its last 128 tokens
in four slots (ours), or all of it in every row (transformers reads it again at each
turn; its attention sees half as many keys on average). An operation's time comes from
the profilers of XLA and of torch; the kinds are scaled to what the call takes without a
profiler. Beside them stands what two cores can do at most: bytes read and products of a
large matrix in a second.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import models
from benchmarks.conditions import CORES, ROOT, machine, versions
from benchmarks.engines import ours

KINDS = ("layer products", "head product", "attention", "copies", "rest")
ROWS = {"tiny": 48, "0.2b": 32}
LENGTH = 640  # tokens of each conversation
STEPS = 8  # decode steps of a call
FAR = 32  # and of `generate`, whose reading, which is subtracted, varies by some steps
READ = 512  # tokens that an extend call reads
_OP = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = .*?\s([a-z][\w\-]*)\(")
_NAME = re.compile(r'op_name="([^"]*)"')
_CONTROL = ("while", "conditional", "call")  # what runs inside is counted itself


# ----- XLA -------------------------------------------------------------------------


def kind_of_xla(name: str) -> str:
    """The kind of an operation from the `op_name` that JAX gave it."""
    if re.search(r"/(query|key|value|output|gate|up|down)/dot_general", name):
        return "layer products"
    if "vd,...d->v" in name:
        return "head product"
    if name.endswith("dynamic_slice") or "dynamic_index_in_dim" in name:
        return "copies"
    if re.search(r"(Block|layers)/(while|jvp|ekn)", name):
        return "attention"
    return "rest"


def xla_kinds(call: Callable[[], Any], hlo: str) -> dict[str, float]:
    """Nanoseconds by kind of one call of a compiled program with the text `hlo`."""
    found = (re.match(_OP, line) for line in hlo.splitlines())
    ops = {m[1]: (m[2], re.search(_NAME, m.string)) for m in found if m}
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (file,) = Path(folder).glob("**/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        for event in (e for p in data.planes for line in p.lines for e in line.events):
            op = dict(event.stats).get("hlo_op")
            if op is None or event.name.startswith("end:"):
                continue
            opcode, name = ops.get(op, ("", None))
            if opcode not in _CONTROL:
                kinds[kind_of_xla(name[1] if name else "")] += event.duration_ns
    return dict(kinds)


def profile_ours(shape: str, folder: Path, repeats: int) -> dict[str, dict]:
    """Milliseconds by kind of a decode step of all rows, and of reading READ tokens."""
    rows, piece = ROWS[shape], ours.EXTEND_TOKENS
    E = READ // piece
    tokens = LENGTH + (repeats + 3) * STEPS + piece
    engine = ours.open_engine(folder, rows, tokens, E, piece)
    programs, params = engine.programs, engine.params
    rng = np.random.default_rng(0)

    def request(first: int, fresh: bool) -> dict[str, np.ndarray]:
        ids = rng.integers(0, engine.vocab, (E, piece), dtype=np.int32)
        return {
            "rows": np.arange(first, first + E, dtype=np.int32),
            "ids": ids,
            "n": np.full(E, piece, np.int32),
            "fresh": np.full(E, fresh),
            "run": np.ones(E, bool),
            "prompt": np.full(E, fresh),
            "draw": np.zeros(E, np.int32),
            "sample": np.arange(E, dtype=np.int32),
            "limit": np.full(E, tokens, np.int32),
        }

    order = {
        "temperature": np.float32(1),
        "top_p": np.float32(1),
        "top_k": np.int32(0),
        "seed": np.uint32(0),
        "steps": np.int32(STEPS),
        "wake": np.int32(rows),
    }
    slots = programs.init()
    decode_hlo = programs.decode.lower(params, slots, order, rows).compile().as_text()
    lowered = programs.extend.lower(params, slots, request(0, True))
    extend_hlo = lowered.compile().as_text()
    for start in range(0, LENGTH - piece, piece):
        for first in range(0, rows, E):
            slots, _ = programs.extend(params, slots, request(first, not start))

    def extend(first: int) -> Any:
        nonlocal slots
        slots, done = programs.extend(params, slots, request(first, False))
        return done

    def decode() -> Any:
        nonlocal slots
        slots, report = programs.decode(params, slots, order, rows)
        return report

    read = [seconds(partial(extend, first)) for first in range(0, rows - E, E)]
    extended = xla_kinds(partial(extend, rows - E), extend_hlo)
    decode()
    steps = [seconds(decode) / STEPS for _ in range(repeats)]
    decoded = xla_kinds(decode, decode_hlo)
    return {
        "decode step": scaled(decoded, statistics.median(steps)),
        "read": scaled(extended, statistics.median(read)),
    }


# ----- torch -----------------------------------------------------------------------


def kind_of_torch(name: str, shapes: list, vocab: int) -> str:
    """The kind of an operation of torch, `shapes` those of its inputs."""
    if name in ("aten::addmm", "aten::mm", "aten::bmm", "aten::linear"):
        head = any(vocab in shape for shape in shapes if shape)
        return "head product" if head else "layer products"
    if "attention" in name:
        return "attention"
    if name in ("aten::cat", "aten::copy_", "aten::clone"):
        return "copies"
    return "rest"


def torch_kinds(call: Callable[[], Any], vocab: int) -> dict[str, float]:
    """Nanoseconds by kind of one call."""
    from torch import profiler

    kinds: Counter[str] = Counter()
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU], record_shapes=True
    ) as trace:
        call()
    for event in trace.key_averages(group_by_input_shape=True):
        kind = kind_of_torch(event.key, event.input_shapes, vocab)
        kinds[kind] += event.self_cpu_time_total * 1e3
    return dict(kinds)


def profile_transformers(shape: str, folder: Path, repeats: int) -> dict[str, dict]:
    """The same of `generate`: what the first token costs is reading, the others steps.

    A step is the difference of two calls, so that nothing of the reading is in it.
    """
    import torch

    from benchmarks.engines import hf_generate

    torch.set_num_threads(CORES)
    model = hf_generate.load_model(folder)
    rows, vocab = ROWS[shape], model.config.vocab_size
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab, (rows, LENGTH)).tolist()

    def generate(new: int) -> None:
        stop = hf_generate.AtLengths([new] * rows, float("inf"))
        hf_generate.generate(model, ids, stop)

    generate(2)
    one, more = [], []
    for _ in range(repeats):
        one.append(seconds(partial(generate, 1)))
        more.append(seconds(partial(generate, 1 + FAR)))
    step = statistics.median(b - a for a, b in zip(one, more, strict=True)) / FAR
    first = torch_kinds(partial(generate, 1), vocab)
    both = torch_kinds(partial(generate, 1 + FAR), vocab)
    steps = {kind: max(0.0, both[kind] - first.get(kind, 0.0)) for kind in both}
    read = statistics.median(one) * READ / (rows * LENGTH)
    return {"decode step": scaled(steps, step), "read": scaled(first, read)}


# ----- arithmetic and the report ----------------------------------------------------


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def scaled(kinds: dict[str, float], total: float) -> dict[str, float]:
    """Shares of `kinds` as milliseconds of `total` seconds, and their sum."""
    whole = sum(kinds.values())
    found = {kind: kinds.get(kind, 0.0) / whole * total * 1e3 for kind in KINDS}
    return found | {"all": total * 1e3}


def limits() -> dict[str, float]:
    """Gigabytes that can be read, and products (billions of two operations), a second.

    The best of some tries: what the machine can do, not what it usually does.
    """
    big = jnp.ones((1 << 27,), jnp.float32)
    total = jax.jit(jnp.sum)
    square = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(jnp.matmul)
    total(big), product(square, square)
    read = min(seconds(partial(total, big)) for _ in range(8))
    made = min(seconds(partial(product, square, square)) for _ in range(8))
    return {"read GB/s": big.nbytes / read / 1e9, "product GFLOP/s": 2**34 / made / 1e9}


def least(shape: str, folder: Path, most: dict[str, float]) -> dict[str, float]:
    """The least milliseconds of a decode step and of a read, for weights alone.

    A step reads every weight once and multiplies each with all rows; a read meets the
    layers READ times.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    layers, head = models.parameters(config)
    read = (layers + head) * 4 / most["read GB/s"] / 1e6
    made = 2 * (layers + head) * ROWS[shape] / most["product GFLOP/s"] / 1e6
    return {
        "decode step": max(read, made),
        "read": 2 * layers * READ / most["product GFLOP/s"] / 1e6,
    }


def main(args: argparse.Namespace) -> int:
    most = limits()
    print(", ".join(f"{name} {value:.0f}" for name, value in most.items()))
    report: dict[str, Any] = {"limits": most, "profiles": {}, "targets": []}
    print("| shape | what | engine | " + " | ".join((*KINDS, "all", "least")) + " |")
    print("| --- " * (len(KINDS) + 5) + "|", flush=True)
    for shape in args.shapes:
        folder = models.folder(shape, args.models).absolute()
        bound = least(shape, folder, most)
        engines = {
            "ours": profile_ours(shape, folder, 3 if args.quick else 12),
            "transformers": profile_transformers(shape, folder, 1 if args.quick else 2),
        }
        report["profiles"][shape] = engines | {"least": bound}
        for what in ("decode step", "read"):
            for engine, found in engines.items():
                cells = [f"{found[what][kind]:.2f}" for kind in (*KINDS, "all")]
                cells.append(f"{bound[what]:.2f}")
                print(f"| {shape} | {what} | {engine} | {' | '.join(cells)} |")
        sys.stdout.flush()
    if args.json:
        report |= {"quick": args.quick, "machine": machine(), "versions": versions()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", type=lambda text: text.split(","), default=models.SHAPES
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--models", type=Path, default=ROOT / "data/benchmarks")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(parse()))
