"""The GPUs and TPU chips of this machine, one for each process.

A process that opens a GPU takes most of its memory, and one that opens a TPU all of it: another
process looks which there are, and the command itself stays on the CPU when it has workers.
"""

import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

from experiments.errors import ConfigError

_LOOK = """
import jax
devices = jax.local_devices()
platform = devices[0].platform
chips = {tuple(d.coords) if platform == "tpu" else d.id for d in devices}  # Some have two cores.
print(platform, devices[0].device_kind, len(chips), sep="\\n")
"""
_VARIABLES = {"gpu": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}
_OF_ONE_CHIP = {
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Devices(NamedTuple):
    """The devices that JAX would use here: platform, kind of the first, and their number."""

    platform: str
    kind: str
    count: int


@functools.cache
def look() -> Devices:
    """Returns the devices, without opening them in this process."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    modules = map(importlib.util.find_spec, ("jax_plugins", "libtpu"))
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms == "cpu" or not (platforms or plugins or any(modules)):
        return Devices("cpu", "cpu", 1)
    call = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True)
    if call.returncode:
        lines = call.stderr.strip().splitlines() or ["no message"]
        named = f" (JAX_PLATFORMS={platforms!r})" if platforms else ""
        raise ConfigError(f"JAX cannot use the devices of this machine{named}: {lines[-1]:.300}")
    platform, kind, count = call.stdout.splitlines()[-3:]
    return Devices(platform, kind, int(count))


def variables(devices: Devices, here: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Returns variables of the environment for one process on each device; none on CPUs.

    Devices that `CUDA_VISIBLE_DEVICES` or `TPU_VISIBLE_CHIPS` names are the only ones, and tasks
    of Slurm that see the same devices divide them.

    >>> variables(Devices("gpu", "H100", 2), {"CUDA_VISIBLE_DEVICES": "4,6"})
    [{'CUDA_VISIBLE_DEVICES': '4'}, {'CUDA_VISIBLE_DEVICES': '6'}]
    """
    if (name := _VARIABLES.get(devices.platform)) is None:
        return []
    names = here.get(name, "")
    numbers = [x.strip() for x in names.split(",")] if names else map(str, range(devices.count))
    numbers = list(numbers)[: devices.count]
    if len(numbers) >= (tasks := _tasks_here(here)):
        numbers = numbers[int(here.get("SLURM_LOCALID", 0)) % tasks :: tasks]
    more = _OF_ONE_CHIP if devices.platform == "tpu" else {}
    return [{name: number, **more} for number in numbers]


def _tasks_here(here: Mapping[str, str]) -> int:
    """Returns how many tasks `srun` started on this machine, as in "4(x2),3" for three."""
    tasks: list[int] = []
    text = here.get("SLURM_STEP_TASKS_PER_NODE", "")
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    node = int(here.get("SLURM_NODEID", 0))
    return max(1, tasks[node]) if node < len(tasks) else 1
