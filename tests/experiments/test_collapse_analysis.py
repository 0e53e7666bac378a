"""The definitions of collapse on hand-made runs, the tables, and the figures."""

import json
import math
import statistics
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from collapse_runs import RISE, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import image

from experiments.collapse import analyse, plot

NAN = math.nan


def rewards(*parts):
    return np.array([value for part in parts for value in part])


# Peak, collapse, halving


def test_the_trailing_mean_passes_over_what_was_not_measured():
    means = analyse.trailing_mean(np.array([1.0, NAN, 2.0, 6.0, NAN, 1.0]), 2)
    np.testing.assert_array_equal(means, [NAN, NAN, 1.5, 4.0, NAN, 3.5])


def test_a_run_that_falls_has_peak_collapse_and_halving():
    reward = rewards(RISE, [0.05] * 25)
    assert analyse.peak(reward) == (19, 0.6)
    assert analyse.collapse_step(reward) == 30
    # .6 - .055 n is under .3 at the sixth low step.
    assert analyse.halving_step(reward) == 35


def test_of_two_equal_peaks_the_first_counts():
    assert analyse.peak(rewards([0.5] * 10, [0.1] * 10, [0.5] * 10)) == (9, 0.5)


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
    assert analyse.collapse_step(reward) == step


def test_steps_without_a_reward_neither_end_nor_lengthen_a_collapse():
    gap = rewards(RISE, [0.0] * 10, [NAN] * 3, [0.0] * 9)
    assert analyse.collapse_step(gap) is None
    assert analyse.collapse_step(rewards(gap, [0.0])) == 30
    assert analyse.collapse_step(rewards([NAN], gap, [0.0, NAN])) == 31


def test_a_short_run_has_no_peak_and_no_halving():
    for reward in (rewards([]), rewards([0.5] * 9), rewards([0.5] * 9, [NAN] * 5)):
        assert analyse.peak(reward) is None
        assert analyse.halving_step(reward) is None
    assert analyse.peak(rewards([0.5] * 10)) == (9, 0.5)


def test_a_mean_of_just_half_is_not_a_halving():
    assert analyse.halving_step(rewards(RISE, [0.3] * 40)) is None
    assert analyse.halving_step(rewards(RISE, [0.3] * 9, [0.2])) == 39


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
    assert analyse.collapse_step(reward) == by_the_words(reward)


# Phases


def detector(watch, record):
    """A fake of diagnosis.phases; the log-prob. of correct trajectories says all."""
    logp = record.get("lld/logp_correct", 0.0)
    name = "collapse" if logp < -2 else "decay" if logp < -1 else "healthy"
    count = (watch or 0) + 1
    return count, SimpleNamespace(name=name, evidence=f"line {count}: {logp:g}")


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
    series = analyse.read_runs(tmp_path)["grpo", 0]
    records = []

    def observe(watch, record):
        records.append(record)
        return detector(watch, record)

    assert analyse.phases_of(series, observe) == [
        (0, "healthy", "line 1: -0.5"),
        (1, "healthy", "line 2: 0"),
        (3, "decay", "line 3: -1.5"),
    ]
    assert analyse.warnings_of(series, detector) == [(3, "decay", "line 3: -1.5")]
    assert analyse.warnings_of(series, quiet) == []
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
    runs = analyse.read_runs(tmp_path)
    first = analyse.warnings_of(runs["grpo", 0])[0]
    assert 30 < first[0] <= 36
    assert "reward" in first[2]
    assert analyse.warnings_of(runs["grpo", 1]) == []


# Reading


def test_runs_are_read_by_setting_and_seed(tmp_path):
    write_run(tmp_path, "half_lr-12", [0.5, NAN], final=(0.5, 0.25))
    write_run(tmp_path, "grpo-0", [])
    runs = analyse.read_runs(tmp_path)
    assert set(runs) == {("half_lr", 12), ("grpo", 0)}
    run = runs["half_lr", 12]
    assert set(run) == {*analyse.COLUMNS, "extra"}
    np.testing.assert_array_equal(run["step"], [0, 1, 2])
    np.testing.assert_array_equal(run["reward"], [0.5, NAN, NAN])
    np.testing.assert_array_equal(run["sampled"], [NAN, NAN, 0.25])
    assert all(values.shape == (0,) for values in runs["grpo", 0].values())


def test_a_line_cut_short_is_an_error(tmp_path):
    path = write_run(tmp_path, "grpo-0", [0.5, 0.25])
    path.write_text(path.read_text() + "2,0.5,-\n")
    with pytest.raises(ValueError, match=r"grpo-0.csv, line 4: 3 cells; .* has 31"):
        analyse.read_runs(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reward", "rewards", r"grpo-0.csv: no column reward in the header"),
        ("0.25", "x", r"grpo-0.csv, line 3, column reward: 'x' is not a number"),
        ("\n1,", "\n,", r"grpo-0.csv, line 3, column step: '' is not a number"),
        ("\n1,", "\n0,", r"grpo-0.csv, line 3, column step: 0 is not a whole number a"),
        ("\n1,", "\n1.5,", r"grpo-0.csv, line 3, column step: 1.5 is not a whole"),
    ],
)
def test_errors_name_file_line_and_column(tmp_path, old, new, message):
    path = write_run(tmp_path, "grpo-0", [0.5, 0.25])
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        analyse.read_runs(tmp_path)


def test_errors_name_an_empty_file_a_wrong_name_and_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match="no <setting>-<seed>.csv in this folder"):
        analyse.read_runs(tmp_path)
    (tmp_path / "grpo-0.csv").touch()
    with pytest.raises(ValueError, match=r"grpo-0.csv: no column step, reward, .*led"):
        analyse.read_runs(tmp_path)
    (tmp_path / "grpo-0.csv").rename(tmp_path / "grpo-x.csv")
    with pytest.raises(ValueError, match=r"grpo-x.csv: the name is not"):
        analyse.read_runs(tmp_path)


# Intervals


@pytest.mark.parametrize(
    ("count", "n", "low", "high"),
    [
        (0, 8, 0, 0.32441),  # z^2 / (n + z^2)
        (8, 8, 0.67559, 1),
        (5, 10, 0.23659, 0.76341),
        (2, 6, 0.09677, 0.70001),
    ],
)
def test_shares_have_wilsons_interval(count, n, low, high):
    estimate = analyse.share(count, n)
    assert (estimate.value, estimate.n) == (count / n, n)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=1e-5)


def test_means_have_the_bootstraps_interval():
    estimate = analyse.mean([0.0, 1.0] * 200)
    spread = 1.96 * 0.5 / 20
    assert (estimate.value, estimate.n) == (0.5, 400)
    assert estimate.low == pytest.approx(0.5 - spread, abs=0.004)
    assert estimate.high == pytest.approx(0.5 + spread, abs=0.004)
    # Of two values one half of all draws are mixed: the interval is the range.
    assert analyse.mean([0.2, 0.6]) == analyse.Estimate(0.4, 0.2, 0.6, 2)
    assert analyse.mean([0.1, 0.4, 0.9]) == analyse.mean([0.1, 0.4, 0.9])


def test_too_few_runs_have_no_interval():
    assert analyse.mean([0.5]) == analyse.Estimate(0.5, None, None, 1)
    assert analyse.mean([]) == analyse.Estimate(None, None, None, 0)
    assert analyse.share(0, 0) == analyse.Estimate(None, None, None, 0)


# Runs and tables


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
    run = analyse.judge("grpo", 3, analyse.read_runs(tmp_path)["grpo", 3], detector)
    assert (run.peak_step, run.halving_step, run.warning_step) == (19, 35, warning)
    assert run.lead == lead


@pytest.fixture
def folder(tmp_path):
    """grpo: two collapse, one of them before its end; llds: two live, one goes on."""
    fallen = [*RISE, *[0.05] * 25]
    lives = [*RISE, *[0.5] * 25]
    sinks = [-0.5] * 25 + [-1.5] * 30
    raw = tmp_path / "raw"
    write_run(raw, "grpo-0", fallen, final=(0.0, 0.05), logp_correct=sinks)
    write_run(raw, "grpo-1", [0.1, *fallen], logp_correct=[-1.5, *sinks])
    write_run(raw, "grpo-2", lives, final=(0.7, 0.5))
    write_run(raw, "llds-0", lives, final=(0.8, 0.65), logp_correct=sinks)
    write_run(raw, "llds-1", lives[:40])
    write_run(raw, "llds-2", lives, final=(0.9, 0.7), grad_norm=[2.0] * 55)
    write_run(raw, "kl10-0", [0.1] * 4)
    return raw


def judged(folder, observe=detector):
    runs = analyse.read_runs(folder)
    return [analyse.judge(*key, series, observe) for key, series in runs.items()]


def test_what_one_run_came_to(folder):
    runs = {(run.setting, run.seed): run for run in judged(folder)}
    assert runs["grpo", 0] == analyse.Run(
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


def test_rows_count_what_is_decided(folder):
    grpo = analyse.row_of("grpo", judged(folder))
    assert (grpo.collapsed.value, grpo.collapsed.n, grpo.going) == (2 / 3, 3, 0)
    assert (grpo.greedy.value, grpo.greedy.n) == (0.35, 2)
    assert grpo.peak == pytest.approx(0.6)
    assert (grpo.collapse_step, grpo.warning_step) == (30.5, 12.5)
    assert grpo.leads == {"first half": 1, "before the peak": 1}
    assert (grpo.false_alarms, grpo.living) == (0, 1)
    llds = analyse.row_of("llds", judged(folder))
    assert (llds.collapsed.value, llds.collapsed.n, llds.going) == (0, 2, 1)
    assert (llds.false_alarms, llds.living) == (1, 2)
    assert (llds.collapse_step, llds.warning_step) == (None, None)


def test_differences_are_between_equal_seeds(folder):
    estimate = analyse.paired(judged(folder), "llds")
    # Seed 0: .65 - .05, seed 2: .7 - .5; seed 1 has no end.
    assert (estimate.value, estimate.n) == (pytest.approx(0.4), 2)
    assert (estimate.low, estimate.high) == (pytest.approx(0.2), pytest.approx(0.6))
    assert analyse.paired(judged(folder), "kl10").n == 0


def test_the_tables(folder):
    runs = judged(folder)
    names = analyse.settings_of(runs)
    assert names == ["grpo", "llds", "kl10"]
    lines = analyse.table([analyse.row_of(n, runs) for n in names]).splitlines()
    assert lines[2:] == [
        "| grpo | 2/3 | .208 to .939 | .350 (.000 to .700) | .275 (.050 to .500) "
        "| .600 | 30.5 | 12.5 | 1/2, 1 before the peak | 0/1 |",
        "| llds | 0/2, 1 going | .000 to .658 | .850 (.800 to .900) "
        "| .675 (.650 to .700) | .600 | – | – | – | 1/2 |",
        "| kl10 | 0/0, 1 going | – | – | – | – | – | – | – | – |",
    ]
    assert {line.count("|") for line in lines} == {11}
    differences = {
        name: {what: analyse.paired(runs, name, what) for what in analyse.PAIRED}
        for name in names[1:]
    }
    # Rewards: 25 steps of .5 in place of .05 in one of the two.
    assert analyse.paired_table(differences).splitlines()[2:] == [
        "| llds | 2 | .102 (.000 to .205) | .400 (.200 to .600) |",
        "| kl10 | 0 | – | – |",
    ]
    one = dict.fromkeys(analyse.PAIRED, analyse.Estimate(-0.05, -1.0, 0.004, 3))
    assert analyse.paired_table({"a": one}).endswith("| -.050 (-1.000 to .004) |")


def test_the_command_prints_and_writes_everything(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(analyse, "_detector", lambda: detector)
    out = tmp_path / "summary.json"
    monkeypatch.setattr(sys, "argv", ["analyse", f"--raw={folder}", f"--json={out}"])
    analyse.main()
    assert "| grpo | 2/3 |" in capsys.readouterr().out
    summary = json.loads(out.read_text())
    assert [row["setting"] for row in summary["settings"]] == ["grpo", "llds", "kl10"]
    assert summary["paired"]["llds"]["sampled"]["n"] == 2
    assert len(summary["runs"]) == 7
    assert summary["runs"][0]["lead"] == "first half"


# Figures


def test_the_mean_is_over_at_least_half_of_the_seeds():
    values = np.array([[1.0, 2.0, NAN], [3.0, NAN, NAN], [5.0, NAN, NAN]])
    np.testing.assert_array_equal(plot.mean_of_seeds(values), [3.0, NAN, NAN])
    np.testing.assert_array_equal(plot.mean_of_seeds(values[:2]), [2.0, 2.0, NAN])


def test_shares_of_phases_are_over_the_seeds_still_training(folder):
    runs = analyse.read_runs(folder)
    shares = plot.phase_shares([runs["grpo", 0], runs["llds", 1]], detector)
    decay = list(plot.PHASES).index("decay")
    np.testing.assert_array_equal(
        shares[decay, [0, 24, 25, 39, 40, 54]], [0, 0, 0.5, 0.5, 1, 1]
    )
    assert shares.shape == (3, 55)
    assert shares.sum() == shares[decay].sum()


def test_runs_are_drawn_by_step(tmp_path):
    write_run(tmp_path, "grpo-0", [0.5, NAN, 0.25], final=(0.5, 0.5))
    write_run(tmp_path, "grpo-1", [])
    runs = analyse.read_runs(tmp_path)
    np.testing.assert_array_equal(
        plot.by_step(list(runs.values()), "reward"),
        [[0.5, NAN, 0.25, NAN], [NAN] * 4],
    )


def test_both_figures_are_written_at_the_width_of_a_page(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(analyse, "_detector", lambda: detector)
    out = tmp_path / "collapse.png"
    monkeypatch.setattr(sys, "argv", ["plot", f"--raw={folder}", f"--out={out}"])
    plot.main()
    assert image.imread(out).shape[1] == 1100
    assert image.imread(tmp_path / "settings.png").shape[1] == 1100


def test_phases_and_lines_reach_the_panels(folder, tmp_path, monkeypatch):
    axes = []
    monkeypatch.setattr(plot.plt, "close", lambda figure: axes.extend(figure.axes))
    plot.draw(analyse.read_runs(folder), ["grpo"], tmp_path / "x.png", detector)
    reward = axes[0]
    (picture,) = reward.images
    tints = picture.get_array()[0, :, :3]
    assert tuple(tints[20]) == (1, 1, 1)  # all healthy
    assert len({tuple(tint) for tint in tints}) > 2  # one seed in decay, two
    assert reward.get_title() == "grpo: 2 of 3 collapsed"
    marks = [line.get_xdata() for line in reward.lines if line.get_marker() == "v"]
    assert sorted(float(np.ravel(mark)[0]) for mark in marks) == [30, 31]
    curves = [line for line in reward.lines if line.get_marker() == "None"]
    assert len(curves) == 4
    drawn = dict(zip(curves[0].get_xdata(), curves[0].get_ydata(), strict=True))
    assert drawn[12] == pytest.approx((2 * 0.1 + 3 * 0.6) / 5)
    assert 3 not in drawn  # no five steps yet
    assert axes[list(plot.PANELS).index("grad_norm")].get_yscale() == "log"


def test_a_setting_without_runs_is_an_error(folder, tmp_path):
    with pytest.raises(ValueError, match=r"settings: 'gspo' has no runs; there are"):
        plot.draw(analyse.read_runs(folder), ["gspo"], tmp_path / "x.png", detector)
