"""Work folders: who may use one, and what is written there."""

import json
import subprocess
import sys

import pytest

from lld_jax import config as config_lib
from lld_jax.config import ConfigError
from lld_jax.protocol.trajectory import (
    Search,
    append_action,
    append_observation,
    from_json,
    new_trajectory,
)
from lld_jax.run import workdir as workdir_lib


def test_a_new_folder_an_empty_one_and_going_on(config, tmp_path):
    new, empty = tmp_path / "a" / "b", tmp_path / "empty"
    empty.mkdir()
    for folder in (new, empty):
        assert workdir_lib.claim(config, folder) == folder
        saved = config_lib.from_json((folder / "config.json").read_text())
        assert config_lib.diff(saved, config) == []
        assert (folder / "trajectories").is_dir()
        assert workdir_lib.claim(config, str(folder)) == folder
    config.mesh.fsdp = 4  # a run goes on with another number of devices
    workdir_lib.claim(config, new)


def test_another_config_is_refused_with_its_fields(config, tmp_path):
    workdir_lib.claim(config, tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_text()
    config.optim.lr, config.llds.gate = 0.5, "token"
    with pytest.raises(ConfigError) as error:
        workdir_lib.claim(config, tmp_path / "run")
    for part in ("llds.gate: 'action' there, 'token' here", "optim.lr: 0.01 there"):
        assert part in str(error.value)
    assert (tmp_path / "run" / "config.json").read_text() == before


def test_a_finished_run_is_refused(config, tmp_path):
    workdir_lib.claim(config, tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="workdir: .*finished run"):
        workdir_lib.claim(config, tmp_path / "run")


def test_a_folder_is_held_by_one_process_until_it_ends(config, tmp_path):
    folder = workdir_lib.claim(config, tmp_path / "run")
    script = (
        "import pathlib, sys\n"
        "from lld_jax.run import workdir\n"
        "with workdir.hold(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match="workdir: .*in use by another process"),
            workdir_lib.hold(folder),
        ):
            pass
        other.kill()
    with workdir_lib.hold(folder):  # nothing is left of a lock
        pass


def test_foreign_folders_and_files_are_left_alone(config, tmp_path):
    (tmp_path / "letter.txt").write_text("dear reader")
    for folder in (tmp_path, tmp_path / "letter.txt"):
        with pytest.raises(ConfigError, match="workdir: .*is no run"):
            workdir_lib.claim(config, folder)
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_trajectory_files_keep_every_digit(config, tmp_path):
    folder = workdir_lib.claim(config, tmp_path / "run")
    traj = new_trajectory(3, 1, "who?", ("a", "b"), [5, 6])
    append_action(traj, [7, 8], [-0.1, -1 / 3])
    append_observation(traj, [9])
    append_action(traj, [7], [-1e-8])
    traj.reward, traj.reason = 1.0, "answered"
    traj.searches.append(Search("q\u00e9", ("T",)))
    workdir_lib.write_trajectories(folder, 12, [traj, traj])
    lines = (folder / "trajectories" / "12.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 2 and from_json(rows[0]) == traj
    names = "draw sample question gold ids mask sampler_logps reward reason searches"
    assert rows[0].keys() == set(names.split())
    workdir_lib.write_trajectories(folder, 12, [traj])  # after a resume: replaced
    assert len((folder / "trajectories" / "12.jsonl").read_text().splitlines()) == 1
    assert [p.name for p in (folder / "trajectories").iterdir()] == ["12.jsonl"]


def scores(value: float) -> dict[str, float]:
    out = {}
    for i, mode in enumerate(("greedy", "sampled")):
        for j, part in enumerate(("", "dev.jsonl/", "hops2/")):
            base = f"eval/{mode}/{part}"
            out[f"{base}exact_match"] = value + i / 10 + j / 100
            out[f"{base}searches"] = 1.0 + j
            out[f"{base}questions"] = 5.0
    return out


def test_summary(config, tmp_path):
    folder = workdir_lib.claim(config, tmp_path / "run")
    info = {"before": scores(0.25), "seconds": 12.5}
    speeds = {"rollout": 10.0, "train": 20.0}
    summary = workdir_lib.write_summary(folder, info, scores(0.5), speeds)
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert summary["exact_match"] == {
        "greedy": {"before": 0.25, "after": 0.5},
        "sampled": {"before": 0.35, "after": 0.6},
    }
    assert summary["by_hops"].keys() == {"2"}
    greedy = summary["by_hops"]["2"]["exact_match"]["greedy"]
    assert greedy == {"before": 0.27, "after": 0.52}
    assert summary["by_set"].keys() == {"dev.jsonl"}
    assert summary["seconds"] == 12.5 and summary["tokens_per_s"] == speeds
    assert summary["paths"]["export"] == str(folder / "export")
    with pytest.raises(ConfigError, match="finished run"):
        workdir_lib.claim(config, folder)
