"""Hugging Face folders: configuration and weights, in and out.

Weights are read slice by slice from safetensors into whatever shardings the caller
wants, and written tensor by tensor; no whole model ever stands in host memory.
"""

import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from safetensors import safe_open
from safetensors.numpy import save_file

from lld_jax.model.qwen2 import ModelConfig
from lld_jax.protocol.codec import TOKENIZER_FILES, end_ids, load_codec, read_json

__all__ = ["end_ids", "load", "load_codec", "read_config", "resolve", "save"]

Params = dict[str, Any]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


# ------------------------------------------------------------------ configuration


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


def read_config(folder: str | Path) -> ModelConfig:
    """Sizes of the Qwen2 model in `folder`, from its config.json alone.

    The rotary base is taken from `rope_parameters.rope_theta` (transformers 5) or from
    the top-level `rope_theta` (the published files); there is no default for it.
    Raises FileNotFoundError without a config.json and ValueError, naming the field, its
    value and what is legal, for a missing field or a model that is not plain Qwen2.
    """
    file = Path(folder) / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist")
    raw = read_json(file)

    def fail(name: str, value: object, legal: str):
        raise ValueError(f"{file}: {name}={value!r}; legal: {legal}")

    def number(name: str, value: object, kind: type = int | float):
        if not isinstance(value, kind) or isinstance(value, bool) or value <= 0:
            fail(name, value, f"a positive {'integer' if kind is int else 'number'}")
        return value

    def size(name: str) -> int:
        return number(name, raw.get(name), int)

    if raw.get("model_type") != "qwen2":
        fail("model_type", raw.get("model_type"), "'qwen2'")
    # The architecture fixes the activation, so a config may leave it out.
    if raw.get("hidden_act", "silu") != "silu":
        fail("hidden_act", raw["hidden_act"], "'silu'")
    if raw.get("use_sliding_window", False) is not False:
        fail("use_sliding_window", raw["use_sliding_window"], "false")
    layer_types = raw.get("layer_types") or []
    if set(layer_types) - {"full_attention"}:
        fail("layer_types", layer_types, "'full_attention' for every layer")
    if not isinstance(raw.get("tie_word_embeddings"), bool):
        fail("tie_word_embeddings", raw.get("tie_word_embeddings"), "true or false")

    bases = {"rope_theta": raw["rope_theta"]} if "rope_theta" in raw else {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            fail(f"{name}.rope_type", kind, "'default'")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            factor = rope["partial_rotary_factor"]
            fail(f"{name}.partial_rotary_factor", factor, "1.0")
        if "rope_theta" in rope:
            bases[f"{name}.rope_theta"] = rope["rope_theta"]
    if not bases:
        fail("rope_theta", None, "a positive number, here or in rope_parameters")
    thetas = {float(number(name, value)) for name, value in bases.items()}
    if len(thetas) > 1:
        fail(" and ".join(bases), list(bases.values()), "the same number in each")

    width, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads, head_dim = size("num_key_value_heads"), raw.get("head_dim")
    if heads % kv_heads:
        fail("num_key_value_heads", kv_heads, f"a divisor of the {heads} query heads")
    if head_dim is None and width % heads:
        fail("num_attention_heads", heads, f"a divisor of hidden_size={width}")
    head_dim = width // heads if head_dim is None else size("head_dim")
    if head_dim % 2:
        fail("head_dim", head_dim, "an even number (rotary pairs)")
    return ModelConfig(
        vocab=size("vocab_size"),
        width=width,
        mlp=size("intermediate_size"),
        layers=size("num_hidden_layers"),
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
        rope_theta=thetas.pop(),
        rms_eps=float(number("rms_norm_eps", raw.get("rms_norm_eps"))),
        tied=raw["tie_word_embeddings"],
    )


def _config_json(source: Path, config: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
    """`source`'s config.json with `config`'s sizes, readable by old and new readers."""
    raw = {"max_position_embeddings": 32768} | read_json(source / "config.json")
    heads = config.kv_heads * config.group
    rope = {"rope_type": "default", **(raw.get("rope_parameters") or {})}
    if "head_dim" in raw or heads * config.head_dim != config.width:
        raw["head_dim"] = config.head_dim
    if raw.get("layer_types"):
        raw["layer_types"] = ["full_attention"] * config.layers
    return raw | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": config.width,
        "intermediate_size": config.mlp,
        "num_attention_heads": heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.rms_eps,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "use_sliding_window": False,
        "vocab_size": config.vocab,
        "dtype": dtype.name,
        "torch_dtype": dtype.name,
    }


# ------------------------------------------------------------------------ weights


class _Leaf(NamedTuple):
    """One array of the parameter tree and its tensors in the file."""

    path: tuple[str, ...]  # in our tree; under 'layers' there is a leading L axis
    name: str  # in the file; '{}' stands for the layer
    shape: tuple[int, ...]  # ours, without the L axis

    @property
    def layered(self) -> bool:
        return self.path[0] == "layers"

    @property
    def transposed(self) -> bool:  # the file holds [out, in]
        return self.path[-1] == "kernel"

    def stacked(self, layers: int) -> tuple[int, ...]:
        return (layers, *self.shape) if self.layered else self.shape


def _leaves(config: ModelConfig) -> list[_Leaf]:
    width, mlp = config.width, config.mlp
    keys = config.kv_heads * config.head_dim
    queries = keys * config.group
    leaves = [
        _Leaf(("embedding",), "model.embed_tokens.weight", (config.vocab, width)),
        _Leaf(("final_norm", "scale"), "model.norm.weight", (width,)),
    ]
    if not config.tied:
        leaves.append(_Leaf(("head",), "lm_head.weight", (config.vocab, width)))
    for ours, theirs, shape in (
        ("attention_norm", "input_layernorm", (width,)),
        ("query", "self_attn.q_proj", (width, queries)),
        ("key", "self_attn.k_proj", (width, keys)),
        ("value", "self_attn.v_proj", (width, keys)),
        ("output", "self_attn.o_proj", (queries, width)),
        ("mlp_norm", "post_attention_layernorm", (width,)),
        ("gate", "mlp.gate_proj", (width, mlp)),
        ("up", "mlp.up_proj", (width, mlp)),
        ("down", "mlp.down_proj", (mlp, width)),
    ):
        weight = "kernel" if len(shape) == 2 else "scale"
        name = f"model.layers.{{}}.{theirs}"
        leaves.append(_Leaf(("layers", ours, weight), f"{name}.weight", shape))
        if ours in ("query", "key", "value"):
            leaves.append(_Leaf(("layers", ours, "bias"), f"{name}.bias", shape[1:]))
    return leaves


def _tensors(config: ModelConfig) -> dict[str, tuple[_Leaf, int | None]]:
    """Name in the file -> (leaf, layer or None), layer after layer."""
    leaves = _leaves(config)
    return {leaf.name: (leaf, None) for leaf in leaves if not leaf.layered} | {
        leaf.name.format(layer): (leaf, layer)
        for layer in range(config.layers)
        for leaf in leaves
        if leaf.layered
    }


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a complete file, with its shape there (kernels `[out, in]`)."""
    return {
        name: leaf.shape[::-1] if leaf.transposed else leaf.shape
        for name, (leaf, _) in _tensors(config).items()
    }


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing or not names:
        what = f"{INDEX} names missing files {missing}" if missing else "no weights"
        raise FileNotFoundError(f"{folder}: {what}; legal: {WEIGHTS}, or {INDEX}")
    return [folder / name for name in names]


def _open(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Name -> lazy safetensors slice, over all files; open as long as `stack` is."""
    slices: dict[str, Any] = {}
    for path in _weight_files(folder):
        file = stack.enter_context(safe_open(path, framework="numpy"))
        for name in file.keys():
            if name in slices:
                raise ValueError(f"{folder}: {name} stands in more than one file")
            slices[name] = file.get_slice(name)
    return slices


def _account(folder: Path, slices: Mapping[str, Any], config: ModelConfig) -> None:
    """Every key used, every use a key: raises ValueError otherwise."""
    expected = tensor_shapes(config)
    if missing := sorted(expected.keys() - slices.keys()):
        hint = ""
        if "lm_head.weight" in missing:
            hint = " (lm_head.weight may only be absent if tie_word_embeddings is true)"
        raise ValueError(f"{folder}: missing tensors {missing}{hint}")
    unused = slices.keys() - expected.keys()
    # A buffer that old exporters kept; it follows from the rotary base.
    unused = {name for name in unused if not name.endswith("rotary_emb.inv_freq")}
    if config.tied and "lm_head.weight" in unused:
        unused.remove("lm_head.weight")
        warnings.warn(
            f"{folder}: lm_head.weight is ignored, since tie_word_embeddings is true",
            stacklevel=3,
        )
    if unused:
        raise ValueError(f"{folder}: unused tensors {sorted(unused)}")
    for name, shape in expected.items():
        found = tuple(slices[name].get_shape())
        if found != shape:
            raise ValueError(f"{folder}: {name} has shape {found}, expected {shape}")
        dtype = slices[name].get_dtype()
        if dtype not in ("F32", "BF16", "F16"):
            raise ValueError(f"{folder}: {name} is {dtype}; legal: F32, BF16, F16")


def _read_leaf(
    leaf: _Leaf, layers: int, slices: Mapping[str, Any], sharding: Any, dtype: Any
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
        slices = _open(folder, stack)
        _account(folder, slices, config)
        for leaf in _leaves(config):
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
    expected = {leaf.path: leaf.stacked(config.layers) for leaf in _leaves(config)}
    for path in sorted(found.keys() | expected.keys()):
        if found.get(path) != expected.get(path):
            raise ValueError(
                f"params: {'/'.join(path)} has shape {found.get(path)}, "
                f"expected {expected.get(path)} (None: no such array)"
            )


def _check_written(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    with safe_open(file, framework="numpy") as reader:
        if set(reader.keys()) != set(tensors):
            raise OSError(f"{file}: read back other tensors than were written")
        for name, array in tensors.items():
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
    if folder.exists():
        if folder.samefile(source):
            raise ValueError(f"folder={str(folder)!r} is the source; legal: another")
        if any(folder.iterdir()) and not (folder / "config.json").exists():
            raise FileExistsError(f"{folder} holds something that is not a model")
    _check_params(params, config)
    partial = folder.with_name(f".{folder.name}.partial")
    writer = jax.process_index() == 0
    if writer:
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
        partial.mkdir(parents=True)

    tensors = _tensors(config)
    files = _split(tensor_shapes(config), dtype.itemsize, max_shard_bytes)
    for file, names in files.items():
        held = {}
        for name in names:
            leaf, layer = tensors[name]
            array = _gather(_get(params, leaf.path), layer, dtype)
            if writer:
                # save_file stores the buffer of a view as it lies in memory.
                held[name] = np.ascontiguousarray(array.T if leaf.transposed else array)
        if writer:
            save_file(held, partial / file, metadata={"format": "pt"})
            _check_written(partial / file, held)
    if writer:
        _write_rest(partial, config, source, dtype, files)
        for file in files:  # safetensors lets the owner alone read them
            shutil.copymode(partial / "config.json", partial / file)
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"export {folder.name}")


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

    raw = _config_json(source, config, dtype)
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
        _account(folder, _open(folder, stack), config)
