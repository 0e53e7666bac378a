import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lld_jax.retrieval.encoders import HashedEncoder, fit_idf, tokenize

TITLES = ["Velkor Mills", "Anna Berg", "Dunmek"]
TEXTS = [
    "Velkor Mills was founded in 1931 by Anna Berg.",
    "Anna Berg is a printer from Dunmek. She founded a company.",
    "Dunmek is a town on the river Wallin.",
]


def test_words_ignore_case_accents_and_punctuation():
    assert tokenize("Beyoncé's  co-op, №5!") == ["beyonce", "s", "co", "op", "no5"]
    assert tokenize("北京 Ünder_score") == ["北京", "under", "score"]


def test_vectors_are_unit_float32_and_empty_texts_are_zero():
    encoder = HashedEncoder(dim=256)
    vectors = encoder.encode_passages(TITLES + ["", ""], TEXTS + ["", "?!"])
    assert vectors.shape == (5, 256) and vectors.dtype == np.float32
    np.testing.assert_allclose(
        np.linalg.norm(vectors, axis=1), [1, 1, 1, 0, 0], atol=1e-6
    )
    assert encoder.encode_queries([]).shape == (0, 256)
    with pytest.raises(ValueError, match="3 titles but 2 texts"):
        encoder.encode_passages(TITLES, TEXTS[:2])


def test_same_vector_on_every_platform():
    # Written down once: a change would silently invalidate stored indexes.
    encoder = HashedEncoder(dim=8, char_weight=0.0, pair_weight=0.0)
    got = encoder.encode_queries(["lima", "founder"])
    expected = np.array([[0, 0, -1, 0, 0, 0, 0, -1], [0, 0, 0, -1, 0, -1, 0, 0]])
    np.testing.assert_allclose(got, expected / np.sqrt(2), atol=1e-6)


def test_same_vector_in_another_process():
    code = (
        "from lld_jax.retrieval.encoders import HashedEncoder;"
        "print(HashedEncoder(dim=64).encode_queries(['Who founded Velkor Mills?'])"
        ".tobytes().hex())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = HashedEncoder(dim=64).encode_queries(["Who founded Velkor Mills?"])
    np.testing.assert_allclose(
        np.frombuffer(bytes.fromhex(out), np.float32), here[0], atol=1e-7
    )


def test_a_title_counts_more_than_the_same_words_in_a_text():
    filler = " ".join(f"filler{i}" for i in range(60))
    query = ["Velkor Mills founder"]

    def scores(encoder):
        passages = encoder.encode_passages(
            ["Velkor Mills", "Tarnop"], [filler, f"{filler} Velkor Mills"]
        )
        return (encoder.encode_queries(query) @ passages.T)[0]

    in_title, in_text = scores(HashedEncoder(dim=8192))
    assert in_title > 1.5 * in_text > 0
    in_title, in_text = scores(HashedEncoder(dim=8192, title_weight=0.0))
    assert in_text > 1.5 * abs(in_title)


def test_stop_words_weigh_little_with_and_without_corpus():
    plain = HashedEncoder(char_weight=0.0, pair_weight=0.0)
    fitted = fit_idf(plain, ["the town is old"] * 50 + ["the Dunmek"])
    for encoder in (plain, fitted):
        whole, bare = encoder.encode_queries(["the Dunmek", "Dunmek"])
        assert whole @ bare > 0.99


def test_idf_is_log_of_rarity():
    encoder = fit_idf(HashedEncoder(), ["red fox", "red hen", "red red"])
    vectors = HashedEncoder(
        dim=1 << 14, char_weight=0.0, pair_weight=0.0, idf=encoder.idf
    ).encode_queries(["red fox", "red", "fox", "unseen"])
    rare = np.log(4) / np.log(5)  # in one text of three; "red" is in all of them
    common = np.log(4 / 3) / np.log(5)
    unit = np.hypot(rare, common)
    np.testing.assert_allclose(vectors[0] @ vectors[1], common / unit, atol=1e-3)
    np.testing.assert_allclose(vectors[0] @ vectors[2], rare / unit, atol=1e-3)


def test_settings_tell_encoders_apart():
    fitted = fit_idf(HashedEncoder(), TEXTS)
    other = fit_idf(HashedEncoder(), TEXTS[:2])
    assert fitted.settings() == fit_idf(HashedEncoder(), TEXTS).settings()
    described = [
        e.settings()
        for e in (fitted, other, HashedEncoder(), HashedEncoder(title_weight=0.6))
    ]
    assert all(a != b for i, a in enumerate(described) for b in described[:i])


def test_character_ngrams_bring_a_misspelt_name_near():
    def scores(encoder):
        query = encoder.encode_queries(["Velkorr Mils"])
        return (query @ encoder.encode_queries(TITLES).T)[0]

    near, far = (
        scores(HashedEncoder(dim=4096)),
        scores(HashedEncoder(dim=4096, char_weight=0.0)),
    )
    assert near[0] > near[1:].max() + 0.1
    assert abs(far[0]) < 0.05


def test_illegal_fields_are_named():
    with pytest.raises(ValueError, match="dim must be at least 1, not 0"):
        HashedEncoder(dim=0)
    with pytest.raises(ValueError, match="idf must have shape"):
        HashedEncoder(idf=np.ones(3, np.float32))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=6))
def test_a_text_does_not_depend_on_its_batch(texts):
    encoder = HashedEncoder(dim=64)
    together = encoder.encode_queries(texts)
    alone = np.concatenate([encoder.encode_queries([t]) for t in texts])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    assert np.isfinite(together).all()
