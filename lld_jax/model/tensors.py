"""The tensors of a Hugging Face folder: which array each belongs to, and its file."""

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from lld_jax.model.qwen2 import ModelConfig
from lld_jax.protocol.codec import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Leaf(NamedTuple):
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


def leaves(config: ModelConfig) -> list[Leaf]:
    """Every array of the tree, in the order in which they are read."""
    width, mlp = config.width, config.mlp
    keys = config.kv_heads * config.head_dim
    queries = keys * config.group
    found = [
        Leaf(("embedding",), "model.embed_tokens.weight", (config.vocab, width)),
        Leaf(("final_norm", "scale"), "model.norm.weight", (width,)),
    ]
    if not config.tied:
        found.append(Leaf(("head",), "lm_head.weight", (config.vocab, width)))
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
        found.append(Leaf(("layers", ours, weight), f"{name}.weight", shape))
        if ours in ("query", "key", "value"):
            found.append(Leaf(("layers", ours, "bias"), f"{name}.bias", shape[1:]))
    return found


def places(config: ModelConfig) -> dict[str, tuple[Leaf, int | None]]:
    """Name in the file -> (leaf, layer or None), layer after layer."""
    every = leaves(config)
    return {leaf.name: (leaf, None) for leaf in every if not leaf.layered} | {
        leaf.name.format(layer): (leaf, layer)
        for layer in range(config.layers)
        for leaf in every
        if leaf.layered
    }


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a complete file, with its shape there (kernels `[out, in]`)."""
    return {
        name: leaf.shape[::-1] if leaf.transposed else leaf.shape
        for name, (leaf, _) in places(config).items()
    }


def _weight_files(folder: Path) -> list[Path]:
    """The one file, or those that the index names."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing or not names:
        what = f"{INDEX} names missing files {missing}" if missing else "no weights"
        raise FileNotFoundError(f"{folder}: {what}; legal: {WEIGHTS}, or {INDEX}")
    return [folder / name for name in names]


def open_slices(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Name -> lazy safetensors slice, over all files; open as long as `stack` is."""
    slices: dict[str, Any] = {}
    for path in _weight_files(folder):
        file = stack.enter_context(safe_open(path, framework="numpy"))
        for name in file.keys():
            if name in slices:
                raise ValueError(f"{folder}: {name} stands in more than one file")
            slices[name] = file.get_slice(name)
    return slices


def account(folder: Path, slices: Mapping[str, Any], config: ModelConfig) -> None:
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
