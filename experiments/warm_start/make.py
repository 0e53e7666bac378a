"""Makes `lld_jax/assets/tiny_qwen2.5`: tokenizer, demonstrations, supervised training.

    python -m experiments.warm_start.make --out lld_jax/assets/tiny_qwen2.5

The same arguments give the same folder. README.md states what came out.
"""

import argparse
import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from experiments.warm_start import demos
from experiments.warm_start import tokenizer as bpe
from lld_jax import model, parallel
from lld_jax.data import world
from lld_jax.model import hf, logprobs
from lld_jax.protocol.environment import SearchEnvironment
from lld_jax.protocol.search import Codec, load_template
from lld_jax.retrieval.build import open_index

CONFIG = model.ModelConfig(
    vocab=2048,
    width=128,
    mlp=384,
    layers=3,
    kv_heads=2,
    group=2,
    head_dim=32,
    rope_theta=10_000.0,
    rms_eps=1e-6,
    tied=True,
)
VOCAB = 2000  # ids that the tokenizer knows; the rest of the rows is padding
SIZE = 600  # people in each demonstration world, as in the world RL trains on
FIRST_SEED = 1000  # demonstration worlds; RL's world has another seed
ROW = 256
_FIELDS = ("ids", "mask", "segment", "at", "right")


def texts(worlds: list[world.World]) -> Iterator[str]:
    """What the tokenizer learns from: pages, questions, and the protocol's tags."""
    prompt = load_template("short")
    for w in worlds:
        for page in w.pages:
            yield f"Doc 1(Title: {page.title}) {page.text}"
        for q in w.questions["train"]:
            yield prompt.replace("{question}", q.question)
            yield f"<search> {q.support[0]} </search>\n\n<information>"
            yield "\nDoc 2(Title</information>\n\n"
            yield f"<answer> {q.golden_answers[0]} </answer>"


def write_configs(folder: Path, codec_ids: dict[str, int]) -> None:
    """`config.json` and `generation_config.json` of a folder without weights."""
    end, pad = codec_ids[bpe.SPECIAL[2]], codec_ids[bpe.SPECIAL[0]]
    c = CONFIG
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": c.width,
        "intermediate_size": c.mlp,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.kv_heads * c.group,
        "num_key_value_heads": c.kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": c.rms_eps,
        "rope_theta": c.rope_theta,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": c.tied,
        "vocab_size": c.vocab,
        "bos_token_id": pad,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    generation = {"bos_token_id": pad, "eos_token_id": [end, pad], "pad_token_id": pad}
    for name, content in (("config", config), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def demonstrate(
    codec: Codec,
    seed: int,
    count: int,
    folder: Path,
    *,
    asked: Callable[[world.WorldQuestion], bool] = lambda question: True,
    behaviours: demos.Behaviours = demos.BEHAVIOURS,
    k: int = 2,
    max_prompt: int = 72,
    max_observation: int = 80,
    turns: int = 4,
) -> list[demos.Demo]:
    """Demonstrations on the world of one seed, searched with the real index."""
    w = world.generate(seed, SIZE)
    corpus = folder / f"{seed}.jsonl"
    world.write_corpus(w, corpus)
    environment = SearchEnvironment(
        codec=codec,
        retriever=open_index(corpus),
        template=load_template("short"),
        k=k,
        max_observation=max_observation,
        max_prompt=max_prompt,
    )
    chosen = {name: tuple(filter(asked, qs)) for name, qs in w.questions.items()}
    return demos.make(
        dataclasses.replace(w, questions=chosen),
        environment,
        codec,
        rng=random.Random(seed),
        count=count,
        turns=turns,
        behaviours=behaviours,
    )


def pack(rows: list[demos.Demo]) -> Iterator[dict[str, np.ndarray]]:
    """Fills rows of `ROW` tokens with whole demonstrations: first fit, 32 rows open."""

    def finish(parts: list[demos.Demo]) -> dict[str, np.ndarray]:
        out = {k: np.zeros(ROW, np.int32) for k in _FIELDS}
        start = 0
        for segment, part in enumerate(parts, 1):
            span = slice(start, start + len(part.ids))
            out["ids"][span], out["mask"][span] = part.ids, part.mask
            out["segment"][span], out["at"][span] = segment, np.arange(len(part.ids))
            out["right"][span] = part.behaviour == "right"
            start = span.stop
        return out

    opened: list[list[demos.Demo]] = []
    for row in rows:
        fits = (
            parts
            for parts in opened
            if sum(len(p.ids) for p in parts) + len(row.ids) <= ROW
        )
        parts = next(fits, None)
        if parts is None:
            if len(opened) == 32:
                yield finish(opened.pop(0))
            opened.append(parts := [])
        parts.append(row)
    yield from map(finish, opened)


def train(
    rows: list[dict[str, np.ndarray]],
    *,
    valid_vocab: int,
    steps: int,
    batch: int,
    lr: float,
    context_weight: float,
    read_weight: float,
    seed: int,
    params: hf.Params | None = None,
) -> hf.Params:
    """Next-token training, with weights by what a token teaches.

    Starts from `params`; None: from the seed's random ones.
    Observations and questions count `context_weight`: predicting them, too, is what
    teaches a small model to copy names, since a page repeats its title. Answers that
    were read from a passage count `read_weight`, other action tokens 1.
    """
    layout = parallel.train_layout(parallel.make_mesh(1, 1, 1, jax.devices()[:1]))
    if params is None:
        params = model.init(CONFIG, jax.random.key(seed), layout)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, lr, min(200, steps // 10), steps, 0.02 * lr
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, 0.9, 0.98)
    )

    def loss_fn(params, x):
        hidden = model.hidden_states(
            CONFIG,
            params,
            x["ids"],
            x["at"],
            x["segment"],
            dtype=jnp.float32,
            layout=layout,
            block=64,
        )
        logps, _ = logprobs.token_logprobs(
            hidden,
            model.head(params),
            x["ids"],
            temperature=1.0,
            valid_vocab=valid_vocab,
            chunk=ROW,
            layout=layout,
        )
        real = x["at"] > 0
        by_kind = jnp.array([context_weight, 1.0, read_weight])
        weight = jnp.where(real, by_kind[x["mask"]], 0.0)
        loss = -(weight * logps).sum() / weight.sum()
        right = (x["mask"] > 0) & (x["right"] == 1)
        return loss, -jnp.where(right, logps, 0).sum() / right.sum()

    @jax.jit
    def update(params, state, x):
        (loss, right), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, right

    state, rng = optimizer.init(params), np.random.default_rng(seed)
    order, bar = np.array([], int), tqdm(range(steps), miniters=25, mininterval=2)
    for step in bar:
        if len(order) < batch:
            order = rng.permutation(len(rows))
        picked, order = order[:batch], order[batch:]
        x = {k: np.stack([rows[i][k] for i in picked]) for k in rows[0]}
        params, state, loss, right = update(params, state, x)
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss:.3f}", right=f"{right:.3f}")
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worlds", type=int, default=24)
    parser.add_argument("--demos", type=int, default=4000, help="in each world")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=32, help=f"rows of {ROW} tokens")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--context-weight", type=float, default=0.3)
    parser.add_argument("--read-weight", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.time()
    seeds = range(FIRST_SEED, FIRST_SEED + args.worlds)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        source.mkdir()
        worlds = [world.generate(seed, SIZE) for seed in list(seeds)[:4]]
        tokenizer = bpe.train(texts(worlds), VOCAB)
        bpe.write(tokenizer, source)
        write_configs(source, tokenizer.get_vocab())
        codec = hf.load_codec(source)
        made = []
        for seed in tqdm(seeds, desc="demonstrations"):
            made += demonstrate(codec, seed, args.demos, Path(scratch))
        random.Random(args.seed).shuffle(made)
        rows = list(pack(made))
        lengths = np.array([len(d.ids) for d in made])
        print(
            f"{len(made)} demonstrations, {lengths.mean():.0f} tokens on average, "
            f"at most {lengths.max()}; {len(rows)} rows; {time.time() - began:.0f} s"
        )
        params = train(
            rows,
            valid_vocab=len(codec.token_bytes),
            steps=args.steps,
            batch=args.batch,
            lr=args.lr,
            context_weight=args.context_weight,
            read_weight=args.read_weight,
            seed=args.seed,
        )
        hf.save(args.out, params, CONFIG, source)
    print(f"wrote {args.out} after {(time.time() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
