"""The paper in one file: GRPO and GSPO surrogates, k3 KL, entropy and LLDS.

Lazy likelihood displacement (LLD) is the slow loss of probability of responses that
should be kept; LLDS penalises it (arXiv 2512.04220). GRPO is arXiv 2402.03300, its
clipped surrogate is PPO's (arXiv 1707.06347), GSPO is arXiv 2507.18071.

Conventions: B rows, T tokens. Per-token arrays are `[B, T]`, aligned with the token
ids. `mask` is 1 on action tokens (written by the policy), 0 on prompts, observations
and padding. `segments` numbers the trajectories packed into a row from 1, 0 on padding;
None: a row is one trajectory. Advantages are `[B]` or `[B, T]`. Results are float32,
and per-token terms are 0 where `mask` is 0. What stands at masked places may be
anything, NaN included: it reaches neither a value nor a gradient. Gradients flow
through `logps` (the first argument) and `entropy` alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

LOG_RATIO_CAP = math.log(100.0)  # of a token
SEQUENCE_LOG_RATIO_CAP = 10.0  # of a trajectory, in GSPO
KL_CAP = 10.0  # of a token's k3
KL_EXPONENT_CAP = 20.0  # keeps exp finite, far beyond KL_CAP

GATES = ("action", "response", "token")
NORMALIZERS = ("preserved", "all")
PRESERVED = ("nonnegative", "positive")
ANSWER_SCHEDULES = ("paper", "authors")


def _check(field: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{field}={value!r}: must be one of {', '.join(legal)}")


def _check_number(field: str, value: object, high: float, also: str = "") -> None:
    if not (isinstance(value, (int, float)) and 0 <= value <= high):
        raise ValueError(f"{field}={value!r}: must be from 0 to {high:g}{also}")


@dataclass(frozen=True)
class LossConfig:
    """Settings of the loss; hashable, so it can be a static argument of `jax.jit`.

    Defaults follow the paper's text. Its numbers were made by code with `entropy=0.001,
    average='microbatch', llds_normalizer='all'`. A wrong value raises `ValueError`.
    """

    policy: str = "grpo"  # ratios per token, or 'gspo': per trajectory
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    kl: float = 0.001  # coefficient of k3
    entropy: float = 0.0  # coefficient of the bonus
    average: str = "global"  # or 'microbatch': the mean of micro-batch means
    llds_coef: float = 0.2  # lambda; 0 is the plain policy loss
    llds_gate: str = "action"  # 'response', 'token'
    llds_normalizer: str = "preserved"  # 'all'
    llds_preserve: str = "nonnegative"  # advantages; 'positive': also not those of 0
    llds_answer: float | str = 1.0  # beta: a constant, 'paper' or 'authors'

    def __post_init__(self) -> None:
        _check("policy", self.policy, ("grpo", "gspo"))
        _check("average", self.average, ("global", "microbatch"))
        _check("llds_gate", self.llds_gate, GATES)
        _check("llds_normalizer", self.llds_normalizer, NORMALIZERS)
        _check("llds_preserve", self.llds_preserve, PRESERVED)
        _check_number("clip_low", self.clip_low, 1.0)
        for field in ("clip_high", "kl", "entropy", "llds_coef"):
            _check_number(field, getattr(self, field), 1e6)
        if self.llds_answer not in ANSWER_SCHEDULES:
            _check_number("llds_answer", self.llds_answer, 1.0, ", 'paper', 'authors'")


# ----------------------------------------------------------------------- advantages


def group_advantages(
    rewards: Array, group_ids: Array, *, std: str = "sample", eps: float = 1e-6
) -> Array:
    """Rewards relative to their group: `(r - mean_g) / (std_g + eps)`.

    Groups are told apart by id alone: interleaved, uneven, any order. A group whose
    rewards are all equal gets exactly 0. A group of one counts as mean 0, standard
    deviation 1, as in the authors' code: `r / (1 + eps)` (`r` without division).

    Args:
      rewards: `[B]`.
      group_ids: `[B]` int32, any values.
      std: 'sample' (n - 1), 'population' (n), or 'none' (no division).
      eps: added to the standard deviation.
    Returns: `[B]` float32 in the order of `rewards`; no gradient.
    Raises: ValueError: an unknown `std`. Source: arXiv 2402.03300.
    """
    _check("std", std, ("sample", "population", "none"))
    rewards = jax.lax.stop_gradient(_f32(rewards))
    group_ids = jnp.asarray(group_ids)
    same = group_ids[:, None] == group_ids[None, :]  # [B, B]

    def over_group(reduce, values, empty):
        # `where`, not a product: a NaN reward stays in its own group.
        return reduce(jnp.where(same, values[None, :], empty), axis=1)

    count = jnp.sum(same, axis=1)
    alone = count == 1
    mean = jnp.where(alone, 0.0, over_group(jnp.sum, rewards, 0.0) / count)
    result = rewards - mean
    if std != "none":
        degrees = jnp.maximum(count - 1, 1) if std == "sample" else count
        spread = jnp.sqrt(over_group(jnp.sum, result**2, 0.0) / degrees)
        result = result / (jnp.where(alone, 1.0, spread) + eps)
    # By equality: rounding can leave a tiny spread among equal rewards.
    highest = over_group(jnp.max, rewards, -jnp.inf)
    equal = highest == over_group(jnp.min, rewards, jnp.inf)
    return jnp.where(equal & ~alone, 0.0, result)


# -------------------------------------------------------------- policy surrogates, KL


def token_ratio(logps: Array, old_logps: Array, mask: Array) -> Array:
    """GRPO's importance ratio, `exp(logp - old)`, at most 100; `[B, T]`, 1 at masked.

    The log-ratio is capped before `exp`, so that neither the value nor the gradient
    overflows. Above the cap the gradient is 0. Source: arXiv 2402.03300.
    """
    return jnp.exp(jnp.minimum(_log_ratio(logps, old_logps, mask), LOG_RATIO_CAP))


def sequence_ratio(
    logps: Array, old_logps: Array, mask: Array, *, segments: Array | None = None
) -> Array:
    """GSPO's importance ratio in token form; `[B, T]`, 1 at masked.

    With x the mean of `logp - old` over a trajectory's action tokens, each of them has
    the value `exp(min(x, 10))`, and passes that value as gradient to its own `logp` (x
    passes none); above the cap 0. Source: arXiv 2507.18071, GSPO-token.
    """
    keep = _bool(mask)
    log_ratio = _log_ratio(logps, old_logps, keep)
    fixed = jax.lax.stop_gradient(log_ratio)
    spans = _spans(keep, segments, "response")
    lengths = jnp.maximum(_span_sums(keep, spans), 1)
    mean = jnp.take_along_axis(_span_sums(fixed, spans) / lengths, spans, axis=1)
    own = log_ratio - fixed  # value 0, gradient 1
    return jnp.exp(jnp.minimum(own + _masked(keep, mean), SEQUENCE_LOG_RATIO_CAP))


def clipped_surrogate(
    ratio: Array, advantages: Array, mask: Array, clip_low: float, clip_high: float
) -> tuple[Array, Array]:
    """Policy loss per token, `-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`.

    rho = `ratio`, `[B, T]`, is a `token_ratio` or a `sequence_ratio`. Returns the loss,
    `[B, T]`, and where the clipped term decided it, `[B, T]` bool.
    Source: arXiv 1707.06347.
    """
    keep = _bool(mask)
    gain = jax.lax.stop_gradient(_masked(keep, _per_token(advantages)))
    free = -gain * ratio
    clipped = -gain * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return _masked(keep, jnp.maximum(free, clipped)), keep & (clipped > free)


def kl_penalty(logps: Array, ref_logps: Array, mask: Array) -> Array:
    """k3 estimate of KL(policy || reference), `exp(u) - u - 1`, `u = ref - logp`.

    u is limited to +-20 first, so that it stays finite. A value above 10 counts 10 and
    passes no gradient. Returns `[B, T]`. Source: arXiv 2402.03300.
    """
    u = -_log_ratio(logps, ref_logps, mask)
    u = jnp.clip(u, -KL_EXPONENT_CAP, KL_EXPONENT_CAP)
    return jnp.minimum(jnp.expm1(u) - u, KL_CAP)


def action_ids(mask: Array, segments: Array | None = None) -> Array:
    """Numbers the actions of each row 1, 2, ...; `[B, T]` int32, 0 outside actions.

    An action is a run of ones in `mask`, cut where `segments` changes.
    """
    return _spans(_bool(mask), segments, "action")


def _spans(keep: Array, segments: Array | None, gate: str) -> Array:
    """Index in 0..T of the span of each token, `[B, T]`; 0 is no span."""
    _check("gate", gate, GATES)
    rows, tokens = keep.shape
    if gate == "token":  # spans of one token: open exactly where likelihood was lost
        return jnp.broadcast_to(jnp.arange(1, tokens + 1), keep.shape)
    if segments is None:
        segments = jnp.zeros_like(keep)
    first = jnp.ones((rows, 1), bool)
    start = jnp.concatenate([first, segments[:, 1:] != segments[:, :-1]], axis=1)
    if gate == "response":
        return jnp.cumsum(start, axis=1, dtype=jnp.int32)
    start |= jnp.concatenate([first, ~keep[:, :-1]], axis=1)
    return jnp.where(keep, jnp.cumsum(start & keep, axis=1, dtype=jnp.int32), 0)


def _span_sums(values: Array, spans: Array) -> Array:
    """Sums of `values [B, T]` over each span, `[B, T + 1]`; of bools, counts.

    Added up token by token, not as differences of a running sum: a sum is the same bit
    for bit whatever else the row or the batch holds, so a gate can't depend on how a
    batch is packed or split.
    """
    values = values.astype(jnp.int32) if values.dtype == bool else values
    size = values.shape[1] + 1
    row = jax.vmap(lambda v, s: jax.ops.segment_sum(v, s, num_segments=size))
    return row(values, spans)


# ----------------------------------------------------------------------------- LLDS


def likelihood_drop(logps: Array, old_logps: Array, mask: Array) -> Array:
    """`d = old - logp`, `[B, T]`: positive where a token lost likelihood."""
    return -_log_ratio(logps, old_logps, mask)


def displacement(new_logps: Array, old_logps: Array, mask: Array) -> Array:
    """The paper's LLD measure, `new - old`, `[B, T]`: negative is a loss."""
    return jax.lax.stop_gradient(_log_ratio(new_logps, old_logps, mask))


def answer_weight(
    schedule: float | str, valid_searches: Array | float | None = None
) -> Array:
    """beta of LLDS-MA, the share of the penalty that answer tokens keep; scalar.

    `schedule` is a constant; 'paper', `min(V / 2, 1)`; or 'authors' (their code),
    `clip(V - 1, 0, 1)`, with V = `valid_searches`, the batch's mean number of valid
    searches a trajectory. ValueError: an unknown schedule, or one that lacks V.
    """
    if not isinstance(schedule, str):
        return _f32(schedule)
    _check("schedule", schedule, ANSWER_SCHEDULES)
    if valid_searches is None:
        raise ValueError(f"valid_searches=None: schedule={schedule!r} needs a number")
    searches = _f32(valid_searches)
    if schedule == "paper":
        return jnp.minimum(searches / 2.0, 1.0)
    return jnp.clip(searches - 1.0, 0.0, 1.0)


def llds_penalty(
    logps: Array,
    old_logps: Array,
    advantages: Array,
    mask: Array,
    *,
    gate: str = "action",
    preserve: str = "nonnegative",
    segments: Array | None = None,
    answer_mask: Array | None = None,
    answer_weight: Array | float = 1.0,
) -> Array:
    """LLDS per token: `max(0, old - logp)` where likelihood is to be preserved.

    A token counts if its advantage is at least 0 (0 included: groups that are all
    right or all wrong take part) and the gate of its span is open: the sum of
    `old - logp` over all action tokens of the span is above 0. A gate has no gradient.
    Where `logp == old`, value and gradient are 0.

    Args:
      logps, old_logps, mask: `[B, T]`.
      advantages: `[B]` or `[B, T]`.
      gate: a span is one action ('action'), one trajectory ('response') or one token
        ('token', which is no gate beyond the hinge itself).
      preserve: 'positive' leaves advantages of 0 out (not in the paper).
      segments: `[B, T]` or None.
      answer_mask: `[B, T]`, 1 on tokens of the final answer; None: there are none.
      answer_weight: beta, the factor of those tokens (LLDS-MA).
    Returns: `[B, T]`, neither normalised nor multiplied by lambda.
    Raises: ValueError: unknown gate or preserve. Source: arXiv 2512.04220.
    """
    keep = _bool(mask)
    drop = likelihood_drop(logps, old_logps, keep)
    spans = _spans(keep, segments, gate)
    preserved = _preserved(keep, advantages, preserve)
    return _hinge(drop, preserved, spans, answer_mask, answer_weight)[0]


def _hinge(drop, preserved, spans, answer_mask, answer_weight) -> tuple[Array, Array]:
    """The penalty `[B, T]` and which spans are open `[B, T + 1]`."""
    gates = _span_sums(jax.lax.stop_gradient(drop), spans) > 0
    active = preserved & jnp.take_along_axis(gates, spans, axis=1)
    # relu, whose gradient at exactly 0 is 0; `maximum` would pass one half.
    penalty = _masked(active, jax.nn.relu(drop))
    if answer_mask is not None:
        penalty *= jnp.where(_bool(answer_mask), _f32(answer_weight), 1.0)
    return penalty, gates


def llds_loss(
    logps: Array,
    old_logps: Array,
    advantages: Array,
    mask: Array,
    *,
    gate: str = "action",
    preserve: str = "nonnegative",
    segments: Array | None = None,
    answer_mask: Array | None = None,
    answer_weight: Array | float = 1.0,
    normalizer: str = "preserved",
) -> Array:
    """Mean of `llds_penalty` over a whole batch: add `lambda * llds_loss` to a loss.

    Arguments are those of `llds_penalty`, and `normalizer`: the mean is over the action
    tokens to be preserved ('preserved', the paper) or over all action tokens ('all',
    the authors' code). Returns a scalar; 0 and gradient 0 without such tokens.
    """
    _check("normalizer", normalizer, NORMALIZERS)
    keep = _bool(mask)
    preserved = _preserved(keep, advantages, preserve)
    drop = likelihood_drop(logps, old_logps, keep)
    spans = _spans(keep, segments, gate)
    penalty, _ = _hinge(drop, preserved, spans, answer_mask, answer_weight)
    counted = preserved if normalizer == "preserved" else keep
    return jnp.sum(penalty) / jnp.maximum(jnp.sum(counted), 1)


# --------------------------------------------------------------- weights, objective


class Weights(NamedTuple):
    """Weights of the terms, each `[B, T]` float32; `tokens`: of KL and entropy."""

    policy: Array
    llds: Array
    tokens: Array


def weights(
    mask: Array,
    advantages: Array,
    config: LossConfig,
    *,
    segments: Array | None = None,
    micro_ids: Array | None = None,
) -> Weights:
    """The normalisers of the loss as weights, from a whole optimizer batch.

    Called before the batch is split, and split with it by rows: each term of the loss
    is then a plain weighted sum, and losses and gradients of micro-batches add up. A
    weight is 1 / (tokens its mean is over); GSPO's policy term is a mean over the
    tokens of a trajectory, then over trajectories that have an action token. With
    average='microbatch' means are taken inside micro-batches, then over those that have
    an action token. Without action tokens all weights are 0. Coefficients are left out.

    Args: `micro_ids` is `[B]` int in 0..B-1, the micro-batch of each row; needed, and
      used, only with average='microbatch' (ValueError). Others: see `llds_penalty`.
    """
    keep = _bool(mask)
    rows = keep.shape[0]
    if config.average == "global":
        micro_ids = jnp.zeros(rows, jnp.int32)
    elif micro_ids is None:
        raise ValueError("micro_ids=None: average='microbatch' needs [B] integers")
    preserved = _preserved(keep, advantages, config.llds_preserve)

    def micro_counts(chosen):  # chosen in each micro-batch, [B]; integers, so exact
        count = jnp.sum(chosen, axis=1, dtype=jnp.int32)
        return jax.ops.segment_sum(count, micro_ids, num_segments=rows)

    micros = _f32(jnp.maximum(jnp.sum(micro_counts(keep) > 0), 1))

    def inverse(chosen, counted):
        count = jnp.maximum(micro_counts(counted)[micro_ids][:, None], 1)
        return _masked(chosen, 1.0 / (count * micros))

    tokens = policy = inverse(keep, keep)
    if config.policy == "gspo":
        spans = _spans(keep, segments, "response")
        lengths = _span_sums(keep, spans)
        own_length = jnp.take_along_axis(lengths, spans, axis=1)
        policy = inverse(keep, lengths > 0) / jnp.maximum(own_length, 1)
    counted = preserved if config.llds_normalizer == "preserved" else keep
    return Weights(policy=policy, llds=inverse(preserved, counted), tokens=tokens)


def objective(
    logps: Array,
    entropy: Array,
    batch: Mapping[str, Array],
    weights: Weights,
    config: LossConfig,
    *,
    first: Array | bool = False,
) -> tuple[Array, dict[str, Array]]:
    """The loss of one micro-batch: `policy + kl * KL - entropy * H + lambda * LLDS`.

    Args:
      logps, entropy: `[B, T]`, of the policy being trained.
      batch: `mask, advantages, old_logps, ref_logps`, and where there are any
        `segments, answer_mask`, and `anchor_logps` if LLDS has another old policy; as
        scalars, `valid_searches` where beta follows it, `llds_coef` for another lambda.
      weights: this micro-batch's rows of the optimizer batch's `weights`.
      first: True (may be traced) while the parameters have not moved since the
        rollout: `logps` then stand in for `old_logps`, which are not read, so that
        every drop is exactly 0 and no gate opens on rounding noise.
    Returns:
      The scalar loss, and scalar float32 metrics that add up over micro-batches
      (`merge_metrics`): `loss` and its terms without coefficients `loss_policy,
      loss_kl, loss_entropy, loss_llds`; sums over action tokens `tokens` (their
      number), `drop, kl, entropy, ratio, clipped`; in the preserving set the numbers
      of `preserved` and `penalised` tokens, `gates` and `open_gates`; sums of log-probs
      `logp_*` over `tokens_*` tokens of `correct` (A > 0), `zero` and `wrong`
      trajectories; and `ratio_max`, the one that combines by maximum.
    """
    keep = _bool(batch["mask"])
    segments = batch.get("segments")
    advantages = _masked(keep, _per_token(batch["advantages"]))
    logps, entropy = _masked(keep, _f32(logps)), _masked(keep, _f32(entropy))
    fixed = jax.lax.stop_gradient(logps)
    old = jnp.where(first, fixed, batch["old_logps"])

    if config.policy == "gspo":
        ratio = sequence_ratio(logps, old, keep, segments=segments)
    else:
        ratio = token_ratio(logps, old, keep)
    clip = config.clip_low, config.clip_high
    policy, clipped = clipped_surrogate(ratio, advantages, keep, *clip)
    kl = kl_penalty(logps, batch["ref_logps"], keep)
    drop = likelihood_drop(logps, batch.get("anchor_logps", old), keep)
    preserved = _preserved(keep, advantages, config.llds_preserve)
    spans = _spans(keep, segments, config.llds_gate)
    beta = answer_weight(config.llds_answer, batch.get("valid_searches"))
    penalty, opened = _hinge(drop, preserved, spans, batch.get("answer_mask"), beta)

    loss_policy = jnp.sum(weights.policy * policy)
    loss_kl = jnp.sum(weights.tokens * kl)
    loss_entropy = jnp.sum(weights.tokens * entropy)
    loss_llds = jnp.sum(weights.llds * penalty)
    regulariser = config.kl * loss_kl - config.entropy * loss_entropy
    coef = batch.get("llds_coef", config.llds_coef)
    loss = loss_policy + regulariser + coef * loss_llds
    gates = _span_sums(preserved, spans) > 0
    metrics = {
        "loss": loss,
        "loss_policy": loss_policy,
        "loss_kl": loss_kl,
        "loss_entropy": loss_entropy,
        "loss_llds": loss_llds,
        "tokens": keep.sum(),
        "drop": drop.sum(),
        "kl": kl.sum(),
        "entropy": entropy.sum(),
        "ratio": _masked(keep, ratio).sum(),
        "ratio_max": _masked(keep, ratio).max(),
        "clipped": clipped.sum(),
        "preserved": preserved.sum(),
        "penalised": (penalty > 0).sum(),
        "gates": gates.sum(),
        "open_gates": (gates & opened).sum(),
    }
    correct, zero, wrong = advantages > 0, advantages == 0, advantages < 0
    for name, sign in (("correct", correct), ("zero", zero), ("wrong", wrong)):
        metrics[f"tokens_{name}"] = (keep & sign).sum()
        metrics[f"logp_{name}"] = _masked(sign, fixed).sum()
    return loss, {k: jax.lax.stop_gradient(_f32(v)) for k, v in metrics.items()}


def merge_metrics(a: Mapping[str, Array], b: Mapping[str, Array]) -> dict[str, Array]:
    """Metrics of two micro-batches as those of both; zeros are neutral."""
    merged = {key: a[key] + b[key] for key in a}
    return merged | {"ratio_max": jnp.maximum(a["ratio_max"], b["ratio_max"])}


def _f32(x: Array | float) -> Array:
    return jnp.asarray(x, jnp.float32)


def _bool(mask: Array) -> Array:
    return jnp.asarray(mask) != 0


def _masked(keep: Array, values: Array) -> Array:
    return jnp.where(keep, values, 0.0)


def _per_token(advantages: Array) -> Array:  # [B] as [B, 1], which broadcasts
    advantages = _f32(advantages)
    return advantages[:, None] if advantages.ndim == 1 else advantages


def _log_ratio(logps: Array, other: Array, mask: Array) -> Array:
    """`logps - other` where `mask`, else 0; the gradient is that of `logps`."""
    return _masked(_bool(mask), _f32(logps) - jax.lax.stop_gradient(_f32(other)))


def _preserved(keep: Array, advantages: Array, preserve: str) -> Array:
    _check("preserve", preserve, PRESERVED)
    gain = _per_token(advantages)
    return keep & (gain > 0 if preserve == "positive" else gain >= 0)
