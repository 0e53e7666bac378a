"""What several test files share; one folder of compiled programs for a whole run."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for configs and experiments

# Before jax is imported: runs with equal shapes compile once, subprocesses included.
_CACHE = tempfile.mkdtemp(prefix="lld_jax_tests_")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def pytest_unconfigure():
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(scope="session")
def policy(tmp_path_factory) -> Path:
    """The Hugging Face folder of the small policy of `tiny.py`."""
    import tiny

    return tiny.make_folder(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def config(tmp_path, policy):
    """A config of a short run with its questions below `tmp_path`."""
    import tiny

    return tiny.make_config(tmp_path, policy)
