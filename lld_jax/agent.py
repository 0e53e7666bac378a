"""Everything that a config names, opened: model, tokenizer, retriever, programs."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from lld_jax import config as config_lib
from lld_jax import decoding, hf, model, parallel, questions, rewards
from lld_jax.environment import SearchEnvironment
from lld_jax.questions import Question
from lld_jax.retrieval.build import open_index
from lld_jax.retrieval.cache import CachedRetriever
from lld_jax.rollout import Limits, Sampling, rollout, tasks_of
from lld_jax.search import Codec, Trajectory, final_answer, load_template
from lld_jax.stop import stop_table

# Tokens of an extend call on each shard: enough to pay for reading the weights once,
# and few enough that the call is soon full.
_EXTEND_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class Agent:
    """The parts of a run that do not change while it trains."""

    config: ConfigDict
    model: model.ModelConfig
    folder: Path  # the Hugging Face folder that the policy started from
    codec: Codec
    environment: SearchEnvironment
    programs: decoding.Programs
    training: parallel.Layout
    sources: dict[str, str]  # the world's short names of question sources
    corpus: Path  # the corpus file or the index folder that is searched

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.model.dtype)

    @property
    def rows(self) -> int:
        """Trajectories of a rollout batch."""
        return self.config.rollout.questions * self.config.rollout.group

    def questions(self, sources: str | Sequence[str]) -> list[Question]:
        """All questions of one source or several; ConfigError for a wrong one."""
        sources = (sources,) if isinstance(sources, str) else sources
        names = tuple(self.sources.get(source, source) for source in sources)
        try:
            return questions.load(names, self.config.data_dir)
        except (ValueError, FileNotFoundError) as error:
            raise config_lib.ConfigError(f"questions: {error}") from error


def open_agent(config: ConfigDict) -> Agent:
    """Opens what `config` names; the cheap checks come first, no weight is read.

    Raises ConfigError or ValueError, naming the field, if one does not fit the model,
    the tokenizer or the devices.
    """
    folder = hf.resolve(config.model.path)
    model_config = hf.read_config(folder)
    config_lib.check_model(config, kv_heads=model_config.kv_heads)
    mesh = parallel.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    training, serving = parallel.train_layout(mesh), parallel.rollout_layout(mesh)
    codec = hf.load_codec(folder)
    limits = config.rollout

    sources, index = {}, config.retrieval.index
    if config.world.size:
        world = questions.prepare_world(config.data_dir, **config.world)
        for split in ("train", "validation_seen", "validation_unseen"):
            sources[f"tiny_world:{split}"] = getattr(world, split)
        index = world.corpus if index == "tiny_world" else index
    if config.retrieval.url:
        raise config_lib.ConfigError(
            f"retrieval.url: {config.retrieval.url!r}; there is no HTTP client "
            "yet; legal is retrieval.index"
        )
    corpus = Path(index).expanduser()
    if not corpus.exists():
        corpus = Path(config.data_dir).expanduser() / index
    try:
        environment = SearchEnvironment(
            codec=codec,
            retriever=CachedRetriever(open_index(corpus), config.retrieval.cache),
            template=load_template(limits.template),
            k=config.retrieval.k,
            max_observation=limits.max_observation,
            max_prompt=limits.max_prompt,
        )
    except (ValueError, FileNotFoundError) as error:  # budget, template, corpus
        raise config_lib.ConfigError(str(error)) from error
    shards = serving.size(serving.batch)
    piece = min(256, max(limits.max_prompt, limits.max_observation))
    entries = min(limits.slots // shards, max(1, _EXTEND_TOKENS // piece))
    programs = decoding.make_programs(
        model_config,
        decoding.Shapes(
            slots=limits.slots,
            tokens=limits.max_tokens,
            extend_rows=shards * entries,
            extend_tokens=piece,
            # Keys lie with the positions of a block last: a multiple of 128 there, or
            # an accelerator would pad them to that.
            block=64 if mesh.devices.flat[0].platform == "cpu" else 128,
        ),
        stop_table(codec.token_bytes, end_ids=codec.end_ids),
        dtype=jnp.dtype(config.model.dtype),
        valid_vocab=len(codec.token_bytes),
        layout=serving,
    )
    return Agent(
        config=config,
        model=model_config,
        folder=folder,
        codec=codec,
        environment=environment,
        programs=programs,
        training=training,
        sources=sources,
        corpus=corpus,
    )


def load_params(agent: Agent, folder: Path | None = None) -> Any:
    """Float32 parameters in the training layout, by default those of `model.path`."""
    layout = agent.training
    abstract = model.abstract_params(agent.model, layout)
    shardings = parallel.param_shardings(abstract, layout)
    return hf.load(folder or agent.folder, agent.model, shardings)


def publisher(agent: Agent) -> Callable[[Any], Any]:
    """`publish(params)`: one jitted cast to `model.dtype` in the rollout layout."""
    return model.publisher(agent.model, agent.dtype, agent.programs.layout)


def sample(
    agent: Agent,
    published: Any,
    draws: Sequence[tuple[int, Question]],
    *,
    group: int,
    seed: int,
    sampling: Sampling,
    max_turns: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> tuple[list[Trajectory], dict[str, float]]:
    """`group` scored trajectories of each draw, in order, and counters of the run."""
    trajectories, stats = rollout(
        agent.programs,
        published,
        agent.environment,
        tasks_of(draws, group),
        Limits(
            max_turns=max_turns,
            max_action=agent.config.rollout.max_action,
            timeout=agent.config.retrieval.timeout,
        ),
        sampling,
        seed=seed,
        on_progress=on_progress,
    )
    fit = {t.question: agent.environment.fit_question(t.question) for t in trajectories}
    for traj in trajectories:
        traj.counters["prompts_truncated"] = int(fit[traj.question] != traj.question)
        answer = final_answer(traj, agent.codec.token_bytes)
        traj.reward = rewards.exact_match(answer, traj.golden_answers)
    return trajectories, stats
