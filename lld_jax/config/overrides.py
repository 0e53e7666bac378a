"""Config files and the command line: `--config=FILE:ARG --config.FIELD=VALUE`."""

import ast
import hashlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from lld_jax.config.fields import FIELDS, ConfigError, check_field, near_miss


def set_field(config: ConfigDict, field: str, text: str) -> Any:
    """Sets `field` from text as typed on a command line and returns its new value.

    A whole number may be written 1e3; a tuple `a,b`; `None` for a text or a tuple
    means unset, that is empty.

    Raises ConfigError for an unknown field, a wrong type or an illegal value.
    """
    value = _parse(field, text)
    *groups, last = field.split(".")
    node = config
    for group in groups:
        node = node[group]
    with node.unlocked():
        node[last] = value
    return value


def load(spec: str) -> ConfigDict:
    """Runs `get_config` of a config file: `configs/tiny.py` or `file.py:argument`.

    Raises ConfigError if the file is missing or the argument is not understood.
    """
    path, _, arg = spec.partition(":")
    file = Path(path)
    if not file.is_file():
        near = sorted(p.as_posix() for p in file.parent.glob("*.py"))
        hint = near_miss(path, near) or (
            f"; there are {', '.join(near)}" if near else ""
        )
        raise ConfigError(f"config: there is no file {path!r}{hint}")
    root = str(file.absolute().parent.parent)
    if root not in sys.path:  # for `from configs import common`, from any folder
        sys.path.append(root)
    spec_of_file = importlib.util.spec_from_file_location("_lld_jax_config", file)
    module = importlib.util.module_from_spec(spec_of_file)
    spec_of_file.loader.exec_module(module)
    config = module.get_config(arg) if arg else module.get_config()
    return config.lock()


def clean_argv(argv: Sequence[str], flag: str = "config") -> list[str]:
    """Checks `--config=FILE` and `--config.FIELD=VALUE` before absl parses them.

    Returns argv with the values written as `ml_collections.config_flags` reads them:
    it takes `None` for the text "None", `a,b` for one item, refuses 1e3 for a whole
    number without a name, and answers an unknown field with a bare AttributeError.

    Raises ConfigError as `load` and `set_field` do.
    """
    pattern = re.compile(rf"--?{re.escape(flag)}(\.[^=]*)?(?:=(.*))?", re.DOTALL)
    cleaned, config, rest = [], None, list(argv)
    while rest:
        word = rest.pop(0)
        match = pattern.fullmatch(word)
        if word == "--" or match is None:
            cleaned += [word, *rest] if word == "--" else [word]
            rest = [] if word == "--" else rest
            continue
        field, text = match.groups()
        if text is None:
            if not rest:
                raise ConfigError(f"{word}: a value is missing, write {word}=VALUE")
            text = rest.pop(0)
        if field is None:
            config = load(text)
            cleaned.append(f"--{flag}={text}")
            continue
        if config is None:
            raise ConfigError(f"{word}: --{flag}=FILE must stand before it")
        value = set_field(config, field[1:], text)
        text = repr(value) if isinstance(value, tuple | float) else str(value)
        cleaned.append(f"--{flag}{field}={text}")
    return cleaned


def workdir_name(spec: str, overrides: Mapping[str, Any]) -> str:
    """The default work folder: `runs/<config>[-<argument and overrides>]`.

    Args:
      spec: the value of `--config`: a file and perhaps `:argument`.
      overrides: field -> value of the `--config.FIELD` flags; their order is no
        matter. Names that grow too long end in a hash instead.
    """
    path, _, arg = spec.partition(":")
    parts = [arg] if arg else []
    parts += [f"{field}={_brief(v)}" for field, v in sorted(overrides.items())]
    name = "-".join([Path(path).stem, ",".join(parts)] if parts else [Path(path).stem])
    safe = re.sub(r"[^A-Za-z0-9._=,+-]", "_", name)
    if len(safe) > 120:
        safe = f"{safe[:110]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"runs/{safe}"


def _brief(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _parse(field: str, text: str) -> Any:
    check_field(field)
    kind = FIELDS[field].type
    unset = text == "None"  # "none" is a value of some fields
    if kind is str:
        value = "" if unset else text
    elif kind is tuple:
        value = () if unset else _parse_tuple(text)
    elif kind is bool:
        value = {"true": True, "false": False}.get(text.lower(), text)
    else:
        try:
            value = float(text)
            if kind is int:
                value = int(text) if re.fullmatch(r"[+-]?\d+", text) else value
                value = int(value) if value == int(value) else value
        except (ValueError, OverflowError):
            value = text
    check_field(field, value)
    return value


def _parse_tuple(text: str) -> Any:
    if text.lstrip()[:1] in ("(", "["):
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    return tuple(item.strip() for item in text.split(",") if item.strip())
