"""The host loop of a rollout with scripted programs in the place of a model.

The stand-in keeps the text of each slot where the real programs keep keys and values,
so that every test can ask whether slot and trajectory hold the same tokens.
"""

import random
import threading
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import Slow

from lld_jax.data.questions import Question
from lld_jax.protocol import calculator, search, trajectory
from lld_jax.protocol.environment import Reply, SearchEnvironment
from lld_jax.protocol.search import Passage, RetrievalError
from lld_jax.protocol.stop import stop_table
from lld_jax.rollout import Limits, Sampling, Task, decoding, rollout, tasks_of

# One id a byte, then tokens of several bytes as byte-pair vocabularies have them.
EXTRA = (b">\n\n", b" </", b"search", b"answer", b">.", b"<|end|>")
TOKEN_BYTES = tuple(bytes([i]) for i in range(256)) + EXTRA
END = 256 + EXTRA.index(b"<|end|>")
CODEC = search.Codec(
    encode=lambda text: list(text.encode()),
    chat=lambda text: list(text.encode()),
    token_bytes=TOKEN_BYTES,
    end_ids=frozenset({END}),
    pad_id=END,
)
STOP = stop_table(TOKEN_BYTES, end_ids=CODEC.end_ids)


def tokens(*pieces: str) -> list[int]:
    """Ids of texts: a piece that is a token of several bytes gives one id."""
    extra = {text.decode(): 256 + i for i, text in enumerate(EXTRA)}
    return [
        token
        for piece in pieces
        for token in ([extra[piece]] if piece in extra else piece.encode())
    ]


def scripted(
    actions,
    *,
    slots=4,
    tokens=400,
    rows=2,
    new=64,
    shards=1,
    steps=8,
    slow=0.0,
    widths=(),
    stop=STOP,
):
    """Programs that write `actions[draw, sample][turn]` and check how they are used."""
    shapes = decoding.Shapes(slots, tokens, rows, new, steps=steps, widths=widths)
    layout = SimpleNamespace(batch=("data",), size=lambda axes: shards)
    log = SimpleNamespace(
        extends=[], forks=[], decodes=[], row_steps=0, texts=defaultdict(list)
    )

    def shard_of(slot):
        return slot * shards // slots

    def init():
        names = ("length", "start", "draw", "sample", "limit", "turn", "state")
        state = {name: np.zeros(slots, np.int32) for name in names}
        return state | {
            "running": np.zeros(slots, bool),
            "text": [[] for _ in range(slots)],
            "prompt": [None] * slots,
        }

    def runs_from_here(state, slot, request, e):
        state["start"][slot] = state["length"][slot] = len(state["text"][slot])
        for name in ("draw", "sample", "limit"):
            state[name][slot] = request[name][e]
        state["state"][slot] = stop.start

    def extend(params, state, request):
        used = np.flatnonzero(request["n"])
        assert len(set(request["rows"][used])) == len(used) > 0
        for e in range(rows):
            slot, n = request["rows"][e], request["n"][e]
            assert shard_of(slot) == e * shards // rows, "an entry of another shard"
            if not n:
                continue
            assert not state["running"][slot], "what is decoding was extended"
            if request["fresh"][e]:
                state["text"][slot] = []
                state["turn"][slot] = -1
            state["text"][slot] += request["ids"][e, :n].tolist()
            runs_from_here(state, slot, request, e)
            state["running"][slot] = request["run"][e]
            state["turn"][slot] += request["run"][e]
            if request["prompt"][e]:
                assert request["run"][e]
                state["prompt"][slot] = list(state["text"][slot])
        log.extends.append(
            {int(request["rows"][e]): int(request["n"][e]) for e in used}
        )
        return state, jnp.int32(0)

    def decode(params, state, order, width):
        by_shard = state["running"].reshape(shards, -1).sum(1)
        assert by_shard.max() * shards <= width in (slots, *widths)
        if not order["steps"]:  # compiles a width
            return state, None
        assert 1 <= order["wake"] and 1 <= order["steps"] <= steps
        time.sleep(slow)
        began, taken = state["running"].copy(), 0
        report = {
            "ids": np.full((slots, steps), -1),
            "logps": np.full((slots, steps), np.nan, np.float32),
            "n": np.zeros(slots, int),
            "cut": np.zeros(slots, bool),
        }
        while taken < order["steps"] and state["running"].any():
            if (began & ~state["running"]).sum() >= order["wake"]:
                break
            for slot in np.flatnonzero(state["running"]):
                script = actions[state["draw"][slot], state["sample"][slot]]
                at = state["length"][slot]
                token = script[state["turn"][slot]][at - state["start"][slot]]
                state["text"][slot].append(token)
                report["ids"][slot, taken] = token
                report["logps"][slot, taken] = -(at + 1) / 64
                report["n"][slot] += 1
                state["length"][slot] = at + 1
                state["state"][slot] = stop.next_state[state["state"][slot], token]
                by_tag = state["state"][slot] == stop.stop
                stopped = by_tag or at + 1 >= state["limit"][slot]
                report["cut"][slot] = stopped and not by_tag
                state["running"][slot] = not stopped
            taken += 1
        log.decodes.append(taken)
        log.row_steps += taken * width
        for slot in np.flatnonzero(began):
            key = int(state["draw"][slot]), int(state["sample"][slot])
            log.texts[key].append(list(state["text"][slot]))
        report |= {"stopped": began & ~state["running"], "steps": np.int32(taken)}
        return state, jax.tree.map(jnp.asarray, report)

    def fork(state, request):
        used = np.flatnonzero(request["used"])
        before = list(state["prompt"])  # as the real one: lengths of before the call
        copies = []
        for e in range(rows):
            src, dst = int(request["src"][e]), int(request["dst"][e])
            assert shard_of(src) == shard_of(dst) == e * shards // rows
            if e not in used:
                continue
            assert not state["running"][dst] and before[src] == state["prompt"][src]
            state["text"][dst], state["turn"][dst] = list(before[src]), 0
            state["prompt"][dst], state["running"][dst] = list(before[src]), True
            runs_from_here(state, dst, request, e)
            copies.append((src, dst))
        log.forks.append(copies)
        return state, jnp.int32(0)

    return decoding.Programs(shapes, layout, init, extend, decode, fork), log


class Retriever:
    def search(self, queries, k):
        return [[Passage("0", "Lima", f"About {query}.", 1.0)] for query in queries]


def environment(**fields):
    settings = {"max_prompt": 100, "max_observation": 120} | fields
    return SearchEnvironment(CODEC, Retriever(), "Q: {question}", 1, **settings)


def tasks(*questions: str, group: int = 1) -> list[Task]:
    draws = [(i, Question(str(i), q, ("gold",))) for i, q in enumerate(questions)]
    return tasks_of(draws, group)


def play(
    programs, tasks, env=None, *, max_turns=2, max_action=30, limits=(), **settings
):
    return rollout(
        programs,
        None,
        env or environment(),
        tasks,
        Limits(max_turns, max_action, **dict(limits)),
        Sampling(),
        seed=0,
        **settings,
    )


SEARCH = tokens("<", "search", ">who wrote it", " </", "search", ">\n\n")
ANSWER = tokens("<answer>Lima", " </", "answer", ">")
THINK = tokens("<t", "hin", "k>")  # no encoder would cut it so


def test_sampled_ids_are_kept_as_they_were_sampled():
    """A tag inside a longer token, and ids that no encoder gives."""
    never = tokens("Next")
    actions = {(0, 0): [THINK + SEARCH + never, THINK + ANSWER]}
    programs, log = scripted(actions)
    (traj,), stats = play(programs, tasks("who?"))
    prompt = tokens("Q: who?")
    found = tokens(
        "\n\n<information>Doc 1(Title: Lima) About who wrote it.</information>\n\n"
    )
    assert traj.ids == prompt + THINK + SEARCH + found + THINK + ANSWER
    lengths = [len(THINK + SEARCH), len(found), len(THINK + ANSWER)]
    ends = np.cumsum([len(prompt), *lengths]).tolist()
    assert [(s.kind, s.start, s.end) for s in traj.spans] == [
        ("action", ends[0], ends[1]),
        ("observation", ends[1], ends[2]),
        ("action", ends[2], ends[3]),
    ]
    mask = np.repeat([0, 1, 0, 1], [len(prompt), *lengths])
    assert traj.mask == mask.tolist()
    expected = np.where(mask, -(np.arange(len(mask)) + 1) / 64, 0)
    np.testing.assert_array_equal(traj.sampler_logps, np.float32(expected))
    assert traj.reason == "answered" and traj.counters == {"valid_searches": 1}
    assert [s.query for s in traj.searches] == ["who wrote it"]
    # What the model read is what is trained on, and each state begins the next.
    texts = log.texts[0, 0]
    assert texts[-1] == traj.ids
    for a, b in zip(texts, texts[1:], strict=False):
        assert b[: len(a)] == a
    assert stats["decoded"] == stats["kept"] == sum(traj.mask)


@pytest.mark.parametrize(
    ("actions", "reason", "invalid"),
    [
        ([SEARCH, SEARCH, SEARCH], "turns", 0),
        ([SEARCH, ANSWER], "answered", 0),
        ([SEARCH, SEARCH, ANSWER], "answered", 0),
        ([tokens("no tag") * 9] * 3, "tokens", 3),  # cut by max_action
        ([tokens("no tag") * 9] * 2 + [[END]], "invalid", 3),
        ([[END], SEARCH, [END]], "invalid", 2),
        ([tokens("<answer>x</search>."), ANSWER], "answered", 1),
    ],
)
def test_reasons_turns_and_the_retry_notice(actions, reason, invalid):
    programs, _ = scripted({(0, 0): actions})
    (traj,), _ = play(programs, tasks("who?"))
    assert traj.reason == reason
    assert traj.counters["invalid_actions"] == invalid
    spans = [s for s in traj.spans if s.kind == "action"]
    assert len(spans) == len(actions)
    for span, action in zip(spans, actions, strict=True):
        stop = [STOP.next_state[0, t] == STOP.stop for t in action]
        kept = traj.ids[span.start : span.end]
        assert kept == action[: len(kept)] and len(kept) <= 30
        assert len(kept) == 30 or not any(stop) or stop[len(kept) - 1]
    notices = search.decode(traj.ids, TOKEN_BYTES).count(search.RETRY)
    assert notices == invalid - (reason in ("invalid", "tokens"))
    assert traj.spans[-1].kind == "action"  # nothing follows the last one


def test_an_action_ends_inside_the_token_that_closes_it():
    action = tokens("<answer>x", " </", "answer", ">.")
    programs, _ = scripted({(0, 0): [action + tokens("more")]})
    (traj,), _ = play(programs, tasks("who?"))
    assert traj.ids[traj.prompt_length :] == action
    assert trajectory.final_answer(traj, TOKEN_BYTES) == "x"


def test_room_shrinks_the_observation_and_then_ends_the_trajectory():
    """Two observations, of which the second is cut further, and no third."""
    prompt, wrapper = len(tokens("Q: who?")), 33
    size = prompt + 3 * len(SEARCH) + 60 + wrapper + 5
    programs, log = scripted({(0, 0): [SEARCH] * 4}, tokens=size)
    env = environment(max_observation=60)
    (traj,), _ = play(programs, tasks("who?"), env, max_turns=9, max_action=len(SEARCH))
    first, second = (s for s in traj.spans if s.kind == "observation")
    assert 55 <= first.end - first.start <= 60
    assert wrapper < second.end - second.start <= size - second.start - len(SEARCH)
    for span in (first, second):
        text = search.decode(traj.ids[span.start : span.end], TOKEN_BYTES)
        assert text.startswith(search.OPEN) and text.endswith(search.CLOSE)
    assert traj.reason == "context" and size - 3 < len(traj.ids) <= size
    assert traj.counters["truncated"] == 2
    assert log.texts[0, 0][-1] == traj.ids


def test_a_prompt_that_cannot_fit_is_an_error():
    programs, _ = scripted({}, tokens=40)
    with pytest.raises(ValueError, match="prompt of 15 .*=30 .*rollout.max_tokens=40"):
        play(programs, tasks("who wrote it"))


def test_freed_slots_are_taken_at_once():
    """Seven tasks in two slots; a long one does not hold up the others."""
    actions = {(i, 0): [ANSWER] for i in range(7)} | {(0, 0): [SEARCH, SEARCH, ANSWER]}
    programs, log = scripted(actions, slots=2, rows=1, new=99, steps=4)
    done = []
    made, stats = play(
        programs, tasks(*(f"q{i}" for i in range(7))), on_progress=done.append
    )
    assert [t.question for t in made] == [f"q{i}" for i in range(7)]
    assert all(t.reason == "answered" for t in made)
    assert sum(done) == 7 and sum(map(len, log.extends)) == 7 + 2
    assert stats["steps"] == sum(log.decodes) == stats["row_steps"] / 2
    assert stats["row_use"] == stats["decoded"] / (2 * stats["steps"]) > 0.5
    assert 0.8 < stats["occupancy"] <= 1


def test_a_group_computes_its_prompt_once():
    """12 slots in 2 shards: one leader a group and shard, the rest are copies."""
    actions = {(d, s): [ANSWER] for d in range(3) for s in range(4)}
    programs, log = scripted(actions, slots=12, rows=4, shards=2)
    asked = []
    env = SimpleNamespace(
        start=lambda q: asked.append(q) or tokens(q),
        step=lambda turns: enumerate(Reply(None, "answered") for _ in turns),
    )
    made, _ = play(programs, tasks("one", "two", "three", group=4), env)
    assert asked == ["one", "two", "three"]
    # Draw 1 stands in both shards (slots 4, 5 and 6, 7), so it has two leaders.
    assert sorted(slot for call in log.extends for slot in call) == [0, 4, 6, 8]
    copies = [(0, 1), (0, 2), (0, 3), (4, 5), (6, 7), (8, 9), (8, 10), (8, 11)]
    assert sorted(sum(log.forks, [])) == copies
    assert [(t.draw, t.sample) for t in made] == list(actions)


def test_a_prompt_outlives_its_trajectory():
    """Nine samples in two slots: the last ones copy what the first ones left."""
    actions = {(0, s): [ANSWER, ANSWER] for s in range(9)}
    programs, log = scripted(actions, slots=2)
    made, _ = play(programs, tasks("who?", group=9))
    assert sum(map(len, log.extends)) == 1
    assert len(sum(log.forks, [])) == 8
    assert {t.reason for t in made} == {"answered"}


def test_long_texts_go_in_pieces():
    programs, log = scripted({(0, 0): [SEARCH, ANSWER]}, new=16)
    (traj,), _ = play(programs, tasks("who wrote the book about Lima?"))
    prompt = tokens("Q: who wrote the book about Lima?")
    observed = next(s for s in traj.spans if s.kind == "observation")
    pieces = [n for call in log.extends for n in call.values()]
    expected = []
    for n in (len(prompt), observed.end - observed.start):
        expected += [16] * (n // 16) + [n % 16] * (n % 16 > 0)
    assert pieces == expected
    assert log.texts[0, 0][-1] == traj.ids


def test_the_engine_serves_other_tools():
    """The calculator, with its own tags: the engine knows nothing of searches."""
    first = tokens("<calculate>6*7</calculate>")
    actions = {
        (0, 0): [first, tokens("<answer>42</answer>")],
        (0, 1): [SEARCH + first, tokens("<calculate>1/0</calculate>"), [END]],
    }
    stop = stop_table(TOKEN_BYTES, calculator.CLOSING_TAGS, CODEC.end_ids)
    programs, log = scripted(actions, stop=stop)
    env = calculator.CalculatorEnvironment(CODEC)
    (right, other), _ = play(programs, tasks("6 times 7?", group=2), env, max_action=60)
    texts = [
        [search.decode(traj.ids[s.start : s.end], TOKEN_BYTES) for s in traj.spans]
        for traj in (right, other)
    ]
    assert texts[0][1] == "\n\n<result>42</result>\n\n"
    answer = trajectory.final_answer(right, TOKEN_BYTES)
    assert (right.reason, answer) == ("answered", "42")
    assert texts[1][0].endswith("</search>\n\n<calculate>6*7</calculate>")
    assert "division by zero" in texts[1][3]
    assert other.reason == "invalid" and other.counters["calculations"] == 2


# ------------------------------------------------------------ replies that take time


def test_a_slow_retriever_delays_only_those_who_wait_for_it():
    """One search hangs until all the other trajectories are over."""
    actions = {(i, 0): [SEARCH, ANSWER] for i in range(6)}
    actions[0, 0] = [tokens("<search>slow</search>"), ANSWER]
    released, done = threading.Event(), []

    class Waits(Retriever):
        def search(self, queries, k):
            if "slow" in queries:
                assert queries == ["slow"] and released.wait(10)
            return super().search(queries, k)

    def on_progress(ended):
        done.append(ended)
        if sum(done) == 5:
            released.set()

    programs, _ = scripted(actions, slots=2, steps=2)
    env = SearchEnvironment(CODEC, Waits(), "Q: {question}", 1, 120, 100)
    made, stats = play(
        programs, tasks(*(f"q{i}" for i in range(6))), env, on_progress=on_progress
    )
    assert released.is_set() and {t.reason for t in made} == {"answered"}
    assert made[0].searches[0].query == "slow"
    assert stats["seconds_wait"] > 0


def test_a_signal_is_seen_while_all_wait():
    """The progress callback may end a rollout whose only reply hangs."""
    hang, began = threading.Event(), time.monotonic()

    def step(turns):
        hang.wait()
        yield 0, Reply(None, "answered")

    def on_progress(ended):
        if time.monotonic() - began > 0.3:
            raise KeyboardInterrupt

    env = SimpleNamespace(start=lambda q: tokens(q), step=step)
    try:
        with pytest.raises(KeyboardInterrupt):
            programs, _ = scripted({(0, 0): [SEARCH, ANSWER]})
            play(
                programs,
                tasks("who?"),
                env,
                limits={"timeout": 9.0}.items(),
                on_progress=on_progress,
            )
    finally:
        hang.set()


def test_a_reply_that_never_comes_ends_its_trajectory():
    actions = {(i, 0): [SEARCH, ANSWER] for i in range(3)}
    actions[1, 0] = [tokens("<search>slow</search>"), ANSWER]
    hang = threading.Event()

    class Hangs(Retriever):
        def search(self, queries, k):
            if "slow" in queries:
                hang.wait()
            return super().search(queries, k)

    programs, _ = scripted(actions, slots=1)
    env = SearchEnvironment(CODEC, Hangs(), "Q: {question}", 1, 120, 100)
    try:
        made, _ = play(
            programs, tasks("q0", "q1", "q2"), env, limits={"timeout": 0.2}.items()
        )
    finally:
        hang.set()
    assert [t.reason for t in made] == ["answered", "retriever", "answered"]
    assert made[1].counters["retrieval_failed"] == 1


def test_errors_of_an_environment():
    """A RetrievalError ends trajectories; a mistake ends the rollout, in words."""
    actions = {(0, 0): [SEARCH, ANSWER]}

    def run(step):
        env = SimpleNamespace(start=lambda q: tokens(q), step=step)
        return play(scripted(actions)[0], tasks("who?"), env)[0][0]

    def down(turns):
        raise RetrievalError("no route to host")

    assert run(down).reason == "retriever"
    with pytest.raises(ZeroDivisionError):
        run(lambda turns: [(0, 1 / 0)])
    with pytest.raises(RuntimeError, match=r"no reply to turns \[0\]"):
        run(lambda turns: [])
    for ids, problem in (([], "of 0 tokens"), ([1] * 400, "rollout.max_tokens=400")):
        with pytest.raises(ValueError, match=problem):
            run(lambda turns, ids=ids: [(0, Reply(ids, None))])


def test_a_budget_of_its_own_for_each_action():
    actions = {(d, s): [tokens("no tag")] * 3 for d in range(2) for s in range(3)}
    programs, _ = scripted(actions, slots=4)

    def budget(traj):
        return 1 + traj.sample + sum(span.kind == "action" for span in traj.spans)

    made, _ = play(
        programs, tasks("a", "b", group=3), limits={"budget": budget}.items()
    )
    for traj in made:
        lengths = [s.end - s.start for s in traj.spans if s.kind == "action"]
        assert lengths == [1 + traj.sample + turn for turn in range(3)]
        assert traj.reason == "tokens" and traj.counters["actions_cut"] == 3


KINDS = {"search": SEARCH, "answer": ANSWER, "end": [END], "none": tokens("x") * 40}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_slots_rows_pieces_shards_and_delays_change_nothing(data):
    """Any scripts, shapes and delays: the trajectories of one slot at a time."""
    draws = data.draw(st.integers(1, 4))
    group = data.draw(st.integers(1, 4))
    action = st.sampled_from(list(KINDS.values()))
    three = st.lists(action, min_size=3, max_size=3)
    actions = {(d, s): data.draw(three) for d in range(draws) for s in range(group)}
    todo = tasks(*(f"question {d}" for d in range(draws)), group=group)
    expected, _ = play(scripted(actions, slots=1, rows=1, new=400)[0], todo)
    order = data.draw(st.permutations(range(len(todo))))
    shards = data.draw(st.sampled_from([1, 2, 3]))
    programs, log = scripted(
        actions,
        slots=shards * data.draw(st.integers(1, 4)),
        rows=shards * data.draw(st.integers(1, 2)),
        new=data.draw(st.integers(5, 90)),
        shards=shards,
        steps=data.draw(st.integers(1, 30)),
        slow=data.draw(st.sampled_from([0.0, 0.001])),
        widths=data.draw(st.sampled_from([(), (shards,)])),
    )
    rng = random.Random(data.draw(st.integers(0, 99)))
    env = Slow(environment(), rng, data.draw(st.sampled_from([0.0, 0.003])))
    made, stats = play(programs, [todo[i] for i in order], env)
    assert made == [expected[i] for i in order]
    assert stats["decoded"] == stats["kept"] == sum(sum(t.mask) for t in made)
    assert 0 < stats["row_use"] <= 1 and 0 < stats["occupancy"] <= 1
    assert stats["decoded"] <= stats["row_steps"] == log.row_steps
    for traj in made:
        assert log.texts[traj.draw, traj.sample][-1] == traj.ids
    reasons = Counter(t.reason for t in made).keys()
    assert reasons <= {"answered", "turns", "invalid", "tokens"}
