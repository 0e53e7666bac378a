"""Bytes that a run takes, against arrays and numbers worked out by hand."""

import subprocess
import sys

import jax
import pytest
from paths import ROOT

from lld_jax import config as config_lib
from lld_jax import model, parallel, plan
from lld_jax.config import overrides
from lld_jax.model import hf, sizes
from lld_jax.rollout import decoding
from lld_jax.rollout.policy import Policy, rollout_shapes
from lld_jax.training import update


def qwen(arg="", name="qwen3b"):
    config = overrides.load(str(ROOT / "configs" / f"{name}.py") + arg)
    return config, sizes.QWEN2_5[config.model.path]


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_one_device_holds_what_the_programs_say():
    config = overrides.load(str(ROOT / "configs" / "tiny.py"))
    tiny = hf.read_config(hf.resolve(config.model.path))
    mesh = parallel.make_mesh(1, 1, 1, jax.devices()[:1])
    policy = Policy(
        config=config,
        model=tiny,
        valid_vocab=tiny.vocab,
        training=parallel.train_layout(mesh),
        serving=parallel.rollout_layout(mesh),
    )
    made = plan.make_plan(config, tiny, on_cpu=True)
    params = model.abstract_params(tiny, policy.training)
    state = jax.eval_shape(update.make_functions(policy)[0], params)
    assert made.both["parameters"] == nbytes(params) == 4 * made.parameters
    counters = 8  # Adam's, and the bad steps'
    assert made.both["Adam"] == nbytes(state) - nbytes(params) - counters
    assert made.both["reference policy"] == nbytes(params)
    assert made.training["gradients"] == 3 * nbytes(params)  # norms of two sums
    assert made.sampling["published weights"] == nbytes(params)
    shapes = rollout_shapes(policy)
    programs = decoding.make_programs(
        tiny,
        shapes,
        _never_stops(tiny.vocab),
        dtype=policy.dtype,
        valid_vocab=tiny.vocab,
        layout=policy.serving,
    )
    slots = jax.eval_shape(programs.init)
    assert made.sampling["cache"] == nbytes([slots["k"], slots["v"]])
    assert made.slot * shapes.slots == made.sampling["cache"]


def _never_stops(vocab):
    from lld_jax.protocol.stop import stop_table

    return stop_table([bytes([i % 256]) for i in range(vocab)], end_ids=())


def test_a_model_of_three_billion_on_sixteen_chips():
    config, model_config = qwen()
    made = plan.make_plan(config, model_config)
    # 3,085,938,688 parameters, all split sixteen ways but norms and biases.
    small = 36 * (2 * 2048 + 2048 + 2 * 256) + 2048
    own = (3_085_938_688 - small) // 16 + small
    assert made.both["parameters"] == 4 * own
    assert made.both["Adam"] == 8 * own
    assert made.both["reference policy"] == 2 * own
    # Keys and values of 36 layers, one of two heads a chip, in bfloat16.
    assert made.slot == 2 * 36 * 128 * 4096 * 2
    assert (made.slots, made.shards) == (64, 8)
    forward = 2 * 3_085_938_688 + 2 * 4096 * 2048 * 36  # a token
    tokens = 512 * 5 * 4096
    assert made.flops["log-probs"] == 2 * tokens * forward
    assert made.flops["updates"] == 4 * tokens * forward
    phases = made.phases
    memory = phases["sampling"] + made.slot
    assert made.slots_that_fit(memory) == 512 + 8
    assert made.slots_that_fit(memory - made.slot - 1) == 512 - 8
    plan.check(made, max(phases.values()), config)


@pytest.mark.parametrize(
    ("arg", "name", "memory", "message"),
    [
        ("", "qwen3b", 9.0, r"sampling needs 9.89 GiB.*has 9.00.*at most 408$"),
        (":micro=64", "qwen3b", 10.0, r"training needs.*micro_rows: 64; .*at most 48$"),
        (":data=1,fsdp=2", "qwen7b", 15.75, r"training needs.*Adam 7.09.*every=0$"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(arg, name, memory, message):
    config, model_config = qwen(arg, name)
    made = plan.make_plan(config, model_config)
    with pytest.raises(config_lib.ConfigError, match=message):
        plan.check(made, memory * plan.GIB, config)


@pytest.mark.parametrize("name", ["qwen3b", "qwen3b_instruct", "qwen7b"])
def test_the_configs_fit_their_chips(name):
    config, model_config = qwen(name=name)
    made = plan.make_plan(config, model_config)
    plan.check(made, plan.MEMORY["v5e"] * plan.GIB, config)


def test_leaner_settings_take_less():
    config, model_config = qwen()
    whole = plan.make_plan(config, model_config)
    config.optim.moment = "bfloat16"
    lean = plan.make_plan(config, model_config)
    assert 4 * lean.both["Adam"] == 3 * whole.both["Adam"]
    config.loss.kl = 0.0
    assert "reference policy" not in plan.make_plan(config, model_config).both
    config.diagnostics.every = 0  # no norms of two gradients
    fewer = plan.make_plan(config, model_config).training["gradients"]
    assert 3 * fewer == 2 * lean.training["gradients"]
    config.model.remat = "attention"
    more = plan.make_plan(config, model_config).training["activations"]
    extra = 36 * 4096 * 2048 * 2  # one number a head dimension, layer and token
    assert more - lean.training["activations"] == extra


def test_the_command_prints_the_plan_without_devices_data_or_weights(tmp_path):
    command = [sys.executable, "-m", "lld_jax.main", "--mode=plan", "--device=v5e"]
    command += [f"--config={ROOT}/configs/qwen7b.py"]
    done = subprocess.run(
        [*command, "--config.rollout.slots=512"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert "7,615,616,512 parameters on 4 x 1 x 4" in done.stdout
    assert "slots that fit: 436" in done.stdout
    assert "rollout.slots: 512; legal are at most 436" in done.stderr
    assert done.returncode != 0
    assert not list(tmp_path.iterdir())
