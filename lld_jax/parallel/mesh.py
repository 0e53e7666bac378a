"""The device mesh and the two ways in which weights lie on it.

Training is FSDP over all three axes. Rollouts replicate over `data` and `fsdp` and
split heads, mlp and vocabulary over `tensor`. Both read the same parameter tree; the
cast from one to the other is `publish`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey

AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which mesh axes split the batch, the vocabulary and the heads of a program."""

    mesh: Mesh
    batch: tuple[str, ...]
    vocab: tuple[str, ...]
    heads: tuple[str, ...]

    def size(self, axes: Sequence[str]) -> int:
        return int(np.prod([self.mesh.shape[a] for a in axes], dtype=int))

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    def constrain(self, x: jax.Array) -> jax.Array:
        """Pins the leading axis of an activation `[B, ...]` to the batch axes."""
        return jax.lax.with_sharding_constraint(x, self.sharding(self.batch))


def make_mesh(
    data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with Auto axes over exactly all `devices` (default: all there are).

    The devices of a process are neighbours along `data`, in the order of processes.
    """
    devices = jax.devices() if devices is None else devices
    if data * fsdp * tensor != len(devices):
        raise ValueError(
            f"mesh.data={data} x mesh.fsdp={fsdp} x mesh.tensor={tensor} is "
            f"{data * fsdp * tensor} devices, but there are {len(devices)}; the "
            "product must be equal to the number of devices"
        )
    hosts: dict[int, list[jax.Device]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    if data % len(hosts) or len(set(map(len, hosts.values()))) > 1:
        raise ValueError(
            f"mesh.data={data} must be a multiple of the {len(hosts)} processes, which "
            f"have {[len(some) for some in hosts.values()]} devices"
        )
    shape, types = (data // len(hosts), fsdp, tensor), (AxisType.Auto,) * 3
    parts = [
        jax.make_mesh(shape, AXES, axis_types=types, devices=hosts[i]).devices
        for i in sorted(hosts)
    ]
    return Mesh(np.concatenate(parts), AXES, axis_types=types)


def local_mesh(mesh: Mesh) -> Mesh:
    """The part of a mesh that is this process's own; with one process, all of it."""
    mine = [d.process_index == jax.process_index() for d in mesh.devices[:, 0, 0]]
    return Mesh(mesh.devices[mine], AXES, axis_types=mesh.axis_types)


def to_local(tree: Any, mesh: Mesh) -> Any:
    """The same arrays as this process alone sees them, on its `local_mesh`: no copy.

    They may be split over `fsdp` and `tensor`, and not over `data`.
    """

    def of(x: jax.Array) -> jax.Array:
        data = {shard.device: shard.data for shard in x.addressable_shards}
        return jax.make_array_from_single_device_arrays(
            x.shape,
            NamedSharding(mesh, x.sharding.spec),
            [data[device] for device in mesh.devices.flat],
        )

    return jax.tree.map(of, tree)


def global_array(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array that every process holds whole, each device with its part of it."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def train_layout(mesh: Mesh) -> Layout:
    return Layout(mesh, batch=AXES, vocab=AXES, heads=())


def rollout_layout(mesh: Mesh) -> Layout:
    return Layout(mesh, batch=AXES[:2], vocab=AXES[2:], heads=AXES[2:])


# Parameter name (its last path entries) -> spec. Stacked layers lead with L.
_TRAIN = {
    "embedding": P(AXES, None),
    "head": P(AXES, None),
    "kernel": P(None, AXES, None),
    "bias": P(),
    "scale": P(),
}
_OUT, _IN = P(None, None, "tensor"), P(None, "tensor", None)
_ROLLOUT = {
    "embedding": P("tensor", None),
    "head": P("tensor", None),
    "query/kernel": _OUT,
    "key/kernel": _OUT,
    "value/kernel": _OUT,
    "gate/kernel": _OUT,
    "up/kernel": _OUT,
    "output/kernel": _IN,
    "down/kernel": _IN,
    "bias": P(None, "tensor"),
    "scale": P(),
}


def spec_of(path: Sequence[Any], *, sampling: bool) -> P:
    """Which mesh axes split the parameter at a path of a tree, in one of the layouts.

    Its layers are stacked, or a list.
    """
    rules = _ROLLOUT if sampling else _TRAIN
    names = _names(path)
    spec = next(rules[n] for n in ("/".join(names[-2:]), names[-1]) if n in rules)
    return P(*spec[1:]) if len(names) < len(path) else spec  # one layer of a list


def _names(path: Sequence[Any]) -> list[str]:
    return [entry.key for entry in path if isinstance(entry, DictKey)]


def param_shardings(params: Any, layout: Layout) -> Any:
    """The sharding of every parameter of a (possibly abstract) tree."""

    def of(path, leaf) -> NamedSharding:
        spec = spec_of(path, sampling=bool(layout.heads))
        for size, axes in zip(leaf.shape, spec, strict=False):
            axes = (axes,) if isinstance(axes, str) else axes or ()
            if size % layout.size(axes):
                name = "/".join(_names(path))
                raise ValueError(
                    f"parameter {name} has shape {leaf.shape}: {size} does "
                    f"not divide by the mesh axes {axes} ({layout.size(axes)} devices)"
                )
        return NamedSharding(layout.mesh, spec)

    return jax.tree.map_with_path(of, params)


def state_shardings(state: Any, params: Any, layout: Layout) -> Any:
    """Shardings of a tree that holds copies of `params` (optimizer moments).

    A leaf whose path ends like a parameter's and has its shape is laid out like it;
    all others (counters) are replicated.
    """
    at = {
        jax.tree_util.keystr(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree.leaves_with_path(params),
            jax.tree.leaves(param_shardings(params, layout)),
            strict=True,
        )
    }

    def of(path, leaf) -> NamedSharding:
        for start in range(len(path)):
            shape, sharding = at.get(jax.tree_util.keystr(path[start:]), (None, None))
            if shape == leaf.shape:
                return sharding
        return layout.sharding()

    return jax.tree.map_with_path(of, state)
