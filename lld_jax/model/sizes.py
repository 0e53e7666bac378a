"""Sizes of the published Qwen2.5 models, so that a plan needs no download.

From their `config.json` on the hub; a model that is loaded follows its own.
"""

from lld_jax.model.qwen2 import ModelConfig

VALID_VOCAB = 151_665  # ids of Qwen2.5's tokenizer


def _qwen2_5(
    width: int, mlp: int, layers: int, heads: int, kv_heads: int, *, padded: bool
) -> ModelConfig:
    """`padded`: the models from 7B on have more embedding rows, and a head apart."""
    return ModelConfig(
        vocab=152_064 if padded else 151_936,
        width=width,
        mlp=mlp,
        layers=layers,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=width // heads,
        rope_theta=1e6,
        rms_eps=1e-6,
        tied=not padded,
    )


_SIZES = {
    "0.5B": _qwen2_5(896, 4_864, 24, 14, 2, padded=False),
    "1.5B": _qwen2_5(1_536, 8_960, 28, 12, 2, padded=False),
    "3B": _qwen2_5(2_048, 11_008, 36, 16, 2, padded=False),
    "7B": _qwen2_5(3_584, 18_944, 28, 28, 4, padded=True),
}
# Name on the hub -> its sizes.
QWEN2_5 = {
    f"Qwen/Qwen2.5-{size}{kind}": config
    for size, config in _SIZES.items()
    for kind in ("", "-Instruct")
}
