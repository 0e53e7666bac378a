"""A small policy that half knows the protocol, its questions and its config.

The policy is made by hand, not trained: each token prefers a few successors, strongly
enough that sampled actions are often well-formed searches and answers, and weakly
enough that they often are not. Layers have weights that matter, so a token also
depends on everything before it. Gold answers are words that the policy likes to say:
groups with right and wrong answers come by themselves.
"""

import json
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict
from paths import ROOT

from experiments.warm_start import make
from experiments.warm_start import tokenizer as bpe
from lld_jax import config as config_lib
from lld_jax import model, parallel
from lld_jax.config import overrides
from lld_jax.data import world
from lld_jax.model import hf
from lld_jax.protocol.search import Codec

VOCAB = 640  # ids of the tokenizer; the model has 8 rows more, never to be sampled
CONFIG = model.ModelConfig(
    vocab=VOCAB + 8,
    width=32,
    mlp=64,
    layers=2,
    kv_heads=2,
    group=2,
    head_dim=8,
    rope_theta=10_000.0,
    rms_eps=1e-6,
    tied=False,
)
WORDS = (" the", " of", " in", " is")
GOLD = ("of", "in", "of the")  # "the", an article, never scores


def one_device() -> parallel.Layout:
    """The training layout on the first device alone."""
    return parallel.train_layout(parallel.make_mesh(1, 1, 1, jax.devices()[:1]))


def serving_device() -> parallel.Layout:
    """The rollout layout on the first device alone."""
    return parallel.rollout_layout(one_device().mesh)


def make_params(codec: Codec, config: model.ModelConfig = CONFIG, seed: int = 0):
    """Parameters as numpy arrays; see the head of the file."""
    rng = np.random.default_rng(seed)

    def normal(scale, shape):
        return rng.normal(0, scale, shape).astype(np.float32)

    params = jax.tree.map(
        lambda x: normal(0.1, x.shape), model.abstract_params(config, one_device())
    )
    for path, x in jax.tree.leaves_with_path(params):
        if path[-1].key == "scale":
            x += 1
    embedding = normal(1, (config.vocab, config.width))
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)

    def ids(*texts: str) -> list[int]:
        return [codec.token_bytes.index(text.encode()) for text in texts]

    head = normal(0.02, (config.vocab, config.width))
    opens, ends = ids("<search", "<answer"), ids("search", "answer")
    (close,), words = ids(" </"), ids(*WORDS)
    starts = ids("\n", ">\n\n")
    chain = [
        (starts, opens),
        (opens, ids(">")),
        (ids(">"), words),
        (words, [close, words[0]]),
        ([close], ends),
        (ends, ids(">", ">\n\n")),
    ]
    for before, after in chain:
        for token in after:
            head[token] += 1.7 * embedding[before].sum(0)
    params["embedding"] = embedding * config.width**0.5
    params["head"] = head
    return params


def make_folder(folder: Path) -> Path:
    """A Hugging Face folder with tokenizer and weights."""
    source = folder / "source"
    source.mkdir(parents=True)
    tokenizer = bpe.train(make.texts([world.generate(0, 40)]), VOCAB)
    bpe.write(tokenizer, source)
    make.write_configs(source, tokenizer.get_vocab())
    hf.save(folder / "policy", make_params(hf.load_codec(source)), CONFIG, source)
    return folder / "policy"


def write_questions(path: Path, count: int, split: str = "train") -> Path:
    """Questions of a small world whose gold answers are the policy's words."""
    rows = world.generate(0, 40).questions[split][:count]
    lines = [
        {"id": q.id, "question": q.question, "golden_answers": GOLD, "hops": q.hops}
        for q in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_config(root: Path, policy: Path) -> ConfigDict:
    """A run of three steps over questions below `root`, some seconds long."""
    config = overrides.load(str(ROOT / "configs" / "tiny.py"))
    config.steps = 3
    config.data_dir = str(root / "data")
    config.model.path = str(policy)
    config.world.size = 40
    config.questions.train = (str(write_questions(root / "train.jsonl", 20)),)
    config.questions.eval = (
        str(write_questions(root / "seen.jsonl", 8, "validation_seen")),
        "tiny_world:validation_unseen",
    )
    config.rollout.questions = 4
    config.rollout.group = 3
    config.rollout.slots = 10
    config.rollout.max_turns = 2
    config.rollout.max_prompt = 64
    config.rollout.max_action = 10
    config.rollout.max_observation = 40
    config.rollout.max_tokens = 160
    config.optim.lr = 0.01
    config.optim.warmup = 2
    config.optim.updates = 2
    config.optim.micro_rows = 3
    config.eval.every = 2
    config.eval.limit = 4
    config.eval.max_turns = 2
    config.checkpoint.every = 1
    return config


def write_config_file(path: Path, config: ConfigDict) -> Path:
    """A config file for `--config` that gives `config`."""
    path.with_suffix(".json").write_text(config_lib.to_json(config))
    path.write_text(
        "from pathlib import Path\n\n"
        "from lld_jax import config\n\n\n"
        "def get_config():\n"
        "    text = Path(__file__).with_suffix('.json').read_text()\n"
        "    return config.from_json(text)\n"
    )
    return path
