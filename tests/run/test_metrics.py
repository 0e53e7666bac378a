"""Metrics: each step stands once, every line is JSON, nothing sick is hidden."""

import io
import json
import math
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tqdm import tqdm

from lld_jax.run import metrics


def _lines(workdir):
    return (workdir / "metrics.jsonl").read_text().splitlines()


def test_a_line_is_on_disk_when_write_returns_and_scalars_become_numbers(tmp_path):
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(
            0,
            {
                "reward/mean": np.float32(0.5),
                "rollout/rows": np.int64(3),
                "loss/total": jnp.float32(-1.25),
                "ok": np.bool_(True),
                "note": "warm",
            },
        )
        assert json.loads(_lines(tmp_path)[0]) == {
            "step": 0,
            "reward/mean": 0.5,
            "rollout/rows": 3,
            "loss/total": -1.25,
            "ok": True,
            "note": "warm",
        }


def test_non_finite_values_stay_visible_in_valid_json(tmp_path):
    record = {"a": float("nan"), "b": np.float32("inf"), "c": -math.inf, "d": 1.0}
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, record)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads(_lines(tmp_path)[0], parse_constant=refuse)
    assert line == {"step": 0, "a": "nan", "b": "inf", "c": "-inf", "d": 1.0}
    (back,) = metrics.read(tmp_path / "metrics.jsonl")
    assert math.isnan(back["a"])
    assert (back["b"], back["c"], back["d"]) == (math.inf, -math.inf, 1.0)


def test_a_step_is_written_once(tmp_path):
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(3, {"x": 1})
        with pytest.raises(ValueError, match="3.*once"):
            writer.write(3, {"x": 2})
        with pytest.raises(ValueError, match="step: 2"):
            writer.write(2, {"x": 2})
    assert len(_lines(tmp_path)) == 1


@pytest.mark.parametrize("value", [np.zeros(2), None, [1.0]])
def test_a_value_that_is_no_scalar_is_named(tmp_path, value):
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(ValueError, match="grad/norm.*not a scalar"):
            writer.write(0, {"grad/norm": value})
    assert _lines(tmp_path) == []


def test_resuming_drops_later_steps_and_a_half_written_line(tmp_path):
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(5):
            writer.write(step, {"x": math.nan if step == 1 else step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x"')  # the run was killed here
    with metrics.MetricsWriter(tmp_path, start_step=3, tensorboard=False) as writer:
        for step in (3, 4):
            writer.write(step, {"x": 10 * step})
    records = metrics.read(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4]
    assert [r["x"] for r in records if r["step"] != 1] == [0, 2, 30, 40]
    assert math.isnan(records[1]["x"])


def test_truncation_leaves_the_old_file_whole_if_it_is_killed(tmp_path, monkeypatch):
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(3):
            writer.write(step, {"x": step})
    before = _lines(tmp_path)

    def killed(src, dst):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        metrics.truncate(tmp_path / "metrics.jsonl", 1)
    assert _lines(tmp_path) == before


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": \n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        metrics.read(path)


def test_tensorboard_gets_the_scalars(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(7, {"reward/mean": 0.25, "note": "text is for the JSONL"})
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"reward/mean" in content and b"note" not in content


def test_an_inactive_writer_touches_nothing(tmp_path):
    with metrics.MetricsWriter(tmp_path / "run", active=False) as writer:
        writer.write(0, {"x": 1})
    assert not (tmp_path / "run").exists()


def test_timers_add_up_and_start_anew(monkeypatch):
    ticks = iter([0.0, 1.5, 2.0, 2.25, 10.0, 14.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(ticks))
    timers = metrics.Timers()
    with timers.phase("rollout"):
        pass
    with timers.phase("rollout"):
        pass
    with pytest.raises(RuntimeError), timers.phase("train"):
        raise RuntimeError
    assert timers.collect() == {"time/rollout": 1.75, "time/train": 4.0}
    assert timers.collect() == {}


def test_compilations_are_counted_while_the_counter_is_open():
    double = jax.jit(lambda x: x * 2 + 1)
    inputs = [np.zeros(n, np.float32) for n in (3, 3, 4)]
    with metrics.CompileCounter() as counter:
        counts = []
        for x in inputs:
            double(x)
            counts.append(counter.count)
        assert counter.seconds > 0
    double(np.zeros(5, np.float32))
    assert counts == [1, 1, 2]
    assert counter.count == 2


def test_the_bar_shows_chosen_fields_and_is_silent_without_a_terminal(monkeypatch):
    out = io.StringIO()
    bar = tqdm(total=3, file=out, mininterval=0, ncols=120)
    metrics.show_progress(bar, {"reward/mean": np.float32(0.5), "loss/total": 9.0})
    bar.close()
    assert "reward=0.5" in out.getvalue() and "loss" not in out.getvalue()
    assert "1/3" in out.getvalue()

    quiet = io.StringIO()
    monkeypatch.setattr(sys, "stderr", quiet)
    bar = metrics.progress_bar(3, start=1)
    metrics.show_progress(bar, {"reward/mean": 0.5})
    bar.close()
    assert quiet.getvalue() == ""
