"""Data flows one way: a module imports only from strictly lower floors."""

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

PACKAGE = ROOT / "lld_jax"

FLOORS = {
    "losses": 0,
    "search": 0,
    "stop": 0,
    "rewards": 0,
    "world": 0,
    "parallel": 0,
    "config": 0,
    "packing": 0,
    "host": 0,
    "attention": 0,
    "cached": 1,
    "logprobs": 1,
    "encoder": 1,
    "codec": 1,
    "overrides": 1,
    "signals": 1,
    "phases": 0,
    "preemption": 0,
    "nthr": 0,
    "guard": 1,
    "exchange": 1,
    "cluster": 1,
    "diagnostics": 2,
    "environment": 1,
    "questions": 1,
    "datasets": 1,
    "kernels": 1,
    "model": 3,
    "sizes": 4,
    "plan": 4,
    "retrieval": 2,
    "sampling": 2,
    "calculator": 2,
    "checkpoint": 2,
    "decoding": 4,
    "hf": 4,
    "batch": 1,
    "workdir": 2,
    "metrics": 2,
    "storage": 1,
    "ask": 2,
    "schedule": 5,
    "policy": 5,
    "rollout": 6,
    "agent": 7,
    "evaluate": 8,
    "update": 8,
    "report": 8,
    "probes": 9,
    "train": 10,
    "main": 11,
}
# Libraries that only these modules may import.
ONLY_IN = {
    "flax": {"model", "encoder", "parallel"},
    "scann": {"retrieval"},
    "orbax": {"checkpoint", "hf"},
}


def _module(path: Path) -> str:
    """The name in the table: a subpackage stands there as one module."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _sources() -> dict[Path, str]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {p: _module(p) for p in paths if p != PACKAGE / "__init__.py"}


def _imports(source: str, package: str = "lld_jax") -> set[str]:
    """Dotted names a source imports anywhere, also inside functions.

    `from a import b` gives `a.b`: b may be a module. `package` is the one the file
    lies in, for relative imports.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join(parts + ([base] if base else []))
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def _imports_of(path: Path) -> set[str]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return _imports(path.read_text(), package)


def _floor_errors(module: str, imports: set[str]) -> list[str]:
    errors = []
    for name in sorted(imports):
        root, *rest = name.split(".")
        if root != "lld_jax" or rest[:1] == [module]:
            continue  # files of one subpackage may import each other
        # `from lld_jax import llds_loss` is losses by its other name.
        target = rest[0] if rest and rest[0] in FLOORS else "losses"
        if FLOORS[target] >= FLOORS[module]:
            errors.append(
                f"{module} (floor {FLOORS[module]}) imports {target} "
                f"(floor {FLOORS[target]})"
            )
    return errors


def test_the_check_itself_sees_every_form_of_import():
    source = (
        "import lld_jax.train\nfrom lld_jax import model as m, rollout\n"
        "def f():\n    from . import losses\n    from .hf import read\n"
        "    import flax.linen as nn\n"
    )
    assert _imports(source) == {
        "lld_jax.train",
        "lld_jax.model",
        "lld_jax.rollout",
        "lld_jax.losses",
        "lld_jax.hf.read",
        "flax.linen",
    }
    assert _imports("from ..losses import x", "lld_jax.retrieval") == {
        "lld_jax.losses.x"
    }
    errors = _floor_errors("model", {"lld_jax.model", "lld_jax.losses.x"})
    assert errors == []
    assert len(_floor_errors("hf", {"lld_jax.decoding.x", "lld_jax.main"})) == 2


@pytest.mark.parametrize(("path", "module"), _sources().items(), ids=str)
def test_a_module_imports_only_from_lower_floors(path, module):
    assert module in FLOORS, f"give {module} a floor in the table above"
    assert _floor_errors(module, _imports_of(path)) == []


def test_libraries_stay_where_they_belong():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, module in _sources().items()
        for name in sorted(_imports_of(path))
        if module not in ONLY_IN.get(name.partition(".")[0], {module})
    ]
    assert wrong == []


def test_the_paper_is_in_one_file_that_needs_jax_alone():
    roots = {n.partition(".")[0] for n in _imports_of(PACKAGE / "losses.py")}
    assert roots - sys.stdlib_module_names == {"jax"}


def test_files_are_short():
    lines = {p: len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")}
    assert {p.name: n for p, n in lines.items() if n > 500} == {}
    assert statistics.median(lines.values()) < 180, sorted(lines.values())


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, lld_jax; heavy = {'jax', 'flax', 'numpy', 'orbax', 'scann'};"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
