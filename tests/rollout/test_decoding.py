"""The three programs of a rollout: what is sampled, when slots stop, what is copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lld_jax.protocol.stop import stop_table
from lld_jax.rollout import decoding


def request(programs, appends: dict[int, list[int]], **fields):
    """An extend call; `fields` are by slot or for all, `run` and `fresh` by default."""
    shapes = programs.shapes
    E, N = shapes.extend_rows, shapes.extend_tokens
    names = {"n": 0, "draw": 0, "sample": 0, "limit": shapes.tokens}
    out = {name: np.full(E, value, np.int32) for name, value in names.items()}
    out |= {name: np.ones(E, bool) for name in ("fresh", "run")}
    out["prompt"] = out["run"]  # where a test gives no run, its text is a prompt
    out |= {"rows": np.zeros(E, np.int32), "ids": np.zeros((E, N), np.int32)}
    for e, (slot, ids) in enumerate(appends.items()):
        out["rows"][e], out["n"][e] = slot, len(ids)
        out["ids"][e, : len(ids)] = ids
        for name, value in fields.items():
            out[name][e] = value[slot] if isinstance(value, dict) else value
    return out


def decode(agent, published, slots, steps, wake=100, seed=5):
    """Slots, and what was sampled by slot: ids and logps of as many calls as it takes.

    `steps` may be more than a call makes; `wake` holds for each call.
    """
    most = agent.programs.shapes.steps
    ids, logps = ([[] for _ in range(agent.programs.shapes.slots)] for _ in range(2))
    while steps > 0:
        order = {"steps": min(steps, most), "wake": wake, "top_k": 0}
        order = {name: np.int32(x) for name, x in order.items()} | {
            "temperature": np.float32(1),
            "top_p": np.float32(1),
            "seed": np.uint32(seed),
        }
        slots, report = agent.programs.decode(
            published, slots, order, agent.programs.shapes.slots
        )
        report = jax.device_get(report)
        for slot, n in enumerate(report["n"]):
            ids[slot] += report["ids"][slot, :n].tolist()
            logps[slot] += report["logps"][slot, :n].tolist()
        steps -= most
        if report["steps"] < order["steps"]:
            break
    return slots, ids, logps


def extend(agent, published, slots, call):
    return agent.programs.extend(published, slots, call)[0]


def fork(agent, slots, copies: dict[int, int], *, limit: int, draw=0, sample=0):
    """`copies` is `{slot: source}`."""
    E = agent.programs.shapes.extend_rows
    call = {"draw": draw, "sample": sample, "limit": limit, "src": 0, "dst": 0}
    call = {name: np.full(E, value, np.int32) for name, value in call.items()}
    call["used"] = np.arange(E) < len(copies)
    call["dst"][: len(copies)] = list(copies)
    call["src"][: len(copies)] = list(copies.values())
    return agent.programs.fork(slots, call)[0]


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
        slots = extend(agent, published, slots, call)
    slots, ids, _ = decode(agent, published, slots, 1000)
    assert not slots["running"].any()
    by_tag = 0
    for action in ids[:10]:
        state = table.start
        for token in action[:-1]:
            state = table.next_state[state, token]
            assert state != table.stop
        stopped = table.next_state[state, action[-1]] == table.stop
        assert stopped or len(action) == 12
        by_tag += stopped
    assert 0 < by_tag < 10  # both ends occur


def test_a_report_says_what_happened(agent, published, prompts):
    """Slot 0 is cut after 3 tokens, slot 4 runs on, slot 7 waits for more prompt."""
    programs = agent.programs
    start = {slot: len(prompts[slot]) for slot in (0, 4, 7)}
    slots = programs.init()
    for pair in ((0, 4), (7,)):
        limit = {slot: start[slot] + (3 if slot == 0 else 99) for slot in pair}
        run = {slot: slot != 7 for slot in pair}
        appends = {slot: prompts[slot] for slot in pair}
        call = request(programs, appends, limit=limit, run=run, sample=1)
        slots = extend(agent, published, slots, call)
    order = {"steps": np.int32(5), "wake": np.int32(9), "seed": np.uint32(5)}
    order |= {"temperature": np.float32(1), "top_p": np.float32(1)}
    order |= {"top_k": np.int32(0)}
    R, before = programs.shapes.slots, slots["length"].tolist()
    slots, report = programs.decode(published, slots, order, R)
    assert int(report["steps"]) == 5
    assert report["n"].tolist() == [3, 0, 0, 0, 5] + [0] * (len(before) - 5)
    assert np.flatnonzero(report["stopped"]).tolist() == [0]
    assert np.flatnonzero(report["cut"]).tolist() == [0]
    grown = np.asarray(slots["length"]) - before
    assert grown.tolist() == report["n"].tolist()
    # The next call says nothing of slot 0 any more.
    slots, report = programs.decode(published, slots, order, R)
    assert not report["stopped"][0] and report["n"][0] == 0 and report["n"][4] > 0


def test_steps_wake_and_what_stands_still(agent, published, prompts):
    """Slot 0 stops after 3 tokens, slot 4 after 9; slot 7 waits for more prompt."""
    start = {slot: len(prompts[slot]) for slot in (0, 4, 7)}

    def fresh():
        limit = {slot: start[slot] + n for slot, n in ((0, 3), (4, 9), (7, 9))}
        slots = agent.programs.init()
        for pair in ((0, 4), (7,)):
            appends = {slot: prompts[slot] for slot in pair}
            run = {slot: slot != 7 for slot in pair}
            call = request(agent.programs, appends, limit=limit, run=run, sample=1)
            slots = extend(agent, published, slots, call)
        return slots

    def lengths(slots):
        return [int(slots["length"][slot]) - start[slot] for slot in (0, 4, 7)]

    assert lengths(fresh()) == [0, 0, 0]
    whole, ids, logps = decode(agent, published, fresh(), 1000)
    assert lengths(whole) == [3, 9, 0] and not whole["running"].any()
    assert [len(ids[slot]) for slot in (0, 4, 7)] == [3, 9, 0]
    assert lengths(decode(agent, published, fresh(), 2)[0]) == [2, 2, 0]
    woken, _, _ = decode(agent, published, fresh(), 8, wake=1)
    assert lengths(woken) == [3, 3, 0]
    assert np.flatnonzero(woken["running"]).tolist() == [4]
    # One token at a time gives what long calls give: ids, logps, cache, bit by bit.
    single = fresh()
    for step in range(9):
        single, (token, *_), (logp, *_) = decode(agent, published, single, 1)
        if step < 3:
            assert token == ids[0][step : step + 1]
            assert logp == logps[0][step : step + 1]
    for name in whole:
        np.testing.assert_array_equal(single[name], whole[name], err_msg=name)


def test_a_prompt_in_pieces(agent, published, prompts):
    prompt, programs = prompts[0], agent.programs
    call = request(programs, {3: prompt}, limit=99)
    whole = extend(agent, published, programs.init(), call)
    slots = programs.init()
    for start in range(0, len(prompt), 16):
        piece, first = prompt[start : start + 16], start == 0
        last = start + 16 >= len(prompt)
        fields = {"fresh": first, "run": last, "prompt": last, "limit": 99}
        slots = extend(agent, published, slots, request(programs, {3: piece}, **fields))
    assert int(slots["length"][3]) == len(prompt) and bool(slots["running"][3])
    assert int(slots["prompt_length"][3]) == len(prompt)
    for name in ("hidden", "prompt_hidden"):
        np.testing.assert_allclose(slots[name][3], whole[name][3], atol=1e-5)
    for name in ("k", "v"):
        np.testing.assert_allclose(slots[name], whole[name], atol=1e-5)


def test_fork_is_the_same_as_computing_the_prompt_again(agent, published, prompts):
    programs, n = agent.programs, len(prompts[0])
    sample = {2: 0, 6: 2}
    both = request(
        programs, dict.fromkeys(sample, prompts[0]), draw=4, limit=n + 8, sample=sample
    )
    again = extend(agent, published, programs.init(), both)
    one = request(programs, {2: prompts[0]}, draw=4, limit=n + 8)
    forked = extend(agent, published, programs.init(), one)
    forked = fork(agent, forked, {6: 2}, limit=n + 8, draw=4, sample=2)
    for name in again:
        np.testing.assert_array_equal(forked[name], again[name], err_msg=name)
    _, ids, _ = decode(agent, published, forked, 8)
    assert ids[2] != ids[6]  # samples differ


def test_a_prompt_can_be_copied_long_after_it_was_read(agent, published, prompts):
    """From a slot that went on, into itself and into one that held something else."""
    programs, n = agent.programs, len(prompts[0])
    one = request(programs, {2: prompts[0]}, limit=n + 8)
    fresh = fork(
        agent, extend(agent, published, programs.init(), one), {4: 2}, limit=n + 8
    )
    _, wanted, wanted_logps = decode(agent, published, fresh, 8)
    longer = max(prompts, key=len)
    slots = programs.init()
    both = request(programs, {2: prompts[0], 4: longer}, limit=n + 30, sample=9, draw=9)
    slots, *_ = decode(agent, published, extend(agent, published, slots, both), 30)
    more = request(programs, {2: longer[:9]}, fresh=False, prompt=False, limit=n + 99)
    slots, *_ = decode(agent, published, extend(agent, published, slots, more), 5)
    slots = fork(agent, slots, {4: 2, 2: 2}, limit=n + 8)
    assert np.asarray(slots["length"])[[2, 4]].tolist() == [n, n]
    _, ids, logps = decode(agent, published, slots, 8)
    assert ids[2] == ids[4] == wanted[4] and len(ids[2]) > 0
    assert logps[2] == logps[4] == wanted_logps[4]


def test_a_token_depends_on_draw_sample_position_and_seed_alone(
    agent, published, prompts
):
    """Not on the slot, on what else runs, or on what the slot held before."""
    programs, n = agent.programs, len(prompts[0])

    def run(slots, slot, seed=5, draw=1, sample=1):
        fields = {"draw": draw, "sample": sample, "limit": n + 8}
        call = request(programs, {slot: prompts[0]}, **fields)
        slots = extend(agent, published, slots, call)
        slots, ids, logps = decode(agent, published, slots, 8, seed=seed)
        return ids[slot], logps[slot], slots

    ids, logps, used = run(programs.init(), 0)
    both = request(programs, {0: prompts[1], 5: prompts[2]}, draw=8)
    other = extend(agent, published, used, both)
    again, same_logps, used = run(other, 9)
    assert again == ids and same_logps == logps
    again, same_logps, used = run(used, 0)  # over the rest of a longer trajectory
    assert again == ids and same_logps == logps
    assert run(programs.init(), 0, seed=6)[0] != ids
    assert run(programs.init(), 0, draw=2)[0] != ids
    assert run(programs.init(), 0, sample=2)[0] != ids


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
