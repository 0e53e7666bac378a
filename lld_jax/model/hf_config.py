"""The config.json of a Hugging Face folder: read, checked, and written again."""

import dataclasses
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lld_jax.model.qwen2 import ModelConfig
from lld_jax.protocol.codec import read_json


@dataclasses.dataclass(frozen=True)
class _Fields:
    """What stands in `file`; a field that is not legal is refused by its name."""

    file: Path
    raw: dict[str, Any]

    def refuse(self, name: str, value: object, legal: str) -> NoReturn:
        raise ValueError(f"{self.file}: {name}={value!r}; legal: {legal}")

    def number(self, name: str, value: Any, kind: Any = int | float) -> Any:
        if not isinstance(value, kind) or isinstance(value, bool) or value <= 0:
            what = "integer" if kind is int else "number"
            self.refuse(name, value, f"a positive {what}")
        return value

    def size(self, name: str) -> int:
        return self.number(name, self.raw.get(name), int)


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
    fields = _Fields(file, raw)
    _check_plain(fields)
    rope_theta = _rope_theta(fields)
    heads, kv_heads, head_dim = _heads(fields)
    return ModelConfig(
        vocab=fields.size("vocab_size"),
        width=fields.size("hidden_size"),
        mlp=fields.size("intermediate_size"),
        layers=fields.size("num_hidden_layers"),
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
        rope_theta=rope_theta,
        rms_eps=float(fields.number("rms_norm_eps", raw.get("rms_norm_eps"))),
        tied=raw["tie_word_embeddings"],
    )


def _check_plain(fields: _Fields) -> None:
    """Plain Qwen2: full attention in every layer, and it is said whether it is tied."""
    raw, refuse = fields.raw, fields.refuse
    if raw.get("model_type") != "qwen2":
        refuse("model_type", raw.get("model_type"), "'qwen2'")
    # The architecture fixes the activation, so a config may leave it out.
    if raw.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", raw["hidden_act"], "'silu'")
    if raw.get("use_sliding_window", False) is not False:
        refuse("use_sliding_window", raw["use_sliding_window"], "false")
    layer_types = raw.get("layer_types") or []
    if set(layer_types) - {"full_attention"}:
        refuse("layer_types", layer_types, "'full_attention' for every layer")
    if not isinstance(raw.get("tie_word_embeddings"), bool):
        refuse("tie_word_embeddings", raw.get("tie_word_embeddings"), "true or false")


def _rope_theta(fields: _Fields) -> float:
    """The rotary base, wherever it stands; any scaling of the positions is refused."""
    raw, refuse = fields.raw, fields.refuse
    bases = {"rope_theta": raw["rope_theta"]} if "rope_theta" in raw else {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            refuse(f"{name}.rope_type", kind, "'default'")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            factor = rope["partial_rotary_factor"]
            refuse(f"{name}.partial_rotary_factor", factor, "1.0")
        if "rope_theta" in rope:
            bases[f"{name}.rope_theta"] = rope["rope_theta"]
    if not bases:
        refuse("rope_theta", None, "a positive number, here or in rope_parameters")
    thetas = {float(fields.number(name, value)) for name, value in bases.items()}
    if len(thetas) > 1:
        refuse(" and ".join(bases), list(bases.values()), "the same number in each")
    return thetas.pop()


def _heads(fields: _Fields) -> tuple[int, int, int]:
    """Query heads, key and value heads, and the width of one."""
    size, refuse = fields.size, fields.refuse
    width, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads, head_dim = size("num_key_value_heads"), fields.raw.get("head_dim")
    if heads % kv_heads:
        refuse("num_key_value_heads", kv_heads, f"a divisor of the {heads} query heads")
    if head_dim is None and width % heads:
        refuse("num_attention_heads", heads, f"a divisor of hidden_size={width}")
    head_dim = width // heads if head_dim is None else size("head_dim")
    if head_dim % 2:
        refuse("head_dim", head_dim, "an even number (rotary pairs)")
    return heads, kv_heads, head_dim


def config_json(source: Path, config: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
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
