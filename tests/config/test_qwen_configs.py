"""The configs of the big runs: legal as they are, and run in small on eight devices."""

import json
import subprocess
import sys

import pytest
from devices import environment
from paths import ROOT

from lld_jax import config as config_lib
from lld_jax.config import checks, overrides
from lld_jax.model import sizes
from lld_jax.run import metrics

NAMES = ("qwen3b", "qwen3b_instruct", "qwen7b", "qwen7b_instruct")


def spec(name: str, arg: str = "") -> str:
    return str(ROOT / "configs" / f"{name}.py") + arg


@pytest.mark.parametrize("name", NAMES)
def test_a_config_is_the_authors_run_on_its_mesh(name):
    config = overrides.load(spec(name))
    checks._check_batches(config)
    checks._check_mesh(config, 16, processes=4)
    config_lib.check_platform(config, "tpu")
    kv_heads = sizes.QWEN2_5[config.model.path].kv_heads
    config_lib.check_model(config, kv_heads=kv_heads)
    assert config.mesh.tensor == kv_heads
    assert config.llds.normalizer == "all"
    assert config.llds.coef == (0.3 if name == "qwen7b_instruct" else 0.2)
    assert ("Instruct" in config.model.path) == ("instruct" in name)


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_host_gets_its_kernel_and_its_mesh(name):
    config = overrides.load(spec(name, ":gpu,llds=0.1"))
    checks._check_batches(config)
    checks._check_mesh(config, 8, processes=1)
    config_lib.check_platform(config, "gpu")
    assert (config.model.attention, config.llds.coef) == ("cudnn", 0.1)
    with pytest.raises(config_lib.ConfigError, match="'cudnn' runs on a gpu.*'splash'"):
        config_lib.check_platform(config, "tpu")
    config.optim.packing = True
    with pytest.raises(config_lib.ConfigError, match="'cudnn' looks at no segments"):
        checks._check_batches(config)


def test_kernels_are_refused_where_they_cannot_run():
    config = overrides.load(spec("qwen3b", ":attention=splash"))
    config_lib.check_platform(config, "tpu")
    with pytest.raises(config_lib.ConfigError, match="runs on a tpu.*'auto', 'block"):
        config_lib.check_platform(config, "cpu")
    config.rollout.max_tokens = 4000
    with pytest.raises(config_lib.ConfigError, match="4000 is no multiple of 128"):
        config_lib.check_platform(config, "tpu")
    config = overrides.load(spec("qwen3b", ":gpu"))
    config.model.dtype = "float32"
    with pytest.raises(config_lib.ConfigError, match="'cudnn' computes in bfloat16"):
        config_lib.check_platform(config, "gpu")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder for the world and the runs: the same for all configs."""
    return tmp_path_factory.mktemp("qwen")


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_in_small_on_eight_devices(name, shared):
    workdir = shared / name
    command = [sys.executable, "-m", "lld_jax.main"]
    command += [f"--config={spec(name, ':smoke')}", f"--workdir={workdir}"]
    command += [f"--config.data_dir={shared / 'data'}"]
    done = subprocess.run(
        command,
        env=environment(8, optimized=True),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = metrics.read(workdir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    # Step 0 does not move; nothing compiles in the second step but its evaluation.
    assert lines[0]["optim/lr"] == 0 < lines[1]["optim/lr"]
    assert lines[0]["grad/skipped"] == lines[1]["grad/skipped"] == 0
    assert lines[0]["policy/kl"] == pytest.approx(0, abs=1e-6)
    saved = json.loads((workdir / "config.json").read_text())
    assert saved["model"]["dtype"] == "bfloat16" and saved["mesh"]["tensor"] == 2
    assert (workdir / "export" / "model.safetensors").exists()
