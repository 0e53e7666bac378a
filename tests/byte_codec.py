"""Tokenizers of bytes and of words, and a retriever, for tests of environments."""

import re

from lld_jax.protocol import search
from lld_jax.protocol.environment import SearchEnvironment, Turn
from lld_jax.protocol.search import Codec, RetrievalError

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
    return SearchEnvironment(codec, Fake(found), template, **budgets)


def turn(text, last=False, room=10_000, cut=False):
    return Turn("q?", byte_encode(text), 0, last, room, cut)


def ask(env, turns):
    """The replies in the order of the turns, each of which has one."""
    found = sorted(env.step(turns), key=lambda pair: pair[0])
    assert [i for i, _ in found] == list(range(len(turns)))
    return [reply for _, reply in found]


def text_of(reply):
    return search.decode(reply.ids, BYTES)


def wrap(body):
    return f"\n\n<information>{body}</information>\n\n"


PARTS = ["<search>", "</search>", "<answer>", "</answer>", "x", " ", "\n", "\n\n", "."]
PARTS += ["<information>", "</information>", wrap("d"), search.RETRY, "\u00e9", "<"]
