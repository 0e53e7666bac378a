"""Intervals and tables of the collapse experiment."""

import json
import sys

import pytest
from collapse_runs import detector, judged, write_raw

from experiments.collapse import analyse, judging


@pytest.fixture
def folder(tmp_path):
    return write_raw(tmp_path / "raw")


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


# Tables


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
    monkeypatch.setattr(judging, "_detector", lambda: detector)
    out = tmp_path / "summary.json"
    monkeypatch.setattr(sys, "argv", ["analyse", f"--raw={folder}", f"--json={out}"])
    analyse.main()
    assert "| grpo | 2/3 |" in capsys.readouterr().out
    summary = json.loads(out.read_text())
    assert [row["setting"] for row in summary["settings"]] == ["grpo", "llds", "kl10"]
    assert summary["paired"]["llds"]["sampled"]["n"] == 2
    assert len(summary["runs"]) == 7
    assert summary["runs"][0]["lead"] == "first half"
