"""Avoids page faults of the allocator, which would dominate the times of large outputs.

XLA on CPU allocates the output of every call anew. glibc maps allocations of 32 MB and more
from the system, with a page fault for every 4 KB: ten times the cost of adding one to such an
array. glibc reads its settings when a process starts, so the benchmark starts itself again.
"""

import os
import platform
import sys

WARM_HEAP = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_max": 0,
    "glibc.malloc.trim_threshold": 1 << 34,
    "glibc.malloc.top_pad": 1 << 28,
    "glibc.malloc.arena_max": 1,
}
SETTINGS = {
    # The time of compiling must not depend on earlier runs.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
_STARTED = "POSENC_BENCH_WARM_HEAP"


def use_warm_heap(arguments: list[str]) -> None:
    """Starts this process again with an allocator that keeps its memory; returns in the new one.

    Args:
      arguments: of `python -m experiments bench`.
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
    command = [sys.executable, "-m", "experiments", "bench", *arguments]
    os.execve(sys.executable, command, environment)


def heap() -> str:
    """Returns a description of the allocator of this process."""
    warm = "warm (kept by the allocator: started again with GLIBC_TUNABLES)"
    return warm if os.environ.get(_STARTED) else "as the system has it"


def load() -> str:
    """Returns the mean number of runnable processes in the last minute."""
    return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"
