"""Runs in a bucket: a server on this machine that speaks Google Cloud Storage."""

import importlib.util
import json
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest
from devices import environment
from paths import ROOT
from safetensors.numpy import load
from test_resume import DRIVER, kept
from tiny import write_config_file

from lld_jax.config import ConfigError
from lld_jax.run import checkpoint, metrics, storage
from lld_jax.run import workdir as workdir_lib


@pytest.fixture(scope="module")
def bucket():
    """`gs://bucket`, empty, on a server that ends with the module."""
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "fake_gcs.py"), "bucket"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    address = server.stdout.readline().strip()
    with server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", address)  # of Google's client and gcsfs
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        # gcsfs would ask the real service what kind of bucket it is.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        yield "gs://bucket"
        server.stdin.close()


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "path",
    [
        "gs://",
        "gs://bucket",
        "gs://bucket/",
        "gs:///run",
        "gs:/bucket/run",
        "s3://bucket/run",
    ],
)
def test_an_address_names_a_bucket_and_a_folder(path):
    with pytest.raises(ConfigError) as error:
        storage.folder(path)
    assert f"workdir: {path!r}; legal is a folder, or gs://" in str(error.value)


def test_a_bucket_needs_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the extra gcs: pip install"):
        storage.folder("gs://bucket/run")


def test_folders_are_absolute_and_buckets_stay_what_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert storage.folder("run") == tmp_path / "run"
    assert not storage.in_bucket(storage.folder("run"))
    path = storage.folder("gs://bucket/a/run/")
    assert str(path) == str(storage.folder(path)) == "gs://bucket/a/run"
    assert storage.in_bucket(path / "x")
    assert str(pickle.loads(pickle.dumps(path))) == "gs://bucket/a/run"


def test_a_bucket_that_is_not_there_is_refused_before_a_run(config, bucket):
    with pytest.raises(ConfigError, match="workdir: 'gs://none/run' cannot be written"):
        workdir_lib.examine(config, "gs://none/run")


def test_a_service_that_does_not_answer_is_said_as_such(config, monkeypatch):
    def unreachable(self):
        raise ConnectionError("Name or service not known")

    path = type(storage.folder("gs://bucket/run"))
    for method in ("exists", "is_dir"):
        monkeypatch.setattr(path, method, unreachable)
    monkeypatch.setattr(path, "write_text", lambda self, text: unreachable(self))
    with pytest.raises(ConfigError, match="cannot be written .ConnectionError: Name"):
        workdir_lib.examine(config, "gs://bucket/run")


def test_files_of_a_bucket(bucket):
    folder = storage.folder(f"{bucket}/files")
    assert not folder.exists()
    storage.replace(folder / "a.txt", "old")
    storage.replace(folder / "a.txt", "new")
    assert (folder / "a.txt").read_text() == "new"
    for part in ("one\n", "two\n"), ("three\n",):
        file = storage.Appended(folder / "b.txt")
        for line in part:
            file.write(line)
        file.close()
    assert (folder / "b.txt").read_text() == "one\ntwo\nthree\n"
    assert names(folder) == ["a.txt", "b.txt"]


def test_what_was_staged_replaces_what_was_there(bucket):
    target = storage.folder(f"{bucket}/staged")
    storage.replace(target / "old.bin", "x")
    with storage.staged(target, last="config.json", active=False) as local:
        local.mkdir()
        (local / "other.bin").write_text("of another process")
    assert names(target) == ["old.bin"]
    with storage.staged(target, last="config.json") as local:
        local.mkdir()
        for name in ("config.json", "new.bin"):
            (local / name).write_text(name)
        assert names(target) == ["old.bin"]
    assert names(target) == ["config.json", "new.bin"]
    assert not local.exists()


def test_a_failure_leaves_what_was_staged_before(bucket, tmp_path):
    target = storage.folder(f"{bucket}/failed")
    storage.replace(target / "config.json", "old")
    with pytest.raises(OSError, match="disk full"), storage.staged(target, last="x"):
        raise OSError("disk full")
    assert (target / "config.json").read_text() == "old"
    with storage.staged(tmp_path / "here", last="x") as local:
        assert local == tmp_path / "here"


def test_metrics_in_a_bucket(bucket):
    with metrics.MetricsWriter(f"{bucket}/metrics") as writer:
        for step in range(3):
            writer.write(step, {"loss": float("nan") if step else 0.5})
    with metrics.MetricsWriter(f"{bucket}/metrics", start_step=2) as writer:
        writer.write(2, {"loss": 2.5})
    lines = metrics.read(f"{bucket}/metrics/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert np.isnan(lines[1]["loss"]) and lines[2]["loss"] == 2.5
    *_, last = sorted(storage.folder(f"{bucket}/metrics/tensorboard").iterdir())
    assert last.read_bytes().count(b"loss") == 1  # of the second writer, all of it


def test_checkpoints_of_a_bucket_that_were_cut_short(bucket):
    folder = storage.folder(f"{bucket}/checkpoints")
    assert checkpoint.latest_step(folder) is None
    with checkpoint.open_checkpoints(folder, keep=5) as checkpoints:
        for step in range(4):
            checkpoint.save(checkpoints, step, {"x": np.full(2, step)}, {"n": step})
    assert checkpoint.latest_step(folder) == 3
    (folder / "3" / "commit_success.txt").unlink()  # killed before it was whole
    (folder / "2" / "info").rmtree()  # killed while it was deleted
    assert checkpoint.latest_step(folder) == 1
    with checkpoint.open_checkpoints(folder, keep=5) as checkpoints:
        restored, info = checkpoint.restore(checkpoints, {"x": np.zeros(2, int)})
        assert restored["x"].tolist() == [1, 1] and info == {"n": 1}
        assert checkpoint.save(checkpoints, 3, {"x": np.full(2, 9)}, {"n": 9})
    assert [name for name in names(folder) if name != "2.broken"] == ["0", "1", "3"]
    assert checkpoint.latest_step(folder) == 3


def test_a_run_in_a_bucket_that_is_killed_and_goes_on(
    bucket, run_config, finished_run, tmp_path
):
    file = write_config_file(tmp_path / "config.py", run_config)
    workdir = storage.folder(f"{bucket}/runs/killed")
    driver = [sys.executable, "-c", DRIVER, "3", str(int(signal.SIGKILL))]
    again = [sys.executable, "-m", "lld_jax.main"]
    (here := tmp_path / "here").mkdir()
    killed, done = (
        subprocess.run(
            [*command, f"--config={file}", f"--workdir={workdir}"],
            cwd=here,
            env=environment(),
            capture_output=True,
            text=True,
        )
        for command in (driver, again)
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]
    assert not any(here.iterdir())  # all of it is in the bucket
    with pytest.raises(ConfigError, match="gs://bucket/.*holds a finished run"):
        workdir_lib.examine(run_config, workdir)
    found, wanted = (
        [kept(line) for line in metrics.read(folder / "metrics.jsonl")]
        for folder in (workdir, finished_run)
    )
    assert found == wanted and len(found) == 6
    for step in range(5):
        a, b = (
            (folder / "trajectories" / f"{step}.jsonl").read_text()
            for folder in (workdir, finished_run)
        )
        assert a == b
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["paths"]["export"] == f"{workdir}/export"
    assert names(workdir / "export") == sorted(
        path.name for path in (finished_run / "export").iterdir()
    )
    found, wanted = (
        load((folder / "export" / "model.safetensors").read_bytes())
        for folder in (workdir, finished_run)
    )
    assert found.keys() == wanted.keys()
    for name in found:
        assert found[name].tobytes() == wanted[name].tobytes(), name
