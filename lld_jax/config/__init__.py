"""The config tree: its fields and what they may be, checks, the command line's words.

Imports nothing of the package, and no jax: a mistake in a config costs a second.
"""

from lld_jax.config.checks import check, check_model, check_platform, check_resume
from lld_jax.config.fields import FIELDS, ConfigError
from lld_jax.config.tree import diff, flatten, from_json, to_json

__all__ = [
    "FIELDS",
    "ConfigError",
    "check",
    "check_model",
    "check_platform",
    "check_resume",
    "diff",
    "flatten",
    "from_json",
    "to_json",
]
