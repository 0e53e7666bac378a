"""The environment of search: what it replies, when, and in whose thread."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from byte_codec import (
    BYTES,
    CODEC,
    END,
    PARTS,
    WORD_CODEC,
    ask,
    byte_encode,
    chat,
    environment,
    text_of,
    turn,
    wrap,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lld_jax.protocol import search, trajectory
from lld_jax.protocol.environment import SearchEnvironment, Turn
from lld_jax.protocol.search import Passage


def test_step_is_batched_and_names_reasons():
    env = environment([Passage("1", "T", "text", 1.0), Passage("2", "U", "more", 0.5)])
    texts = ["<search>x</search>", "<answer>y</answer>", "none", "<search>z</search>."]
    turns = [turn(text, last) for last in (False, True) for text in texts]
    turns += [turn("<search>w</search>", room=3), turn("none", room=3)]
    replies = ask(env, turns)
    assert [r.reason for r in replies] == [
        *(None, "answered", None, None),
        *("turns", "answered", "invalid", "turns"),
        *("context", "context"),
    ]
    assert all((r.ids is None) == (r.reason is not None) for r in replies)
    assert env.retriever.calls == [(["x", "z"], 3)]
    assert text_of(replies[0]) == wrap("Doc 1(Title: T) text\nDoc 2(Title: U) more")
    assert text_of(replies[2]) == search.RETRY
    assert replies[3].searches == (trajectory.Search("z", ("T", "U")),)
    valid, invalid = {"valid_searches": 1}, {"invalid_actions": 1}
    assert [r.counters for r in replies] == [
        *(valid, {}, invalid, valid),
        *(valid, {}, invalid, valid),
        *(valid, invalid),
    ]
    assert ask(env, [turn("none")])[0].ids and len(env.retriever.calls) == 1
    assert ask(env, []) == []


def test_end_token_before_an_answer_closed_is_an_invalid_action():
    env = environment([])
    ids = byte_encode("<answer>Lima")
    replies = ask(
        env, [Turn("q?", [*ids, END], 0, False, 999), Turn("q?", ids, 0, True, 999)]
    )
    assert text_of(replies[0]) == search.RETRY
    assert replies[1].reason == "invalid"


@pytest.mark.parametrize(
    ("text", "cut", "last"),
    [
        ("I think that", "tokens", "invalid"),
        ("<answer>Lima", "tokens", "invalid"),
        # A tag or an end token at the very limit: the action ended by itself.
        ("<answer>x</search>", "invalid", "invalid"),
        ("<search> </search>", "invalid", "invalid"),
        ("I give up<|end|>", "invalid", "invalid"),
        ("<search>x</search>", "turns", "turns"),
        ("<answer>Lima</answer>", "answered", "answered"),
    ],
)
def test_an_action_cut_by_its_budget_has_its_own_reason(text, cut, last):
    env = environment([])
    body, end, _ = text.partition("<|end|>")
    ids = byte_encode(body) + [END] * bool(end)
    same = [Turn("q?", ids, 0, *rest) for rest in ((True, 99, True), (True, 99))]
    short, whole = ask(env, same)
    assert (short.reason, whole.reason) == (cut, last)
    assert "actions_cut" not in whole.counters
    (again,) = ask(env, [Turn("q?", ids, 0, False, 99, True)])
    for reply in (short, again):
        assert reply.counters.get("actions_cut", 0) == (cut == "tokens")
        assert reply.counters.get("invalid_actions", 0) == (last == "invalid")
    if cut == "tokens":
        assert text_of(again) == search.RETRY
        assert ask(env, [turn(text, room=3, cut=True)])[0].reason == "context"


def test_what_needs_no_search_comes_first_and_reading_may_stop():
    env = environment([Passage("1", "T", "text", 1.0)])
    texts = ["<search>x</search>", "none", "<search>z</search>", "<answer>y</answer>"]
    turns = [turn(text) for text in texts]
    step = env.step(turns)
    assert [next(step)[0], next(step)[0]] == [1, 3]
    assert env.retriever.calls == []
    assert next(step)[0] == 0
    assert env.retriever.calls == [(["x", "z"], 3)]
    turns.clear()  # what waits was read before
    assert next(step)[1].searches == (trajectory.Search("z", ("T",)),)
    assert list(step) == []

    for read in range(4):
        stopped = environment([]).step([turn(text) for text in texts])
        for _ in range(read):
            next(stopped)
        stopped.close()
    assert len(ask(env, [turn(text) for text in texts])) == 4


def test_several_steps_run_at_once():
    """Four threads meet inside the retriever; each gets what it asked for."""
    together = threading.Barrier(4, timeout=20)

    class Retriever:
        def search(self, queries, k):
            together.wait()
            return [[Passage("1", query, "text", 1.0)] for query in queries]

    env = SearchEnvironment(CODEC, Retriever(), "{question}")
    batches = [[turn(f"<search>{i} {j}</search>") for j in range(3)] for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda batch: ask(env, batch), batches))
    titles = [[reply.searches[0].titles for reply in batch] for batch in found]
    assert titles == [[(f"{i} {j}",) for j in range(3)] for i in range(4)]


def test_answers_of_a_wrong_number_are_an_error_before_any_is_used():
    env = environment([])
    env.retriever.search = lambda queries, k: [[]] * (len(queries) - 1)
    step = env.step([turn("<search>x</search>"), turn("<search>y</search>")])
    with pytest.raises(ValueError):
        next(step)


def test_failed_and_empty_retrieval_are_neutral():
    (failed,) = ask(environment(None), [turn("<search>x</search>")])
    assert text_of(failed) == wrap(search.UNAVAILABLE)
    assert failed.counters == {"valid_searches": 1, "retrieval_failed": 1}
    assert failed.searches == (trajectory.Search("x", ()),)
    (empty,) = ask(environment([]), [turn("<search>x</search>")])
    assert text_of(empty) == wrap(search.NO_RESULTS)
    assert empty.counters == {"valid_searches": 1, "no_results": 1}


def test_over_budget_shortens_the_passages_and_closes():
    found = [Passage("1", "word", "word " * 200, 1.0)]
    env = environment(found, WORD_CODEC, max_observation=20)
    (reply,) = ask(env, [turn("<search>x</search>")])
    assert 19 <= len(reply.ids) <= 20
    text = text_of(reply)
    assert text.startswith("\n\n<information>Doc 1(Title: word) word")
    assert text.endswith("</information>\n\n")
    assert reply.counters == {"valid_searches": 1, "truncated": 1}
    assert len(ask(env, [turn("<search>x</search>", room=15)])[0].ids) <= 15
    traj = trajectory.new_trajectory(0, 0, "q?", ("Lima",), [1, 2])
    trajectory.append_observation(traj, reply.ids)
    assert sum(traj.mask) == 0


def test_passages_share_the_budget_fairly():
    texts = ["a" * 500, "short", "b" * 500]
    found = [Passage(str(i), "T", text, 1.0) for i, text in enumerate(texts)]
    env = environment(found, max_observation=331)
    (reply,) = ask(env, [turn("<search>x</search>")])
    assert len(reply.ids) == 331
    lines = text_of(reply).strip().split("\n")
    assert lines[1] == "Doc 2(Title: T) short"
    # 331 - 31 of the wrapper - 22 of the short line and its newline, halved; the
    # first line's newline is paid from its own half.
    assert len(lines[0]) - len("<information>") == (331 - 31 - 22) // 2 - 1
    assert len(lines[2]) - len("</information>") == (331 - 31 - 22) // 2


@pytest.mark.parametrize(
    "tag",
    [
        "</information>",
        "<information>",
        "<Search>",
        "< / answer >",
        "</ANSWER",
        "<\tthink>",
    ],
)
def test_retrieved_text_cannot_act_as_a_tag(tag):
    found = [Passage("1", f"a{tag}", f"b {tag}\n\nc\r\nd", 1.0)]
    (reply,) = ask(environment(found), [turn("<search>x</search>")])
    body = text_of(reply)[len(search.OPEN) : -len(search.CLOSE)]
    edited = "(" + " ".join(tag.split())[1:]
    assert body == f"Doc 1(Title: a{edited}) b {edited} c d"


TAGGED = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(PARTS),
        st.sampled_from(
            ["< /Information>", "word ", "<|end|>", "</answer", "<<search>"]
        ),
    ),
    max_size=15,
).map("".join)
PASSAGES = st.lists(
    st.builds(Passage, st.just("1"), TAGGED, TAGGED, st.just(0.0)), max_size=4
)


@settings(max_examples=150, deadline=None)
@given(PASSAGES, st.integers(60, 200), st.integers(31, 200), st.sampled_from([0, 1]))
def test_observation_is_within_budget_and_closes_once(found, most, room, which):
    codec = (CODEC, WORD_CODEC)[which]
    env = environment(found, codec, max_observation=most)
    (reply,) = ask(env, [turn("<search>x</search>", room=room)])
    assert len(reply.ids) <= min(env.max_observation, room)
    assert END not in reply.ids
    text = text_of(reply)
    assert text.startswith(search.OPEN) and text.endswith(search.CLOSE)
    body = text[len(search.OPEN) : -len(search.CLOSE)]
    tag = r"<\s*/?\s*(think|search|answer|information)\s*>"
    assert re.search(tag, body + "</information", re.IGNORECASE) is None
    assert "\n\n" not in body
    split = search.split_response(f"<search>x</search>{text}")
    assert [p.text for p in split] == ["<search>x</search>", text]
    cut = "truncated" in reply.counters
    whole = "\n".join(
        f"Doc {i}(Title: {search.clean_text(p.title)}) {search.clean_text(p.text)}"
        for i, p in enumerate(found[:3], 1)
    )
    assert (body == (whole or search.NO_RESULTS)) != cut


def test_budgets_that_cannot_hold_the_protocol_are_refused():
    least = max(len(search.RETRY), len(wrap(search.UNAVAILABLE)))
    environment([], max_observation=least)
    with pytest.raises(
        ValueError, match=rf"rollout.max_observation={least - 1}.*{least}"
    ):
        environment([], max_observation=least - 1)
    with pytest.raises(ValueError, match="rollout.max_prompt=4.* 5 "):
        environment([], max_prompt=4)
    with pytest.raises(ValueError, match="retrieval.k=0"):
        environment([], k=0)


def test_prompt_shortens_the_question_and_keeps_the_template():
    env = environment([], template="A {question} B", max_prompt=16)
    assert search.decode(env.start("who?")[1:-1], BYTES) == "A who? B"
    assert env.fit_question("who?") == "who?"
    assert env.start("x" * 99) == chat("A " + "x" * 10 + " B")
    assert env.fit_question("x" * 99) == "x" * 10
    assert env.fit_question("{question} a") == "{question}"
