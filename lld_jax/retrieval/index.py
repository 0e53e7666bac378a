"""Search over passage vectors by dot product: ScaNN, or exactly with numpy."""

import hashlib
import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from lld_jax.protocol.search import Passage, RetrievalError
from lld_jax.retrieval.encoders import HashedEncoder

FORMAT = 1
_BLOCK = 1 << 16  # passage rows scored at once by the exact search
_TIE = 1e-5  # float32 scores closer than this are compared again in float64
_SMALL = 64  # ScaNN has nothing to gain below


@dataclass(frozen=True)
class Document:
    """One passage of a corpus; `title` may be empty."""

    id: str
    title: str
    text: str


class Encoder(Protocol):
    """What an index asks of an encoder (see `lld_jax.retrieval.encoders`)."""

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray: ...

    def encode_passages(
        self, titles: Sequence[str], texts: Sequence[str]
    ) -> np.ndarray: ...

    def settings(self) -> dict: ...


@dataclass(frozen=True)
class Plan:
    """How vectors are searched: backend 'scann' or 'exact', kind of ScaNN index."""

    backend: str
    kind: str = "brute_force"  # or "ah" (asymmetric hashing), "tree_ah"
    leaves: int = 0


def scann_ops() -> ModuleType | None:
    """ScaNN's module without TensorFlow, or None where it is not installed."""
    try:
        from scann.scann_ops.py import scann_ops_pybind
    except (ImportError, OSError):
        return None
    return scann_ops_pybind


def make_plan(n: int, *, backend: str = "auto", kind: str = "auto") -> Plan:
    """ScaNN's own guidance by the number of points, exact where it can't help.

    Args:
      n: number of vectors.
      backend: 'auto', 'scann' or 'exact'.
      kind: 'auto' (brute force under 20,000 points, AH under 100,000, tree + AH
        above, about sqrt(n) leaves), 'brute_force', 'ah' or 'tree_ah'.
    """
    kinds = ("auto", "brute_force", "ah", "tree_ah")
    if backend not in ("auto", "scann", "exact") or kind not in kinds:
        raise ValueError(
            f"backend={backend!r}, kind={kind!r}: legal are auto, scann, exact and "
            f"{', '.join(kinds)}"
        )
    if backend == "auto":
        backend = "scann" if n >= _SMALL and scann_ops() else "exact"
    if backend == "exact":
        return Plan("exact")
    if scann_ops() is None:
        raise ValueError("backend='scann', but scann is not installed here")
    if kind == "auto":
        kind = "brute_force" if n < 20_000 else "ah" if n < 100_000 else "tree_ah"
    if kind != "brute_force" and n < 32:
        kind = "brute_force"  # fewer points than hashing centres
    leaves = max(1, round(n**0.5)) if kind == "tree_ah" else 0
    return Plan("scann", kind, leaves)


class VectorSearch:
    """Nearest rows of `vectors` `[n, D]` float32 by dot product."""

    def __init__(self, vectors: np.ndarray, plan: Plan, searcher: Any = None):
        self.vectors, self.plan = vectors, plan
        if plan.backend == "scann" and searcher is None:
            searcher = _build_scann(vectors, plan)
        self.searcher = searcher

    def search(self, queries: np.ndarray, k: int) -> list[list[tuple[int, float]]]:
        """(row, score) of the min(k, n) best rows for each of `queries` `[B, D]`.

        Scores descend; equal scores are ordered by row. ScaNN's brute force and the
        exact search give the same rows, in the same order, with the same scores;
        the hashed kinds are approximate and may return fewer.
        """
        queries = np.ascontiguousarray(queries, np.float32)
        if not len(queries):
            return []
        k = min(k, len(self.vectors))
        if self.plan.backend == "exact":
            found = _exact_candidates(self.vectors, queries, k)
        elif self.plan.kind == "brute_force":
            found = self._scann_candidates(queries, k)
        else:
            wide = max(100, 10 * k)
            rows, scores = self.searcher.search_batched(
                queries, final_num_neighbors=k, pre_reorder_num_neighbors=wide
            )
            return [_ranked(*_valid(*rs), k) for rs in zip(rows, scores, strict=True)]
        return [
            _ranked(rows, _dot(self.vectors[rows], query), k)
            for rows, query in zip(found, queries, strict=True)
        ]

    def _scann_candidates(self, queries: np.ndarray, k: int) -> list[np.ndarray]:
        """Rows that may be among the k best; asks for more until no tie is cut."""
        n, width = len(self.vectors), min(k + 32, len(self.vectors))
        found: dict[int, np.ndarray] = {}
        open_ = np.arange(len(queries))
        while len(open_):
            answer = self.searcher.search_batched(
                queries[open_], final_num_neighbors=width
            )
            for i, rows, scores in zip(open_, *answer, strict=True):
                rows, scores = _valid(rows, scores)
                if len(rows) < width:  # ScaNN held something back
                    found[i] = _exact_candidates(self.vectors, queries[i : i + 1], k)[0]
                    continue
                bound = np.partition(scores, -k)[-k] - _TIE
                if width == n or scores.min() < bound:
                    found[i] = rows[scores >= bound]
            open_ = np.array([i for i in open_ if i not in found], np.int64)
            width = min(4 * width, n)
        return [found[i] for i in range(len(queries))]


def _build_scann(vectors: np.ndarray, plan: Plan):
    builder = scann_ops().builder(np.asarray(vectors), 10, "dot_product")
    if plan.kind == "brute_force":
        return builder.score_brute_force().build()
    if plan.kind == "tree_ah":
        builder = builder.tree(
            num_leaves=plan.leaves,
            num_leaves_to_search=max(1, plan.leaves // 10),
            training_sample_size=min(len(vectors), 250_000),
        )
    hashed = builder.score_ah(2, anisotropic_quantization_threshold=0.2)
    return hashed.reorder(100).build()


def _valid(rows: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without ScaNN's padding, which is row 0 with a score that is not a number."""
    keep = np.isfinite(scores)
    return np.asarray(rows)[keep].astype(np.int64), scores[keep]


def _exact_candidates(
    vectors: np.ndarray, queries: np.ndarray, k: int
) -> list[np.ndarray]:
    """Rows of each block that may be among the k best, ties included."""
    found: list[list[np.ndarray]] = [[] for _ in queries]
    for start in range(0, len(vectors), _BLOCK):
        scores = queries @ np.asarray(vectors[start : start + _BLOCK]).T  # [B, block]
        kth = min(k, scores.shape[1])
        least = np.partition(scores, -kth, axis=1)[:, -kth]
        for rows, line, bound in zip(found, scores, least, strict=True):
            rows.append(start + np.flatnonzero(line >= bound - _TIE))
    return [np.concatenate(rows) for rows in found]


def _dot(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Scores in float64, row by row: equal rows get equal scores to the last bit."""
    return (vectors.astype(np.float64) * query).sum(axis=1)


def _ranked(rows: np.ndarray, scores: np.ndarray, k: int) -> list[tuple[int, float]]:
    order = np.lexsort((rows, -scores))[:k]
    return [(int(rows[i]), float(scores[i])) for i in order]


class PassageFile(Sequence):
    """Documents of a `passages.jsonl`, read on demand (wiki-18 has 21 million)."""

    def __init__(self, path: Path, offsets: np.ndarray):
        with open(path, "rb") as f:
            self._bytes = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        self._offsets = offsets  # [n + 1] int64
        if offsets[-1] != len(self._bytes):
            raise ValueError(
                f"{path} has {len(self._bytes)} bytes, its offsets say {offsets[-1]}"
            )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, i: int) -> Document:
        line = self._bytes[self._offsets[i] : self._offsets[i + 1]]
        return Document(*json.loads(line))


@dataclass(frozen=True)
class Index:
    """A searchable corpus: row i of `vectors` is `documents[i]`."""

    encoder: Encoder
    vectors: VectorSearch
    documents: Sequence[Document]

    def __post_init__(self):
        if len(self.vectors.vectors) != len(self.documents):
            raise ValueError(
                f"{len(self.vectors.vectors)} vectors but {len(self.documents)} "
                "documents: the index belongs to another corpus"
            )

    def __len__(self) -> int:
        return len(self.documents)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """The best passages for each query, scores descending.

        As long as `queries`; an inner list has min(k, n) passages with exact
        search, may be shorter with a hashed index, and is empty for a query with
        nothing to search for. Raises `RetrievalError` and nothing else.
        """
        try:
            if k < 1:
                raise ValueError(f"k must be at least 1, not {k}")
            if not queries:
                return []
            encoded = self.encoder.encode_queries(queries)
            asked = np.flatnonzero(encoded.any(axis=1))
            found: list[list[Passage]] = [[] for _ in queries]
            hits = self.vectors.search(encoded[asked], k)
            for i, row in zip(asked, hits, strict=True):
                found[i] = [self._passage(*hit) for hit in row]
            return found
        except Exception as error:
            raise RetrievalError(
                f"search for {len(queries)} queries: {error}"
            ) from error

    def _passage(self, row: int, score: float) -> Passage:
        d = self.documents[row]
        return Passage(d.id, d.title, d.text, score)


def load(path: str | Path, *, encoder: Encoder | None = None, backend: str = "auto"):
    """The `Index` in a folder that `lld_jax.retrieval.build` wrote.

    Args:
      path: the folder.
      encoder: needed unless the index was made with the hashed encoder, which is
        restored from the folder.
      backend: 'auto' (as built; exact where ScaNN is missing) or 'exact'.

    Raises:
      FileNotFoundError: no index there.
      ValueError: header, vectors, passages and encoder do not belong together.
    """
    path = Path(path)
    if not (path / "header.json").is_file():
        raise FileNotFoundError(f"{path} has no header.json: not an index")
    header = json.loads((path / "header.json").read_text())
    if header["format"] != FORMAT:
        raise ValueError(f"{path}: format {header['format']}, this reads {FORMAT}")
    encoder = encoder or restore_hashed(path, header["encoder"])
    if encoder.settings() != header["encoder"]:
        raise ValueError(
            f"{path} was built with encoder {header['encoder']}, not with "
            f"{encoder.settings()}"
        )
    n, dim = header["n"], header["dim"]
    print(f"{path}: {n:,} vectors, {n * dim * 4 / 1e9:.2f} GB as float32", flush=True)
    vectors = np.load(path / header["vectors"], mmap_mode="r")
    if vectors.shape != (n, dim):
        raise ValueError(f"{path}: vectors {vectors.shape}, header says {(n, dim)}")
    documents = PassageFile(path / "passages.jsonl", np.load(path / "offsets.npy"))
    with open(path / "passages.jsonl", "rb") as f:
        if hashlib.file_digest(f, "sha256").hexdigest() != header["passages_sha256"]:
            raise ValueError(f"{path}: passages.jsonl is not the one that was indexed")
    plan, searcher = Plan(**header["plan"]), None
    if backend == "exact" or (plan.backend == "scann" and scann_ops() is None):
        plan = Plan("exact")
    if plan.backend == "scann":
        searcher = scann_ops().load_searcher(str((path / "scann").resolve()))
    if plan.kind == "brute_force":
        vectors = np.array(vectors)  # small, or searched whole: keep it in memory
    return Index(encoder, VectorSearch(vectors, plan, searcher), documents)


def restore_hashed(path: Path, settings: dict) -> HashedEncoder:
    """The hashed encoder of an index folder, or an error for another encoder."""
    if not str(settings.get("name", "")).startswith("hashed"):
        raise ValueError(f"{path} needs its encoder {settings}: pass encoder=")
    idf = np.load(path / "idf.npy") if (path / "idf.npy").is_file() else None
    fields = ("dim", "title_weight", "pair_weight", "char_weight")
    return HashedEncoder(
        **{name: settings[name] for name in fields},
        char_sizes=tuple(settings["char_sizes"]),
        idf=idf,
    )
