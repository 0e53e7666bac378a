"""Checkpoints: bit-exact, whole or absent, onto another number of devices."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from devices import environment
from paths import TESTS

from lld_jax.run import checkpoint

INFO = {"config": "tiny", "draws": [3, 4], "nested": {"lr": 5e-4, "none": None}}


def _optimizer():
    return optax.adamw(optax.linear_schedule(0.0, 1e-3, 10), weight_decay=0.01)


def _state(step=3):
    """Parameters of two dtypes and an AdamW state after `step` updates."""
    params = {
        "layer": {"kernel": jax.random.normal(jax.random.key(0), (16, 4))},
        "scale": jnp.linspace(0, 1, 8, dtype=jnp.bfloat16),
    }
    opt = _optimizer().init(params)
    for i in range(step):
        grads = jax.tree.map(lambda p, i=i: jnp.sin(p * (i + 1)), params)
        updates, opt = _optimizer().update(grads, opt, params)
        params = optax.apply_updates(params, updates)
    return {"params": params, "opt": opt, "step": step}


def _assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.tobytes() == y.tobytes()


def _steps(directory):
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdecimal())


def _python(code, *args, devices=1, check=True):
    env = environment(devices)
    env["PYTHONPATH"] += f"{os.pathsep}{TESTS / 'run'}"  # for this file's own names
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def test_state_and_info_come_back_bit_for_bit(tmp_path):
    state = _state()
    with checkpoint.open_checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoint.save(checkpoints, 3, state, INFO)
    with checkpoint.open_checkpoints(tmp_path, keep=1) as checkpoints:
        restored, info = checkpoint.restore(checkpoints, _state(step=0))
    _assert_same_bits(restored, state)
    assert info == INFO and restored["step"] == 3


def test_a_relative_folder_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with checkpoint.open_checkpoints("runs/a", keep=1) as checkpoints:
        checkpoint.save(checkpoints, 1, {"x": np.arange(3)}, {})
    assert checkpoint.latest_step("runs/a") == 1


def test_the_last_ones_and_the_best_one_are_kept_across_restarts(tmp_path):
    scores = {1: 0.1, 2: 0.9, 3: None, 4: 0.9, 5: float("nan"), 6: 0.3, 7: None}
    for part in ((1, 2, 3), (4, 5), (6, 7)):
        with checkpoint.open_checkpoints(tmp_path, keep=2) as checkpoints:
            for step in part:
                state = {"x": np.full(2, step)}
                checkpoint.save(checkpoints, step, state, {}, metric=scores[step])
    assert _steps(tmp_path) == [4, 6, 7]  # of the equal 2 and 4 the later one
    with checkpoint.open_checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoint.best_step(checkpoints) == 4
        target = {"x": np.zeros(2, int)}
        assert checkpoint.restore(checkpoints, target)[0]["x"][0] == 7
        assert checkpoint.restore(checkpoints, target, step=4)[0]["x"][0] == 4
        with pytest.raises(FileNotFoundError, match=r"step 2.*\[4, 6, 7\]"):
            checkpoint.restore(checkpoints, target, step=2)


def test_a_step_that_is_there_is_not_written_again(tmp_path):
    with checkpoint.open_checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoint.save(checkpoints, 1, {"x": np.zeros(2)}, {})
        assert not checkpoint.save(checkpoints, 1, {"x": np.ones(2)}, {})
        restored, _ = checkpoint.restore(checkpoints, {"x": np.ones(2)})
    assert restored["x"].tolist() == [0, 0]


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert checkpoint.latest_step(tmp_path / "missing") is None
    assert not (tmp_path / "missing").exists()
    assert checkpoint.latest_step(tmp_path) is None
    with checkpoint.open_checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoint.best_step(checkpoints) is None
        with pytest.raises(FileNotFoundError, match="none"):
            checkpoint.restore(checkpoints, {})


def test_keep_below_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="checkpoint.keep: 0"):
        checkpoint.open_checkpoints(tmp_path, keep=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": jnp.ones(8)}, r"params/scale: saved bfloat16\(8,\), wanted float32"),
        ({"scale": jnp.ones(9, jnp.bfloat16)}, r"wanted bfloat16\(9,\)"),
        ({"bias": jnp.ones(3)}, r"params/bias: saved nothing"),
    ],
)
def test_another_shape_dtype_or_leaf_is_refused_by_name(tmp_path, change, message):
    state = _state()
    with checkpoint.open_checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoint.save(checkpoints, 3, state, {})
        target = {**state, "params": state["params"] | change}
        with pytest.raises(ValueError, match=message):
            checkpoint.restore(checkpoints, target)


def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    with checkpoint.open_checkpoints(tmp_path, keep=3) as checkpoints:
        x = jnp.zeros(2_000_000)
        for step in range(3):
            checkpoint.save(checkpoints, step, {"x": x}, {})
            for _ in range(5):
                x = bump(x)
    with checkpoint.open_checkpoints(tmp_path, keep=3) as checkpoints:
        for step in range(3):
            restored, _ = checkpoint.restore(checkpoints, {"x": x}, step)
            assert np.all(np.asarray(restored["x"]) == 5 * step)


SAVE_ON_8 = """
import sys, jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from lld_jax.run import checkpoint
from test_checkpoint import INFO, _state
assert len(jax.devices()) == 8
mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
split = lambda x: NamedSharding(mesh, PartitionSpec(*["fsdp"] * min(x.ndim, 1)))
state = _state()
arrays = {"params": state["params"], "opt": state["opt"]}
state |= jax.device_put(arrays, jax.tree.map(split, arrays))
assert len(state["params"]["layer"]["kernel"].addressable_shards) == 8
with checkpoint.open_checkpoints(sys.argv[1], keep=1) as checkpoints:
    checkpoint.save(checkpoints, 3, state, INFO)
"""


def test_eight_devices_write_what_one_device_reads(tmp_path):
    _python(SAVE_ON_8, tmp_path, devices=8)
    target = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        _state(step=0),
    )
    with checkpoint.open_checkpoints(tmp_path, keep=1) as checkpoints:
        restored, info = checkpoint.restore(checkpoints, target)
    _assert_same_bits(restored, _state())
    assert info == INFO
    kernel = restored["params"]["layer"]["kernel"]
    assert kernel.sharding.device_set == {jax.devices()[0]}


KILLED = """
import os, sys, numpy as np
from lld_jax.run import checkpoint
checkpoints = checkpoint.open_checkpoints(sys.argv[1], keep=2)
checkpoint.save(checkpoints, 1, {"x": np.ones(8_000_000)}, {})
checkpoints.wait()
checkpoint.save(checkpoints, 2, {"x": np.full(8_000_000, 2.0)}, {})
os._exit(9)
"""


def test_a_run_killed_while_saving_goes_on_from_the_checkpoint_before(tmp_path):
    assert _python(KILLED, tmp_path, check=False).returncode == 9
    names = {p.name for p in tmp_path.iterdir()}
    assert names - {"1"}, "the second save had not begun: the test shows nothing"
    assert checkpoint.latest_step(tmp_path) == 1
    with checkpoint.open_checkpoints(tmp_path, keep=2) as checkpoints:
        target = {"x": np.zeros(8_000_000)}
        assert checkpoint.restore(checkpoints, target)[0]["x"][-1] == 1
        assert checkpoint.save(checkpoints, 2, {"x": np.zeros(3)}, {})
    assert {p.name for p in tmp_path.iterdir()} == {"1", "2"}
    assert checkpoint.latest_step(tmp_path) == 2


def test_a_numbered_folder_that_is_no_checkpoint_is_set_aside(tmp_path):
    with checkpoint.open_checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoint.save(checkpoints, 1, {"x": np.ones(3)}, {})
    (tmp_path / "7" / "state").mkdir(parents=True)
    assert checkpoint.latest_step(tmp_path) == 1
    with checkpoint.open_checkpoints(tmp_path, keep=1) as checkpoints:
        restored, _ = checkpoint.restore(checkpoints, {"x": np.zeros(3)})
        assert restored["x"].tolist() == [1, 1, 1]
    assert {p.name for p in tmp_path.iterdir()} == {"1", "7.broken"}


DISK_FULL = """
import resource, signal, sys, numpy as np
from lld_jax.run import checkpoint
with checkpoint.open_checkpoints(sys.argv[1], keep=1) as checkpoints:
    checkpoint.save(checkpoints, 1, {"x": np.ones(3)}, {})
    checkpoints.wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    noise = np.random.default_rng(0).standard_normal(1_000_000)
    checkpoint.save(checkpoints, 2, {"x": noise}, {})
    print("started", flush=True)
print("closed")
"""


def test_an_error_in_the_background_is_raised_on_leaving(tmp_path):
    done = _python(DISK_FULL, tmp_path, check=False)
    assert done.stdout == "started\n" and done.returncode != 0
    assert checkpoint.latest_step(tmp_path) == 1


def test_a_reader_leaves_a_save_in_progress_alone(tmp_path):
    state = {"x": jnp.arange(3.0), "step": 1}
    with checkpoint.open_checkpoints(tmp_path, keep=2) as writer:
        checkpoint.save(writer, 1, state, {})
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (tmp_path / "3").mkdir()
    with checkpoint.open_checkpoints(tmp_path, keep=2, writes=False) as reader:
        restored, _ = checkpoint.restore(reader, state, step=1)
    assert restored["step"] == 1
    assert unfinished.exists() and (tmp_path / "3").exists()
