"""Two processes of four devices do what one process of eight does."""

import copy
import dataclasses
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from devices import environment
from paths import TESTS
from safetensors.numpy import load_file
from two_processes import equal_here, known_state

from lld_jax import config as config_lib
from lld_jax import rollout
from lld_jax.config import ConfigError
from lld_jax.model import hf
from lld_jax.parallel import cluster
from lld_jax.run import checkpoint, metrics

SCRIPT = TESTS / "two_processes.py"
HEARTBEAT = 20  # seconds


@dataclasses.dataclass
class Ended:
    """How a process ended, and when."""

    code: int
    stdout: str
    stderr: str
    at: float


def two(folder: Path, *arguments: str, flags: bool = False) -> list[Ended]:
    """Starts the script twice, as two processes that find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    for i in range(2):
        place = {"coordinator": coordinator, "processes": "2", "process": str(i)}
        named = [f"--{name}={value}" for name, value in place.items()]
        variables = {f"LLD_{name.upper()}": value for name, value in place.items()}
        files = [(folder / f"{name}{i}").open("w+") for name in ("out", "err")]
        process = subprocess.Popen(
            [sys.executable, SCRIPT, *map(str, arguments), *(named if flags else [])],
            env=environment(4, **({} if flags else variables)),
            stdout=files[0],
            stderr=files[1],
        )
        started.append((process, files))
    ends, late = {}, time.time() + 480
    while len(ends) < 2:
        for i, (process, _) in enumerate(started):
            if i not in ends and process.poll() is not None:
                ends[i] = time.time()
            elif i not in ends and time.time() > late:
                process.kill()
        time.sleep(0.05)
    time.sleep(0.2)  # whoever speaks for a process that was killed
    found = []
    for i, (process, files) in enumerate(started):
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read())
            file.close()
        found.append(Ended(process.returncode, *texts, ends[i]))
    return found


# ---------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def run_config(folder, shared_config, policy):
    """Three steps of a policy with one layer, on data=2, fsdp=2, tensor=2."""
    config = copy.deepcopy(shared_config)
    small = dataclasses.replace(tiny.CONFIG, layers=1)
    params = tiny.make_params(hf.load_codec(policy), small)
    hf.save(folder / "policy", params, small, policy)
    config.model.path = str(folder / "policy")
    for axis in ("data", "fsdp", "tensor"):
        config.mesh[axis] = 2
    config.rollout.group, config.rollout.slots = 4, 8
    config.rollout.max_tokens = 128
    config.optim.micro_rows, config.optim.updates = 8, 2
    # Sums in another order move the weights by a last bit, and Adam's steps by more:
    # small ones, and few unlikely tokens, or a draw may fall on a bound's other side.
    config.optim.lr, config.rollout.temperature = 1e-3, 0.5
    config.eval.every, config.eval.limit, config.diagnostics.every = 0, 1, 0
    config.checkpoint.every, config.checkpoint.keep = 1, 9
    tiny.write_config_file(folder / "config.py", config)
    return config


@pytest.fixture(scope="module")
def one(folder, run_config):
    """The work folder of one process, and what its checkpoint was on other devices."""
    arguments = folder / "config.json", folder / "one", folder / "others"
    done = subprocess.run(
        [sys.executable, SCRIPT, "eight", *arguments],
        env=environment(8),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "one", json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def broken(folder, run_config):
    """The work folder of two, the second one killed after step 1, both started again.

    And how all four processes ended.
    """
    command = f"--config={folder / 'config.py'}", f"--workdir={folder / 'run'}"
    command += (f"--heartbeat={HEARTBEAT}",)
    (folder / "logs").mkdir()
    number = str(int(signal.SIGKILL))
    first = two(folder / "logs", "train", "1", number, "1", *command, flags=True)
    lines = metrics.read(folder / "run" / "metrics.jsonl")
    second = two(folder / "logs", "train", "-1", "0", "0", *command, flags=True)
    return folder / "run", first, lines, second


def test_the_survivor_of_a_kill_ends_soon_and_says_why(broken):
    _, (survivor, killed), lines, _ = broken
    assert killed.code == -signal.SIGKILL, killed.stderr[-3000:]
    assert [line["step"] for line in lines] == [0, 1]
    assert survivor.code not in (0, -signal.SIGKILL)
    last = [x for x in survivor.stderr.splitlines() if x.startswith("lld_jax: ")][-1]
    assert last.startswith("lld_jax: another process of this run is gone")
    assert last.endswith("start all of them again to go on")
    assert survivor.at - killed.at < HEARTBEAT + 15


def test_both_started_again_finish_and_only_the_first_writes(broken):
    workdir, _, _, (first, second) = broken
    assert first.code == second.code == 0, first.stderr[-3000:] + second.stderr[-3000:]
    assert "exact match, greedy" in first.stdout
    assert "exact match" not in second.stdout  # Gloo writes there too
    names = "checkpoints config.json export metrics.jsonl summary.json tensorboard"
    names += " trajectories"
    assert {p.name for p in workdir.iterdir()} == set(names.split())
    assert len(list((workdir / "tensorboard").iterdir())) == 2  # one a start


def test_three_steps_are_those_of_one_process(broken, one):
    folders = broken[0], one[0]
    found, wanted = (metrics.read(folder / "metrics.jsonl") for folder in folders)
    assert [line["step"] for line in found] == [0, 1, 2, 3]
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if name.startswith(("loss/", "reward/", "eval/", "lld/", "ratio/mean")):
                assert a[name] == pytest.approx(b[name], abs=1e-5), name
            if name.startswith(("end/", "rollout/")) and "use" not in name:
                if name != "rollout/occupancy":
                    assert a[name] == b[name], name
    assert any(line["loss/llds"] > 0 for line in wanted[:-1])
    for step in range(3):
        a, b = (
            [json.loads(line) for line in text.splitlines()]
            for text in (
                (folder / "trajectories" / f"{step}.jsonl").read_text()
                for folder in folders
            )
        )
        gaps = [
            np.subtract(x.pop("sampler_logps"), y.pop("sampler_logps"))
            for x, y in zip(a, b, strict=True)
        ]
        assert a == b and len(a) == 16
        assert max(np.abs(gap).max() for gap in gaps) < 1e-4


def arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint, on this process's device."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def of(x):
        is_array = hasattr(x, "shape") and x.shape is not None
        if not is_array:
            return 0
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    with checkpoint.open_checkpoints(folder, keep=9, writes=False) as saved:
        shapes = saved.checkpointables_metadata(step).metadata["state"]
        state, _ = checkpoint.restore(saved, jax.tree.map(of, shapes), step)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x)
        for path, x in jax.tree.leaves_with_path(state)
    }


def test_the_gradient_is_that_of_one_process(broken, one):
    """After step 0, which does not move, Adam's first moment is linear in it."""
    found, wanted = (
        np.concatenate([x.ravel() for name, x in state.items() if "/mu/" in name])
        for state in (
            arrays(folder / "checkpoints", 1) for folder in (broken[0], one[0])
        )
    )
    norm = np.linalg.norm(wanted)
    assert norm > 1e-3 and found.size > 40_000
    assert np.linalg.norm(found - wanted) < 1e-5 * norm


def test_two_processes_write_what_one_reads(broken):
    """The last checkpoint, on one device, is the export that both made."""
    state = arrays(broken[0] / "checkpoints", 3)
    export = hf.load(broken[0] / "export", hf.read_config(broken[0] / "export"))
    for path, x in jax.tree.leaves_with_path(export):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert state[f"state/params/{name}"].tobytes() == np.asarray(x).tobytes()


def test_a_checkpoint_goes_to_fewer_devices_and_back(one):
    assert one[1] == {str(n): [True, True] for n in (1, 2, 4)}


# -------------------------------------------------------------- all but training


@pytest.fixture(scope="module")
def parts(folder, policy):
    """How two processes ended, which did their parts of all but training."""
    (folder / "parts").mkdir()
    with checkpoint.open_checkpoints(folder / "given", keep=1) as saved:
        checkpoint.save(saved, 5, known_state(tiny.one_device()), {"a": "b"})
    return two(
        folder / "parts", "parts", policy, folder / "given", folder / "parts"
    ), folder / "parts"


@pytest.fixture(scope="module")
def printed(parts):
    files = [parts[1] / f"{i}.json" for i in range(2)]
    assert all(file.exists() for file in files), parts[0]
    return [json.loads(file.read_text()) for file in files]


def test_a_process_has_its_own_part_of_the_mesh(printed):
    for i, out in enumerate(printed):
        assert out["devices"] == [8, 4]
        assert out["neighbours"] == [0] * 4 + [1] * 4
        assert out["own"] == [1, 2, 2]
        assert out["share"] == [[0, 1, 2], [3, 4, 5, 6]][i]


def test_the_local_view_of_weights_is_whole_and_no_copy(printed):
    for out in printed:
        assert out["local"] == list(range(16)) and out["local_spec"]
        assert out["copied"] == 0


def test_a_checkpoint_of_one_process_goes_to_two_and_back(printed, parts):
    for out in printed:
        assert out["restored"] == [True, 7, {"a": "b"}]
    known = known_state(tiny.one_device())
    with checkpoint.open_checkpoints(parts[1] / "saved", keep=1) as saved:
        state, info = checkpoint.restore(saved, known)
    assert equal_here(known, state) and state["step"] == 7
    assert info == {"from": 0}


def test_two_processes_read_and_write_a_hugging_face_folder(parts, printed, policy):
    found, wanted = (
        load_file(folder / "model.safetensors")
        for folder in (parts[1] / "export", policy)
    )
    assert found.keys() == wanted.keys()
    for name in found:
        assert found[name].tobytes() == wanted[name].tobytes(), name


def test_results_are_exchanged_in_the_order_of_processes(printed):
    for out in printed:
        assert out["gather"] == [5000, 10000]
        assert out["first"] == "of 0"
        assert out["after"] == [0, 1]  # nobody is behind after what failed


def test_what_fails_in_one_fails_in_all(printed):
    first, second = printed
    assert second["bug"] == "ZeroDivisionError: a bug"
    words = "PeerFailed: process 1 of 2 failed: ZeroDivisionError: a bug"
    assert first["bug"] == words
    assert first["stop"] == second["stop"] == "Preempted: stopped by SIGTERM"
    assert first["nested"] == "ConfigError: wrong folder"
    words = "PeerFailed: process 0 of 2 failed: ConfigError: wrong folder"
    assert second["nested"] == words


def test_the_end_of_the_first_ends_the_second_wherever_it_is(parts):
    (killed, survivor), _ = parts
    assert killed.code == -signal.SIGKILL
    assert survivor.code not in (0, -signal.SIGKILL)
    assert "lld_jax: another process of this run is gone" in survivor.stderr
    assert survivor.at - killed.at < 30  # a heartbeat is 15


# ----------------------------------------------------------------- one process


def test_flags_say_where_a_process_stands():
    assert cluster.place(None, None, None) is None
    found = cluster.place("host:1234", "4", "3", heartbeat="7")
    assert found["coordinator_address"] == "host:1234"
    assert found["num_processes"] == 4 and found["process_id"] == 3
    assert found["heartbeat_timeout_seconds"] == 7
    found = cluster.place(None, None, None, distributed=True)
    assert found["heartbeat_timeout_seconds"] == 100
    assert "coordinator_address" not in found


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("host:1", None, None), "--processes: unset; legal is all of --coordinator="),
        ((None, "2", "0"), "--coordinator: unset; legal is all of"),
        (("host", "2", "0"), "--coordinator: 'host'; legal is HOST:PORT"),
        (("host:1", "two", "0"), "--processes: 'two'; legal is a whole number, 1"),
        (("host:1", "0", "0"), "--processes: '0'; legal is a whole number, 1 or more"),
        (("host:1", "2", "2"), "--process: 2; legal are 0 to 1"),
        (("host:1", "2", "-1"), "--process: '-1'; legal is a whole number, 0 or more"),
    ],
)
def test_a_place_that_cannot_be_is_named(place, message):
    with pytest.raises(ConfigError) as error:
        cluster.place(*place)
    assert message in str(error.value)
    with pytest.raises(ConfigError, match="--distributed: it finds out what"):
        cluster.place(*place, distributed=True)


def test_a_mesh_must_split_the_processes_along_data(run_config):
    config = copy.deepcopy(run_config)
    config_lib.check(config, devices=8, processes=2)
    config.mesh.data, config.mesh.fsdp = 1, 4
    config_lib.check(config, devices=8)
    message = "mesh.data: 1 must be a multiple of the 2 processes.*legal are 2, 4, 8"
    with pytest.raises(ConfigError, match=message):
        config_lib.check(config, devices=8, processes=2)


def test_counters_of_several_rollouts_are_those_of_one():
    fast = {"decoded": 30, "kept": 30, "steps": 10, "queued_steps": 6}
    fast |= {"row_use": 0.75, "occupancy": 1.0, "seconds_decode": 1.0}
    slow = {"decoded": 20, "kept": 18, "steps": 30, "queued_steps": 2}
    slow |= {"row_use": 0.25, "occupancy": 0.5, "seconds_wait": 3.0}
    assert rollout.combined([fast]) == fast
    assert rollout.combined([fast, slow]) == {
        "decoded": 50,
        "kept": 48,
        "steps": 40,
        "queued_steps": 8,
        "row_use": pytest.approx((10 * 0.75 + 30 * 0.25) / 40),
        "occupancy": pytest.approx((6 + 1) / 8),
        "seconds_decode": 1.0,
        "seconds_wait": 3.0,
    }
    idle = {"queued_steps": 0, "occupancy": 0.25, "steps": 5}
    both = rollout.combined([fast | idle, slow | idle | {"occupancy": 0.75}])
    assert both["occupancy"] == 0.5


def test_errors_that_tell_of_the_end_of_another_process():
    gone = RuntimeError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    try:
        raise OSError("while saving") from gone
    except OSError as error:
        text = cluster.others_gone(error)
    assert text.startswith("another process of this run is gone (UNKNOWN: Gloo")
    assert text.endswith("start all of them again to go on")
    assert (
        cluster.others_gone(RuntimeError("RESOURCE_EXHAUSTED: out of memory")) is None
    )
