"""What is read from compiled programs: collectives, copies, bytes; and the table."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest
from paths import ROOT

from benchmarks import aot
from lld_jax import parallel
from lld_jax.config import overrides
from lld_jax.model import hf
from lld_jax.rollout.policy import Policy

HLO = """
  %ag.1 = bf16[1,8]{1,0} all-gather(%p), metadata={op_name="f/jvp(layers)/while/x"}
  %ag.2 = (bf16[8]{0}, bf16[16]{0}) all-gather-start(%p), metadata={op_name="a/layers/"}
  %ag.3 = bf16[16]{0} all-gather-done(%ag.2), metadata={op_name="a/layers/"}
  %rs = f32[8]{0} reduce-scatter(%p), metadata={op_name="transpose(a)/layers/while/b"}
  %ar.1 = f32[] all-reduce(%p), metadata={op_name="jit(f)/loss"}
  %copy.1 = bf16[4,1024]{1,0} copy(%p)
  ROOT %copy.2 = f32[1024]{0} copy(%p), metadata={op_name="a/layers/"}
"""


def test_collectives_of_layers_and_large_copies_are_counted():
    found = aot.operations(HLO, cache=8192)
    assert found["layer"] == {
        "forward": {"all-gather": 2},
        "backward": {"reduce-scatter": 1},
    }
    assert found["cache_copies"] == 1
    assert aot.operations(HLO)["cache_copies"] == 0
    assert aot.operations(HLO, cache=4096)["cache_copies"] == 2


def test_bytes_are_those_of_one_device():
    mesh = jax.sharding.AbstractMesh((4, 2), ("a", "b"))
    spec = jax.sharding.PartitionSpec
    split = jax.sharding.NamedSharding(mesh, spec(("a", "b"), None))
    half = jax.sharding.NamedSharding(mesh, spec(None, "b"))
    tree = {
        "split": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=split),
        "half": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16, sharding=half),
        "scalar": jax.ShapeDtypeStruct((), jnp.int32),
        "static": 7,
    }
    assert aot.bytes_a_device(tree) == 16 * 4 * 4 // 8 + 3 * 2 * 2 + 4


@pytest.fixture(scope="module")
def tiny():
    """The tiny policy on one CPU device, whose compiler answers the same questions."""
    config = overrides.load(str(ROOT / "configs" / "tiny.py"))
    config.optim.micro_rows, config.rollout.max_tokens = 5, 128
    config.rollout.slots = 10
    mesh = parallel.make_mesh(1, 1, 1, jax.devices()[:1])
    model = hf.read_config(hf.resolve(config.model.path))
    return Policy(
        config=config,
        model=model,
        valid_vocab=model.vocab - 3,
        training=parallel.train_layout(mesh),
        serving=parallel.rollout_layout(mesh),
    )


def test_all_programs_are_compiled_and_measured(tiny):
    known = aot.training_programs(tiny) | aot.sampling_programs(tiny)
    assert tuple(known) == aot.PROGRAMS
    lines = {name: aot.measure(tiny, name, *known[name]) for name in known}
    for name, line in lines.items():
        assert line["total"] > 0 and line["layer"] == {}, name
    # Layers are not computed again on a CPU: the least, but for attention's blocks
    # (twice forward) and the logits (twice forward).
    assert 1.0 < lines["update"]["flops_over_least"] < 1.4
    assert 0.9 < lines["logps"]["flops_over_least"] < 1.2
    assert lines["logps"]["flops_over_least"] == lines["reference"]["flops_over_least"]


def test_lines_are_replaced_and_the_page_says_the_same(tmp_path, monkeypatch, tiny):
    monkeypatch.setattr(aot, "open_policy", lambda config, topology: tiny)
    numbers = iter(range(1, 9))

    def measured(policy, name, f, arguments, hlo):
        number = next(numbers)
        return {
            "program": name,
            "given": {"state": number},
            "made": 0.5,
            "total": number + 0.5,
            "peak": 1.0,
            "compile_seconds": 2.0,
            "layer": {"forward": {"all-gather": 7}},
            "cache_copies": 0,
        }

    file = tmp_path / "aot.json"
    for topology in ("v5e:4x4", "v6e:4x4", "v5e:4x4"):
        words = ["aot", "--config=c", f"--topology={topology}", f"--json={file}"]
        monkeypatch.setattr(sys, "argv", [*words, "--programs=update,decode"])
        aot.main(measured)
    lines = json.loads(file.read_text())
    assert [(x["topology"], x["program"], x["given"]["state"]) for x in lines] == [
        ("v6e:4x4", "update", 3),
        ("v6e:4x4", "decode", 4),
        ("v5e:4x4", "update", 5),
        ("v5e:4x4", "decode", 6),
    ]
    page = file.with_suffix(".md").read_text().splitlines()
    rows = [line for line in page if line.startswith("| c |")]
    assert len(rows) == 4
    assert rows[2] == (
        "| c | v5e:4x4 | update | state 5.00 | 0.50 | 5.50 | 1.00 | – | forward: 7 "
        "all-gather | 0 | 2 |"
    )
    monkeypatch.setattr(sys, "argv", [*words, "--programs=updates"])
    with pytest.raises(SystemExit):
        aot.main(measured)
