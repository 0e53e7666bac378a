"""What `test_multiprocess.py` starts in processes of their own.

    train STEP SIGNAL PROCESS ...  the command line; the process sends itself the signal
                                   once STEP is written (-1: never)
    eight CONFIG WORKDIR SCRATCH   a run on eight devices, then its checkpoint on others
    parts POLICY GIVEN SCRATCH     two processes at work on all but training

The second one prints a JSON object, the others write theirs to `SCRATCH/<number>.json`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lld_jax import config as config_lib
from lld_jax import main, model, parallel
from lld_jax import train as train_lib
from lld_jax.model import hf
from lld_jax.parallel import cluster, exchange
from lld_jax.parallel.preemption import Preempted
from lld_jax.run import checkpoint, metrics


def train(step: str, number: str, process: str, *command: str) -> None:
    write = metrics.MetricsWriter.write

    def write_and_signal(self, at, record):
        write(self, at, record)
        if at == int(step) and jax.process_index() == int(process):
            os.kill(os.getpid(), int(number))

    metrics.MetricsWriter.write = write_and_signal
    sys.argv = ["main", *command]
    main.run()


# ------------------------------------------------------- one process, eight devices


def targets(state, params, layout):
    """Abstract arrays that say where a state lies in a layout."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        state,
        parallel.state_shardings(state, params, layout),
    )


def same_bits(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def eight(config: str, workdir: str, scratch: str) -> None:
    assert jax.device_count() == 8
    settings = config_lib.from_json(Path(config).read_text())
    train_lib.train(settings, workdir)
    with checkpoint.open_checkpoints(
        Path(workdir) / "checkpoints", keep=9, writes=False
    ) as saved:
        shapes = saved.checkpointables_metadata(3).metadata["state"]["state"]
        there = "params"

        def restored(checkpoints, devices: int, step: int):
            mesh = parallel.make_mesh(devices, 1, 1, jax.devices()[:devices])
            layout = parallel.train_layout(mesh)
            target = {"state": targets(shapes, shapes[there], layout), "step": 0}
            state = checkpoint.restore(checkpoints, target, step)[0]
            used = {d for x in jax.tree.leaves(state["state"]) for d in x.devices()}
            assert len(used) == devices
            return state

        whole = restored(saved, 8, 3)
        out = {}
        with checkpoint.open_checkpoints(scratch, keep=9) as others:
            for devices in (1, 2, 4):
                state = restored(saved, devices, 3)
                checkpoint.save(others, devices, state, {})
                back = restored(others, 8, devices)
                out[devices] = [same_bits(whole, state), same_bits(whole, back)]
    print(json.dumps(out))


# ------------------------------------------------------------------ two processes


def known_state(layout: parallel.Layout) -> dict:
    """Arrays that anyone can make, split over all devices or on each, and a number."""
    rows = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)
    split, whole = layout.sharding(parallel.AXES), layout.sharding()
    return {
        "split": parallel.global_array(rows, split),
        "half": parallel.global_array(rows.astype(jnp.bfloat16), split),
        "whole": parallel.global_array(rows[0], whole),
        "step": 7,
    }


def equal_here(a, b) -> bool:
    """Whether the shards of this process have the same bits."""
    return all(
        x.data.tobytes() == y.data.tobytes() and x.index == y.index
        for name in ("split", "half", "whole")
        for x, y in zip(
            a[name].addressable_shards, b[name].addressable_shards, strict=True
        )
        for x, y in [(_on_host(x), _on_host(y))]
    )


class _on_host:
    def __init__(self, shard):
        self.data, self.index = np.asarray(shard.data), shard.index


def ending(work) -> str:
    """How `work`, done by all processes together, ends in this one."""
    try:
        return f"done: {work()}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def failing(process: int, error: BaseException):
    def work():
        if jax.process_index() == process:
            raise error
        return jax.process_index()

    return work


def parts(policy: str, given: str, scratch: str) -> None:
    names = ("LLD_COORDINATOR", "LLD_PROCESSES", "LLD_PROCESS")
    place = cluster.place(*map(os.environ.get, names), heartbeat=15)
    with cluster.joined(place):
        number, scratch = jax.process_index(), Path(scratch)
        out = {"devices": [jax.device_count(), jax.local_device_count()]}
        mesh = parallel.make_mesh(2, 2, 2)
        layout = parallel.train_layout(mesh)
        out["neighbours"] = [d.process_index for d in mesh.devices.flat]
        own = parallel.local_mesh(mesh)
        out["own"] = list(own.devices.shape)

        published = parallel.global_array(
            np.arange(16.0).reshape(4, 4), layout.sharding("tensor")
        )
        local = parallel.to_local({"x": published}, own)["x"]
        shards = [x.addressable_shards for x in (published, local)]
        out["local"] = np.asarray(local).ravel().tolist()
        out["copied"] = len(
            {s.data.unsafe_buffer_pointer() for s in shards[1]}
            - {s.data.unsafe_buffer_pointer() for s in shards[0]}
        )
        out["local_spec"] = local.sharding.spec == P("tensor")

        known = known_state(layout)
        with checkpoint.open_checkpoints(given, keep=9, writes=False) as checkpoints:
            state, info = checkpoint.restore(checkpoints, known)
        out["restored"] = [equal_here(known, state), state["step"], info]
        with checkpoint.open_checkpoints(scratch / "saved", keep=9) as checkpoints:
            checkpoint.save(checkpoints, 2, known, {"from": number})

        config = hf.read_config(policy)
        abstract = model.abstract_params(config, layout)
        params = hf.load(policy, config, parallel.param_shardings(abstract, layout))
        hf.save(scratch / "export", params, config, policy)

        long = "x" * (5000 * (1 + number))
        out["gather"] = [len(x) for x in exchange.gather(lambda: long)]
        out["first"] = exchange.first(lambda: f"of {jax.process_index()}")
        out["share"] = list(range(7))[exchange.share_of(7)]
        bug, stop = ZeroDivisionError("a bug"), Preempted("stopped by SIGTERM")
        out["bug"] = ending(lambda: exchange.gather(failing(1, bug)))
        out["stop"] = ending(lambda: exchange.gather(failing(1, stop)))
        nested = failing(0, config_lib.ConfigError("wrong folder"))
        out["nested"] = ending(lambda: exchange.agree(lambda: exchange.first(nested)))
        out["after"] = exchange.gather(lambda: number)
        (scratch / f"{number}.json").write_text(json.dumps(out))
        exchange.gather(lambda: None)
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # at work, far from the others


if __name__ == "__main__":
    {"train": train, "eight": eight, "parts": parts}[sys.argv[1]](*sys.argv[2:])
