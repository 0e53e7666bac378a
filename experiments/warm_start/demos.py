"""Scripted demonstrations whose most frequent behaviour is wrong, not just noisy.

A demonstrator handles a few kinds of question properly and most of the others badly:
it answers without searching, stops after the first of two hops, or looks up the wrong
page. Whatever page it does read, it reads properly: the answer that follows a search
is always what the passages say. So the search skill is there, and the habit of using
it is not.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence

from lld_jax.data.world import World, WorldQuestion
from lld_jax.protocol.environment import SearchEnvironment, Turn
from lld_jax.protocol.search import Codec

# Chances of each behaviour by kind of question. `good` relations are the quarter of
# the questions on which the start is right more often than not.
GOOD = ("person.birthplace", "person.occupation", "work.author", "work.setting")
Behaviours = Mapping[str, Mapping[str, float]]
BEHAVIOURS: Behaviours = {
    "good": {"right": 0.6, "guess": 0.3, "wrong_page": 0.1},
    "one_hop": {"right": 0.2, "guess": 0.5, "wrong_page": 0.3},
    "two_hop": {"right": 0.2, "guess": 0.25, "stop_early": 0.45, "wrong_page": 0.1},
}


@dataclasses.dataclass(frozen=True)
class Demo:
    """A finished demonstration: ids `[T]`, mask `[T]`, and what it shows.

    The mask is 1 on action tokens, and 2 on those of an answer read from a passage.
    """

    ids: list[int]
    mask: list[int]
    behaviour: str


def behaviour_of(
    question: WorldQuestion, rng: random.Random, behaviours: Behaviours = BEHAVIOURS
) -> str:
    kind = "one_hop" if question.hops == 1 else "two_hop"
    table = behaviours["good" if question.relation in GOOD else kind]
    return rng.choices(list(table), list(table.values()))[0]


def _plan(
    question: WorldQuestion,
    behaviour: str,
    others: Mapping[tuple[str, int], Sequence[WorldQuestion]],
    rng: random.Random,
) -> tuple[list[str], str]:
    """The queries that the demonstrator makes and the answer that it gives."""
    support, chain = list(question.support), list(question.chain)
    if behaviour == "right":
        return support, chain[-1]
    if behaviour == "stop_early":
        return support[:1], chain[0]
    other = rng.choice(others[question.relation, question.hops])
    if behaviour == "guess":
        return [], other.chain[-1]
    # The wrong page: another entity of the same kind, read properly.
    return list(other.support), other.chain[-1]


def make(
    world: World,
    environment: SearchEnvironment,
    codec: Codec,
    *,
    rng: random.Random,
    count: int,
    turns: int,
    behaviours: Behaviours = BEHAVIOURS,
) -> list[Demo]:
    """`count` demonstrations on random questions of a world.

    Observations come from the environment itself, so every demonstration reads as a
    rollout would. One that does not fit the protocol's budgets is an error.
    """
    questions = [q for split in world.questions.values() for q in split]
    others: dict[tuple[str, int], list[WorldQuestion]] = {}
    for q in questions:
        others.setdefault((q.relation, q.hops), []).append(q)
    picked = rng.choices(questions, k=count)
    chosen = [behaviour_of(q, rng, behaviours) for q in picked]
    plans = [_plan(q, b, others, rng) for q, b in zip(picked, chosen, strict=True)]
    ids = [environment.start(q.question) for q in picked]
    masks = [[0] * len(row) for row in ids]
    for turn in range(turns):
        live = [i for i, (queries, _) in enumerate(plans) if turn <= len(queries)]
        batch = []
        for i in live:
            queries, answer = plans[i]
            tag, text = (
                ("search", queries[turn]) if turn < len(queries) else ("answer", answer)
            )
            action = codec.encode(f"<{tag}> {text} </{tag}>")
            read = tag == "answer" and turn > 0
            ids[i] += action
            masks[i] += [2 if read else 1] * len(action)
            batch.append(Turn(picked[i].question, action, turn, False, 10**6))
        for at, reply in environment.step(batch):
            i = live[at]
            if reply.ids is not None:
                ids[i] += reply.ids
                masks[i] += [0] * len(reply.ids)
            elif reply.reason != "answered":
                raise ValueError(f"demonstration ended by {reply.reason!r}: {plans[i]}")
    return [Demo(*row) for row in zip(ids, masks, chosen, strict=True)]
