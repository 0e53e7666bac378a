"""Text encoders: strings in, L2-normalised float32 vectors `[N, D]` out.

`HashedEncoder` needs no weights. It counts words, word pairs and character
n-grams, adds each with a pseudo-random sign to a few of D places (signed feature
hashing, Weinberger et al. 2009), and weighs words by how rare they are in the
corpus. Hashes are CRC-32 with an integer mixer, so a text has the same vector in
every process and on every platform.
"""

import re
import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

_WORD = re.compile(r"[^\W_]+")
# Words that say nothing about the topic; used where no corpus statistics exist.
STOP_WORDS = frozenset(
    "a an and are as at be been by did do does for from had has have he her his how "
    "i in is it its me of on or s she that the their they this to was were what when "
    "where which who whom whose why will with you".split()
)
_STOP_WEIGHT = 0.05
_IDF_BUCKETS = 1 << 16
_WORD_SLOTS = 4  # places a word or pair is added to: no two words coincide fully
_CHUNK = 2048  # texts encoded at once: bounds the temporary arrays


def tokenize(text: str) -> list[str]:
    """Lower-cased words (letters and digits of any script) without accents."""
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in text if not unicodedata.combining(c))
    return _WORD.findall(text.lower())


def _mix(h: np.ndarray) -> np.ndarray:
    """Spread the bits of uint32 hashes (finaliser of MurmurHash3, public domain).

    CRC-32 is linear: without this, like strings would fall into related places.
    """
    h = h.astype(np.uint32)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def _crc(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def _char_ngrams(word: str, sizes: Sequence[int]) -> list[str]:
    padded = f"<{word}>"
    return [
        padded[i : i + n] for n in sizes for i in range(max(len(padded) - n + 1, 0))
    ]


@dataclass(frozen=True)
class HashedEncoder:
    """Bag of hashed words, word pairs and character n-grams.

    `idf` `[2**16]` float32 holds the weight of a word by its hash bucket, in 0..1;
    `fit_idf` makes it. Without it every word weighs 1 and `STOP_WORDS` 0.05.
    Queries and passages must be encoded with the same `idf`, so an index stores it.
    A passage is the sum of its title's and its text's unit vectors, the title's
    multiplied by `title_weight`: a short title is not drowned by a long text.
    """

    dim: int = 1024
    title_weight: float = 0.5
    pair_weight: float = 0.5
    char_weight: float = 0.6
    char_sizes: tuple[int, ...] = (3, 4)
    idf: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        if self.dim < 1:
            raise ValueError(f"dim must be at least 1, not {self.dim}")
        if self.idf is not None and self.idf.shape != (_IDF_BUCKETS,):
            raise ValueError(
                f"idf must have shape ({_IDF_BUCKETS},), not {self.idf.shape}"
            )

    def settings(self) -> dict:
        """JSON-able description; equal settings give equal vectors."""
        idf = None if self.idf is None else zlib.crc32(self.idf.tobytes())
        return {
            "name": "hashed-1",
            "dim": self.dim,
            "title_weight": self.title_weight,
            "pair_weight": self.pair_weight,
            "char_weight": self.char_weight,
            "char_sizes": list(self.char_sizes),
            "idf_crc32": idf,
        }

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """`[N, D]` float32; a query without a word is a row of zeros."""
        return self._chunked(queries)

    def encode_passages(
        self, titles: Sequence[str], texts: Sequence[str]
    ) -> np.ndarray:
        """`[N, D]` float32 of titles and texts of equal number."""
        if len(titles) != len(texts):
            raise ValueError(f"{len(titles)} titles but {len(texts)} texts")
        heads, bodies = self._chunked(titles), self._chunked(texts)
        heads *= np.float32(self.title_weight)
        return _unit(np.add(heads, bodies, out=heads))

    def _chunked(self, texts: Sequence[str]) -> np.ndarray:
        out = np.zeros((len(texts), self.dim), np.float32)
        for start in range(0, len(texts), _CHUNK):
            part = texts[start : start + _CHUNK]
            out[start : start + len(part)] = self._bag(part)
        return _unit(out)

    def _bag(self, texts: Sequence[str]) -> np.ndarray:
        """Unnormalised `[len(texts), D]` float32."""
        vocabulary: dict[str, int] = {}
        streams = [
            [vocabulary.setdefault(w, len(vocabulary)) for w in tokenize(t)]
            for t in texts
        ]
        words = list(vocabulary)
        lengths = np.array([len(s) for s in streams], np.int64)
        token = np.array([w for s in streams for w in s], np.int64)  # [tokens]
        row = np.repeat(np.arange(len(texts)), lengths)  # [tokens]
        out = np.zeros(len(texts) * self.dim)
        if not words:
            return out.reshape(len(texts), self.dim)
        crc = np.array([_crc(w) for w in words], np.uint32)
        weight = self._word_weights(words, crc)

        row_w, word, tf = _count(row, token, len(words))
        value = tf * weight[word]
        self._add(out, row_w, crc[word], value, _WORD_SLOTS)

        if self.char_weight:
            grams = [[_crc(g) for g in _char_ngrams(w, self.char_sizes)] for w in words]
            number = np.array([len(g) for g in grams], np.int64)
            flat = np.array([c for g in grams for c in g], np.uint32)
            first = np.cumsum(number) - number
            each = number[word]
            offset = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
            gram = flat[np.repeat(first[word], each) + offset]
            share = value * self.char_weight / np.sqrt(np.maximum(each, 1))
            self._add(
                out, np.repeat(row_w, each), ~gram, np.repeat(share, each), slots=1
            )

        if self.pair_weight:
            inside = row[1:] == row[:-1]
            left, right = token[:-1][inside], token[1:][inside]
            row_p, pair, tf = _count(
                row[1:][inside], left * len(words) + right, len(words) ** 2
            )
            left, right = pair // len(words), pair % len(words)
            value = tf * np.sqrt(weight[left] * weight[right]) * self.pair_weight
            hashed = _mix(crc[left]) * np.uint32(31) + crc[right]
            self._add(out, row_p, hashed, value, _WORD_SLOTS)
        return out.reshape(len(texts), self.dim)

    def _word_weights(self, words: list[str], crc: np.ndarray) -> np.ndarray:
        if self.idf is None:
            return np.array([_STOP_WEIGHT if w in STOP_WORDS else 1.0 for w in words])
        return self.idf[_mix(crc) % _IDF_BUCKETS].astype(np.float64)

    def _add(self, out, row, hashed, value, slots: int) -> None:
        """Add each value with a sign at `slots` hashed places of its row."""
        value = value / np.sqrt(slots)
        for slot in range(slots):
            h = _mix(hashed + np.uint32(0x9E3779B9 * (slot + 1) & 0xFFFFFFFF))
            sign = np.where(h >> np.uint32(31), 1.0, -1.0)
            place = row * self.dim + (h & np.uint32(0x7FFFFFFF)) % self.dim
            out += np.bincount(place, value * sign, minlength=out.size)


def fit_idf(encoder: HashedEncoder, texts: Iterable[str]) -> HashedEncoder:
    """The encoder with word weights log(N / df) / log(N) of `texts`, at least 0.02.

    `df` counts the texts with a word in the bucket; an unseen word weighs 1.
    """
    df = np.zeros(_IDF_BUCKETS)
    bucket: dict[str, int] = {}
    n = 0
    for text in texts:
        n += 1
        seen = set(tokenize(text))
        new = [w for w in seen if w not in bucket]
        if new:
            mixed = _mix(np.array([_crc(w) for w in new], np.uint32)) % _IDF_BUCKETS
            bucket.update(zip(new, mixed.tolist(), strict=True))
        df[list({bucket[w] for w in seen})] += 1
    idf = np.log((n + 1) / np.maximum(df, 1)) / np.log(n + 2)
    return replace(encoder, idf=np.clip(idf, 0.02, 1.0).astype(np.float32))


def _count(row: np.ndarray, item: np.ndarray, items: int):
    """Distinct (row, item) with the sublinear count 1 + log(tf)."""
    key, count = np.unique(row * items + item, return_counts=True)
    return key // items, key % items, 1.0 + np.log(count)


def _unit(x: np.ndarray) -> np.ndarray:
    """Rows scaled in place to length 1; rows of zeros stay."""
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    return np.divide(x, norm, out=x, where=norm > 0)
