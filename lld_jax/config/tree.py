"""A config tree as flat field names, and as JSON."""

import json
from typing import Any

from ml_collections import ConfigDict


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Dotted field name -> value, sorted by name."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= {f"{name}.{k}": v for k, v in flatten(value).items()}
        else:
            flat[name] = value
    return dict(sorted(flat.items()))


def diff(a: ConfigDict, b: ConfigDict) -> list[str]:
    """The fields in which two configs differ, sorted; one lacking a field differs."""
    a, b, none = flatten(a), flatten(b), object()
    return sorted(f for f in a.keys() | b.keys() if a.get(f, none) != b.get(f, none))


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
