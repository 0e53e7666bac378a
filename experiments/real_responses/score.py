"""Our parser, scorer and hashed retriever on what real search agents wrote.

    python -m experiments.real_responses.score --data=DIR --json=FILE

DIR holds `trajectories/*.jsonl.gz`, rows `{id, question, golden_answers, response,
pred, em, stop_reason}` in which another evaluator extracted `pred` and scored `em`,
and `corpus_wiki18_sample.jsonl.gz`, the passages that such runs retrieved. Sources
and numbers: results.json beside this file.

1. Exact match of the last answer, compared with `em`; every disagreement is put
   under a kind, and the exit status is 1 if one has none.
2. For each query that a response sent to E5 over wiki-18: is one of E5's three titles
   among the three that the hashed encoder returns from the sample?
"""

import argparse
import collections
import gzip
import json
import re
import sys
from pathlib import Path

from lld_jax.protocol.rewards import exact_match, normalize_answer
from lld_jax.protocol.search import split_response
from lld_jax.retrieval.build import index_documents, read_corpus

_TITLE = re.compile(r"^\s*(?:<information>)?\s*Doc \d+\(Title: (.*?)\) ", re.MULTILINE)


def last_answer(response: str) -> str | None:
    """Content of the last complete answer among the policy's own actions."""
    actions = [p.action for p in split_response(response) if p.action]
    answers = [a.content for a in actions if a.kind == "answer"]
    return answers[-1] if answers else None


def explain(answer: str | None, golden: list[str], row: dict) -> str:
    """Why our exact match is not the row's `em`; 'unexplained' if no rule fits."""
    theirs = row["pred"] or ""
    if answer is None:
        return "no complete answer of the policy: we give 0"
    if not normalize_answer(answer):
        return "answer empty after normalising: we give 0"
    if normalize_answer(answer) != normalize_answer(theirs):
        if exact_match(theirs, golden) == row["em"]:
            return "another stretch of text was taken as the answer"
        return "unexplained"
    if row["em"] and any(
        normalize_answer(g) in normalize_answer(answer) for g in golden
    ):
        return "they accept an answer that contains the gold answer"
    return "unexplained"


def score_rows(rows: list[dict]) -> dict:
    """Exact match of one set, agreement with `em`, disagreements by kind."""
    total = 0.0
    kinds: collections.Counter[str] = collections.Counter()
    unanswered = preds = 0
    for row in rows:
        answer = last_answer(row["response"])
        em = exact_match(answer, row["golden_answers"])
        total += em
        unanswered += answer is None
        preds += (answer or "") == (row["pred"] or "")
        if em != row["em"]:
            kinds[explain(answer, row["golden_answers"], row)] += 1
    return {
        "rows": len(rows),
        "exact_match": round(total / len(rows), 4),
        "their_exact_match": round(sum(r["em"] for r in rows) / len(rows), 4),
        "without_answer": unanswered,
        "same_answer_text": preds,
        "same_score": len(rows) - kinds.total(),
        "disagreements": dict(kinds),
    }


def searches(response: str) -> list[tuple[str, set[str]]]:
    """(query, titles returned for it) of each answered search."""
    pieces = split_response(response)
    found = []
    for action, observation in zip(pieces, pieces[1:], strict=False):
        if action.action and action.action.kind == "search":
            titles = {plain(t) for t in _TITLE.findall(observation.text)}
            if observation.kind == "observation" and titles:
                found.append((action.action.content, titles))
    return found


def plain(title: str) -> str:
    """A title without the quote marks that some responses show."""
    return title.strip().strip('"').lower()


def main(argv: list[str] | None = None) -> int:
    """Prints both tables, writes them as JSON; 1 if a row is unexplained."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args(argv)
    sets = {}
    for path in sorted((args.data / "trajectories").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            sets[path.name.removesuffix(".jsonl.gz")] = [json.loads(s) for s in lines]
    if not sets:
        raise FileNotFoundError(f"no trajectories/*.jsonl.gz in {args.data}")

    documents = read_corpus(args.data / "corpus_wiki18_sample.jsonl.gz")
    index = index_documents(documents)
    scores, retrieval = {}, {}
    for name, rows in sets.items():
        scores[name] = score_rows(rows)
        asked = [pair for row in rows for pair in searches(row["response"])]
        returned = index.search([query for query, _ in asked], k=3)
        hits = [
            bool(titles & {plain(p.title) for p in passages})
            for (_, titles), passages in zip(asked, returned, strict=True)
        ]
        retrieval[name] = {
            "queries": len(hits),
            "hits": sum(hits),
            "recall_at_3": round(sum(hits) / len(hits), 4),
        }
    queries = sum(r["queries"] for r in retrieval.values())
    results = {
        "scores": scores,
        "unexplained": sum(
            s["disagreements"].get("unexplained", 0) for s in scores.values()
        ),
        "retrieval": {
            "what": "one of E5's 3 titles among our 3; corpus: the pooled passages",
            "passages": len(documents),
            "encoder": index.encoder.settings(),
            "sets": retrieval,
            "queries": queries,
            "recall_at_3": round(
                sum(r["hits"] for r in retrieval.values()) / queries, 4
            ),
        },
    }
    text = json.dumps(results, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return int(results["unexplained"] > 0)


if __name__ == "__main__":
    sys.exit(main())
