"""The host loop of a rollout with scripted programs in the place of a model.

The stand-in keeps the text of each slot where the real programs keep keys and values,
so that every test can ask whether slot and trajectory hold the same tokens.
"""

from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lld_jax import decoding, search
from lld_jax.questions import Question
from lld_jax.rollout import Limits, Task, rollout, tasks_of
from lld_jax.search import Passage, Reply, SearchEnvironment
from lld_jax.stop import stop_table

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


def scripted(actions, *, slots=4, tokens=400, rows=2, new=64, shards=1):
    """Programs that write `actions[draw, sample][turn]` and check how they are used."""
    shapes = decoding.Shapes(slots, tokens, rows, new)
    layout = SimpleNamespace(batch=("data",), size=lambda axes: shards)
    log = SimpleNamespace(extends=[], forks=[], decodes=[], texts=defaultdict(list))

    def shard_of(slot):
        return slot * shards // slots

    def init():
        names = ("length", "start", "draw", "sample", "limit", "turn", "state")
        state = {name: np.zeros(slots, np.int32) for name in names}
        return state | {
            "ids": np.zeros((slots, shapes.positions), np.int32),
            "logps": np.zeros((slots, shapes.positions), np.float32),
            "running": np.zeros(slots, bool),
            "text": [[] for _ in range(slots)],
        }

    def extend(params, state, request):
        used = np.flatnonzero(request["n"])
        assert len(set(request["rows"][used])) == len(used)
        for e in range(rows):
            slot, n = request["rows"][e], request["n"][e]
            assert shard_of(slot) == e * shards // rows, "an entry of another shard"
            if not n:
                continue
            if request["fresh"][e]:
                state["text"][slot] = []
                state["turn"][slot] = -1
            state["text"][slot] += request["ids"][e, :n].tolist()
            state["start"][slot] = state["length"][slot] = len(state["text"][slot])
            for name in ("draw", "sample", "limit"):
                state[name][slot] = request[name][e]
            state["running"][slot] = request["run"][e]
            state["turn"][slot] += request["run"][e]
            state["state"][slot] = 0
        log.extends.append(
            {int(request["rows"][e]): int(request["n"][e]) for e in used}
        )
        return state

    def decode(params, state, steps, wake, temperature, seed):
        assert 1 <= wake <= rows and state["running"].any()
        began, steps_done = np.flatnonzero(state["running"]), 0
        while steps_done < steps and len(began) - state["running"].sum() < wake:
            for slot in np.flatnonzero(state["running"]):
                script = actions[state["draw"][slot], state["sample"][slot]]
                at = state["length"][slot]
                token = script[state["turn"][slot]][at - state["start"][slot]]
                state["text"][slot].append(token)
                state["ids"][slot, at], state["logps"][slot, at] = token, -(at + 1) / 64
                state["length"][slot] = at + 1
                state["state"][slot] = STOP.next_state[state["state"][slot], token]
                stopped = state["state"][slot] == STOP.stop
                stopped |= at + 1 >= state["limit"][slot]
                state["running"][slot] = not stopped
            steps_done += 1
        log.decodes.append(steps_done)
        for slot in began:
            key = int(state["draw"][slot]), int(state["sample"][slot])
            log.texts[key].append(list(state["text"][slot]))
        return state

    def fork(state, src, dst, sample):
        assert len(src) == len(dst) == len(sample) == slots
        used = np.flatnonzero(dst < slots)
        for a, b in zip(src[used], dst[used], strict=True):
            assert shard_of(a) == shard_of(b) and (src[dst >= slots] >= slots).all()
            state["text"][b] = list(state["text"][a])
            for name in state.keys() - {"text", "sample", "ids", "logps"}:
                state[name][b] = state[name][a]
        state["sample"][dst[used]] = sample[used]
        log.forks.append([(int(src[i]), int(dst[i])) for i in used])
        return state

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


def play(programs, tasks, env=None, *, max_turns=2, max_action=30, **settings):
    return rollout(
        programs,
        None,
        env or environment(),
        tasks,
        Limits(max_turns, max_action),
        seed=0,
        temperature=1.0,
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
        ([tokens("no tag") * 9] * 3, "invalid", 3),  # cut by max_action
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
    assert notices == invalid - (reason == "invalid")
    assert traj.spans[-1].kind == "action"  # nothing follows the last one


def test_an_action_ends_inside_the_token_that_closes_it():
    action = tokens("<answer>x", " </", "answer", ">.")
    programs, _ = scripted({(0, 0): [action + tokens("more")]})
    (traj,), _ = play(programs, tasks("who?"))
    assert traj.ids[traj.prompt_length :] == action
    assert search.final_answer(traj, TOKEN_BYTES) == "x"


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
    with pytest.raises(ValueError, match="rollout.max_tokens=40 .* prompt of 15 .*=30"):
        play(programs, tasks("who wrote it"))


def test_freed_slots_are_taken_at_once():
    """Seven tasks in two slots; a long one does not hold up the others."""
    actions = {(i, 0): [ANSWER] for i in range(7)} | {(0, 0): [SEARCH, SEARCH, ANSWER]}
    programs, log = scripted(actions, slots=2, rows=1, new=99)
    done = []
    made, stats = play(
        programs, tasks(*(f"q{i}" for i in range(7))), on_progress=done.append
    )
    assert [t.question for t in made] == [f"q{i}" for i in range(7)]
    assert all(t.reason == "answered" for t in made)
    assert sum(done) == 7 and sum(map(len, log.extends)) == 7 + 2
    assert stats["steps"] == sum(log.decodes)
    assert stats["occupancy"] == stats["decoded"] / (2 * stats["steps"]) > 0.8


def test_a_group_computes_its_prompt_once():
    """12 slots in 2 shards: one leader a group and shard, the rest are copies."""
    actions = {(d, s): [ANSWER] for d in range(3) for s in range(4)}
    programs, log = scripted(actions, slots=12, rows=4, shards=2)
    asked = []
    env = SimpleNamespace(
        start=lambda q: asked.append(q) or tokens(q),
        step=lambda turns: [Reply(None, "answered") for _ in turns],
    )
    made, _ = play(programs, tasks("one", "two", "three", group=4), env)
    assert asked == ["one", "two", "three"]
    # Draw 1 stands in both shards (slots 4, 5 and 6, 7), so it has two leaders.
    assert sorted(slot for call in log.extends for slot in call) == [0, 4, 6, 8]
    copies = [(0, 1), (0, 2), (0, 3), (4, 5), (6, 7), (8, 9), (8, 10), (8, 11)]
    assert log.forks == [copies]
    assert [(t.draw, t.sample) for t in made] == list(actions)


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


KINDS = {"search": SEARCH, "answer": ANSWER, "end": [END], "none": tokens("x") * 40}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_slots_rows_pieces_and_shards_change_nothing(data):
    """Any scripts, in any shapes: the trajectories of one slot at a time."""
    draws = data.draw(st.integers(1, 4))
    group = data.draw(st.integers(1, 4))
    action = st.sampled_from(list(KINDS.values()))
    three = st.lists(action, min_size=3, max_size=3)
    actions = {(d, s): data.draw(three) for d in range(draws) for s in range(group)}
    todo = tasks(*(f"question {d}" for d in range(draws)), group=group)
    expected, _ = play(scripted(actions, slots=1, rows=1, new=400)[0], todo)
    shards = data.draw(st.sampled_from([1, 2, 3]))
    programs, log = scripted(
        actions,
        slots=shards * data.draw(st.integers(1, 4)),
        rows=shards * data.draw(st.integers(1, 2)),
        new=data.draw(st.integers(5, 90)),
        shards=shards,
    )
    made, stats = play(programs, todo)
    assert made == expected
    assert stats["decoded"] == stats["kept"] == sum(sum(t.mask) for t in made)
    for traj in made:
        assert log.texts[traj.draw, traj.sample][-1] == traj.ids
    assert Counter(t.reason for t in made).keys() <= {"answered", "turns", "invalid"}
