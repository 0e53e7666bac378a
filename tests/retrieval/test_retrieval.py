import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lld_jax.data.world import generate, write_corpus
from lld_jax.protocol.search import Passage, RetrievalError
from lld_jax.retrieval import index as index_lib
from lld_jax.retrieval.build import (
    build,
    default_encoder,
    index_documents,
    main,
    open_index,
    read_corpus,
)
from lld_jax.retrieval.encoders import HashedEncoder
from lld_jax.retrieval.index import (
    Document,
    Plan,
    VectorSearch,
    load,
    make_plan,
    scann_ops,
)

needs_scann = pytest.mark.skipif(scann_ops() is None, reason="scann not installed")
PLANS = [
    Plan("exact"),
    pytest.param(Plan("scann"), marks=needs_scann),
]


def unit_rows(n, dim=16, seed=0):
    x = np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def write_lines(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def world_corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("world") / "corpus.jsonl"
    write_corpus(generate(3, 60), path)
    return path


# --- corpus rows ---


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_both_row_forms_blank_lines_and_gzip(tmp_path, name):
    rows = [
        json.dumps({"id": "0", "contents": '"Lima"\nLima is the capital of Peru.'}),
        json.dumps(
            {"id": "1", "title": "Lima", "text": "Lima is the capital of Peru."}
        ),
        "",
        json.dumps({"id": "2", "contents": "One line, no break"}),
        json.dumps({"id": 3, "contents": "T\nl1\nl2"}),
    ]
    text = "\n".join(rows).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert read_corpus(path) == [
        Document("0", "Lima", "Lima is the capital of Peru."),
        Document("1", "Lima", "Lima is the capital of Peru."),
        Document("2", "", "One line, no break"),
        Document("3", "T", "l1\nl2"),
    ]
    found = index_documents(read_corpus(path)).search(["no break"], k=1)
    assert found[0][0].id == "2" and found[0][0].text == "One line, no break"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"id": "1", "title": "Lima"}, "line 3: needs 'contents', or 'title' and"),
        ({"contents": "T\nx"}, "line 3: needs an object with an 'id'"),
        ({"id": "1", "title": "T", "text": None}, "line 3: 'text' must be a string"),
        ("[1]", "line 3: needs an object"),
        ("{oops", "line 3: "),
    ],
)
def test_bad_row_is_an_error_with_its_line(tmp_path, bad, message):
    path = write_lines(tmp_path / "c.jsonl", {"id": "0", "contents": "a"}, "", bad)
    with pytest.raises(ValueError, match=message):
        read_corpus(path)


def test_only_one_surrounding_pair_of_quotes_is_dropped(tmp_path):
    titles = ['"A"', '"The "B" Show"', '"', 'C "D"', " E "]
    rows = [{"id": t, "title": t, "text": ""} for t in titles]
    documents = read_corpus(write_lines(tmp_path / "c.jsonl", *rows))
    assert [d.title for d in documents] == ["A", 'The "B" Show', '"', 'C "D"', "E"]


# --- vectors ---


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("n", [1, 2, 3, 10, 50])
@pytest.mark.parametrize("k", [3, 5])
def test_small_corpora_give_min_k_n_hits_in_exact_order(plan, n, k):
    vectors, queries = unit_rows(n), unit_rows(4, seed=1)
    found = VectorSearch(vectors, plan).search(queries, k)
    for query, hits in zip(queries, found, strict=True):
        scores = [float(np.dot(v.astype(float), query.astype(float))) for v in vectors]
        best = sorted(range(n), key=lambda i: (-scores[i], i))[:k]
        assert [row for row, _ in hits] == best
        np.testing.assert_allclose([s for _, s in hits], [scores[i] for i in best])


@pytest.mark.parametrize("plan", PLANS)
def test_ties_are_ordered_by_row_even_across_the_cut(plan):
    # 300 copies of one vector: more than any margin a searcher is asked for.
    vectors = np.tile(unit_rows(1), (400, 1))
    vectors[::4] = unit_rows(100, seed=5)
    query = vectors[1:2]
    (hits,) = VectorSearch(vectors, plan).search(query, 5)
    assert [row for row, _ in hits] == [1, 2, 3, 5, 6]
    assert len({score for _, score in hits}) == 1


@needs_scann
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 6), st.integers(0, 99))
def test_scann_brute_force_equals_exact_search(n, k, copies, seed):
    vectors = np.repeat(unit_rows(n, seed=seed), copies, axis=0)
    queries = np.concatenate([unit_rows(2, seed=seed + 1), vectors[:1]])
    exact = VectorSearch(vectors, Plan("exact")).search(queries, k)
    assert VectorSearch(vectors, Plan("scann")).search(queries, k) == exact


def test_exact_search_joins_blocks(monkeypatch):
    vectors, queries = unit_rows(23), unit_rows(3, seed=1)
    whole = VectorSearch(vectors, Plan("exact")).search(queries, 6)
    monkeypatch.setattr(index_lib, "_BLOCK", 4)
    assert VectorSearch(vectors, Plan("exact")).search(queries, 6) == whole


class PaddingSearcher:
    """Answers as ScaNN may: too few hits, the rest padded with row 0 and NaN."""

    def __init__(self, vectors):
        self.vectors = vectors

    def search_batched(self, queries, final_num_neighbors, **_):
        scores = queries @ self.vectors.T
        rows = np.argsort(-scores, axis=1)[:, :final_num_neighbors].astype(np.uint32)
        scores = np.take_along_axis(scores, rows.astype(int), 1)
        rows[:, 1:], scores[:, 1:] = 0, np.nan
        return rows, scores


def test_padding_of_scann_is_never_a_hit():
    vectors, queries = unit_rows(40), unit_rows(3, seed=1)
    exact = VectorSearch(vectors, Plan("exact")).search(queries, 4)
    fake = PaddingSearcher(vectors)
    assert VectorSearch(vectors, Plan("scann"), fake).search(queries, 4) == exact
    hashed = VectorSearch(vectors, Plan("scann", "ah"), fake).search(queries, 4)
    assert [[row for row, _ in hits] for hits in hashed] == [
        [hits[0][0]] for hits in exact
    ]


class LastTieFirstSearcher:
    """Exact, but of equal scores it returns the later rows."""

    def __init__(self, vectors):
        self.vectors = vectors

    def search_batched(self, queries, final_num_neighbors):
        backwards = (queries @ self.vectors.T)[:, ::-1]
        order = np.argsort(-backwards, axis=1, kind="stable")[:, :final_num_neighbors]
        rows = (len(self.vectors) - 1 - order).astype(np.uint32)
        return rows, np.take_along_axis(backwards, order, 1)


def test_more_is_asked_of_scann_until_no_tie_is_cut():
    vectors = np.concatenate([np.tile(unit_rows(1), (300, 1)), unit_rows(40, seed=2)])
    queries = np.concatenate([vectors[:1], vectors[310:311]])
    exact = VectorSearch(vectors, Plan("exact")).search(queries, 3)
    assert [row for row, _ in exact[0]] == [0, 1, 2]
    fake = LastTieFirstSearcher(vectors)
    assert VectorSearch(vectors, Plan("scann"), fake).search(queries, 3) == exact


@needs_scann
@pytest.mark.parametrize("kind", ["ah", "tree_ah"])
def test_hashed_kinds_find_the_row_itself(kind):
    vectors = unit_rows(2000)
    search = VectorSearch(vectors, make_plan(2000, kind=kind))
    found = search.search(vectors[:50], 3)
    # The partitions come from a clustering that threads make a little different.
    assert sum(hits[0][0] == i for i, hits in enumerate(found)) >= 40
    for hits in found:
        scores = [score for _, score in hits]
        assert scores == sorted(scores, reverse=True) and len(set(hits)) == len(hits)


def test_plan_follows_the_number_of_points(monkeypatch):
    monkeypatch.setattr(index_lib, "scann_ops", lambda: object())
    kinds = [make_plan(n).kind for n in (19_999, 20_000, 99_999, 100_000)]
    assert kinds == ["brute_force", "ah", "ah", "tree_ah"]
    assert make_plan(1_000_000).leaves == 1000
    assert make_plan(5).backend == "exact"
    assert make_plan(5, backend="scann", kind="tree_ah").kind == "brute_force"
    monkeypatch.setattr(index_lib, "scann_ops", lambda: None)
    assert make_plan(50_000).backend == "exact"
    with pytest.raises(ValueError, match="scann is not installed"):
        make_plan(5, backend="scann")
    with pytest.raises(ValueError, match="backend='fast'"):
        make_plan(5, backend="fast")


# --- index ---


def test_search_contract(world_corpus):
    index = open_index(world_corpus)
    title = index.documents[7].title
    found = index.search([title, "", "?!", title.upper()], k=3)
    assert [len(hits) for hits in found] == [3, 0, 0, 3]
    assert all(isinstance(p, Passage) for p in found[0])
    assert found[0][0].title == found[3][0].title == title
    assert [p.score for p in found[0]] == sorted(
        (p.score for p in found[0]), reverse=True
    )
    assert index.search([], k=3) == []
    assert len(index.search([title], k=10_000)[0]) == len(index)


def test_only_retrieval_error_is_raised(world_corpus):
    index = open_index(world_corpus)
    for queries, k in [(["a"], 0), ([None], 3), (["a"], "3")]:
        with pytest.raises(RetrievalError, match="search for 1 queries"):
            index.search(queries, k)


@pytest.mark.parametrize("backend", ["exact", pytest.param("scann", marks=needs_scann)])
def test_stored_index_answers_like_the_corpus(
    tmp_path, world_corpus, backend, monkeypatch
):
    queries = [f"{d.title} founder" for d in read_corpus(world_corpus)[::7]] + [""]
    expected = open_index(world_corpus).search(queries, k=4)
    out = build(world_corpus, tmp_path / "deep" / "index", backend=backend)
    assert [p.name for p in out.parent.iterdir()] == ["index"]  # nothing half-made
    stored = open_index(out)
    assert stored.vectors.plan.backend == backend
    assert stored.search(queries, k=4) == expected
    assert load(out, backend="exact").search(queries, k=4) == expected
    monkeypatch.setattr(index_lib, "scann_ops", lambda: None)
    assert load(out).search(queries, k=4) == expected


def test_build_is_whole_or_absent(tmp_path, world_corpus):
    bad = write_lines(tmp_path / "bad.jsonl", {"id": "0", "contents": "a"}, "{")
    empty = write_lines(tmp_path / "empty.jsonl", "")
    with pytest.raises(ValueError, match="line 2"):
        build(bad, tmp_path / "index")
    with pytest.raises(ValueError, match="no documents"):
        build(empty, tmp_path / "index")
    with pytest.raises(ValueError, match="no documents"):
        open_index(empty)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "empty.jsonl"]
    build(world_corpus, tmp_path / "index")
    with pytest.raises(FileExistsError, match="index exists"):
        build(world_corpus, tmp_path / "index")


def test_command_line(tmp_path, world_corpus, capsys):
    main([f"--corpus={world_corpus}", f"--out={tmp_path / 'index'}"])
    n = len(read_corpus(world_corpus))
    assert f"{n:,} passages, 1024 dimensions" in capsys.readouterr().out
    assert len(load(tmp_path / "index")) == n


def test_mismatch_is_refused(tmp_path, world_corpus):
    out = build(world_corpus, tmp_path / "index", backend="exact")
    header = json.loads((out / "header.json").read_text())

    with pytest.raises(ValueError, match="built with encoder"):
        load(out, encoder=HashedEncoder())
    load(out, encoder=default_encoder(read_corpus(world_corpus)))  # the same one
    with pytest.raises(FileNotFoundError, match="not an index"):
        load(tmp_path)

    def with_header(**changes):
        (out / "header.json").write_text(json.dumps({**header, **changes}))

    with_header(encoder={"name": "e5", "model": "e5-base-v2"})
    with pytest.raises(ValueError, match="pass encoder="):
        load(out)
    with_header(format=99)
    with pytest.raises(ValueError, match="format 99"):
        load(out)
    with_header()
    vectors = np.load(out / "vectors.npy")
    np.save(out / "vectors.npy", vectors[:-1])
    with pytest.raises(ValueError, match="vectors .* header says"):
        load(out)
    with_header(n=len(vectors) - 1)
    with pytest.raises(ValueError, match="another corpus"):
        load(out)
    with_header()
    np.save(out / "vectors.npy", vectors)
    passages = (out / "passages.jsonl").read_bytes()
    (out / "passages.jsonl").write_bytes(passages.replace(b"born", b"BORN"))
    with pytest.raises(ValueError, match="not the one that was indexed"):
        load(out)
    (out / "passages.jsonl").write_bytes(passages + b"x")
    with pytest.raises(ValueError, match="offsets"):
        load(out)
    (out / "passages.jsonl").write_bytes(passages)
    idf = np.load(out / "idf.npy")
    np.save(out / "idf.npy", idf * 0.5)
    with pytest.raises(ValueError, match="built with encoder"):
        load(out)


@pytest.mark.parametrize(("seed", "size"), [(0, 150), (1, 600)])
def test_recall_on_the_synthetic_world(tmp_path, seed, size):
    world = generate(seed, size)
    write_corpus(world, tmp_path / "c.jsonl")
    index = open_index(tmp_path / "c.jsonl")
    questions = world.questions["validation_seen"] + world.questions["train"][:300]

    def recall(queries, gold):
        found = index.search(queries, k=2)
        return np.mean(
            [t in {p.title for p in hits} for t, hits in zip(gold, found, strict=True)]
        )

    titles = sorted({title for q in questions for title in q.support})
    steps = sorted(
        {
            (title, relation)
            for q in questions
            for title, relation in zip(
                q.support, q.relation.split(".")[1:], strict=True
            )
        }
    )
    assert recall(titles, titles) >= 0.99
    assert recall([f"{t} {r}" for t, r in steps], [t for t, _ in steps]) >= 0.99
    first_hop = [q.support[0] for q in questions]
    assert recall([q.question for q in questions], first_hop) >= 0.95
