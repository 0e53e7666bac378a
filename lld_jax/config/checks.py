"""Checks of a whole config: budgets, batches, the mesh, files, the model, a resume.

Everything here runs before a device is touched or a file of weights is read, so a
mistake in a config costs a second, not an hour.
"""

import re
from pathlib import Path

from ml_collections import ConfigDict

from lld_jax.config.fields import FIELDS, ConfigError, check_field
from lld_jax.config.tree import diff, flatten

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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
