"""How a run is told to stop: signals become an exception at a safe point."""

import signal
from collections.abc import Callable
from typing import Any


class Preempted(Exception):
    """The process was told to end, and what was finished is saved."""


class Stop:
    """Turns SIGTERM and Ctrl-C into `Preempted` at the next safe point.

    A context manager for the main thread; a second signal ends the process at once.
    """

    def __init__(self):
        self._told: int | None = None
        self._before: dict[int, Any] = {}

    def watch(self, moved: Callable[[int], None]) -> Callable[[int], None]:
        """A progress callback that also raises `Preempted` once a signal has come."""

        def on_progress(done: int) -> None:
            moved(done)
            self.check()

        return on_progress

    def check(self) -> None:
        if self._told is not None:
            name = signal.Signals(self._told).name
            raise Preempted(f"stopped by {name}; start the same command to go on")

    def _handle(self, number: int, frame: Any) -> None:
        self._told = number
        signal.signal(number, self._before[number])

    def __enter__(self) -> "Stop":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
