"""Measures recorded search conversations in tokens, for work C.

    python -m benchmarks.real_lengths --data DIR --tokenizer FOLDER

DIR holds `*.jsonl.gz` files with one conversation a row: `question`, and `response`,
all that followed the prompt. FOLDER is a Hugging Face folder with Qwen2.5's tokenizer.
Writes `real_lengths.json` beside this file.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path

from lld_jax.protocol.codec import load_codec
from lld_jax.protocol.search import Codec, load_template, split_response

LIMIT = 4096  # tokens of a whole trajectory
SOURCE = (
    "Evaluation logs of two public Search-R1 checkpoints of Qwen2.5-3B (bamboogle: "
    "instruct; nq and triviaqa: base; three passages of 2018 Wikipedia per search) in "
    "the public GitHub repository GaurisankarJ/reason_over_search."
)
UNIT = (
    "Qwen2.5 tokens of [prompt, action, observation, action, ...]; the prompt is the "
    "question in lld_jax's 'search' template and Qwen2.5's chat template"
)


def measure(question: str, response: str, codec: Codec, template: str) -> list[int]:
    """Tokens of prompt, action, observation, action, ..., action.

    An observation that no action follows is dropped.

    Raises:
      ValueError: actions and observations do not alternate.
    """
    pieces = split_response(response)
    while pieces and pieces[-1].kind == "observation":
        pieces.pop()
    if any(p.kind != ("action", "observation")[i % 2] for i, p in enumerate(pieces)):
        raise ValueError(f"{[p.kind for p in pieces]} do not alternate: {question!r}")
    prompt = codec.chat(template.replace("{question}", question))
    return [len(prompt), *(len(codec.encode(piece.text)) for piece in pieces)]


def main(data: Path, tokenizer: Path) -> int:
    codec, template = load_codec(tokenizer), load_template("search")
    table, left_out = {}, 0
    for path in sorted(data.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        found = [measure(r["question"], r["response"], codec, template) for r in rows]
        kept = [lengths for lengths in found if sum(lengths) <= LIMIT]
        left_out += len(found) - len(kept)
        table[path.name.removesuffix(".jsonl.gz")] = kept
    if not table:
        print(f"--data={data}: no *.jsonl.gz there", file=sys.stderr)
        return 1
    head = {"source": SOURCE, "unit": UNIT, "limit": LIMIT, "left_out": left_out}
    # One file a line: compact, and still readable in a diff of the head.
    rows = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(rows, separators=(',', ':'))}"
        for name, rows in table.items()
    )
    text = json.dumps(head, indent=1).removesuffix("\n}")
    out = Path(__file__).with_suffix(".json")
    out.write_text(f'{text},\n "lengths": {{\n{rows}\n }}\n}}\n', encoding="utf-8")
    counts = {name: len(rows) for name, rows in table.items()}
    print(f"{out}: {counts}, {left_out} over {LIMIT} tokens left out")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    args = parser.parse_args()
    sys.exit(main(args.data, args.tokenizer))
