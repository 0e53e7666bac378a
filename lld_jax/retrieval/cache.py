"""A retriever that is asked no query twice."""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from lld_jax.protocol.search import Passage, Retriever


class CachedRetriever:
    """Asks `retriever` for each different query of a call once, and keeps answers.

    Queries are equal if their strings are. The answers to the last `entries` different
    `(query, k)` are kept, the one unused for the longest time goes first; 0 keeps none.
    A call that fails keeps nothing. Calls may run at once, if those of `retriever` may.

    Attributes:
      asked: queries that were passed on to `retriever`, failed calls included.
      hits: the other queries: a kept answer, or the same query in the same call.
    """

    def __init__(self, retriever: Retriever, entries: int = 0):
        if entries < 0:
            raise ValueError(f"retrieval.cache={entries}: legal is 0 or more")
        self.retriever, self.entries = retriever, entries
        self.asked = self.hits = 0
        self._kept: OrderedDict[tuple[str, int], list[Passage]] = OrderedDict()
        self._lock = Lock()  # never held while `retriever` works

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """One list per query, at most `k` long. Raises what `retriever` raises."""
        found: dict[str, list[Passage]] = {}
        missing = []
        with self._lock:
            for query in dict.fromkeys(queries):
                if (query, k) in self._kept:
                    self._kept.move_to_end((query, k))
                    found[query] = self._kept[query, k]
                else:
                    missing.append(query)
            self.asked += len(missing)
            self.hits += len(queries) - len(missing)
        if missing:
            answers = self.retriever.search(missing, k)
            new = dict(zip(missing, answers, strict=True))
            found |= new
            with self._lock:
                self._kept |= {(query, k): answer for query, answer in new.items()}
                while len(self._kept) > self.entries:
                    self._kept.popitem(last=False)
        # Copies: what a caller does to its lists does not reach the next one.
        return [list(found[query]) for query in queries]
