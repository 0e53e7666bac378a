"""The runner of the collapse experiment: its settings, its files, its processes."""

import collections
import csv
import json
import os
import sys

import jax
import numpy as np
import pytest

from experiments.collapse import run, start
from experiments.collapse.config import SETTINGS, get_config
from lld_jax import config as config_lib
from lld_jax.model import hf
from lld_jax.run import metrics


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_is_a_legal_config(setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train", "held_out"):
        path = tmp_path / run.DATA / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / run.DATA / "start").symlink_to(start.SOURCE)
    config = get_config(setting)
    config_lib.check(config, devices=1)
    plain = get_config("grpo")
    changed = set(config_lib.diff(plain, config))
    expected = set(SETTINGS[setting]) | (set() if "grpo" in setting else {"llds.coef"})
    # Values that are the default already do not differ.
    assert changed <= expected
    assert (config.llds.coef > 0) == setting.startswith("llds")
    assert setting == "grpo" or changed


def test_an_unknown_setting_is_named():
    with pytest.raises(config_lib.ConfigError, match="'grpq': legal are grpo, llds"):
        get_config("grpq")
    with pytest.raises(SystemExit):
        run.parse(["--settings=grpo,grpq"])


def test_questions_are_one_hop_names(tmp_path, monkeypatch):
    monkeypatch.setattr(run.questions, "prepare_world", lambda *args, **kwargs: None)
    written = []
    monkeypatch.setattr(start, "write", lambda out: (written.append(out), out.mkdir()))
    run.prepare(tmp_path)
    run.prepare(tmp_path)
    assert written == [tmp_path / "start"]  # once
    lines = {}
    for name in ("train", "held_out", "few"):
        lines[name] = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        rows = [json.loads(x) for x in lines[name]]
        answers = [row["golden_answers"][0] for row in rows]
        assert all(a[0].isupper() and not any(c.isdigit() for c in a) for a in answers)
    assert lines["few"] == lines["train"][:20]
    assert len(lines["train"]) > len(lines["held_out"]) > 80


def test_the_start_is_the_tiny_policy_with_another_habit(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "DEMOS", 400)
    shown = []
    demonstrate = start.make.demonstrate

    def watched(*args, **kwargs):
        shown.extend(demonstrate(*args, **kwargs))
        return shown

    monkeypatch.setattr(start.make, "demonstrate", watched)
    start.write(tmp_path / "start", worlds=1, steps=1)
    counts = collections.Counter(demo.behaviour for demo in shown)
    assert set(counts) == set(start.HABIT) and len(shown) == 400
    for behaviour, share in start.HABIT.items():
        assert counts[behaviour] / 400 == pytest.approx(share, abs=0.08)
    # A whole demonstration fits the rows of the runs.
    assert max(len(d.ids) for d in shown) <= get_config("grpo").rollout.max_tokens
    old, new = (
        hf.load(path, hf.read_config(path))
        for path in (start.SOURCE, tmp_path / "start")
    )
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), old, new)
    assert 0 < max(jax.tree.leaves(moved)) < 1e-3  # one step of Adam at 5e-4


def test_raw_metrics_leave_what_is_missing_empty(tmp_path):
    with metrics.MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"reward/mean": 0.123456, "grad/norm": float("inf")})
        writer.write(1, {"eval/greedy/exact_match": 0.5})
    assert run.write_raw(tmp_path, tmp_path / "raw/grpo-0.csv") == 2
    first, second = csv.DictReader((tmp_path / "raw/grpo-0.csv").open())
    assert first["step"] == "0" and first["reward"] == "0.1235"
    assert first["grad_norm"] == "inf" and first["greedy"] == ""
    assert second["greedy"] == "0.5" and second["reward"] == ""
    assert list(first) == ["step", *run.COLUMNS]
    assert run.write_raw(tmp_path / "none", tmp_path / "raw/llds-0.csv") == 0


def test_runs_go_side_by_side_and_failures_are_told(tmp_path, monkeypatch):
    """A stand-in for the trainer that writes when it ran, and fails for one seed."""
    script = (
        "import sys, time, pathlib\n"
        "setting, seed, workdir = sys.argv[1:4]\n"
        "began = time.monotonic()\n"
        "time.sleep(0.5)\n"
        "cores = __import__('os').sched_getaffinity(0)\n"
        "pathlib.Path(workdir).mkdir()\n"
        "(pathlib.Path(workdir) / 'ran').write_text(\n"
        "    f'{began} {time.monotonic()} {len(cores)}')\n"
        "sys.exit(seed == '1')\n"
    )

    def command(setting, seed, workdir, extra):
        return [sys.executable, "-c", script, setting, str(seed), str(workdir)]

    monkeypatch.setattr(run, "command", command)
    todo = [("grpo", 0), ("llds", 0), ("grpo", 1)]
    ended = list(run.run_all(todo, tmp_path, 2, []))
    assert sorted(ended) == [("grpo", 0, 0), ("grpo", 1, 1), ("llds", 0, 0)]
    times = {}
    for setting, seed in todo:
        text = (tmp_path / f"{setting}-{seed}" / "ran").read_text().split()
        times[setting, seed] = float(text[0]), float(text[1])
        if len(os.sched_getaffinity(0)) >= 2:
            assert text[2] == "1"
    # The first two overlap; the third one waited for a slot.
    assert times["llds", 0][0] < times["grpo", 0][1]
    assert times["grpo", 1][0] > min(times["grpo", 0][1], times["llds", 0][1])


@pytest.mark.parametrize("jobs", ["0", "-1", "two"])
def test_no_job_at_a_time_would_wait_for_ever(jobs):
    with pytest.raises(SystemExit):
        run.parse([f"--jobs={jobs}"])


def test_the_command_names_setting_seed_and_folder(tmp_path):
    line = run.command("kl10", 3, tmp_path, ["--config.steps=2"])
    assert line[1:3] == ["-m", "lld_jax.main"]
    assert line[3].endswith("experiments/collapse/config.py:kl10")
    assert line[4:] == [f"--workdir={tmp_path}", "--config.seed=3", "--config.steps=2"]


def test_what_ended_after_its_runner_gets_its_raw_file(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "prepare", lambda folder: None)
    monkeypatch.setattr(run, "run_all", lambda todo, *_: iter(todo and [1 / 0]))
    workdir = tmp_path / "runs" / "grpo-3"
    with metrics.MetricsWriter(workdir, tensorboard=False) as writer:
        writer.write(0, {"reward/mean": 0.5})
    (workdir / "summary.json").write_text("{}")
    folders = [f"--runs={tmp_path / 'runs'}", f"--raw={tmp_path / 'raw'}"]
    args = run.parse(["--settings=grpo", "--seeds=3", *folders])
    assert run.main(args) == 0
    assert (tmp_path / "raw" / "grpo-3.csv").read_text().splitlines()[1][:5] == "0,0.5"


def test_a_quick_run_keeps_to_folders_of_its_own():
    whole, quick = run.parse([]), run.parse(["--quick"])
    assert (whole.runs, whole.raw) == (run.ROOT / "runs/collapse", run.RAW)
    assert quick.runs == run.ROOT / "runs/collapse_quick"
    assert quick.raw == quick.runs / "raw"
    assert run.parse(["--quick", "--raw=x"]).raw == run.Path("x")
