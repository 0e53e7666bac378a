"""Checkpoints of `{params, opt, step}` with orbax; a JSON item for everything else.

A checkpoint is written to a temporary folder and renamed when it is whole (in a bucket
a file of its own says that it is), so one that was cut short is never listed. The data
position needs no item of its own: it is the step.
"""

import contextlib
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from lld_jax.run import storage

Checkpointer = ocp.training.Checkpointer
_PARTS = ("_CHECKPOINT_METADATA", "state", "info")
_COMMITTED = "commit_success.txt"  # written last where nothing can be renamed


def open_checkpoints(
    directory: str | Path, *, keep: int, writes: bool = True
) -> Checkpointer:
    """Opens (and makes) a folder that keeps the last `keep` checkpoints and the best.

    Leftovers of saves that were cut short are removed; a numbered folder that is no
    checkpoint (half copied, half deleted) is renamed to `<step>.broken`, since orbax
    would list it and drop a good one in its favour. Use it as a context manager:
    leaving it waits for the save in progress and raises what went wrong in it. Without
    `writes` nothing is removed or renamed: a running training may be saving there.

    Raises ValueError if `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"checkpoint.keep: {keep} must be at least 1")
    directory = storage.folder(directory)
    partial = set(_numbered(directory)) - set(_whole(directory)) if writes else ()
    if storage.in_bucket(directory):  # what was not committed is removed by orbax
        partial = [s for s in partial if (directory / str(s) / _COMMITTED).exists()]
    for step in partial:
        # Another process of the run may have been quicker: then it is gone.
        with contextlib.suppress(FileNotFoundError):
            (directory / str(step)).rename(directory / f"{step}.broken")
    policies = ocp.training.preservation_policies
    handlers = ocp.handlers.local_registry()
    handlers.add(ocp.handlers.JsonHandler, checkpointable_name="info")
    context = ocp.Context()
    context.checkpointables.registry = handlers
    return Checkpointer(
        directory,
        context=context,
        preservation_policy=policies.AnyPreservationPolicy(
            [
                policies.LatestN(keep),
                policies.BestN(
                    n=1,
                    get_metric_fn=lambda metrics: metrics["metric"],
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        ),
        cleanup_tmp_directories=writes,
    )


def save(
    checkpoints: Checkpointer,
    step: int,
    state: Any,
    info: dict[str, Any],
    *,
    metric: float | None = None,
) -> bool:
    """Starts to write `state` as checkpoint `step`; returns once it may be donated.

    Args:
      checkpoints: from `open_checkpoints`.
      step: number of finished steps.
      state: a tree of JAX arrays, numpy arrays and Python numbers.
      info: what is no array, as JSON: strings, numbers, lists, dicts.
      metric: higher is better; the best checkpoint is kept beyond the last ones.
        None or a non-finite value never counts as the best.

    Returns False, and writes nothing, if this step is there already. The write goes
    on in the background: its errors are raised by the next `save`, by
    `checkpoints.wait()` or on leaving the context.
    """
    checkpoints.wait()
    if any(c.step == step for c in checkpoints.checkpoints):
        return False
    good = metric is not None and math.isfinite(metric)
    response = checkpoints.save_checkpointables_async(
        step,
        {"state": state, "info": info},
        metrics={"metric": float(metric)} if good else None,
        force=True,
    )
    if response is None:
        raise RuntimeError(f"orbax declined to save step {step}")
    return True


def restore(
    checkpoints: Checkpointer, target: Any, step: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """Reads (state, info) of `step`, by default the latest, bit for bit.

    Args:
      checkpoints: from `open_checkpoints`.
      target: a tree like the saved state; its arrays, or ShapeDtypeStructs that
        carry shardings, say where the values go: the mesh need not be the one that
        wrote them. Numpy arrays and Python numbers come back as such.
      step: number of finished steps.

    Raises FileNotFoundError if there is no such checkpoint, and ValueError naming
    the leaves whose path, shape or dtype differ from what was saved.
    """
    checkpoints.wait()  # a save in progress is listed before it is whole
    have = [c.step for c in checkpoints.checkpoints]
    if not have or (step is not None and step not in have):
        raise FileNotFoundError(
            f"checkpoint of step {step if step is not None else '(latest)'}: "
            f"{checkpoints.directory} has {have or 'none'}"
        )
    step = have[-1] if step is None else step
    saved = checkpoints.checkpointables_metadata(step).metadata["state"]
    _check_leaves(saved, target)
    loaded = checkpoints.load_checkpointables(
        step, {"state": jax.tree.map(_abstract, target), "info": None}
    )
    return loaded["state"], loaded["info"]


def latest_step(directory: str | Path) -> int | None:
    """The last step with a whole checkpoint in `directory`; None if there is none."""
    return max(_whole(storage.folder(directory)), default=None)


def best_step(checkpoints: Checkpointer) -> int | None:
    """The step with the best metric (the later of equals); None without metrics."""
    checkpoints.wait()
    scored = [c for c in checkpoints.checkpoints if c.metrics]
    best = max(scored, key=lambda c: (c.metrics["metric"], c.step), default=None)
    return None if best is None else best.step


def _numbered(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    return [int(p.name) for p in directory.iterdir() if p.name.isdecimal()]


def _whole(directory: Path) -> list[int]:
    parts = [*_PARTS, _COMMITTED] if storage.in_bucket(directory) else _PARTS
    return [
        step
        for step in _numbered(directory)
        if all((directory / str(step) / part).exists() for part in parts)
    ]


def _abstract(leaf):
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        if leaf.sharding is None:
            raise ValueError(f"target: {leaf} carries no sharding")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf


def _check_leaves(saved, target) -> None:
    """Orbax casts to the target's dtype in silence and names no leaf: check first."""
    have, want = _signature(saved), _signature(target)
    problems = [
        f"{path}: saved {have.get(path, 'nothing')}, wanted {want.get(path, 'nothing')}"
        for path in sorted(have.keys() | want.keys())
        if have.get(path) != want.get(path)
    ]
    if problems:
        raise ValueError("checkpoint does not fit: " + "; ".join(problems[:10]))


def _signature(tree) -> dict[str, str]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {
        jax.tree_util.keystr(
            path, simple=True, separator="/"
        ): f"{np.dtype(leaf.dtype).name}{leaf.shape}"
        if hasattr(leaf, "shape")
        else "number"
        for path, leaf in leaves
    }
