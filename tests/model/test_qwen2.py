"""The Qwen2 of this project against the numbers of another implementation.

`qwen2_golden.npz` was made once with transformers' Qwen2 in float32 on a CPU: two
random models, tied and untied, with padding on the left, on the right and without.
"""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import DATA
from tiny import one_device, serving_device

from lld_jax import model
from lld_jax.model import hf, logprobs
from lld_jax.protocol.environment import Reply
from lld_jax.protocol.stop import stop_table
from lld_jax.rollout import Limits, Sampling, Task, decoding, rollout

ATOL = 5e-5


@pytest.fixture(scope="module")
def golden():
    with np.load(DATA / "qwen2_golden.npz") as file:
        return dict(file)


@functools.cache
def load(name: str):
    config = hf.read_config(DATA / f"qwen2_tiny_{name}")
    return config, hf.load(DATA / f"qwen2_tiny_{name}", config)


@functools.partial(
    jax.jit, static_argnames=("config", "dtype", "remat", "block", "chunk")
)
def forward(
    params,
    ids,
    positions,
    segments,
    *,
    config,
    dtype="float32",
    remat=False,
    block=512,
    chunk=64,
):
    """Logits `[B, T, V]` and logps `[B, T]`."""
    hidden = model.hidden_states(
        config,
        params,
        ids,
        positions,
        segments,
        dtype=jnp.dtype(dtype),
        layout=one_device(),
        remat=remat,
        block=block,
    )
    logps, _ = logprobs.token_logprobs(
        hidden,
        model.head(params),
        ids,
        temperature=1.0,
        valid_vocab=config.vocab,
        chunk=chunk,
        layout=one_device(),
    )
    head = model.head(params).astype(jnp.float32)
    return hidden.astype(jnp.float32) @ head.T, logps


def inputs(golden, name):
    keys = ("input_ids", "position_ids", "attention_mask")
    return [golden[f"{name}/{key}"] for key in keys]


@pytest.mark.parametrize("name", ["a", "b"])
def test_logits_and_logps(golden, name):
    config, params = load(name)
    logits, logps = forward(params, *inputs(golden, name), config=config)
    real = golden[f"{name}/attention_mask"] == 1
    np.testing.assert_allclose(
        logits[real], golden[f"{name}/logits"][real], atol=ATOL, rtol=0
    )
    valid = golden[f"{name}/token_logprobs_valid"] == 1
    np.testing.assert_allclose(
        logps[:, 1:][valid],
        golden[f"{name}/token_logprobs"][valid],
        atol=ATOL,
        rtol=0,
    )


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_older_config_layout_gives_the_same_model(name, tmp_path):
    shutil.copy(DATA / f"qwen2_tiny_{name}" / "config_legacy.json", tmp_path)
    (tmp_path / "config_legacy.json").rename(tmp_path / "config.json")
    assert hf.read_config(tmp_path) == load(name)[0]


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_long_row(golden, name):
    """200 tokens: rotary positions, and attention in blocks that do not fit evenly."""
    config, params = load(name)
    ids = golden[f"{name}/long_input_ids"]
    at, ones = np.arange(200)[None], np.ones((1, 200), int)
    logits, logps = forward(params, ids, at, ones, config=config, block=64, chunk=48)
    np.testing.assert_allclose(
        logps[:, 1:], golden[f"{name}/long_token_logprobs"], atol=ATOL, rtol=0
    )
    np.testing.assert_allclose(
        logits[:, -1], golden[f"{name}/long_last_logits"], atol=ATOL, rtol=0
    )


def test_blocks_of_any_size_agree(golden):
    config, params = load("a")
    want = forward(params, *inputs(golden, "a"), config=config)
    for block, chunk in ((3, 4), (5, 1)):
        found = forward(
            params, *inputs(golden, "a"), config=config, block=block, chunk=chunk
        )
        for x, y in zip(found, want, strict=True):
            np.testing.assert_allclose(x, y, atol=5e-6, rtol=0)


def test_padding_on_either_side_or_none_agree(golden):
    """Row 0 is padded on the left: its tokens alone, and behind another row's."""
    config, params = load("a")
    ids, positions, mask = inputs(golden, "a")
    logits, _ = forward(params, ids, positions, mask, config=config)
    own, other = ids[0][mask[0] == 1], ids[2][:5]
    alone, packed = np.zeros((2, 3, 14), int)
    alone[0, :9], packed[0] = own, [*other, *own]
    at = np.tile(np.arange(14), (3, 1))
    segments = np.ones((3, 14), int)
    right, _ = forward(params, alone, at, segments, config=config)
    at[0, 5:], segments[0, 5:] = np.arange(9), 2
    behind, _ = forward(params, packed, at, segments, config=config)
    np.testing.assert_allclose(right[0, :9], logits[0, 5:], atol=1e-5, rtol=0)
    np.testing.assert_allclose(behind[0, 5:], logits[0, 5:], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "remat"), [("a", False), ("b", True)])
def test_gradients(golden, name, remat):
    config, params = load(name)
    valid = golden[f"{name}/token_logprobs_valid"] == 1

    @jax.jit
    def nll(params):
        _, logps = forward(
            params, *inputs(golden, name), config=config, remat=remat, block=8, chunk=4
        )
        return -jnp.where(valid, logps[:, 1:], 0).sum() / valid.sum()

    value, grads = jax.value_and_grad(nll)(params)
    np.testing.assert_allclose(value, golden[f"{name}/nll"], atol=ATOL)
    layers = grads["layers"]
    kernel = golden[f"{name}/grad/model.layers.0.self_attn.k_proj.weight"]
    np.testing.assert_allclose(
        layers["key"]["kernel"][0].T, kernel, rtol=1e-4, atol=1e-6
    )
    ours = {
        "model.embed_tokens.weight": grads["embedding"],
        "model.layers.0.self_attn.q_proj.weight": layers["query"]["kernel"][0],
        "model.layers.0.self_attn.k_proj.bias": layers["key"]["bias"][0],
        "model.layers.1.mlp.down_proj.weight": layers["down"]["kernel"][1],
        "model.layers.1.input_layernorm.weight": layers["attention_norm"]["scale"][1],
        "model.norm.weight": grads["final_norm"]["scale"],
    }
    found = {name: float(jnp.linalg.norm(x)) for name, x in ours.items()}
    wanted = {key: float(golden[f"{name}/grad_norm/{key}"]) for key in ours}
    # A bias of the keys moves all scores of a query alike: little of it is left.
    assert found == pytest.approx(wanted, rel=2e-4, abs=1e-6)
    total = np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(grads)))
    assert total == pytest.approx(float(golden[f"{name}/grad_global_norm"]), rel=1e-5)


def test_bfloat16_weights(golden):
    config, params = load("a_bf16")
    real = golden["a/attention_mask"] == 1
    valid = golden["a/token_logprobs_valid"] == 1
    logits, logps = forward(params, *inputs(golden, "a"), config=config)
    wanted = golden["a_bf16/logits_f32_compute"]
    np.testing.assert_allclose(logits[real], wanted[real], atol=ATOL, rtol=0)
    np.testing.assert_allclose(
        logps[:, 1:][valid],
        golden["a_bf16/token_logprobs_f32_compute"][valid],
        atol=ATOL,
        rtol=0,
    )
    rough = jax.tree.map(jnp.bfloat16, params)
    found, _ = forward(rough, *inputs(golden, "a"), config=config, dtype="bfloat16")
    difference = np.abs(found - wanted)[real].max()
    assert 1e-3 < difference < 0.1  # theirs: 0.07


class Continue:
    """Prompts by number; every trajectory ends with its first action."""

    def __init__(self, prompts):
        self.prompts = prompts

    def start(self, question):
        return self.prompts[int(question)]

    def step(self, turns):
        return enumerate(Reply(None, "answered") for _ in turns)


@pytest.mark.parametrize(
    ("name", "head_last"), [("a", False), ("a", True), ("b", False), ("a_bf16", False)]
)
def test_greedy_continuation_through_the_cache(golden, name, head_last):
    """Prompts of 9 and 14 tokens in pieces of 8, then 20 greedy tokens in slots."""
    config, params = load(name)
    ids, _, mask = inputs(golden, name[0])
    prompts = [row[real == 1].tolist() for row, real in zip(ids, mask, strict=True)]
    programs = decoding.make_programs(
        config,
        decoding.Shapes(
            slots=3,
            tokens=40,
            extend_rows=2,
            extend_tokens=8,
            block=16,
            head_last=head_last,
        ),
        stop_table([b"x"] * config.vocab),
        dtype=jnp.float32,
        valid_vocab=config.vocab,
        layout=serving_device(),
    )
    trajectories, _ = rollout(
        programs,
        params,
        Continue(prompts),
        [Task(i, 0, str(i), ("",)) for i in range(3)],
        Limits(max_turns=0, max_action=20),
        Sampling(temperature=0.0),
        seed=0,
    )
    suffix = "_f32_compute" if name == "a_bf16" else ""
    for traj, wanted in zip(
        trajectories, golden[f"{name}/greedy_tokens{suffix}"], strict=True
    ):
        assert traj.ids[traj.prompt_length :] == wanted.tolist()


def test_initial_parameters_are_those_of_a_folder():
    config, params = load("b")
    init = jax.jit(lambda key: model.init(config, key, one_device()))
    fresh = init(jax.random.key(0))
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, params)
    assert (fresh["layers"]["query"]["bias"] == 0).all()
    assert (fresh["layers"]["mlp_norm"]["scale"] == 1).all()
    for kernel in (fresh["embedding"], fresh["head"], fresh["layers"]["up"]["kernel"]):
        assert float(kernel.std()) == pytest.approx(0.02, rel=0.05)
