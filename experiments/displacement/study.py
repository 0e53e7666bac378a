"""Some updates on one question, from the same weights each time, and what they move.

The displacement of a question is the mean over its correct responses of the sum over
action tokens of `new - old` log-probs: Fig. 3a of arXiv 2512.04220. G responses, T
tokens a row.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from lld_jax import losses
from lld_jax.agent import Agent
from lld_jax.config import ConfigError
from lld_jax.protocol.trajectory import Trajectory
from lld_jax.training.batch import make_batch
from lld_jax.training.update import make_functions

OPTIMIZERS = ("adam", "sgd")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What an update is made of, besides the config's KL and entropy terms.

    `right` and `wrong` multiply the advantages of correct and of wrong responses.
    `llds` adds lambda times LLDS; `gate` is the config's where it is empty.
    """

    right: float = 1.0
    wrong: float = 1.0
    llds: bool = False
    gate: str = ""


SETTINGS = {
    "grpo": Setting(),
    "positives": Setting(wrong=0.0),
    "negatives": Setting(right=0.0),
    "llds": Setting(llds=True),
    "llds-action": Setting(llds=True, gate="action"),
    "llds-response": Setting(llds=True, gate="response"),
    "llds-token": Setting(llds=True, gate="token"),
}


def fit_config(
    config: ConfigDict,
    *,
    questions: int,
    rollouts: int,
    lr: float | None = None,
    optimizer: str = "adam",
) -> ConfigDict:
    """The config of the study: `questions` groups of `rollouts`, an update for each.

    Raises ConfigError if no micro-batch fits a group on this mesh.
    """
    devices = config.mesh.data * config.mesh.fsdp * config.mesh.tensor
    sizes = range(devices, max(devices, config.optim.micro_rows) + 1, devices)
    fitting = [size for size in sizes if rollouts % size == 0]
    if not fitting:
        raise ConfigError(
            f"--rollouts: {rollouts} must be a multiple of the {devices} devices of "
            "the mesh: each takes the same number of rows"
        )
    config = copy.deepcopy(config)
    config.rollout.questions = config.optim.updates = questions
    config.rollout.group = rollouts
    config.optim.micro_rows = fitting[-1]
    config.optim.packing = False  # `make_displace` gives each response a row
    if lr is not None:
        config.optim.lr = lr
    if optimizer == "sgd":  # see `make_displace`
        config.optim.b1, config.optim.clip = 0.0, 1e30
    return config


def mixed_groups(
    trajectories: Sequence[Trajectory],
) -> tuple[list[list[Trajectory]], dict[str, int]]:
    """Groups (of a draw) with right and wrong responses, and how many are neither.

    Returns the groups in order, and the numbers of groups that are all `right` and
    all `wrong`: their advantages are 0, so there is nothing to learn from them.
    """
    groups: dict[int, list[Trajectory]] = {}
    for traj in trajectories:
        groups.setdefault(traj.draw, []).append(traj)
    rewards = [{t.reward for t in group} for group in groups.values()]
    kept = [g for g, r in zip(groups.values(), rewards, strict=True) if len(r) > 1]
    return kept, {"right": rewards.count({1.0}), "wrong": rewards.count({0.0})}


def make_displace(
    agent: Agent,
    settings: Mapping[str, Setting],
    *,
    updates: int = 1,
    optimizer: str = "adam",
) -> Callable[[Any, Any, Sequence[Trajectory]], dict[str, np.ndarray]]:
    """`displace(params, reference, group)` -> `new - old`, `[G, T]`, of each setting.

    A call makes `updates` updates on one group, with a fresh optimizer state and old
    log-probs that stay, once for each setting; `params` stay as they are. KL is to
    `reference`. Values are float32, 0 outside actions. Settings with one gate share
    their compiled programs; so do all groups.

    Args:
      agent: with a config of `fit_config`, made for the same `optimizer`.
      optimizer: 'adam', the trainer's clipping, Adam and weight decay; 'sgd', the
        plain gradient times `optim.lr`.

    `displace` raises FloatingPointError if a gradient is not finite.
    """
    config, layout = agent.config, agent.training
    lr, micro = config.optim.lr, config.optim.micro_rows
    gates = {name: s.gate or config.llds.gate for name, s in settings.items()}
    functions = {
        gate: make_functions(_with_gate(agent, gate)) for gate in set(gates.values())
    }
    init, logps_fn, _, weigh = functions[next(iter(gates.values()))]
    rows = layout.sharding(None, layout.batch)

    def step(gate, state, part, weights, scalars, unmoved, n):
        update_fn = functions[gate][2]
        if optimizer == "adam":
            return update_fn(state, part, weights, scalars, lr, unmoved, n)
        # At rate 0 nothing moves, and without decay (b1 = 0) nor clipping Adam's first
        # moment is the gradient.
        state, out = update_fn(state, part, weights, scalars, 0.0, unmoved, n)
        (gradient,) = (s.mu for s in state["opt"] if hasattr(s, "mu"))
        moved = optax.tree.add_scale(state["params"], -lr, gradient)
        return state | {"params": moved}, out

    def displace(params, reference, group):
        batch, scalars = make_batch(
            group,
            tokens=config.rollout.max_tokens,
            token_bytes=agent.codec.token_bytes,
            std=config.loss.advantage_std,
        )
        n = len(group) // micro

        def stack(x):
            return jax.device_put(x.reshape(n, micro, -1), rows)

        stacked = {name: stack(x) for name, x in batch.items()}
        old = logps_fn(params, stacked, 0, n)
        kl = n if config.loss.kl else 0
        known = {"old_logps": old, "ref_logps": logps_fn(reference, stacked, 0, kl)}
        right = np.array([t.reward > 0 for t in group])[:, None]
        displacements = {}
        for name, setting in settings.items():
            factor = np.where(right, setting.right, setting.wrong).astype(np.float32)
            advantages = {"advantages": stack(batch["advantages"] * factor)}
            part = stacked | known | advantages
            weights = weigh(part)
            # LLDS with weight 0 is no LLDS, without a program of its own.
            weights = weights._replace(llds=weights.llds * float(setting.llds))
            state = init(params)
            for j in range(updates):
                unmoved = j == 0 or lr == 0
                state, out = step(
                    gates[name], state, part, weights, scalars, unmoved, n
                )
                if out["skipped"]:
                    raise FloatingPointError(
                        f"draw {group[0].draw}, setting {name}, update {j + 1}: the "
                        "gradient is not finite"
                    )
            new = logps_fn(state["params"], stacked, 0, n)
            moved = losses.displacement(new, old, stacked["mask"])
            displacements[name] = np.asarray(moved).reshape(batch["mask"].shape)
        return displacements

    return displace


def _with_gate(agent: Agent, gate: str) -> Agent:
    config = copy.deepcopy(agent.config)
    config.llds.gate = gate
    return dataclasses.replace(agent, config=config)


def mean_displacement(
    moved: np.ndarray, mask: np.ndarray, chosen: np.ndarray
) -> tuple[float, float]:
    """Mean of `moved` over the chosen responses: of their sums, and of their tokens.

    `moved` and `mask` (1 on action tokens) are `[G, T]`, `chosen` is `[G]` bool.
    """
    kept = np.where(mask[chosen] != 0, moved[chosen].astype(np.float64), 0.0)
    total = float(kept.sum())
    tokens = max(1, int(np.count_nonzero(mask[chosen])))
    return total / max(1, int(chosen.sum())), total / tokens


def actions_of(traj: Trajectory) -> list[int]:
    """The ids of the action tokens of a trajectory, in order."""
    return list(itertools.compress(traj.ids, traj.mask))


def common_prefix(group: Sequence[Trajectory]) -> float:
    """Action tokens that a correct and a wrong response begin with: mean over pairs."""
    right = [actions_of(t) for t in group if t.reward > 0]
    wrong = [actions_of(t) for t in group if t.reward == 0]

    def shared(a: list[int], b: list[int]) -> int:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b))  # noqa: B905
        return sum(1 for _ in same)

    return float(np.mean([shared(a, b) for a in right for b in wrong]))


def describe(
    group: Sequence[Trajectory], displacements: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """What is kept of a group: its displacements and what they may depend on.

    `correct` and `wrong` of a setting are means over responses, `*_token` over tokens.
    """
    tokens = next(iter(displacements.values())).shape[1]
    mask = np.zeros((len(group), tokens), np.int32)
    for row, traj in zip(mask, group, strict=True):
        row[: len(traj.mask)] = traj.mask
    right = np.array([t.reward > 0 for t in group])

    def means(moved: np.ndarray) -> dict[str, float]:
        correct, correct_token = mean_displacement(moved, mask, right)
        wrong, wrong_token = mean_displacement(moved, mask, ~right)
        values = {"correct": correct, "wrong": wrong}
        values |= {"correct_token": correct_token, "wrong_token": wrong_token}
        return {k: float(f"{v:.6g}") for k, v in values.items()}

    return {
        "draw": group[0].draw,
        "question": group[0].question,
        "correct": int(right.sum()),
        "responses": len(group),
        "tokens_correct": round(float(mask[right].sum(1).mean()), 2),
        "tokens_wrong": round(float(mask[~right].sum(1).mean()), 2),
        "common_prefix": round(common_prefix(group), 2),
        "settings": {name: means(moved) for name, moved in displacements.items()},
    }
