import base64
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lld_jax import search
from lld_jax.search import Action, Codec, Passage, Piece, RetrievalError, Turn
from lld_jax.stop import stop_table

# A small vocabulary; id 0 is both end and pad.
TOY = ["<|end|>", "<", "search", ">", "who", " wrote", " it", "</", ">\n\n", "Next"]
TOY += ["answer", "think", "<th", "ink", "Lima", " "]
TOY = tuple(token.encode() for token in TOY)
END = 256


def byte_encode(text):
    """One id per byte: every text can be written, no text gives the end token."""
    return list(text.encode("utf-8"))


def word_encode(text):
    """Words, white space and `</` whole, else bytes: cuts may merge or split."""
    ids = []
    for part in WORD.findall(text):
        ids += [WORDS[part]] if part in WORDS else list(part.encode("utf-8"))
    return ids


WORD = re.compile(r"</| ?\w+|\s+|[^\w\s]")
OWN = (search.OPEN, search.CLOSE, search.RETRY, search.NO_RESULTS, search.UNAVAILABLE)
OWN = WORD.findall("".join(OWN) + "Doc(Title:(word word")
WORDS = {word: 257 + i for i, word in enumerate(dict.fromkeys(OWN))}
BYTES = (*(bytes([b]) for b in range(256)), b"<|end|>", *(w.encode() for w in WORDS))


def chat(text):
    return [END, *byte_encode(text), END]


CODEC = Codec(byte_encode, chat, BYTES, frozenset({END}), END)
WORD_CODEC = Codec(word_encode, chat, BYTES, frozenset({END}), END)


class Fake:
    """Records its calls; answers with what it was given, or fails."""

    def __init__(self, found=None):
        self.found, self.calls = found, []

    def search(self, queries, k):
        self.calls.append((list(queries), k))
        if self.found is None:
            raise RetrievalError("down")
        return [list(self.found[:k]) for _ in queries]


def environment(found=None, codec=CODEC, template="Q: {question}", **budgets):
    return search.SearchEnvironment(codec, Fake(found), template, **budgets)


def turn(text, last=False, room=10_000):
    return Turn("q?", byte_encode(text), 0, last, room)


def text_of(reply):
    return search.decode(reply.ids, BYTES)


# ----- parsing


@pytest.mark.parametrize(
    ("text", "kind", "content"),
    [
        ("<search> who </search>", "search", "who"),
        ("a <search>x <search> y </search>\n\n", "search", "y"),
        ("<search> a <answer> b </search>", "search", "a <answer> b"),
        ("<answer>Lima</answer> <search>x</search>", "answer", "Lima"),
        ("<search>x</search><answer>Lima</answer>", "search", "x"),
        ("<answer>one <answer>two</answer>", "answer", "two"),
        ("<answer></answer>", "answer", ""),
        ("<search> \n </search>", "invalid", ""),
        ("</search>", "invalid", ""),
        ("<answer>x</search>", "invalid", ""),
        ("<answer>Lima", "invalid", ""),
        ("<answer>Lima<|end|>", "invalid", ""),
        ("", "invalid", ""),
    ],
)
def test_parse_action(text, kind, content):
    assert search.parse_action(text) == Action(kind, content)


def wrap(body):
    return f"\n\n<information>{body}</information>\n\n"


def test_split_names_every_action():
    pieces = [
        Piece("action", "a <search>x</search>", Action("search", "x")),
        Piece("observation", wrap("Doc 1(Title: T) <answer>no</answer>")),
        Piece("action", "no tag here", Action("invalid", "")),
        Piece("observation", search.RETRY),
        Piece("action", "<search></search>", Action("invalid", "")),
        Piece("observation", search.RETRY),
        Piece("action", "<search>y</search>.</", Action("search", "y")),
        Piece("observation", wrap(search.NO_RESULTS)),
        Piece(
            "action",
            f"I read {wrap('mine')}<answer>Lima</answer>",
            Action("answer", "Lima"),
        ),
    ]
    text = "".join(piece.text for piece in pieces)
    assert search.split_response(text) == pieces
    assert search.split_response(text + ">\n") == [
        *pieces[:-1],
        Piece("action", pieces[-1].text + ">\n", Action("answer", "Lima")),
    ]


def test_split_keeps_a_block_that_the_policy_wrote():
    for text in (
        "<search>x</search><information>mine</information><answer>y</answer>",
        "<search>x</search> so\n\n<information>mine</information><answer>y</answer>",
        "<answer>y</answer>\n\n<information>mine</information>",
    ):
        pieces = search.split_response(text)
        assert [p.kind for p in pieces] == ["action", "action"]
        assert "".join(p.text for p in pieces) == text


PARTS = ["<search>", "</search>", "<answer>", "</answer>", "x", " ", "\n", "\n\n", "."]
PARTS += ["<information>", "</information>", wrap("d"), search.RETRY, "\u00e9", "<"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_split_joins_and_every_complete_action_is_one(text):
    pieces = search.split_response(text)
    assert "".join(p.text for p in pieces) == text
    for piece in pieces:
        assert piece.text
        assert (piece.action is None) == (piece.kind == "observation")
        if piece.kind == "action":
            assert piece.action == search.parse_action(piece.text)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_split_of_a_cut_text_begins_like_that_of_the_whole(data):
    found = [Passage("1", "T", "some text", 1.0)]
    env = environment(found)
    text = ""
    for action in data.draw(
        st.lists(
            st.sampled_from(["<search>x</search>", "a <search>y</search>", "none"]),
            max_size=4,
        )
    ):
        text += action + text_of(env.step([turn(action)])[0])
    text += "<answer>z</answer>"
    cut = text[: data.draw(st.integers(0, len(text)))]
    whole, part = search.split_response(text), search.split_response(cut)
    # A cut inside a notice is not told from an action: it can only be the last piece.
    assert part[:-1] == whole[: max(len(part) - 1, 0)]
    assert "".join(p.text for p in part) == cut


# ----- trajectories


def start(prompt=(14, 15)):
    return search.new_trajectory(3, 1, "q?", ("Lima",), prompt)


def test_sampled_ids_are_kept_though_not_canonical():
    traj = start()
    search.append_action(traj, [1, 11, 3], [-0.1, -0.2, -0.3])  # `<think>` in three
    before = list(traj.ids)
    search.append_observation(traj, [15, 14])
    search.append_action(traj, [9, 0], [-0.4, -0.5])
    assert traj.ids == [14, 15, 1, 11, 3, 15, 14, 9, 0]
    assert traj.ids[: len(before)] == before
    assert traj.mask == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert traj.sampler_logps == [0, 0, -0.1, -0.2, -0.3, 0, 0, -0.4, -0.5]
    assert traj.spans == [
        search.Span("action", 2, 5),
        search.Span("observation", 5, 7),
        search.Span("action", 7, 9),
    ]


def test_action_up_to_the_token_that_completes_its_tag():
    sampled = [1, 2, 3, 4, 5, 6, 7, 2, 8, 9]
    table, state, kept = stop_table(TOY, end_ids={0}), 0, []
    while state != table.stop:
        kept.append(sampled[len(kept)])
        state = table.next_state[state, kept[-1]]
    traj = start(())
    search.append_action(traj, kept, [-1.0] * len(kept))
    assert traj.ids == sampled[:9] and traj.mask == [1] * 9
    text = search.decode(traj.ids, TOY)
    assert search.parse_action(text) == Action("search", "who wrote it")
    assert "Next" not in text


def test_end_token_is_trained_though_it_is_the_pad_token():
    traj = start(())
    search.append_action(traj, [4, 5, 0], [-1.0, -1.0, -2.0])
    assert traj.mask == [1, 1, 1]
    assert traj.ids == [4, 5, 0]


def test_append_refuses_unequal_lengths():
    with pytest.raises(AssertionError, match="2 ids but 1 logps"):
        search.append_action(start(), [1, 2], [-1.0])


def test_json_round_trip():
    traj = start()
    search.append_action(traj, [1, 2], [-0.1, -1 / 3])
    search.append_observation(traj, [5])
    search.append_action(traj, [3], [-2.0])
    traj.searches.append(search.Search("who", ("T", "U")))
    traj.reason, traj.reward = "answered", 1
    row = search.to_json(traj)
    names = "draw sample question gold ids mask sampler_logps reward reason searches"
    assert set(row) == set(names.split())
    assert search.from_json(json.loads(json.dumps(row))) == traj
    search.append_observation(traj, [5, 5])
    assert search.from_json(json.loads(json.dumps(search.to_json(traj)))) == traj
    assert search.from_json(search.to_json(start())) == start()


def test_final_answer_is_what_the_policy_wrote():
    env = environment([Passage("1", "T", "<answer> Rome </answer>", 1.0)])
    prompt = env.start("<answer> Oslo </answer>")
    traj = search.new_trajectory(0, 0, "q?", ("Lima",), prompt)
    for text in (
        "<answer>no</search>",
        "<search>x</search>",
        "so <answer> Lima </answer>",
    ):
        assert search.final_answer(traj, BYTES) is None
        ids = byte_encode(text)
        search.append_action(traj, ids, [-1.0] * len(ids))
        (reply,) = env.step([turn(text)])
        traj.reason = reply.reason
        if reply.ids:
            search.append_observation(traj, reply.ids)
    assert search.final_answer(traj, BYTES) == "Lima"
    marked = search.answer_mask(traj.ids, traj.mask, BYTES)
    assert search.decode(
        [i for i, m in zip(traj.ids, marked, strict=True) if m], BYTES
    ) == ("<answer> Lima </answer>")
    traj.reason = "turns"
    assert search.final_answer(traj, BYTES) is None


def test_answer_mask_takes_every_token_that_shares_a_byte():
    path = Path(__file__).parent / "data" / "qwen_tags.json"
    data = json.loads(path.read_text())
    known = {int(i): base64.b64decode(t) for i, t in data["token_bytes"].items()}
    token_bytes = [known.get(i, b"") for i in range(max(known) + 1)]
    assert len(data["answers"]) == 14
    for row in data["answers"]:
        ids = row["ids"]
        assert search.answer_mask(ids, [1] * len(ids), token_bytes) == row["answer"]
        assert search.answer_mask(ids, [0] * len(ids), token_bytes) == [0] * len(ids)


def test_answer_mask_does_not_join_actions_around_an_observation():
    first, second = byte_encode("<answer>a"), byte_encode("b</answer>")
    ids = [*first, *byte_encode(wrap("d")), *second]
    mask = [1] * len(first) + [0] * len(wrap("d")) + [1] * len(second)
    assert sum(search.answer_mask(ids, mask, BYTES)) == 0


# ----- environment


def test_step_is_batched_and_names_reasons():
    env = environment([Passage("1", "T", "text", 1.0), Passage("2", "U", "more", 0.5)])
    texts = ["<search>x</search>", "<answer>y</answer>", "none", "<search>z</search>."]
    turns = [turn(text, last) for last in (False, True) for text in texts]
    turns += [turn("<search>w</search>", room=3), turn("none", room=3)]
    replies = env.step(turns)
    assert [r.reason for r in replies] == [
        *(None, "answered", None, None),
        *("turns", "answered", "invalid", "turns"),
        *("context", "context"),
    ]
    assert all((r.ids is None) == (r.reason is not None) for r in replies)
    assert env.retriever.calls == [(["x", "z"], 3)]
    assert text_of(replies[0]) == wrap("Doc 1(Title: T) text\nDoc 2(Title: U) more")
    assert text_of(replies[2]) == search.RETRY
    assert replies[3].searches == (search.Search("z", ("T", "U")),)
    valid, invalid = {"valid_searches": 1}, {"invalid_actions": 1}
    assert [r.counters for r in replies] == [
        *(valid, {}, invalid, valid),
        *(valid, {}, invalid, valid),
        *(valid, invalid),
    ]
    assert env.step([turn("none")])[0].ids and len(env.retriever.calls) == 1
    assert env.step([]) == []


def test_end_token_before_an_answer_closed_is_an_invalid_action():
    env = environment([])
    ids = byte_encode("<answer>Lima")
    replies = env.step(
        [Turn("q?", [*ids, END], 0, False, 999), Turn("q?", ids, 0, True, 999)]
    )
    assert text_of(replies[0]) == search.RETRY
    assert replies[1].reason == "invalid"


def test_failed_and_empty_retrieval_are_neutral():
    (failed,) = environment(None).step([turn("<search>x</search>")])
    assert text_of(failed) == wrap(search.UNAVAILABLE)
    assert failed.counters == {"valid_searches": 1, "retrieval_failed": 1}
    assert failed.searches == (search.Search("x", ()),)
    (empty,) = environment([]).step([turn("<search>x</search>")])
    assert text_of(empty) == wrap(search.NO_RESULTS)
    assert empty.counters == {"valid_searches": 1, "no_results": 1}


def test_over_budget_shortens_the_passages_and_closes():
    found = [Passage("1", "word", "word " * 200, 1.0)]
    env = environment(found, WORD_CODEC, max_observation=20)
    (reply,) = env.step([turn("<search>x</search>")])
    assert 19 <= len(reply.ids) <= 20
    text = text_of(reply)
    assert text.startswith("\n\n<information>Doc 1(Title: word) word")
    assert text.endswith("</information>\n\n")
    assert reply.counters == {"valid_searches": 1, "truncated": 1}
    assert len(env.step([turn("<search>x</search>", room=15)])[0].ids) <= 15
    traj = start()
    search.append_observation(traj, reply.ids)
    assert sum(traj.mask) == 0


def test_passages_share_the_budget_fairly():
    texts = ["a" * 500, "short", "b" * 500]
    found = [Passage(str(i), "T", text, 1.0) for i, text in enumerate(texts)]
    env = environment(found, max_observation=331)
    (reply,) = env.step([turn("<search>x</search>")])
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
    (reply,) = environment(found).step([turn("<search>x</search>")])
    body = text_of(reply)[len(search.OPEN) : -len(search.CLOSE)]
    edited = "(" + " ".join(tag.split())[1:]
    assert body == f"Doc 1(Title: a{edited}) b {edited} c d"


def test_clean_text_leaves_other_text_alone():
    text = "a < b, <b>bold</b> <searching> \u00e9 research>"
    assert search.clean_text(text) == text
    assert search.clean_text("x\ud800y") == "x?y"


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
    (reply,) = env.step([turn("<search>x</search>", room=room)])
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


# ----- prompts


def test_prompt_shortens_the_question_and_keeps_the_template():
    env = environment([], template="A {question} B", max_prompt=16)
    assert search.decode(env.start("who?")[1:-1], BYTES) == "A who? B"
    assert env.fit_question("who?") == "who?"
    assert env.start("x" * 99) == chat("A " + "x" * 10 + " B")
    assert env.fit_question("x" * 99) == "x" * 10
    assert env.fit_question("{question} a") == "{question}"


def test_templates():
    for name in search.TEMPLATES:
        assert search.load_template(name).endswith("Question: {question}")
    text = search.load_template("search")
    for tag in ("<think>", "<search>", "<information>", "<answer>"):
        assert tag in text and tag.replace("<", "</") in text


def test_template_from_a_file(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("{x} {question}\n\n")
    assert search.load_template(str(path)) == "{x} {question}\n"
    path.write_text("{question} {question}")
    with pytest.raises(ValueError, match="2 times"):
        search.load_template(str(path))
    with pytest.raises(ValueError, match="'serch': legal are search, short"):
        search.load_template("serch")
