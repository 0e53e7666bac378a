"""Counts the actions of recorded search conversations and checks their split.

    python -m experiments.real_responses.parse --data DIR

DIR holds `*.jsonl` or `*.jsonl.gz` files with one conversation a row; its field
`response` is all that followed the prompt. Every text is split whole, and cut at
`--cuts` random places; the pieces must join to the text, and a cut may change no piece
before the last. Exit status 1 otherwise.
"""

import argparse
import gzip
import json
import random
import sys
from collections import Counter
from pathlib import Path

from lld_jax.protocol.search import Piece, split_response

COLUMNS = ("responses", "search", "answer", "invalid", "observation", "answered")


def read_responses(path: Path) -> list[str]:
    """The `response` fields of a JSONL file, gzipped or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["response"] for line in lines if line.strip()]


def split_and_check(text: str, whole: list[Piece] | None = None) -> list[Piece]:
    """The pieces of `text`, which may be a beginning of the text of `whole`.

    Raises:
      ValueError: the pieces do not join to the text, or those before the last differ
        from the pieces of the whole text.
    """
    pieces = split_response(text)
    if "".join(piece.text for piece in pieces) != text:
        raise ValueError(f"the split lost text: {text[:200]!r}")
    if whole is not None and pieces[:-1] != whole[: max(len(pieces) - 1, 0)]:
        raise ValueError(f"a cut changed earlier pieces: {text[-200:]!r}")
    return pieces


def count(pieces: list[Piece]) -> Counter[str]:
    """Pieces by name; `answered` if the last one is an answer."""
    names = [p.action.kind if p.action else "observation" for p in pieces]
    answered = int(names[-1:] == ["answer"])
    return Counter(names) + Counter(responses=1, answered=answered)


def main(data: Path, cuts: int, seed: int) -> int:
    rng = random.Random(seed)
    files = sorted([*data.glob("*.jsonl"), *data.glob("*.jsonl.gz")])
    if not files:
        print(f"--data={data}: no *.jsonl or *.jsonl.gz there", file=sys.stderr)
        return 1
    width = max(len(path.name) for path in files) + 2
    print("".ljust(width) + "".join(name.rjust(13) for name in COLUMNS))
    total, cut_total, failed = Counter(), Counter(), 0
    for path in files:
        row = Counter()
        for text in read_responses(path):
            ends = [rng.randint(0, len(text)) for _ in range(cuts)]
            try:
                pieces = split_and_check(text)
                row += count(pieces)
                for end in ends:
                    cut_total += count(split_and_check(text[:end], pieces))
            except ValueError as error:
                print(f"{path.name}: {error}", file=sys.stderr)
                failed += 1
        total += row
        print(path.name.ljust(width) + "".join(f"{row[c]:13,}" for c in COLUMNS))
    for name, row in (("total", total), (f"cut (seed {seed})", cut_total)):
        print(name.ljust(width) + "".join(f"{row[c]:13,}" for c in COLUMNS))
    print(f"{failed} responses failed the checks")
    return int(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cuts", type=int, default=20, help="cuts per response")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.exit(main(args.data, args.cuts, args.seed))
