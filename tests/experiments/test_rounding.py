"""LLDS on rounding noise alone: what the experiment measures, and why it matters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.rounding import cases, plot, programs, run
from lld_jax import losses, model

SMALL = model.ModelConfig(
    vocab=64,
    width=16,
    mlp=32,
    layers=1,
    kv_heads=1,
    group=2,
    head_dim=8,
    rope_theta=10_000.0,
    rms_eps=1e-6,
    tied=True,
)


# Compiling all of them would take most of a minute.
CHOSEN = (run.FIRST, run.SAME, run.CACHED, run.OTHER_DTYPE)


@functools.cache
def case() -> cases.Case:
    return cases.random_case(rows=16, tokens=32, config=SMALL, seed=1)


@functools.cache
def rows() -> list[dict]:
    return run.measure(case(), "float32", CHOSEN)


def test_a_row_for_each_condition(monkeypatch):
    """Of which no two score with the same program."""
    asked, zeros = [], jnp.zeros(case().batch["ids"].shape)

    def score(case, how):
        asked.append(how)
        return zeros

    monkeypatch.setattr(programs, "score", score)
    monkeypatch.setattr(programs, "score_cached", lambda case, how: zeros)
    train = zeros, jnp.float32(1)
    monkeypatch.setattr(programs, "trainer", lambda case, how: lambda *args: train)
    found = run.measure(case(), "bfloat16")
    assert [row["old"] for row in found] == list(run.CONDITIONS)
    assert len(set(asked)) == len(asked) == len(run.SCORED) + 1
    lines = run.table(found).split("\n")
    assert len(lines) == 2 + len(run.CONDITIONS)
    assert {line.count("|") for line in lines} == {8}


@pytest.mark.parametrize("name", [run.FIRST, run.SAME])
def test_the_same_program_at_the_same_shape_leaves_nothing(name):
    row = rows()[CHOSEN.index(name)]
    assert row["mean_difference"] == row["max_difference"] == 0
    assert set(row["open_gates"].values()) == set(row["penalised"].values()) == {0}
    assert set(row["gradient"].values()) == {0}


def test_another_dtype_opens_gates_and_makes_a_gradient():
    row = rows()[CHOSEN.index(run.OTHER_DTYPE)]
    assert 1e-5 < row["mean_difference"] < 1e-2
    assert all(0.1 < share < 0.9 for share in row["open_gates"].values())
    assert row["penalised"]["token"] == row["open_gates"]["token"]
    assert row["gradient"]["preserved"] > 0.05
    share = run.describe(case())["preserved_tokens"] / case().batch["mask"].sum()
    assert row["gradient"]["all"] == pytest.approx(row["gradient"]["preserved"] * share)


def test_the_programs_compute_the_same_function():
    """So that the differences are rounding: in float32 little else is left."""
    case_, how = (
        case(),
        programs.Program("float32", rows=8, block=8, chunk=5, padding=9),
    )
    keep = case_.batch["mask"] != 0
    found = programs.score(case_, how)[keep]
    base = programs.score(case_, programs.Program("float32"))[keep]
    np.testing.assert_allclose(found, base, atol=5e-6, rtol=0)
    assert rows()[CHOSEN.index(run.CACHED)]["max_difference"] < 5e-6


def test_the_gradient_that_is_measured_is_that_of_llds_loss():
    """Relative to the policy gradient at ratio 1; for parameters, one program each."""
    batch, how = case().batch, programs.Program("float32")
    keep, advantages = batch["mask"], batch["advantages"]

    def forward(params):
        return programs.forward(case(), how, params, batch)

    @jax.jit
    def norms(params, old):
        logps, pull = jax.vjp(forward, params)

        def norm(cotangent):
            return optax.tree.norm(pull(cotangent)[0])

        def llds(logps, normalizer):
            args = (logps, old, advantages, keep)
            return 0.2 * losses.llds_loss(*args, normalizer=normalizer)

        each = [norm(jax.grad(llds)(logps, kind)) for kind in ("preserved", "all")]
        return jnp.array(each) / norm(advantages * keep / keep.sum())

    old = run.old_logps(case(), how, run.OTHER_DTYPE)
    row = rows()[CHOSEN.index(run.OTHER_DTYPE)]
    found = list(row["gradient"].values())
    np.testing.assert_allclose(found, norms(case().params, old), rtol=1e-3)


def test_half_of_the_gates_open_on_noise_of_any_size():
    """And the gradient is the same number at 1/256 and at 1/65,536."""
    batch = cases.random_rows(256, 64, vocab=8, seed=2)
    rng = np.random.default_rng(3)
    logps = jnp.float32(-rng.integers(1, 8, batch["ids"].shape))  # sums are exact
    sign = rng.choice([-1.0, 1.0], logps.shape)

    @jax.jit
    @jax.grad
    def gradient(logps, old):
        args = (logps, old, batch["advantages"], batch["mask"])
        return losses.llds_loss(*args, segments=batch["segments"])

    found = []
    for eps in (2.0**-8, 2.0**-16):
        old = logps + jnp.float32(eps * sign)
        opened, penalised = run.shares(logps, old, batch)
        # A sum of an even number of signs may be 0, which opens nothing.
        assert 0.35 < opened["action"] < 0.5
        assert 0.35 < opened["response"] < 0.5
        assert opened["token"] == pytest.approx(0.5, abs=0.05)
        assert 0.2 < penalised["action"] < penalised["token"]
        found.append(gradient(logps, old))
    assert float(jnp.abs(found[0]).sum()) > 0.2
    np.testing.assert_array_equal(*found)


def test_the_plot_is_drawn(tmp_path):
    plot.draw(rows(), tmp_path / "rounding.png")
    assert (tmp_path / "rounding.png").stat().st_size > 10_000
