"""A retriever with a memory: what it asks, what it keeps, and in many threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lld_jax.protocol.search import Passage, RetrievalError
from lld_jax.retrieval.cache import CachedRetriever


def answer(query, k):
    return [Passage(str(i), query, f"{k}", 1.0 / (i + 1)) for i in range(k)]


class Recorder:
    """Answers any query; records its calls; fails for the query `bad`."""

    def __init__(self):
        self.calls = []

    def search(self, queries, k):
        self.calls.append((list(queries), k))
        if "bad" in queries:
            raise RetrievalError("down")
        return [answer(query, k) for query in queries]


def test_a_call_asks_each_query_once_though_nothing_is_kept():
    inner = Recorder()
    cached = CachedRetriever(inner)
    for _ in range(2):
        found = cached.search(["b", "a", "b", "b ", "b"], 2)
        assert found == [answer(query, 2) for query in ("b", "a", "b", "b ", "b")]
    assert inner.calls == [(["b", "a", "b "], 2)] * 2
    assert (cached.asked, cached.hits) == (6, 4)
    assert cached.search([], 2) == [] and len(inner.calls) == 2


def test_kept_answers_are_of_the_same_query_and_k():
    inner = Recorder()
    cached = CachedRetriever(inner, 10)
    cached.search(["a", "b"], 2)
    assert cached.search(["c", "a"], 2) == [answer("c", 2), answer("a", 2)]
    assert cached.search(["a"], 3) == [answer("a", 3)]
    assert inner.calls == [(["a", "b"], 2), (["c"], 2), (["a"], 3)]
    assert (cached.asked, cached.hits) == (4, 1)


def test_what_was_unused_for_longest_goes_first():
    inner = Recorder()
    cached = CachedRetriever(inner, 2)
    for query in ("a", "b", "a", "c", "a", "b"):  # c drives out b, not a
        cached.search([query], 1)
    assert [queries for queries, _ in inner.calls] == [["a"], ["b"], ["c"], ["b"]]
    cached.search(["d", "e", "f"], 1)  # more than it keeps
    cached.search(["e", "f"], 1)
    assert inner.calls[-1] == (["d", "e", "f"], 1)


def test_a_failure_is_raised_and_not_kept():
    inner = Recorder()
    cached = CachedRetriever(inner, 10)
    cached.search(["a"], 1)
    for _ in range(2):
        with pytest.raises(RetrievalError, match="down"):
            cached.search(["a", "bad", "b"], 1)
    assert cached.search(["a", "b"], 1) == [answer("a", 1), answer("b", 1)]
    calls = [queries for queries, _ in inner.calls]
    assert calls == [["a"], ["bad", "b"], ["bad", "b"], ["b"]]


def test_answers_of_a_wrong_number_are_an_error_and_not_kept():
    inner = Recorder()
    cached = CachedRetriever(inner, 10)
    inner.search = lambda queries, k: [[]]
    with pytest.raises(ValueError):
        cached.search(["a", "b"], 1)
    del inner.search
    assert cached.search(["a"], 1) == [answer("a", 1)]


def test_a_caller_may_change_its_lists():
    cached = CachedRetriever(Recorder(), 10)
    for _ in range(2):
        first, second = cached.search(["a", "a"], 2)
        first.clear()
        assert second == answer("a", 2)


def test_a_size_below_zero_is_refused():
    with pytest.raises(ValueError, match="retrieval.cache=-1: legal is 0 or more"):
        CachedRetriever(Recorder(), -1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.sampled_from("abcde")), st.integers(1, 2))),
    st.integers(0, 5),
)
def test_answers_are_those_of_the_retriever_itself(calls, entries):
    inner = Recorder()
    cached = CachedRetriever(inner, entries)
    for queries, k in calls:
        assert cached.search(queries, k) == [answer(query, k) for query in queries]
    assert cached.asked == sum(len(queries) for queries, _ in inner.calls)
    assert cached.asked + cached.hits == sum(len(queries) for queries, _ in calls)
    assert all(queries for queries, _ in inner.calls)


def test_threads_meet_in_the_retriever_and_share_what_is_kept():
    together = threading.Barrier(4, timeout=20)

    class Slow(Recorder):
        def search(self, queries, k):
            if "meet" in queries:
                together.wait()
            return super().search(queries, k)

    cached = CachedRetriever(Slow(), 50)
    with ThreadPoolExecutor(4) as pool:
        met = pool.map(lambda i: cached.search([f"q{i}", "meet"], 1), range(4))
        assert [found[0] for found in met] == [answer(f"q{i}", 1) for i in range(4)]
        names = [[f"q{(7 * i + j) % 60}" for j in range(5)] for i in range(400)]
        many = list(pool.map(lambda queries: cached.search(queries, 1), names))
    assert many == [[answer(query, 1) for query in queries] for queries in names]
    assert cached.asked + cached.hits == 8 + 5 * 400
    assert cached.asked == sum(len(queries) for queries, _ in cached.retriever.calls)
