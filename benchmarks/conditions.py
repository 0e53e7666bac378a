"""What a measurement ran on: the machine, the cores that it had, and the versions."""

import os
import platform
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "benchmarks/engines/tunix.txt"
CORES = 2


def machine() -> dict:
    """Processor, the cores that the engines had, memory, and the load before."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": (names or [platform.processor()])[0],
        "cores": CORES,
        "memory_gib": round(memory, 1),
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Of Python, the packages here, and what Tunix's environment asks for."""
    packages = "jax", "jaxlib", "flax", "numpy", "torch", "transformers"
    found = {d.name: d.version for d in metadata.distributions()}
    kept = {name: found[name] for name in packages if name in found}
    pins = [p.split("==") for p in REQUIREMENTS.read_text("utf-8").split() if "==" in p]
    tunix = {f"tunix: {name}": version for name, version in pins}
    return {"python": platform.python_version()} | kept | tunix
