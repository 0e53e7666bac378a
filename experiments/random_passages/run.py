"""Does the answer come from search? Scores a policy with random passages in its index.

    python -m experiments.random_passages.run --policy=runs/tiny/export

Every query gets passages of the same corpus, drawn at random by a hash of the query
instead of by similarity; everything else is as in `--mode=eval`.
"""

import argparse
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

from lld_jax import agent as agent_lib
from lld_jax import evaluate
from lld_jax.config.overrides import load
from lld_jax.model import hf
from lld_jax.protocol.search import Passage
from lld_jax.retrieval.build import read_corpus
from lld_jax.run import metrics


@dataclasses.dataclass(frozen=True)
class RandomRetriever:
    """Answers each query with `k` passages that have nothing to do with it."""

    passages: tuple[Passage, ...]

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [random.Random(query).sample(self.passages, k) for query in queries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/tiny.py")
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = load(args.config)
    agent = agent_lib.open_agent(config)
    sets = evaluate.load_sets(agent)
    published = agent_lib.publisher(agent)(
        agent_lib.load_params(agent, hf.resolve(str(args.policy)))
    )
    documents = read_corpus(agent.corpus)
    passages = tuple(Passage(d.id, d.title, d.text, 0.0) for d in documents)
    environments = {
        "index": agent.environment,
        "random": dataclasses.replace(
            agent.environment, retriever=RandomRetriever(passages)
        ),
    }
    table = {}
    for name, environment in environments.items():
        with metrics.work_bar(2 * sum(map(len, sets.values())), name) as moved:
            scores, _ = evaluate.evaluate(
                dataclasses.replace(agent, environment=environment),
                published,
                sets,
                on_progress=moved,
            )
        table[name] = {
            mode: scores[f"eval/{mode}/exact_match"] for mode in evaluate.MODES
        }
        print(name, table[name])
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
