"""Compares the attention kernel of this accelerator with the blocked form.

    python -m experiments.launch.compare_attention

On a row of 4,096 tokens with the heads of Qwen2.5-3B, in bfloat16: values and
gradients, and the time of each. Exit status 1 if they differ by more than rounding.
"""

import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lld_jax import parallel
from lld_jax.model import kernels

SHAPE = T, K, G, H = 4096, 2, 8, 128
KERNEL = {"gpu": "cudnn", "tpu": "splash"}
# bfloat16 keeps 8 bits: sums of products differ by a part in a hundred at most.
TOLERANCE = 0.02


def differences(attend: Callable, other: Callable, args: list) -> dict[str, float]:
    """The largest difference of each of value and gradients, over its largest entry."""

    def all_of(f):
        weight = jax.random.normal(jax.random.key(9), args[0].shape, jnp.float32)

        def loss(q, k, v, segments):
            out = f(q, k, v, segments)
            return (out.astype(jnp.float32) * weight).sum(), out

        (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(
            *args
        )
        return dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))

    a, b = all_of(attend), all_of(other)
    return {
        name: float(jnp.abs(a[name] - b[name]).max() / jnp.abs(b[name]).max())
        for name in a
    }


def seconds(f: Callable, args: list) -> float:
    jitted = jax.jit(f)
    jax.block_until_ready(jitted(*args))
    began = time.perf_counter()
    for _ in range(10):
        out = jitted(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / 10


def main() -> int:
    device = jax.devices()[0]
    kind = KERNEL.get(device.platform)
    if kind is None:
        print(f"{device.platform}: no kernel to compare; legal are {', '.join(KERNEL)}")
        return 1
    layout = parallel.train_layout(parallel.make_mesh(1, 1, 1, [device]))
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (1, T, K, G, H), (1, T, K, H), (1, T, K, H)
    args = [
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]
    args.append(jnp.ones((1, T), jnp.int32))
    attend = kernels.by_name(kind, layout=layout, block=512)
    blocked = kernels.by_name("blocked", layout=layout, block=512)
    found = differences(attend, blocked, args)
    print({name: f"{value:.2g}" for name, value in found.items()})
    print(
        f"{kind} {seconds(attend, args):.2e} s, blocked {seconds(blocked, args):.2e} s"
    )
    return int(max(found.values()) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
