"""The policies and rows on which rounding is measured."""

import dataclasses
from typing import Any

import jax
import numpy as np

from lld_jax import agent as agent_lib
from lld_jax import losses, model, parallel
from lld_jax.config.overrides import load
from lld_jax.data.questions import question_of_draw
from lld_jax.rollout import Sampling
from lld_jax.training.batch import make_batch

RANDOM = model.ModelConfig(
    vocab=4096,
    width=256,
    mlp=768,
    layers=3,
    kv_heads=2,
    group=2,
    head_dim=64,
    rope_theta=10_000.0,
    rms_eps=1e-6,
    tied=False,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A policy and a batch for it.

    Attributes:
      name: in the table.
      model, params: the policy, in float32, in the training layout.
      batch: `ids, positions, segments, mask, advantages`, each `[B, T]`.
      valid_vocab: ids from here on have probability 0.
    """

    name: str
    model: model.ModelConfig
    params: Any
    batch: dict[str, np.ndarray]
    valid_vocab: int


def layout() -> parallel.Layout:
    """The training layout on the first device alone."""
    return parallel.train_layout(parallel.make_mesh(1, 1, 1, jax.devices()[:1]))


def random_rows(rows: int, tokens: int, vocab: int, seed: int) -> dict[str, np.ndarray]:
    """Random ids, 2 or 3 actions a row, half the advantages >= 0; `[rows, tokens]`.

    Prompts, actions and observations have the proportions of short search
    trajectories, and every second row of a group of 8 is right.
    """
    rng = np.random.default_rng(seed)
    shape = (rows, tokens)
    batch = {
        "ids": rng.integers(0, vocab, shape, dtype=np.int32),
        "positions": np.tile(np.arange(tokens, dtype=np.int32), (rows, 1)),
        "segments": np.zeros(shape, np.int32),
        "mask": np.zeros(shape, np.int32),
    }
    for row in range(rows):
        end = 0
        for _ in range(rng.integers(2, 4)):
            start = end + rng.integers(tokens // 16, tokens // 8)
            end = start + rng.integers(tokens // 16, tokens // 6)
            batch["mask"][row, start:end] = 1
        batch["segments"][row, :end] = 1
    number = np.arange(rows)
    advantages = losses.group_advantages((number + 1) % 2, number // 8)
    batch["advantages"] = np.tile(np.asarray(advantages)[:, None], (1, tokens))
    return batch


def random_case(
    rows: int = 64, tokens: int = 128, config: model.ModelConfig = RANDOM, seed: int = 0
) -> Case:
    """A random policy, and random rows for it."""
    return Case(
        name="random",
        model=config,
        params=jax.jit(lambda key: model.init(config, key, layout()))(
            jax.random.key(seed)
        ),
        batch=random_rows(rows, tokens, config.vocab, seed),
        valid_vocab=config.vocab,
    )


def tiny_case(draws: int = 16, group: int = 4) -> Case:
    """The policy in the package, on trajectories that it samples itself.

    They are the first draws of `configs/tiny.py`, with the advantages that their
    rewards give, and as long as that config's rows.
    """
    config = load("configs/tiny.py")
    agent = agent_lib.open_agent(config)
    params = agent_lib.load_params(agent)
    questions = question_of_draw(agent.questions(config.questions.train), config.seed)
    trajectories, _ = agent_lib.sample(
        agent,
        agent_lib.publisher(agent)(params),
        [(i, questions[i]) for i in range(draws)],
        group=group,
        seed=config.seed,
        sampling=Sampling(config.rollout.temperature),
        max_turns=config.rollout.max_turns,
    )
    batch, _ = make_batch(
        trajectories,
        tokens=config.rollout.max_tokens,
        token_bytes=agent.codec.token_bytes,
        std=config.loss.advantage_std,
    )
    return Case("tiny", agent.model, params, batch, len(agent.codec.token_bytes))
