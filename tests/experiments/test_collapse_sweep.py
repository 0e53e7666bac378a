"""Dose and effect: which runs count as a dose of LLDS, and where they are drawn."""

import sys

import pytest
from collapse_runs import RISE, write_run
from matplotlib import image

from experiments.collapse import reading, sweep


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path, "grpo-0", RISE, final=(0.1, 0.1))
    for name, dose in (
        ("llds-0", 0.2),
        ("llds_preserved_1-0", 1.0),
        ("llds_all_1-0", 0.3),
        ("llds_all_1-1", 0.5),
        ("llds_response-0", 0.2),  # another gate: no dose
        ("llds_half_lr-0", 0.2),
    ):
        final = (0.5, 0.25) if name != "llds_all_1-1" else (0.7, 0.75)
        write_run(tmp_path, name, RISE, final=final, effective_lambda=[dose] * 30)
    write_run(tmp_path, "llds_all_2-0", RISE, effective_lambda=[1.0] * 30)  # goes on
    return tmp_path


def test_a_dose_changes_lambda_or_normalizer_alone(folder):
    found = sweep.doses(reading.read_runs(folder))
    seen = {
        name: {coef: [dose for dose, _ in runs] for coef, runs in mine.items()}
        for name, mine in found.items()
    }
    assert seen["preserved"] == {0.2: [pytest.approx(0.2)], 1.0: [1.0]}
    assert seen["all"] == {1.0: pytest.approx([0.3, 0.5])}


def test_means_lie_at_the_effective_lambda(folder, tmp_path, monkeypatch):
    axes = []
    monkeypatch.setattr(sweep.plt, "close", lambda figure: axes.extend(figure.axes))
    out = tmp_path / "sweep.png"
    monkeypatch.setattr(sys, "argv", ["sweep", f"--raw={folder}", f"--out={out}"])
    sweep.main()
    assert image.imread(out).shape[1] == 1100
    lines = {line.get_label(): line for line in axes[1].lines}
    assert list(lines["normalizer=preserved"].get_xdata()) == pytest.approx([0.2, 1])
    assert lines["normalizer=all"].get_xdata() == pytest.approx([(0.3 * 0.5) ** 0.5])
    assert lines["normalizer=all"].get_ydata() == pytest.approx([0.5])
    assert lines["plain GRPO"].get_ydata() == pytest.approx([0.1, 0.1])
