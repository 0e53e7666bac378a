"""Do correct responses lose likelihood in an update that rewards them? (Fig. 3a)

    python -m experiments.displacement --config=configs/tiny.py --policy=DIR --out=DIR

Samples groups of training questions and, from the same weights each time, updates on
one question and measures its responses again. Writes results.json and table.md.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.displacement import study, table
from lld_jax import agent as agent_lib
from lld_jax import config as config_lib
from lld_jax.config import ConfigError
from lld_jax.config.overrides import load
from lld_jax.data.questions import question_of_draw
from lld_jax.model import hf
from lld_jax.rollout import Sampling
from lld_jax.run import host, metrics

_QUICK = 8  # questions


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags; exits with a message that names the flag if one is wrong."""
    parser = argparse.ArgumentParser(
        prog="experiments.displacement", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--config", default="configs/tiny.py", help="FILE or FILE:ARGUMENT")
    add("--policy", help="Hugging Face folder to start from; default model.path")
    add("--questions", type=_whole(1), default=50)
    add("--rollouts", type=_whole(2), default=8, help="responses to a question")
    add("--updates", type=_whole(1), default=1, help="on a question's responses")
    add("--lr", type=_rate, help="default optim.lr")
    add("--optimizer", choices=study.OPTIMIZERS, default="adam")
    add(
        "--settings",
        type=_settings,
        default=_settings("grpo,positives,negatives"),
        help=f"of {','.join(study.SETTINGS)}",
    )
    add("--seed", type=_whole(0), help="default seed of the config")
    add("--out", type=Path, default=Path("runs/displacement"))
    add("--quick", action="store_true", help=f"at most {_QUICK} questions")
    return parser.parse_args(argv)


def _whole(low: int):
    def convert(text: str) -> int:
        value = int(text) if text.isdecimal() else low - 1
        if value < low:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not legal; legal is a whole number, {low} or more"
            )
        return value

    return convert


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not legal; legal is a number, 0 or more"
        )
    return value


def _settings(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in study.SETTINGS:
            legal = ", ".join(study.SETTINGS)
            raise argparse.ArgumentTypeError(
                f"{name!r} is not legal; legal are {legal}, separated by commas"
            )
    return names


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole study, as results.json holds it.

    Raises ConfigError that names the flag or the field.
    """
    began = time.perf_counter()
    config = load(args.config)
    settings = {name: study.SETTINGS[name] for name in args.settings}
    needs = [name for name, setting in settings.items() if setting.llds]
    if needs and not config.llds.coef:
        raise ConfigError(
            f"--settings: {needs[0]!r} needs llds.coef above 0, but {args.config!r} "
            "has 0"
        )
    if config.loss.negatives != "all":
        raise ConfigError(
            f"loss.negatives: {config.loss.negatives!r} has no part in this study; "
            "legal is 'all'"
        )
    config = study.fit_config(
        config,
        questions=min(args.questions, _QUICK) if args.quick else args.questions,
        rollouts=args.rollouts,
        lr=args.lr,
        optimizer=args.optimizer,
    )
    if args.seed is not None:
        config.seed = args.seed
    config_lib.check(config, devices=jax.device_count())
    agent = agent_lib.open_agent(config)
    trained = agent.questions(config.questions.train)
    if config.rollout.questions > len(trained):
        raise ConfigError(
            f"--questions: {config.rollout.questions} is not legal; questions.train "
            f"has {len(trained)}"
        )
    draws = question_of_draw(trained, config.seed)
    questions = [draws[i] for i in range(config.rollout.questions)]

    reference = params = agent_lib.load_params(agent)
    if args.policy:
        try:
            params = agent_lib.load_params(agent, hf.resolve(args.policy))
        except (FileNotFoundError, ValueError) as error:
            raise ConfigError(f"--policy: {error}") from error
    with metrics.work_bar(agent.rows, "rollout") as moved:
        trajectories, _ = agent_lib.sample(
            agent,
            agent_lib.publisher(agent)(params),
            list(enumerate(questions)),
            group=config.rollout.group,
            seed=config.seed,
            sampling=Sampling(config.rollout.temperature),
            max_turns=config.rollout.max_turns,
            on_progress=moved,
        )
    groups, dropped = study.mixed_groups(trajectories)
    if not groups:
        raise ConfigError(
            f"--questions: of {len(questions)} groups {dropped['right']} are all right "
            f"and {dropped['wrong']} all wrong, which leaves none; legal are more "
            "questions or --rollouts, or another --policy"
        )
    displace = study.make_displace(
        agent, settings, updates=args.updates, optimizer=args.optimizer
    )
    records = []
    with metrics.work_bar(len(groups), "updates") as moved:
        for group in groups:
            record = study.describe(group, displace(params, reference, group))
            records.append({"hops": questions[record["draw"]].hops} | record)
            moved(1)
    return {
        "command": {
            "config": args.config,
            "policy": args.policy or "model.path",
            "questions": len(questions),
            "rollouts": args.rollouts,
            "updates": args.updates,
            "lr": config.optim.lr,
            "optimizer": args.optimizer,
            "seed": config.seed,
        },
        "loss": config.loss.to_dict(),
        "llds": config.llds.to_dict(),
        "dropped": dropped,
        "seconds": round(time.perf_counter() - began, 1),
        "questions": records,
    }


def write(results: dict[str, Any], folder: Path) -> None:
    """Writes results.json (one line a question) and table.md."""
    folder.mkdir(parents=True, exist_ok=True)
    questions = [json.dumps(record) for record in results["questions"]]
    head = {k: v for k, v in results.items() if k != "questions"}
    text = json.dumps(head, indent=2).removesuffix("\n}")
    text += ',\n  "questions": [\n    ' + ",\n    ".join(questions) + "\n  ]\n}\n"
    (folder / "results.json").write_text(text)
    (folder / "table.md").write_text(table.markdown(results))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if jax.default_backend() == "cpu":
        host.keep_freed_memory()
    try:
        results = run(args)
    except (ConfigError, FloatingPointError) as error:
        sys.exit(f"experiments.displacement: {error}")
    write(results, args.out)
    print(table.markdown(results), end="")
    dropped = results["dropped"]
    print(
        f"{len(results['questions'])} questions; dropped {dropped['right']} all right, "
        f"{dropped['wrong']} all wrong. {results['seconds']:.0f} s; {args.out}"
    )


if __name__ == "__main__":
    main()
