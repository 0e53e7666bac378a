"""What a run will take of each device, and of the host, before it starts.

Numbers come from the shapes of the config and the model alone: no weight is read and
the devices need not be there. Training and sampling take turns: what a device has to
hold is the larger of the two, not their sum. What the compiler adds for its own ends is
not in it (`benchmarks/results/aot.md` has what it reported).
"""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from lld_jax import model, parallel
from lld_jax.config import ConfigError
from lld_jax.model import ModelConfig

GIB = 1 << 30
# GiB that a program may use, by kind of device.
MEMORY = {
    "v4": 31.25,
    "v5e": 15.75,
    "v5p": 95.0,
    "v6e": 31.25,
    "a100": 78.0,
    "h100": 78.0,
    "h200": 139.0,
}
_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
_FLOAT32 = 4
_ARRAYS = 12  # `[B, T]` of a batch and its normalisers, four bytes a token each
_LOGITS = 4  # float32 copies of a chunk's logits that live at once


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes a device unless said otherwise.

    `training` and `sampling` are what only one of the two phases holds, `both` is what
    stays. `slot` is one trajectory's cache, on each device that shares it.
    """

    both: dict[str, int]
    training: dict[str, int]
    sampling: dict[str, int]
    slot: int
    slots: int  # of a device's shard
    shards: int  # of the slots
    parameters: int
    flops: dict[str, float]  # of a step whose rows are all full, on all devices
    index: int | None  # bytes of host memory, if the index is there

    @property
    def phases(self) -> dict[str, int]:
        kept = sum(self.both.values())
        return {
            "training": kept + sum(self.training.values()),
            "sampling": kept + sum(self.sampling.values()),
        }

    def slots_that_fit(self, memory: float) -> int:
        """Of all devices together, beside everything else; `memory` in bytes."""
        rest = self.phases["sampling"] - self.sampling["cache"]
        return max(0, int((memory - rest) // self.slot)) * self.shards


def make_plan(config: ConfigDict, sizes: ModelConfig, *, on_cpu: bool = False) -> Plan:
    """The plan of a run on `mesh.data` x `mesh.fsdp` x `mesh.tensor` devices."""
    mesh, limits, dtype = config.mesh, config.rollout, jnp.dtype(config.model.dtype)
    devices, T = mesh.data * mesh.fsdp * mesh.tensor, limits.max_tokens
    one = parallel.train_layout(parallel.make_mesh(1, 1, 1, jax.local_devices()[:1]))
    leaves = jax.tree.leaves_with_path(model.abstract_params(sizes, one))
    count = sum(math.prod(x.shape) for _, x in leaves)
    axes = {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}

    def held(sampling: bool) -> int:
        """Parameters that a device holds, in the layout of a phase."""
        return sum(
            math.prod(x.shape) // _ways(parallel.spec_of(path, sampling=sampling), axes)
            for path, x in leaves
        )

    own, moment = held(False), jnp.dtype(config.optim.moment).itemsize
    rows = config.optim.micro_rows // devices
    heads = sizes.kv_heads * sizes.group * sizes.head_dim
    remat = config.model.remat
    remat = remat if remat != "auto" else "none" if on_cpu else "layer"
    inside = 8 * sizes.mlp + 6 * sizes.width + 4 * heads  # numbers a token of a layer
    kept = {
        "layer": sizes.width,
        "attention": sizes.width + heads,
        "none": sizes.width + inside,
    }
    activations = rows * T * (sizes.layers * kept[remat] + inside) * dtype.itemsize
    whole = limits.questions * limits.group * T
    shards = mesh.data * mesh.fsdp
    per_slot = (2 * sizes.layers * sizes.kv_heads // mesh.tensor) * sizes.head_dim
    per_slot *= T * dtype.itemsize
    slots = limits.slots // shards
    both = {"parameters": own * _FLOAT32, "Adam": own * (_FLOAT32 + moment)}
    if config.loss.kl:
        both["reference policy"] = own * dtype.itemsize
    if config.llds.anchor:
        both["lagged anchor"] = own * _FLOAT32
    return Plan(
        both=both,
        training={
            # The sum, and a micro-batch's; two sums where their norms are compared.
            "gradients": (3 if config.diagnostics.every else 2) * own * _FLOAT32,
            "activations": activations,
            "logits": _LOGITS * _FLOAT32 * min(1 << 25, rows * T * sizes.vocab),
            "batch": whole // devices * _FLOAT32 * _ARRAYS,
        },
        sampling={
            "published weights": held(True) * dtype.itemsize,
            "cache": slots * per_slot,
        },
        slot=per_slot,
        slots=slots,
        shards=shards,
        parameters=count,
        flops=_flops(sizes, count, whole, T, kl=bool(config.loss.kl), remat=remat),
        index=_index_bytes(config),
    )


def _ways(spec: P, axes: dict[str, int]) -> int:
    """Into how many parts a spec splits an array."""
    names = [n for x in spec if x for n in ((x,) if isinstance(x, str) else x)]
    return math.prod(axes[name] for name in names)


def _flops(
    sizes: ModelConfig, count: int, tokens: int, row: int, *, kl: bool, remat: str
) -> dict[str, float]:
    """By part of a step. Causal attention sees half of all pairs."""
    products = count - (0 if sizes.tied else sizes.vocab * sizes.width)
    heads = sizes.kv_heads * sizes.group * sizes.head_dim
    forward = tokens * (2 * products + 2 * row * heads * sizes.layers)
    again = 0 if remat == "none" else 1
    return {
        "rollout": float(forward),
        "log-probs": float(forward * (1 + kl)),
        "updates": float(forward * (3 + again)),
    }


def _index_bytes(config: ConfigDict) -> int | None:
    folder = Path(config.retrieval.index).expanduser()
    for place in (folder, Path(config.data_dir).expanduser() / folder):
        if (place / "header.json").is_file():
            read = json.loads((place / "header.json").read_text("utf-8"))
            return read["n"] * read["dim"] * _FLOAT32
    return None


def memory_of(device: jax.Device) -> float | None:
    """Bytes that a device lets a program use; None if it does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    kind = _KINDS.get(device.device_kind)
    return MEMORY[kind] * GIB if kind else None


def check(plan: Plan, memory: float, config: ConfigDict) -> None:
    """Raises ConfigError if a phase needs more than the `memory` (bytes) of a device.

    What can be made smaller is named with the value that would do, if one does.
    """
    for phase, needed in plan.phases.items():
        if needed <= memory:
            continue
        parts = plan.both | getattr(plan, phase)
        listed = ", ".join(f"{k} {v / GIB:.2f}" for k, v in parts.items())
        raise ConfigError(
            f"mesh: {phase} needs {needed / GIB:.2f} GiB of each device, which has "
            f"{memory / GIB:.2f} ({listed}); {_remedy(plan, phase, memory, config)}"
        )


def _remedy(plan: Plan, phase: str, memory: float, config: ConfigDict) -> str:
    if phase == "sampling" and (slots := plan.slots_that_fit(memory)):
        return f"rollout.slots: {config.rollout.slots}; legal are at most {slots}"
    devices = config.mesh.data * config.mesh.fsdp * config.mesh.tensor
    rows = config.optim.micro_rows // devices
    a_row = (plan.training["activations"] + plan.training["logits"]) // rows
    spare = memory - plan.phases["training"] + rows * a_row
    if phase == "training" and spare >= a_row:
        most = int(spare // a_row) * devices
        return f"optim.micro_rows: {config.optim.micro_rows}; legal are at most {most}"
    probes = phase == "training" and config.diagnostics.every
    fewer = ", diagnostics.every=0" if probes else ""
    return f"legal are more devices, optim.moment=bfloat16, a larger mesh.tensor{fewer}"


def describe(plan: Plan, config: ConfigDict, memory: float | None = None) -> str:
    """The plan as a table of GiB, FLOPs and, with `memory` (bytes), what fits."""
    m = config.mesh
    lines = [
        f"{config.model.path}: {plan.parameters:,} parameters on {m.data} x {m.fsdp} x "
        f"{m.tensor} devices (data x fsdp x tensor)",
        "",
        "GiB a device",
    ]

    def add(name: str, size: float, note: str = "") -> None:
        lines.append(f"  {name:<20}{size / GIB:9.3f}{note}")

    for title, parts in (
        ("", plan.both),
        (" (training)", plan.training),
        (" (sampling)", plan.sampling),
    ):
        for name, size in parts.items():
            add(name, size, title)
    for phase, size in plan.phases.items():
        room = f" of {memory / GIB:.2f}" if memory else ""
        add(f"all, {phase}", size, room)
    lines += ["", f"slots: {plan.slots * plan.shards}, {plan.slot / GIB:.4f} GiB each"]
    if memory:
        lines.append(f"slots that fit: {plan.slots_that_fit(memory)}")
    lines += ["", "PFLOPs of a step, all devices, if every row were full"]
    lines += [f"  {name:<20}{work / 1e15:9.1f}" for name, work in plan.flops.items()]
    index = "not there" if plan.index is None else f"{plan.index / GIB:.2f} GiB"
    lines += ["", f"index {config.retrieval.index!r} in host memory: {index}"]
    return "\n".join(lines)
