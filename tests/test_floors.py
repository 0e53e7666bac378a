"""The house: rooms import from lower floors, files of a room without a circle."""

import ast
import statistics
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest
from paths import ROOT

PACKAGE = ROOT / "lld_jax"

# A room is a folder of the package, or a file on the top floor.
FLOORS = {
    "losses": 0,
    "protocol": 0,
    "data": 0,
    "config": 0,
    "retrieval": 1,
    "parallel": 1,
    "run": 1,
    "diagnosis": 1,
    "model": 2,
    "plan": 3,
    "rollout": 3,
    "training": 4,
    "agent": 5,
    "evaluate": 6,
    "train": 7,
    "main": 8,
}
# Libraries that only these rooms, or files of a room, may import.
ONLY_IN = {
    "flax": {"model.qwen2", "parallel.mesh", "retrieval.encoders"},
    "scann": {"retrieval"},
    "orbax": {"run.checkpoint", "model.hf"},
}
# Text, ids and plain data: these rooms do without an array on a device.
NO_JAX = {"protocol", "data", "config"}


def _module(path) -> str:
    """`model.hf` of lld_jax/model/hf.py, `model` of its __init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _sources() -> dict[str, str]:
    """Module -> source, of all but `lld_jax/__init__.py`."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {_module(p): p.read_text() for p in paths if _module(p)}


SOURCES = _sources()
ROOMS = sorted({name.partition(".")[0] for name in SOURCES})


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


def _imports_of(module: str) -> set[str]:
    room = module.partition(".")[0]
    return _imports(SOURCES[module], f"lld_jax.{room}")


def _floor_errors(room: str, imports: set[str]) -> list[str]:
    errors = []
    for name in sorted(imports):
        root, *rest = name.split(".")
        if root != "lld_jax" or rest[:1] == [room]:
            continue  # files of one room: the next test
        # `from lld_jax import llds_loss` is losses by its other name.
        target = rest[0] if rest and rest[0] in FLOORS else "losses"
        if FLOORS[target] >= FLOORS[room]:
            errors.append(
                f"{room} (floor {FLOORS[room]}) imports {target} "
                f"(floor {FLOORS[target]})"
            )
    return errors


def _files_of(room: str, imports: set[str]) -> set[str]:
    """The files of its own room that a file imports; the room itself is `room`."""
    own = {name.removeprefix("lld_jax.") for name in imports}
    own = {name for name in own if name.split(".")[0] == room}
    return {
        ".".join(name.split(".")[:2])
        if ".".join(name.split(".")[:2]) in SOURCES
        else room
        for name in own
    }


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
    assert _floor_errors("model", {"lld_jax.model", "lld_jax.losses.x"}) == []
    wrong = {"lld_jax.rollout.decoding.x", "lld_jax.main", "lld_jax.model.hf"}
    assert len(_floor_errors("model", wrong)) == 2
    assert len(_floor_errors("run", {"lld_jax.parallel.exchange"})) == 1  # one floor
    found = {"lld_jax.model.hf.load", "lld_jax.model.ModelConfig", "lld_jax.config"}
    assert _files_of("model", found) == {"model.hf", "model"}


def test_every_room_has_a_floor():
    assert set(ROOMS) == set(FLOORS)


@pytest.mark.parametrize("module", SOURCES)
def test_a_room_imports_only_from_lower_floors(module):
    assert _floor_errors(module.partition(".")[0], _imports_of(module)) == []


@pytest.mark.parametrize("room", ROOMS)
def test_files_of_a_room_import_each_other_without_a_circle(room):
    """The room's own `__init__` stands above its files: none of them imports it."""
    names = [name for name in SOURCES if name.partition(".")[0] == room]
    graph = {name: _files_of(room, _imports_of(name)) for name in names}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle in {room}: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("room", [r for r in ROOMS if (PACKAGE / r).is_dir()])
def test_a_room_says_what_lives_in_it_and_what_it_may_import(room):
    assert "import" in ast.get_docstring(ast.parse(SOURCES[room])).lower()
    lines = ast.get_docstring(ast.parse(SOURCES[room])).splitlines()
    assert 3 <= len(lines) <= 6


def test_libraries_stay_where_they_belong():
    wrong = [
        f"{module} imports {name}"
        for module in SOURCES
        for name in sorted(_imports_of(module))
        if (legal := ONLY_IN.get(name.partition(".")[0]))
        and not {module, module.partition(".")[0]} & legal
    ]
    assert wrong == []


def test_rooms_of_plain_data_do_without_jax():
    wrong = [
        f"{module} imports {name}"
        for module in SOURCES
        if module.partition(".")[0] in NO_JAX
        for name in sorted(_imports_of(module))
        if name.partition(".")[0] in {"jax", "jaxlib", "flax", "optax"}
    ]
    assert wrong == []


def test_the_paper_is_in_one_file_that_needs_jax_alone():
    roots = {n.partition(".")[0] for n in _imports(SOURCES["losses"])}
    assert roots - sys.stdlib_module_names == {"jax"}


def test_files_are_short():
    folders = (PACKAGE, ROOT / "experiments", ROOT / "benchmarks")
    lines = {
        p: len(p.read_text().splitlines()) for f in folders for p in f.rglob("*.py")
    }
    paper = PACKAGE / "losses.py"
    long = {str(p): n for p, n in lines.items() if n > 400 and p != paper}
    assert long == {} and lines[paper] <= 500
    own = [n for p, n in lines.items() if PACKAGE in p.parents]
    assert statistics.median(own) < 180, sorted(own)


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
