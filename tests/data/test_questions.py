"""Question sets: forms of the gold answer, files, TFDS and the order of draws."""

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from lld_jax.data import questions, world
from lld_jax.data.questions import Question, load, normalise_golden, question_from_row


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    data_dir = str(tmp_path_factory.mktemp("data"))
    return data_dir, questions.prepare_world(data_dir, seed=5, size=30)


@pytest.mark.parametrize(
    "form",
    [
        "Paris",
        ["Paris"],
        ("Paris",),
        b"Paris",
        [b"Paris"],
        np.array(["Paris"], dtype=object),
        np.array([b"Paris"], dtype=object),
        np.array("Paris", dtype=object),
        np.array(["Paris"]),
        ["Paris", "Paris", " "],
    ],
    ids=repr,
)
def test_every_form_of_one_answer(form):
    for value in (form, {"target": form}, {"target": {"target": form}}):
        golden = normalise_golden(value)
        assert golden == ("Paris",)
        assert type(golden[0]) is str


def test_several_answers_keep_their_order():
    value = np.array(["Zürich", "Basel", b"Z\xc3\xbcrich"], dtype=object)
    assert normalise_golden(value) == ("Zürich", "Basel")


@pytest.mark.parametrize(
    "value",
    [None, [], (), "", b"", [""], np.array([], dtype=object), {"target": []}, {},
     [None], [["Paris"]], 1920, {"Paris"}],
    ids=repr,
)  # fmt: skip
def test_no_answer_or_a_wrong_type_is_an_error(value):
    with pytest.raises(ValueError, match="golden answer"):
        normalise_golden(value)


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


ROWS = (
    '{"id": "a", "question": "Who?", "golden_answers": ["X", "Y"], "hops": 2}',
    "",
    '{"question": "Wo in Köln?", "answer": "Z"}',
    '{"id": 7, "question": "Why?", "answers": {"target": ["W"]}}',
)
LOADED = [
    Question("a", "Who?", ("X", "Y"), 2),
    Question("1", "Wo in Köln?", ("Z",), 0),
    Question("7", "Why?", ("W",), 0),
]


def test_jsonl(tmp_path):
    assert load(write(tmp_path / "q.jsonl", *ROWS), "unused") == LOADED


def test_jsonl_gz(tmp_path):
    path = tmp_path / "q.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(ROWS).encode("utf-8")))
    assert load(str(path), "unused") == LOADED


def test_several_sources_follow_each_other(tmp_path, prepared):
    data_dir, files = prepared
    path = write(tmp_path / "q.jsonl", *ROWS)
    both = load((path, files.validation_unseen), data_dir)
    assert both == LOADED + load(files.validation_unseen, data_dir)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"id": "b", "question": "Who?", "golden_answers": []}', "at least one"),
        ('{"id": "b", "question": "Who?", "golden_answers": null}', "None"),
        ('{"id": "b", "question": "Who?"}', "none of"),
        ('{"id": "b", "golden_answers": ["X"]}', "question None"),
        ('{"id": "b", "question": " ", "golden_answers": ["X"]}', "blank"),
        ('["Who?", "X"]', "mapping"),
        ('{"id": "b", "question"', "delimiter"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, row, reason):
    path = write(tmp_path / "bad.jsonl", ROWS[0], "", row)
    with pytest.raises(ValueError, match=rf"bad\.jsonl, line 3: .*{reason}"):
        load(path, "unused")


def test_an_empty_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no question"):
        load(write(tmp_path / "none.jsonl", ""), "unused")


@pytest.mark.parametrize("source", ["questions.csv", "tiny_world", "a b:train", ""])
def test_a_source_of_no_known_form(source):
    with pytest.raises(ValueError, match="legal are"):
        load(source, "unused")


def test_what_is_not_there(tmp_path, prepared):
    with pytest.raises(FileNotFoundError):
        load(str(tmp_path / "missing.jsonl"), "unused")
    with pytest.raises(FileNotFoundError, match="seed5_size31:train.*not prepared"):
        load("tiny_world/seed5_size31:train", prepared[0])
    with pytest.raises(ValueError, match="'trial'"):
        load("tiny_world/seed5_size30:trial", prepared[0])


def test_natural_questions_row():
    row = {"question": b"who wrote it", "answer": np.array([b"A", b"B"], dtype=object)}
    assert question_from_row(row, 12) == Question("12", "who wrote it", ("A", "B"))


def trivia_row(value, aliases):
    return {
        "question": b"Who?",
        "question_id": b"tc_33",
        "question_source": b"http://example.org",
        "entity_pages": {"title": []},
        "search_results": {"title": []},
        "answer": {
            "aliases": aliases,
            "normalized_aliases": [a.lower() for a in aliases],
            "matched_wiki_entity_name": b"",
            "normalized_matched_wiki_entity_name": b"",
            "normalized_value": value.lower(),
            "type": b"WikipediaEntity",
            "value": value,
        },
    }


def test_trivia_qa_row():
    row = trivia_row(b"Puck", np.array([b"PUCK", b"Puck"], dtype=object))
    assert question_from_row(row, 0) == Question("tc_33", "Who?", ("Puck", "PUCK"))
    with pytest.raises(ValueError, match="without answers"):
        question_from_row(trivia_row(b"<unk>", []), 0)


def test_tfds_gives_the_questions_of_the_world_in_order(prepared):
    data_dir, files = prepared
    for split in world.SPLITS:
        expected = [
            Question(q.id, q.question, q.golden_answers, q.hops)
            for q in world.generate(5, 30).questions[split]
        ]
        assert load(getattr(files, split), data_dir) == expected


def test_corpus_of_the_prepared_world(prepared):
    with open(prepared[1].corpus, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    pages = world.generate(5, 30).pages
    assert [r["contents"] for r in rows] == [f'"{p.title}"\n{p.text}' for p in pages]


def test_a_prepared_world_is_not_made_again(prepared, monkeypatch):
    monkeypatch.setattr(world, "generate", None)
    assert questions.prepare_world(prepared[0], seed=5, size=30) == prepared[1]


def test_a_killed_preparation_is_made_again(tmp_path, prepared):
    """Killed for real, at each of three moments, then called anew."""
    code = """
import os, sys
from lld_jax.data import (questions, world)
moment, data_dir = sys.argv[1:]
write = world.write_corpus
def half_a_corpus(w, path):
    with open(path, "w") as file:
        file.write('{"id": "0"')
    os._exit(9)
def half_a_split(self, questions):
    yield from list(examples(self, questions))[:3]
    os._exit(9)
def second_split(self, questions):
    if questions[0].id.startswith("validation"):
        os._exit(9)
    yield from examples(self, questions)
examples = questions.TinyWorld._generate_examples
if moment == "corpus":
    world.write_corpus = half_a_corpus
else:
    questions.TinyWorld._generate_examples = (
        half_a_split if moment == "split" else second_split)
questions.prepare_world(data_dir, seed=5, size=30)
"""
    for moment in ("corpus", "split", "between"):
        command = [sys.executable, "-c", code, moment, str(tmp_path)]
        assert subprocess.run(command, capture_output=True).returncode == 9
        with pytest.raises(FileNotFoundError):
            load(prepared[1].train, str(tmp_path))
    files = questions.prepare_world(str(tmp_path), seed=5, size=30)
    assert load(files.train, str(tmp_path)) == load(prepared[1].train, prepared[0])
    with open(files.corpus, "rb") as one, open(prepared[1].corpus, "rb") as other:
        assert one.read() == other.read()


def test_tensorflow_stays_out(prepared):
    code = """
import sys
from lld_jax.data import questions
data_dir, source, fresh = sys.argv[1:]
assert questions.load(source, data_dir)
questions.prepare_world(fresh, seed=1, size=20)
assert "tensorflow" not in sys.modules
"""
    data_dir, files = prepared
    fresh = os.path.join(data_dir, "fresh")
    subprocess.run(
        [sys.executable, "-c", code, data_dir, files.train, fresh], check=True
    )


def test_draws_are_a_new_order_each_epoch():
    stock = [Question(str(i), f"q{i}", ("x",)) for i in range(20)]
    draws = questions.question_of_draw(stock, seed=3)
    epochs = [[draws[20 * e + i].id for i in range(20)] for e in range(3)]
    assert all(sorted(epoch, key=int) == [q.id for q in stock] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    again = questions.question_of_draw(stock, seed=3)
    assert again[47].id == epochs[2][7]  # asked for at once, without what is before
    other = questions.question_of_draw(stock, seed=4)
    assert [other[i].id for i in range(20)] != epochs[0]
