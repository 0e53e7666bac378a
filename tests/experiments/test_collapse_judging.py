"""The definitions of collapse and of a warning, on hand-made runs."""

import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from collapse_runs import RISE, detector, judged, write_raw, write_run
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.collapse import judging, reading

NAN = math.nan


def rewards(*parts):
    return np.array([value for part in parts for value in part])


# Peak, collapse, halving


def test_the_trailing_mean_passes_over_what_was_not_measured():
    means = judging.trailing_mean(np.array([1.0, NAN, 2.0, 6.0, NAN, 1.0]), 2)
    np.testing.assert_array_equal(means, [NAN, NAN, 1.5, 4.0, NAN, 3.5])


def test_a_run_that_falls_has_peak_collapse_and_halving():
    reward = rewards(RISE, [0.05] * 25)
    assert judging.peak(reward) == (19, 0.6)
    assert judging.collapse_step(reward) == 30
    # .6 - .055 n is under .3 at the sixth low step.
    assert judging.halving_step(reward) == 35


def test_of_two_equal_peaks_the_first_counts():
    assert judging.peak(rewards([0.5] * 10, [0.1] * 10, [0.5] * 10)) == (9, 0.5)


@pytest.mark.parametrize(
    ("reward", "step"),
    [
        (rewards([0.4] * 10, [0.6] * 20, [0.0] * 30), None),  # not twice the start
        (rewards([0.3] * 10, [0.6] * 20, [0.0] * 30), 30),  # just twice the start
        (rewards([0.1, 0.4, 0.4], [0.59] * 20, [0.0] * 30), None),  # three steps
        (rewards([0.1] * 40, [0.6] * 20), None),  # slow at first is not a collapse
        (rewards(RISE, [0.3] * 30), None),  # half of the peak is not under it
        (rewards(RISE, [0.2999] * 30), 30),
        (rewards(RISE, [0.0] * 19), None),  # may still recover
        (rewards(RISE, [0.0] * 19, [0.5], [0.0] * 19), None),  # recovers twice
        (rewards(RISE, [0.0] * 19, [0.5], [0.0] * 20), 50),
        (rewards(RISE, [0.0] * 20, [0.6] * 30), 30),  # recovers too late
        (rewards(RISE, [0.0] * 25, [0.7] * 30), None),  # then a higher peak
        (rewards([0.0] * 60), None),
        (rewards([0.1] * 9), None),
        (rewards([0.1] * 3, [0.9] * 6), None),
        (rewards([]), None),
        (rewards([NAN]), None),
    ],
)
def test_the_step_of_collapse(reward, step):
    assert judging.collapse_step(reward) == step


def test_steps_without_a_reward_neither_end_nor_lengthen_a_collapse():
    gap = rewards(RISE, [0.0] * 10, [NAN] * 3, [0.0] * 9)
    assert judging.collapse_step(gap) is None
    assert judging.collapse_step(rewards(gap, [0.0])) == 30
    assert judging.collapse_step(rewards([NAN], gap, [0.0, NAN])) == 31


def test_a_short_run_has_no_peak_and_no_halving():
    for reward in (rewards([]), rewards([0.5] * 9), rewards([0.5] * 9, [NAN] * 5)):
        assert judging.peak(reward) is None
        assert judging.halving_step(reward) is None
    assert judging.peak(rewards([0.5] * 10)) == (9, 0.5)


def test_a_mean_of_just_half_is_not_a_halving():
    assert judging.halving_step(rewards(RISE, [0.3] * 40)) is None
    assert judging.halving_step(rewards(RISE, [0.3] * 9, [0.2])) == 39


def by_the_words(reward):
    """The definition of collapse, step by step."""
    known = [(i, r) for i, r in enumerate(reward) if not math.isnan(r)]
    means = [
        (statistics.fmean(r for _, r in known[n - 9 : n + 1]), n)
        for n in range(9, len(known))
    ]
    if not means:
        return None
    top = max(mean for mean, _ in means)
    at = min(n for mean, n in means if mean > top - 1e-9)
    if top < 2 * statistics.fmean(r for _, r in known[:3]) - 1e-9:
        return None
    for n in range(at + 1, len(known) - 19):
        if all(r < top / 2 - 1e-9 for _, r in known[n : n + 20]):
            return known[n][0]
    return None


blocks = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.6, NAN]), st.integers(1, 25)),
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(blocks)
def test_the_step_of_collapse_is_that_of_the_words(parts):
    reward = rewards(*([value] * length for value, length in parts))
    assert judging.collapse_step(reward) == by_the_words(reward)


# Phases


def quiet(watch, record):
    return watch, SimpleNamespace(name="stagnation", evidence="")


def test_phases_see_each_training_step_under_the_names_of_metrics(tmp_path):
    write_run(
        tmp_path,
        "grpo-0",
        [0.5, 0.25, NAN, 0.5],
        final=(0.5, 0.25),
        logp_correct=[-0.5, NAN, -9, -1.5],
        grad_norm=[1, 2, 3, 4],
        repeated=[5, 6, 7, 8],
    )
    series = reading.read_runs(tmp_path)["grpo", 0]
    records = []

    def observe(watch, record):
        records.append(record)
        return detector(watch, record)

    assert judging.phases_of(series, observe) == [
        (0, "healthy", "line 1: -0.5"),
        (1, "healthy", "line 2: 0"),
        (3, "decay", "line 3: -1.5"),
    ]
    assert judging.warnings_of(series, detector) == [(3, "decay", "line 3: -1.5")]
    assert judging.warnings_of(series, quiet) == []
    assert records[1] == {
        "step": 1,
        "reward/mean": 0.25,
        "grad/norm": 2.0,
        "rollout/repeated_ngram": 6.0,
    }


def test_the_packages_detector_sees_a_fall_and_no_more(tmp_path):
    quiet = {"grad_norm": [1.0] * 55, "entropy": [0.5] * 55}
    write_run(tmp_path, "grpo-0", [*RISE, *[0.05] * 25], **quiet)
    write_run(tmp_path, "grpo-1", [*RISE, *[0.6] * 25], **quiet)
    runs = reading.read_runs(tmp_path)
    first = judging.warnings_of(runs["grpo", 0])[0]
    assert 30 < first[0] <= 36
    assert "reward" in first[2]
    assert judging.warnings_of(runs["grpo", 1]) == []


# Runs


@pytest.mark.parametrize(
    ("warning", "lead"),
    [
        (18, "before the peak"),
        (19, "first half"),
        (27, "first half"),  # the middle of 19 and 35
        (28, "second half"),
        (35, "second half"),
        (36, "after the halving"),
        (None, "no warning"),
    ],
)
def test_when_a_warning_came(tmp_path, warning, lead):
    logps = [-1.5 if step == warning else -0.5 for step in range(55)]
    write_run(tmp_path, "grpo-3", [*RISE, *[0.05] * 25], logp_correct=logps)
    run = judging.judge("grpo", 3, reading.read_runs(tmp_path)["grpo", 3], detector)
    assert (run.peak_step, run.halving_step, run.warning_step) == (19, 35, warning)
    assert run.lead == lead


def test_what_one_run_came_to(tmp_path):
    found = judged(write_raw(tmp_path / "raw"))
    runs = {(run.setting, run.seed): run for run in found}
    assert runs["grpo", 0] == judging.Run(
        setting="grpo",
        seed=0,
        steps=55,
        ended=True,
        peak_step=19,
        peak=0.6,
        collapse_step=30,
        halving_step=35,
        warning_step=25,
        evidence="line 26: -1.5",
        greedy=0.0,
        sampled=0.05,
        reward=pytest.approx((sum(RISE) + 25 * 0.05) / 55),
    )
    assert (runs["grpo", 1].ended, runs["grpo", 1].sampled) == (False, None)
    assert (runs["grpo", 1].lead, runs["llds", 0].lead) == (
        "before the peak",
        "nothing to warn of",
    )
    living = {key for key, run in runs.items() if run.living}
    assert living == {("grpo", 2), ("llds", 0), ("llds", 2)}
    assert runs["kl10", 0].peak is None
