"""A run that is killed or stopped, and started again, is the run without a break."""

import json
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from devices import environment
from safetensors.numpy import load_file
from tiny import write_config_file

from lld_jax import train
from lld_jax.run import checkpoint, metrics

# Starts the command line, and sends itself a signal once a step is on disk: between
# two saves, as one from outside would come, at a place that is known.
DRIVER = """
import os, signal, sys
from lld_jax import main
from lld_jax.run import metrics
step, number = int(sys.argv.pop(1)), int(sys.argv.pop(1))
write = metrics.MetricsWriter.write
def write_and_signal(self, at, record):
    write(self, at, record)
    if at == step:
        os.kill(os.getpid(), number)
metrics.MetricsWriter.write = write_and_signal
main.run()
"""


@pytest.fixture(scope="module")
def broken_run(tmp_path_factory, run_config):
    """Killed after step 1, then stopped after step 2, then left to run to its end.

    Returns the folder and what was seen on the way.
    """
    folder = tmp_path_factory.mktemp("broken")
    file = write_config_file(folder / "config.py", run_config)
    workdir = folder / "run"
    seen = {}
    for step, number in ((1, signal.SIGKILL), (2, signal.SIGTERM)):
        command = [sys.executable, "-c", DRIVER, str(step), str(int(number))]
        done = subprocess.run(
            [*command, f"--config={file}", f"--workdir={workdir}"],
            env=environment(),
            capture_output=True,
            text=True,
        )
        lines = metrics.read(workdir / "metrics.jsonl")
        seen[number] = {
            "code": done.returncode,
            "stderr": done.stderr,
            "steps": [line["step"] for line in lines],
            "saved": checkpoint.latest_step(workdir / "checkpoints"),
            "summary": (workdir / "summary.json").exists(),
        }
    train.train(run_config, workdir)
    return workdir, seen


def test_killed_between_two_saves(broken_run):
    _, seen = broken_run
    killed = seen[signal.SIGKILL]
    assert killed["code"] == -signal.SIGKILL, killed["stderr"][-2000:]
    assert killed["steps"] == [0, 1] and not killed["summary"]
    assert killed["saved"] == 0  # steps 0 and 1 are lost, and done again


def test_stopped_by_sigterm_saves_what_is_finished(broken_run):
    _, seen = broken_run
    stopped = seen[signal.SIGTERM]
    assert stopped["code"] == 143, stopped["stderr"][-2000:]
    assert "stopped by SIGTERM; start the same command" in stopped["stderr"]
    assert stopped["steps"] == [0, 1, 2] and stopped["saved"] == 3
    assert not stopped["summary"]


def kept(line: dict) -> dict:
    """What does not depend on the clock or on what is compiled already."""
    clocks = ("time/", "tokens_per_s/", "compile/")
    # How soon replies come decides which decode step a slot takes part in.
    clocks += ("rollout/occupancy", "rollout/row_use")
    return {name: value for name, value in line.items() if not name.startswith(clocks)}


def test_the_metrics_are_those_of_the_run_without_a_break(broken_run, finished_run):
    workdir, _ = broken_run
    found, wanted = (
        [kept(line) for line in metrics.read(folder / "metrics.jsonl")]
        for folder in (workdir, finished_run)
    )
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4, 5]
    assert found == wanted
    names = {name for line in found for name in line}
    assert len(names) > 70  # something is left to compare


def test_the_trajectories_are_the_same(broken_run, finished_run):
    workdir, _ = broken_run
    for step in range(5):
        a, b = (
            (folder / "trajectories" / f"{step}.jsonl").read_text()
            for folder in (workdir, finished_run)
        )
        assert a == b


def test_the_exports_are_equal_to_the_last_bit(broken_run, finished_run):
    workdir, _ = broken_run
    found, wanted = (
        load_file(folder / "export" / "model.safetensors")
        for folder in (workdir, finished_run)
    )
    assert found.keys() == wanted.keys()
    for name in found:
        assert found[name].tobytes() == wanted[name].tobytes(), name


def test_the_optimizer_states_are_equal_too(
    broken_run, finished_run, functions, params
):
    states = []
    for folder in (broken_run[0], finished_run):
        with checkpoint.open_checkpoints(folder / "checkpoints", keep=2) as saved:
            target = {"state": functions[0](params), "step": 0}
            states.append(checkpoint.restore(saved, target)[0])
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_the_summaries_agree(broken_run, finished_run):
    a, b = (
        json.loads((folder / "summary.json").read_text())
        for folder in (broken_run[0], finished_run)
    )
    for name in ("exact_match", "searches", "by_hops", "by_set", "questions"):
        assert a[name] == b[name]
