"""Packing trajectories into rows: nothing moves, nothing is guessed from ids."""

import numpy as np
import pytest

from lld_jax.protocol.trajectory import (
    append_action,
    append_observation,
    new_trajectory,
)
from lld_jax.training.batch import make_batch, pack

TOKEN_BYTES = (b"", b"a", b"<answer>", b"x", b"</answer>", b"<end>")
END = PAD = 5  # the end token pads, too


def make(draw, sample, reward, searches, *turns):
    """`turns` are actions and observations in turn, after the prompt [1, 1]."""
    traj = new_trajectory(draw, sample, "q", ("gold",), [1, 1])
    for i, ids in enumerate(turns):
        if i % 2:
            append_observation(traj, ids)
        else:
            append_action(traj, ids, [-0.5 - i - j / 10 for j in range(len(ids))])
    traj.reward = reward
    traj.counters.update(valid_searches=searches)
    return traj


@pytest.fixture
def batch():
    return [
        make(7, 0, 1.0, 2, [3, 3], [1, 1, 1], [2, 3, 4]),
        make(9, 0, 0.0, 0, [3, END]),
        make(7, 1, 0.0, 1, [2, 4], [1], [3]),
        make(9, 1, 0.0, 1, [3]),
    ]


def test_rows(batch):
    out = pack(batch, rows=5, tokens=12, token_bytes=TOKEN_BYTES)
    assert {k: v.shape for k, v in out.items()} == dict.fromkeys(
        "ids positions segments mask answer_mask sampler_logps".split(), (5, 12)
    )
    dtypes = {v.dtype for k, v in out.items() if k != "sampler_logps"}
    assert dtypes == {np.dtype(np.int32)}
    assert out["sampler_logps"].dtype == np.float32
    assert out["ids"][0].tolist() == [1, 1, 3, 3, 1, 1, 1, 2, 3, 4, 0, 0]
    assert out["mask"][0].tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0]
    assert out["segments"][0].tolist() == [1] * 10 + [0] * 2
    assert out["answer_mask"][0].tolist() == [0] * 7 + [1] * 3 + [0] * 2
    np.testing.assert_allclose(
        out["sampler_logps"][0],
        [0, 0, -0.5, -0.6, 0, 0, 0, -2.5, -2.6, -2.7, 0, 0],
        rtol=1e-6,
    )
    assert (out["positions"] == np.arange(12)).all()
    # Row 2: the last answer block of the policy counts, not the last action.
    assert out["answer_mask"][2].tolist() == [0, 0, 1, 1] + [0] * 8
    assert not any(out[k][4].any() for k in out.keys() - {"positions"})


def test_an_end_token_that_is_also_padding_is_trained(batch):
    out = pack(batch, rows=4, tokens=12, token_bytes=TOKEN_BYTES)
    assert out["ids"][1, :4].tolist() == [1, 1, 3, END]
    assert out["mask"][1].tolist() == [0, 0, 1, 1] + [0] * 8
    assert out["segments"][1].tolist() == [1] * 4 + [0] * 8


def test_what_does_not_fit_is_an_error(batch):
    with pytest.raises(ValueError, match="4 trajectories do not fit 3 rows"):
        pack(batch, rows=3, tokens=12, token_bytes=TOKEN_BYTES)
    message = "draw 7, sample 0 has 10 tokens, but rollout.max_tokens is 9"
    with pytest.raises(ValueError, match=message):
        pack(batch, rows=4, tokens=9, token_bytes=TOKEN_BYTES)


@pytest.mark.parametrize(
    ("std", "expected"), [("sample", 0.70711), ("population", 1.0), ("none", 0.5)]
)
def test_advantages_are_relative_to_the_draw(batch, std, expected):
    """Groups interleave; the one without a right answer gets exactly 0."""
    out, scalars = make_batch(batch, tokens=12, token_bytes=TOKEN_BYTES, std=std)
    per_row = [expected, 0.0, -expected, 0.0]
    wanted = np.repeat(np.array(per_row)[:, None], 12, axis=1)
    np.testing.assert_allclose(out["advantages"], wanted, atol=1e-5)
    assert (out["advantages"][[1, 3]] == 0).all()
    assert out["advantages"].dtype == np.float32
    assert out["advantages"].flags.c_contiguous  # not a view of [B]
    assert scalars == {"valid_searches": np.float32(1.0)}  # (2 + 0 + 1 + 1) / 4
