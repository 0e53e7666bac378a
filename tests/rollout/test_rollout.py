"""Whole rollouts of the small policy: the sampler and the trainer see the same text."""

import gc
import random

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import Slow
from tiny import serving_device

from lld_jax import agent as agent_lib
from lld_jax.protocol.stop import stop_table
from lld_jax.rollout import Limits, Sampling, decoding, rollout, tasks_of
from lld_jax.run import metrics
from lld_jax.training.batch import pack


@pytest.fixture(scope="module")
def tasks(agent):
    questions = agent.questions(agent.config.questions.train)
    return tasks_of(list(enumerate(questions[:4])), 3)


def run(agent, published, tasks, programs=None, sampling=None, seed=3, env=None):
    return rollout(
        programs or agent.programs,
        published,
        env or agent.environment,
        tasks,
        Limits(max_turns=2, max_action=agent.config.rollout.max_action),
        sampling or Sampling(),
        seed=seed,
    )[0]


def test_the_batch_is_worth_testing_with(trajectories):
    """Several turns, searches, invalid actions, every way to end but one."""
    assert {t.reason for t in trajectories} >= {"answered", "turns", "invalid"}
    assert sum(t.counters["valid_searches"] for t in trajectories) > 3
    assert {t.reward for t in trajectories} == {0.0, 1.0}
    turns = [sum(s.kind == "action" for s in t.spans) for t in trajectories]
    assert {1, 2, 3} <= set(turns)


def test_the_cache_and_the_published_weights_are_freed_before_the_update(
    agent, params, tasks
):
    """Memory is that of the larger of the two phases, not their sum."""
    shapes = agent.programs.shapes

    def held():
        gc.collect()
        cache = shapes.positions // shapes.block, shapes.slots
        live = jax.live_arrays()
        caches = [x for x in live if x.ndim == 6 and x.shape[1:3] == cache]
        return len(caches), sum(x.nbytes for x in live)

    before = held()
    seen = []
    rollout(
        agent.programs,
        agent_lib.publisher(agent)(params),
        agent.environment,
        tasks,
        Limits(max_turns=1, max_action=agent.config.rollout.max_action),
        Sampling(),
        seed=3,
        on_progress=lambda done: seen or seen.append(held()),
    )
    assert seen[0][0] == before[0] + 2  # keys and values, while it ran
    assert held() == before


def test_sampler_logps_are_those_of_the_training_program(
    agent, params, functions, trajectories
):
    """Whole trajectories, turns and observations included, to 1e-4."""
    _, logps_fn, *_ = functions
    config = agent.config
    batch = pack(
        trajectories,
        rows=12,
        tokens=config.rollout.max_tokens,
        token_bytes=agent.codec.token_bytes,
    )
    micro = config.optim.micro_rows
    stacked = {k: x.reshape(12 // micro, micro, -1) for k, x in batch.items()}
    logps = logps_fn(params, stacked, 0, 12 // micro)
    logps = np.asarray(logps).reshape(12, -1)
    mask = batch["mask"] == 1
    assert mask.sum() > 150
    np.testing.assert_allclose(logps[mask], batch["sampler_logps"][mask], atol=1e-4)
    assert (logps[mask] < 0).all() and logps[mask].std() > 0.5


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_same_bits_in_any_order_company_and_delay(
    agent, published, tasks, trajectories, data
):
    """Other slots, leaders and copies: the tokens and their log-probs stay."""
    picked = data.draw(st.lists(st.sampled_from(range(12)), min_size=1, unique=True))
    rng = random.Random(data.draw(st.integers(0, 99)))
    env = Slow(agent.environment, rng, data.draw(st.sampled_from([0.0, 0.01])))
    made = run(agent, published, [tasks[i] for i in picked], env=env)
    for traj, i in zip(made, picked, strict=True):
        assert (traj.draw, traj.sample) == (tasks[i].draw, tasks[i].sample)
        assert traj.ids == trajectories[i].ids and traj.mask == trajectories[i].mask
        assert traj.sampler_logps == trajectories[i].sampler_logps
        assert (traj.reason, traj.searches) == (
            trajectories[i].reason,
            trajectories[i].searches,
        )


def programs_of(agent, shapes):
    """The agent's own, for other shapes."""
    return decoding.make_programs(
        agent.model,
        shapes,
        stop_table(agent.codec.token_bytes, end_ids=agent.codec.end_ids),
        dtype=agent.dtype,
        valid_vocab=len(agent.codec.token_bytes),
        layout=serving_device(),
    )


@pytest.mark.parametrize(
    ("slots", "rows", "tokens", "block", "steps", "widths"),
    [
        (1, 1, 50, 64, 3, ()),
        (3, 1, 7, 16, 1, ()),
        (16, 5, 100, 192, 40, ()),
        (12, 2, 64, 64, 8, (1, 3, 6)),
    ],
)
def test_same_tokens_for_other_shapes(
    agent, published, tasks, trajectories, slots, rows, tokens, block, steps, widths
):
    """And for tasks in another order, and for replies that come late."""
    length = agent.config.rollout.max_tokens
    programs = programs_of(
        agent, decoding.Shapes(slots, length, rows, tokens, block, steps, widths)
    )
    rng = random.Random(slots)
    order = rng.sample(range(len(tasks)), len(tasks))
    env = Slow(agent.environment, rng, 0.005)
    made = run(agent, published, [tasks[i] for i in order], programs, env=env)
    for traj, i in zip(made, order, strict=True):
        other = trajectories[i]
        assert traj.ids == other.ids and traj.mask == other.mask
        np.testing.assert_allclose(traj.sampler_logps, other.sampler_logps, atol=1e-4)


def test_stacked_layers_give_what_listed_ones_give(
    agent, params, published, tasks, trajectories
):
    """CPUs get a list, accelerators a scan."""
    assert isinstance(published["layers"], list)
    assert not isinstance(params["layers"], list)
    made = run(agent, params, tasks, programs_of(agent, agent.programs.shapes))
    for traj, other in zip(made, trajectories, strict=True):
        assert traj.ids == other.ids and traj.mask == other.mask
        np.testing.assert_allclose(traj.sampler_logps, other.sampler_logps, atol=1e-4)


def test_the_seed_and_the_draw_matter(agent, published, tasks, trajectories):
    other = run(agent, published, tasks, seed=4)
    assert [t.ids for t in other] != [t.ids for t in trajectories]
    groups = [{tuple(t.ids) for t in trajectories if t.draw == d} for d in range(4)]
    assert max(map(len, groups)) > 1  # samples of a draw differ


def test_the_same_question_drawn_twice_makes_two_groups(agent, published):
    (question,) = agent.questions(agent.config.questions.train)[:1]
    tasks = tasks_of([(10, question), (11, question)], 4)
    first, second = np.split(np.array(run(agent, published, tasks), object), 2)
    assert {t.draw for t in first} == {10} and {t.draw for t in second} == {11}
    assert [t.ids for t in first] != [t.ids for t in second]


def test_nothing_compiles_in_a_second_rollout(agent, published, tasks, trajectories):
    before = agent.programs.compilations()
    assert before == 4  # init, extend, decode, fork
    with metrics.CompileCounter() as compiled:
        run(agent, published, tasks[:5], sampling=Sampling(0.0), seed=9)
        run(agent, published, tasks, sampling=Sampling(1.0, 0.9, 20))
        run(agent, published, tasks, sampling=Sampling(0.7))
    assert compiled.count == 0
    assert agent.programs.compilations() == before


def test_greedy_needs_no_random_numbers(agent, published, tasks):
    greedy = run(agent, published, tasks, sampling=Sampling(0.0))
    again = run(agent, published, tasks, sampling=Sampling(0.0), seed=77)
    assert [t.ids for t in greedy] == [t.ids for t in again]
    for draw in range(4):  # all samples of a draw agree
        assert len({tuple(t.ids) for t in greedy if t.draw == draw}) == 1


def test_every_sampled_token_is_kept_and_none_is_beyond_the_vocabulary(
    agent, trajectories
):
    valid = len(agent.codec.token_bytes)
    assert valid < agent.model.vocab
    for t in trajectories:
        assert max(t.ids) < valid
        assert len(t.ids) == len(t.mask) == len(t.sampler_logps)
        assert sum(t.mask[: t.prompt_length]) == 0
        actions = [s for s in t.spans if s.kind == "action"]
        assert sum(s.end - s.start for s in actions) == sum(t.mask)
        assert all(s.end - s.start <= agent.config.rollout.max_action for s in actions)
