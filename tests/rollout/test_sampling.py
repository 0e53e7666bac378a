"""What is sampled: inverse CDF, top-k and top-p, on one device and on eight."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import environment
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from lld_jax import parallel
from lld_jax.rollout import sampling

V, VALID, D = 300, 290, 8  # three blocks of 128, the last one cut
N = 2048  # slots of every call: one compilation
OFF = (1.0, 0)  # top_p, top_k
TRUNCATIONS = [OFF, (0.7, 0), (1.0, 7), (0.9, 40), (0.05, 3), (1e-6, 0)]


def layout_of(*devices_by_axis: int) -> parallel.Layout:
    count = int(np.prod(devices_by_axis))
    mesh = parallel.make_mesh(*devices_by_axis, jax.devices()[:count])
    return parallel.rollout_layout(mesh)


@functools.partial(jax.jit, static_argnames=("valid_vocab", "layout"))
def jitted(hidden, head, uniform, scalars, valid_vocab, layout):
    return sampling.sample(
        hidden, head, uniform, *scalars, valid_vocab=valid_vocab, layout=layout
    )


def sample(hidden, head, uniform, temperature, top_p=1.0, top_k=0, valid_vocab=VALID):
    """numpy in, numpy out; rows are filled up to N."""
    n = len(hidden)
    hidden = np.resize(np.float32(hidden), (N, hidden.shape[1]))
    uniform = np.resize(np.float32(uniform), N)
    scalars = (np.float32(temperature), np.float32(top_p), np.int32(top_k))
    out = jitted(hidden, head, uniform, scalars, valid_vocab, layout_of(1, 1, 1))
    return tuple(np.asarray(x)[:n] for x in out)


def on_a_grid(logits, *args):
    """D rows of logits `[D, V]`, each on the same grid of uniforms -> two `[D, n]`."""
    n = N // D
    grid = np.float32((np.arange(n) + 0.5) / n)
    # One-hot states and a head of logits: the very logits, ties included.
    tokens, logps = sample(
        np.repeat(np.eye(D), n, 0), np.float32(logits.T), np.tile(grid, D), *args
    )
    return grid, tokens.reshape(D, n), logps.reshape(D, n)


def probabilities(logits, temperature=1.0, top_p=1.0, top_k=0):
    """The reference, on one row, in float64: sorts, and keeps all that tie."""
    x = np.float64(np.float32(logits) / np.float32(temperature))
    p = np.exp(x - x.max())
    kept = np.ones(len(x), bool)
    if top_k:
        kept = x >= np.sort(x)[-min(top_k, len(x))]
    if top_p < 1:
        order = np.argsort(-x)
        mass = np.cumsum((p * kept)[order])
        last = np.searchsorted(mass, np.float64(np.float32(top_p)) * mass[-1])
        kept &= x >= x[order[last]]
    p = np.where(kept, p, 0)
    return p / p.sum()


def check(grid, tokens, logps, p):
    """One row against the distribution that it was drawn from."""
    assert (p[tokens] > 0).all()
    assert (np.diff(tokens) >= 0).all()
    share = np.bincount(tokens, minlength=len(p)) / len(grid)
    np.testing.assert_allclose(share, p, atol=1.5 / len(grid))
    # The very token wherever rounding can't move an edge of the distribution.
    edges = np.cumsum(p)
    clear = np.abs(edges[:, None] - grid).min(0) > 1e-5
    assert clear.mean() > 0.9
    expected = np.searchsorted(edges, grid, side="right")
    np.testing.assert_array_equal(tokens[clear], expected[clear])
    np.testing.assert_allclose(logps, np.log(p[tokens]), atol=2e-5)


@pytest.fixture(scope="module")
def logits():
    """Flat and peaked rows, negative ones, and rows full of ties."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(D, V)) * np.array([[0, 0.1, 1, 1, 2, 4, 2, 1]]).T
    x[3] -= 50
    x[6:] = np.round(2 * x[6:]) / 2
    x[1:, 0] -= 200  # probability 0 in float32
    x[:, VALID:] += 100  # would win if they were allowed
    return np.float32(x)


# ------------------------------------------------------------------ distributions


@pytest.mark.parametrize(("top_p", "top_k"), TRUNCATIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_inverse_of_the_cumulative_distribution(logits, temperature, top_p, top_k):
    """On a fine grid of uniforms each token gets its share of the grid, in order."""
    grid, tokens, logps = on_a_grid(logits, temperature, top_p, top_k)
    for row, *drawn in zip(logits[:, :VALID], tokens, logps, strict=True):
        check(grid, *drawn, probabilities(row, temperature, top_p, top_k))


@pytest.mark.parametrize(("top_p", "top_k"), TRUNCATIONS[1:])
def test_keeps_what_transformers_keeps_and_its_ties(logits, top_p, top_k):
    torch = pytest.importorskip("torch")
    from transformers import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    x = torch.tensor(logits[:, :VALID])
    warped = TemperatureLogitsWarper(0.8)(None, x)
    scaled = warped.numpy()
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    # It breaks ties at the end of top-p by position, and keeps those of top-k.
    last = torch.where(warped.isfinite(), warped, torch.inf).min(-1, keepdim=True)
    kept = scaled >= last.values.numpy()
    p = torch.softmax(torch.where(torch.tensor(kept), torch.tensor(scaled), -1e30), -1)
    grid, tokens, logps = on_a_grid(logits, 0.8, top_p, top_k)
    for row, *drawn in zip(p.double().numpy(), tokens, logps, strict=True):
        check(grid, *drawn, row)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 12),
    st.floats(0.01, 0.99),
    st.integers(0, 30),
)
def test_any_row_with_many_ties(seed, values, top_p, top_k):
    rng = np.random.default_rng(seed)
    logits = np.float32(rng.choice(rng.normal(0, 3, values), (D, V)))
    _, tokens, logps = on_a_grid(logits, 1.0, top_p, top_k)
    for i in range(D):
        row = logits[i, :VALID]
        low, p, high = (
            probabilities(row, 1.0, top_p + shift, top_k) for shift in (-1e-5, 0, 1e-5)
        )
        if ((low > 0) == (high > 0)).all():  # rounding can't move the floor
            assert (p[tokens[i]] > 0).all()
            np.testing.assert_allclose(logps[i], np.log(p[tokens[i]]), atol=2e-5)


def test_frequencies(logits):
    """Chi-square of the draws that the numbers of a rollout give."""
    slots = np.arange(N, dtype=np.int32)
    uniform = np.asarray(sampling.uniforms(np.uint32(3), slots, slots, slots))
    hidden = np.tile(np.eye(D)[2], (N, 1))
    for top_p, top_k in ((1.0, 20), (0.3, 0), (0.8, 20)):
        tokens, _ = sample(hidden, logits.T, uniform, 1.0, top_p, top_k)
        p = probabilities(logits[2, :VALID], 1.0, top_p, top_k)
        expected = N * p[p > 0]
        found = np.bincount(tokens, minlength=VALID)[p > 0]
        assert found.sum() == N and 5 < len(expected) < 60
        df = len(expected) - 1
        chi2 = ((found - expected) ** 2 / expected).sum()
        assert abs(chi2 - df) < 4 * (2 * df) ** 0.5


def test_uniforms_are_uniform():
    draw, sample, position = np.meshgrid(*[np.arange(16)] * 3)
    flat = [x.ravel().astype(np.int32) for x in (draw, sample, position)]
    u = np.sort(jax.jit(sampling.uniforms)(np.uint32(1), *flat))
    assert len(np.unique(u)) > 4090 and 0 <= u[0] and u[-1] < 1
    gap = np.abs(u - (np.arange(4096) + 0.5) / 4096).max()
    assert gap < 1.63 / 64  # Kolmogorov-Smirnov at one per cent


def test_uniforms_never_change():
    """Runs continue, and are repeated, with the numbers they had."""
    i = np.array([0, 1, 7], np.int32)
    found = sampling.uniforms(np.uint32(5), i, i + 1, 3 * i)
    expected = ["0x1.4774ep-3", "0x1.a5b49cp-1", "0x1.03c44p-5"]
    assert [float(u) for u in found] == [float.fromhex(x) for x in expected]


# ----------------------------------------------------------------- ends and limits


def test_greedy_is_the_valid_argmax_and_leaves_nothing_out(logits):
    hidden = np.random.default_rng(1).normal(size=(50, D)).astype(np.float32)
    head = logits.T / 4
    x = hidden @ head[:VALID].T
    for top_p, top_k in (OFF, (0.1, 3)):
        tokens, logps = sample(hidden, head, np.zeros(50), 0.0, top_p, top_k)
        np.testing.assert_array_equal(tokens, x.argmax(1))
        expected = jax.nn.log_softmax(x)[np.arange(50), x.argmax(1)]
        np.testing.assert_allclose(logps, expected, atol=2e-5)  # at temperature 1


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 1), (1e-6, 0), (0.0, 0), (0.5, 1)])
def test_the_smallest_set_is_greedy(logits, top_p, top_k):
    hidden = np.random.default_rng(2).normal(size=(50, D))
    uniform = np.linspace(0, 1, 50, endpoint=False)
    tokens, logps = sample(hidden, logits.T, uniform, 0.7, top_p, top_k)
    greedy, _ = sample(hidden, logits.T, uniform, 0.0)
    np.testing.assert_array_equal(tokens, greedy)
    np.testing.assert_array_equal(logps, 0)


@pytest.mark.parametrize("top_k", [VALID, V, 100_000])
def test_a_top_k_of_everything_is_off(logits, top_k):
    """Also more than there are; bit for bit."""
    _, *off = on_a_grid(logits, 0.7)
    _, *all_of_them = on_a_grid(logits, 0.7, 1.0, top_k)
    np.testing.assert_array_equal(off, all_of_them)


@pytest.mark.parametrize("valid_vocab", [VALID, 200])  # 200: a last block of nothing
@pytest.mark.parametrize(("top_p", "top_k"), [*TRUNCATIONS, (1 - 2**-24, 0)])
def test_the_ends_of_the_unit_interval(logits, top_p, top_k, valid_vocab):
    ends = np.array([0.0, 1e-30, 1 - 2**-24, 1.0], np.float32)
    rows = np.repeat(np.arange(1, D), 4)
    tokens, logps = sample(
        np.eye(D)[rows],
        logits.T,
        np.resize(ends, len(rows)),
        1.0,
        top_p,
        top_k,
        valid_vocab,
    )
    for row, token, logp in zip(rows, tokens, logps, strict=True):
        p = probabilities(logits[row, :valid_vocab], 1.0, top_p, top_k)
        assert p[token] > 1e-40  # id 0 has 0 in float32
        np.testing.assert_allclose(logp, np.log(p[token]), atol=2e-5)


def test_neighbouring_float32_are_told_apart():
    """The k likeliest of logits that differ in their last bit, on both sides of 0."""
    rng = np.random.default_rng(0)
    for start in (np.float32(1.5), np.float32(-3)):
        steps = rng.permutation(VALID).astype(np.int32)
        row = (np.full(VALID, start).view(np.int32) + steps).view(np.float32)
        logits = np.pad(np.tile(row, (D, 1)), ((0, 0), (0, V - VALID)))
        for k in (1, 5, 100):
            _, tokens, logps = on_a_grid(logits, 1.0, 1.0, k)
            assert set(tokens[0]) == set(np.argsort(-row)[:k])
            np.testing.assert_allclose(logps, -np.log(k), atol=1e-4)


def test_weights_of_zero_are_not_found():
    """Though a parallel cumulative sum can grow there, by rounding."""
    rng = np.random.default_rng(0)
    weights = np.float32(rng.random((500, 1187)) * (rng.random((500, 1187)) < 0.3))
    ends = np.asarray(jax.jit(lambda x: jnp.cumsum(x, -1))(weights))
    rows, at = np.nonzero((weights[:, 1:] == 0) & (ends[:, 1:] > ends[:, :-1]))
    n, _ = jax.jit(sampling._find)(weights[rows], ends[rows, at])
    assert (weights[rows, n] > 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("top_p", "top_k"), TRUNCATIONS)
def test_sick_states_still_give_ids_of_the_vocabulary(
    logits, temperature, top_p, top_k
):
    """So that a diverged policy ends in the trainer's words, not in an IndexError."""
    scalars = (temperature, top_p, top_k)
    hidden = np.tile(np.eye(D), (2, 1))
    well = sample(hidden, logits.T, 0.5, *scalars)
    hidden[[1, 4]] = np.nan
    tokens, logps = sample(hidden, logits.T, 0.5, *scalars)
    assert (tokens >= 0).all() and (tokens < VALID).all()
    assert np.isnan(logps[[1, 4]]).all()
    rest = np.delete(np.arange(2 * D), [1, 4])
    np.testing.assert_array_equal(tokens[rest], well[0][rest])
    np.testing.assert_array_equal(logps[rest], well[1][rest])
    # Nothing left of the valid ids: not one of the others, either.
    nothing = np.where(np.arange(D) == 1, np.float32(-np.inf), logits.T)
    tokens, _ = sample(np.eye(D)[[1]], nothing, 0.5, *scalars)
    assert 0 <= tokens[0] < VALID


# ------------------------------------------------------------------ split vocabulary


def equations(jaxpr, closed: tuple[str, ...] = ()):
    """All equations but those inside primitives named in `closed`."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in closed:
            for inner in jaxprs_in_params(equation.params):
                yield from equations(inner, closed)


def test_no_gather_no_sort_and_nothing_to_pay_when_off():
    mesh = jax.sharding.AbstractMesh((2, 2, 2), parallel.AXES)
    layout = parallel.rollout_layout(mesh)
    shapes = [(8, D), (V, D), (8,), (), (), ()]
    types = [jnp.float32] * 5 + [jnp.int32]
    args = map(jax.ShapeDtypeStruct, shapes, types)
    function = functools.partial(sampling.sample, valid_vocab=VALID, layout=layout)
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    found = list(equations(jaxpr))
    names = {equation.primitive.name for equation in found}
    assert "sort" not in names and "top_k" not in names
    gathers = [e for e in found if e.primitive.name.startswith("all_gather")]
    # One number for each of a device's two slots, from two devices.
    assert gathers and all(e.outvars[0].aval.size == 4 for e in gathers)
    loops = {"scan", "while"}
    assert loops & names
    assert not loops & {e.primitive.name for e in equations(jaxpr, ("cond",))}


def eight_devices() -> dict:
    """Differences between one device and two ways to use eight."""
    rng = np.random.default_rng(0)
    vocab, valid, width, slots = 640, 610, 16, 512
    hidden = np.float32(rng.normal(size=(slots, width)))
    head = np.float32(rng.normal(size=(vocab, width)))
    head[17:valid:20] = head[16 : valid - 1 : 20]  # ties, also across devices
    head[400:410] = head[100:110]
    uniform = np.float32(rng.random(slots))
    serve = layout_of(2, 2, 2)
    layouts = {
        "serve": serve,
        "all_axes": parallel.Layout(serve.mesh, (), parallel.AXES, ()),
    }
    out = {}
    for temperature, top_p, top_k in [
        (0.0, *OFF),
        *((0.8, *truncation) for truncation in TRUNCATIONS),
    ]:
        scalars = (np.float32(temperature), np.float32(top_p), np.int32(top_k))
        args = (hidden, head, uniform, scalars, valid)
        one = jax.device_get(jitted(*args, layout_of(1, 1, 1)))
        for name, layout in layouts.items():
            tokens, logps = jax.device_get(jitted(*args, layout))
            gap = float(np.abs(logps - one[1]).max())
            key = f"{name}, {temperature}, {top_p}, {top_k}"
            out[key] = [int((tokens != one[0]).sum()), gap]
    return out


def test_eight_devices_sample_what_one_does():
    done = subprocess.run(
        [sys.executable, __file__],
        env=environment(8),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 2 * (1 + len(TRUNCATIONS))
    for case, (different, gap) in found.items():
        assert different == 0 and gap < 2e-5, case


if __name__ == "__main__":
    print(json.dumps(eight_devices()))
