"""What the processes of a run tell each other: results, failures, and no more.

Every process calls these functions at the same places, in the same order. What fails in
one then ends all of them together, and nobody waits for somebody who has left. With one
process they are plain calls.
"""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from lld_jax.parallel.preemption import Preempted

T = TypeVar("T")
_LEAST = 1 << 12  # bytes of a message; longer ones double, so that few shapes compile


class PeerFailed(RuntimeError):
    """Another process of the run failed; it is named, and says why."""


def is_first() -> bool:
    """Whether this is the process that writes files and talks to the user."""
    return jax.process_index() == 0


def gather(work: Callable[[], T]) -> list[T]:
    """Does `work` in every process; the results of all, in their order.

    Raises:
      whatever `work` raises here.
      Preempted: in all processes, if `work` raised it in one of them.
      PeerFailed: it raised something else in another process.
    """
    if jax.process_count() == 1:
        return [work()]
    own, mine = None, None
    try:
        mine = work()
    except BaseException as error:  # the others wait, whatever it is
        if getattr(error, "told", False):
            raise
        own = error
    kind = _kind(own)
    said = (kind, mine if own is None else _words(own))
    told = [pickle.loads(text) for text in _share(pickle.dumps(said))]
    failed = [(i, *what) for i, what in enumerate(told) if what[0] != "done"]
    if not failed:
        return [result for _, result in told]
    stopped = next((words for _, kind, words in failed if kind == "stopped"), None)
    if stopped is not None and kind != "stopped":
        raise _told(Preempted(stopped)) from own
    if own is not None:
        raise _told(own)
    number, _, words = failed[0]
    count = jax.process_count()
    raise _told(PeerFailed(f"process {number} of {count} failed: {words}"))


def agree(work: Callable[[], T]) -> T:
    """Does `work` in every process, each for itself; raises as `gather` does."""
    kept = []
    gather(lambda: kept.append(work()))
    return kept[0]


def first(work: Callable[[], T]) -> T:
    """Does `work` in process 0 alone; its result, in all. Raises as `gather` does."""
    return gather(lambda: work() if is_first() else None)[0]


def first_then_others(work: Callable[[], T]) -> T:
    """Does `work` in process 0 and then in the others: they find what it has made."""
    if jax.process_count() == 1:
        return work()
    kept = [agree(lambda: work() if is_first() else None)]
    return agree(lambda: kept[0] if is_first() else work())


def share_of(count: int) -> slice:
    """The part of `count` things in a row that is this process's to do."""
    i, n = jax.process_index(), jax.process_count()
    return slice(count * i // n, count * (i + 1) // n)


def _kind(error: BaseException | None) -> str:
    if error is None:
        return "done"
    return "stopped" if isinstance(error, Preempted) else "failed"


def _words(error: BaseException) -> str:
    if isinstance(error, Preempted):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _told(error: BaseException) -> Any:
    """Marks what every process knows: an exchange around this one has no news."""
    error.told = True
    return error


def _share(message: bytes) -> list[bytes]:
    """The messages of all processes, through their devices."""
    sizes = multihost_utils.process_allgather(np.int32(len(message)))
    longest = max(_LEAST, int(sizes.max()))
    padded = np.zeros(1 << (longest - 1).bit_length(), np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
