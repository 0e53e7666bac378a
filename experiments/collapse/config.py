"""The collapse in small: one-hop questions, short rows, many updates a batch.

Paper: arXiv 2512.04220. Everything is as in `configs/tiny.py`, but for what is below:
a start with a wrong habit (`start.py`), questions whose answer is a name on one page,
one search, one passage, rows of 104 tokens; 5 updates a rollout batch, of ten
trajectories each, in steps so large that plain GRPO does not survive them. No entropy
bonus, as in the paper's text: Adam makes full steps of it where rewards are all 0.
Command: python -m experiments.collapse.run --settings=grpo,llds --seeds=0,1,2,3,4
One run: python -m lld_jax.main --config=experiments/collapse/config.py:grpo
(once the first command has written the questions).
"""

from ml_collections import ConfigDict

from configs import tiny
from lld_jax.config import ConfigError, overrides

# What a setting changes. All but the `llds` ones are plain GRPO with something else.
PLAIN = {"llds.coef": 0.0}
SLOWER = {"optim.lr": 4e-4, "steps": 200, "eval.every": 200}
LONG = {"steps": 300, "eval.every": 300}
SETTINGS: dict[str, dict[str, object]] = {
    "grpo": PLAIN,
    "llds": {},
    # Rivals at equal compute: a smaller step, a shorter leash, a wider clip.
    "half_lr": PLAIN | {"optim.lr": 2.5e-4},
    "quarter_lr": PLAIN | {"optim.lr": 1.25e-4},
    "kl10": PLAIN | {"loss.kl": 0.01},
    "kl100": PLAIN | {"loss.kl": 0.1},
    "one_update": PLAIN | {"optim.updates": 1},
    "two_updates": PLAIN | {"optim.updates": 2, "optim.micro_rows": 25},
    "ten_updates": PLAIN | {"optim.updates": 10, "optim.micro_rows": 5},
    "clip_higher": PLAIN | {"loss.clip_high": 0.28},
    "nll": PLAIN | {"loss.nll": 0.1},
    "nthr": PLAIN | {"loss.negatives": "nthr"},
    "gspo": PLAIN | {"loss.policy": "gspo"},
    # The detector decides: earlier weights and half the rate when it warns.
    "roll_back": PLAIN
    | {
        "diagnostics.action": "roll_back",
        "checkpoint.every": 10,
        "checkpoint.keep": 4,
    },
    # Between the two rates.
    "slower": PLAIN | SLOWER,
    "llds_slower": SLOWER,
    "llds_slower_1": SLOWER | {"llds.coef": 1.0},
    # Half the rate, for longer.
    "half_lr_long": PLAIN | {"optim.lr": 2.5e-4} | LONG,
    "llds_half_lr_long": {"optim.lr": 2.5e-4} | LONG,
    # Ablations.
    "llds_token": {"llds.gate": "token"},
    "llds_response": {"llds.gate": "response"},
    "llds_anchor": {"llds.anchor": 5},
    "llds_anchor_1": {"llds.anchor": 5, "llds.coef": 1.0},
    "llds_positive": {"llds.preserve": "positive"},
    "llds_positive_1": {"llds.preserve": "positive", "llds.coef": 1.0},
    "llds_half_lr": {"optim.lr": 2.5e-4},
    "llds_one_update": {"optim.updates": 1},
    "llds_two_updates": {"optim.updates": 2, "optim.micro_rows": 25},
    "llds_ten_updates": {"optim.updates": 10, "optim.micro_rows": 5},
    "llds_gspo": {"loss.policy": "gspo"},
    "llds_ma_paper": {"llds.answer": "paper"},
    "llds_ma_authors": {"llds.answer": "authors"},
    "llds_ma_zero": {"llds.answer": "constant", "llds.answer_weight": 0.0},
} | {
    f"llds_{normalizer}_{coef:g}": {"llds.normalizer": normalizer, "llds.coef": coef}
    for normalizer in ("preserved", "all")
    for coef in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
}


def get_config(arg: str = "llds") -> ConfigDict:
    """The config of a setting, the key of SETTINGS that `arg` names."""
    if arg not in SETTINGS:
        raise ConfigError(f"setting {arg!r}: legal are {', '.join(SETTINGS)}")
    config = tiny.get_config()
    config.steps = 120
    config.model.path = "data/collapse/start"
    config.questions.train = ("data/collapse/train.jsonl",)
    config.questions.eval = ("data/collapse/held_out.jsonl",)
    config.retrieval.k = 1
    config.rollout.questions = 10
    config.rollout.slots = 50
    config.rollout.max_turns = 1
    config.rollout.max_prompt = 60
    config.rollout.max_action = 16
    config.rollout.max_observation = 40
    config.rollout.max_tokens = 104
    config.loss.entropy = 0.0
    config.llds.normalizer = "preserved"
    config.optim.lr = 5e-4
    config.optim.warmup = 5
    config.optim.updates = 5
    config.optim.micro_rows = 10
    config.optim.packing = False  # as the runs in `raw/` were made
    config.eval.every = 120
    config.eval.max_turns = 1
    config.eval.limit = 200
    config.checkpoint.every = 60
    config.diagnostics.every = 10
    config.diagnostics.action = "none"
    for field, value in SETTINGS[arg].items():
        overrides.set_field(config, field, str(value))
    return config
