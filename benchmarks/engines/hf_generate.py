"""Rollouts with transformers' `generate`, the way Search-R1 does them.

    python -m benchmarks.engines.hf_generate --model DIR --work FILE --out FILE

Trajectories form static batches. At each turn `generate` reads the whole conversation
of every trajectory of the batch that still runs, padded on the left, and goes on until
the longest action of the batch is over. What a row samples after the end of its own
action is thrown away.
"""

import argparse
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers

from benchmarks import workloads
from benchmarks.workloads import Script, Work
from lld_jax.run.host import keep_freed_memory, peak_memory_gib

# The fastest of 16, 32 and 64 rows for each work, on both shapes. More rows make a step
# cheaper for each, but all wait for the longest action: a long one in C costs most.
ROWS = {"A": 64, "B": 32, "C": 16}
SAMPLING = transformers.GenerationConfig(
    do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
)


@dataclass
class Counts:
    """What a run has done so far; `finished` counts trajectories."""

    finished: int = 0
    tokens: int = 0
    row_steps: int = 0
    calls: int = 0
    prefilled: int = 0  # prompt tokens read, those of earlier turns again, no padding
    padded: int = 0  # the same with padding
    retrievals: int = 0


@dataclass
class AtLengths(transformers.StoppingCriteria):
    """Ends each row after its own number of new tokens, and all at the deadline."""

    lengths: list[int]
    deadline: float
    steps: int = 0
    expired: bool = False
    _left: torch.Tensor = field(init=False)

    def __post_init__(self):
        self._left = torch.tensor(self.lengths)

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        self.steps += 1
        self.expired = time.monotonic() >= self.deadline
        return (self._left <= self.steps) | self.expired


@torch.inference_mode()
def generate(
    model: transformers.PreTrainedModel,
    conversations: list[list[int]],
    stop: AtLengths,
) -> list[list[int]]:
    """New ids of each row, `stop.steps` of them."""
    width = max(map(len, conversations))
    ids = [[0] * (width - len(row)) + row for row in conversations]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in conversations]
    out = model.generate(
        torch.tensor(ids),
        attention_mask=torch.tensor(mask),
        max_new_tokens=max(stop.lengths),
        stopping_criteria=transformers.StoppingCriteriaList([stop]),
    )
    return out[:, width:].tolist()


def run_batch(
    model: transformers.PreTrainedModel,
    scripts: list[Script],
    latency: float,
    deadline: float,
    counts: Counts,
) -> bool:
    """Rolls out one batch and adds to `counts`; False if the deadline cut it short."""
    vocab = model.config.vocab_size
    active = [(script, list(script.prompt)) for script in scripts]
    for turn in range(max(len(script.actions) for script in scripts)):
        wanted = [script.actions[turn] for script, _ in active]
        stop = AtLengths(wanted, deadline)
        sampled = generate(model, [ids for _, ids in active], stop)
        counts.calls += 1
        counts.prefilled += sum(len(ids) for _, ids in active)
        counts.padded += len(active) * max(len(ids) for _, ids in active)
        counts.row_steps += len(active) * stop.steps
        waiting = []
        for (script, ids), new, length in zip(active, sampled, wanted, strict=True):
            counts.tokens += min(length, stop.steps)
            if length > stop.steps:
                continue
            if turn == len(script.actions) - 1:
                counts.finished += 1
                continue
            observed = workloads.observation_ids(script, turn, vocab)
            waiting.append((script, ids + new[:length] + observed))
        if stop.expired:
            return False
        if waiting:
            time.sleep(latency)
            counts.retrievals += 1
        active = waiting
    return True


def run(
    model: transformers.PreTrainedModel, work: Work, rows: int, seconds: float
) -> dict:
    """The timed run; the fields of the result that it knows."""
    counts = Counts()
    torch.manual_seed(0)
    start = time.monotonic()
    for i in range(0, len(work.scripts), rows):
        batch = work.scripts[i : i + rows]
        if not run_batch(model, batch, work.latency, start + seconds, counts):
            break
    detail = asdict(counts)
    return {
        "trajectories": detail.pop("finished"),
        "tokens": detail.pop("tokens"),
        "seconds": time.monotonic() - start,
        "row_steps": detail.pop("row_steps"),
        "complete": counts.finished == len(work.scripts),
        "detail": detail | {"rows": rows},
    }


def load_model(folder: Path) -> transformers.PreTrainedModel:
    """The model in float32, without the end tokens that would stop a row early."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.generation_config = SAMPLING
    return model.eval()


def main(model: Path, work: Path, seconds: float, out: Path, rows: int | None) -> int:
    torch.set_num_threads(2)
    keep_freed_memory()  # the cache is allocated anew at every step: this saves a sixth
    loaded, todo = load_model(model), workloads.load(work)
    rows = rows or ROWS[todo.name]
    # Nothing compiles here: the first calls only fill the libraries' own caches.
    first = todo.scripts[: min(rows, 8)]
    for _ in range(2):
        stop = AtLengths([4] * len(first), float("inf"))
        generate(loaded, [script.prompt for script in first], stop)
    used = resource.getrusage(resource.RUSAGE_SELF)
    result = {"engine": "transformers", **run(loaded, todo, rows, seconds)}
    after = resource.getrusage(resource.RUSAGE_SELF)
    result["detail"]["cpu_seconds"] = (after.ru_utime + after.ru_stime) - (
        used.ru_utime + used.ru_stime
    )
    result |= {"compilations": 0, "peak_memory_gib": peak_memory_gib()}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, help="of a batch; default: the fastest")
    args = parser.parse_args()
    sys.exit(main(args.model, args.work, args.seconds, args.out, args.rows))
