"""Layouts and their rule tables; and eight devices do what one does."""

import json
import subprocess
import sys

import jax
import optax
import pytest
from devices import environment
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from paths import TESTS
from tiny import CONFIG, one_device

from lld_jax import model, parallel

MESH = AbstractMesh((2, 4, 2), parallel.AXES)


@pytest.fixture(scope="module")
def abstract():
    return model.abstract_params(CONFIG, one_device())


def test_a_mesh_covers_all_devices_or_says_so():
    mesh = parallel.make_mesh(1, 1, 1)
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    message = "mesh.data=2 x mesh.fsdp=1 x mesh.tensor=3 is 6 devices, but there are 1"
    with pytest.raises(ValueError, match=message):
        parallel.make_mesh(2, 1, 3)


def test_sizes_of_the_layouts():
    train, serve = parallel.train_layout(MESH), parallel.rollout_layout(MESH)
    assert [train.size(axes) for axes in (train.batch, train.vocab)] == [16, 16]
    assert [serve.size(axes) for axes in (serve.batch, serve.vocab)] == [8, 2]
    assert train.size(()) == train.size(train.heads) == 1


def specs(params, layout):
    shardings = parallel.param_shardings(params, layout)
    return {
        "/".join(entry.key for entry in path): sharding.spec
        for path, sharding in jax.tree.leaves_with_path(shardings)
    }


def test_training_is_fsdp_over_all_axes(abstract):
    found = specs(
        abstract, parallel.train_layout(AbstractMesh((2, 2, 2), MESH.axis_names))
    )
    axes = ("data", "fsdp", "tensor")
    for name, spec in found.items():
        kind = name.rpartition("/")[2]
        expected = {
            "embedding": P(axes, None),
            "head": P(axes, None),
            "kernel": P(None, axes, None),
        }.get(kind, P())
        assert spec == expected, name


def test_rollouts_split_heads_and_vocabulary_over_tensor(abstract):
    found = specs(abstract, parallel.rollout_layout(MESH))
    for name in ("query", "key", "value", "gate", "up"):
        assert found[f"layers/{name}/kernel"] == P(None, None, "tensor")
    for name in ("output", "down"):
        assert found[f"layers/{name}/kernel"] == P(None, "tensor", None)
    for name in ("query", "key", "value"):
        assert found[f"layers/{name}/bias"] == P(None, "tensor")
    assert found["embedding"] == found["head"] == P("tensor", None)
    assert found["final_norm/scale"] == found["layers/mlp_norm/scale"] == P()


def test_a_layer_of_a_list_lies_like_the_stacked_ones(abstract):
    layout = parallel.rollout_layout(MESH)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), abstract)
    stacked = parallel.param_shardings(abstract, layout)
    listed = parallel.param_shardings({"layers": [one["layers"]] * 2}, layout)
    assert len(listed["layers"]) == 2
    for found in listed["layers"]:
        wanted = jax.tree.map(lambda s: P(*s.spec[1:]), stacked["layers"])
        assert jax.tree.map(lambda s: s.spec, found) == wanted
        assert found["query"]["kernel"].spec == P(None, "tensor")


def test_a_parameter_that_does_not_divide_is_named(abstract):
    message = r"embedding has shape \(648, 32\): 648 does not divide .* \(16 devices\)"
    with pytest.raises(ValueError, match=message):
        parallel.param_shardings(abstract, parallel.train_layout(MESH))
    wide = AbstractMesh((1, 1, 3), parallel.AXES)
    layers = {"layers": abstract["layers"]}
    message = (
        r"layers/down/kernel has shape \(2, 64, 32\): 64 does not .* \(3 devices\)"
    )
    with pytest.raises(ValueError, match=message):
        parallel.param_shardings(layers, parallel.rollout_layout(wide))


def test_optimizer_moments_lie_like_their_parameters(abstract):
    layout = parallel.train_layout(AbstractMesh((2, 2, 2), parallel.AXES))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())
    state = jax.eval_shape(
        lambda p: {"params": p, "opt": optimizer.init(p), "bad": 0}, abstract
    )
    found = parallel.state_shardings(state, abstract, layout)
    wanted = parallel.param_shardings(abstract, layout)
    assert found["params"] == found["opt"][1].mu == found["opt"][1].nu == wanted
    assert found["opt"][1].count.spec == found["bad"].spec == P()


# ------------------------------------------------------------------- eight devices


@pytest.fixture(scope="module")
def eight(policy, tmp_path_factory):
    """Results of `eight_devices.py`, one process for all the tests below."""
    script = TESTS / "eight_devices.py"
    done = subprocess.run(
        [sys.executable, script, policy, tmp_path_factory.mktemp("eight")],
        env=environment(8),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_forward_and_gradient_of_a_tied_model(eight):
    assert eight["tied_logps"] < 2e-5
    assert eight["tied_gradient"] < 1e-5


def test_log_probs_at_some_positions(eight):
    """On the training layout, and where the batch is split by other axes than V."""
    assert len(eight["some_logps"]) == 2 and max(eight["some_logps"]) < 2e-6
    assert max(eight["some_gradient"]) < 1e-6


def test_rollouts_give_the_same_tokens(eight):
    assert eight["tokens"] > 100
    assert eight["same_ids"]
    assert eight["sampler_logps"] < 1e-4


def test_an_update_has_the_same_loss_metrics_and_gradient(eight):
    """Adam's first moment after one update is a tenth of the clipped gradient."""
    assert eight["logps"] < 2e-5
    one, all_of_them = eight["metrics"], eight["metrics8"]
    # A sum of rounding errors, over the number of tokens.
    assert all_of_them.pop("gap") + one.pop("gap") < 1e-5 * one["tokens"]
    assert all_of_them == pytest.approx(one, rel=1e-4, abs=1e-5)
    assert all_of_them["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert one["norm"] > 0.05 and one["loss_llds"] > 0 and one["loss_policy"] != 0
    assert one["grad/policy"] > 0 < one["grad/llds"]
    assert eight["mu"] < 1e-5
    assert eight["norm_of_mu"] == pytest.approx(0.1 * 0.05, rel=1e-4)
