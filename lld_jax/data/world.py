"""A synthetic encyclopaedia with one- and two-hop questions.

People, towns, companies and works link to each other through facts; every entity
has one tiny page. All names are invented, so no model knows an answer beforehand,
and another seed gives other names with the same syllables and the same wording: a
tokeniser trained on some seeds spells the names of all of them.

The world consists of two parts whose facts never link to each other. Training
questions come from the larger one; the smaller one is kept for `validation_unseen`.
"""

import dataclasses
import functools
import importlib.resources
import json
import os
import random
import re
import tomllib
from collections.abc import Iterator

SPLITS = ("train", "validation_seen", "validation_unseen")
MIN_SIZE = 20
MAX_SIZE = 1900  # people, towns, companies and works share one stock of words

_UNSEEN_SHARE = 0.15
_VALIDATION_PER_PERSON = 0.6


@dataclasses.dataclass(frozen=True)
class Page:
    """One article; `id` is its row number in the corpus file, as text."""

    id: str
    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class WorldQuestion:
    """A question with its answers and the way to them.

    `golden_answers[0]` is the answer as the page spells it, the others are aliases.
    `support` holds the titles of the one or two pages to read, in that order;
    `support[0]` is the entity the question names. `chain` holds the values read on
    the way: `(answer,)` or `(support[1], answer)`.
    """

    id: str
    question: str
    golden_answers: tuple[str, ...]
    hops: int
    relation: str
    support: tuple[str, ...]
    chain: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class World:
    """Pages in corpus order, and the questions of each name in `SPLITS`."""

    pages: tuple[Page, ...]
    questions: dict[str, tuple[WorldQuestion, ...]]


@dataclasses.dataclass(frozen=True)
class _Entity:
    kind: str  # person, town, company or work
    title: str
    facts: dict[str, str]  # field -> value; links hold the title of the other entity


def generate(seed: int, size: int) -> World:
    """Builds the encyclopaedia with `size` people; a pure function of (seed, size).

    The other kinds scale with `size`: a quarter as many towns, half as many companies,
    two thirds as many works. Each validation split holds about 0.6 questions a person.
    One- and two-hop questions are equally many in every split. `validation_seen` asks
    new (relation, entity) pairs about entities that training questions touch;
    `validation_unseen` is about entities that no training question touches.

    Raises:
      ValueError: `size` is below 20 or above 1900.
    """
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise ValueError(f"size={size}: legal are {MIN_SIZE} to {MAX_SIZE} people")
    rng = random.Random(f"world {seed} {size}")
    words = _invented_words(rng)
    regions = [next(words) for _ in range(max(4, size // 30))]
    rivers = [next(words) for _ in range(max(6, size // 15))]
    unseen_people = max(4, round(_UNSEEN_SHARE * size))
    seen = _part(rng, words, size - unseen_people, regions, rivers)
    unseen = _part(rng, words, unseen_people, regions, rivers)

    entities = {e.title: e for e in seen + unseen}
    pages = tuple(
        Page(str(row), e.title, _page_text(rng, e))
        for row, e in enumerate(entities.values())
    )
    mentions = _mentions(pages, entities)
    half = round(_VALIDATION_PER_PERSON * size / 2)
    held_out, train = _split(_questions(rng, seen, entities, mentions), half)
    touched = {title for q in train for title in q.support}
    held_out = [q for q in held_out if touched.issuperset(q.support)]
    new, _ = _split(_questions(rng, unseen, entities, mentions), half)
    splits = dict(zip(SPLITS, (train, held_out, new), strict=True))
    numbered = {}
    for name, questions in splits.items():
        rng.shuffle(questions)
        numbered[name] = tuple(
            dataclasses.replace(q, id=f"{name}_{i:05d}")
            for i, q in enumerate(questions)
        )
    return World(pages, numbered)


def write_corpus(world: World, path: str | os.PathLike[str]) -> None:
    """Writes the pages as JSON lines in the row format of the wiki-18 corpus.

    Each row is `{"id": "0", "contents": "\\"Title\\"\\ntext"}`.
    """
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for page in world.pages:
            row = {"id": page.id, "contents": f'"{page.title}"\n{page.text}'}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


@functools.cache
def _stock() -> dict:
    """Syllables, names, sentences and questions, as `assets/world.toml` has them."""
    path = importlib.resources.files("lld_jax") / "assets" / "world.toml"
    stock = tomllib.loads(path.read_text(encoding="utf-8"))
    for name in ("onsets", "endings", "first_names", "companies", "occupations"):
        stock[name] = stock[name].split()
    return stock


def _invented_words(rng: random.Random) -> Iterator[str]:
    """Every onset with every ending, in random order and each once.

    No invented word is a first name or any other word of the pages and questions.
    """
    stock = _stock()
    taken = set(re.findall("[a-z]+", repr(stock).lower()))
    words = [a + b for a in stock["onsets"] for b in stock["endings"]]
    rng.shuffle(words)
    for word in words:
        if word.lower() not in taken:
            taken.add(word.lower())
            yield word


def _part(rng, words, people: int, regions, rivers) -> list[_Entity]:
    """Entities whose facts link to nothing but each other, regions and rivers."""
    stock = _stock()
    towns = [next(words) for _ in range(max(3, people // 4))]
    names = [f"{rng.choice(stock['first_names'])} {next(words)}" for _ in range(people)]
    result = []
    for name in names:
        facts = {
            "birthplace": rng.choice(towns),
            "occupation": rng.choice(stock["occupations"]),
            "birthyear": str(rng.randint(1900, 1979)),
        }
        result.append(_Entity("person", name, facts))
    for town, mayor in zip(towns, rng.sample(names, len(towns)), strict=True):
        facts = {
            "mayor": mayor,
            "region": rng.choice(regions),
            "river": rng.choice(rivers),
        }
        result.append(_Entity("town", town, facts))
    for _ in range(max(2, people // 2)):
        facts = {
            "founder": rng.choice(names),
            "town": rng.choice(towns),
            "year": str(rng.randint(1900, 1999)),
        }
        title = f"{next(words)} {rng.choice(stock['companies'])}"
        result.append(_Entity("company", title, facts))
    for _ in range(max(2, 2 * people // 3)):
        facts = {
            "author": rng.choice(names),
            "setting": rng.choice(towns),
            "year": str(rng.randint(1900, 1999)),
            "form": rng.choice(list(stock["forms"])),
        }
        title = rng.choice(stock["works"]).format(next(words))
        result.append(_Entity("work", title, facts))
    return result


def _page_text(rng: random.Random, entity: _Entity) -> str:
    """One sentence of each group of facts, mostly in random order.

    The first sentence names the entity, the next ones refer back to it.
    """
    stock = _stock()
    groups = [
        rng.choice(sentences) for sentences in stock["pages"][entity.kind].values()
    ]
    if entity.kind != "work":  # "the film is a film by ..." would read badly
        rng.shuffle(groups)
    fields = dict(entity.facts)
    if entity.kind == "person":
        again = entity.title.split()[-1]
        job = fields["occupation"]
        fields["a_job"] = f"{'an' if job[0] in 'aeiou' else 'a'} {job}"
    elif entity.kind == "work":
        again = f"the {fields['form']}"
        fields["made"] = stock["forms"][fields["form"]][1]
    else:
        again = f"the {entity.kind}"
    sentences = [
        template.format(who=who, **fields)
        for template, who in zip(groups, (entity.title, again), strict=True)
    ]
    return " ".join(s[0].upper() + s[1:] for s in sentences)


def _mentions(pages, entities) -> dict[str, list[str]]:
    """Entity title -> the texts (title included) of all pages that name the entity."""
    result = {title: [] for title in entities}
    for page in pages:
        linked = set(entities[page.title].facts.values()) & result.keys()
        for title in linked | {page.title}:
            result[title].append(_plain(f"{page.title} {page.text}"))
    return result


def _plain(text: str) -> str:
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def _questions(rng, part, entities, mentions) -> list[WorldQuestion]:
    """Every question of a part once, in random order and with a random phrasing.

    Two-hop questions that some single page could answer are left out: those where a
    page names both the entity and, be it by coincidence, the answer.
    """
    stock = _stock()
    result = []
    for entity in part:
        for field, phrasings in stock["one_hop"][entity.kind].items():
            answer = entity.facts[field]
            relation = f"{entity.kind}.{field}"
            text = _phrase(rng, phrasings, entity)
            support = (entity.title,)
            result.append(_question(text, relation, support, field, answer))
        for link, descriptions in stock["links"][entity.kind].items():
            bridge = entities[entity.facts[link]]
            for field, about in stock["about"][bridge.kind].items():
                answer = bridge.facts[field]
                if any(_plain(answer) in text for text in mentions[entity.title]):
                    continue
                relation = f"{entity.kind}.{link}.{field}"
                phrasings = [rng.choice(about).format(d) for d in descriptions]
                text = _phrase(rng, phrasings, entity)
                support = (entity.title, bridge.title)
                result.append(_question(text, relation, support, field, answer))
    rng.shuffle(result)
    return result


def _phrase(rng: random.Random, phrasings: list[str], entity: _Entity) -> str:
    form = entity.facts.get("form")
    verb = _stock()["forms"][form][0] if form else ""
    return rng.choice(phrasings).format(who=entity.title, form=form, verb=verb)


def _question(text, relation, support, field, answer) -> WorldQuestion:
    aliases = {
        "birthplace": ("the town of {}",),
        "town": ("the town of {}",),
        "setting": ("the town of {}",),
        "river": ("the river {}", "the {} river"),
        "region": ("the region of {}",),
    }.get(field, ())
    golden = (answer, *(alias.format(answer) for alias in aliases))
    chain = (*support[1:], answer)
    return WorldQuestion("", text, golden, len(support), relation, support, chain)


def _split(questions: list[WorldQuestion], half: int):
    """First `half` questions of either hop count, and as many as possible of the rest.

    Both parts hold equally many one- and two-hop questions.
    """
    one, two = ([q for q in questions if q.hops == hops] for hops in (1, 2))
    half = min(half, len(one), len(two))
    rest = min(len(one), len(two))
    return one[:half] + two[:half], one[half:rest] + two[half:rest]
