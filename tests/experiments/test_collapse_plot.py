"""The figures of the collapse experiment."""

import math
import sys

import numpy as np
import pytest
from collapse_runs import detector, write_raw, write_run
from matplotlib import image

from experiments.collapse import judging, plot, reading

NAN = math.nan


@pytest.fixture
def folder(tmp_path):
    return write_raw(tmp_path / "raw")


def test_the_mean_is_over_at_least_half_of_the_seeds():
    values = np.array([[1.0, 2.0, NAN], [3.0, NAN, NAN], [5.0, NAN, NAN]])
    np.testing.assert_array_equal(plot.mean_of_seeds(values), [3.0, NAN, NAN])
    np.testing.assert_array_equal(plot.mean_of_seeds(values[:2]), [2.0, 2.0, NAN])


def test_shares_of_phases_are_over_the_seeds_still_training(folder):
    runs = reading.read_runs(folder)
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
    runs = reading.read_runs(tmp_path)
    np.testing.assert_array_equal(
        plot.by_step(list(runs.values()), "reward"),
        [[0.5, NAN, 0.25, NAN], [NAN] * 4],
    )


def test_both_figures_are_written_at_the_width_of_a_page(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "_detector", lambda: detector)
    out = tmp_path / "collapse.png"
    monkeypatch.setattr(sys, "argv", ["plot", f"--raw={folder}", f"--out={out}"])
    plot.main()
    assert image.imread(out).shape[1] == 1100
    assert image.imread(tmp_path / "settings.png").shape[1] == 1100


def test_phases_and_lines_reach_the_panels(folder, tmp_path, monkeypatch):
    axes = []
    monkeypatch.setattr(plot.plt, "close", lambda figure: axes.extend(figure.axes))
    plot.draw(reading.read_runs(folder), ["grpo"], tmp_path / "x.png", detector)
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
        plot.draw(reading.read_runs(folder), ["gspo"], tmp_path / "x.png", detector)
