"""Makes the policy that the runs start from: the tiny one, taught a wrong habit.

    python -m experiments.collapse.start --out data/collapse/start

`experiments.collapse.run` does it by itself, once, in three minutes on two cores. The
tiny policy reads names off a page well, and searches so often to begin with that there
would be little to learn before a collapse. Some updates on demonstrations that mostly
answer without a search leave the skill and take the habit. Another machine rounds in
other ways, and its weights differ in the last digits.
"""

import argparse
import random
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import lld_jax
from experiments.warm_start import make
from lld_jax.data import world
from lld_jax.model import hf

SOURCE = Path(lld_jax.__file__).parent / "assets" / "tiny_qwen2.5"
HABIT = {"right": 0.15, "guess": 0.55, "wrong_page": 0.3}
WORLDS, DEMOS, STEPS = 8, 3000, 150


def is_asked(question: world.WorldQuestion) -> bool:
    """One hop, and the answer is a name: all that the tiny policy reads off a page."""
    return question.hops == 1 and question.golden_answers[0][0].isupper()


def write(out: Path, *, worlds: int = WORLDS, steps: int = STEPS) -> None:
    """Writes the folder `out`, as `lld_jax.model.hf` reads it."""
    codec, made = hf.load_codec(SOURCE), []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(make.FIRST_SEED, make.FIRST_SEED + worlds):
            made += make.demonstrate(
                codec,
                seed,
                DEMOS,
                Path(scratch),
                asked=is_asked,
                behaviours={"good": HABIT, "one_hop": HABIT},
                k=1,
                max_prompt=60,
                max_observation=60,
                turns=2,
            )
    random.Random(0).shuffle(made)
    params = make.train(
        list(make.pack(made)),
        valid_vocab=len(codec.token_bytes),
        steps=steps,
        batch=32,
        lr=5e-4,
        context_weight=0.3,
        read_weight=4.0,
        seed=0,
        params=jax.tree.map(jnp.asarray, hf.load(SOURCE, make.CONFIG)),
    )
    hf.save(out, params, make.CONFIG, SOURCE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    write(parser.parse_args().out)
