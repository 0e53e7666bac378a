"""The config tree: its fields, what they may be, and checks of the whole.

Everything here runs before a device is touched or a file of weights is read, so a
mistake in a config costs a second, not an hour.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict


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
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Dotted field name -> value, sorted by name."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= {f"{name}.{k}": v for k, v in flatten(value).items()}
        else:
            flat[name] = value
    return dict(sorted(flat.items()))


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


def check(
    config: ConfigDict,
    *,
    devices: int | None = None,
    processes: int = 1,
    files: bool = True,
) -> None:
    """Raises ConfigError for whatever can be known to be wrong without a device.

    Fields and their values, budgets that can't fit, batches that don't divide, `files`
    that are missing and, if `devices` (of all `processes`) is given, a mesh that does
    not use each device once or splits a process's devices otherwise than along `data`.
    """
    flat = flatten(config)
    for field in flat:
        check_field(field)
    for field, rule in FIELDS.items():
        if field not in flat:
            raise ConfigError(f"{field}: missing; legal is {rule.legal}")
        check_field(field, flat[field])
    _check_budgets(config)
    _check_batches(config)
    if devices is not None:
        _check_mesh(config, devices, processes)
    if files:
        _check_files(config)


def check_model(config: ConfigDict, *, kv_heads: int) -> None:
    """Raises ConfigError if the kv heads can't be split over `mesh.tensor`."""
    if kv_heads % config.mesh.tensor:
        legal = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
        raise ConfigError(
            f"mesh.tensor: {config.mesh.tensor} does not divide the model's {kv_heads} "
            f"kv heads; legal are {', '.join(map(str, legal))}"
        )


def diff(a: ConfigDict, b: ConfigDict) -> list[str]:
    """The fields in which two configs differ, sorted; one lacking a field differs."""
    a, b, none = flatten(a), flatten(b), object()
    return sorted(f for f in a.keys() | b.keys() if a.get(f, none) != b.get(f, none))


def check_platform(config: ConfigDict, platform: str) -> None:
    """Raises ConfigError for an attention kernel that `platform` does not have.

    `platform` is 'cpu', 'tpu' or 'gpu'.
    """
    kind, dtype, tokens = (
        config.model.attention,
        config.model.dtype,
        config.rollout.max_tokens,
    )
    where = {"splash": "tpu", "cudnn": "gpu"}
    if where.get(kind, platform) != platform:
        legal = ["'auto'", "'blocked'"]
        legal += [f"'{name}'" for name, has in where.items() if has == platform]
        raise ConfigError(
            f"model.attention: '{kind}' runs on a {where[kind]}, but the devices are "
            f"of the platform {platform!r}; legal there are {', '.join(legal)}"
        )
    if kind == "cudnn" and dtype != "bfloat16":
        raise ConfigError(
            f"model.attention: 'cudnn' computes in bfloat16, but model.dtype is "
            f"{dtype!r}; legal with that are 'auto' and 'blocked'"
        )
    if kind == "splash" and tokens % 128:
        raise ConfigError(
            f"rollout.max_tokens: {tokens} is no multiple of 128, as model.attention "
            "'splash' needs; legal is also model.attention 'blocked'"
        )


def check_resume(saved: ConfigDict, config: ConfigDict) -> None:
    """Raises ConfigError that lists the fields if a run's config is another one.

    The mesh may differ: a run goes on with another number of devices. So may what is
    done about a collapse.
    """
    differ = [f for f in diff(saved, config) if f != "diagnostics.action"]
    fields = [f for f in differ if not f.startswith("mesh.")]
    if fields:
        a, b = flatten(saved), flatten(config)
        changes = [f"{f}: {a.get(f)!r} there, {b.get(f)!r} here" for f in fields]
        raise ConfigError(
            "workdir: it holds a run with another config; choose another folder or "
            "make equal " + "; ".join(changes)
        )


def to_json(config: ConfigDict) -> str:
    """The config as indented JSON with sorted keys; `from_json` reads it back."""
    return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> ConfigDict:
    """The config that `to_json` wrote, equal and locked."""

    def tuples(value):
        if isinstance(value, dict):
            return {k: tuples(v) for k, v in value.items()}
        return tuple(value) if isinstance(value, list) else value

    return ConfigDict(tuples(json.loads(text))).lock()


def _unknown(field: str) -> str:
    inside = [f for f in FIELDS if f.startswith(field + ".")]
    if inside:
        return f"{field}: a group, not a field; it holds {', '.join(inside)}"
    last = field.rpartition(".")[2]
    same = [f for f in FIELDS if f.rpartition(".")[2] == last]
    hint = f"; did you mean {' or '.join(same)}?" if same else near_miss(field, FIELDS)
    return f"{field}: no such field{hint or '; legal are ' + ', '.join(FIELDS)}"


def _check_budgets(config: ConfigDict) -> None:
    r = config.rollout
    if r.max_prompt + r.max_action > r.max_tokens:
        raise ConfigError(
            f"rollout.max_tokens: {r.max_tokens} can't hold a prompt and one action; "
            f"it must be at least rollout.max_prompt {r.max_prompt} + "
            f"rollout.max_action {r.max_action} = {r.max_prompt + r.max_action}"
        )


def _check_batches(config: ConfigDict) -> None:
    rows = config.rollout.questions * config.rollout.group
    updates, micro = config.optim.updates, config.optim.micro_rows
    if rows % updates:
        raise ConfigError(
            f"optim.updates: {updates} does not divide the batch of {rows} rows "
            f"(rollout.questions {config.rollout.questions} x rollout.group "
            f"{config.rollout.group}); legal are {_divisors(rows)}"
        )
    if rows // updates % micro:
        raise ConfigError(
            f"optim.micro_rows: {micro} does not divide the {rows // updates} rows of "
            f"an update; legal are {_divisors(rows // updates)}"
        )
    group = config.rollout.group
    if config.loss.negatives == "nthr" and micro % group:
        raise ConfigError(
            f"optim.micro_rows: {micro} must be a multiple of rollout.group {group} "
            "where loss.negatives is 'nthr', which looks at whole groups"
        )
    if config.model.attention == "cudnn" and config.optim.packing:
        raise ConfigError(
            "model.attention: 'cudnn' looks at no segments; legal with "
            "optim.packing=True are 'auto', 'blocked' and 'splash', and 'cudnn' with "
            "optim.packing=False"
        )
    if config.loss.negatives == "nthr" and config.optim.packing:
        raise ConfigError(
            "loss.negatives: 'nthr' looks at whole groups, a row for each trajectory; "
            "legal with optim.packing=True is 'all', and 'nthr' with "
            "optim.packing=False"
        )
    mesh_size = config.mesh.data * config.mesh.fsdp * config.mesh.tensor
    if micro % mesh_size:
        raise ConfigError(
            f"optim.micro_rows: {micro} must be a multiple of the {mesh_size} devices "
            "of the mesh: each takes the same number of rows"
        )
    hosts = config.mesh.data  # each draws whole groups
    if config.rollout.questions % hosts:
        raise ConfigError(
            f"rollout.questions: {config.rollout.questions} must be a multiple of "
            f"mesh.data {hosts}"
        )
    shards = hosts * config.mesh.fsdp
    if config.rollout.slots % shards:
        raise ConfigError(
            f"rollout.slots: {config.rollout.slots} must be a multiple of mesh.data "
            f"{hosts} x mesh.fsdp {config.mesh.fsdp} = {shards}"
        )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def _check_mesh(config: ConfigDict, devices: int, processes: int) -> None:
    m = config.mesh
    if m.data * m.fsdp * m.tensor != devices:
        raise ConfigError(
            f"mesh: data {m.data} x fsdp {m.fsdp} x tensor {m.tensor} = "
            f"{m.data * m.fsdp * m.tensor}, but there are {devices} devices; the "
            "product must be their number"
        )
    if m.data % processes:
        legal = [n for n in range(processes, devices + 1, processes) if not devices % n]
        raise ConfigError(
            f"mesh.data: {m.data} must be a multiple of the {processes} processes, "
            "each of which samples on its own devices; legal are "
            + ", ".join(map(str, legal))
        )


def _check_files(config: ConfigDict) -> None:
    model = Path(config.model.path).expanduser()
    if model.exists():
        if not (model / "config.json").is_file():
            raise ConfigError(
                f"model.path: {config.model.path!r} is not a Hugging Face folder; it "
                "must hold a config.json"
            )
    elif not _HUB_ID.fullmatch(config.model.path):
        raise ConfigError(
            f"model.path: {config.model.path!r} does not exist; legal is a Hugging "
            "Face folder or a hub name such as 'Qwen/Qwen2.5-3B'"
        )
    for field in ("questions.train", "questions.eval", "eval.sets"):
        for source in flatten(config)[field]:
            is_file = source.endswith((".jsonl", ".jsonl.gz"))
            if is_file and not Path(source).expanduser().is_file():
                raise ConfigError(f"{field}: there is no file {source!r}")
            if not is_file and ":" not in source:
                raise ConfigError(
                    f"{field}: {source!r} is no question source; legal are a .jsonl "
                    "or .jsonl.gz file and a TFDS name 'name[/config]:split'"
                )
    if not set(config.eval.sets) <= set(config.questions.eval):
        raise ConfigError(
            f"eval.sets: {config.eval.sets!r} must be taken from questions.eval "
            f"{config.questions.eval!r}"
        )
    index, url = config.retrieval.index, config.retrieval.url
    if bool(index) == bool(url):
        raise ConfigError(
            f"retrieval.index: {index!r} and retrieval.url: {url!r}; exactly one of "
            "the two must be set"
        )
    # The synthetic world is made at the start of a run, with corpus and questions.
    if index and not config.world.size:
        places = [Path(index).expanduser(), Path(config.data_dir).expanduser() / index]
        if not any(place.exists() for place in places):
            raise ConfigError(
                f"retrieval.index: {index!r} is neither at {str(places[0])!r} nor at "
                f"{str(places[1])!r}"
            )
