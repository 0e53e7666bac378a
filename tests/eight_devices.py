"""The same work on one device and on eight (data=2, fsdp=2, tensor=2).

Run by `test_parallel.py` in a process of its own, since the number of devices is fixed
when JAX starts. Arguments: the policy folder, a scratch folder. Prints a JSON object.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny
from jax.sharding import PartitionSpec
from paths import DATA

from lld_jax import agent as agent_lib
from lld_jax import model, parallel
from lld_jax.model import hf, logprobs
from lld_jax.rollout import Sampling
from lld_jax.training import probes, update
from lld_jax.training.batch import make_batch

make_mesh = parallel.make_mesh


def first_devices(data: int, fsdp: int, tensor: int) -> jax.sharding.Mesh:
    """As `make_mesh`, over as many of the devices as the mesh needs."""
    return make_mesh(data, fsdp, tensor, jax.devices()[: data * fsdp * tensor])


def distance(a, b) -> float:
    """Norm of the difference of two trees, in norms of the first."""
    a, b = (
        np.concatenate([np.ravel(np.asarray(x)) for x in jax.tree.leaves(tree)])
        for tree in (a, b)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def tied_model(layout) -> tuple[np.ndarray, dict]:
    """Logps of a tied model and the gradient of their weighted sum."""
    folder = DATA / "qwen2_tiny_a"
    config = hf.read_config(folder)
    shardings = parallel.param_shardings(model.abstract_params(config, layout), layout)
    params = hf.load(folder, config, shardings)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, config.vocab - 5, (8, 24))
    segments = np.where(np.arange(24) < 20, 1, 0) * np.ones((8, 1), int)
    at, weight = np.tile(np.arange(24), (8, 1)), rng.normal(size=(2, 8, 24))

    @jax.jit
    def run(params):
        def total(params):
            hidden = model.hidden_states(
                config,
                params,
                ids,
                at,
                segments,
                dtype=jnp.float32,
                layout=layout,
                block=16,
            )
            out = logprobs.token_logprobs(
                hidden,
                model.head(params),
                ids,
                temperature=0.8,
                valid_vocab=config.vocab - 5,
                chunk=10,
                layout=layout,
            )
            return (jnp.stack(out) * weight).sum(), out[0]

        return jax.grad(total, has_aux=True)(params)

    grads, logps = run(params)
    return np.asarray(logps), grads


def some_positions(layout) -> tuple[np.ndarray, tuple]:
    """Log-probs and entropies where a mask says so, and gradients of a sum of them.

    One row has action tokens alone, some none, and so some devices.
    """
    rng = np.random.default_rng(1)
    hidden, head = (
        rng.normal(size=s).astype(np.float32) for s in ((16, 9, 8), (24, 8))
    )
    ids, weight = rng.integers(0, 20, (16, 9)), rng.normal(size=(2, 16, 9))
    mask = rng.integers(0, 2, (16, 9))
    mask[2:7], mask[9] = 0, 1

    @jax.jit
    def run(hidden, head):
        def total(hidden, head):
            out = logprobs.token_logprobs(
                hidden,
                head,
                ids,
                temperature=0.8,
                valid_vocab=20,
                chunk=4,
                layout=layout,
                mask_BxT=mask,
            )
            # Squared: the backward pass has to wait for the forward one.
            return (jnp.stack(out) ** 2 * weight).sum(), jnp.stack(out)

        return jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, head)

    grads, out = run(hidden, head)
    return np.asarray(out), grads


def one_update(config, made=None):
    """Trajectories, and what one update on `made` (default: on them) gives."""
    agent = agent_lib.open_agent(config)
    params = agent_lib.load_params(agent)
    init, logps_fn, update_fn, weigh = update.make_functions(agent)
    published = agent_lib.publisher(agent)(params)
    own, _ = agent_lib.sample(
        agent,
        published,
        list(enumerate(agent.questions(config.questions.train)[:4])),
        group=4,
        seed=1,
        sampling=Sampling(),
        max_turns=2,
    )
    batch, scalars = make_batch(
        made or own,
        tokens=config.rollout.max_tokens,
        token_bytes=agent.codec.token_bytes,
        std="sample",
    )
    rows = agent.training.sharding(None, agent.training.batch)
    micro = config.optim.micro_rows
    n = agent.rows // micro
    stacked = {
        name: jax.device_put(x.reshape(n, micro, -1), rows) for name, x in batch.items()
    }
    logps = logps_fn(params, stacked, 0, n)
    # Old and reference logps that differ, so that every term has a gradient.
    stacked |= {"old_logps": logps + 0.1, "ref_logps": logps - 0.1}
    args = stacked, weigh(stacked), scalars
    norms_fn, _ = probes.make_probes(agent)
    norms = norms_fn(params, *args, n)
    state, metrics = update_fn(init(params), *args, 0.01, False, n)
    assert state["params"]["head"].sharding.spec == PartitionSpec(parallel.AXES, None)
    metrics["ratios"] = metrics["ratios"].sum()  # one may lie on the bound of a bin
    metrics = {
        name + "".join(map(str, at)): float(x)
        for name, value in metrics.items()
        for at, x in np.ndenumerate(value)
    }
    metrics |= {name: float(x) for name, x in norms.items()}
    return own, np.asarray(logps), metrics, state["opt"][1].mu


def main(policy: str, scratch: str) -> None:
    assert jax.device_count() == 8
    parallel.make_mesh = first_devices
    out = {}
    layouts = [parallel.train_layout(first_devices(n, n, n)) for n in (1, 2)]
    (logps, grads), (logps8, grads8) = map(tied_model, layouts)
    out["tied_logps"] = float(np.abs(logps - logps8).max())
    out["tied_gradient"] = distance(grads, grads8)

    layouts.append(parallel.rollout_layout(first_devices(2, 2, 2)))
    some = [some_positions(layout) for layout in layouts]
    out["some_logps"] = [float(np.abs(x - some[0][0]).max()) for x, _ in some[1:]]
    out["some_gradient"] = [distance(some[0][1], x) for _, x in some[1:]]

    config = tiny.make_config(Path(scratch), Path(policy))
    config.rollout.group, config.rollout.slots = 4, 8
    config.rollout.max_tokens = 128
    config.optim.micro_rows, config.optim.updates = 8, 1
    config.optim.clip = 0.05  # of the norm of the whole gradient
    made, logps, metrics, mu = one_update(config)
    for axis in ("data", "fsdp", "tensor"):
        config.mesh[axis] = 2
    made8, logps8, metrics8, mu8 = one_update(config, made)
    out["tokens"] = sum(sum(t.mask) for t in made)
    out["same_ids"] = [t.ids for t in made] == [t.ids for t in made8]
    gaps = [
        np.abs(np.subtract(a.sampler_logps, b.sampler_logps)).max()
        for a, b in zip(made, made8, strict=True)
        if a.ids == b.ids
    ]
    out["sampler_logps"] = float(max(gaps))
    out["logps"] = float(np.abs(logps - logps8).max())
    out["metrics"], out["metrics8"] = metrics, metrics8
    out["mu"], out["norm_of_mu"] = distance(mu, mu8), float(optax.global_norm(mu))
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
