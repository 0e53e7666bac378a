"""Command line: train, evaluate, ask and export search agents.

python -m lld_jax.main --config=configs/tiny.py
python -m lld_jax.main --config=configs/tiny.py --mode=eval --policy=DIR
python -m lld_jax.main --config=configs/tiny.py --mode=ask --question="Who ...?"
python -m lld_jax.main --config=configs/qwen7b.py --mode=plan --device=v5e

On several hosts the same command runs in a process on each, all with one work folder
(and `mesh.data` a multiple of their number):

    --coordinator=HOST:PORT --processes=N --process=I

HOST being that of process 0; or LLD_COORDINATOR, LLD_PROCESSES, LLD_PROCESS in the
environment; or `--distributed`, where JAX finds it out (TPU pods, Slurm). If one is
killed the others end too, after `--heartbeat` seconds at most: start all of them again.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from lld_jax import agent as agent_lib
from lld_jax import config as config_lib
from lld_jax import evaluate, plan, train
from lld_jax.agent import Agent
from lld_jax.config.overrides import clean_argv, workdir_name
from lld_jax.data.questions import Question
from lld_jax.diagnosis.guard import Collapsing
from lld_jax.model import hf, sizes
from lld_jax.parallel import cluster, exchange
from lld_jax.parallel.exchange import PeerFailed
from lld_jax.parallel.preemption import Preempted
from lld_jax.protocol import search, trajectory
from lld_jax.rollout import Sampling
from lld_jax.run import checkpoint, host, metrics, storage
from lld_jax.training import update

_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run, or gs://BUCKET/FOLDER; default runs/<config>[-<overrides>].",
)
_MODE = flags.DEFINE_enum(
    "mode", "train", ["train", "eval", "ask", "export", "plan"], "What to do."
)
_POLICY = flags.DEFINE_string(
    "policy",
    None,
    "eval, ask: a Hugging Face folder to use in place of the run's last checkpoint.",
)
_QUESTION = flags.DEFINE_string("question", None, "ask: the question.")
_DEVICE = flags.DEFINE_enum(
    "device", None, sorted(plan.MEMORY), "plan: what it is for; default: what is here."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "Several processes: HOST:PORT of process 0; a free port."
)
_PROCESSES = flags.DEFINE_string("processes", None, "Several processes: how many.")
_PROCESS = flags.DEFINE_string("process", None, "Several processes: which, from 0.")
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Several processes, and JAX finds out which (pods, Slurm)."
)
_HEARTBEAT = flags.DEFINE_string(
    "heartbeat", None, "Seconds without a sign of life: a process is gone; 100."
)


def policy_params(agent: Agent, workdir: Path):
    """Parameters of `--policy`, else of the run's last checkpoint, else the start."""
    if _POLICY.value:
        return agent_lib.load_params(agent, hf.resolve(_POLICY.value)), _POLICY.value
    folder = workdir / "checkpoints"
    params = agent_lib.load_params(agent)
    step = checkpoint.latest_step(folder)
    if step is None:
        if exchange.is_first():
            message = f"{folder} has no checkpoint: this is model.path itself"
            print(message, file=sys.stderr)
        return params, str(agent.folder)
    init, *_ = update.make_functions(agent)
    with checkpoint.open_checkpoints(
        folder, keep=agent.config.checkpoint.keep, writes=False
    ) as saved:
        target = {"state": init(params), "step": 0}
        if agent.config.llds.anchor:
            target["anchor"] = params
        restored, _ = checkpoint.restore(saved, target, step)
    return restored["state"]["params"], f"{folder}/{restored['step']}"


def run_eval(agent: Agent, workdir: Path) -> None:
    """Scores a policy on the evaluation sets and prints a JSON of the metrics."""
    params, name = policy_params(agent, workdir)
    sets = evaluate.load_sets(agent)
    total = sum(map(len, sets.values())) * len(evaluate.MODES)
    with metrics.work_bar(total, "eval", active=exchange.is_first()) as moved:
        published = agent_lib.publisher(agent)(params)
        scores, _ = evaluate.evaluate(agent, published, sets, on_progress=moved)
    if exchange.is_first():
        print(json.dumps({"policy": name} | scores, indent=2))


def run_ask(agent: Agent, workdir: Path) -> None:
    """Prints one greedy trajectory: what was asked, searched, found and answered."""
    if not _QUESTION.value:
        raise config_lib.ConfigError('question: unset; legal is --question="..."')
    params, _ = policy_params(agent, workdir)
    question = Question("ask", _QUESTION.value, ("",))
    (traj,), _ = agent_lib.sample(
        agent,
        agent_lib.publisher(agent)(params),
        [(0, question)],
        group=1,
        seed=agent.config.seed,
        sampling=Sampling(temperature=0.0),
        max_turns=agent.config.eval.max_turns,
    )
    if not exchange.is_first():
        return
    for span in traj.spans:
        text = search.decode(traj.ids[span.start : span.end], agent.codec.token_bytes)
        print(f"--- {span.kind}\n{text.strip()}")
    answer = trajectory.final_answer(traj, agent.codec.token_bytes)
    print(f"--- ended: {traj.reason}, {len(traj.searches)} searches")
    print(f"answer: {answer}" if answer else "no answer")


def run_export(agent: Agent, workdir: Path) -> None:
    """Writes `export/` from the last checkpoint of a run."""
    if checkpoint.latest_step(workdir / "checkpoints") is None:
        raise config_lib.ConfigError(
            f"workdir: {str(workdir)!r} has no checkpoint to export"
        )
    params, name = policy_params(agent, workdir)
    agent_lib.save_params(agent, params, workdir / "export")
    if exchange.is_first():
        print(f"wrote {workdir / 'export'} from {name}")


def run_plan(config: ConfigDict) -> None:
    """Prints what a run takes; its devices, data and weights need not be there."""
    config_lib.check(config, files=False)
    path = config.model.path
    model = sizes.QWEN2_5.get(path) or hf.read_config(hf.resolve(path))
    config_lib.check_model(config, kv_heads=model.kv_heads)
    here = jax.local_devices()[0]
    memory = plan.memory_of(here)
    if _DEVICE.value:
        memory = plan.MEMORY[_DEVICE.value] * plan.GIB
    on_cpu = here.platform == "cpu" and not _DEVICE.value
    made = plan.make_plan(config, model, on_cpu=on_cpu)
    print(plan.describe(made, config, memory))
    if memory:
        plan.check(made, memory, config)


def _describe(summary: dict) -> str:
    lines = []
    for mode, score in summary["exact_match"].items():
        lines.append(
            f"exact match, {mode}: {score['before']:.3f} before, "
            f"{score['after']:.3f} after training"
        )
    return "\n".join(lines)


def _place() -> dict | None:
    """What the flags say of other processes, else the environment."""

    def value(flag: flags.FlagHolder) -> str | None:
        return flag.value or os.environ.get(f"LLD_{flag.name.upper()}")

    return cluster.place(
        value(_COORDINATOR),
        value(_PROCESSES),
        value(_PROCESS),
        distributed=_DISTRIBUTED.value,
        heartbeat=value(_HEARTBEAT) or 100,
    )


def main(argv: list[str], spec: str) -> None:
    """Runs `--mode`; `spec` is the value of --config as it was written."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {argv[1]!r}")
    logging.set_verbosity(logging.ERROR)  # orbax tells every step of every save
    with cluster.joined(_place()):
        _run_mode(spec)


def _run_mode(spec: str) -> None:
    config = flags.FLAGS.config
    overrides = config_flags.get_override_values(flags.FLAGS["config"])
    workdir = storage.folder(_WORKDIR.value or workdir_name(spec, overrides))
    if _MODE.value == "plan":
        run_plan(config)
        return
    devices, processes = jax.device_count(), jax.process_count()
    exchange.agree(
        lambda: config_lib.check(config, devices=devices, processes=processes)
    )
    if jax.default_backend() == "cpu":
        host.keep_freed_memory()
    if exchange.is_first():
        print(config_lib.to_json(config), file=sys.stderr)
    if _MODE.value == "train":
        summary = train.train(config, workdir)
        if exchange.is_first():
            print(_describe(summary))
            print(f"{summary['seconds']:.0f} s; all of it in {workdir}")
        return
    agent = exchange.agree(lambda: agent_lib.open_agent(config))
    modes = {"eval": run_eval, "ask": run_ask, "export": run_export}
    modes[_MODE.value](agent, workdir)


def run() -> None:
    """Entry point: checks the command line, then hands over to absl."""
    try:
        argv = clean_argv(sys.argv)
        config_flags.DEFINE_config_file("config", sys_argv=argv)
        spec = [word for word in argv if word.startswith("--config=")]
        if not spec:
            raise config_lib.ConfigError("config: unset; legal is --config=FILE")
        spec = spec[-1].removeprefix("--config=")
        app.run(lambda rest: main(rest, spec), argv=argv)
    except (config_lib.ConfigError, train.Diverged, Collapsing, PeerFailed) as error:
        cluster.leave(f"lld_jax: {error}")
    except Preempted as error:
        cluster.leave(f"lld_jax: {error}", 143)
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        if gone := cluster.others_gone(error):
            cluster.leave(f"lld_jax: {gone}", grace=0)
        cluster.leave(f"lld_jax: {type(error).__name__}: {error}")


if __name__ == "__main__":
    run()
