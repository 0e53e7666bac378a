"""How a run is told to stop."""

import os
import signal

import pytest

from lld_jax.parallel.preemption import Preempted, Stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_raised_at_the_next_safe_point_only(number):
    before = signal.getsignal(number)
    moved = []
    with Stop() as stop:
        progress = stop.watch(moved.append)
        progress(1)
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) is before  # a second one ends the process
        with pytest.raises(Preempted, match=number.name):
            progress(2)
        assert moved == [1, 2]
        with pytest.raises(Preempted):
            stop.check()
    assert signal.getsignal(number) is before


def test_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), Stop():
        assert signal.getsignal(signal.SIGTERM) is not before
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is before
