"""The synthetic encyclopaedia: what its questions promise, over whole worlds."""

import collections
import dataclasses
import hashlib
import json
import re
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from lld_jax.data import world


@pytest.fixture(scope="module")
def big():
    return world.generate(0, 600)


def words(text):
    return re.findall(r"[\w]+", text.lower())


def contains(text, part):
    """Whether `part` stands in `text` as a sequence of whole words."""
    return f" {' '.join(words(part))} " in f" {' '.join(words(text))} "


def all_questions(w):
    return [q for split in world.SPLITS for q in w.questions[split]]


def digest(w):
    return hashlib.sha256(json.dumps(dataclasses.asdict(w)).encode()).hexdigest()


def test_same_seed_same_world_in_another_process():
    code = (
        "import dataclasses, hashlib, json; from lld_jax.data import world; "
        "w = json.dumps(dataclasses.asdict(world.generate(7, 40))); "
        "print(hashlib.sha256(w.encode()).hexdigest())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == digest(world.generate(7, 40))
    assert digest(world.generate(8, 40)) != digest(world.generate(7, 40))


def test_world_is_the_published_one():
    """Prepared data is reused: a change here needs a new `TinyWorld.VERSION`."""
    assert digest(world.generate(0, 20)) == (
        "6aaf6681b021045e89203dd3bed9b4a1654f34486f8a6934262cd7abd7f96931"
    )


def test_counts_and_balance(big):
    counts = {split: len(big.questions[split]) for split in world.SPLITS}
    assert counts["train"] >= 2000
    assert counts["validation_seen"] >= 300
    assert counts["validation_unseen"] >= 300
    for split in world.SPLITS:
        two = sum(q.hops == 2 for q in big.questions[split])
        assert abs(two / counts[split] - 0.5) < 0.05
    relations = {q.relation for q in big.questions["train"]}
    assert {"person.birthplace", "company.founder.birthplace"} <= relations
    assert {q.relation for q in big.questions["validation_unseen"]} == relations
    people = {q.support[0] for q in all_questions(big) if q.relation[:7] == "person."}
    assert 550 <= len(people) <= 600


def test_budget(big):
    sizes = [len(f"{p.title} {p.text}".split()) for p in big.pages]
    assert max(sizes) <= 24
    assert sum(sizes) / len(sizes) <= 18
    assert max(len(q.question.split()) for q in all_questions(big)) <= 14
    assert max(len(p.title.split()) for p in big.pages) <= 3
    common = collections.Counter(
        w for p in big.pages for w in set(words(p.text)) if not w.isdigit()
    )
    names = {w for p in big.pages for w in words(p.title)}
    places = {w for q in all_questions(big) for w in words(q.golden_answers[0])}
    assert len(common.keys() - names - places) <= 300


def test_two_pages_fit_80_tokens_of_another_worlds_tokeniser(big):
    frame = (
        "\n\n<information>Doc 1(Title: {0.title}) {0.text}\n"
        "Doc 2(Title: {1.title}) {1.text}</information>\n\n"
    )
    other = world.generate(1, 300)
    pairs = zip(other.pages, other.pages[::-1], strict=True)
    texts = [frame.format(a, b) for a, b in pairs]
    texts += [q.question for q in other.questions["train"]]
    tokeniser = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokeniser.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokeniser.train_from_iterator(texts, trainer)

    def tokens(*texts):
        return [len(e.ids) for e in tokeniser.encode_batch(list(texts))]

    page = {p.title: p for p in big.pages}
    two_hop = [q for q in big.questions["train"] if q.hops == 2]
    both = tokens(*(frame.format(*(page[t] for t in q.support)) for q in two_hop))
    assert max(both) <= 80
    names = tokens(*(" " + title for title in page))
    assert 2 <= sum(names) / len(names) <= 4
    assert max(tokens(*(q.question for q in two_hop))) <= 20


def test_names_are_unique_and_none_contains_another(big):
    titles = [p.title for p in big.pages]
    assert len({t.lower() for t in titles}) == len(titles)
    names = set(titles) | {
        q.golden_answers[0]
        for q in all_questions(big)
        if q.relation.split(".")[-1] in ("region", "river")
    }
    known = {tuple(words(name)) for name in names}
    assert len(known) == len(names)
    for name in known:
        for start in range(len(name)):
            for stop in range(start + 1, len(name) + 1):
                assert name[start:stop] == name or name[start:stop] not in known
    wording = {
        w
        for kind in world._stock()["pages"].values()
        for group in kind.values()
        for s in group
        for w in words(s)
    }
    assert not any(len(name) == 1 and name[0] in wording for name in known)


def test_another_seed_gives_other_names(big):
    ours = {p.title for p in big.pages}
    for seed in (1, 2, 3):
        others = {p.title for p in world.generate(seed, 600).pages}
        assert len(ours & others) < 0.02 * len(ours)


def test_supports_hold_the_facts_in_order(big):
    text = {p.title: p.text for p in big.pages}
    for q in all_questions(big):
        assert len(q.support) == len(q.chain) == q.hops
        assert contains(q.question, q.support[0])
        assert q.chain[-1] == q.golden_answers[0]
        assert q.chain[:-1] == q.support[1:]
        for title, value in zip(q.support, q.chain, strict=True):
            assert contains(text[title], value), (q, text[title])
        assert not any(contains(q.question, value) for value in q.chain)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(20, 120))
def test_no_page_answers_two_hops_alone(seed, size):
    check_no_shortcut(world.generate(seed, size))


def test_no_page_answers_two_hops_alone_in_a_big_world(big):
    check_no_shortcut(big)


def check_no_shortcut(w):
    pages = {p.title: f" {' '.join(words(p.title + ' ' + p.text))} " for p in w.pages}
    where = collections.defaultdict(set)  # word -> titles of the pages that have it
    for title, text in pages.items():
        for word in text.split():
            where[word].add(title)

    def having(name):
        found = set.intersection(*(where[word] for word in words(name)))
        return {t for t in found if f" {' '.join(words(name))} " in pages[t]}

    for q in all_questions(w):
        if q.hops == 2:
            assert not having(q.support[0]) & having(q.golden_answers[0]), q


def test_an_answer_is_unique(big):
    by_text = collections.defaultdict(set)
    by_fact = collections.defaultdict(set)
    for q in all_questions(big):
        by_text[q.question].add(q.golden_answers)
        by_fact[q.relation, q.support[0]].add(q.golden_answers)
    assert len(by_text) == len(by_fact) == len(all_questions(big))
    assert len({q.id for q in all_questions(big)}) == len(by_text)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(20, 120))
def test_validation_splits_keep_their_promise(seed, size):
    check_splits(world.generate(seed, size))


def test_validation_splits_keep_their_promise_in_a_big_world(big):
    check_splits(big)


def check_splits(w):
    train, seen, unseen = (w.questions[split] for split in world.SPLITS)
    touched = {title for q in train for title in q.support}
    assert seen and unseen
    assert all(touched.issuperset(q.support) for q in seen)
    assert not any(touched.intersection(q.support) for q in unseen)
    asked = {(q.relation, q.support[0]) for q in train}
    assert not any((q.relation, q.support[0]) in asked for q in seen)
    assert not {q.question for q in train} & {q.question for q in seen + unseen}


def test_aliases(big):
    last = {q.relation: q for q in all_questions(big)}
    for relation, forms in {
        "person.birthplace": ("{}", "the town of {}"),
        "town.river": ("{}", "the river {}", "the {} river"),
        "town.region": ("{}", "the region of {}"),
        "company.founder": ("{}",),
        "work.year": ("{}",),
    }.items():
        q = last[relation]
        assert q.golden_answers == tuple(f.format(q.chain[-1]) for f in forms)


def test_corpus_rows(tmp_path):
    w = world.generate(3, 20)
    path = tmp_path / "corpus.jsonl"
    world.write_corpus(w, path)
    raw = path.read_bytes()
    assert raw.endswith(b"}\n") and raw.count(b"\n") == len(w.pages)
    for number, (line, page) in enumerate(zip(raw.splitlines(), w.pages, strict=True)):
        row = json.loads(line)
        assert list(row) == ["id", "contents"]
        assert row["id"] == page.id == str(number)
        assert row["contents"] == f'"{page.title}"\n{page.text}'


def test_sizes_scale_and_are_checked():
    kinds = [len(world.generate(0, size).pages) for size in (20, 100, world.MAX_SIZE)]
    assert kinds == sorted(kinds) and kinds[-1] > 2 * world.MAX_SIZE
    for size in (0, 19, world.MAX_SIZE + 1):
        with pytest.raises(ValueError, match=f"size={size}.*20 to 1900"):
            world.generate(0, size)
