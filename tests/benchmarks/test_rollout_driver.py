"""The rollout benchmark's driver: its plan, its processes, its report."""

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import models, rollout, workloads
from benchmarks.workloads import make_work

VOCAB = 2048


def test_the_quick_plan_is_a_small_part_of_the_whole():
    args = rollout.parse([])
    whole = rollout.plan(args.shapes, args.works, False, args.seconds)
    assert [(c.shape, c.work) for c in whole] == [
        (shape, work) for shape in ("tiny", "0.2b") for work in "ABC"
    ]
    assert all(c.trajectories == 64 and c.seconds == 600 for c in whole)
    quick = rollout.plan(args.shapes, args.works, True, args.seconds)
    names = [c.shape + c.work for c in quick]
    assert names == ["tinyA", "tinyB", "tinyC", "0.2bB"]
    assert len(args.engines) * sum(case.seconds for case in quick) < 400


def test_the_command_line_names_what_is_legal(capsys):
    assert rollout.parse(["--works=C,A"]).works == ["C", "A"]
    with pytest.raises(SystemExit):
        rollout.parse(["--engines=ours,vllm"])
    assert "legal: some of ours,transformers,tunix" in capsys.readouterr().err


ENGINE = """
import json, sys, time
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if args["--seconds"] == "3.0":
    sys.exit("this engine fails")
if args["--seconds"] == "0.5":
    time.sleep(60)
scripts = json.load(open(args["--work"]))["scripts"]
tokens = sum(sum(script["actions"]) for script in scripts)
vocab = json.load(open(args["--model"] + "/config.json"))["vocab_size"]
detail = {"decoded": 7, "kept": 7, "vocab": vocab, "occupancy": 0.875}
detail |= {"padded": 90, "extended": 30}
json.dump(
    {"trajectories": len(scripts), "tokens": tokens, "seconds": 2.0,
     "row_steps": 2 * tokens, "compilations": 0, "peak_memory_gib": 0.5,
     "complete": True, "detail": detail},
    open(args["--out"], "w"),
)
"""


@pytest.fixture
def fake_engines(tmp_path, monkeypatch):
    (tmp_path / "fake_engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fakes = dict.fromkeys(rollout.MODULES, "fake_engine")
    monkeypatch.setattr(rollout, "MODULES", fakes)
    # The cores of this process are not the test's to choose.
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)


def test_the_driver_runs_engines_and_reports(fake_engines, tmp_path, capsys):
    args = ["--shapes=tiny", "--works=B", "--engines=ours,transformers"]
    args = rollout.parse([*args, f"--json={tmp_path / 'deep/report.json'}"])
    assert rollout.main(args) == 0
    report = json.loads((tmp_path / "deep/report.json").read_text())
    assert [row["engine"] for row in report["rows"]] == ["ours", "transformers"]
    assert all(row["result"]["detail"]["vocab"] == VOCAB for row in report["rows"])
    assert [target["value"] for target in report["targets"]] == [1, 0, 0]
    assert report["machine"]["cores"] == 2
    assert "jax" in report["versions"] and "python" in report["versions"]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
    ]
    numbers = ["32.000", "6135.5", "50.0%", "0.50", "0", "0.875", "64 of 64"]
    assert ["tiny", "B", "ours", *numbers] in lines
    assert ["tiny", "B", "transformers", "1.00", "trajectories", "2.00"] in lines


def test_the_driver_goes_on_after_an_engine_that_failed(fake_engines, capsys):
    args = ["--shapes=tiny", "--works=A,C", "--engines=ours", "--seconds=3"]
    assert rollout.main(rollout.parse(args)) == 1
    out, err = capsys.readouterr()
    assert out.count("failed") == 2
    assert "ours: exit status 1\nthis engine fails" in err


def test_an_engine_that_hangs_is_stopped(fake_engines, tmp_path):
    case = rollout.Case("tiny", "A", 2, 0.5)
    workloads.save(make_work("A", vocab=VOCAB, trajectories=2), tmp_path / "work.json")
    python, model = Path(sys.executable), models.folder("tiny", tmp_path)
    row = rollout.run_engine("ours", python, case, model, tmp_path / "work.json", 0.5)
    assert row.result is None and row.error == "stopped after 1 seconds"


def test_tunix_is_skipped_where_pip_cannot(tmp_path, monkeypatch):
    wanted = tmp_path / "wanted.txt"
    wanted.write_text("there-is-no-such-package==0.0.0\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/bin/false")
    monkeypatch.setattr(rollout, "REQUIREMENTS", wanted)
    assert "pip could not install wanted.txt" in rollout.make_environment(tmp_path)
    assert not (tmp_path / "installed.txt").exists()
    (tmp_path / "bin/python").unlink()
    (tmp_path / "bin/python").symlink_to("/bin/true")
    assert rollout.make_environment(tmp_path) is None
    assert (tmp_path / "installed.txt").read_text() == wanted.read_text()
