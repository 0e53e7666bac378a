"""Hugging Face folders: found, loaded and saved.

Weights are read slice by slice from safetensors into whatever shardings the caller
wants, and written tensor by tensor; no whole model ever stands in host memory.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from safetensors import safe_open
from safetensors.numpy import save_file

from lld_jax.model import tensors
from lld_jax.model.hf_config import config_json, read_config
from lld_jax.model.qwen2 import ModelConfig
from lld_jax.model.tensors import INDEX, WEIGHTS, tensor_shapes
from lld_jax.protocol.codec import TOKENIZER_FILES, end_ids, load_codec, read_json

__all__ = [
    "INDEX",
    "WEIGHTS",
    "end_ids",
    "load",
    "load_codec",
    "read_config",
    "resolve",
    "save",
    "tensor_shapes",
]

Params = dict[str, Any]


def resolve(path: str | Path) -> Path:
    """A local folder, or the local copy of a hub repository (downloaded if needed).

    Raises FileNotFoundError naming `model.path` when it is neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    legal = "legal: a local folder, or a hub id such as Qwen/Qwen2.5-3B"
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path)):
        raise FileNotFoundError(f"model.path={str(path)!r} is no folder; {legal}")
    import huggingface_hub

    patterns = ["*.safetensors", "*.json", "*.jinja", "merges.txt"]
    try:
        local = huggingface_hub.snapshot_download(str(path), allow_patterns=patterns)
    except Exception as error:  # offline, unknown, gated: the remedy is the same
        raise FileNotFoundError(
            f"model.path={str(path)!r} is no folder, is not in the local hub cache and "
            f"could not be downloaded ({type(error).__name__}: {error}); {legal}"
        ) from error
    return Path(local)


def _read_leaf(
    leaf: tensors.Leaf,
    layers: int,
    slices: Mapping[str, Any],
    sharding: Any,
    dtype: Any,
) -> jax.Array:
    shape = leaf.stacked(layers)
    blocks: dict[tuple, np.ndarray] = {}  # replicas read the file once

    def read(index: tuple[slice, ...]) -> np.ndarray:
        spans = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        if spans not in blocks:
            block = np.empty([stop - start for start, stop in spans], dtype)
            inner = [slice(*span) for span in spans[-len(leaf.shape) :]]
            inner = tuple(inner[::-1] if leaf.transposed else inner)
            if leaf.layered:
                for row, layer in enumerate(range(*spans[0])):
                    block[row] = slices[leaf.name.format(layer)][inner].T
            else:
                block[...] = slices[leaf.name][inner]
            blocks[spans] = block
        return blocks[spans]

    return jax.make_array_from_callback(shape, sharding, read)


def load(
    folder: str | Path,
    config: ModelConfig,
    shardings: Params | None = None,
    dtype: Any = jnp.float32,
) -> Params:
    """The parameters in `folder` (safetensors, one file or an index of several).

    Returns the tree of `lld_jax.model`: kernels `[L, in, out]`, biases and scales
    `[L, out]`, embedding and head `[V, D]`, in `dtype`. `shardings` is the same tree of
    `jax.sharding.Sharding` (default: all on the first device); each process reads only
    the slices that its own devices hold.

    Raises ValueError that names the tensors if any is missing, unused or of another
    shape than `config` says. A stray `lm_head.weight` of a tied model is ignored with a
    warning.
    """
    folder, params = Path(folder), {}
    if shardings is None:
        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with contextlib.ExitStack() as stack:
        slices = tensors.open_slices(folder, stack)
        tensors.account(folder, slices, config)
        for leaf in tensors.leaves(config):
            sharding = first if shardings is None else _get(shardings, leaf.path)
            branch = params
            for key in leaf.path[:-1]:
                branch = branch.setdefault(key, {})
            branch[leaf.path[-1]] = _read_leaf(
                leaf, config.layers, slices, sharding, dtype
            )
    return params


def _get(tree: Params, path: Iterable[str]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _gather(array: Any, layer: int | None, dtype: np.dtype) -> np.ndarray:
    """One tensor on the host; the same call in every process."""
    if isinstance(array, jax.Array):
        if layer is not None:
            array = jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        return np.asarray(array).astype(dtype)
    return np.asarray(array if layer is None else array[layer]).astype(dtype)


def _check_params(params: Params, config: ModelConfig) -> None:
    found = {
        tuple(key.key for key in path): np.shape(array)
        for path, array in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    expected = {
        leaf.path: leaf.stacked(config.layers) for leaf in tensors.leaves(config)
    }
    for path in sorted(found.keys() | expected.keys()):
        if found.get(path) != expected.get(path):
            raise ValueError(
                f"params: {'/'.join(path)} has shape {found.get(path)}, "
                f"expected {expected.get(path)} (None: no such array)"
            )


def _check_written(file: Path, held: Mapping[str, np.ndarray]) -> None:
    with safe_open(file, framework="numpy") as reader:
        if set(reader.keys()) != set(held):
            raise OSError(f"{file}: read back other tensors than were written")
        for name, array in held.items():
            back = reader.get_tensor(name)
            # Bits, not values: NaN has to come back too.
            if (back.dtype, back.shape) != (array.dtype, array.shape) or (
                back.tobytes() != array.tobytes()
            ):
                raise OSError(f"{file}: {name} read back differs from what was written")


def save(
    folder: str | Path,
    params: Params,
    config: ModelConfig,
    source: str | Path,
    dtype: Any = jnp.float32,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes a folder that transformers (4 and 5) and `load` read.

    `source` is the folder or hub id the model came from: the other fields of its
    config.json, its generation_config.json, tokenizer and chat template are taken over.
    Tensors are gathered one by one, cast to `dtype` (float32 or bfloat16), and split
    over several files once they exceed `max_shard_bytes`: no more is held at a time
    on the host. All is written beside `folder`, read back, compared bit for bit and
    renamed into place; an earlier export there is replaced.
    With several processes all have to call it; process 0 writes.

    Raises ValueError for parameters that do not fit `config`, FileExistsError if
    `folder` holds anything but a model, OSError if what was read back differs.
    """
    folder, source, dtype = Path(folder).absolute(), resolve(source), jnp.dtype(dtype)
    if dtype.name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={dtype.name!r}; legal: 'float32', 'bfloat16'")
    _check_target(folder, source)
    _check_params(params, config)
    partial = folder.with_name(f".{folder.name}.partial")
    writer = jax.process_index() == 0
    if writer:
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
        partial.mkdir(parents=True)
    files = _split(tensor_shapes(config), dtype.itemsize, max_shard_bytes)
    _write_weights(partial, params, config, dtype, files)
    if writer:
        _write_rest(partial, config, source, dtype, files)
        for file in files:  # safetensors lets the owner alone read them
            shutil.copymode(partial / "config.json", partial / file)
        _put(partial, folder)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"export {folder.name}")


def _check_target(folder: Path, source: Path) -> None:
    """Only an earlier export may be replaced, and never the source."""
    if folder.exists():
        if folder.samefile(source):
            raise ValueError(f"folder={str(folder)!r} is the source; legal: another")
        if any(folder.iterdir()) and not (folder / "config.json").exists():
            raise FileExistsError(f"{folder} holds something that is not a model")


def _put(partial: Path, folder: Path) -> None:
    """Renames `partial` to `folder`; what stood there goes last."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _split(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, limit: int
) -> dict[str, list[str]]:
    """File name -> tensor names, in order, no file above `limit` bytes if it can be."""
    parts, used = [[]], 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * itemsize
        if parts[-1] and used + size > limit:
            parts, used = [*parts, []], 0
        parts[-1].append(name)
        used += size
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {
        f"model-{i:05d}-of-{len(parts):05d}.safetensors": names
        for i, names in enumerate(parts, 1)
    }


def _write_weights(
    folder: Path,
    params: Params,
    config: ModelConfig,
    dtype: np.dtype,
    files: Mapping[str, list[str]],
) -> None:
    """The tensors, file by file: all processes gather them, process 0 writes."""
    places = tensors.places(config)
    writer = jax.process_index() == 0
    for file, names in files.items():
        held = {}
        for name in names:
            leaf, layer = places[name]
            array = _gather(_get(params, leaf.path), layer, dtype)
            if writer:
                # save_file stores the buffer of a view as it lies in memory.
                held[name] = np.ascontiguousarray(array.T if leaf.transposed else array)
        if writer:
            save_file(held, folder / file, metadata={"format": "pt"})
            _check_written(folder / file, held)


def _write_rest(
    folder: Path,
    config: ModelConfig,
    source: Path,
    dtype: np.dtype,
    files: Mapping[str, list[str]],
) -> None:
    """Everything but the weights; then reads config and tensor list back."""

    def write(name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")

    raw = config_json(source, config, dtype)
    write("config.json", raw)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = read_json(source / "generation_config.json")
    write("generation_config.json", generation or {n: raw.get(n) for n in names})
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    if len(files) > 1:
        size = sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())
        where = {name: file for file, names in files.items() for name in names}
        metadata = {"total_size": size * dtype.itemsize}
        write(INDEX, {"metadata": metadata, "weight_map": where})
    if (back := read_config(folder)) != config:
        raise OSError(f"{folder}/config.json read back as {back}, expected {config}")
    with contextlib.ExitStack() as stack:
        tensors.account(folder, tensors.open_slices(folder, stack), config)
