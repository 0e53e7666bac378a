"""An environment whose replies come late and in any order."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lld_jax.protocol.environment import Environment, Reply, Turn


@dataclass
class Slow:
    """`inner`, each reply up to `most` seconds later."""

    inner: Environment
    random: random.Random
    most: float

    def start(self, question: str) -> list[int]:
        return self.inner.start(question)

    def step(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Reply]]:
        replies = list(self.inner.step(turns))
        self.random.shuffle(replies)
        for reply in replies:
            time.sleep(self.random.uniform(0, self.most))
            yield reply
