"""Evaluation: every question once in each mode, and the same numbers every time."""

import dataclasses
from statistics import fmean

import pytest

from lld_jax import agent as agent_lib
from lld_jax import evaluate
from lld_jax.data.questions import Question
from lld_jax.diagnosis import diagnostics
from lld_jax.protocol.rewards import exact_match
from lld_jax.protocol.trajectory import final_answer
from lld_jax.rollout import Sampling


@pytest.fixture(scope="module")
def scored(agent, published):
    done = []
    sets = evaluate.load_sets(agent)
    metrics, made = evaluate.evaluate(agent, published, sets, on_progress=done.append)
    return sets, metrics, made, done


def test_sets_are_those_of_the_config_cut_to_the_limit(agent, config):
    sets = evaluate.load_sets(agent)
    assert list(sets) == list(config.questions.eval)
    assert [len(some) for some in sets.values()] == [4, 4]
    whole = agent.questions(config.questions.eval[0])
    assert sets[config.questions.eval[0]] == whole[:4] and len(whole) == 8


def test_only_chosen_sets_and_no_limit(agent, config):
    config.eval.limit, config.eval.sets = 0, ("tiny_world:validation_unseen",)
    sets = evaluate.load_sets(dataclasses.replace(agent, config=config))
    assert list(sets) == ["tiny_world:validation_unseen"]
    assert len(sets["tiny_world:validation_unseen"]) == 24
    assert {q.hops for q in sets["tiny_world:validation_unseen"]} == {1, 2}


def test_every_question_once_in_each_mode(agent, scored):
    sets, _, made, done = scored
    questions = [q for some in sets.values() for q in some]
    assert sum(done) == 2 * len(questions)
    assert list(made) == ["greedy", "sampled"]
    for trajectories in made.values():
        assert [t.question for t in trajectories] == [q.question for q in questions]
        assert [t.draw for t in trajectories] == list(range(8))
    assert [t.ids for t in made["greedy"]] != [t.ids for t in made["sampled"]]


def test_metrics_follow_from_the_trajectories(agent, scored):
    sets, metrics, made, _ = scored
    questions = [q for some in sets.values() for q in some]
    expected = {}
    for mode, trajectories in made.items():
        answers = [final_answer(t, agent.codec.token_bytes) for t in trajectories]
        right = [
            exact_match(answer, q.golden_answers)
            for answer, q in zip(answers, questions, strict=True)
        ]
        searches = [t.counters["valid_searches"] for t in trajectories]
        parts = {
            "": list(range(8)),
            "/seen.jsonl": list(range(4)),
            "/tiny_world_validation_unseen": list(range(4, 8)),
        } | {
            f"/hops{hops}": [i for i, q in enumerate(questions) if q.hops == hops]
            for hops in (1, 2)
        }
        for part, rows in parts.items():
            name = f"eval/{mode}{part}"
            expected[f"{name}/exact_match"] = fmean(right[i] for i in rows)
            expected[f"{name}/searches"] = fmean(searches[i] for i in rows)
            expected[f"{name}/questions"] = float(len(rows))
    assert metrics == expected


def test_scoring_again_gives_the_same_trajectories(agent, published, scored):
    sets, metrics, made, _ = scored
    again, others = evaluate.evaluate(agent, published, sets)
    assert again == metrics
    assert others == made


def test_questions_of_unknown_hops_are_in_no_group(agent, scored):
    sets, _, made, _ = scored
    (name, some), *_ = sets.items()
    unknown = {name: [dataclasses.replace(q, hops=0) for q in some]}
    questions = unknown[name]
    metrics = evaluate._metrics("eval/greedy", made["greedy"][:4], unknown, questions)
    assert not any("hops" in key for key in metrics)


def test_a_question_that_is_too_long_is_shortened_and_counted(agent, published):
    asked = [
        (draw, Question(str(draw), text, ("of",)))
        for draw, text in enumerate(("Who? " * 99, "Who?"))
    ]
    trajectories, stats = agent_lib.sample(
        agent,
        published,
        asked,
        group=1,
        seed=0,
        sampling=Sampling(temperature=0.0),
        max_turns=1,
    )
    assert [t.counters["prompts_truncated"] for t in trajectories] == [1, 0]
    assert trajectories[0].prompt_length <= agent.config.rollout.max_prompt
    metrics = diagnostics.of_rollout(trajectories, stats)
    assert metrics["rollout/prompts_truncated"] == 0.5


def test_sets_of_one_file_name_keep_apart(agent, published):
    some = agent.questions(agent.config.questions.eval[0])
    sets = {"a/dev.jsonl": some[:1], "b/dev.jsonl": some[1:3], "hops.jsonl": some[:1]}
    metrics, _ = evaluate.evaluate(agent, published, sets)
    counts = {k.split("/")[2]: v for k, v in metrics.items() if k.endswith("questions")}
    names = ("a_dev.jsonl", "b_dev.jsonl", "hops.jsonl")
    assert [counts[name] for name in names] == [1, 2, 1]
