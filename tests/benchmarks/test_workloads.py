"""The works of the benchmarks, and the models that they run on."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import models, workloads
from benchmarks.workloads import Script, make_work

VOCAB = 2048


def test_work_a_has_the_stated_lengths():
    work = make_work("A", vocab=VOCAB)
    assert work.latency == 0
    assert len(work.scripts) == 64
    for i, script in enumerate(work.scripts):
        assert (script.draw, script.sample) == divmod(i, 5)
        assert len(script.prompt) == 200
        assert script.actions == [64] * 3
        assert script.observations == [256] * 2
        assert script.length == 200 + 3 * 64 + 2 * 256


def test_work_b_draws_log_normal_actions():
    work = make_work("B", vocab=VOCAB, trajectories=2000)
    assert work.latency == 0.05
    actions = np.array([script.actions for script in work.scripts])
    assert actions.shape == (2000, 3)
    assert actions.min() >= 1 and actions.max() == 256
    assert np.median(actions) == pytest.approx(48, abs=2)
    inner = np.log(actions[(actions > 1) & (actions < 256)])
    # The cut takes the far right end away (1.8 % at 2.1 sigma).
    assert inner.std() == pytest.approx(0.77, abs=0.03)
    assert all(script.observations == [256] * 2 for script in work.scripts)


def test_work_c_has_the_lengths_of_the_table():
    work = make_work("C", vocab=VOCAB)
    assert work.latency == 0.05
    turns = {row[1:] for row in workloads.real_lengths()}
    for script in work.scripts:
        assert len(script.actions) == len(script.observations) + 1
        mixed = [0] * (len(script.actions) + len(script.observations))
        mixed[::2], mixed[1::2] = script.actions, script.observations
        assert tuple(mixed) in turns
        assert min(mixed) > 0
        assert script.length <= 4096
    firsts = {row[0] for row in workloads.real_lengths()}
    assert {len(script.prompt) for script in work.scripts} <= firsts
    assert len({len(script.actions) for script in work.scripts}) > 1


@pytest.mark.parametrize("name", workloads.NAMES)
def test_a_group_shares_its_prompt_and_groups_differ(name):
    scripts = make_work(name, vocab=VOCAB).scripts
    prompts = {}
    for script in scripts:
        assert prompts.setdefault(script.draw, script.prompt) == script.prompt
        assert all(0 <= token < VOCAB for token in script.prompt)
    assert len(prompts) == 13  # 12 groups of 5, one of 4
    assert [s.sample for s in scripts if s.draw == 12] == [0, 1, 2, 3]
    assert len(set(map(tuple, prompts.values()))) == 13


@pytest.mark.parametrize("name", workloads.NAMES)
def test_the_draw_is_the_same_each_time_and_a_beginning_of_a_larger_one(name):
    work = make_work(name, vocab=VOCAB)
    assert make_work(name, vocab=VOCAB) == work
    few = make_work(name, vocab=VOCAB, trajectories=12)
    assert few.scripts == work.scripts[:12]


@pytest.mark.parametrize(
    "name, first, tokens",
    [
        ("A", [[64, 64, 64], [64, 64, 64]], 12288),
        ("B", [[53, 43, 80], [52, 31, 64]], 12271),
        ("C", [[72, 11], [57, 11]], 6079),
    ],
)
def test_the_draws_stay_what_was_published(name, first, tokens):
    scripts = make_work(name, vocab=VOCAB).scripts
    assert [script.actions for script in scripts[:2]] == first
    assert sum(sum(script.actions) for script in scripts) == tokens


@pytest.mark.parametrize(
    "name, trajectories, message",
    [
        ("D", 64, "work='D'; legal: A, B, C"),
        ("A", 0, "trajectories=0; legal: 1 or more"),
        ("C", 10**6, "trajectories=1000000; work C has 2"),
    ],
)
def test_illegal_works_are_named(name, trajectories, message):
    with pytest.raises(ValueError, match=message):
        make_work(name, vocab=VOCAB, trajectories=trajectories)


def test_observations_are_seeded_by_trajectory_and_turn():
    script = Script(3, 1, [1, 2], [4, 4, 4], [50, 50])
    ids = workloads.observation_ids(script, 0, VOCAB)
    assert len(ids) == 50 and all(0 <= token < VOCAB for token in ids)
    assert ids == workloads.observation_ids(replace(script, prompt=[9]), 0, VOCAB)
    assert ids != workloads.observation_ids(script, 1, VOCAB)
    assert ids != workloads.observation_ids(replace(script, draw=4), 0, VOCAB)
    assert ids != workloads.observation_ids(replace(script, sample=2), 0, VOCAB)


@pytest.mark.parametrize("name", workloads.NAMES)
def test_a_work_comes_back_from_its_file(name, tmp_path):
    work = make_work(name, vocab=151936, trajectories=7)
    workloads.save(work, tmp_path / "work.json")
    assert workloads.load(tmp_path / "work.json") == work


def test_the_table_of_real_lengths_is_plausible():
    rows = workloads.real_lengths()
    assert len(rows) == 125 + 1000 + 1000
    assert all(len(row) >= 2 and len(row) % 2 == 0 for row in rows)
    assert max(map(sum, rows)) <= 4096
    prompts = [row[0] for row in rows]
    actions = [n for row in rows for n in row[1::2]]
    observations = [n for row in rows for n in row[2::2]]
    assert 100 < min(prompts) and max(prompts) < 300
    assert 1 <= min(actions) and max(actions) <= 500  # the limit of those runs
    # Up to 500 tokens of passages and the tags around them.
    assert 300 < min(observations) and max(observations) < 520
    # All but two responses end in an answer, which follows a search.
    assert sum(len(row) == 2 for row in rows) == 2
    assert len(observations) == 2234


def test_the_models_are_the_two_shapes(tmp_path):
    config = json.loads((models.folder("tiny", tmp_path) / "config.json").read_text())
    assert config["vocab_size"] == VOCAB
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="shape='0.5b'; legal: tiny, 0.2b"):
        models.folder("0.5b", tmp_path)
