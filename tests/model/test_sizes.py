"""The published models' sizes, and operations counted from programs of known size."""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import flops
from lld_jax import model, parallel
from lld_jax.model import sizes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
    ],
)
def test_models_have_their_published_number_of_parameters(name, parameters):
    layout = parallel.train_layout(parallel.make_mesh(1, 1, 1, jax.devices()[:1]))
    abstract = model.abstract_params(sizes.QWEN2_5[name], layout)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(abstract)) == parameters


def count(f, *shapes, trips=()):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return flops.of_jaxpr(jax.make_jaxpr(f)(*args).jaxpr, trips)


def test_a_product_counts_twice_its_size_in_every_wrapping():
    product = 2 * 3 * 5 * 7
    matrices = (3, 5), (5, 7)
    assert count(jnp.matmul, *matrices) == product
    assert count(jax.jit(jnp.matmul), *matrices) == product
    assert count(jax.checkpoint(jnp.matmul), *matrices) == product
    batched = jax.vmap(jnp.matmul, in_axes=(0, None))
    assert count(batched, (4, 3, 5), (5, 7)) == 4 * product


def test_loops_are_multiplied_out():
    def scan(x, ws):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0].sum()

    shapes = (3, 5), (11, 5, 5)
    once = 11 * 2 * 3 * 5 * 5
    assert count(scan, *shapes) == once
    # Backward: two products for each of the forward pass.
    assert count(jax.grad(scan, argnums=(0, 1)), *shapes) == 3 * once
    again = jax.grad(jax.checkpoint(scan), argnums=(0, 1))
    assert count(again, *shapes) == 4 * once

    def loop(x, ws):
        return jax.lax.fori_loop(0, ws[0, 0, 0].astype(int), lambda i, x: x @ ws[i], x)

    assert count(loop, *shapes, trips=[6]) == 6 * 2 * 3 * 5 * 5


def test_a_shard_map_counts_all_devices():
    mesh = parallel.make_mesh(1, 1, 1, jax.devices()[:1])
    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    assert count(mapped, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
