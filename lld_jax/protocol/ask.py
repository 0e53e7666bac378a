"""Asks an environment in threads, so that no slot waits for the reply of another."""

import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from lld_jax.protocol.environment import Environment, Reply, Turn
from lld_jax.protocol.search import RetrievalError

_FAILED = Reply(None, "retriever", {"retrieval_failed": 1})
_POLL = 0.0005  # seconds


@dataclass
class Asked:
    """Turns under way, by name.

    Attributes:
      timeout: seconds until a turn without a reply is given up.
      deadlines: of the turns under way, on the monotonic clock.
      came: replies, or an error, that the threads left here.
    """

    environment: Environment
    timeout: float
    deadlines: dict[Hashable, float] = field(default_factory=dict)
    came: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)


def ask(asked: Asked, turns: Sequence[tuple[Hashable, Turn]]) -> None:
    """Starts one `environment.step` for turns, each under a name never used before.

    The thread is a daemon: an environment that hangs keeps no process alive.
    """
    if turns:
        deadline = time.monotonic() + asked.timeout
        asked.deadlines |= {name: deadline for name, _ in turns}
        threading.Thread(target=_step, args=(asked, list(turns)), daemon=True).start()


def replies(
    asked: Asked, wait: Callable[[int], bool] = lambda got: False
) -> list[tuple[Hashable, Reply]]:
    """All `(name, reply)` that came, each turn once.

    Waits while turns are under way and `wait(number of replies so far)`. A turn whose
    time is over, or whose step ended in a RetrievalError, has reason `retriever`.

    Raises whatever else an environment raised.
    """
    got: list[tuple[Hashable, Reply]] = []
    while asked.deadlines:
        try:
            name, reply = asked.came.get_nowait()
        except queue.Empty:
            now = time.monotonic()
            for name in [n for n, end in asked.deadlines.items() if end <= now]:
                del asked.deadlines[name]
                got.append((name, _FAILED))
            if not wait(len(got)):
                break
            time.sleep(_POLL)
            continue
        if isinstance(reply, BaseException):
            raise reply
        # A turn that was given up has no deadline any more: its reply is too late.
        if asked.deadlines.pop(name, None) is not None:
            got.append((name, reply))
    return got


def _step(asked: Asked, turns: list[tuple[Hashable, Turn]]) -> None:
    waiting = dict(enumerate(name for name, _ in turns))
    try:
        for i, reply in asked.environment.step([turn for _, turn in turns]):
            asked.came.put((waiting.pop(i), reply))
        if waiting:
            raise RuntimeError(f"step gave no reply to turns {sorted(waiting)}")
    except RetrievalError:
        for name in waiting.values():
            asked.came.put((name, _FAILED))
    except BaseException as error:  # the loop that reads raises it
        asked.came.put((None, error))
