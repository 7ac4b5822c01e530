"""Versions, device, processor and cores, for results and benchmarks."""

import functools
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import jax

from experiments.runs.executors import processors

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_VECTORS = ("avx512f", "avx2", "sve2", "sve", "asimd")  # The widest first.


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        **versions(PACKAGES),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device(),
        "processor": processor(),
        "cores": usable_cores(),
    }


_others: list[str] = []


def set_device(name: str) -> None:
    """Sets the device of the processes that carry out runs for this one."""
    _others[:] = [name]


def device() -> str:
    """Returns platform and kind of the device of runs: the first here, unless others have them."""
    if _others:
        return _others[0]
    first = jax.devices()[0]
    return f"{first.platform}: {first.device_kind}"


@functools.cache
def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of packages, "not installed" for missing ones."""
    out = {}
    for name in packages:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def usable_cores() -> int:
    return len(processors())


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name and its vector and matrix instructions, or the architecture.

    On virtual machines the name may stand for a whole family, hence family and model.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.machine()
    facts = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    parts = [facts.get("model name", platform.machine())]
    if "cpu family" in facts:
        parts.append(f"family {facts['cpu family']} model {facts.get('model', '?')}")
    flags = {*facts.get("flags", "").split(), *facts.get("Features", "").split()}
    parts += [name for name in _VECTORS if name in flags][:1]
    parts += ["amx_tile"] if "amx_tile" in flags else []
    return ", ".join(parts)
