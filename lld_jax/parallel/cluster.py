"""The processes of one run: how they meet, and how one of them leaves.

Either `--coordinator`, `--processes` and `--process` say who they are, or JAX finds it
out (`--distributed`: TPU pods, Slurm).
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax

from lld_jax.config import ConfigError

_AGAIN = "start all of them again to go on"
_LAST_WORDS = (
    "lld_jax: another process of this run is gone or never came, or this one was "
    f"killed: it ended without a word of its own; {_AGAIN}"
)
# Of errors that a process sees when another one is not there any more.
_SIGNS = (
    "Gloo",
    "NCCL",
    "heartbeat",
    "coordination service",
    "Barrier failed",
    "Barrier timed out",
    "Connection closed by peer",
    "Connection reset by peer",
    "Socket closed",
)
_GRACE = 5.0  # seconds that a process which failed waits for the others to end too


def place(
    coordinator: str | None,
    processes: int | str | None,
    process: int | str | None,
    *,
    distributed: bool = False,
    heartbeat: int | str = 100,
) -> dict[str, Any] | None:
    """Arguments of `jax.distributed.initialize`; None for a run of one process.

    Raises ConfigError for values that are no numbers, out of range, or partly unset.
    """
    named = {
        "--coordinator": coordinator,
        "--processes": processes,
        "--process": process,
    }
    unset = [name for name, value in named.items() if value in (None, "")]
    silence = _whole("--heartbeat", heartbeat, 1)
    limits = {
        "heartbeat_timeout_seconds": silence,
        "shutdown_timeout_seconds": silence,
        "initialization_timeout": 3 * silence,
    }
    if distributed:
        if len(unset) < 3:
            given = ", ".join(sorted(named.keys() - set(unset)))
            raise ConfigError(
                f"--distributed: it finds out what {given} says; legal is one or the "
                "other"
            )
        return limits
    if len(unset) == 3:
        return None
    if unset:
        raise ConfigError(
            f"{unset[0]}: unset; legal is all of --coordinator=HOST:PORT, "
            "--processes=N and --process=I (or LLD_COORDINATOR, LLD_PROCESSES and "
            "LLD_PROCESS in the environment), or none"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--coordinator: {coordinator!r}; legal is HOST:PORT")
    count = _whole("--processes", processes, 1)
    index = _whole("--process", process, 0)
    if index >= count:
        raise ConfigError(f"--process: {index}; legal are 0 to {count - 1}")
    return limits | {
        "coordinator_address": coordinator,
        "num_processes": count,
        "process_id": index,
        # Each process has the devices that it sees, also under Slurm.
        "cluster_detection_method": "deactivate",
    }


def _whole(name: str, value: int | str, least: int) -> int:
    if not str(value).strip().isdecimal() or int(value) < least:
        raise ConfigError(
            f"{name}: {value!r}; legal is a whole number, {least} or more"
        )
    return int(value)


@contextlib.contextmanager
def joined(place: Mapping[str, Any] | None) -> Iterator[None]:
    """Meets the other processes, before any other call of JAX; parts at the end.

    Raises ConfigError if they do not all come, or bring different numbers of devices.
    """
    if place is None:
        yield
        return
    with _last_words():
        # Its handler of SIGTERM would stand where `preemption.Stop` puts its own.
        jax.config.update("jax_enable_preemption_service", False)
        try:
            jax.distributed.initialize(**place)
            devices = jax.devices()
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"the processes of this run did not meet: {error}"
            ) from error
        counts = [0] * jax.process_count()
        for device in devices:
            counts[device.process_index] += 1
        if len(set(counts)) > 1:
            raise ConfigError(
                f"the processes have {counts} devices; legal is the same number in each"
            )
        yield
        jax.distributed.shutdown()


@contextlib.contextmanager
def _last_words() -> Iterator[None]:
    """A helper that speaks if this process dies without a word.

    Once JAX knows that another process is gone it calls abort(), and no Python code
    runs any more.
    """
    script = f"trap '' INT TERM HUP; read -r end || echo '{_LAST_WORDS}' >&2"
    helper = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        helper.communicate(b"the end\n")


def others_gone(error: BaseException | None) -> str | None:
    """What to tell if `error` came of another process's end, else None."""
    while error is not None:
        text = str(error)
        if any(sign in text for sign in _SIGNS):
            line = text.strip().splitlines()[0]
            return f"another process of this run is gone ({line}); {_AGAIN}"
        error = error.__cause__ or error.__context__
    return None


def leave(message: str, code: int = 1, *, grace: float = _GRACE) -> NoReturn:
    """Ends this process with a message on stderr.

    One of several processes lets the others end in peace, and goes after `grace`
    seconds if they wait for something else.
    """
    if not jax.distributed.is_initialized():
        if code == 1:
            sys.exit(message)
        print(message, file=sys.stderr)
        sys.exit(code)
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    parting = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    parting.start()
    parting.join(grace)
    os._exit(code)
