"""The one-step study: its arithmetic, its updates and its command."""

import copy
import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny

from experiments.displacement import __main__ as command
from experiments.displacement import plot, study, table
from lld_jax.config import ConfigError
from lld_jax.protocol.trajectory import new_trajectory
from lld_jax.training import update
from lld_jax.training.batch import make_batch

LR = 0.01
ALL = {name: study.SETTINGS[name] for name in ("grpo", "positives", "llds")}


def scored(trajectories, draw: int, rewards):
    group = [copy.deepcopy(t) for t in trajectories if t.draw == draw]
    for traj, reward in zip(group, rewards, strict=True):
        traj.reward = reward
    return group


def fitted(agent, **kwargs):
    """The shared agent with the config of a study of 4 groups of 3."""
    config = study.fit_config(agent.config, questions=4, rollouts=3, **kwargs)
    return dataclasses.replace(agent, config=config)


@pytest.fixture(scope="module")
def groups(trajectories):
    return [
        scored(trajectories, draw, rewards)
        for draw, rewards in enumerate(([1, 0, 0], [0, 1, 1]))
    ]


@pytest.fixture(scope="module")
def one_update(agent, params, groups):
    displace = study.make_displace(fitted(agent, lr=LR), ALL)
    return [displace(params, params, group) for group in groups]


# ---------------------------------------------------------------------- arithmetic


def test_mean_over_responses_and_over_tokens():
    moved = np.array(
        [[9, 1, -3, math.nan], [math.nan, 0.5, 0, 0], [7, 2, 2, 2]], np.float32
    )
    mask = np.array([[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1]])
    right = np.array([True, True, False])
    assert study.mean_displacement(moved, mask, right) == (-0.75, -0.5)
    assert study.mean_displacement(moved, mask, ~right) == (6.0, 2.0)
    assert study.mean_displacement(moved, mask, right & ~right) == (0.0, 0.0)


def answer(draw: int, reward: float, ids, mask):
    traj = new_trajectory(draw, 0, "q", ("a",), ())
    traj.ids, traj.mask, traj.reward = list(ids), list(mask), reward
    return traj


def test_groups_of_equal_reward_are_dropped_and_counted():
    rewards = {3: [1, 1], 5: [0, 1], 4: [0, 0], 6: [1, 0], 7: [0, 0]}
    made = [answer(d, r, [1], [1]) for d, rs in rewards.items() for r in rs]
    kept, dropped = study.mixed_groups(made)
    assert [[t.draw for t in group] for group in kept] == [[5, 5], [6, 6]]
    assert dropped == {"right": 1, "wrong": 2}


def test_the_common_prefix_counts_action_tokens_over_pairs():
    group = [
        answer(0, 1, [8, 1, 2, 9, 3, 4], [0, 1, 1, 0, 1, 1]),
        answer(0, 0, [8, 1, 2, 7, 7, 3], [0, 1, 1, 0, 0, 1]),  # 3: all of it
        answer(0, 0, [8, 5, 2, 9, 3, 4], [0, 1, 1, 0, 1, 1]),  # 0
    ]
    assert study.actions_of(group[0]) == [1, 2, 3, 4]
    assert study.common_prefix(group) == 1.5
    moved = np.zeros((3, 8))
    moved[0, 1:3], moved[1, 1], moved[2, 7] = 0.5, -1.0, 99.0
    record = study.describe(group, {"grpo": moved})
    assert record["correct"] == 1 and record["responses"] == 3
    assert record["tokens_correct"] == 4 and record["tokens_wrong"] == 3.5
    assert record["settings"]["grpo"] == {
        "correct": 1.0,
        "wrong": -0.5,
        "correct_token": 0.25,
        "wrong_token": pytest.approx(-1 / 7, rel=1e-5),
    }


@pytest.mark.parametrize(
    ("rollouts", "micro", "devices", "expected"),
    [(8, 25, 1, 8), (8, 6, 1, 4), (8, 7, 1, 4), (8, 16, 4, 8), (12, 8, 4, 4)],
)
def test_micro_batches_fit_a_group(config, rollouts, micro, devices, expected):
    config.optim.micro_rows, config.mesh.fsdp = micro, devices
    fit = study.fit_config(config, questions=6, rollouts=rollouts)
    assert fit.optim.micro_rows == expected
    assert (fit.rollout.questions, fit.rollout.group) == (6, rollouts)
    assert config.rollout.group == 3  # the argument stays as it is


# ------------------------------------------------------------------------- updates


def test_a_question_moves_the_same_alone_and_after_others(
    agent, params, groups, one_update
):
    before = jax.tree.map(np.array, params)
    alone = study.make_displace(fitted(agent, lr=LR), ALL)(params, params, groups[1])
    for name, moved in one_update[1].items():
        np.testing.assert_array_equal(moved, alone[name])
        assert np.abs(moved).max() > 1e-3
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_only_action_tokens_move(groups, one_update):
    for group, displacements in zip(groups, one_update, strict=True):
        for moved in displacements.values():
            assert moved.shape == (3, 160)
            for row, traj in zip(moved, group, strict=True):
                mask = np.zeros(160, bool)
                mask[: len(traj.mask)] = traj.mask
                assert not row[~mask].any() and (row[mask] != 0).mean() > 0.9


def test_wrong_responses_count_in_grpo_alone(groups, one_update):
    for displacements in one_update:
        np.testing.assert_array_equal(displacements["grpo"], displacements["llds"])
        assert np.abs(displacements["grpo"] - displacements["positives"]).max() > 1e-3


def test_llds_acts_from_the_second_update_on(agent, params, groups):
    # Without their advantages, correct responses are sure to lose likelihood.
    plain = study.Setting(right=0.0)
    settings = {
        "none": plain,
        "action": dataclasses.replace(plain, llds=True),
        "token": dataclasses.replace(plain, llds=True, gate="token"),
    }
    displace = study.make_displace(fitted(agent, lr=LR), settings, updates=2)
    moved = displace(params, params, groups[1])
    assert moved["none"][1:].sum() < 0
    for a, b in itertools.combinations(moved, 2):
        assert np.abs(moved[a] - moved[b]).max() > 1e-5, (a, b)


@pytest.mark.parametrize("optimizer", study.OPTIMIZERS)
def test_at_rate_0_nothing_moves(agent, params, groups, optimizer):
    still = fitted(agent, lr=0.0, optimizer=optimizer)
    displace = study.make_displace(still, ALL, updates=2, optimizer=optimizer)
    for moved in displace(params, params, groups[0]).values():
        assert not moved.any()


def test_sgd_moves_along_the_gradient(agent, params, groups):
    # The loss on correct responses alone is -A / tokens * S, S their log-likelihood:
    # one step adds rate * |gradient|^2 * tokens / A to S, in first order.
    rate = 1e-3
    plain = copy.deepcopy(agent.config)
    plain.loss.kl = plain.loss.entropy = 0.0
    agent = fitted(dataclasses.replace(agent, config=plain), lr=rate, optimizer="sgd")
    names = ("grpo", "positives", "negatives")
    settings = {name: study.SETTINGS[name] for name in names}
    displace = study.make_displace(agent, settings, optimizer="sgd")
    moved = displace(params, params, groups[0])

    batch, scalars = make_batch(
        groups[0], tokens=160, token_bytes=agent.codec.token_bytes, std="sample"
    )
    advantage = batch["advantages"].max()
    batch["advantages"] = np.maximum(batch["advantages"], 0)
    stacked = {name: x[None] for name, x in batch.items()}
    zeros = np.zeros((1, 3, 160), np.float32)
    stacked |= {"old_logps": zeros, "ref_logps": zeros}
    init, _, update_fn, weigh = update.make_functions(agent)
    state = init(params)
    _, out = update_fn(state, stacked, weigh(stacked), scalars, 0.0, True, 1)
    expected = rate * float(out["norm"]) ** 2 * batch["mask"].sum() / advantage
    assert moved["positives"][0].sum() == pytest.approx(expected, rel=0.03)
    both = moved["positives"] + moved["negatives"]
    assert np.abs(moved["grpo"] - both).max() < 0.03 * np.abs(moved["grpo"]).max()


# ---------------------------------------------------------------------- statistics


def test_wilson_share_of_negatives():
    share = table.share_below_0([-1, -2, -0.5, 0, 1, 2, 3, 4, 5, 6])
    assert share == pytest.approx((0.3, 0.10779, 0.60322), abs=1e-5)


def test_bootstrap_interval_of_the_mean():
    values = np.random.default_rng(0).normal(2, 3, 400)
    estimate = table.mean_interval(values)
    half = 1.96 * values.std() / 20
    expected = (values.mean(), values.mean() - half, values.mean() + half)
    assert estimate == pytest.approx(expected, abs=0.03)
    assert table.mean_interval([0.5]) == (0.5, 0.5, 0.5)


def test_the_table_of_a_study():
    grpo, llds, prefix = (-1.0, 2.0, 5.0), (1.0, 4.0, 7.0), (3, 2, 1)
    results = {
        "questions": [
            {
                "common_prefix": p,
                "settings": {
                    "grpo": {"correct": a, "wrong": -1.0},
                    "llds": {"correct": b, "wrong": 0.0},
                },
            }
            for p, a, b in zip(prefix, grpo, llds, strict=True)
        ]
    }
    _, _, first, second = table.markdown(results).splitlines()
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells[:2] == ["grpo", "+2"] and cells[2].startswith("+2 [")
    assert cells[3].startswith("33% [") and cells[4] == ""
    assert cells[5] == "-1 [-1, -1]" and cells[6].startswith("-1.00 (")
    cells = [cell.strip() for cell in second.strip("|").split("|")]
    assert cells[1] == "+4" and cells[4] == "+2 [+2, +2]"
    assert all(map(math.isnan, table.rank_correlation([1, 1], [1, 2])))


# ------------------------------------------------------------------------- command


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--questions=0", "--questions: '0' is not legal"),
        ("--rollouts=1", "--rollouts: '1' is not legal"),
        ("--updates=x", "--updates: 'x' is not legal"),
        ("--lr=-1", "--lr: '-1' is not legal"),
        ("--lr=nan", "--lr: 'nan' is not legal"),
        ("--optimizer=lion", "--optimizer: invalid choice: 'lion'"),
        ("--settings=grpo,lld", "--settings: 'lld' is not legal; legal are grpo, "),
    ],
)
def test_wrong_flags_are_named(capsys, flag, message):
    with pytest.raises(SystemExit):
        command.parse([flag])
    assert message in capsys.readouterr().err


def test_a_group_that_does_not_fit_the_mesh(config):
    config.mesh.fsdp = 2
    with pytest.raises(ConfigError, match="--rollouts: 3 .* the 2 devices"):
        study.fit_config(config, questions=1, rollouts=3)


@pytest.fixture
def config_file(tmp_path, config):
    return str(tiny.write_config_file(tmp_path / "config.py", config))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--questions=21"], "--questions: 21 .* has 20"),
        (["--questions=2", "--policy=/nowhere"], "--policy: .*/nowhere"),
    ],
)
def test_flags_that_do_not_fit_the_config(config_file, flags, message):
    with pytest.raises(SystemExit, match=message):
        command.main([f"--config={config_file}", "--rollouts=3", *flags])


def test_llds_needs_a_lambda(tmp_path, config):
    config.llds.coef = 0.0
    file = tiny.write_config_file(tmp_path / "config.py", config)
    with pytest.raises(SystemExit, match="--settings: 'llds' needs llds.coef above 0"):
        command.main([f"--config={file}", "--settings=grpo,llds"])


def test_no_mixed_group_is_an_error(config_file, monkeypatch):
    none = SimpleNamespace(sample=lambda *args, **kwargs: ([], {}))
    monkeypatch.setattr(command.agent_lib, "sample", none.sample)
    with pytest.raises(SystemExit, match="--questions: of 2 groups 0 are all right"):
        command.main([f"--config={config_file}", "--rollouts=3", "--questions=2"])


def test_the_command(config_file, policy, tmp_path, capsys):
    flags = [f"--config={config_file}", "--rollouts=3", "--quick", f"--policy={policy}"]
    command.main([*flags, f"--out={tmp_path / 'out'}"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    kept, dropped = results["questions"], results["dropped"]
    assert len(kept) + sum(dropped.values()) == 8 and kept
    for record in kept:
        assert 0 < record["correct"] < record["responses"] == 3
        assert list(record["settings"]) == ["grpo", "positives", "negatives"]
        assert record["hops"] in (1, 2)
    assert (tmp_path / "out" / "table.md").read_text() in capsys.readouterr().out
    plot.draw(results, tmp_path / "out" / "plot.png")
    assert (tmp_path / "out" / "plot.png").stat().st_size > 5000
