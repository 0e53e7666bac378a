"""Training end to end on the small policy, and one update under a lens."""

import copy
import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import ROOT

from lld_jax import agent as agent_lib
from lld_jax import config as config_lib
from lld_jax import losses, model, train
from lld_jax.config import ConfigError
from lld_jax.diagnosis import guard
from lld_jax.model import hf, logprobs
from lld_jax.protocol.trajectory import from_json
from lld_jax.run import checkpoint, metrics
from lld_jax.training import packing, probes, update
from lld_jax.training.batch import make_batch

# What every step reports; `time/*` and `eval/*` are looked at by themselves.
NAMES = """
batch/action_tokens batch/padding compile/count end/answered end/context end/invalid
end/turns
grad/norm grad/norm_max grad/skipped lld/drop lld/logp_correct lld/logp_wrong
lld/logp_zero grad/logps_cosine grad/logps_llds grad/logps_policy phase/level
phase/name ratio/p05 ratio/p95 rollout/repeated_ngram llds/effective_lambda
llds/open_gates llds/penalised llds/preserved
loss/kl loss/llds loss/policy loss/total optim/lr policy/entropy policy/kl
policy/sampler_gap ratio/clipped ratio/max ratio/mean reward/mean reward/mixed
rollout/action_tokens rollout/decoded rollout/invalid_actions rollout/kept
rollout/length rollout/observations_truncated rollout/occupancy rollout/searches
rollout/searches_empty rollout/searches_failed rollout/turns time/logps time/rollout
time/update tokens_per_s/rollout tokens_per_s/train
""".split()


@pytest.fixture(scope="module")
def lines(finished_run):
    return metrics.read(finished_run / "metrics.jsonl")


# ---------------------------------------------------------------------- a whole run


def test_each_step_stands_once_with_every_name(lines):
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    for line in lines[:-1]:
        assert set(NAMES) <= line.keys(), set(NAMES) - line.keys()
        numbers = [v for k, v in line.items() if k not in ("step", "phase/name")]
        assert all(isinstance(v, int | float) and math.isfinite(v) for v in numbers)
    evaluated = [line["step"] for line in lines if "eval/greedy/exact_match" in line]
    assert evaluated == [0, 2, 4, 5]


def test_nothing_compiles_after_the_first_step(lines):
    counts = [line["compile/count"] for line in lines[:-1]]
    assert counts[0] > 0
    # An evaluation's programs are those of a rollout.
    assert counts[1:] == [0, 0, 0, 0]


def test_the_learning_rate_warms_up_over_steps(lines, run_config):
    lr = run_config.optim.lr
    assert [line["optim/lr"] for line in lines[:-1]] == [0, lr / 2, lr, lr, lr]
    # At rate 0 the second update finds the policy where it was; later ones do not.
    assert lines[0]["ratio/max"] == pytest.approx(1.0, abs=1e-6)
    assert lines[1]["ratio/max"] > 1.001 and lines[1]["llds/open_gates"] > 0


def test_every_name_is_documented(lines):
    """`docs/metrics.md` has a row for each; `<x>` in it stands for any text."""
    rows = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs/metrics.md").read_text(), re.M)
    legal = [re.sub("<.+?>", ".+", re.escape(row)) for row in rows]
    for name in {name for line in lines for name in line}:
        assert any(re.fullmatch(pattern, name) for pattern in legal), name
    found = {name for line in lines for name in line}
    rare = ("lld/response", "lld/questions", "lld/displacement", "lld/seen")
    for row, pattern in zip(rows, legal, strict=True):
        if not row.startswith(rare):
            assert any(re.fullmatch(pattern, name) for name in found), row


def test_what_is_costly_is_measured_now_and_then(lines, run_config):
    assert run_config.diagnostics.every == 2
    names = {"lld/displacement_wrong", "grad/policy", "grad/llds", "grad/cosine"}
    for line in lines[:-1]:
        found = {name for name in names if name in line}
        assert found == (names if line["step"] % 2 == 0 else set())
        assert ("time/diagnostics" in line) == (line["step"] % 2 == 0)
    # At rate 0 nothing moves: not by a bit.
    assert lines[0]["lld/displacement_wrong"] == lines[0]["grad/llds"] == 0
    assert lines[2]["lld/displacement_wrong"] != 0 and lines[2]["grad/llds"] > 0
    assert all(line["grad/policy"] > 0 for line in lines[:-1:2])
    assert all(line["phase/name"] == "healthy" for line in lines[:-1])


def test_the_batches_teach(lines, run_config):
    assert 0 < np.mean([line["reward/mean"] for line in lines[:-1]]) < 1
    assert any(line["reward/mixed"] > 0 for line in lines[:-1])
    for line in lines[:-1]:
        assert line["policy/sampler_gap"] < 1e-4  # float32 on both sides
        assert line["rollout/decoded"] == line["rollout/kept"]
        assert line["batch/action_tokens"] == line["rollout/kept"]
        assert line["grad/skipped"] == 0 and 0 < line["rollout/occupancy"] <= 1
    # Some trajectories share a row, and so fewer micro-batches are computed.
    tokens = run_config.rollout.max_tokens
    saved = [1 - x["rollout/length"] / tokens - x["batch/padding"] for x in lines[:-1]]
    assert min(saved) > -1e-6 and max(saved) > 0.1


def test_trajectory_files_hold_the_batches(finished_run, lines, run_config):
    folder = finished_run / "trajectories"
    assert {p.name for p in folder.iterdir()} == {f"{i}.jsonl" for i in range(5)}
    for step in range(5):
        text = (folder / f"{step}.jsonl").read_text().splitlines()
        made = [from_json(json.loads(line)) for line in text]
        first = step * run_config.rollout.questions
        expected = [(first + d, s) for d in range(4) for s in range(3)]
        assert [(t.draw, t.sample) for t in made] == expected
        mean = np.mean([t.reward for t in made])
        assert lines[step]["reward/mean"] == pytest.approx(mean)


def test_summary(finished_run, lines):
    summary = json.loads((finished_run / "summary.json").read_text())
    for mode in ("greedy", "sampled"):
        name = f"eval/{mode}/exact_match"
        assert summary["exact_match"][mode] == {
            "before": lines[0][name],
            "after": lines[-1][name],
        }
    assert summary["by_hops"].keys() == {"1", "2"}
    assert summary["by_set"].keys() == {"seen.jsonl", "tiny_world_validation_unseen"}
    assert summary["questions"] == 8 and summary["seconds"] > 0
    for part in ("rollout", "train"):
        speeds = [line[f"tokens_per_s/{part}"] for line in lines[1:-1]]
        assert summary["tokens_per_s"][part] == pytest.approx(np.mean(speeds))
    for name, path in summary["paths"].items():
        assert path == str(finished_run / name)
        assert (finished_run / name).exists()


def test_the_export_is_the_last_checkpoint(finished_run, agent, params, functions):
    config = hf.read_config(finished_run / "export")
    assert config == agent.model
    exported = hf.load(finished_run / "export", config)
    with checkpoint.open_checkpoints(finished_run / "checkpoints", keep=2) as saved:
        target = {"state": functions[0](params), "step": 0}
        restored, info = checkpoint.restore(saved, target)
    assert restored["step"] == 5 and info["before"].keys() >= {"eval/greedy/searches"}
    last = restored["state"]["params"]
    jax.tree.map(np.testing.assert_array_equal, exported, last)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), exported, params)
    assert min(jax.tree.leaves(moved)) > 0  # every array was trained
    codec = hf.load_codec(finished_run / "export")
    assert codec.token_bytes == agent.codec.token_bytes


def test_a_finished_run_and_another_config_are_refused(finished_run, run_config):
    with pytest.raises(ConfigError, match="finished run"):
        train.train(run_config, finished_run)
    saved = config_lib.from_json((finished_run / "config.json").read_text())
    assert config_lib.diff(saved, run_config) == []


@pytest.fixture(scope="module")
def other_run(tmp_path_factory, shared_config):
    """One update a step, bfloat16, GSPO, the authors' averages, nothing in between."""
    config = copy.deepcopy(shared_config)
    config.steps, config.seed = 2, 7
    config.model.dtype = "bfloat16"
    config.loss.policy, config.loss.average = "gspo", "microbatch"
    config.llds.answer, config.llds.normalizer = "paper", "all"
    config.optim.updates, config.optim.warmup, config.optim.micro_rows = 1, 0, 4
    config.eval.every = config.checkpoint.every = 0
    config.eval.limit = 1
    workdir = tmp_path_factory.mktemp("runs") / "other"
    train.train(config, workdir)
    return config, metrics.read(workdir / "metrics.jsonl")


def test_with_one_update_a_step_no_gate_ever_opens(other_run):
    """Not even on the rounding of bfloat16."""
    config, lines = other_run
    for line in lines[:-1]:
        assert line["llds/open_gates"] == line["llds/penalised"] == 0
        assert line["loss/llds"] == line["lld/drop"] == 0
        assert line["ratio/mean"] == line["ratio/max"] == 1
        assert line["optim/lr"] == config.optim.lr
        assert 1e-5 < line["policy/sampler_gap"] < 0.3  # bfloat16 in other shapes
    assert lines[1]["policy/kl"] > 0  # it moved all the same


# ------------------------------------------------------------------------ one update


@pytest.fixture(scope="module")
def batch(agent, trajectories):
    """The shared rollout batch, `[rows, T]`, with rewards that teach, and scalars."""
    scored = copy.deepcopy(trajectories)
    for i, traj in enumerate(scored):
        traj.reward = float(i % 3 == 0)
    return make_batch(
        scored,
        tokens=agent.config.rollout.max_tokens,
        token_bytes=agent.codec.token_bytes,
        std="sample",
    )


def stack(batch, micro: int):
    arrays, _ = batch
    return {k: x.reshape(-1, micro, x.shape[-1]) for k, x in arrays.items()}


def two_updates(functions, params, batch, micro: int):
    """States and metrics of two updates on the same batch, the second off-policy."""
    init, logps_fn, update_fn, weigh = functions
    stacked = stack(batch, micro)
    n = len(stacked["ids"])
    logps = logps_fn(params, stacked, 0, n)
    state, out = init(jax.tree.map(jnp.copy, params)), []
    for first in (True, False):
        # The first one must not read the old log-probs.
        old = jnp.full_like(logps, jnp.nan) if first else logps
        stacked |= {"old_logps": old, "ref_logps": logps}
        state, sums = update_fn(
            state, stacked, weigh(stacked), batch[1], 0.003, first, n
        )
        out.append((jax.device_get(state), jax.device_get(sums)))
    return out


@pytest.fixture(scope="module")
def updated(functions, params, batch):
    return two_updates(functions, params, batch, 3)


def test_the_first_update_is_exactly_on_policy(updated):
    (_, first), (_, second) = updated
    assert first["open_gates"] == first["penalised"] == first["drop"] == 0
    assert first["ratio"] == first["tokens"] > 0 and first["ratio_max"] == 1
    assert first["loss_llds"] == 0 and first["clipped"] == 0
    assert second["open_gates"] > 0 and second["loss_llds"] > 0
    assert second["ratio_max"] > 1 and second["tokens"] == first["tokens"]


def test_update_against_a_loss_written_in_one_piece(agent, functions, params, batch):
    """Micro-batches and the traced loop, against one gradient of the whole batch."""
    init, _, update_fn, weigh = functions
    settings = update.loss_config(agent.config)
    stacked = stack(batch, 3)
    zeros = np.zeros(stacked["ids"].shape, np.float32)
    # Log-probs far from the policy's: every term of the loss has a gradient; and
    # advantages so large that it is clipped.
    stacked |= {"old_logps": zeros - 2, "ref_logps": zeros - 3}
    stacked["advantages"] = stacked["advantages"] * 50
    flat = {k: x.reshape(-1, x.shape[-1]) for k, x in stacked.items()}

    @jax.jit
    @jax.grad
    def gradient(params):
        hidden = model.hidden_states(
            agent.model,
            params,
            flat["ids"],
            flat["positions"],
            flat["segments"],
            dtype=jnp.float32,
            layout=agent.training,
        )
        logps, entropy = logprobs.token_logprobs(
            hidden,
            model.head(params),
            flat["ids"],
            temperature=1.0,
            valid_vocab=len(agent.codec.token_bytes),
            chunk=64,
            layout=agent.training,
        )
        weights = losses.weights(flat["mask"], flat["advantages"], settings)
        return losses.objective(logps, entropy, flat | batch[1], weights, settings)[0]

    wanted = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(gradient(params))])
    state = init(jax.tree.map(jnp.copy, params))
    state, sums = update_fn(state, stacked, weigh(stacked), batch[1], 0.1, False, 4)
    norm = float(jnp.linalg.norm(wanted))
    assert float(sums["norm"]) == pytest.approx(norm, rel=1e-5)
    assert norm > 2 * agent.config.optim.clip
    wanted *= 0.1 * agent.config.optim.clip / norm  # 1 - b1, after clipping
    moment = state["opt"][1].mu
    found = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(moment)])
    np.testing.assert_allclose(
        found, wanted, atol=1e-5 * float(jnp.linalg.norm(wanted))
    )


def test_fewer_micro_batches_than_there_are_can_be_used(functions, params, batch):
    """The count is traced: the rows beyond it change nothing."""
    init, _, update_fn, weigh = functions
    stacked = stack(batch, 3)
    zeros = np.zeros(stacked["ids"].shape, np.float32)
    stacked |= {"old_logps": zeros - 2, "ref_logps": zeros - 3}
    spoiled = dict(stacked)
    spoiled["advantages"] = stacked["advantages"].copy()
    spoiled["advantages"][2:] = 100.0
    results = []
    for part in (stacked, spoiled):
        state = init(jax.tree.map(jnp.copy, params))
        weights = weigh(stacked)
        results.append(update_fn(state, part, weights, batch[1], 0.1, False, 2))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_the_size_of_micro_batches_changes_nothing(agent, params, batch, updated):
    # Another shape of the same batch: programs of their own.
    other = two_updates(update.make_functions(agent), params, batch, 6)
    for (state, sums), (wanted, expected) in zip(other, updated, strict=True):
        small = {"gap": 1e-4, "loss_llds": 1e-5, "drop": 1e-3}
        small |= {"seen_displacement": 1e-3, "ratios": 2}  # across the bound of a bin
        for name, value in expected.items():
            tolerance = small.get(name, 1e-5)
            assert sums[name] == pytest.approx(value, rel=1e-4, abs=tolerance), name
        a, b = (
            np.concatenate([np.ravel(x) for x in jax.tree.leaves(s["opt"][1].mu)])
            for s in (state, wanted)
        )
        assert np.linalg.norm(a - b) < 1e-4 * np.linalg.norm(b)


def test_llds_acts_from_the_second_update_on(agent, config, params, batch, updated):
    config.llds.coef = 0.0
    plain = dataclasses.replace(agent, config=config)
    other = two_updates(update.make_functions(plain), params, batch, 3)
    (first, _), (second, sums) = other
    jax.tree.map(
        np.testing.assert_array_equal, first["params"], updated[0][0]["params"]
    )
    assert sums["loss_llds"] > 0  # measured, though not trained on
    assert sums["loss"] < updated[1][1]["loss"]
    gap = jax.tree.map(
        lambda a, b: np.abs(a - b).max(),
        second["params"]["head"],
        updated[1][0]["params"]["head"],
    )
    assert gap > 1e-5


def test_a_gradient_that_is_not_finite_changes_nothing(functions, params, batch):
    init, logps_fn, update_fn, weigh = functions
    stacked = stack(batch, 3)
    logps = logps_fn(params, stacked, 0, 4)
    stacked |= {"old_logps": logps, "ref_logps": logps}
    sick = dict(stacked)
    sick["advantages"] = stacked["advantages"].copy()
    row, at = np.argwhere(stacked["mask"].reshape(12, -1))[0]
    sick["advantages"].reshape(12, -1)[row, at] = np.nan
    weights = weigh(stacked)
    state = init(jax.tree.map(jnp.copy, params))
    for bad in (1, 2):
        state, sums = update_fn(state, sick, weights, batch[1], 0.1, False, 4)
        assert sums["skipped"] == 1 and not np.isfinite(sums["norm"])
        assert int(state["bad"]) == bad
    jax.tree.map(np.testing.assert_array_equal, state["params"], params)
    assert int(state["opt"][1].count) == 0
    state, sums = update_fn(state, stacked, weights, batch[1], 0.1, False, 4)
    assert sums["skipped"] == 0 and int(state["bad"]) == 0
    assert int(state["opt"][1].count) == 1


def test_norms_of_the_two_gradients(agent, functions, params, batch):
    """Together they are the gradient of an update without KL and entropy."""
    config = copy.deepcopy(agent.config)
    config.loss.kl = config.loss.entropy = 0.0
    plain = dataclasses.replace(agent, config=config)
    norms_fn, moved_fn = probes.make_probes(plain)
    init, logps_fn, update_fn, weigh = update.make_functions(plain)
    stacked = stack(batch, 3)
    logps = logps_fn(params, stacked, 0, 4)
    noise = np.random.default_rng(0).normal(0, 0.1, logps.shape).astype(np.float32)
    stacked |= {"old_logps": logps + noise, "ref_logps": logps}
    weights = weigh(stacked)
    found = norms_fn(params, stacked, weights, batch[1], 4)
    a, b, cosine = (float(found[f"grad/{x}"]) for x in ("policy", "llds", "cosine"))
    state = init(jax.tree.map(jnp.copy, params))
    _, sums = update_fn(state, stacked, weights, batch[1], 0.0, False, 4)
    both = math.sqrt(a**2 + b**2 + 2 * a * b * cosine)
    assert both == pytest.approx(float(sums["norm"]), rel=1e-4)
    assert a > 0 and b > 0 and -1 < cosine < 1
    args = logps, *(stacked[name] for name in ("old_logps", "mask", "segments"))
    moved, tokens = moved_fn(*args, packing.one_a_row(12, 3))
    wanted = np.where(stacked["mask"] > 0, -noise, 0).sum(-1).ravel()
    np.testing.assert_allclose(moved, wanted, atol=1e-5)
    np.testing.assert_array_equal(tokens, stacked["mask"].sum(-1).ravel())


def test_nll_is_of_correct_trajectories_alone(agent, params, batch):
    """On policy, with advantages of 1 and 0, it has the surrogate's own gradient."""
    norms = []
    for coef in (0.0, 1.0):
        config = copy.deepcopy(agent.config)
        config.loss.kl, config.loss.entropy, config.loss.nll = 0.0, 0.0, coef
        other = dataclasses.replace(agent, config=config)
        init, logps_fn, update_fn, weigh = update.make_functions(other)
        stacked = stack(batch, 3)
        stacked["advantages"] = np.where(stacked["advantages"] > 0, 1.0, 0.0)
        logps = logps_fn(params, stacked, 0, 4)
        stacked |= {"old_logps": logps, "ref_logps": logps}
        state = init(jax.tree.map(jnp.copy, params))
        weights = weigh(stacked)
        _, sums = update_fn(state, stacked, weights, batch[1], 0.0, True, 4)
        norms.append(float(sums["norm"]))
    assert norms[0] > 0 and norms[1] == pytest.approx(2 * norms[0], rel=1e-4)


def test_logps_of_some_micro_batches(functions, params, batch):
    _, logps_fn, *_ = functions
    stacked = stack(batch, 3)
    every = np.asarray(logps_fn(params, stacked, 0, 4))
    some = np.asarray(logps_fn(params, stacked, 1, 2))
    np.testing.assert_array_equal(some[1:3], every[1:3])
    assert not some[0].any() and not some[3].any()


def test_a_run_that_diverges_stops_and_says_why(config, tmp_path, monkeypatch):
    def sick(*args, **kwargs):
        arrays, scalars = make_batch(*args, **kwargs)
        arrays["advantages"][:] = np.nan
        return arrays, scalars

    monkeypatch.setattr(train, "make_batch", sick)
    config.optim.max_bad_steps = 4
    config.eval.limit = 1
    with pytest.raises(
        train.Diverged, match="step 1: 4 updates .* not finite"
    ) as error:
        train.train(config, tmp_path / "run")
    assert str(tmp_path / "run" / "metrics.jsonl") in str(error.value)
    (line,) = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert line["grad/skipped"] == 2 and math.isnan(line["grad/norm"])
    assert not (tmp_path / "run" / "summary.json").exists()


def test_agent_errors_name_the_field(config):
    config.mesh.tensor = 3
    with pytest.raises(ConfigError, match="mesh.tensor: 3 .* legal are 1, 2"):
        agent_lib.open_agent(config)
    config.mesh.tensor = 1
    config.retrieval.index, config.retrieval.url = "", "http://localhost:8000"
    with pytest.raises(ConfigError, match="retrieval.url"):
        agent_lib.open_agent(config)


# --------------------------------------------------------------- what the guard does


def break_at(monkeypatch, step: int):
    """The run fails right after it wrote the metrics of a step."""
    write = metrics.MetricsWriter.write

    def broken(self, at, record):
        write(self, at, record)
        if at == step:
            raise OSError("the disk is full")

    monkeypatch.setattr(metrics.MetricsWriter, "write", broken)


def alarm(monkeypatch, at: int, todo: str):
    """The guard finds at the end of step `at` that something is to be done."""
    real = guard.observe

    def observe(watch, step, *rest):
        watch, phase = real(watch, step, *rest)
        if step == at:
            coef = 0.7 if todo == "raise_lambda" else watch.coef
            watch = dataclasses.replace(watch, todo=todo, coef=coef, notice="an alarm")
        return watch, phase

    monkeypatch.setattr(guard, "observe", observe)


def test_a_run_that_decays_can_stop(config, tmp_path, monkeypatch):
    config.diagnostics.action, config.eval.limit = "stop", 1
    config.steps, config.eval.every, config.checkpoint.every = 4, 0, 0
    with monkeypatch.context() as patched:
        alarm(patched, 1, "stop")
        with pytest.raises(guard.Collapsing, match="an alarm"):
            train.train(config, tmp_path / "run")
    assert checkpoint.latest_step(tmp_path / "run" / "checkpoints") == 2
    with pytest.raises(guard.Collapsing):  # the reason is still there
        train.train(config, tmp_path / "run")
    config.diagnostics.action = "warn"  # the same run goes on
    train.train(config, tmp_path / "run")
    lines = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]


def test_lambda_is_raised_without_compiling(config, tmp_path, monkeypatch):
    config.diagnostics.action, config.eval.limit = "raise_lambda", 1
    config.steps, config.eval.every, config.checkpoint.every = 3, 0, 0
    config.llds.normalizer = "preserved"
    alarm(monkeypatch, 1, "raise_lambda")
    train.train(config, tmp_path / "run")
    lines = metrics.read(tmp_path / "run" / "metrics.jsonl")[:-1]
    coefs = [line["llds/effective_lambda"] for line in lines]
    assert coefs == pytest.approx([config.llds.coef] * 2 + [0.7])
    assert [line["compile/count"] for line in lines[1:]] == [0, 0]


def test_an_anchor_that_lags_behind(config, tmp_path):
    """LLDS acts from the first update on, and a run that is cut in two is the same."""
    config.llds.anchor, config.llds.normalizer = 2, "preserved"
    config.optim.updates, config.optim.warmup, config.optim.micro_rows = 1, 0, 4
    config.eval.every, config.checkpoint.every = 0, 1
    config.eval.limit, config.steps = 1, 4
    train.train(config, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patched:
        break_at(patched, 3)
        with pytest.raises(OSError, match="full"):
            train.train(config, tmp_path / "cut")
    train.train(config, tmp_path / "cut")
    whole, again = (
        metrics.read(tmp_path / name / "metrics.jsonl")[:4] for name in ("whole", "cut")
    )
    gates = [line["llds/open_gates"] for line in whole]
    assert gates[0] == gates[2] == 0 and gates[1] > 0 and gates[3] > 0
    assert gates == [line["llds/open_gates"] for line in again]
    assert whole[3]["loss/llds"] == again[3]["loss/llds"] > 0


@pytest.mark.parametrize("killed", [2, 3])
def test_a_run_goes_back_to_healthy_weights(config, tmp_path, monkeypatch, killed):
    """At half the rate, on the draws to come; killed before or after that as well."""
    config.diagnostics.action, config.eval.limit = "roll_back", 1
    config.steps, config.eval.every, config.checkpoint.every = 5, 0, 1
    config.checkpoint.keep, config.optim.warmup = 4, 0
    alarm(monkeypatch, 2, "roll_back")
    monkeypatch.setattr(guard, "target", lambda watch, saved: 1)
    train.train(config, tmp_path / "whole")
    with monkeypatch.context() as patched:
        break_at(patched, killed)
        with pytest.raises(OSError, match="full"):
            train.train(config, tmp_path / "killed")
    train.train(config, tmp_path / "killed")
    whole, again = (
        metrics.read(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed")
    )
    assert [line["step"] for line in again] == [0, 1, 2, 3, 4, 5]
    lr = config.optim.lr
    assert [line["optim/lr"] for line in whole[:-1]] == [lr, lr, lr, lr / 2, lr / 2]
    # The weights of step 1 again: nearer to where it began.
    assert whole[3]["policy/kl"] < whole[2]["policy/kl"]
    for name in ("optim/lr", "policy/kl", "lld/logp_wrong", "reward/mean"):
        a, b = ([line[name] for line in lines[:-1]] for lines in (whole, again))
        assert a == b, name
