"""What several test files share; one folder of compiled programs for a whole run."""

import copy
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for configs and experiments

# Before jax is imported. What takes the time here is compiling: without optimization it
# takes a fifth, and equal shapes are compiled once, subprocesses included.
_QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{_QUICK} {os.environ.get('XLA_FLAGS', '')}"
# The workers of pytest-xdist find the folder of the process that started them.
_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not _WORKER:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="lld_jax_tests_")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def pytest_unconfigure():
    if not _WORKER:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(scope="session")
def policy(tmp_path_factory) -> Path:
    """The Hugging Face folder of the small policy of `tiny.py`."""
    import tiny

    return tiny.make_folder(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def shared_config(tmp_path_factory, policy):
    """The config of a short run, its questions and its world; not to be changed."""
    import tiny

    return tiny.make_config(tmp_path_factory.mktemp("shared"), policy)


@pytest.fixture
def config(shared_config):
    """A copy of the shared config for a test to change."""
    return copy.deepcopy(shared_config)


@pytest.fixture(scope="session")
def agent(shared_config):
    """Everything that the shared config names, opened."""
    from lld_jax import agent

    return agent.open_agent(shared_config)


@pytest.fixture(scope="session")
def params(agent):
    """The small policy's parameters in the training layout."""
    from lld_jax import agent as agent_lib

    return agent_lib.load_params(agent)


@pytest.fixture(scope="session")
def published(agent, params):
    """The same in the rollout layout."""
    from lld_jax import agent as agent_lib

    return agent_lib.publisher(agent)(params)


@pytest.fixture(scope="session")
def functions(agent):
    """The jitted `init, logps_fn, update_fn, weigh` of the shared config."""
    from lld_jax.training import update

    return update.make_functions(agent)


@pytest.fixture(scope="session")
def trajectories(agent, published):
    """A rollout batch of the shared config: 4 draws with 3 samples each."""
    from lld_jax import agent as agent_lib
    from lld_jax.rollout import Sampling

    questions = agent.questions(agent.config.questions.train)
    made, _ = agent_lib.sample(
        agent,
        published,
        list(enumerate(questions[:4])),
        group=3,
        seed=3,
        sampling=Sampling(),
        max_turns=2,
    )
    return made


@pytest.fixture(scope="session")
def run_config(shared_config):
    """The config of `finished_run`."""
    config = copy.deepcopy(shared_config)
    config.steps = 5
    config.eval.every = config.checkpoint.every = config.diagnostics.every = 2
    return config


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, run_config) -> Path:
    """The work folder of a whole run, from one call of `train` without a break."""
    from lld_jax import train

    workdir = tmp_path_factory.mktemp("runs") / "whole"
    train.train(run_config, workdir)
    return workdir
