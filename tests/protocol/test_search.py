import base64
import json

import pytest
from byte_codec import BYTES, PARTS, ask, byte_encode, environment, text_of, turn, wrap
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DATA

from lld_jax.protocol import search, trajectory
from lld_jax.protocol.search import Action, Passage, Piece
from lld_jax.protocol.stop import stop_table

# A small vocabulary; id 0 is both end and pad.
TOY = ["<|end|>", "<", "search", ">", "who", " wrote", " it", "</", ">\n\n", "Next"]
TOY += ["answer", "think", "<th", "ink", "Lima", " "]
TOY = tuple(token.encode() for token in TOY)

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


def test_parse_action_of_other_tools():
    text = "<search>x</search> <run> 1 </run><answer>y</answer>"
    assert search.parse_action(text, ("run",)) == Action("run", "1")
    assert search.parse_action(text, ("run", "search")) == Action("search", "x")
    assert search.parse_action(text, ()) == Action("answer", "y")
    assert search.parse_action("<run> </run>", ("run",)) == Action("invalid", "")
    assert search.parse_action("<a.>1</a.>", ("a.",)) == Action("a.", "1")
    assert search.closing_tag(("a.",)).search("</a!>") is None


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
        text += action + text_of(ask(env, [turn(action)])[0])
    text += "<answer>z</answer>"
    cut = text[: data.draw(st.integers(0, len(text)))]
    whole, part = search.split_response(text), search.split_response(cut)
    # A cut inside a notice is not told from an action: it can only be the last piece.
    assert part[:-1] == whole[: max(len(part) - 1, 0)]
    assert "".join(p.text for p in part) == cut


# ----- trajectories


def start(prompt=(14, 15)):
    return trajectory.new_trajectory(3, 1, "q?", ("Lima",), prompt)


def test_sampled_ids_are_kept_though_not_canonical():
    traj = start()
    trajectory.append_action(traj, [1, 11, 3], [-0.1, -0.2, -0.3])  # `<think>` in three
    before = list(traj.ids)
    trajectory.append_observation(traj, [15, 14])
    trajectory.append_action(traj, [9, 0], [-0.4, -0.5])
    assert traj.ids == [14, 15, 1, 11, 3, 15, 14, 9, 0]
    assert traj.ids[: len(before)] == before
    assert traj.mask == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert traj.sampler_logps == [0, 0, -0.1, -0.2, -0.3, 0, 0, -0.4, -0.5]
    assert traj.spans == [
        trajectory.Span("action", 2, 5),
        trajectory.Span("observation", 5, 7),
        trajectory.Span("action", 7, 9),
    ]


def test_action_up_to_the_token_that_completes_its_tag():
    sampled = [1, 2, 3, 4, 5, 6, 7, 2, 8, 9]
    table, state, kept = stop_table(TOY, end_ids={0}), 0, []
    while state != table.stop:
        kept.append(sampled[len(kept)])
        state = table.next_state[state, kept[-1]]
    traj = start(())
    trajectory.append_action(traj, kept, [-1.0] * len(kept))
    assert traj.ids == sampled[:9] and traj.mask == [1] * 9
    text = search.decode(traj.ids, TOY)
    assert search.parse_action(text) == Action("search", "who wrote it")
    assert "Next" not in text


def test_end_token_is_trained_though_it_is_the_pad_token():
    traj = start(())
    trajectory.append_action(traj, [4, 5, 0], [-1.0, -1.0, -2.0])
    assert traj.mask == [1, 1, 1]
    assert traj.ids == [4, 5, 0]


def test_append_refuses_unequal_lengths():
    with pytest.raises(AssertionError, match="2 ids but 1 logps"):
        trajectory.append_action(start(), [1, 2], [-1.0])


def test_json_round_trip():
    traj = start()
    trajectory.append_action(traj, [1, 2], [-0.1, -1 / 3])
    trajectory.append_observation(traj, [5])
    trajectory.append_action(traj, [3], [-2.0])
    traj.searches.append(trajectory.Search("who", ("T", "U")))
    traj.reason, traj.reward = "answered", 1
    row = trajectory.to_json(traj)
    names = "draw sample question gold ids mask sampler_logps reward reason searches"
    assert set(row) == set(names.split())
    assert trajectory.from_json(json.loads(json.dumps(row))) == traj
    trajectory.append_observation(traj, [5, 5])
    row = json.loads(json.dumps(trajectory.to_json(traj)))
    assert trajectory.from_json(row) == traj
    assert trajectory.from_json(trajectory.to_json(start())) == start()


def test_final_answer_is_what_the_policy_wrote():
    env = environment([Passage("1", "T", "<answer> Rome </answer>", 1.0)])
    prompt = env.start("<answer> Oslo </answer>")
    traj = trajectory.new_trajectory(0, 0, "q?", ("Lima",), prompt)
    for text in (
        "<answer>no</search>",
        "<search>x</search>",
        "so <answer> Lima </answer>",
    ):
        assert trajectory.final_answer(traj, BYTES) is None
        ids = byte_encode(text)
        trajectory.append_action(traj, ids, [-1.0] * len(ids))
        (reply,) = ask(env, [turn(text)])
        traj.reason = reply.reason
        if reply.ids:
            trajectory.append_observation(traj, reply.ids)
    assert trajectory.final_answer(traj, BYTES) == "Lima"
    marked = trajectory.answer_mask(traj.ids, traj.mask, BYTES)
    assert search.decode(
        [i for i, m in zip(traj.ids, marked, strict=True) if m], BYTES
    ) == ("<answer> Lima </answer>")
    traj.reason = "turns"
    assert trajectory.final_answer(traj, BYTES) is None


def test_answer_mask_takes_every_token_that_shares_a_byte():
    path = DATA / "qwen_tags.json"
    data = json.loads(path.read_text())
    known = {int(i): base64.b64decode(t) for i, t in data["token_bytes"].items()}
    token_bytes = [known.get(i, b"") for i in range(max(known) + 1)]
    assert len(data["answers"]) == 14
    for row in data["answers"]:
        ids = row["ids"]
        assert trajectory.answer_mask(ids, [1] * len(ids), token_bytes) == row["answer"]
        none = [0] * len(ids)
        assert trajectory.answer_mask(ids, none, token_bytes) == none


def test_answer_mask_does_not_join_actions_around_an_observation():
    first, second = byte_encode("<answer>a"), byte_encode("b</answer>")
    ids = [*first, *byte_encode(wrap("d")), *second]
    mask = [1] * len(first) + [0] * len(wrap("d")) + [1] * len(second)
    assert sum(trajectory.answer_mask(ids, mask, BYTES)) == 0


# ----- texts


def test_clean_text_leaves_other_text_alone():
    text = "a < b, <b>bold</b> <searching> \u00e9 research>"
    assert search.clean_text(text) == text
    assert search.clean_text("x\ud800y") == "x?y"


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
