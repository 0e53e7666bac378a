"""Qwen2 over a device mesh: layers, attention, log-probs, Hugging Face folders.

May import parallel, and of the protocol the codec. With parallel and retrieval's
encoders the only place for flax; no loss and no config tree belong here.
"""

from lld_jax.model.qwen2 import (
    ModelConfig,
    abstract_params,
    cached_hidden_states,
    head,
    hidden_states,
    init,
    publisher,
)

__all__ = [
    "ModelConfig",
    "abstract_params",
    "cached_hidden_states",
    "head",
    "hidden_states",
    "init",
    "publisher",
]
