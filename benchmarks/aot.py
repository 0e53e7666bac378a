"""Compiles a config's programs for TPUs that are not there, and says what they take.

    pip install -e '.[aot]'
    python -m benchmarks.aot --config=configs/qwen3b.py --topology=v5e:4x4
        [--programs=update,norms,logps,reference,extend,decode] [--json=FILE]

The compiler is the real one (libtpu). A line a program: GiB a chip of what it is given,
of what it sets aside for itself and of both; of what is alive at once at most (`peak`:
less, since with room to spare the compiler does not pack tightly); matrix products over
the least there could be; collectives of a layer; copies as large as the cache's keys;
seconds of compiling. `--json` adds to a file, replacing the same line, and writes its
table beside it, as .md; `--hlo` keeps what was compiled.
"""

import argparse
import copy
import dataclasses
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import flops
from lld_jax import model, parallel
from lld_jax.config import overrides
from lld_jax.model import sizes
from lld_jax.plan import GIB
from lld_jax.protocol.stop import stop_table
from lld_jax.rollout import decoding
from lld_jax.rollout.policy import Policy, rollout_programs, rollout_shapes
from lld_jax.training import probes, update

PROGRAMS = ("update", "norms", "logps", "reference", "extend", "decode")
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_OP = re.compile(
    r"%[\w.\-]+ = \(?([a-z0-9]+)\[([\d,]*)\].*? "
    rf"(copy|{'|'.join(_COLLECTIVES)})(-start)?\("
)
_NAME = re.compile(r'op_name="([^"]*)"')
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4}
_HOSTS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
UPDATE_ROWS = 256  # trajectories of an update, each with a row of its own


def open_policy(spec: str, topology: str) -> Policy:
    """The policy of a config on the devices of a topology such as 'v5e:4x4'."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices
    config = overrides.load(spec)
    m = config.mesh
    mesh = parallel.make_mesh(m.data, m.fsdp, m.tensor, devices)
    # Rollouts are compiled for a host by itself: a part of a larger topology has ids
    # that the compiler takes for those of devices that are not there.
    host = topologies.get_topology_desc(
        platform="tpu", topology_name=_HOSTS[topology.partition(":")[0]]
    ).devices
    own = m.data * len(host) // len(devices)
    serving = parallel.make_mesh(own, m.fsdp, m.tensor, host)
    return Policy(
        config=config,
        model=sizes.QWEN2_5[config.model.path],
        valid_vocab=sizes.VALID_VOCAB,
        training=parallel.train_layout(mesh),
        serving=parallel.rollout_layout(serving),
    )


# ----- the programs, and what they are given ---------------------------------------


def _placed(tree: Any, shardings: Any) -> Any:
    def of(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(of, tree, shardings)


def _scalar(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype)


def training_programs(policy: Policy) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Program -> the jitted function and its arguments by name, all abstract."""
    init, logps_fn, update_fn, weigh = update.make_functions(policy)
    layout, config = policy.training, policy.config
    abstract = model.abstract_params(policy.model, layout)
    shardings = parallel.param_shardings(abstract, layout)
    params = _placed(abstract, shardings)
    state = jax.eval_shape(init, params)
    state = _placed(state, parallel.state_shardings(state, abstract, layout))
    micro, T = config.optim.micro_rows, config.rollout.max_tokens
    shape = (max(1, UPDATE_ROWS // micro), micro, T)
    rows = layout.sharding(None, layout.batch)

    def array(dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

    names = ("ids", "positions", "segments", "mask", "answer_mask")
    batch = {name: array(jnp.int32) for name in names}
    batch |= {name: array(jnp.float32) for name in ("advantages", "sampler_logps")}
    more = {name: array(jnp.float32) for name in ("old_logps", "ref_logps")}
    weights = jax.eval_shape(weigh, batch)
    weights = jax.tree.map(lambda x: array(x.dtype), weights)
    scalars = {name: _scalar(jnp.float32) for name in ("valid_searches", "llds_coef")}
    i32, f32 = _scalar(jnp.int32), _scalar(jnp.float32)
    rounded = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, policy.dtype, sharding=x.sharding),
        params,
    )
    scores = {"batch": batch, "start": i32, "count": i32}
    beside = {"reference": rounded} if config.loss.kl else {}
    norms_fn, _ = probes.make_probes(policy)
    return {
        "update": (
            update_fn,
            {
                "state": state,
                "batch": batch | more,
                "weights": weights,
                "scalars": scalars,
                "lr": f32,
                "first": _scalar(jnp.bool_),
                "count": i32,
                "beside": beside,
            },
        ),
        "norms": (
            norms_fn,
            {
                "params": params,
                "batch": batch | more,
                "weights": weights,
                "scalars": scalars,
                "count": i32,
                "beside": beside | {"optimizer": state["opt"]},
            },
        ),
        "logps": (logps_fn, {"params": params} | scores),
        "reference": (logps_fn, {"params": rounded} | scores),
    }


def sampling_programs(policy: Policy) -> dict[str, tuple[Any, dict[str, Any]]]:
    """As `training_programs`, on the devices of one process."""
    layout, shapes = policy.serving, rollout_shapes(policy)
    token_bytes = [bytes([i % 256]) for i in range(policy.valid_vocab)]
    stop = stop_table(token_bytes, end_ids=(0,))
    programs: decoding.Programs = rollout_programs(policy, stop)
    abstract = model.abstract_params(policy.model, layout)
    params = jax.eval_shape(
        model.publisher(policy.model, policy.dtype, layout), abstract
    )
    params = _placed(params, parallel.param_shardings(params, layout))
    slots = jax.eval_shape(programs.init)
    cached = layout.sharding(None, None, layout.batch, layout.heads)
    where = dict.fromkeys(slots, layout.sharding(layout.batch))
    slots = _placed(slots, where | {"k": cached, "v": cached})
    E, N = shapes.extend_rows, shapes.extend_tokens
    request = {name: jax.ShapeDtypeStruct((E,), jnp.int32) for name in _INTEGERS}
    request |= {name: jax.ShapeDtypeStruct((E,), jnp.bool_) for name in _FLAGS}
    request["ids"] = jax.ShapeDtypeStruct((E, N), jnp.int32)
    order = {name: _scalar(jnp.int32) for name in ("steps", "wake", "top_k")}
    order |= {name: _scalar(jnp.float32) for name in ("temperature", "top_p")}
    order["seed"] = _scalar(jnp.uint32)
    given = {"params": params, "slots": slots}
    return {
        "extend": (programs.extend, given | {"request": request}),
        "decode": (
            programs.decode,
            given | {"order": order, "width": shapes.slots},
        ),
    }


_INTEGERS = ("rows", "n", "draw", "sample", "limit")
_FLAGS = ("fresh", "run", "prompt")


# ----- what the compiler says --------------------------------------------------------


def bytes_a_device(tree: Any) -> int:
    """Of abstract arrays with shardings, on one device."""

    def of(x) -> int:
        sharding = getattr(x, "sharding", None)
        shape = sharding.shard_shape(x.shape) if sharding else x.shape
        return math.prod(shape) * x.dtype.itemsize

    leaves = jax.tree.leaves(tree)
    return sum(of(x) for x in leaves if hasattr(x, "dtype"))


def operations(hlo: str, cache: int | None = None) -> dict[str, Any]:
    """Collectives of one layer, forward and backward, and large copies, of a text.

    Args:
      cache: bytes; copies at least as large are counted.
    """
    layer: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    copies = 0
    for line in hlo.splitlines():
        found = _OP.search(line)
        if not found:
            continue
        dtype, shape, kind, _ = found.groups()
        if kind == "copy":
            size = math.prod(int(n) for n in shape.split(",") if n)
            copies += cache is not None and size * _BYTES.get(dtype, 4) >= cache
            continue
        name = found and (_NAME.search(line) or [None, ""])[1]
        if re.search(r"layers(\)|/)+while|/layers/", name):
            backward = "transpose(" in name
            layer["backward" if backward else "forward"][kind] += 1
    return {
        "layer": {way: dict(sorted(n.items())) for way, n in layer.items() if n},
        "cache_copies": copies,
    }


def least_flops(policy: Policy, program: str) -> float:
    """Products with each parameter once, and half of all pairs of causal attention.

    Of a micro-batch of full rows, on all devices.
    """
    m, T = policy.model, policy.config.rollout.max_tokens
    leaves = jax.tree.leaves(model.abstract_params(m, policy.training))
    count = sum(math.prod(x.shape) for x in leaves)
    count -= 0 if m.tied else m.vocab * m.width
    attention = 2 * T * m.kv_heads * m.group * m.head_dim * m.layers
    forward = policy.config.optim.micro_rows * T * (2 * count + attention)
    # Backward is twice forward, and done twice for the norms of two gradients.
    return float(forward * {"update": 3, "norms": 5}.get(program, 1))


def measure(
    policy: Policy,
    program: str,
    f: Any,
    arguments: dict[str, Any],
    hlo: Path | None = None,
) -> dict[str, Any]:
    """Compiles one program; its line of the table. `hlo` gets the compiled text."""
    traced = f.trace(*arguments.values())
    began = time.perf_counter()
    compiled = traced.lower().compile()
    seconds = time.perf_counter() - began
    if hlo:
        hlo.write_text(compiled.as_text())
    memory = compiled.memory_analysis()
    made = memory.temp_size_in_bytes
    made += memory.output_size_in_bytes - memory.alias_size_in_bytes
    held = arguments | arguments.get("beside", {})
    held = {k: bytes_a_device(x) for k, x in held.items() if k != "beside"}
    peak = memory.peak_memory_in_bytes
    slots = arguments.get("slots")
    cache = bytes_a_device(slots["k"]) if slots else None
    line = {
        "program": program,
        "given": {k: round(v / GIB, 3) for k, v in held.items() if v > 1 << 20},
        "made": round(made / GIB, 3),
        "total": round((sum(held.values()) + made) / GIB, 3),
        "peak": round(peak / GIB, 3),
        "compile_seconds": round(seconds, 1),
    } | operations(compiled.as_text(), cache)
    if program in ("update", "norms", "logps", "reference"):
        blocked = _with_blocked_attention(policy)
        f, arguments = training_programs(blocked)[program]
        jaxpr = f.trace(*arguments.values()).jaxpr.jaxpr
        own = policy.config.optim.micro_rows * policy.config.rollout.max_tokens
        own //= policy.training.mesh.size
        chunks = -(-own // update.score_chunk(policy))
        line["flops_over_least"] = round(
            flops.of_jaxpr(jaxpr, (1, chunks)) / least_flops(policy, program), 3
        )
    return line


def _with_blocked_attention(policy: Policy) -> Policy:
    """A kernel's products cannot be counted; those of the blocked form can."""
    config = copy.deepcopy(policy.config)
    config.model.attention = "blocked"
    return dataclasses.replace(policy, config=config)


# ----- the table ---------------------------------------------------------------------


def _key(line: dict[str, Any]) -> tuple:
    return tuple(line[k] for k in ("config", "topology", "program"))


_PAGE = """# What the TPU compiler says

Compiled by libtpu for chips that were not there (`benchmarks/aot.py`); nothing was
run. GiB a chip. *given*: what a program is given, with what lies there meanwhile (the
reference policy, Adam's state); *made*: what the compiler sets aside for itself;
*total*: both; *peak*: what is alive at once at most, given and made, which is less
where there is room to spare. *norms*: of the two gradients, every tenth step.
*products*: matrix products over the least, which is one with each parameter a token
and half of all pairs of causal attention, forward and backward (attention counted in
its blocked form). *of a layer*: collectives in the text of one
layer's body. *copies*: copies as large as all keys of the cache. *s*: seconds to
compile, on two busy cores.

"""


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table as a page."""

    def collectives(line) -> str:
        each = [
            f"{way}: " + ", ".join(f"{n} {kind}" for kind, n in found.items())
            for way, found in line["layer"].items()
        ]
        return "; ".join(each) or "–"

    head = "config|topology|program|given|made|total|peak|products|of a layer|copies|s"
    rows = [head.split("|"), ["---"] * 11]
    for line in lines:
        given = ", ".join(f"{k} {v:.2f}" for k, v in line["given"].items())
        over = line.get("flops_over_least")
        rows.append(
            [
                line["config"],
                line["topology"],
                line["program"],
                given,
                f"{line['made']:.2f}",
                f"{line['total']:.2f}",
                f"{line['peak']:.2f}",
                "–" if over is None else f"{over:.2f}",
                collectives(line),
                str(line["cache_copies"]),
                f"{line['compile_seconds']:.0f}",
            ]
        )
    return _PAGE + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def main(measured: Callable[..., dict[str, Any]] = measure) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--topology", required=True, help="v5e:4x4, v5p:2x2x1, ...")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hlo", type=Path, help="folder for the compiled texts")
    args = parser.parse_args()
    names = args.programs.split(",")
    if unknown := set(names) - set(PROGRAMS):
        parser.error(f"--programs: {unknown}; legal are {', '.join(PROGRAMS)}")
    policy = open_policy(args.config, args.topology)
    known = training_programs(policy) | sampling_programs(policy)
    for name in names:
        line = {"config": args.config, "topology": args.topology}
        hlo = args.hlo and args.hlo / f"{name}.txt"
        line |= measured(policy, name, *known[name], hlo)
        print(json.dumps(line))
        if args.json:
            saved = json.loads(args.json.read_text()) if args.json.exists() else []
            saved = [old for old in saved if _key(old) != _key(line)] + [line]
            args.json.write_text(json.dumps(saved, indent=1) + "\n")
            args.json.with_suffix(".md").write_text(markdown(saved))


if __name__ == "__main__":
    # What libtpu would otherwise look for on the machine that it takes this one for.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    jax.config.update("jax_platforms", "cpu")  # there is no TPU to open
    main()
