"""Everything that a config names, opened: model, tokenizer, retriever, programs."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from lld_jax import config as config_lib
from lld_jax import model, parallel, plan
from lld_jax.data import questions
from lld_jax.data.questions import Question
from lld_jax.model import hf
from lld_jax.parallel import exchange
from lld_jax.protocol import rewards
from lld_jax.protocol.environment import SearchEnvironment
from lld_jax.protocol.search import Codec, load_template
from lld_jax.protocol.stop import stop_table
from lld_jax.protocol.trajectory import Trajectory, final_answer
from lld_jax.retrieval.build import open_index
from lld_jax.retrieval.cache import CachedRetriever
from lld_jax.rollout import Limits, Sampling, combined, decoding, rollout, tasks_of
from lld_jax.rollout.policy import Policy, rollout_programs
from lld_jax.run import storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent(Policy):
    """The parts of a run that do not change while it trains."""

    folder: Path  # the Hugging Face folder that the policy started from
    codec: Codec
    environment: SearchEnvironment
    programs: decoding.Programs
    sources: dict[str, str]  # the world's short names of question sources
    corpus: Path  # the corpus file or the index folder that is searched

    def questions(self, sources: str | Sequence[str]) -> list[Question]:
        """All questions of one source or several; ConfigError for a wrong one."""
        sources = (sources,) if isinstance(sources, str) else sources
        names = tuple(self.sources.get(source, source) for source in sources)
        try:
            return questions.load(names, self.config.data_dir)
        except (ValueError, FileNotFoundError) as error:
            raise config_lib.ConfigError(f"questions: {error}") from error


def open_agent(config: ConfigDict, *, trains: bool = False) -> Agent:
    """Opens what `config` names; the cheap checks come first, no weight is read.

    Raises ConfigError or ValueError, naming the field, if one does not fit the model,
    the tokenizer or the devices, or if the run `trains` and a device has not the memory
    for it.
    """
    folder = hf.resolve(config.model.path)
    model_config = hf.read_config(folder)
    config_lib.check_model(config, kv_heads=model_config.kv_heads)
    config_lib.check_platform(config, jax.default_backend())
    mesh = parallel.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    memory = plan.memory_of(mesh.local_devices[0])
    if trains and memory:
        plan.check(plan.make_plan(config, model_config), memory, config)
    codec = hf.load_codec(folder)
    limits = config.rollout

    sources, index = {}, config.retrieval.index
    if config.world.size:
        world = exchange.first_then_others(
            lambda: questions.prepare_world(config.data_dir, **config.world)
        )
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
    policy = Policy(
        config=config,
        model=model_config,
        valid_vocab=len(codec.token_bytes),
        training=parallel.train_layout(mesh),
        serving=parallel.rollout_layout(parallel.local_mesh(mesh)),
    )
    stop = stop_table(codec.token_bytes, end_ids=codec.end_ids)
    return Agent(
        **vars(policy),
        folder=folder,
        codec=codec,
        environment=environment,
        programs=rollout_programs(policy, stop),
        sources=sources,
        corpus=corpus,
    )


def load_params(agent: Agent, folder: Path | None = None) -> Any:
    """Float32 parameters in the training layout, by default those of `model.path`."""
    layout = agent.training
    abstract = model.abstract_params(agent.model, layout)
    shardings = parallel.param_shardings(abstract, layout)
    return hf.load(folder or agent.folder, agent.model, shardings)


def save_params(agent: Agent, params: Any, folder: Any) -> None:
    """Writes parameters as a Hugging Face folder, also in a bucket.

    All processes call this, the first one writes.
    """
    with storage.staged(
        folder, last="config.json", active=exchange.is_first()
    ) as local:
        hf.save(local, params, agent.model, agent.folder)


def publisher(agent: Agent) -> Callable[[Any], Any]:
    """`publish(params)`: one jitted cast to `model.dtype` in the rollout layout.

    With several processes, each gets what lies on its own devices.
    """
    mesh, own = agent.training.mesh, agent.serving.mesh
    publish = model.publisher(agent.model, agent.dtype, parallel.rollout_layout(mesh))
    if own == mesh:
        return publish
    return lambda params: parallel.to_local(publish(params), own)


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
    """`group` scored trajectories of each draw, in order, and counters of the run.

    Every process samples its share of the draws and gets the trajectories of all: what
    follows is the same in each. `on_progress` takes the others to be as fast. What
    fails in one fails in all (`exchange.gather`).
    """
    draws = list(draws)[exchange.share_of(len(draws))]
    processes = jax.process_count()

    def own_share() -> tuple[list[Trajectory], dict[str, float]]:
        made, stats = rollout(
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
            on_progress=lambda done: on_progress(done * processes),
        )
        fit = {t.question: agent.environment.fit_question(t.question) for t in made}
        for traj in made:
            traj.counters["prompts_truncated"] = int(
                fit[traj.question] != traj.question
            )
            answer = final_answer(traj, agent.codec.token_bytes)
            traj.reward = rewards.exact_match(answer, traj.golden_answers)
        return made, stats

    shares = exchange.gather(own_share)
    made = [traj for some, _ in shares for traj in some]
    return made, combined([stats for _, stats in shares])
