"""The three programs of a rollout: what is sampled, when slots stop, what is copied."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import serving_device

from lld_jax import decoding
from lld_jax.stop import stop_table

V, VALID, D = 300, 290, 6  # three blocks of 128, the last one cut


@functools.partial(jax.jit, static_argnames="valid_vocab")
def sample(hidden, head, uniform, temperature, valid_vocab=VALID):
    return decoding.sample(
        hidden,
        head,
        uniform,
        temperature,
        valid_vocab=valid_vocab,
        layout=serving_device(),
    )


@pytest.fixture(scope="module")
def logits():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=D).astype(np.float32)
    head = rng.normal(size=(V, D)).astype(np.float32)
    head[0] -= 100 * hidden  # probability 0 in float32
    head[VALID:] += 100 * hidden  # would win if they were allowed
    return hidden, head


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_inverse_of_the_cumulative_distribution(logits, temperature):
    """On a fine grid of uniforms each token gets its share of the grid, in order."""
    hidden, head = logits
    n = 4096
    grid = ((np.arange(n) + 0.5) / n).astype(np.float32)
    tokens, logps = sample(np.tile(hidden, (n, 1)), head, grid, temperature)
    x = np.float64(head[:VALID] @ hidden) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    assert (np.diff(tokens) >= 0).all()
    share = np.bincount(tokens, minlength=VALID) / n
    np.testing.assert_allclose(share, p, atol=1.5 / n)
    # The very token wherever rounding can't move an edge of the distribution.
    edges = np.cumsum(p)
    clear = np.abs(edges[:, None] - grid).min(0) > 1e-5
    assert clear.mean() > 0.9
    expected = np.searchsorted(edges, grid, side="right")
    np.testing.assert_array_equal(np.asarray(tokens)[clear], expected[clear])
    np.testing.assert_allclose(logps, np.log(p[tokens]), atol=2e-5)


def test_the_ends_of_the_unit_interval(logits):
    hidden, head = logits
    ends = np.array([0.0, 1e-30, 1 - 2**-24, 1.0], np.float32)
    tokens, logps = sample(np.tile(hidden, (4, 1)), head, ends, 1.0)
    assert (1 <= tokens).all() and (tokens < VALID).all()  # id 0 has probability 0
    assert np.isfinite(logps).all() and (logps > -60).all()


def test_greedy_is_the_valid_argmax(logits):
    hidden, head = logits
    hiddens = np.random.default_rng(1).normal(size=(50, D)).astype(np.float32)
    tokens, logps = sample(hiddens, head, np.zeros(50, np.float32), 0.0)
    x = hiddens @ head[:VALID].T
    np.testing.assert_array_equal(tokens, x.argmax(1))
    expected = jax.nn.log_softmax(x)[np.arange(50), x.argmax(1)]
    np.testing.assert_allclose(logps, expected, atol=2e-5)  # at temperature 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sick_states_still_give_ids_of_the_vocabulary(logits, temperature):
    """So that a diverged policy ends in the trainer's words, not in an IndexError."""
    _, head = logits
    hidden = np.full((3, D), np.nan, np.float32)
    tokens, _ = sample(hidden, head, np.full(3, 0.5, np.float32), temperature)
    assert (tokens >= 0).all() and (tokens < VALID).all()


# ------------------------------------------------ the programs, on the small agent


def request(programs, appends: dict[int, list[int]], **fields):
    """An extend call; `fields` are by slot or for all, `run` and `fresh` by default."""
    shapes = programs.shapes
    E, N = shapes.extend_rows, shapes.extend_tokens
    names = {"n": 0, "draw": 0, "sample": 0, "limit": shapes.tokens}
    out = {name: np.full(E, value, np.int32) for name, value in names.items()}
    out |= {name: np.ones(E, bool) for name in ("fresh", "run")}
    out |= {"rows": np.zeros(E, np.int32), "ids": np.zeros((E, N), np.int32)}
    for e, (slot, ids) in enumerate(appends.items()):
        out["rows"][e], out["n"][e] = slot, len(ids)
        out["ids"][e, : len(ids)] = ids
        for name, value in fields.items():
            out[name][e] = value[slot] if isinstance(value, dict) else value
    return out


def decode(agent, published, slots, steps, wake=100, temperature=1.0, seed=5):
    return agent.programs.decode(
        published, slots, steps, wake, np.float32(temperature), np.uint32(seed)
    )


def sampled(slots, slot: int, start: int) -> list[int]:
    return np.asarray(slots["ids"])[slot, start : int(slots["length"][slot])].tolist()


@pytest.fixture
def prompts(agent):
    questions = agent.questions(agent.config.questions.train)
    return [agent.environment.start(q.question) for q in questions]


def test_a_slot_stops_on_the_token_that_completes_a_tag(agent, published, prompts):
    table = stop_table(agent.codec.token_bytes, end_ids=agent.codec.end_ids)
    programs, slots = agent.programs, agent.programs.init()
    limit = {slot: len(prompts[slot]) + 12 for slot in range(10)}
    for pair in zip(range(0, 10, 2), range(1, 10, 2), strict=True):
        appends = {slot: prompts[slot] for slot in pair}
        call = request(programs, appends, draw={s: s for s in pair}, limit=limit)
        slots = programs.extend(published, slots, call)
    slots = decode(agent, published, slots, 1000)
    assert not slots["running"].any()
    by_tag = 0
    for slot in range(10):
        action = sampled(slots, slot, len(prompts[slot]))
        state = table.start
        for token in action[:-1]:
            state = table.next_state[state, token]
            assert state != table.stop
        stopped = table.next_state[state, action[-1]] == table.stop
        assert stopped or len(action) == 12
        by_tag += stopped
    assert 0 < by_tag < 10  # both ends occur


def test_steps_wake_and_what_stands_still(agent, published, prompts):
    """Slot 0 stops after 3 tokens, slot 4 after 9; slot 7 waits for more prompt."""
    programs = agent.programs
    start = {slot: len(prompts[slot]) for slot in (0, 4, 7)}

    def fresh():
        limit = {slot: start[slot] + n for slot, n in ((0, 3), (4, 9), (7, 9))}
        slots = programs.init()
        for pair in ((0, 4), (7,)):
            appends = {slot: prompts[slot] for slot in pair}
            run = {slot: slot != 7 for slot in pair}
            call = request(programs, appends, limit=limit, run=run, sample=1)
            slots = programs.extend(published, slots, call)
        return slots

    def lengths(slots):
        return [int(slots["length"][slot]) - start[slot] for slot in (0, 4, 7)]

    assert lengths(fresh()) == [0, 0, 0]
    whole = decode(agent, published, fresh(), 1000)
    assert lengths(whole) == [3, 9, 0] and not whole["running"].any()
    assert lengths(decode(agent, published, fresh(), 2)) == [2, 2, 0]
    woken = decode(agent, published, fresh(), 1000, wake=1)
    assert lengths(woken) == [3, 3, 0]
    assert np.flatnonzero(woken["running"]).tolist() == [4]
    # One token at a time gives what one call gives: ids, logps and cache, bit by bit.
    single = fresh()
    for _ in range(9):
        single = decode(agent, published, single, 1)
    for name in whole:
        np.testing.assert_array_equal(single[name], whole[name], err_msg=name)


def test_a_prompt_in_pieces(agent, published, prompts):
    prompt, programs = prompts[0], agent.programs
    whole = programs.extend(
        published, programs.init(), request(programs, {3: prompt}, limit=99)
    )
    slots = programs.init()
    for start in range(0, len(prompt), 16):
        piece, first = prompt[start : start + 16], start == 0
        last = start + 16 >= len(prompt)
        call = request(programs, {3: piece}, fresh=first, run=last, limit=99)
        slots = programs.extend(published, slots, call)
    assert int(slots["length"][3]) == len(prompt) and bool(slots["running"][3])
    np.testing.assert_allclose(slots["hidden"][3], whole["hidden"][3], atol=1e-5)
    for name in ("k", "v"):
        np.testing.assert_allclose(slots[name], whole[name], atol=1e-5)


def test_fork_is_the_same_as_computing_the_prompt_again(agent, published, prompts):
    programs = agent.programs
    R, n = programs.shapes.slots, len(prompts[0])
    both = request(programs, {2: prompts[0], 6: prompts[0]}, draw=4, limit=n + 8)
    both["sample"][1] = 2
    again = programs.extend(published, programs.init(), both)
    one = request(programs, {2: prompts[0]}, draw=4, limit=n + 8)
    forked = programs.extend(published, programs.init(), one)
    src, dst = np.full(R, R, np.int32), np.full(R, R, np.int32)
    src[6], dst[6] = 2, 6
    sample = np.zeros(R, np.int32)
    sample[6] = 2
    forked = programs.fork(forked, src, dst, sample)
    for name in again:
        np.testing.assert_array_equal(forked[name], again[name], err_msg=name)
    forked = decode(agent, published, forked, 8)
    assert sampled(forked, 2, n) != sampled(forked, 6, n)  # samples differ


def test_a_token_depends_on_draw_sample_position_and_seed_alone(
    agent, published, prompts
):
    """Not on the slot, on what else runs, or on what the slot held before."""
    programs, n = agent.programs, len(prompts[0])

    def run(slots, slot, seed=5, draw=1, sample=1):
        fields = {"draw": draw, "sample": sample, "limit": n + 8}
        call = request(programs, {slot: prompts[0]}, **fields)
        slots = programs.extend(published, slots, call)
        slots = decode(agent, published, slots, 8, seed=seed)
        end = int(slots["length"][slot])
        return sampled(slots, slot, n), np.asarray(slots["logps"])[slot, n:end], slots

    ids, logps, used = run(programs.init(), 0)
    other = programs.extend(
        published, used, request(programs, {0: prompts[1], 5: prompts[2]}, draw=8)
    )
    again, same_logps, used = run(other, 9)
    assert again == ids
    np.testing.assert_array_equal(same_logps, logps)
    again, same_logps, used = run(used, 0)  # over the rest of a longer trajectory
    assert again == ids
    np.testing.assert_array_equal(same_logps, logps)
    assert run(programs.init(), 0, seed=6)[0] != ids
    assert run(programs.init(), 0, draw=2)[0] != ids
    assert run(programs.init(), 0, sample=2)[0] != ids


def test_uniforms_are_uniform():
    draw, sample, position = np.meshgrid(*[np.arange(16)] * 3)
    flat = [x.ravel().astype(np.int32) for x in (draw, sample, position)]
    u = np.sort(jax.jit(decoding._uniforms)(np.uint32(1), *flat))
    assert len(np.unique(u)) > 4090 and 0 <= u[0] and u[-1] < 1
    gap = np.abs(u - (np.arange(4096) + 0.5) / 4096).max()
    assert gap < 1.63 / 64  # Kolmogorov-Smirnov at one per cent


def test_shapes_that_do_not_divide_are_refused(agent):
    """Two shards: by name, before anything is compiled."""
    mesh = jax.sharding.AbstractMesh((2, 1, 1), ("data", "fsdp", "tensor"))
    layout = decoding.Layout(mesh, ("data", "fsdp"), ("tensor",), ("tensor",))
    stop = stop_table(agent.codec.token_bytes)
    for name, slots, rows in (("slots=5", 5, 2), ("extend_rows=3", 4, 3)):
        with pytest.raises(ValueError, match=f"rollout {name}: legal is a multiple"):
            decoding.make_programs(
                agent.model,
                decoding.Shapes(slots, 32, rows, 8),
                stop,
                dtype=jnp.float32,
                valid_vocab=len(agent.codec.token_bytes),
                layout=layout,
            )


def test_positions_are_whole_blocks():
    assert decoding.Shapes(1, 160, 1, 1).positions == 192
    assert decoding.Shapes(1, 160, 1, 1, block=32).positions == 160
