"""One model over several devices: the batch is divided among them, and parameters if asked to."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where arrays are on a mesh with the axis "data".

    Attributes:
      mesh: the devices.
      shards_parameters: whether each device has a part of the parameters and of the state of the
        optimiser. Otherwise it has all of them.
    """

    mesh: Mesh
    shards_parameters: bool = False

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of arrays that all devices have."""
        return NamedSharding(self.mesh, PartitionSpec())

    def of_state(self, state: Any) -> Any:
        """Returns the shardings of parameters or moments: of the longest axis that divides."""

        def sharding(leaf: Any) -> NamedSharding:
            axes = [n if n % self.mesh.size == 0 else 0 for n in leaf.shape]
            if not (self.shards_parameters and any(axes)):
                return self.everywhere
            names = [None] * len(axes)
            names[int(np.argmax(axes))] = "data"
            return NamedSharding(self.mesh, PartitionSpec(*names))

        return jax.tree.map(sharding, state)

    def constrain(self, state: Any) -> Any:
        """Within a program: returns a state where it belongs."""
        return jax.lax.with_sharding_constraint(state, self.of_state(state))

    def divide(self, batch: Any) -> Any:
        """Within a program: returns arrays [B, ...] divided among the devices."""
        return jax.lax.with_sharding_constraint(
            batch, NamedSharding(self.mesh, PartitionSpec("data"))
        )

    def shapes(self, state: Any, *others: Any) -> tuple[Any, ...]:
        """Returns shapes of arguments, with their shardings; only the first is a state."""

        def shape(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        everywhere = jax.tree.map(lambda leaf: shape(leaf, self.everywhere), others)
        return jax.tree.map(shape, state, self.of_state(state)), *everywhere

    def put(self, tree: Any, shardings: Any = None) -> Any:
        """Returns arrays on the devices, by default whole on each; all processes have the same."""
        return jax.jit(lambda x: x, out_shardings=shardings or self.everywhere)(tree)


def check_batch(task: Any, devices: int) -> None:
    """Raises ConfigError for a task that a number of devices does not divide."""
    if task.train.batch % devices:
        raise ConfigError(
            f"{task.name}.train.batch: {task.train.batch} is not a multiple of --devices {devices}"
        )


def layout_of(devices: int, shards_parameters: bool = False) -> Layout:
    """Returns the layout of a model on the first devices, or on the devices of all processes."""
    there, hint = jax.devices(), ""
    if there[0].platform == "cpu":
        hint = "; XLA_FLAGS=--xla_force_host_platform_device_count=8 makes 8 of a CPU"
    if not 1 <= devices <= len(there):
        raise ConfigError(f"--devices: must be from 1 to {len(there)} here, got {devices}{hint}")
    if jax.process_count() > 1 and devices < len(there):
        raise ConfigError(f"--devices: must be {len(there)}, those of all processes, got {devices}")
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=there[:devices])
    return Layout(mesh, shards_parameters)


def gathered(tree: Any) -> Any:
    """Returns whole arrays of numpy; all processes must call it where they share a mesh."""

    def whole(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not (
            leaf.is_fully_addressable or leaf.is_fully_replicated
        ):
            return multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(whole, tree)
