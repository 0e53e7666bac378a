"""Thresholds fitted on some made-up runs and tested on others."""

import json
import sys

import pytest
from collapse_runs import RISE, write_run

from experiments.collapse import fit, reading
from lld_jax.diagnosis.phases import Thresholds


@pytest.fixture
def folder(tmp_path):
    """Runs that fall lose .02 a token from step 18 on, those that live lose .007."""
    raw = tmp_path / "raw"
    falls = [*RISE, *[0.6 - 0.02 * i for i in range(28)], *[0.0] * 30]
    lives = [*RISE, *[0.6] * 58]
    for seed in range(4):
        lost = [0.0] * 18 + [-0.02] * 70
        write_run(raw, f"grpo-{seed}", falls, final=(0.0, 0.0), seen_correct=lost)
        lost = [-0.007] * 88
        write_run(raw, f"half_lr-{seed}", lives, final=(0.6, 0.6), seen_correct=lost)
        # It acts on warnings, and so shows nothing about them.
        write_run(raw, f"roll_back-{seed}", lives, final=(1, 1), seen_correct=lost)
    return raw


def test_the_threshold_that_tells_them_apart_is_found(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(fit, "GRID", {"displaced": (0.006, 0.01, 0.05)})
    out = tmp_path / "thresholds.json"
    arguments = ["fit", "--fit=0,1", f"--raw={folder}", f"--json={out}"]
    monkeypatch.setattr(sys, "argv", arguments)
    fit.main()
    report = json.loads(out.read_text())
    assert report["thresholds"]["displaced"] == 0.01
    assert report["fitted on"] == [0, 1]
    for name in ("fit", "test"):
        assert report[f"{name}, fitted"] == {
            "collapsed": 2,
            "in_time": 2,
            "early": 0,
            "living": 2,
            "false_alarms": 0,
        }
    assert "test seeds, fitted thresholds: 2 of 2 warned in time" in (
        capsys.readouterr().out
    )


def test_false_alarms_weigh_more_than_warnings_in_time(folder):
    runs = {k: v for k, v in reading.read_runs(folder).items() if k[0] != "roll_back"}
    eager = fit.score(fit.judged(runs, Thresholds(displaced=0.006)))
    assert (eager.living, eager.false_alarms) == (4, 4)
    assert eager.value == eager.in_time - 2 * 4 - eager.early
    calm = fit.score(fit.judged(runs, Thresholds(displaced=0.01)))
    assert (calm.in_time, calm.false_alarms, calm.value) == (4, 0, 4)


def test_equals_are_decided_by_the_fewest_changes(folder, monkeypatch):
    default = Thresholds()
    grid = {"entropy": (9.0, default.entropy), "gradient": (9.0, default.gradient)}
    monkeypatch.setattr(fit, "GRID", grid)
    assert next(fit.candidates()) == default
    runs = {k: v for k, v in reading.read_runs(folder).items() if k[0] != "roll_back"}
    assert fit.fit(runs) == default


def test_seeds_are_needed_on_both_sides(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fit", "--fit=0,1,2,3", f"--raw={folder}"])
    with pytest.raises(SystemExit):
        fit.main()
    assert "seeds are needed on both sides" in capsys.readouterr().err


def test_settings_are_chosen_by_name(folder, monkeypatch, capsys):
    arguments = ["fit", f"--raw={folder}", "--settings=grpo,roll_back"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        fit.main()
    assert "--settings: roll_back; legal: some of grpo,half_lr" in (
        capsys.readouterr().err
    )
    monkeypatch.setattr(fit, "GRID", {"displaced": (0.01,)})
    monkeypatch.setattr(sys, "argv", [*arguments[:2], "--settings=grpo"])
    fit.main()
    assert "0 of 0 false alarms" in capsys.readouterr().out
