"""Where the trajectories of a rollout batch lie: a row for each, or several in one.

A place `[4]` is micro-batch, row, segment (from 1) and first position; places are
`[B, 4]` int32 in the order of the trajectories. Trajectory i of B belongs to update
`i // (B / updates)` and stays there: packing changes which rows an update has, and how
many, not what it is trained on. Update j has the micro-batches `j * each` to
`(j + 1) * each`, as many as it would have without packing, so that shapes never change;
those without a token are skipped (`update.filled`).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict


def places_of(
    batch: Mapping[str, np.ndarray],
    config: ConfigDict,
    *,
    micro_rows: int,
    devices: int,
) -> np.ndarray:
    """Places of the trajectories of a batch `[B, T]`, as `optim.packing` has them."""
    lengths = np.count_nonzero(batch["segments"], axis=1)
    if not config.optim.packing:
        return one_a_row(len(lengths), micro_rows)
    return shared_rows(
        lengths.tolist(),
        batch["mask"].sum(1).tolist(),
        tokens=batch["ids"].shape[1],
        updates=config.optim.updates,
        micro_rows=micro_rows,
        devices=devices,
    )


def one_a_row(count: int, micro_rows: int) -> np.ndarray:
    """Places of trajectories that have a row each, in order."""
    number = np.arange(count, dtype=np.int32)
    first = np.zeros_like(number)
    return np.stack([number // micro_rows, number % micro_rows, first + 1, first], 1)


def shared_rows(
    lengths: Sequence[int],
    actions: Sequence[int],
    *,
    tokens: int,
    updates: int,
    micro_rows: int,
    devices: int,
) -> np.ndarray:
    """Places in as few rows as can be found, and as few micro-batches.

    A device computes all places of its rows, tokens or not, but log-probs at action
    tokens alone, and waits for the one that has most of them: rows are spread so that
    each device has about as many action tokens in each micro-batch.

    Args:
      lengths, actions: of each trajectory, its tokens and those that are trained.
      tokens: of a row.
      micro_rows: rows of a micro-batch; each device takes `micro_rows / devices` of
        them, in order.
    """
    size = len(lengths) // updates
    each, share = size // micro_rows, micro_rows // devices
    places = np.zeros((len(lengths), 4), np.int32)
    for update in range(updates):
        mine = range(update * size, (update + 1) * size)
        rows = [
            [mine[i] for i in row]
            for row in fill_rows([lengths[i] for i in mine], tokens)
        ]
        weight = [sum(actions[i] for i in row) for row in rows]
        # A cell is what a device takes of a micro-batch.
        load = [0] * (-(-len(rows) // micro_rows) * devices)
        taken = [0] * len(load)
        for number in sorted(range(len(rows)), key=lambda r: (-weight[r], r)):
            free = (cell for cell in range(len(load)) if taken[cell] < share)
            cell = min(free, key=lambda cell: (load[cell], cell))
            at = cell % devices * share + taken[cell]
            load[cell] += weight[number]
            taken[cell] += 1
            start = 0
            for segment, i in enumerate(rows[number], 1):
                places[i] = update * each + cell // devices, at, segment, start
                start += lengths[i]
    return places


def fill_rows(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Which trajectories share a row, as numbers: the better of two heuristics.

    Deterministic; ties go to the lower number. At most one row a trajectory.

    Raises ValueError if a trajectory is longer than a row.
    """
    if lengths and max(lengths) > tokens:
        raise ValueError(f"{max(lengths)} tokens do not fit a row of {tokens}")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return min(
        _first_fit(order, lengths, tokens), _fullest(order, lengths, tokens), key=len
    )


def _first_fit(order: list[int], lengths: list[int], tokens: int) -> list[list[int]]:
    """Longest first, each into the first row that has room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in order:
        at = next((r for r, n in enumerate(room) if n >= lengths[i]), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(tokens)
        rows[at].append(i)
        room[at] -= lengths[i]
    return rows


def _fullest(order: list[int], lengths: list[int], tokens: int) -> list[list[int]]:
    """Row by row: the longest that is left, and those that fill its row best."""
    rows, left = [], list(order)
    while left:
        row = [left.pop(0)]
        room = tokens - lengths[row[0]]
        # Bit s of sums[k]: some of the first k that are left have s tokens together.
        sums, fits = [1], (1 << room + 1) - 1
        for i in left:
            sums.append((sums[-1] | sums[-1] << lengths[i]) & fits)
            if sums[-1] >> room:
                break
        total = sums[-1].bit_length() - 1
        for i, without in reversed(list(zip(left, sums, strict=False))):
            if not without >> total & 1:
                row.append(i)
                total -= lengths[i]
        rows.append(row)
        taken = set(row)
        left = [i for i in left if i not in taken]
    return rows


def lay_out(
    batch: Mapping[str, np.ndarray], places: np.ndarray, shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """The arrays of a batch `[B, T]`, a row for each, at their places `[n, m, T]`.

    `segments` (1 on tokens, 0 elsewhere) become those of the places; `positions` start
    anew with each trajectory. What no trajectory takes is 0.
    """
    tokens = batch["ids"].shape[1]
    lengths = np.count_nonzero(batch["segments"], axis=1)
    out = {name: np.zeros((*shape, tokens), x.dtype) for name, x in batch.items()}
    for i, (micro, row, segment, start) in enumerate(places.tolist()):
        for name, x in batch.items():
            into = out[name][micro, row, start : start + lengths[i]]
            into[:] = segment if name == "segments" else x[i, : lengths[i]]
    return out
