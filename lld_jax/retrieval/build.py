"""Make an index from a corpus file.

    python -m lld_jax.retrieval.build --corpus=wiki.jsonl.gz --out=wiki_index

A corpus is JSON lines (`.gz` too), one passage a line, in one of two forms:
`{"id", "contents": "\\"Title\\"\\ntext"}` as wiki-18 has it, or
`{"id", "title", "text"}`. Contents of one line are text without a title. One pair
of quote marks around a title is dropped in both forms, so that the same passage in
either form gives the same `Document`.
"""

import argparse
import gzip
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple
from pathlib import Path

import numpy as np

from lld_jax.retrieval.encoders import HashedEncoder, fit_idf
from lld_jax.retrieval.index import (
    FORMAT,
    Document,
    Encoder,
    Index,
    PassageFile,
    VectorSearch,
    load,
    make_plan,
)

_CHUNK = 8192  # passages encoded at once


def iter_corpus(path: str | Path) -> Iterator[Document]:
    """The documents of a corpus file in order; blank lines are skipped.

    Raises:
      ValueError: a line is not a passage; names the file and the line.
    """
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield _document(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None


def read_corpus(path: str | Path) -> list[Document]:
    """`iter_corpus` as a list."""
    return list(iter_corpus(path))


def _document(row: object) -> Document:
    if not isinstance(row, dict) or "id" not in row:
        raise ValueError("needs an object with an 'id'")
    if "contents" in row:
        fields = {"contents": row["contents"]}
    elif "title" in row and "text" in row:
        fields = {"title": row["title"], "text": row["text"]}
    else:
        raise ValueError(
            f"needs 'contents', or 'title' and 'text'; has {', '.join(row)}"
        )
    for name, value in fields.items():
        if not isinstance(value, str):
            raise ValueError(f"'{name}' must be a string, not {value!r}")
    if "contents" in fields:
        title, newline, text = fields["contents"].partition("\n")
        if not newline:
            title, text = "", title
    else:
        title, text = fields["title"], fields["text"]
    title = title.strip()
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return Document(str(row["id"]), title, text)


def default_encoder(documents: Iterable[Document]) -> HashedEncoder:
    """The hashed encoder with word weights fitted on the corpus."""
    return fit_idf(HashedEncoder(), (f"{d.title} {d.text}" for d in documents))


def open_index(path: str | Path, *, encoder: Encoder | None = None) -> Index:
    """An index folder loaded, or a corpus file encoded and indexed in memory.

    Raises:
      FileNotFoundError: nothing there, or a folder that is not an index.
      ValueError: the corpus is empty or malformed, or the index does not match.
    """
    path = Path(path)
    if path.is_dir():
        return load(path, encoder=encoder)
    documents = read_corpus(path)
    return index_documents(documents, encoder=encoder)


def index_documents(
    documents: list[Document], *, encoder: Encoder | None = None, backend: str = "auto"
) -> Index:
    """An index in memory."""
    if not documents:
        raise ValueError("the corpus has no documents: nothing to index")
    encoder = encoder or default_encoder(documents)
    vectors = np.concatenate(
        [_encode(encoder, part) for part in _chunks(documents)], dtype=np.float32
    )
    plan = make_plan(len(vectors), backend=backend)
    return Index(encoder, VectorSearch(vectors, plan), documents)


def build(
    corpus: str | Path,
    out_dir: str | Path,
    *,
    encoder: Encoder | None = None,
    backend: str = "auto",
    kind: str = "auto",
) -> Path:
    """Encode a corpus and write a folder that `index.load` reads.

    The folder appears whole or not at all: it is written beside its place and then
    renamed. The corpus is streamed; vectors go through a file.

    Args:
      corpus: see the top of this file.
      out_dir: the folder to make; must not exist.
      encoder: default the hashed encoder, fitted on this corpus.
      backend, kind: see `index.make_plan`.

    Raises:
      FileExistsError: `out_dir` exists.
      ValueError: an empty or malformed corpus.
    """
    out = Path(out_dir)
    if out.exists():
        raise FileExistsError(f"{out} exists: choose another folder or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        encoder = encoder or default_encoder(iter_corpus(corpus))
        n, digest = _write_passages(corpus, part)
        documents = PassageFile(part / "passages.jsonl", np.load(part / "offsets.npy"))
        vectors = _write_vectors(documents, encoder, part / "vectors.npy")
        plan = make_plan(n, backend=backend, kind=kind)
        search = VectorSearch(vectors, plan)
        stored = "vectors.npy"
        if plan.backend == "scann":  # writes the float32 rows itself
            stored = "scann/dataset.npy"
            (part / "scann").mkdir()
            search.searcher.serialize(str(part / "scann"), relative_path=True)
            (part / "vectors.npy").unlink()
        if isinstance(encoder, HashedEncoder) and encoder.idf is not None:
            np.save(part / "idf.npy", encoder.idf)
        header = {
            "format": FORMAT,
            "n": n,
            "dim": int(vectors.shape[1]),
            "encoder": encoder.settings(),
            "plan": asdict(plan),
            "vectors": stored,
            "passages_sha256": digest,
        }
        (part / "header.json").write_text(json.dumps(header, indent=1) + "\n")
        part.chmod(0o755)  # mkdtemp makes it private
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return out


def _write_passages(corpus: str | Path, part: Path) -> tuple[int, str]:
    """passages.jsonl and offsets.npy; the number of documents and the SHA-256."""
    digest, offsets = hashlib.sha256(), [0]
    with open(part / "passages.jsonl", "wb") as f:
        for document in iter_corpus(corpus):
            line = json.dumps(astuple(document), ensure_ascii=False).encode() + b"\n"
            f.write(line)
            digest.update(line)
            offsets.append(offsets[-1] + len(line))
    if len(offsets) == 1:
        raise ValueError(f"{corpus} has no documents: nothing to index")
    np.save(part / "offsets.npy", np.array(offsets, np.int64))
    return len(offsets) - 1, digest.hexdigest()


def _write_vectors(documents, encoder: Encoder, path: Path) -> np.ndarray:
    """`[n, D]` float32 in a file, mapped."""
    out, done = None, 0
    for chunk in _chunks(documents):
        encoded = _encode(encoder, chunk)
        if out is None:
            shape = (len(documents), encoded.shape[1])
            out = np.lib.format.open_memmap(path, "w+", np.float32, shape)
        out[done : done + len(chunk)] = encoded
        done += len(chunk)
    out.flush()
    return out


def _encode(encoder: Encoder, part: list[Document]) -> np.ndarray:
    return encoder.encode_passages([d.title for d in part], [d.text for d in part])


def _chunks(documents) -> Iterator[list[Document]]:
    for start in range(0, len(documents), _CHUNK):
        stop = min(start + _CHUNK, len(documents))
        yield [documents[i] for i in range(start, stop)]


def main(argv: list[str] | None = None) -> None:
    """Command line: see the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m lld_jax.retrieval.build")
    parser.add_argument("--corpus", required=True, help="JSON lines, .gz too")
    parser.add_argument("--out", required=True, help="folder to make")
    parser.add_argument("--backend", default="auto", help="auto, scann or exact")
    parser.add_argument(
        "--kind", default="auto", help="auto, brute_force, ah or tree_ah"
    )
    args = parser.parse_args(argv)
    out = build(args.corpus, args.out, backend=args.backend, kind=args.kind)
    header = json.loads((out / "header.json").read_text())
    print(f"{out}: {header['n']:,} passages, {header['dim']} dimensions")


if __name__ == "__main__":
    main()
