"""The kinds that operations are sorted into, and what a profile adds up to."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import models, operations


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("jit(decode)/while/body/Block/gate/dot_general", "layer products"),
        ("jit(extend)/Qwen2/while/body/layers/key/dot_general", "layer products"),
        ("jit(decode)/while/body/vd,...d->v.../dot_general", "head product"),
        ("jit(decode)/while/body/Block/while/body/dynamic_slice", "copies"),
        ("jit(d)/while/body/jit(dynamic_index_in_dim)/dynamic_slice", "copies"),
        ("jit(d)/Block/while/body/ekngh,ekhs->ekngs/dot_general", "attention"),
        ("jit(d)/Block/while/body/exp", "attention"),
        ("jit(d)/while/body/Block/mul", "rest"),
        ("", "rest"),
    ],
)
def test_kinds_of_xla(name, kind):
    assert operations.kind_of_xla(name) == kind


def test_kinds_of_torch():
    kind = operations.kind_of_torch
    assert kind("aten::addmm", [[5, 2], [2, 9]], 100) == "layer products"
    assert kind("aten::mm", [[5, 2], [2, 100]], 100) == "head product"
    scaled = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert kind(scaled, [[], [1, 2]], 100) == "attention"
    assert kind("aten::cat", [[]], 100) == "copies"
    assert kind("aten::mul", [[5, 2]], 100) == "rest"


def test_a_profile_of_a_program():
    x = jnp.ones((256, 256))
    f = jax.jit(lambda x: jnp.tanh(x @ x))
    hlo = f.lower(x).compile().as_text()
    f(x)
    kinds = operations.xla_kinds(lambda: f(x), hlo)
    assert kinds.keys() == {"rest"} and kinds["rest"] > 0


def test_kinds_are_scaled_to_the_time_without_a_profiler():
    found = operations.scaled({"attention": 30.0, "rest": 10.0}, 0.008)
    assert found["attention"] == pytest.approx(6.0)
    assert found["rest"] == pytest.approx(2.0) and found["copies"] == 0
    assert found["all"] == pytest.approx(8.0)


def test_the_least_time_of_the_weights(tmp_path):
    folder = models.folder("tiny", tmp_path)
    most = {"read GB/s": 10.0, "product GFLOP/s": 100.0}
    weights = 3 * (2 * 128 * (128 + 64) + 3 * 128 * 384) + 2048 * 128
    bound = operations.least("tiny", folder, most)
    rows = operations.ROWS["tiny"]
    assert bound["decode step"] == pytest.approx(
        max(weights * 4 / 1e7, 2 * weights * rows / 1e8)
    )
    layers = weights - 2048 * 128
    assert bound["read"] == pytest.approx(2 * layers * operations.READ / 1e8)
    fast = most | {"product GFLOP/s": 1e9}
    assert operations.least("tiny", folder, fast)["decode step"] == pytest.approx(
        weights * 4 / 1e7
    )
