"""What an update tells about likelihood displacement, as sums on the device.

All of it comes from the forward pass that the update makes anyway: mini-batch j of a
rollout batch is scored by weights that j - 1 updates moved, so `logp - old` there is
the displacement of answers that were not trained on since.

Shapes: `[B, T]` and batches as in `losses`; sums add up over micro-batches
(`losses.merge_metrics`).
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lld_jax import losses
from lld_jax.losses import LossConfig, Weights

SIGNS = ("correct", "zero", "wrong")  # advantage above, at and below 0
ACTIONS = 4  # actions told apart by number; the last stands for all from there on
_BINS = 256  # of the ratios


def terms(
    logps: Array,
    batch: Mapping[str, Array],
    weights: Weights,
    config: LossConfig,
    *,
    first: Array | bool = False,
) -> tuple[Array, Array]:
    """The surrogate and lambda times LLDS, two scalars with gradients to `logps`.

    Arguments as in `losses.objective`, whose terms they are.
    """
    mask, segments = batch["mask"], batch.get("segments")
    old = jnp.where(first, jax.lax.stop_gradient(logps), batch["old_logps"])
    ratio = _ratio(logps, old, mask, segments, config)
    policy, _ = losses.clipped_surrogate(
        ratio, batch["advantages"], mask, config.clip_low, config.clip_high
    )
    beta = losses.answer_weight(config.llds_answer, batch.get("valid_searches"))
    penalty = losses.llds_penalty(
        logps,
        batch.get("anchor_logps", old),
        batch["advantages"],
        mask,
        gate=config.llds_gate,
        segments=segments,
        answer_mask=batch.get("answer_mask"),
        answer_weight=beta,
    )
    coef = batch.get("llds_coef", config.llds_coef)
    return jnp.sum(weights.policy * policy), coef * jnp.sum(weights.llds * penalty)


def of_tokens(
    logps: Array,
    batch: Mapping[str, Array],
    weights: Weights,
    config: LossConfig,
    *,
    first: Array | bool = False,
) -> dict[str, Array]:
    """Sums over the action tokens of a micro-batch, float32, without gradient.

    Arguments as in `losses.objective`. Returns:
      `by_action_tokens, by_action_logp`: `[3, ACTIONS]`, by sign and by the number of
        the action in its trajectory: how many tokens, and the sum of their log-probs;
      `seen_tokens, seen_displacement`: `[3]`, by sign: the sum of `logp - old`, nothing
        while `first`;
      `slope_policy, slope_llds, slope_both`: squared norms of the gradients of the two
        `terms` with respect to `logps`, and their inner product;
      `ratios`: `[256]`, how many ratios fall between `ratio_edges`.
    """
    keep = jnp.asarray(batch["mask"]) != 0
    segments = batch.get("segments")
    logps = jnp.where(keep, jax.lax.stop_gradient(logps).astype(jnp.float32), 0.0)
    old = jnp.where(first, logps, batch["old_logps"])
    advantages = jnp.asarray(batch["advantages"], jnp.float32)
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    signs = jnp.stack([keep & s for s in _signs(advantages)])
    number = jnp.clip(action_numbers(keep, segments), 1, ACTIONS) - 1
    action = jax.nn.one_hot(number, ACTIONS) * keep[..., None]
    moved = losses.displacement(logps, old, keep)
    policy, llds = (
        jax.grad(lambda x, i=i: terms(x, batch, weights, config, first=first)[i])(logps)
        for i in range(2)
    )
    ratio = jnp.where(keep, _ratio(logps, old, keep, segments, config), 1.0)
    bins = jnp.clip(jnp.searchsorted(ratio_edges(), ratio) - 1, 0, _BINS - 1)
    by_action = partial(jnp.einsum, "zbt,bta->za")
    return {
        "by_action_tokens": by_action(signs.astype(jnp.float32), action),
        "by_action_logp": by_action(jnp.where(signs, logps, 0.0), action),
        "seen_tokens": jnp.where(first, 0.0, signs.sum((1, 2), dtype=jnp.float32)),
        "seen_displacement": jnp.where(signs, moved, 0.0).sum((1, 2)),
        "slope_policy": (policy**2).sum(),
        "slope_llds": (llds**2).sum(),
        "slope_both": (policy * llds).sum(),
        "ratios": jnp.zeros(_BINS).at[bins].add(keep.astype(jnp.float32)),
    }


def action_numbers(mask: Array, segments: Array | None = None) -> Array:
    """The number of the action in its trajectory, from 1; `[B, T]`, 0 outside actions.

    `losses.action_ids` counts on through the trajectories of a row; this starts anew.
    """
    ids = losses.action_ids(mask, segments)
    if segments is None:
        return ids
    size = ids.shape[1] + 1
    least = jax.vmap(partial(jax.ops.segment_min, num_segments=size))
    first = least(jnp.where(ids > 0, ids, size), segments)
    return jnp.where(ids > 0, ids - jnp.take_along_axis(first, segments, 1) + 1, 0)


def displacements(
    new: Array, old: Array, mask: Array, segments: Array, places: Array
) -> tuple[Array, Array]:
    """The sum of `new - old` over a trajectory's action tokens, and their number.

    The paper's displacement of a response.

    Args:
      new, old, mask, segments: `[n, m, T]`; places: `[B, 4]` as in `packing`.
    Returns: two `[B]`, in the order of the places.
    """
    keep = jnp.asarray(mask) != 0
    size = keep.shape[-1] + 1
    of_row = jax.vmap(partial(jax.ops.segment_sum, num_segments=size))
    sums = jax.vmap(of_row)  # [n, m, segments]
    at = tuple(jnp.asarray(places)[:, :3].T)
    moved = sums(losses.displacement(new, old, keep), segments)
    return moved[at], sums(keep.astype(jnp.int32), segments)[at]


def ratio_edges() -> np.ndarray:
    """`[257]` bounds of the bins of ratios from 1/100 to 100, fine around 1.

    Log-ratios are spaced evenly after asinh(x / .001): .4 % apart at 1.05.
    """
    most = np.arcsinh(losses.LOG_RATIO_CAP / 1e-3)
    return np.exp(1e-3 * np.sinh(np.linspace(-most, most, _BINS + 1)))


def ratio_quantile(counts: np.ndarray, share: float) -> float:
    """The ratio below which `share` of the `ratios` `[256]` lie; 1 if there are none.

    Within a bin, as if they were spread evenly over it.
    """
    edges, total = ratio_edges(), float(np.sum(counts))
    if not total:
        return 1.0
    ends = np.concatenate([[0.0], np.cumsum(counts, dtype=float)]) / total
    at = int(np.searchsorted(ends, share, side="left"))
    at = min(max(at, 1), _BINS)
    inside = (share - ends[at - 1]) / (ends[at] - ends[at - 1])
    return float(edges[at - 1] + inside * (edges[at] - edges[at - 1]))


def _signs(advantages: Array) -> tuple[Array, Array, Array]:
    return advantages > 0, advantages == 0, advantages < 0


def _ratio(logps, old, mask, segments, config: LossConfig) -> Array:
    if config.policy == "gspo":
        return losses.sequence_ratio(logps, old, mask, segments=segments)
    return losses.token_ratio(logps, old, mask)
