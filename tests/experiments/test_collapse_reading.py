"""Raw files of the collapse experiment: what is read, and what is an error."""

import math

import numpy as np
import pytest
from collapse_runs import write_run

from experiments.collapse import reading

NAN = math.nan


def test_runs_are_read_by_setting_and_seed(tmp_path):
    write_run(tmp_path, "half_lr-12", [0.5, NAN], final=(0.5, 0.25))
    write_run(tmp_path, "grpo-0", [])
    runs = reading.read_runs(tmp_path)
    assert set(runs) == {("half_lr", 12), ("grpo", 0)}
    run = runs["half_lr", 12]
    assert set(run) == {*reading.COLUMNS, "extra"}
    np.testing.assert_array_equal(run["step"], [0, 1, 2])
    np.testing.assert_array_equal(run["reward"], [0.5, NAN, NAN])
    np.testing.assert_array_equal(run["sampled"], [NAN, NAN, 0.25])
    assert all(values.shape == (0,) for values in runs["grpo", 0].values())


def test_a_line_cut_short_is_an_error(tmp_path):
    path = write_run(tmp_path, "grpo-0", [0.5, 0.25])
    path.write_text(path.read_text() + "2,0.5,-\n")
    with pytest.raises(ValueError, match=r"grpo-0.csv, line 4: 3 cells; .* has 31"):
        reading.read_runs(tmp_path)


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
        reading.read_runs(tmp_path)


def test_errors_name_an_empty_file_a_wrong_name_and_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match="no <setting>-<seed>.csv in this folder"):
        reading.read_runs(tmp_path)
    (tmp_path / "grpo-0.csv").touch()
    with pytest.raises(ValueError, match=r"grpo-0.csv: no column step, reward, .*led"):
        reading.read_runs(tmp_path)
    (tmp_path / "grpo-0.csv").rename(tmp_path / "grpo-x.csv")
    with pytest.raises(ValueError, match=r"grpo-x.csv: the name is not"):
        reading.read_runs(tmp_path)
