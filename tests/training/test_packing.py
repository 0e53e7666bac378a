"""Trajectories that share rows: nothing is lost, and nothing changes but the time."""

import copy
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import packing as benchmark
from benchmarks import workloads
from lld_jax import losses, model
from lld_jax.diagnosis import diagnostics
from lld_jax.losses import LossConfig
from lld_jax.run import metrics
from lld_jax.training import packing, probes, update
from lld_jax.training.batch import make_batch

TOKENS = 320  # of a row that holds some of the trajectories of `scored`

# ------------------------------------------------------------------------------ rows


@given(st.lists(st.integers(1, 30), max_size=40))
def test_rows_hold_everything_once_and_no_more_than_fits(lengths):
    rows = packing.fill_rows(lengths, 30)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 30 for row in rows)
    assert rows == packing.fill_rows(list(lengths), 30)  # and not by chance
    # Two rows that are half empty would be one.
    assert len(rows) <= 1 or sum(lengths) * 2 > 30 * (len(rows) - 1)


def test_the_better_of_two_heuristics_is_taken():
    """8 + 2 + 2 and 7 + 3 + 2; and one that the fullest rows first do not find."""
    for lengths, tokens, by_first_fit, by_fullest in (
        ([8, 7, 3, 2, 2, 2], 12, 3, 2),
        ([13, 8, 6, 6, 6, 5, 5, 4, 3], 15, 4, 5),
    ):
        args = list(range(len(lengths))), lengths, tokens
        assert len(packing._first_fit(*args)) == by_first_fit
        assert len(packing._fullest(*args)) == by_fullest
        assert len(packing.fill_rows(lengths, tokens)) == min(by_first_fit, by_fullest)
    assert packing.fill_rows([], 15) == []
    with pytest.raises(ValueError, match="16 tokens do not fit a row of 15"):
        packing.fill_rows([3, 16], 15)


@st.composite
def batches(draw):
    updates, each = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    devices, share = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)]))
    count = updates * each * devices * share
    lengths = draw(st.lists(st.integers(2, 12), min_size=count, max_size=count))
    actions = [draw(st.integers(1, n - 1)) for n in lengths]
    return lengths, actions, updates, devices, share


@settings(max_examples=60, deadline=None)
@given(batches())
def test_places(batch):
    lengths, actions, updates, devices, share = batch
    sizes = dict(updates=updates, micro_rows=devices * share, devices=devices)
    places = packing.shared_rows(lengths, actions, tokens=12, **sizes)
    again = packing.shared_rows(list(lengths), list(actions), tokens=12, **sizes)
    np.testing.assert_array_equal(places, again)
    count, micro_rows = len(lengths), devices * share
    each = count // updates // micro_rows
    taken = np.zeros((updates * each, micro_rows, 12), int)
    last = {}
    for i in np.lexsort(places.T[::-1]):
        micro, row, segment, start = places[i]
        assert micro // each == i // (count // updates)  # in its own update
        assert segment == last.get((micro, row), 0) + 1  # numbered without a gap
        last[micro, row] = segment
        assert start + lengths[i] <= 12
        taken[micro, row, start : start + lengths[i]] += 1
    assert taken.max() == 1 and taken.sum() == sum(lengths)
    used = taken.any((1, 2)).reshape(updates, each)
    for update_number, mine in enumerate(used):  # the first ones, and as few as fit
        rows = taken[update_number * each : (update_number + 1) * each].any(2).sum()
        assert mine.tolist() == [k < -(-rows // micro_rows) for k in range(each)]


def test_devices_have_equal_shares_of_the_action_tokens():
    """2 micro-batches on 2 devices: each cell gets a long row and a short one."""
    actions = [8, 7, 6, 5, 4, 3, 2, 1]
    places = packing.shared_rows(
        [10] * 8, actions, tokens=10, updates=1, micro_rows=4, devices=2
    )
    load = np.zeros((2, 2), int)
    for weight, (micro, row, *_) in zip(actions, places, strict=True):
        load[micro, row // 2] += weight
    assert load.tolist() == [[9, 9], [9, 9]]


def test_a_batch_is_laid_out_at_its_places():
    segments = np.array([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    ids = np.arange(1, 16).reshape(3, 5)
    batch = {"ids": ids * segments, "segments": segments}
    batch |= {"positions": np.tile(np.arange(5), (3, 1)), "x": np.float32(ids)}
    places = np.array([[1, 0, 1, 0], [1, 0, 2, 3], [0, 1, 1, 0]])
    out = packing.lay_out(batch, places, (2, 2))
    assert out["ids"].tolist() == [
        [[0] * 5, [11, 12, 13, 14, 15]],
        [[1, 2, 3, 6, 7], [0] * 5],
    ]
    assert out["segments"][1].tolist() == [[1, 1, 1, 2, 2], [0] * 5]
    assert out["positions"][1].tolist() == [[0, 1, 2, 0, 1], [0] * 5]
    assert out["x"].dtype == np.float32 and out["x"].sum() == out["ids"].sum()
    alone = packing.lay_out(batch, packing.one_a_row(3, 3), (1, 3))
    np.testing.assert_array_equal(alone["ids"][0], batch["ids"])
    np.testing.assert_array_equal(alone["segments"][0], segments)


@pytest.mark.parametrize(
    ("size", "micro_rows", "most"),
    [(256, 1, 0.04), (256, 8, 0.1), (256, 16, 0.1), (128, 8, 0.1), (64, 4, 0.1)],
)
def test_padding_of_real_lengths(size, micro_rows, most):
    """Mini-batches of recorded responses in rows of 4,096 tokens."""
    rng = np.random.default_rng(size)
    shares = []
    for _ in range(5):
        rows = rng.choice(len(workloads.real_lengths()), size, replace=False)
        some = [workloads.real_lengths()[i] for i in rows]
        lengths, actions = [sum(r) for r in some], [sum(r[1::2]) for r in some]
        places = packing.shared_rows(
            lengths,
            actions,
            tokens=4096,
            updates=1,
            micro_rows=micro_rows,
            devices=micro_rows,
        )
        computed = (places[:, 0].max() + 1) * micro_rows * 4096
        shares.append(1 - sum(lengths) / computed)
    assert max(shares) < most
    assert 1 - sum(lengths) / size / 4096 > 0.8  # with a row for each


# ------------------------------------------------------------------- what is computed


def random_batch(seed):
    """24 trajectories in rows of 40, with everything that a loss looks at."""
    rng = np.random.default_rng(seed)
    B, T = 24, 40
    lengths = rng.integers(6, 25, B)
    at = np.arange(T)
    inside = at < lengths[:, None]
    mask = inside & (at > 1) & (rng.random((B, T)) < 0.7)
    mask[0] = False  # a trajectory without an action token
    logps = -rng.exponential(1.0, (3, B, T))
    advantages = rng.integers(-1, 2, B)[:, None] * np.ones((B, T))
    answers = mask & (at > lengths[:, None] - 5)
    floats = {"logps": logps[0], "old_logps": logps[0] + rng.normal(0, 0.2, (B, T))}
    floats |= {"ref_logps": logps[1], "entropy": -logps[2], "advantages": advantages}
    return {
        "ids": np.where(inside, 7, 0),
        "segments": inside.astype(np.int32),
        "mask": mask.astype(np.int32),
        "answer_mask": answers.astype(np.int32),
    } | {name: x.astype(np.float32) for name, x in floats.items()}


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10_000),
    st.builds(
        LossConfig,
        policy=st.sampled_from(["grpo", "gspo"]),
        average=st.sampled_from(["global", "microbatch"]),
        entropy=st.sampled_from([0.0, 0.01]),
        llds_gate=st.sampled_from(losses.GATES),
        llds_normalizer=st.sampled_from(losses.NORMALIZERS),
        llds_preserve=st.sampled_from(losses.PRESERVED),
        llds_answer=st.sampled_from([0.0, 0.3, 1.0, "paper", "authors"]),
    ),
)
def test_the_loss_of_shared_rows(seed, config):
    """Values, sums and gradients are those of a row for each.

    The mean of micro-batch means is about micro-batches: it is that of the same
    trajectories in the same micro-batch, which are others than without packing.
    """
    alone = random_batch(seed)
    lengths = alone["segments"].sum(1).tolist()
    places = packing.shared_rows(
        lengths,
        alone["mask"].sum(1).tolist(),
        tokens=40,
        updates=1,
        micro_rows=4,
        devices=2,
    )
    shape = (6, 4)
    assert places[:, 0].max() < 5  # some are left over
    packed = packing.lay_out(alone, places, shape)
    packed = {name: x.reshape(24, 40) for name, x in packed.items()}

    def run(batch, micro_ids):
        def loss(logps, entropy):
            weights = losses.weights(
                batch["mask"],
                batch["advantages"],
                config,
                segments=batch["segments"],
                micro_ids=micro_ids,
            )
            scalars = {"valid_searches": 1.3}
            return losses.objective(logps, entropy, batch | scalars, weights, config)

        args = batch["logps"], batch["entropy"]
        (value, sums), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(*args)
        return value, sums, grads

    wanted, sums, grads = run(alone, places[:, 0])
    value, packed_sums, packed_grads = run(packed, np.repeat(np.arange(6), 4))
    assert float(value) == pytest.approx(float(wanted), rel=1e-5, abs=1e-6)
    for name, x in sums.items():
        assert packed_sums[name] == pytest.approx(float(x), rel=1e-5, abs=1e-5), name
    for grad, found in zip(grads, packed_grads, strict=True):
        arrays = alone | {"x": np.asarray(grad)}
        laid = packing.lay_out(arrays, places, shape)["x"].reshape(24, 40)
        np.testing.assert_allclose(found, laid, rtol=1e-5, atol=1e-9)


@pytest.fixture(scope="module")
def scored(agent, trajectories):
    """The shared rollout batch with rewards that teach: arrays, scalars, itself."""
    made = copy.deepcopy(trajectories)
    for i, traj in enumerate(made):
        traj.reward = float(i % 3 == 0)
    return *make_batch(
        made,
        tokens=TOKENS,
        token_bytes=agent.codec.token_bytes,
        std="sample",
    ), made


def policies(agent):
    """The agent with a row for each trajectory, and with shared rows."""
    out = []
    for together in (False, True):
        config = copy.deepcopy(agent.config)
        config.optim.packing, config.optim.updates = together, 1
        config.rollout.max_tokens = TOKENS
        out.append(dataclasses.replace(agent, config=config))
    return out


def laid_out(policy, arrays):
    places = packing.places_of(arrays, policy.config, micro_rows=3, devices=1)
    return places, packing.lay_out(arrays, places, (4, 3))


def test_hidden_states_of_shared_rows(agent, params, scored):
    arrays = scored[0]

    @jax.jit
    def hidden(batch):
        names = ("ids", "positions", "segments")
        rows = [batch[name].reshape(12, -1) for name in names]
        return model.hidden_states(
            agent.model, params, *rows, dtype=jnp.float32, layout=agent.training
        ).reshape(*batch["ids"].shape, -1)

    found = []
    for policy in policies(agent):
        places, batch = laid_out(policy, arrays)
        states = np.asarray(hidden(batch))
        lengths = np.count_nonzero(arrays["segments"], 1)
        found.append(
            [
                states[micro, row, start : start + n]
                for (micro, row, _, start), n in zip(places, lengths, strict=True)
            ]
        )
    assert places[:, 2].max() > 1 and places[:, 0].max() < 3
    for alone, shared in zip(*found, strict=True):
        np.testing.assert_allclose(shared, alone, atol=1e-5 * np.abs(alone).max())


def test_an_update_on_shared_rows(agent, params, scored):
    """Sums, gradient and displacement are those of a row for each, computed in full."""
    arrays, scalars, made = scored
    noise = np.random.default_rng(0).normal(0, 0.1, arrays["ids"].shape)
    arrays = arrays | {"noise": noise.astype(np.float32)}
    results = []
    for policy in policies(agent):
        init, logps_fn, update_fn, weigh = update.make_functions(policy)
        _, moved_fn = probes.make_probes(policy)
        places, batch = laid_out(policy, arrays)
        logps = logps_fn(params, batch, 0, 4)
        batch |= {"old_logps": logps + batch.pop("noise"), "ref_logps": logps}
        args = batch, weigh(batch), scalars
        state = init(jax.tree.map(jnp.copy, params))
        state, sums = update_fn(state, *args, 0.01, False, 4)
        new = logps_fn(state["params"], batch, 0, 4)
        rest = (batch[name] for name in ("mask", "segments"))
        moved = jax.device_get(moved_fn(new, logps, *rest, places))
        record = diagnostics.of_displacement(made, arrays["advantages"][:, 0], *moved)
        results.append((state["opt"][1].mu, jax.device_get(sums), record))
    (gradient, sums, record), (other, others, records) = results
    flat, other = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
        for tree in (gradient, other)
    )
    assert np.linalg.norm(other - flat) < 1e-5 * np.linalg.norm(flat)
    assert others["places"] < sums["places"] == 12 * TOKENS
    assert others["padding"] == others["places"] - arrays["segments"].sum()
    small = {"gap": 1e-3, "ratios": 2}  # of rounding; across the bound of a bin
    for name in sums.keys() - {"places", "padding"}:
        tolerance = small.get(name, 1e-5)
        assert others[name] == pytest.approx(sums[name], rel=1e-4, abs=tolerance), name
    assert others["loss_llds"] > 0 and others["open_gates"] > 0
    assert record.keys() >= {"lld/displacement_correct", "lld/response_displacement"}
    assert records == pytest.approx(record, rel=1e-3, abs=1e-6)


def test_another_number_of_micro_batches_compiles_nothing(agent, params, scored):
    _, policy = policies(agent)
    init, logps_fn, update_fn, weigh = update.make_functions(policy)
    arrays, scalars, _ = scored
    state, computed = init(jax.tree.map(jnp.copy, params)), []
    with metrics.CompileCounter() as compiled:
        for step, longest in enumerate((160, 20, 160)):
            # Shorter trajectories; the same shapes.
            short = {
                k: np.where(np.arange(TOKENS) < longest, x, 0)
                for k, x in arrays.items()
            }
            _, batch = laid_out(policy, short)
            rows = agent.training.sharding(None, agent.training.batch)
            batch = {name: jax.device_put(x, rows) for name, x in batch.items()}
            before = compiled.count
            logps = logps_fn(params, batch, 0, 4)
            part = batch | {"old_logps": logps, "ref_logps": logps}
            state, sums = update_fn(state, part, weigh(part), scalars, 0.0, False, 4)
            computed.append(int(sums["places"]) // 3 // TOKENS)
            assert (compiled.count > before) == (step == 0)
    assert computed == [2, 1, 2]


# ------------------------------------------------------------------------- benchmark


def test_goals_of_the_benchmark():
    shares = {"256": {"16": benchmark.padding(256, 16, 2)}}
    assert benchmark.padding(256, 0, 2) > 0.8 > shares["256"]["16"]
    speed = {"ways": {benchmark.ACTIONS: {"faster": 1.2}}}
    padding, faster = benchmark.targets(shares, speed)
    assert padding["met"] and padding["better"] == "lower"
    assert not faster["met"] and faster["better"] == "higher"


def test_results_of_the_benchmark_are_kept():
    """All micro-batches computed in all ways, and what was said of them follows."""
    path = Path(benchmark.__file__).parent / "results/packing.json"
    found = json.loads(path.read_text("utf-8"))
    assert found["targets"] == benchmark.targets(found["padding"], found["tiny"])
    by_name = found["tiny"]["ways"]
    assert by_name.keys() == benchmark.ways(5).keys() and not found["quick"]
    alone, shared, only = (by_name[name]["padding"] for name in by_name)
    assert alone == 1 - found["tiny"]["tokens"] / 100 / 320 > shared == only
