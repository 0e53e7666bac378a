"""The search protocol as an environment: actions in, observations out."""

from dataclasses import dataclass


class RetrievalError(RuntimeError):
    """The retriever could not answer; the environment replies neutrally."""


@dataclass(frozen=True)
class Passage:
    """One retrieved passage; `score` is higher for a better match."""

    id: str
    title: str
    text: str
    score: float
