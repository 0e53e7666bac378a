"""The environment of processes that tests start: pretended devices, quick compiling."""

import os

from paths import TESTS


def environment(
    devices: int = 1, *, optimized: bool = False, **more: str
) -> dict[str, str]:
    """Variables for a process of its own with that many CPU devices.

    The flags of `conftest.py` are in this process's environment, and stay; what runs
    for longer than it compiles is better `optimized` a little.
    """
    level = "--xla_backend_optimization_level=1 " if optimized else ""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} "
        f"{level}--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
        **more,
    }
