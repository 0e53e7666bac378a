"""The whole method in small: LLDS for GRPO in agent search, on a laptop.

Paper: arXiv 2512.04220, sections on LLDS and on Search-R1 style training.
Command: python -m lld_jax.main --config=configs/tiny.py --workdir=runs/tiny
Plain GRPO: the same with --config=configs/tiny.py:llds=0

A small Qwen2 policy, warm-started to write the tags but not to search well, asks an
encyclopaedia of invented names, so that no answer can be known without a search. It
goes the way of the big runs: the policy is a Hugging Face folder, the corpus has the
rows of wiki-18, the questions come through a TFDS builder. The world, its index and
its questions are made below `data_dir` on the first run.

Expected: 40 steps in two to three minutes on 2 CPU cores and 2 GiB; exact match on
the 400 validation questions rises from .225 to .61 greedy and from .13 to .52 sampled,
and a two-hop question takes 2 searches.
"""

from pathlib import Path

from ml_collections import ConfigDict

import lld_jax
from configs import common


def get_config(arg: str = "") -> ConfigDict:
    config = common.get_config()
    config.steps = 40

    package = Path(lld_jax.__file__).parent
    config.model.path = str(package / "assets" / "tiny_qwen2.5")
    config.model.dtype = "float32"
    config.mesh.data = config.mesh.fsdp = config.mesh.tensor = 1

    config.world.seed = 0
    config.world.size = 600
    # tiny_world:SPLIT and the index tiny_world mean the world of the two lines above.
    config.questions.train = ("tiny_world:train",)
    config.questions.eval = (
        "tiny_world:validation_seen",
        "tiny_world:validation_unseen",
    )
    config.retrieval.index = "tiny_world"
    config.retrieval.k = 2

    config.rollout.template = "short"
    config.rollout.questions = 20
    config.rollout.group = 5
    config.rollout.slots = 100
    config.rollout.max_turns = 3
    config.rollout.max_prompt = 72
    config.rollout.max_action = 32
    config.rollout.max_observation = 80
    config.rollout.max_tokens = 320

    config.llds.normalizer = "all"

    config.optim.lr = 1.5e-4
    config.optim.warmup = 5
    config.optim.updates = 4
    config.optim.micro_rows = 5

    config.eval.every = 20
    config.eval.max_turns = 3
    config.eval.limit = 200
    config.checkpoint.every = 20
    return common.apply_arg(config, arg)
