"""The launch scripts, with stand-ins for what they call: who is told to run what."""

import os
import stat
import subprocess
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from paths import ROOT

from experiments.launch import compare_attention
from lld_jax.model import attention

LAUNCH = ROOT / "experiments" / "launch"


@pytest.fixture
def call(tmp_path):
    """Runs a script; returns what it called, a line a call, and its exit status."""
    log = tmp_path / "calls"
    for name in ("gcloud", "srun", "python"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(script, *args, **env):
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", str(LAUNCH / script), *args],
            env=os.environ | {"PATH": path} | env,
            cwd=LAUNCH.parents[1],
            capture_output=True,
            text=True,
        )
        calls = log.read_text() if log.exists() else ""
        return calls, done

    return run


POD = {"TPU": "slice", "ZONE": "zone", "BUCKET": "bucket"}


def test_every_worker_of_a_pod_gets_the_commit_and_the_command(call):
    calls, done = call(
        "tpu_pod.sh", "configs/qwen3b.py:llds=0", "--config.seed=1 2", **POD
    )
    assert done.returncode == 0, done.stderr
    assert calls.count("gcloud compute tpus tpu-vm ssh slice --zone=zone") == 2
    assert "tpu-vm scp" in calls and calls.count("--worker=all") == 3
    assert "gcsfuse --implicit-dirs bucket bucket" in calls
    command = calls[calls.index("-m lld_jax.main") :]
    assert "--distributed --workdir=gs://bucket/runs/qwen3b --config" in command
    assert "--config=configs/qwen3b.py:llds=0" in command
    assert r"--config.seed=1\ 2" in command  # as one word, on the other side too
    calls, _ = call("tpu_pod.sh", "configs/qwen3b.py", **POD, STOP="1")
    assert calls.rstrip().endswith("--command=pkill -TERM -f lld_jax.main")


@pytest.mark.parametrize("missing", POD)
def test_a_pod_needs_its_names(call, missing):
    env = {name: value for name, value in POD.items() if name != missing}
    calls, done = call("tpu_pod.sh", "configs/qwen3b.py", **env | {missing: ""})
    assert done.returncode != 0 and missing in done.stderr and not calls


def test_a_gpu_host_is_planned_before_it_trains(call):
    calls, done = call("gpu_host.sh", "configs/qwen3b.py:gpu", "--config.seed=1")
    assert done.returncode == 0, done.stderr
    plan, train = calls.splitlines()
    assert plan == (
        "python -m lld_jax.main --mode=plan --config=configs/qwen3b.py:gpu "
        "--config.seed=1"
    )
    assert train == plan.replace("--mode=plan ", "")


def test_slurm_starts_a_process_a_host(call):
    calls, done = call("slurm.sbatch", "configs/qwen3b.py:gpu,data=2")
    assert done.returncode == 0, done.stderr
    assert calls.strip() == (
        "srun --kill-on-bad-exit=1 .venv/bin/python -m lld_jax.main --distributed "
        "--config=configs/qwen3b.py:gpu,data=2"
    )


@pytest.mark.parametrize("script", ["tpu_pod.sh", "gpu_host.sh", "slurm.sbatch"])
def test_a_config_is_asked_for(call, script):
    calls, done = call(script, **POD)
    assert done.returncode != 0 and "a config file" in done.stderr and not calls


def test_scripts_parse():
    for path in (*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")):
        subprocess.run(["bash", "-n", path], check=True)
        assert os.access(path, os.X_OK)


def test_attention_is_compared_on_accelerators_alone(capsys):
    assert compare_attention.main() == 1
    assert "legal are gpu, tpu" in capsys.readouterr().out


def test_what_differs_is_seen():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (1, 32, 2, 2, 8), (1, 32, 2, 8), (1, 32, 2, 8)
    args = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    args.append(jnp.ones((1, 32), jnp.int32))

    def attend(*args, block=16, shift=0.0):
        return attention.row_attention(*args, block=block) + shift * args[2].sum()

    same = compare_attention.differences(partial(attend, block=8), attend, args)
    assert same.keys() == {"out", "dq", "dk", "dv"}
    assert 0 <= max(same.values()) < 1e-5
    other = compare_attention.differences(partial(attend, shift=0.1), attend, args)
    assert other["dq"] < 1e-5 < 0.01 < min(other["out"], other["dv"])
