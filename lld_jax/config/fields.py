"""The fields of a config, and the values that each may take."""

import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class ConfigError(ValueError):
    """A config can't be used; names the field, its value and what is legal."""


class Rule(NamedTuple):
    """The type of a field and the values it may take."""

    type: type
    legal: str
    holds: Callable[[Any], bool]


def _one_of(*names: str) -> Rule:
    return Rule(str, "one of " + ", ".join(map(repr, names)), lambda v: v in names)


def _int_from(low: int) -> Rule:
    return Rule(int, f"a whole number, {low} or more", lambda v: v >= low)


def _float_from(low: float) -> Rule:
    return Rule(float, f"a number, {low:g} or more", lambda v: v >= low)


_BOOL = Rule(bool, "True or False", lambda v: True)
_ABOVE_0 = Rule(float, "a number above 0", lambda v: v > 0)
_UNIT = Rule(float, "a number from 0 to 1, 1 left out", lambda v: 0 <= v < 1)
_SHARE = Rule(float, "a number from 0 to 1", lambda v: 0 <= v <= 1)
_TEXT = Rule(str, "text", lambda v: True)
_NAME = Rule(str, "text that is not empty", bool)
_SOURCES = Rule(
    tuple,
    "a tuple of text: on the command line a,b or \"('a', 'b')\"",
    lambda v: all(isinstance(x, str) and x for x in v),
)
_SOME_SOURCES = Rule(
    tuple, _SOURCES.legal + ", at least one", lambda v: bool(v) and _SOURCES.holds(v)
)

_WHOLE = "training samples what the trainer scores, all tokens; evaluation has"

FIELDS: dict[str, Rule] = {
    "seed": _int_from(0),
    "steps": _int_from(1),
    "data_dir": _NAME,
    "model.path": _NAME,
    "model.dtype": _one_of("bfloat16", "float32"),
    "model.attention": _one_of("auto", "blocked", "splash", "cudnn"),
    "model.remat": _one_of("auto", "none", "attention", "layer"),
    "mesh.data": _int_from(1),
    "mesh.fsdp": _int_from(1),
    "mesh.tensor": _int_from(1),
    "world.seed": _int_from(0),
    "world.size": _int_from(0),
    "questions.train": _SOME_SOURCES,
    "questions.eval": _SOURCES,
    "retrieval.index": _TEXT,
    "retrieval.url": _TEXT,
    "retrieval.k": _int_from(1),
    "retrieval.cache": _int_from(0),
    "retrieval.timeout": _ABOVE_0,
    "rollout.template": _NAME,
    "rollout.questions": _int_from(1),
    "rollout.group": _int_from(1),
    "rollout.slots": _int_from(1),
    "rollout.temperature": _ABOVE_0,
    "rollout.top_p": Rule(float, f"1: {_WHOLE}; eval.top_p", lambda v: v == 1),
    "rollout.top_k": Rule(int, f"0: {_WHOLE}; eval.top_k", lambda v: v == 0),
    "rollout.max_turns": _int_from(0),
    "rollout.max_prompt": _int_from(1),
    "rollout.max_action": _int_from(1),
    "rollout.max_observation": _int_from(1),
    "rollout.max_tokens": _int_from(2),
    "loss.policy": _one_of("grpo", "gspo"),
    "loss.clip_low": _UNIT,
    "loss.clip_high": _float_from(0),
    "loss.kl": _float_from(0),
    "loss.entropy": _float_from(0),
    "loss.nll": _float_from(0),
    "loss.negatives": _one_of("all", "nthr"),
    "loss.average": _one_of("global", "microbatch"),
    "loss.advantage_std": _one_of("sample", "population", "none"),
    "llds.coef": _float_from(0),
    "llds.gate": _one_of("action", "response", "token"),
    "llds.normalizer": _one_of("preserved", "all"),
    "llds.preserve": _one_of("nonnegative", "positive"),
    "llds.answer": _one_of("none", "constant", "paper", "authors"),
    "llds.answer_weight": _SHARE,
    "llds.anchor": _int_from(0),
    "optim.lr": _float_from(0),
    "optim.warmup": _int_from(0),
    "optim.decay": _float_from(0),
    "optim.b1": _UNIT,
    "optim.b2": _UNIT,
    "optim.moment": _one_of("float32", "bfloat16"),
    "optim.clip": _ABOVE_0,
    "optim.updates": _int_from(1),
    "optim.micro_rows": _int_from(1),
    "optim.packing": _BOOL,
    "optim.max_bad_steps": _int_from(1),
    "eval.every": _int_from(0),
    "eval.sets": _SOURCES,
    "eval.max_turns": _int_from(0),
    "eval.limit": _int_from(0),
    "eval.top_p": Rule(float, "a number above 0, at most 1", lambda v: 0 < v <= 1),
    "eval.top_k": _int_from(0),
    "checkpoint.every": _int_from(0),
    "checkpoint.keep": _int_from(1),
    "diagnostics.every": _int_from(0),
    "diagnostics.action": _one_of("none", "warn", "stop", "raise_lambda", "roll_back"),
}
_ABSENT = object()


def near_miss(name: str, names: Iterable[str]) -> str:
    """`; did you mean ...?` if one of `names` is close to `name`, else nothing."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def check_field(field: str, value: Any = _ABSENT) -> None:
    """Raises ConfigError if there is no such field or `value` is not legal there."""
    if field not in FIELDS:
        raise ConfigError(_unknown(field))
    rule = FIELDS[field]
    if value is _ABSENT:
        return
    kinds = (int, float) if rule.type is float else (rule.type,)  # a bool is no int
    infinite = isinstance(value, float) and not math.isfinite(value)
    if type(value) not in kinds or infinite:
        raise ConfigError(
            f"{field}: {value!r} is not of type {rule.type.__name__}; legal is "
            f"{rule.legal}"
        )
    if not rule.holds(value):
        raise ConfigError(f"{field}: {value!r} is not legal; legal is {rule.legal}")


def _unknown(field: str) -> str:
    inside = [f for f in FIELDS if f.startswith(field + ".")]
    if inside:
        return f"{field}: a group, not a field; it holds {', '.join(inside)}"
    last = field.rpartition(".")[2]
    same = [f for f in FIELDS if f.rpartition(".")[2] == last]
    hint = f"; did you mean {' or '.join(same)}?" if same else near_miss(field, FIELDS)
    return f"{field}: no such field{hint or '; legal are ' + ', '.join(FIELDS)}"
