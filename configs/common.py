"""Every field of a run's config with the paper's settings (arXiv 2512.04220).

The other files in this folder start from `get_config()` and change what they are
about. `lld_jax/config/fields.py` says which values a field may take.
"""

from pathlib import Path

from ml_collections import ConfigDict

import lld_jax
from lld_jax.config import ConfigError, overrides

# Short names for the argument of a config file: --config=configs/tiny.py:llds=0.1
SHORT_NAMES = {
    "llds": "llds.coef",
    "gate": "llds.gate",
    "normalizer": "llds.normalizer",
    "answer": "llds.answer",
    "policy": "loss.policy",
    "kl": "loss.kl",
    "entropy": "loss.entropy",
    "average": "loss.average",
    "lr": "optim.lr",
    "updates": "optim.updates",
    "packing": "optim.packing",
    "micro": "optim.micro_rows",
    "slots": "rollout.slots",
    "attention": "model.attention",
    "remat": "model.remat",
    "data": "mesh.data",
    "fsdp": "mesh.fsdp",
    "tensor": "mesh.tensor",
    "steps": "steps",
    "seed": "seed",
}


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    config.steps = 1005  # rollout steps: one pass over the training questions
    config.data_dir = "data"  # prepared question sets, corpora and indexes

    config.model = model = ConfigDict()
    model.path = "Qwen/Qwen2.5-3B"  # a Hugging Face folder, or a name on the hub
    model.dtype = "bfloat16"  # of the computation; parameters and Adam are float32
    model.attention = "auto"  # of whole rows: blocked, splash (TPU), cudnn (GPU)
    model.remat = "auto"  # layers computed again: none, attention, layer

    config.mesh = mesh = ConfigDict()
    mesh.data = 1  # hosts
    mesh.fsdp = 8
    mesh.tensor = 2  # splits the kv heads while sampling: 2 in the 3B model

    config.world = world = ConfigDict()
    world.seed = 0
    world.size = 0  # entities of the synthetic encyclopaedia; 0 makes none

    # A question source is a .jsonl or .jsonl.gz file or a TFDS name:split.
    config.questions = questions = ConfigDict()
    questions.train = ("data/train_nq_hotpotqa.jsonl",)
    questions.eval = (
        "data/nq.jsonl",
        "data/triviaqa.jsonl",
        "data/popqa.jsonl",
        "data/hotpotqa.jsonl",
        "data/2wikimultihopqa.jsonl",
        "data/musique.jsonl",
        "data/bamboogle.jsonl",
    )

    # Exactly one of index and url is set.
    config.retrieval = retrieval = ConfigDict()
    retrieval.index = "wiki18"  # a folder, as it stands or below data_dir
    retrieval.url = ""  # a server that speaks Search-R1's /retrieve
    retrieval.k = 3
    retrieval.cache = 0  # answers kept for queries that come again
    retrieval.timeout = 60.0  # seconds; a search unanswered by then ends its trajectory

    config.rollout = rollout = ConfigDict()
    rollout.template = "search"
    rollout.questions = 512
    rollout.group = 5
    rollout.slots = 512  # trajectories in flight, of all hosts together
    rollout.temperature = 1.0
    rollout.top_p = 1.0  # nothing else is legal: the trainer scores all tokens
    rollout.top_k = 0
    rollout.max_turns = 3  # searches that get a reply; one last action follows
    rollout.max_prompt = 2048  # this and the next three count tokens
    rollout.max_action = 500
    rollout.max_observation = 500
    rollout.max_tokens = 4096  # of a trajectory: of a slot and of a row

    config.loss = loss = ConfigDict()
    loss.policy = "grpo"
    loss.clip_low = 0.2
    loss.clip_high = 0.2
    loss.kl = 0.001
    loss.entropy = 0.001  # in the authors' run, not in the paper's text
    loss.nll = 0.0  # coefficient of the NLL of correct trajectories; not in the paper
    loss.negatives = "all"  # 'nthr' spares tokens of wrong answers; not in the paper
    loss.average = "global"
    loss.advantage_std = "sample"

    config.llds = llds = ConfigDict()
    llds.coef = 0.2  # lambda; 0 is plain GRPO
    llds.gate = "action"
    llds.normalizer = "preserved"
    llds.preserve = "nonnegative"  # advantages; not in the paper: 'positive'
    llds.answer = "none"  # LLDS-MA: how the penalty of answer tokens is weighted
    llds.answer_weight = 0.0  # the weight where answer is 'constant'
    llds.anchor = 0  # steps between renewals of its old policy; 0: the one that sampled

    config.optim = optim = ConfigDict()
    optim.lr = 1e-6
    optim.warmup = 286  # rollout steps; the first does not move
    optim.decay = 0.01  # weight decay of AdamW
    optim.b1 = 0.9
    optim.b2 = 0.999
    optim.moment = "float32"  # of Adam's first moment; bfloat16 takes half
    optim.clip = 1.0  # of the gradient's norm
    optim.updates = 10  # per rollout batch
    optim.micro_rows = 16  # rows whose activations are held at once, of all devices
    optim.packing = True  # trajectories share rows; of `rollout.max_tokens` each
    optim.max_bad_steps = 5  # updates in a row without a finite gradient: stop

    config.eval = evaluation = ConfigDict()
    evaluation.every = 50  # steps; 0 evaluates only before and after
    evaluation.sets = ()  # those of questions.eval scored during training; () is all
    evaluation.max_turns = 4
    evaluation.top_p = 1.0  # of the sampled mode; 1 leaves nothing out
    evaluation.top_k = 0  # of the sampled mode; 0 leaves nothing out
    evaluation.limit = 0  # questions of each set; 0 takes all

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every = 50  # steps; 0 saves only the last
    checkpoint.keep = 2  # the last ones; the best evaluation is kept beside them

    config.diagnostics = diagnostics = ConfigDict()
    diagnostics.every = 10  # steps between costly ones: displacement; 0 is never
    diagnostics.action = "warn"  # none, stop, raise_lambda, roll_back: if a run decays
    return config


def qwen(model: str, *, tensor: int, coef: float = 0.2, arg: str = "") -> ConfigDict:
    """The authors' run of a Qwen2.5 model on 16 chips, four hosts of four.

    Args:
      model: its name on the hub.
      tensor: a divisor of its kv heads, which are split so while sampling.
      coef: lambda.
      arg: of the config file, see `apply_arg`.
    """
    config = get_config()
    config.model.path = model
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 4, 4 // tensor, tensor
    config.llds.coef = coef
    config.llds.normalizer = "all"  # of the code that made the published numbers
    return apply_arg(config, arg)


def gpu(config: ConfigDict) -> None:
    """The same run on one host of eight GPUs, attention by cuDNN.

    That kernel looks at no segments, so each trajectory has a row of its own.
    """
    config.mesh.data, config.mesh.fsdp = 1, 8 // config.mesh.tensor
    config.model.attention = "cudnn"
    config.optim.packing = False


def smoke(config: ConfigDict) -> None:
    """The same run in small: tiny's policy, world and lengths, two steps, one host.

    Two minutes on eight devices of any kind, also pretended ones.
    """
    config.steps = 2
    package = Path(lld_jax.__file__).parent
    config.model.path = str(package / "assets" / "tiny_qwen2.5")
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 1, 4, 2
    config.world.size = 40
    config.questions.train = ("tiny_world:train",)
    config.questions.eval = ("tiny_world:validation_unseen",)
    config.retrieval.index, config.retrieval.k = "tiny_world", 2
    config.rollout.template = "short"
    config.rollout.questions = config.rollout.slots = 16
    config.rollout.max_turns = 2
    config.rollout.max_prompt, config.rollout.max_action = 72, 24
    config.rollout.max_observation, config.rollout.max_tokens = 80, 256
    config.optim.warmup, config.optim.micro_rows = 1, 8
    config.eval.every, config.eval.limit, config.eval.max_turns = 0, 4, 2
    config.checkpoint.every = 0


_WORDS = {"gpu": gpu, "smoke": smoke}


def apply_arg(config: ConfigDict, arg: str) -> ConfigDict:
    """Applies `llds=0.1,gate=response` (see SHORT_NAMES) to a config, and returns it.

    The words `gpu` and `smoke` stand for the changes of the functions of these names.
    Later items may change what earlier ones set.

    Raises ConfigError that lists the names if one of them is unknown.
    """
    for item in filter(None, arg.split(",")):
        if item in _WORDS:
            _WORDS[item](config)
            continue
        name, equals, value = item.partition("=")
        if name not in SHORT_NAMES or not equals:
            raise ConfigError(
                f"config argument {item!r}: legal are name=value with a name of "
                + ", ".join(SHORT_NAMES)
                + f", and the words {', '.join(_WORDS)}"
                + "; other fields are set with --config.FIELD=VALUE"
            )
        overrides.set_field(config, SHORT_NAMES[name], value)
    return config
