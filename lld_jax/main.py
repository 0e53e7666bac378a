"""Command line: train, evaluate, ask and export search agents.

python -m lld_jax.main --config=configs/tiny.py
python -m lld_jax.main --config=configs/tiny.py --mode=eval --policy=DIR
python -m lld_jax.main --config=configs/tiny.py --mode=ask --question="Who ...?"
"""

import json
import sys
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from lld_jax import agent as agent_lib
from lld_jax import checkpoint, evaluate, hf, host, metrics, search, train, update
from lld_jax import config as config_lib
from lld_jax.agent import Agent
from lld_jax.guard import Collapsing
from lld_jax.overrides import clean_argv, workdir_name
from lld_jax.preemption import Preempted
from lld_jax.questions import Question
from lld_jax.rollout import Sampling

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run; default runs/<config>[-<overrides>]."
)
_MODE = flags.DEFINE_enum(
    "mode", "train", ["train", "eval", "ask", "export"], "What to do."
)
_POLICY = flags.DEFINE_string(
    "policy",
    None,
    "eval, ask: a Hugging Face folder to use in place of the run's last checkpoint.",
)
_QUESTION = flags.DEFINE_string("question", None, "ask: the question.")


def policy_params(agent: Agent, workdir: Path):
    """Parameters of `--policy`, else of the run's last checkpoint, else the start."""
    if _POLICY.value:
        return agent_lib.load_params(agent, hf.resolve(_POLICY.value)), _POLICY.value
    folder = workdir / "checkpoints"
    params = agent_lib.load_params(agent)
    step = checkpoint.latest_step(folder)
    if step is None:
        print(f"{folder} has no checkpoint: this is model.path itself", file=sys.stderr)
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
    with metrics.work_bar(total, "eval") as moved:
        published = agent_lib.publisher(agent)(params)
        scores, _ = evaluate.evaluate(agent, published, sets, on_progress=moved)
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
    for span in traj.spans:
        text = search.decode(traj.ids[span.start : span.end], agent.codec.token_bytes)
        print(f"--- {span.kind}\n{text.strip()}")
    answer = search.final_answer(traj, agent.codec.token_bytes)
    print(f"--- ended: {traj.reason}, {len(traj.searches)} searches")
    print(f"answer: {answer}" if answer else "no answer")


def run_export(agent: Agent, workdir: Path) -> None:
    """Writes `export/` from the last checkpoint of a run."""
    if checkpoint.latest_step(workdir / "checkpoints") is None:
        raise config_lib.ConfigError(
            f"workdir: {str(workdir)!r} has no checkpoint to export"
        )
    params, name = policy_params(agent, workdir)
    hf.save(workdir / "export", params, agent.model, agent.folder)
    print(f"wrote {workdir / 'export'} from {name}")


def _describe(summary: dict) -> str:
    lines = []
    for mode, score in summary["exact_match"].items():
        lines.append(
            f"exact match, {mode}: {score['before']:.3f} before, "
            f"{score['after']:.3f} after training"
        )
    return "\n".join(lines)


def main(argv: list[str], spec: str) -> None:
    """Runs `--mode`; `spec` is the value of --config as it was written."""
    if len(argv) > 1:
        raise app.UsageError(f"not a flag: {argv[1]!r}")
    logging.set_verbosity(logging.ERROR)  # orbax tells every step of every save
    config = flags.FLAGS.config
    overrides = config_flags.get_override_values(flags.FLAGS["config"])
    workdir = Path(_WORKDIR.value or workdir_name(spec, overrides)).absolute()
    config_lib.check(config, devices=jax.device_count())
    if jax.default_backend() == "cpu":
        host.keep_freed_memory()
    print(config_lib.to_json(config), file=sys.stderr)
    if _MODE.value == "train":
        summary = train.train(config, workdir)
        print(_describe(summary))
        print(f"{summary['seconds']:.0f} s; all of it in {workdir}")
        return
    agent = agent_lib.open_agent(config)
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
    except (config_lib.ConfigError, train.Diverged, Collapsing) as error:
        sys.exit(f"lld_jax: {error}")
    except Preempted as error:
        print(f"lld_jax: {error}", file=sys.stderr)
        sys.exit(143)


if __name__ == "__main__":
    run()
