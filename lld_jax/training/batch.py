"""Trajectories to arrays: one row each, at a length that never changes."""

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from lld_jax.losses import group_advantages
from lld_jax.protocol.trajectory import Trajectory, answer_mask


def pack(
    trajectories: Sequence[Trajectory],
    *,
    rows: int,
    tokens: int,
    token_bytes: Sequence[bytes],
) -> dict[str, np.ndarray]:
    """Rows of a batch, each `[rows, tokens]`; rows beyond the trajectories are empty.

    Args:
      trajectories: at most `rows`, each at most `tokens` long.
      token_bytes: as in `search.Codec`, to find the answer spans.

    Returns:
      `ids, positions, segments` (0 is padding), `mask` and `answer_mask` int32, and
      `sampler_logps` float32.

    Raises:
      ValueError: more trajectories than rows, or one longer than a row.
    """
    if len(trajectories) > rows:
        raise ValueError(f"{len(trajectories)} trajectories do not fit {rows} rows")
    names = ("ids", "segments", "mask", "answer_mask")
    out = {name: np.zeros((rows, tokens), np.int32) for name in names}
    out["sampler_logps"] = np.zeros((rows, tokens), np.float32)
    for row, traj in enumerate(trajectories):
        n = len(traj.ids)
        if n > tokens:
            raise ValueError(
                f"draw {traj.draw}, sample {traj.sample} has {n} tokens, but "
                f"rollout.max_tokens is {tokens}"
            )
        out["ids"][row, :n] = traj.ids
        out["mask"][row, :n] = traj.mask
        out["segments"][row, :n] = 1
        out["sampler_logps"][row, :n] = traj.sampler_logps
        out["answer_mask"][row, :n] = answer_mask(traj.ids, traj.mask, token_bytes)
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), (rows, tokens))
    return out | {"positions": positions}


def make_batch(
    trajectories: Sequence[Trajectory],
    *,
    tokens: int,
    token_bytes: Sequence[bytes],
    std: str,
) -> tuple[dict[str, np.ndarray], dict[str, np.float32]]:
    """A scored rollout batch `[B, T]` with its advantages, and its scalars.

    A group is a draw. `valid_searches` is the mean number of searches of a trajectory.
    """
    batch = pack(
        trajectories, rows=len(trajectories), tokens=tokens, token_bytes=token_bytes
    )
    advantages = group_advantages(
        np.array([t.reward for t in trajectories], np.float32),
        np.array([t.draw for t in trajectories], np.int32),
        std=std,
    )
    per_token = np.broadcast_to(np.asarray(advantages)[:, None], batch["ids"].shape)
    batch["advantages"] = np.ascontiguousarray(per_token)
    searches = fmean(t.counters["valid_searches"] for t in trajectories)
    return batch, {"valid_searches": np.float32(searches)}
