"""Losses: cases worked by hand and invariants; test_losses_golden.py has the rest."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lld_jax import losses
from lld_jax.losses import LossConfig

# ------------------------------------------------------------------------- advantages


def test_interleaved_groups():
    rewards = np.array([1, 1, 0, 0, 1, 0], np.float32)
    ids = np.array([1, 2, 1, 2, 1, 2])
    signs = np.array([1, 2, -2, -1, 1, -1])
    for std, unit in (
        ("sample", 0.57735),
        ("population", 0.57735 * 1.22474),
        ("none", 1 / 3),
    ):
        actual = losses.group_advantages(rewards, ids, std=std)
        np.testing.assert_allclose(actual, signs * unit, atol=1e-5)


def test_uneven_groups_and_a_group_of_one():
    ids = np.array([7, 7, -3])
    for lone in (5.0, 9.0, np.nan):
        actual = losses.group_advantages(np.array([1.0, 3.0, lone]), ids)
        np.testing.assert_allclose(actual[:2], [-0.70711, 0.70711], atol=1e-5)
        np.testing.assert_allclose(actual[2], lone, rtol=2e-6)
    plain = losses.group_advantages(np.array([1.0, 3.0, 5.0]), ids, std="none")
    np.testing.assert_array_equal(plain, [-1.0, 1.0, 5.0])


def test_equal_rewards_are_exactly_zero():
    for reward in (0.1, 1 / 3, 1e-7, -123.456, 1e20):
        for std in ("sample", "population", "none"):
            rewards = np.full(7, reward, np.float32)
            actual = losses.group_advantages(rewards, np.zeros(7, int), std=std)
            np.testing.assert_array_equal(actual, np.zeros(7))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=9, max_size=9),
    st.permutations(range(9)),
)
def test_advantages_follow_a_permutation(rows, order):
    ids, rewards = np.array(rows).T
    rewards = rewards.astype(np.float32) / 4  # quarters: group sums are exact
    names = np.array([2**31 - 1, -5, 40, 0])[ids]
    order = np.array(order)
    f = jax.jit(losses.group_advantages)
    actual = np.asarray(f(rewards, names))
    moved = f(rewards[order], names[order])
    np.testing.assert_allclose(moved, actual[order], rtol=1e-6, atol=1e-6)
    for group in set(ids):
        own = rewards[ids == group]
        if len(own) > 1:
            expected = (own - own.mean()) / (own.std(ddof=1) + 1e-6)
            np.testing.assert_allclose(actual[ids == group], expected, atol=2e-5)


# ----------------------------------------------------------------- overflow, surrogate


def surrogate_mean(new, advantage, mask):
    ratio = losses.token_ratio(new, np.zeros((1, 2)), mask)
    loss, _ = losses.clipped_surrogate(ratio, np.array([advantage]), mask, 0.2, 0.2)
    return jnp.sum(loss) / jnp.sum(mask), loss


def test_overflow_reaches_neither_value_nor_gradient():
    new = jnp.array([[0.0, 90.0]])
    grad = jax.value_and_grad(surrogate_mean, has_aux=True)
    (loss, _), slope = grad(new, 1.0, np.array([[1, 0]]))
    np.testing.assert_allclose(loss, -1, rtol=1e-6)
    np.testing.assert_allclose(slope, [[-1, 0]], rtol=1e-6)

    (loss, each), slope = grad(new, 1.0, np.array([[1, 1]]))
    np.testing.assert_allclose(each, [[-1, -1.2]], rtol=1e-6)
    np.testing.assert_allclose(loss, -1.1, rtol=1e-6)
    np.testing.assert_allclose(slope, [[-0.5, 0]], rtol=1e-6)

    # A negative advantage is not clipped from above: the ratio counts 100 at most.
    (loss, each), slope = grad(new, -1.0, np.array([[1, 1]]))
    np.testing.assert_allclose(each, [[1, 100]], rtol=1e-5)
    np.testing.assert_allclose(slope, [[0.5, 0]], rtol=1e-6)


@pytest.mark.parametrize("gap", [100.0, -100.0, 1e30])
def test_kl_far_away_counts_ten_and_has_no_gradient(gap):
    one = np.ones((1, 1))
    value, slope = jax.value_and_grad(
        lambda x: losses.kl_penalty(x, x * 0 + gap, one).sum()
    )(jnp.zeros((1, 1)))
    assert value == 10 and slope == 0


def test_clip_widths_are_separate():
    ratio, mask = np.array([[0.5, 0.75, 1.25, 1.5]]), np.ones((1, 4))
    up, cut_up = losses.clipped_surrogate(ratio, np.ones(1), mask, 0.1, 0.3)
    down, cut_down = losses.clipped_surrogate(ratio, -np.ones(1), mask, 0.1, 0.3)
    np.testing.assert_allclose(up, [[-0.5, -0.75, -1.25, -1.3]], rtol=1e-6)
    np.testing.assert_allclose(down, [[0.9, 0.9, 1.25, 1.5]], rtol=1e-6)
    np.testing.assert_array_equal(cut_up, [[0, 0, 0, 1]])
    np.testing.assert_array_equal(cut_down, [[1, 1, 0, 0]])


# ------------------------------------------------------------------------------- LLDS

#                  action 1  obs  action 2   obs  action 3
LLDS_MASK = np.array([[1, 1, 0, 1, 1, 1, 0, 1]])
LLDS_DROP = np.array([[2.0, -1.0, 9.0, 1.0, 1.0, -3.0, 9.0, 0.5]], np.float32)


@pytest.mark.parametrize(
    "gate, expected",
    [
        ("action", [2, 0, 0, 0, 0, 0, 0, 0.5]),  # sums 1, -1, 0.5
        ("response", [2, 0, 0, 1, 1, 0, 0, 0.5]),  # sum 0.5
        ("token", [2, 0, 0, 1, 1, 0, 0, 0.5]),
    ],
)
def test_gates(gate, expected):
    args = np.zeros((1, 8)), LLDS_DROP
    penalty = losses.llds_penalty(*args, np.zeros(1), LLDS_MASK, gate=gate)
    np.testing.assert_array_equal(penalty, [expected])
    worse = LLDS_DROP.copy()
    worse[0, 5] = -4  # now the trajectory's sum is below 0
    total_drop = losses.llds_penalty(
        args[0], worse, np.zeros(1), LLDS_MASK, gate="response"
    )
    assert not total_drop.any()
    assert not losses.llds_penalty(*args, -np.ones(1), LLDS_MASK, gate=gate).any()


def test_touching_actions_are_cut_by_segments():
    mask, segments = np.ones((1, 4)), np.array([[1, 1, 2, 2]])
    np.testing.assert_array_equal(losses.action_ids(mask), [[1, 1, 1, 1]])
    np.testing.assert_array_equal(losses.action_ids(mask, segments), [[1, 1, 2, 2]])
    drop = np.array([[1.0, -2.0, 3.0, 0.0]])
    for gate in ("action", "response"):
        penalty = losses.llds_penalty(
            0 * drop, drop, np.ones(1), mask, gate=gate, segments=segments
        )
        np.testing.assert_array_equal(penalty, [[0, 0, 3, 0]])


def test_normalizers_and_answer_weight():
    logps, advantages = np.zeros((2, 8)), np.array([1.0, -1.0])
    old, mask = np.repeat(LLDS_DROP, 2, axis=0), np.repeat(LLDS_MASK, 2, axis=0)
    answer = np.zeros((2, 8), int)
    answer[:, 7] = 1
    for normalizer, count in (("preserved", 6), ("all", 12)):
        for beta, cost in ((1.0, 2.5), (0.5, 2.25), (0.0, 2.0)):
            loss = losses.llds_loss(
                logps,
                old,
                advantages,
                mask,
                answer_mask=answer,
                answer_weight=beta,
                normalizer=normalizer,
            )
            np.testing.assert_allclose(loss, cost / count, rtol=1e-6)
    default = losses.llds_loss(logps, old, advantages, mask)
    np.testing.assert_allclose(default, 2.5 / 6, rtol=1e-6)


def test_only_positive_advantages_may_be_preserved():
    logps, old = np.zeros((3, 8)), np.repeat(LLDS_DROP, 3, axis=0)
    mask, advantages = np.repeat(LLDS_MASK, 3, axis=0), np.array([1.0, 0.0, -1.0])
    args = logps, old, advantages, mask
    both = losses.llds_penalty(*args)
    positive = losses.llds_penalty(*args, preserve="positive")
    assert both[0].any() and both[1].any() and not both[2].any()
    np.testing.assert_array_equal(positive[0], both[0])
    assert not positive[1:].any()
    for normalizer, count in (("preserved", 6), ("all", 18)):
        loss = losses.llds_loss(*args, preserve="positive", normalizer=normalizer)
        np.testing.assert_allclose(loss, 2.5 / count, rtol=1e-6)
    with pytest.raises(ValueError, match="preserve='all'.*nonnegative, positive"):
        losses.llds_penalty(*args, preserve="all")


def test_answer_schedules():
    searches = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0])
    paper = losses.answer_weight("paper", searches)
    np.testing.assert_allclose(paper, [0, 0.25, 0.5, 0.75, 1, 1])
    authors = losses.answer_weight("authors", searches)
    np.testing.assert_allclose(authors, [0, 0, 0, 0.5, 1, 1])
    assert losses.answer_weight(0.25) == 0.25
    with pytest.raises(ValueError, match="valid_searches=None"):
        losses.answer_weight("paper")
    with pytest.raises(ValueError, match="schedule='half'"):
        losses.answer_weight("half", 1.0)


def test_drop_and_displacement_have_opposite_signs():
    new, old, mask = np.array([[-2.0, -1.0]]), np.array([[-1.5, -4.0]]), [[1, 0]]
    np.testing.assert_array_equal(losses.likelihood_drop(new, old, mask), [[0.5, 0]])
    np.testing.assert_array_equal(losses.displacement(new, old, mask), [[-0.5, 0]])


# ------------------------------------------------------------------------- invariants

SETTINGS = [
    LossConfig(entropy=0.01, kl=0.1, llds_answer="paper"),
    LossConfig(policy="gspo", entropy=0.01, kl=0.1, llds_gate="response"),
    LossConfig(entropy=0.01, llds_gate="token", llds_normalizer="all"),
]


def random_batch(seed: int, rows: int = 6, tokens: int = 12) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(4, rows, tokens)).astype(np.float32)
    mask = rng.random((rows, tokens)) < 0.7
    mask[rng.integers(rows)] = False  # a row without actions
    return {
        "logps": noise[0] - 3,
        "old_logps": noise[0] - 3 + 0.3 * noise[1],
        "ref_logps": noise[0] - 3 + 0.5 * noise[2],
        "entropy": np.abs(noise[3]),
        "mask": mask.astype(np.int32),
        "answer_mask": (rng.random((rows, tokens)) < 0.2).astype(np.int32),
        "segments": np.ones((rows, tokens), np.int32),
        "advantages": np.repeat(rng.integers(-1, 2, (rows, 1)), tokens, 1).astype(
            np.float32
        ),
        "valid_searches": np.float32(1.5),
    }


def run(batch, w, config, first=False):
    return run_compiled(batch, w, config, first)


@functools.partial(jax.jit, static_argnames="config")
def run_compiled(batch, w, config, first):
    def f(logps, entropy):
        return losses.objective(logps, entropy, batch, w, config, first=first)

    (loss, sums), grads = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(
        batch["logps"], batch["entropy"]
    )
    return loss, grads, sums


@functools.partial(jax.jit, static_argnames="config")
def weigh(batch, config, micro_ids=None):
    mask, advantages = batch["mask"], batch["advantages"]
    segments = batch["segments"]
    return losses.weights(
        mask, advantages, config, segments=segments, micro_ids=micro_ids
    )


def rows_of(tree, index):
    return jax.tree.map(lambda x: x[index] if np.ndim(x) else x, tree)


def assert_same(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
        actual,
        expected,
    )


@pytest.mark.parametrize("config", SETTINGS, ids=["grpo", "gspo", "token"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_values_reach_nothing(config, poison):
    batch = random_batch(0)
    for clean in (batch["logps"], batch["entropy"]):
        assert np.isfinite(clean).all()
    bad = dict(batch)
    for key in ("logps", "entropy", "old_logps", "ref_logps", "advantages"):
        bad[key] = np.where(batch["mask"] == 1, batch[key], np.float32(poison))
        for poisoned in (bad, batch | {key: bad[key]}):
            expected = run(batch, weigh(batch, config), config)
            actual = run(poisoned, weigh(poisoned, config), config)
            jax.tree.map(np.testing.assert_array_equal, actual, expected)
    masked = batch["mask"] == 0
    assert all(not np.asarray(g)[masked].any() for g in actual[1])
    loss = losses.llds_loss(
        bad["logps"], bad["old_logps"], bad["advantages"], bad["mask"]
    )
    assert np.isfinite(loss) and loss > 0


@pytest.mark.parametrize(
    "function",
    [losses.token_ratio, losses.sequence_ratio, losses.kl_penalty]
    + [losses.likelihood_drop, losses.displacement],
)
def test_masked_values_reach_nothing_without_jit(function):
    """Op by op: a compiler may turn `x * mask` into a select, which hides a NaN."""
    mask = np.array([[1, 0, 0]])
    new, old = np.array([[-1.0, np.nan, -1.0]]), np.array([[-2.0, -2.0, np.inf]])
    value, slope = jax.value_and_grad(lambda x: function(x, old, mask).sum())(new)
    assert np.isfinite(value) and np.isfinite(slope).all()
    assert not np.any(slope[:, 1:])


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10**6),
    st.permutations(range(6)),
    st.sampled_from(SETTINGS),
)
def test_split_into_micro_batches_does_not_matter(seed, order, config):
    batch = random_batch(seed)
    w = weigh(batch, config)
    loss, grads, sums = run(batch, w, config)
    order = np.array(order)
    merged, loss_2, grads_2 = None, 0.0, jax.tree.map(np.zeros_like, grads)
    for rows in (order[:1], order[1:3], order[3:]):
        # Filled up with rows of no action, so that every part has one shape.
        index = np.resize(rows, 6)
        part = rows_of(batch, index)
        part["mask"] = part["mask"] * (np.arange(6) < len(rows))[:, None]
        piece = run(part, rows_of(w, index), config)
        loss_2 += piece[0]
        for whole, g in zip(grads_2, piece[1], strict=True):
            whole[rows] = g[: len(rows)]
        merged = losses.merge_metrics(merged, piece[2]) if merged else piece[2]
    assert_same((loss_2, merged), (loss, sums))
    # Row by row the same numbers, bit for bit: so the same gates.
    jax.tree.map(np.testing.assert_array_equal, grads_2, grads)


@pytest.mark.parametrize("alone", SETTINGS, ids=["grpo", "gspo", "token"])
def test_micro_batch_average_is_the_mean_of_means(alone):
    config = dataclasses.replace(alone, average="microbatch")
    batch = random_batch(3)
    micro_ids = np.array([4, 0, 4, 1, 0, 4])  # 3 micro-batches, of uneven size
    loss = run(batch, weigh(batch, config, micro_ids), alone)[0]
    parts = []
    for micro in (0, 1, 4):
        part = batch | {"mask": batch["mask"] * (micro_ids == micro)[:, None]}
        assert part["mask"].any()
        parts.append(run(part, weigh(part, alone), alone)[0])
    np.testing.assert_allclose(loss, np.mean(parts), rtol=2e-6)


@pytest.mark.parametrize("config", SETTINGS, ids=["grpo", "gspo", "token"])
def test_place_of_padding_does_not_matter(config):
    """Four rows of eight tokens, with the empty rows and columns after or before."""
    batch = random_batch(1)
    batch["mask"][4:] = batch["mask"][:, 8:] = 0

    def move(x):
        return np.roll(x, (2, 4), (0, 1)) if np.ndim(x) else x

    moved = {key: move(x) for key, x in batch.items()}
    loss, grads, sums = run(batch, weigh(batch, config), config)
    loss_2, grads_2, sums_2 = run(moved, weigh(moved, config), config)
    assert_same((loss_2, sums_2), (loss, sums))
    for a, b in zip(grads_2, grads, strict=True):
        np.testing.assert_array_equal(a, move(b))


@pytest.mark.parametrize("config", SETTINGS, ids=["grpo", "gspo", "token"])
def test_packed_trajectories_equal_separate_rows(config):
    batch = random_batch(2)
    batch["mask"][:, 6:] = 0  # six trajectories of six tokens
    batch["mask"][:2, [0, 5]] = 1  # actions touch where rows 0 and 1 will meet

    def pack(x):  # two to a row, and three empty rows
        x = np.asarray(x)[:, :6].reshape(3, 12)
        return np.concatenate([x, np.zeros_like(x)])

    packed = {key: pack(x) if np.ndim(x) else x for key, x in batch.items()}
    packed["segments"] = np.tile(np.repeat([1, 2], 6), (6, 1))
    loss, grads, sums = run(batch, weigh(batch, config), config)
    loss_2, grads_2, sums_2 = run(packed, weigh(packed, config), config)
    assert_same((loss_2, sums_2), (loss, sums))
    for a, b in zip(grads_2, grads, strict=True):
        np.testing.assert_allclose(a, pack(b), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("gate", ["action", "response", "token"])
def test_no_drop_no_loss_no_gradient(gate):
    batch = random_batch(4)

    def f(logps):
        args = batch["logps"], batch["advantages"], batch["mask"]
        return losses.llds_loss(logps, *args, gate=gate)

    loss, slope = jax.value_and_grad(f)(batch["logps"])
    assert loss == 0 and not slope.any()


@pytest.mark.parametrize("config", SETTINGS, ids=["grpo", "gspo", "token"])
def test_before_the_first_update_no_gate_is_open(config):
    batch = random_batch(5)
    batch["old_logps"] = np.full_like(batch["logps"], np.nan)  # must not be read
    w = weigh(batch, config)
    _, (slope, entropy_slope), sums = run(batch, w, config, first=True)
    assert sums["open_gates"] == sums["penalised"] == sums["loss_llds"] == 0
    assert sums["ratio_max"] == 1 and sums["drop"] == 0 and sums["gates"] > 0
    # The plain policy gradient, and that of the KL; nothing of LLDS.
    kl = 1 - np.exp(batch["ref_logps"] - batch["logps"])
    expected = -w.policy * batch["advantages"] + config.kl * w.tokens * kl
    np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(entropy_slope, -config.entropy * w.tokens, rtol=1e-6)


@pytest.mark.parametrize("config", SETTINGS, ids=["grpo", "gspo", "token"])
def test_no_action_tokens_weigh_nothing(config):
    batch = random_batch(8)
    batch["mask"][:] = 0
    w = weigh(batch, config)
    loss, grads, sums = run(batch, w, config)
    assert not any(np.any(x) for x in (*w, loss, *grads, *sums.values()))


def test_weights_are_those_of_llds_loss():
    batch = random_batch(6)
    args = [batch[k] for k in ("logps", "old_logps", "advantages", "mask")]
    penalty = losses.llds_penalty(*args)
    for normalizer, preserve in itertools.product(losses.NORMALIZERS, losses.PRESERVED):
        config = LossConfig(llds_normalizer=normalizer, llds_preserve=preserve)
        w = weigh(batch, config)
        expected = losses.llds_loss(*args, normalizer=normalizer, preserve=preserve)
        assert expected > 0
        # A weight of 0 leaves out what is not preserved.
        np.testing.assert_allclose(jnp.sum(w.llds * penalty), expected, rtol=1e-6)
        sums = run(batch, w, config)[2]
        np.testing.assert_allclose(sums["loss_llds"], expected, rtol=1e-6)
        kept = batch["mask"] * (batch["advantages"] >= (preserve == "positive"))
        assert sums["preserved"] == kept.sum()


# ------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    "field, value, legal",
    [
        ("policy", "ppo", "grpo, gspo"),
        ("average", "mean", "global, microbatch"),
        ("llds_gate", "row", "action, response, token"),
        ("llds_normalizer", "none", "preserved, all"),
        ("llds_preserve", "all", "nonnegative, positive"),
        ("llds_answer", "half", "'paper', 'authors'"),
        ("llds_answer", 1.5, "from 0 to 1"),
        ("clip_low", -0.1, "from 0 to 1"),
        ("clip_high", float("nan"), "from 0"),
        ("kl", float("inf"), "from 0"),
        ("llds_coef", "0.2", "from 0"),
    ],
)
def test_settings_are_checked(field, value, legal):
    with pytest.raises(ValueError) as error:
        LossConfig(**{field: value})
    assert f"{field}={value!r}" in str(error.value) and legal in str(error.value)


def test_arguments_are_checked():
    x = np.ones((2, 3))
    with pytest.raises(ValueError, match="gate='row'.*action, response, token"):
        losses.llds_penalty(x, x, x, x, gate="row")
    with pytest.raises(ValueError, match="normalizer='x'.*preserved, all"):
        losses.llds_loss(x, x, x, x, normalizer="x")
    with pytest.raises(ValueError, match="std='x'.*sample, population, none"):
        losses.group_advantages(x[0], x[0], std="x")
    with pytest.raises(ValueError, match="micro_ids=None"):
        losses.weights(x, x, LossConfig(average="microbatch"))
