"""Qwen2 in Flax Linen: embeddings in, hidden states out."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Qwen2 model, named by the axis letters used in every einsum.

    V vocab, D width, F mlp, L layers, K kv heads, G query heads per kv head, H head dim.
    """

    vocab: int
    width: int
    mlp: int
    layers: int
    kv_heads: int
    group: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    tied: bool
