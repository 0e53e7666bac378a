"""Exact match on question sets, greedy and sampled side by side."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from lld_jax.agent import Agent, sample
from lld_jax.data.questions import Question
from lld_jax.protocol.trajectory import Trajectory
from lld_jax.rollout import Sampling

MODES = {"greedy": 0.0, "sampled": 1.0}
# Apart from the seed of training, so that no draw of the two is the same.
_SEED_OFFSET = 1 << 20


def load_sets(agent: Agent) -> dict[str, list[Question]]:
    """The evaluation sets of the config by source, cut to `eval.limit` questions."""
    config = agent.config
    limit = config.eval.limit or None
    names = config.eval.sets or config.questions.eval
    return {name: agent.questions(name)[:limit] for name in names}


def evaluate(
    agent: Agent,
    published: Any,
    sets: dict[str, list[Question]],
    *,
    on_progress: Callable[[int], None] = lambda done: None,
) -> tuple[dict[str, float], dict[str, list[Trajectory]]]:
    """Scores every question of every set once in each mode.

    Greedy decoding, and sampling at `rollout.temperature`, cut to `eval.top_p` and
    `eval.top_k`. The same questions get the same random numbers whenever they are
    scored.

    Returns:
      metrics `eval/<mode>/<what>` of all sets together, by set (`eval/<mode>/
      <set>/...`) and by hops (`eval/<mode>/hops<n>/...`); and the trajectories of each
      mode, sets one after another.
    """
    questions = [q for some in sets.values() for q in some]
    made, metrics = {}, {}
    for mode, scale in MODES.items():
        made[mode], _ = sample(
            agent,
            published,
            list(enumerate(questions)),
            group=1,
            seed=agent.config.seed + _SEED_OFFSET,
            sampling=Sampling(
                temperature=scale * agent.config.rollout.temperature,
                top_p=agent.config.eval.top_p,
                top_k=agent.config.eval.top_k,
            ),
            max_turns=agent.config.eval.max_turns,
            on_progress=on_progress,
        )
        metrics |= _metrics(f"eval/{mode}", made[mode], sets, questions)
    return metrics, made


def _metrics(
    prefix: str,
    trajectories: Sequence[Trajectory],
    sets: dict[str, list[Question]],
    questions: list[Question],
) -> dict[str, float]:
    groups = {prefix: list(trajectories)}
    start = 0
    short = [name.rpartition("/")[2] for name in sets]
    for name, last, some in zip(sets, short, sets.values(), strict=True):
        # Sets of one file name in several folders keep their whole names.
        label = last if short.count(last) == 1 else name.replace("/", "_")
        label = label.replace(":", "_")
        groups[f"{prefix}/{label}"] = trajectories[start : start + len(some)]
        start += len(some)
    for traj, question in zip(trajectories, questions, strict=True):
        if question.hops:
            groups.setdefault(f"{prefix}/hops{question.hops}", []).append(traj)
    return {
        f"{name}/{what}": value
        for name, some in groups.items()
        for what, value in (
            ("exact_match", fmean(t.reward for t in some)),
            ("searches", fmean(t.counters["valid_searches"] for t in some)),
            ("questions", float(len(some))),
        )
    }
