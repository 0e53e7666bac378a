"""NTHR: wrong answers are pushed down less where that would push right ones down too.

A rival of LLDS (arXiv 2505.18830). A token of a wrong answer is measured by its
negative token hidden reward: the sum over the tokens of the group's right answers of
the inner product of hidden states times that of prediction errors (one-hot minus
probabilities).
Since the gradient of a log-prob with respect to the head is the outer product of these
two, that sum is a derivative: of the token's log-prob, when the head moves the way that
makes the right answers likelier. So neither the errors `[B, T, V]` nor pairs of tokens
are ever there.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def nthr_advantages(
    logps_of: Callable[[Array], Array],
    head: Array,
    advantages: Array,
    mask: Array,
    groups: Array,
    *,
    number: int,
) -> Array:
    """Advantages `[B, T]` with those of influential tokens of wrong answers reduced.

    In a group with a share rho of right answers, the tokens whose hidden reward is
    above tau keep `2 |rho - 1/2|` of their negative advantage; tau is the least mean
    hidden reward of a right answer's own tokens.

    Args:
      logps_of: head -> logps `[B, T]`, the hidden states fixed.
      head: `[V, D]`.
      advantages, mask: `[B, T]`; right answers have advantages above 0.
      groups: `[B]`, which of the `number` groups a row belongs to.
    """
    keep = jnp.asarray(mask) != 0
    right, wrong = keep & (advantages > 0), keep & (advantages < 0)

    def factor(group):
        mine = (groups == group)[:, None]
        chosen = right & mine
        towards = jax.grad(lambda h: jnp.where(chosen, logps_of(h), 0.0).sum())(head)
        _, reward = jax.jvp(logps_of, (head,), (towards,))
        tokens = chosen.sum(1)
        own = jnp.where(chosen, reward, 0.0).sum(1) / jnp.maximum(tokens, 1)
        tau = jnp.where(tokens > 0, own, jnp.inf).min()
        share = (tokens > 0).sum() / jnp.maximum(mine.sum(), 1)
        heavy = wrong & mine & (reward > tau)
        return jnp.where(heavy, 2 * jnp.abs(share - 0.5), 1.0)

    factors = jax.lax.map(factor, jnp.arange(number))
    return advantages * factors.prod(0)
