"""Memory of the host process."""

import ctypes
import platform
import resource
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of glibc's mallopt(3)


def keep_freed_memory() -> bool:
    """Tells the C library to keep freed memory for the next allocation.

    A training step on a CPU frees and asks again for hundreds of megabytes; given back
    to the system each time, they come back page by page. True if it was told.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_TRIM_THRESHOLD, -1) and libc.mallopt(_MMAP_MAX, 0))


def peak_memory_gib() -> float:
    """The most memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
