"""Hidden rewards from a derivative against the sums over pairs of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import one_device

from lld_jax import config as config_lib
from lld_jax.model import logprobs
from lld_jax.training import nthr

B, T, D, V = 6, 9, 5, 16


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    hidden = (rng.normal(size=(B, T, D)) + 1).astype(np.float32)
    head = rng.normal(size=(V, D)).astype(np.float32)
    ids = rng.integers(0, V, (B, T))
    ids[1], ids[5] = ids[0], ids[3]  # wrong answers that say what right ones say
    hidden[[1, 5]] *= 2
    mask = np.zeros((B, T), np.int32)
    mask[:, 2:5] = mask[:, 6:8] = 1
    signs = np.array([1.0, -0.5, -0.5, 2.0, 1.0, -3.0], np.float32)
    return hidden, head, ids, mask, signs[:, None] * np.ones((1, T), np.float32)


def rewards(hidden, head, ids, mask, right):
    """The definition: every token against every token of the right answers."""
    logits = hidden @ head.T
    p = np.asarray(jax.nn.softmax(logits))
    h, e = np.zeros((B, T, D)), np.zeros((B, T, V))
    h[:, 1:] = hidden[:, :-1]  # token t is predicted at t - 1
    e[:, 1:] = np.eye(V)[ids[:, 1:]] - p[:, :-1]
    out = np.zeros((B, T))
    for b in range(B):
        for t in range(1, T):
            for i, k in np.argwhere(right & (mask > 0)):
                out[b, t] += (h[i, k] @ h[b, t]) * (e[i, k] @ e[b, t])
    return out


def test_against_pairs_of_tokens(case):
    hidden, head, ids, mask, advantages = case
    groups = np.array([0, 0, 0, 1, 1, 1])

    def logps_of(head):
        return logprobs.token_logprobs(
            hidden,
            head,
            ids,
            temperature=1.0,
            valid_vocab=V,
            chunk=4,
            layout=one_device(),
        )[0]

    found = nthr.nthr_advantages(
        logps_of, jnp.asarray(head), advantages, mask, jnp.asarray(groups), number=2
    )
    wanted, seen = advantages.copy(), []
    for group, share in ((0, 1 / 3), (1, 2 / 3)):
        rows = groups == group
        right = (advantages > 0) & rows[:, None]
        reward = rewards(hidden, head, ids, mask, right)
        own = [reward[b][mask[b] > 0].mean() for b in np.flatnonzero(right[:, 0])]
        heavy = (reward > min(own)) & rows[:, None] & (advantages < 0) & (mask > 0)
        light = (mask > 0) & (advantages < 0) & rows[:, None] & ~heavy
        seen.append((heavy.sum(), light.sum()))
        wanted[heavy] *= 2 * abs(share - 0.5)
    assert np.all(np.sum(seen, axis=0) > 0), seen  # tokens of both kinds
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_groups_without_contrast_stay_as_they_are(case):
    hidden, head, ids, mask, _ = case
    for advantages in (np.zeros((B, T)), -np.ones((B, T)), np.ones((B, T))):
        found = nthr.nthr_advantages(
            lambda head: jnp.einsum("btd,vd->bt", hidden, head),
            jnp.asarray(head),
            jnp.asarray(advantages, jnp.float32),
            mask,
            jnp.zeros(B, int),
            number=1,
        )
        np.testing.assert_array_equal(found, advantages)


def test_a_micro_batch_must_hold_whole_groups(config):
    config.loss.negatives = "nthr"
    config.optim.micro_rows = 2
    with pytest.raises(config_lib.ConfigError, match="multiple of rollout.group 3"):
        config_lib.check(config, devices=1)
    config.optim.micro_rows, config.optim.packing = 3, True
    with pytest.raises(config_lib.ConfigError, match="'nthr'.*legal with .* is 'all'"):
        config_lib.check(config, devices=1)
    config.optim.packing = False
    config_lib.check(config, devices=1)
