"""The two shapes that the benchmarks run: Hugging Face folders, and their weights."""

import json
import shutil
from importlib import resources
from pathlib import Path

SHAPES = ("tiny", "0.2b")


def folder(shape: str, root: Path) -> Path:
    """The Hugging Face folder (config.json, model.safetensors) of a shape.

    'tiny' is the model in the package. '0.2b' has random float32 weights (seed 0) and
    the vocabulary of Qwen2.5; it is written below `root` once (0.8 GB).

    Raises:
      ValueError: no such shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape={shape!r}; legal: {', '.join(SHAPES)}")
    if shape == "tiny":
        return Path(str(resources.files("lld_jax"))) / "assets/tiny_qwen2.5"
    path = Path(root) / "qwen2_0.2b"
    if not path.exists():
        partial = path.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        _write(partial)
        partial.rename(path)  # so that a folder of that name is whole
    return path


def parameters(config: dict) -> tuple[int, int]:
    """Weights that a token meets in the layers, and in the head, of a Qwen2 model."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    keys = config["num_key_value_heads"] * width // heads
    layer = 2 * width * (width + keys) + 3 * width * config["intermediate_size"]
    return config["num_hidden_layers"] * layer, config["vocab_size"] * width


def _write(path: Path) -> None:
    import torch
    import transformers

    theta = 1e6
    config = transformers.Qwen2Config(
        num_hidden_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=2048,
        vocab_size=151936,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=4096,
        bos_token_id=151643,
        eos_token_id=151645,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config)
    # The seeded initialization leaves the biases at zero, as Qwen2's own does.
    model.save_pretrained(path)
    # Readers of the older format look for the rotary base at the top.
    file = path / "config.json"
    raw = json.loads(file.read_text("utf-8")) | {"rope_theta": theta}
    file.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
