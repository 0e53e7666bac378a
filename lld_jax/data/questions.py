"""Question sets: from JSON lines or TFDS to `Question`, and the order of draws.

TFDS data is read through `as_data_source`, so TensorFlow is never imported.
"""

import contextlib
import dataclasses
import gzip
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core import read_only_builder

from lld_jax.data import world

_ANSWER_KEYS = ("golden_answers", "answers", "answer")
_TFDS_SOURCE = re.compile(r"(\w+)(?:/([\w.+-]+))?:(\w+(?:\[[^\]]*\])?)")


@dataclasses.dataclass(frozen=True)
class Question:
    """A question and all answers that count as right; `hops` 0 means unknown."""

    id: str
    question: str
    golden_answers: tuple[str, ...]
    hops: int = 0


@dataclasses.dataclass(frozen=True)
class WorldFiles:
    """A prepared encyclopaedia: its corpus file and the source of each split."""

    corpus: str
    train: str
    validation_seen: str
    validation_unseen: str


def normalise_golden(value: Any) -> tuple[str, ...]:
    """Gold answers as a tuple of strings, whichever form a data set gives them in.

    Takes text, bytes, a list, tuple or NumPy array of either, or `{"target": any of
    these}`. Blank and repeated answers are dropped.

    Raises:
      ValueError: no answer is left, or the value has another type.
    """
    if isinstance(value, Mapping):
        if "target" not in value:
            raise ValueError(f"golden answers {value!r}: a mapping needs 'target'")
        return normalise_golden(value["target"])
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(items, str | bytes):
        items = [items]
    if not isinstance(items, list | tuple):
        raise ValueError(
            f"golden answers {value!r}: legal are text, bytes, a list, tuple or array "
            "of them, or {'target': ...}"
        )
    answers = [_text(item, "golden answer") for item in items]
    answers = [answer for answer in answers if answer.strip()]
    if not answers:
        raise ValueError(f"golden answers {value!r}: at least one is needed")
    return tuple(dict.fromkeys(answers))


def question_from_row(row: Mapping[str, Any], number: int) -> Question:
    """Turns one row of a question file or TFDS set into a `Question`.

    The answers stand under `golden_answers`, `answers` or `answer`, as
    `normalise_golden` reads them or as TriviaQA's `{"value": ..., "aliases": [...]}`;
    the identifier under `id` or `question_id`, else it is `number`.

    Raises:
      ValueError: the question or its answers are missing or have a wrong type.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"row {row!r}: a mapping with question and answers is needed")
    question = _text(row.get("question"), "question")
    if not question.strip():
        raise ValueError(f"question {question!r}: it is blank")
    key = next((key for key in _ANSWER_KEYS if key in row), None)
    if key is None:
        raise ValueError(f"golden answers: none of {_ANSWER_KEYS} is in the row")
    answer = row[key]
    if isinstance(answer, Mapping) and "aliases" in answer:
        value = _text(answer["value"], "answer value")
        if value == "<unk>":  # how TriviaQA's test split withholds its answers
            raise ValueError("golden answers: this split comes without answers")
        answer = [value, *answer["aliases"]]
    name = row.get("id", row.get("question_id"))
    if name is None:
        name = str(number)
    elif isinstance(name, int):
        name = str(name)
    return Question(
        id=_text(name, "id"),
        question=question,
        golden_answers=normalise_golden(answer),
        hops=int(row.get("hops", 0)),
    )


def load(source: str | tuple[str, ...], data_dir: str) -> list[Question]:
    """Reads all questions of a source, or of several one after another.

    A source is a path that ends in `.jsonl` or `.jsonl.gz`, read in file order, or
    `name[/config]:split`, a TFDS set prepared under `data_dir` as array records, such
    as `tiny_world/seed0_size600:train` or `trivia_qa/unfiltered.nocontext:validation`.
    TFDS stores rows shuffled: they are sorted by identifier where they have one.

    Raises:
      ValueError: the source has another form, or a row is wrong; names file and line.
      FileNotFoundError: the file or the TFDS set does not exist.
    """
    if not isinstance(source, str):
        return [question for one in source for question in load(one, data_dir)]
    if source.endswith((".jsonl", ".jsonl.gz")):
        return _load_jsonl(source)
    match = _TFDS_SOURCE.fullmatch(source)
    if match is None:
        raise ValueError(
            f"question source {source!r}: legal are a .jsonl or .jsonl.gz file and a "
            "TFDS name like 'tiny_world/seed0_size600:train'"
        )
    return _load_tfds(source, *match.groups(), os.path.expanduser(data_dir))


def question_of_draw(questions: Sequence[Question], seed: int) -> grain.MapDataset:
    """The endless sequence of draws: `question_of_draw(questions, seed)[i]`.

    Any draw can be asked for at any time; each epoch of `len(questions)` draws holds
    every question once, in an order of its own given by (seed, epoch).
    """
    return grain.MapDataset.source(questions).shuffle(seed).repeat()


@dataclasses.dataclass(kw_only=True)
class TinyWorldConfig(tfds.core.BuilderConfig):
    """Which encyclopaedia `TinyWorld` asks about: the arguments of `generate`."""

    seed: int
    size: int


class TinyWorld(tfds.core.GeneratorBasedBuilder):
    """The questions of a synthetic encyclopaedia as the TFDS set `tiny_world`."""

    # Prepared data is reused: raise this whenever `world.generate` changes its output.
    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text
        features = {
            "id": text(),
            "question": text(),
            "golden_answers": tfds.features.Sequence(text()),
            "hops": tfds.features.Scalar(np.int32),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features)
        )

    def _split_generators(self, dl_manager):
        config = self.builder_config
        questions = world.generate(config.seed, config.size).questions
        return {split: self._generate_examples(questions[split]) for split in questions}

    def _generate_examples(self, questions):
        for q in questions:
            yield (
                q.id,
                {
                    "id": q.id,
                    "question": q.question,
                    "golden_answers": list(q.golden_answers),
                    "hops": q.hops,
                },
            )


def prepare_world(data_dir: str, seed: int, size: int) -> WorldFiles:
    """Writes the corpus and the questions of `world.generate(seed, size)` once.

    Whatever is complete is reused. Both parts are written under another name and
    renamed when they are complete, so an interrupted call leaves nothing half-written
    behind that a later one would take for the whole.
    """
    data_dir = os.path.abspath(os.path.expanduser(data_dir))
    config = TinyWorldConfig(name=f"seed{seed}_size{size}", seed=seed, size=size)
    builder = TinyWorld(data_dir=data_dir, config=config, file_format="array_record")
    name = f"{builder.name}_{config.name}_{builder.version}.jsonl"
    corpus = os.path.join(data_dir, name)
    if not os.path.exists(corpus):
        os.makedirs(data_dir, exist_ok=True)
        unfinished = f"{corpus}.{os.getpid()}.tmp"
        world.write_corpus(world.generate(seed, size), unfinished)
        os.replace(unfinished, corpus)
    if not builder.is_prepared():
        offline = tfds.download.DownloadConfig(try_download_gcs=False)
        # Its bars and its message would end up among what a command prints.
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            builder.download_and_prepare(download_config=offline)
    sources = {split: f"{builder.name}/{config.name}:{split}" for split in world.SPLITS}
    return WorldFiles(corpus=corpus, **sources)


def _text(value: Any, name: str) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if not isinstance(value, str):
        raise ValueError(f"{name} {value!r}: text or UTF-8 bytes are legal")
    return str(value)  # numpy.str_ becomes a plain str


def _load_jsonl(path: str) -> list[Question]:
    opener = gzip.open if path.endswith(".gz") else open
    questions = []
    with opener(path, "rt", encoding="utf-8") as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                question = question_from_row(json.loads(line), len(questions))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {line_number}: {error}") from error
            questions.append(question)
    if not questions:
        raise ValueError(f"{path}: the file holds no question")
    return questions


def _load_tfds(
    source: str, name: str, config: str | None, split: str, data_dir: str
) -> list[Question]:
    try:
        builder = read_only_builder.builder_from_files(
            name, config=config, data_dir=data_dir
        )
    except tfds.core.DatasetNotFoundError as error:
        raise FileNotFoundError(
            f"question source {source!r}: not prepared in {data_dir}; use "
            "prepare_world for tiny_world, and for a public set "
            "tfds.builder(name, data_dir=..., file_format='array_record')"
            ".download_and_prepare()"
        ) from error
    rows = builder.as_data_source(split=split)
    questions = []
    for number, row in enumerate(rows.__getitems__(range(len(rows)))):
        try:
            questions.append(question_from_row(row, number))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source}, row {number}: {error}") from error
    if {"id", "question_id"} & builder.info.features.keys():
        questions.sort(key=lambda question: question.id)
    return questions
