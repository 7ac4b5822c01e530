"""What a benchmark ran on, and an allocator that keeps page faults out of it.

XLA on CPU allocates the output of every call anew. glibc maps allocations of 32 MB and more
freshly from the system, so that each call pays a page fault for every 4 KB: ten times what adding
one to such an array costs. A process that keeps its heap does not, and shows what was computed.
It must be told so before it starts, hence the second start.
"""

import importlib.metadata
import os
import platform
import sys
from typing import Any

WARM_HEAP = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_max": 0,
    "glibc.malloc.trim_threshold": 1 << 34,
    "glibc.malloc.top_pad": 1 << 28,
    "glibc.malloc.arena_max": 1,
}
SETTINGS = {
    # torch's threads sleep while another library is measured, rather than spin.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    # Seconds of compiling shall not depend on what was compiled before.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
PEERS = ("torch", "transformers", "equinox", "rotary-embedding-torch", "tokamax")
_STARTED = "POSENC_BENCH_WARM_HEAP"


def use_warm_heap(arguments: list[str]) -> None:
    """Starts this process again with an allocator that keeps its memory; returns in that one.

    Args:
      arguments: of `python -m experiments.bench`.
    """
    if os.environ.get(_STARTED) or platform.libc_ver()[0] != "glibc":
        return
    tunables = ":".join(f"{name}={value}" for name, value in WARM_HEAP.items())
    before = os.environ.get("GLIBC_TUNABLES", "")
    environment = {
        **os.environ,
        **SETTINGS,
        _STARTED: "1",
        "GLIBC_TUNABLES": f"{before}:{tunables}" if before else tunables,
    }
    sys.stdout.flush()
    command = [sys.executable, "-m", "experiments.bench", *arguments]
    os.execve(sys.executable, command, environment)


def use_devices(devices: int) -> None:
    """Makes JAX see at least so many host devices, all on the cores there are."""
    import jax

    config: Any = jax.config
    if config.jax_num_cpu_devices < devices > 1:
        config.update("jax_num_cpu_devices", devices)


def describe(peers: bool = False) -> dict[str, str]:
    """Returns versions, processor, cores, load and allocator."""
    import flax
    import jax
    import jaxlib

    device = jax.devices()[0]
    versions = (
        f"python {platform.python_version()}, jax {jax.__version__}, "
        f"jaxlib {jaxlib.__version__}, flax {flax.__version__}"
    )
    for name in PEERS if peers else ():
        try:
            versions += f", {name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            versions += f", no {name}"
    return {
        "versions": versions,
        "device": f"{device.platform} ({device.device_kind}), {processor()}",
        "cores": f"{usable_cores()} usable",
        "load before": load(),
        "heap": "warm (kept by the allocator: started again with GLIBC_TUNABLES)"
        if os.environ.get(_STARTED)
        else "as the system has it",
    }


def load() -> str:
    """Returns how many processes wanted to run in the last minute."""
    return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def processor() -> str:
    """Returns the processor's name as Linux says it, or the architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
