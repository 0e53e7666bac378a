"""Configs: a mistake is named before anything is loaded, and nothing is misread."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from ml_collections import config_flags
from paths import ROOT

from lld_jax import config as config_lib
from lld_jax.config import ConfigError, checks
from lld_jax.config import overrides as overrides_lib

TINY = str(ROOT / "configs" / "tiny.py")


@pytest.fixture
def tiny(tmp_path):
    """The tiny config with a model folder that is there."""
    (tmp_path / "config.json").write_text("{}")
    config = overrides_lib.load(TINY)
    config.model.path = str(tmp_path)
    return config


def _overridden(*overrides):
    """Config and overrides as main gets them: checked, then parsed by config_flags."""
    argv = overrides_lib.clean_argv(["main", f"--config={TINY}", *overrides])
    values = flags.FlagValues()
    flag = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    values(argv)
    return flag.value, config_flags.get_override_values(values["config"])


def test_the_paper_settings_and_every_field_are_in_the_tree():
    common = overrides_lib.load(str(ROOT / "configs" / "common.py"))
    flat = config_lib.flatten(common)
    assert flat.keys() == config_lib.FIELDS.keys()
    paper = {
        "rollout.questions": 512,
        "rollout.group": 5,
        "optim.updates": 10,
        "optim.lr": 1e-6,
        "optim.warmup": 286,
        "steps": 1005,
        "llds.coef": 0.2,
        "llds.gate": "action",
        "llds.normalizer": "preserved",
        "llds.preserve": "nonnegative",
        "loss.kl": 0.001,
        "rollout.max_turns": 3,
        "eval.max_turns": 4,
        "retrieval.k": 3,
    }
    assert {field: flat[field] for field in paper} == paper
    assert (flat["retrieval.cache"], flat["retrieval.timeout"]) == (0, 60.0)
    checks._check_batches(common)
    assert 512 * 5 // 10 == 256  # the mini-batch of the paper


def test_the_tiny_config_is_complete_and_fits_one_device(tiny):
    config_lib.check(tiny, devices=1)
    assert config_lib.flatten(tiny).keys() == config_lib.FIELDS.keys()
    assert Path(overrides_lib.load(TINY).model.path).parent.parent.name == "lld_jax"


def test_a_config_file_takes_short_names():
    config = overrides_lib.load(TINY + ":llds=0.1,gate=response,packing=False")
    assert (config.llds.coef, config.llds.gate) == (0.1, "response")
    assert config.optim.packing is False
    with pytest.raises(ConfigError, match="'lamda=1'.*llds, gate"):
        overrides_lib.load(TINY + ":lamda=1")
    with pytest.raises(ConfigError, match="llds.gate: 'turn'.*'action', 'response'"):
        overrides_lib.load(TINY + ":gate=turn")


def test_a_config_file_that_is_missing_is_named_with_its_neighbours(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match="'configs/tyni.py'.*configs/tiny.py"):
        overrides_lib.load("configs/tyni.py")


# What a user types -> what the run gets. The values pass through absl's own parser.
@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("--config.eval.limit=100", "eval.limit", 100),  # 0 stands for unset
        ("--config.rollout.slots=1e3", "rollout.slots", 1000),
        ("--config.steps=2.0", "steps", 2),
        ("--config.retrieval.url=None", "retrieval.url", ""),
        ("--config.eval.sets=None", "eval.sets", ()),
        ("--config.loss.advantage_std=none", "loss.advantage_std", "none"),
        ("--config.questions.eval=a:x,b:y", "questions.eval", ("a:x", "b:y")),
        ("--config.questions.eval=a:x, b:y", "questions.eval", ("a:x", "b:y")),
        ("--config.questions.eval=('a:x', 'b:y')", "questions.eval", ("a:x", "b:y")),
        ("--config.questions.eval=['a:x']", "questions.eval", ("a:x",)),
        ("--config.questions.train=a/b:x[:10%]", "questions.train", ("a/b:x[:10%]",)),
        ("--config.questions.train=q a.jsonl", "questions.train", ("q a.jsonl",)),
        ("--config.optim.lr=1e-6", "optim.lr", 1e-6),
        ("--config.optim.lr=1", "optim.lr", 1.0),
        ("--config.optim.packing=false", "optim.packing", False),
        ("--config.model.path=a=b", "model.path", "a=b"),
    ],
)
def test_an_override_means_what_it_says(override, field, value):
    config, overrides = _overridden(override)
    got = config_lib.flatten(config)[field]
    assert got == value and type(got) is type(value)
    assert overrides == {field: value}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--config.typo=1", "typo: no such field; legal are seed, steps"),
        ("--config.llds.coeff=1", "llds.coeff: no such field; did you mean llds.coef?"),
        ("--config.lr=1", "lr: no such field; did you mean optim.lr?"),
        ("--config.every=1", "did you mean eval.every or checkpoint.every or"),
        ("--config.optim=1", "optim: a group, not a field; it holds optim.lr"),
        ("--config.seed.x=1", "seed.x: no such field"),
        ("--config.rollout.slots=many", "rollout.slots: 'many' is not of type int"),
        ("--config.rollout.slots=1.5", "rollout.slots: 1.5 is not of type int"),
        ("--config.rollout.slots=inf", "rollout.slots: 'inf' is not of type int"),
        ("--config.rollout.slots=None", "rollout.slots: 'None' is not of type int"),
        ("--config.optim.packing=1", "optim.packing: '1' is not of type bool; legal"),
        ("--config.optim.lr=fast", "optim.lr: 'fast' is not of type float"),
        ("--config.optim.lr=nan", "optim.lr: nan is not of type float"),
        ("--config.model.path=None", "model.path: '' is not legal; legal is text"),
        ("--config.questions.eval=(a:x", "questions.eval: '(a:x' is not of type tuple"),
        ("--config.questions.eval=(1, 2)", "questions.eval: (1, 2) is not legal"),
        ("--config.questions.train=", "questions.train: () is not legal"),
        ("--config.steps", "--config.steps: a value is missing"),
    ],
)
def test_a_wrong_override_is_named_before_absl_sees_it(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        overrides_lib.clean_argv(["main", f"--config={TINY}", override])


def test_other_arguments_pass_and_a_value_may_stand_apart():
    argv = ["main", "--workdir=w", "--config", TINY, "--config.steps", "1e1", "-v"]
    argv += ["--", "--config.typo=1"]
    assert overrides_lib.clean_argv(argv) == [
        "main",
        "--workdir=w",
        f"--config={TINY}",
        "--config.steps=10",
        "-v",
        "--",
        "--config.typo=1",
    ]
    with pytest.raises(ConfigError, match="must stand before"):
        overrides_lib.clean_argv(["main", "--config.steps=1", f"--config={TINY}"])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss.policy", "ppo", "loss.policy: 'ppo'.*'grpo', 'gspo'"),
        ("llds.normalizer", "mean", "llds.normalizer: 'mean'.*'preserved', 'all'"),
        ("model.dtype", "float16", "model.dtype: 'float16'.*'bfloat16', 'float32'"),
        ("rollout.temperature", 0.0, "rollout.temperature: 0.0.*above 0"),
        ("retrieval.cache", -1, "retrieval.cache: -1.*whole number, 0 or more"),
        ("retrieval.timeout", 0.0, "retrieval.timeout: 0.0.*number above 0"),
        ("steps", 0, "steps: 0.*1 or more"),
        ("steps", True, "steps: True is not of type int"),
        ("mesh.fsdp", -1, "mesh.fsdp: -1.*1 or more"),
        ("rollout.max_action", 300, "rollout.max_tokens: 320.*72.*300.*372"),
        ("optim.updates", 3, "optim.updates: 3 .*100 rows.*1, 2, 4, 5, 10"),
        ("optim.micro_rows", 10, "optim.micro_rows: 10 .*25 rows.*1, 5, 25"),
        ("mesh.tensor", 2, "optim.micro_rows: 5.*multiple of the 2 devices"),
        ("model.path", "/nowhere/model", "model.path: '/nowhere/model' does not exist"),
        ("model.path", "tinny", "model.path: 'tinny' does not exist.*hub name"),
        ("model.path", str(ROOT / "tests"), "model.path: .*config.json"),
        ("questions.train", ("gone.jsonl",), "questions.train.*'gone.jsonl'"),
        ("questions.train", ("nq",), "questions.train: 'nq' is no question source"),
        ("eval.sets", ("a:b",), "eval.sets: .'a:b'.*questions.eval"),
        ("retrieval.url", "http://x", "exactly one"),
        ("retrieval.index", "", "exactly one"),
        ("world.size", 0, "retrieval.index: 'tiny_world' is neither.*data/tiny_world"),
    ],
)
def test_a_config_that_cannot_run_is_refused_by_field(
    tiny, field, value, message, tmp_path, monkeypatch
):
    # Away from the data that a run of configs/tiny.py has left in this folder.
    monkeypatch.chdir(tmp_path)
    group, _, last = field.rpartition(".")
    with tiny.unlocked():
        (tiny[group] if group else tiny)[last] = value
        with pytest.raises(ConfigError, match=message):
            config_lib.check(tiny, devices=1)


def test_a_mesh_must_use_each_device_once(tiny):
    config_lib.check(tiny)
    with pytest.raises(ConfigError, match="data 1 x fsdp 1 x tensor 1 = 1.*8 devices"):
        config_lib.check(tiny, devices=8)
    tiny.mesh.fsdp, tiny.optim.micro_rows, tiny.rollout.slots = 5, 25, 100
    config_lib.check(tiny, devices=5)
    tiny.rollout.slots = 99
    with pytest.raises(ConfigError, match="rollout.slots: 99.*fsdp 5"):
        config_lib.check(tiny, devices=5)
    tiny.mesh.fsdp, tiny.mesh.data, tiny.rollout.slots = 1, 5, 100
    tiny.rollout.questions, tiny.rollout.group = 4, 25
    with pytest.raises(ConfigError, match="rollout.questions: 4.*mesh.data 5"):
        config_lib.check(tiny, devices=5)


def test_the_tensor_axis_must_divide_the_kv_heads(tiny):
    tiny.mesh.tensor = 2
    config_lib.check_model(tiny, kv_heads=4)
    with pytest.raises(ConfigError, match="mesh.tensor: 2.*3 kv heads; legal are 1, 3"):
        config_lib.check_model(tiny, kv_heads=3)


def test_fields_too_many_and_too_few_are_named(tiny):
    with tiny.unlocked():
        tiny.llds.gates = "action"
    with pytest.raises(ConfigError, match="llds.gates.*did you mean llds.gate?"):
        config_lib.check(tiny)
    with tiny.unlocked():
        del tiny.llds["gates"], tiny.llds["gate"]
    with pytest.raises(ConfigError, match="llds.gate: missing.*'action'"):
        config_lib.check(tiny)


def test_a_saved_config_loads_back_equal(tiny):
    with tiny.unlocked():
        tiny.eval.sets = ("tiny_world:validation_seen",)
        tiny.optim.lr = 0.1 + 0.2
    back = config_lib.from_json(config_lib.to_json(tiny))
    assert back == tiny and config_lib.diff(back, tiny) == []
    assert isinstance(back.questions.eval, tuple) and back.is_locked
    config_lib.check(back)


def test_a_run_resumes_with_an_equal_config_on_any_mesh(tiny):
    saved = config_lib.from_json(config_lib.to_json(tiny))
    tiny.mesh.fsdp = 5
    config_lib.check_resume(saved, tiny)
    assert config_lib.diff(saved, tiny) == ["mesh.fsdp"]
    tiny.llds.coef, tiny.seed = 0.0, 1
    with tiny.unlocked():
        del tiny.eval["limit"]
    assert config_lib.diff(saved, tiny) == [
        "eval.limit",
        "llds.coef",
        "mesh.fsdp",
        "seed",
    ]
    with pytest.raises(ConfigError, match="llds.coef: 0.2 there, 0.0 here; seed: 0 th"):
        config_lib.check_resume(saved, tiny)


def test_the_default_work_folder_says_what_was_changed():
    name = overrides_lib.workdir_name
    assert name("configs/tiny.py", {}) == "runs/tiny"
    assert name("configs/tiny.py", {"llds.coef": 0.0}) == "runs/tiny-llds.coef=0"
    assert name("configs/tiny.py:llds=0.1", {"seed": 1}) == "runs/tiny-llds=0.1,seed=1"
    two = {"seed": 1, "llds.coef": 0.1}
    assert name("tiny.py", two) == name("tiny.py", dict(reversed(two.items())))
    unsafe = name("tiny.py", {"model.path": "../a b", "eval.sets": ("x:y", "z:w")})
    assert unsafe == "runs/tiny-eval.sets=x_y+z_w,model.path=.._a_b"
    long = [name("tiny.py", {"model.path": "m" * 300 + end}) for end in "ab"]
    assert len(set(long)) == 2 and all(len(n) < 130 for n in long)


def test_a_config_loads_from_another_folder_without_a_device(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from lld_jax.config import overrides;"
        "print(overrides.load(sys.argv[2]).llds.coef, 'jax' in sys.modules)"
    )
    spec = str(tmp_path / "configs" / "tiny.py") + ":llds=0.3"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), spec],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0.3 False\n"
