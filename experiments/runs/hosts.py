"""Processes that train one model together: the first decides, writes and says everything."""

import pickle
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.errors import ConfigError


def join() -> None:
    """Finds the processes that were started together, by Slurm, Open MPI or on a pod of TPUs.

    JAX must not have opened devices before.
    """
    try:
        jax.distributed.initialize()
    except ValueError:  # This process was started alone.
        return
    except RuntimeError as error:
        raise ConfigError(f"--devices: {error!s:.300}") from None


def several() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1


def leads() -> bool:
    """Returns whether this is the first process."""
    return not several() or jax.process_index() == 0


def agreed(value: Any = None) -> Any:
    """Returns the value of the first process, in all of them; each must call this."""
    if not several():
        return value
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    buffer = np.zeros(-(-size // 4096) * 4096, np.uint8)  # Few shapes: each is compiled.
    if leads():
        buffer[:size] = data
    return pickle.loads(multihost_utils.broadcast_one_to_all(buffer)[:size].tobytes())
