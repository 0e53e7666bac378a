"""Rollouts with the native sampler of google-tunix.

    python -m benchmarks.engines.tunix_sampler --model DIR --work FILE --out FILE

Needs the packages of tunix.txt, in an environment of their own. The sampler keeps no
cache from one call to the next: at each turn it reads the whole conversation again and
goes on for a number of steps that all rows of the call share. Conversations form
static batches; what a row samples after the end of its own action is thrown away.

Every new shape of a call (rows, prompt padding, steps) compiles anew, so the two
lengths are rounded up: `--prompt-multiple` and `--steps-multiple` trade padding for
compilations, and the defaults were the fastest. The warm-up calls the shapes of a
rollout with other action lengths of about the same distribution, so that the timed run
compiles what a later rollout of a training would still meet.

The other ways to use it: `--rows 1 --steps-multiple 1` is one conversation at a time
with the exact budget of its action, as Tunix's own agent loop calls the sampler;
`--steps-multiple 1` a batch with the budget of its longest action; `--steps-multiple
256` one budget for all calls; `--prompt-multiple 0` Tunix's own padding of prompts.
"""

import argparse
import json
import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks import workloads
from benchmarks.workloads import Script, Work
from lld_jax.run.host import keep_freed_memory, peak_memory_gib

THREADS = 2
SMALL_ROWS, ROWS = 2, 8
LARGE = 4 * 2**20  # weights of a kind in the MLPs from which a model is large
LOGITS_BYTES = 6 * 2**30  # what the logits of one prefill may take
PAD, EOS = -1, -2  # no token has these ids: none is masked, none ends a row
WARM_SECONDS = 60  # of the warm-up, or as long as the timed run may take
CONCURRENT = 8  # batches in flight: some wait for replies while another one samples
COMPILED = "/jax/core/compile/backend_compile_duration"

Batch = list[tuple[Script, list[int]]]  # with the ids of the conversation so far


@dataclass(frozen=True)
class Layout:
    """How the shapes of the calls are chosen.

    `prompt_multiple` 0 leaves the padding to Tunix: the next power of two. The cache
    has room for `longest_action` after the prompt; `longest_prompt` above 0 gives it
    one size for all calls, as Tunix's trainer does, instead of one for each padding.
    """

    rows: int
    prompt_multiple: int
    steps_multiple: int
    longest_action: int
    longest_prompt: int = 0


@dataclass(frozen=True)
class Shape:
    """What a call compiles for."""

    rows: int
    prompt: int
    steps: int
    cache: int


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
    shapes: set[Shape] = field(default_factory=set)


class Ids:
    """The tokenizer that Tunix asks for; its "text" is the list of ids itself."""

    def encode(self, ids: list[int]) -> list[int]:
        return ids

    def decode(self, ids: list[int]) -> list[int]:
        return ids

    def bos_id(self) -> None:
        return None  # nothing is put in front

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below `number`; 0: the next power of two."""
    if multiple == 0:
        return 1 << (number - 1).bit_length()
    return math.ceil(number / multiple) * multiple


def shape_of(prompts: list[int], actions: list[int], layout: Layout) -> Shape:
    """The shape of a call with these lengths."""
    prompt = round_up(max(prompts), layout.prompt_multiple)
    return Shape(
        rows=min(round_up(len(prompts), 0), layout.rows),
        prompt=prompt,
        steps=round_up(max(actions), layout.steps_multiple),
        cache=max(prompt, layout.longest_prompt) + layout.longest_action,
    )


def longest(work: Work) -> tuple[int, int]:
    """Tokens of the longest prompt of a call and of the longest action."""
    prompt = max(script.length - script.actions[-1] for script in work.scripts)
    return prompt, max(n for script in work.scripts for n in script.actions)


def batches(work: Work, rows: int) -> Iterator[list[Script]]:
    for i in range(0, len(work.scripts), rows):
        yield work.scripts[i : i + rows]


def shapes_of(work: Work, layout: Layout) -> list[Shape]:
    """Every shape that rolling out `work` has."""
    found = set()
    for batch in batches(work, layout.rows):
        for turn in range(max(len(script.actions) for script in batch)):
            active = [script for script in batch if len(script.actions) > turn]
            prompts = [
                len(s.prompt) + sum(s.actions[:turn]) + sum(s.observations[:turn])
                for s in active
            ]
            actions = [script.actions[turn] for script in active]
            found.add(shape_of(prompts, actions, layout))
    return sorted(found, key=lambda shape: (shape.prompt, shape.steps, shape.rows))


def similar(work: Work) -> Work:
    """The same work with other lengths of actions, drawn from about the same ones."""
    rng = np.random.default_rng(1)
    known = sorted(n for script in work.scripts for n in script.actions)

    def draw() -> int:
        i = rng.integers(len(known))
        return int(rng.integers(known[i], known[min(i + 1, len(known) - 1)] + 1))

    scripts = [replace(s, actions=[draw() for _ in s.actions]) for s in work.scripts]
    return replace(work, scripts=scripts)


class Tunix:
    """A Qwen2 model of Tunix and its samplers, one for each size of the cache."""

    def __init__(self, folder: Path):
        from jax import numpy as jnp
        from tunix.models.qwen2 import model, params

        raw = json.loads((folder / "config.json").read_text("utf-8"))
        rope = raw.get("rope_parameters") or raw
        heads = raw["num_attention_heads"]
        self.config = model.ModelConfig(
            num_layers=raw["num_hidden_layers"],
            vocab_size=raw["vocab_size"],
            embed_dim=raw["hidden_size"],
            hidden_dim=raw["intermediate_size"],
            num_heads=heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            num_kv_heads=raw["num_key_value_heads"],
            rope_theta=rope["rope_theta"],
            norm_eps=raw["rms_norm_eps"],
            use_tied_embedding=raw["tie_word_embeddings"],
            dtype=jnp.float32,
            param_dtype=jnp.float32,
        )
        self.model = params.create_model_from_safe_tensors(
            str(folder), self.config, dtype=jnp.float32
        )
        self._samplers = {}
        self._seed = 0

    def sample(self, shape: Shape, conversations: list[list[int]]) -> list[list[int]]:
        """`shape.steps` new ids of each conversation; missing rows are filled up."""
        from tunix.generate import sampler

        if shape.cache not in self._samplers:
            config = sampler.CacheConfig(
                cache_size=shape.cache,
                num_layers=self.config.num_layers,
                num_kv_heads=self.config.num_kv_heads,
                head_dim=self.config.head_dim,
            )
            self._samplers[shape.cache] = sampler.Sampler(self.model, Ids(), config)
        self._seed += 1
        missing = shape.rows - len(conversations)
        out = self._samplers[shape.cache](
            conversations + conversations[-1:] * missing,
            max_generation_steps=shape.steps,
            max_prompt_length=shape.prompt,
            eos_tokens=[EOS],
            temperature=1.0,
            top_p=1.0,  # with no top_k: the whole vocabulary
            seed=self._seed,
        )
        return [ids.tolist() for ids in out.tokens[: len(conversations)]]


def advance(
    engine: Tunix, turn: int, active: Batch, shape: Shape, counts: Counts
) -> Batch:
    """Samples an action of each row and adds to `counts`; the rows that go on."""
    sampled = engine.sample(shape, [ids for _, ids in active])
    counts.calls += 1
    counts.shapes.add(shape)
    counts.padded += shape.rows * shape.prompt
    counts.row_steps += shape.rows * shape.steps
    waiting = []
    for (script, ids), new in zip(active, sampled, strict=True):
        length = script.actions[turn]
        counts.prefilled += len(ids)
        counts.tokens += length
        if turn == len(script.actions) - 1:
            counts.finished += 1
            continue
        observed = workloads.observation_ids(script, turn, engine.config.vocab_size)
        waiting.append((script, ids + new[:length] + observed))
    return waiting


def run(engine: Tunix, work: Work, layout: Layout, seconds: float) -> dict:
    """The timed run; the fields of the result that it knows."""
    counts = Counts()
    start = time.monotonic()
    fresh = deque(batches(work, layout.rows))
    flying = deque()
    while fresh or flying:
        while fresh and len(flying) < CONCURRENT:
            flying.append((start, 0, [(s, s.prompt) for s in fresh.popleft()]))
        ready, turn, active = flying.popleft()
        time.sleep(max(0.0, ready - time.monotonic()))
        if time.monotonic() - start >= seconds:
            break
        prompts = [len(ids) for _, ids in active]
        actions = [script.actions[turn] for script, _ in active]
        shape = shape_of(prompts, actions, layout)
        waiting = advance(engine, turn, active, shape, counts)
        if waiting:
            counts.retrievals += 1
            flying.append((time.monotonic() + work.latency, turn + 1, waiting))
    detail = asdict(replace(counts, shapes=set())) | {"shapes": len(counts.shapes)}
    return {
        "trajectories": detail.pop("finished"),
        "tokens": detail.pop("tokens"),
        "seconds": time.monotonic() - start,
        "row_steps": detail.pop("row_steps"),
        "complete": counts.finished == len(work.scripts),
        "detail": detail | asdict(layout),
    }


def cpu_seconds() -> float:
    """Processor time of this process so far, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def fitting_rows(work: Work, config) -> int:
    """Rows of a batch that are fastest on two cores, a power of two.

    A row of a small model costs the same in a batch of any size, so few rows waste
    least. A large model reads its weights once for all rows of a step; but Tunix's
    Qwen2 computes the logits of every prompt token, which a large vocabulary makes
    the most memory that a call takes.
    """
    if config.num_layers * config.embed_dim * config.hidden_dim < LARGE:
        return SMALL_ROWS
    fit = LOGITS_BYTES // (4 * config.vocab_size * longest(work)[0])
    return min(ROWS, 1 << max(fit, 1).bit_length() - 1)


def warm_up(engine: Tunix, work: Work, layout: Layout, seconds: float) -> int:
    """Calls each shape that a rollout of `similar` work has; how many were left out.

    Stops in time for `seconds`, the cheapest shapes first.
    """
    start = before = time.monotonic()
    shapes = shapes_of(similar(work), layout)
    for i, shape in enumerate(shapes):
        engine.sample(shape, [[0]])
        now = time.monotonic()
        if now + 2 * (now - before) > start + seconds:
            return len(shapes) - i - 1
        before = now
    return 0


def main(args: argparse.Namespace) -> int:
    if hasattr(os, "sched_setaffinity"):  # JAX starts a thread for each core it sees
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    keep_freed_memory()
    import jax

    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: event == COMPILED and compiled.append(seconds)
    )
    engine, work = Tunix(args.model), workloads.load(args.work)
    prompt, action = longest(work)
    layout = Layout(
        rows=args.rows or fitting_rows(work, engine.config),
        prompt_multiple=args.prompt_multiple,
        steps_multiple=args.steps_multiple,
        longest_action=round_up(round_up(action, 0), args.steps_multiple),
        longest_prompt=round_up(prompt, 0) if args.one_cache else 0,
    )
    left_out = warm_up(engine, work, layout, max(WARM_SECONDS, args.seconds))
    warm = len(compiled)
    used = cpu_seconds()
    result = {"engine": "tunix", **run(engine, work, layout, args.seconds)}
    result["detail"] |= {
        "cpu_seconds": cpu_seconds() - used,
        "compile_seconds": sum(compiled[warm:]),
        "shapes_not_warm": left_out,
    }
    result |= {
        "compilations": len(compiled) - warm,
        "peak_memory_gib": peak_memory_gib(),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, help="of a batch; default: by the model")
    parser.add_argument("--prompt-multiple", type=int, default=128)
    parser.add_argument("--steps-multiple", type=int, default=64)
    parser.add_argument("--one-cache", action="store_true")
    sys.exit(main(parser.parse_args()))
