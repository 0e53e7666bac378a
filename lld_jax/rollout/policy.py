"""What a config says about the device programs, known before any weight is read."""

import dataclasses

import jax.numpy as jnp
from ml_collections import ConfigDict

from lld_jax import model, parallel
from lld_jax.protocol.stop import StopTable
from lld_jax.rollout import decoding

# Tokens of an extend call on each shard: enough to pay for reading the weights once,
# and few enough that the call is soon full.
_EXTEND_TOKENS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A model under a config: its sizes, and where it is trained and sampled."""

    config: ConfigDict
    model: model.ModelConfig
    valid_vocab: int  # ids of the tokenizer; the embedding may have more rows
    training: parallel.Layout
    serving: parallel.Layout  # of this process's own devices

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.model.dtype)

    @property
    def rows(self) -> int:
        """Trajectories of a rollout batch."""
        return self.config.rollout.questions * self.config.rollout.group

    @property
    def platform(self) -> str:
        """'cpu', 'tpu' or 'gpu'."""
        return self.training.mesh.devices.flat[0].platform

    @property
    def on_cpu(self) -> bool:
        return self.platform == "cpu"

    @property
    def attention(self) -> str:
        """The kernel of whole rows, see `kernels.by_name`."""
        kind, packed = self.config.model.attention, self.config.optim.packing
        if kind != "auto":
            return kind
        if self.platform == "tpu" and self.config.rollout.max_tokens % 128 == 0:
            return "splash"
        if self.platform == "gpu" and not packed and self.dtype == jnp.bfloat16:
            return "cudnn"
        return "blocked"

    @property
    def remat(self) -> str:
        """What the backward pass computes again, see `model.hidden_states`."""
        kind = self.config.model.remat
        return kind if kind != "auto" else "none" if self.on_cpu else "layer"


def rollout_shapes(policy: Policy) -> decoding.Shapes:
    """The sizes of the three rollout programs."""
    limits, serving = policy.config.rollout, policy.serving
    shards = serving.size(serving.batch)
    # Each process has its share of the slots.
    slots = limits.slots * serving.mesh.size // policy.training.mesh.size
    piece = min(256, max(limits.max_prompt, limits.max_observation))
    entries = min(slots // shards, max(1, _EXTEND_TOKENS // piece))
    return decoding.Shapes(
        slots=slots,
        tokens=limits.max_tokens,
        extend_rows=shards * entries,
        extend_tokens=piece,
        block=64 if policy.on_cpu else 128,
        head_last=not policy.on_cpu,
    )


def rollout_programs(policy: Policy, stop: StopTable) -> decoding.Programs:
    """The three rollout programs of a policy, jitted."""
    return decoding.make_programs(
        policy.model,
        rollout_shapes(policy),
        stop,
        dtype=policy.dtype,
        valid_vocab=policy.valid_vocab,
        layout=policy.serving,
    )
