"""Training on many devices: the mesh, how arrays are sharded on it, and processes on many hosts.

data        sequences of a batch: each device draws and computes its own
tensor      heads of attention, with what a scheme learns per head; the MLP's inner width; logits,
            where the axis divides the vocabulary (embeddings are whole on every device)
sequence    tokens, with keys that travel between devices (`posenc_jax.sharding`)

Axes are automatic: parameters, the optimiser's state and batches get shardings here, and XLA
derives all others. The training text of a task is whole on every device. Next to `sequence`, XLA
may draw all sequences of a batch on every device before each takes its part.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.config_io import Parser, near
from experiments.errors import ConfigError
from experiments.model import LanguageModel, Position
from experiments.tasks import Task
from posenc_jax.sharding import SequenceParallel

AXES = ("data", "tensor", "sequence")
_AXIS_NAMES = {"num_heads": "tensor", "num_kv_heads": "tensor"}
_OTHER_KERNELS = {"up": P(None, "tensor"), "down": P("tensor"), "head": P(None, "tensor")}


def from_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Returns the mesh in words, if one is given, and the other arguments.

    With --distributed it connects this process with the others, before anything uses a device.

    Raises:
      ConfigError: for flags that do not belong together, or if the others are not found.
    """
    parser = Parser(add_help=False)
    parser.add_argument("--mesh")
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    options, others = parser.parse_known_args(arguments)
    of_process = options.coordinator, options.num_processes, options.process_id
    if options.distributed and options.mesh is None:
        raise ConfigError("--distributed: needs --mesh, such as --mesh data=8")
    if not options.distributed and any(x is not None for x in of_process):
        raise ConfigError("--coordinator, --num-processes and --process-id need --distributed")
    if options.distributed:
        try:
            jax.distributed.initialize(*of_process)
        except (TypeError, ValueError, RuntimeError) as error:
            words = " ".join(str(error).split())
            raise ConfigError(
                f"--distributed: {words:.200} (where JAX does not know the cluster, give "
                "--coordinator, --num-processes and --process-id)"
            ) from None
    return options.mesh, others


def make(text: str, tasks: Mapping[str, Task]) -> Mesh:
    """Returns a mesh of all devices with the axes `AXES`; one that is not named has size 1.

    Args:
      text: such as "data=4,tensor=2".
      tasks: that are to be trained on it, by name.

    Raises:
      ConfigError: for unknown axes, sizes whose product is not the number of devices, and axes
        that do not divide what is sharded over them.
    """
    given: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES:
            raise ConfigError(f"--mesh: unknown axis {name!r}{near(name, AXES)}")
        if name in given or not size.isdecimal() or int(size) < 1:
            raise ConfigError(f"--mesh: must be such as data=4,tensor=2, got {text!r}")
        given[name] = int(size)
    if (count := math.prod(given.values())) != jax.device_count():
        raise ConfigError(f"--mesh: {text} is for {count} devices, there are {jax.device_count()}")
    sizes = {name: given.get(name, 1) for name in AXES}
    for task, settings in tasks.items():
        train, model = settings.train, settings.model
        for axis, setting, size in (
            ("data", "train.batch", train.batch),
            ("tensor", "model.num_heads", model.num_heads),
            ("sequence", "train_length", settings.train_length),
        ):
            if size % sizes[axis]:
                raise ConfigError(
                    f"--mesh: {axis}={sizes[axis]} does not divide {task}.{setting} = {size}"
                )
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def describe(mesh: Mesh) -> str:
    """Returns a mesh in words."""
    axes = ",".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
    return f"{axes or 'one device'}, processes: {jax.process_count()}"


def constrain(x: jax.Array, *axes: str) -> jax.Array:
    """Returns x with its first dimensions sharded over axes; without a mesh x itself."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, P(*axes))


def lower(
    advance: Any, arguments: Any, optimizer: Any, task: Task, position: Position, mesh: Mesh
) -> jax.stages.Lowered:
    """Returns `train.advance` lowered for a mesh.

    Args:
      advance: the jitted function.
      arguments: its arguments, as shapes.
      optimizer: the optimiser whose state is among them.
      task, position, mesh: what is trained, and where.
    """
    state, *others = arguments
    whole = NamedSharding(mesh, P())
    shardings = _of_state(state, optimizer, task, position, mesh)
    jitted = jax.jit(
        advance.__wrapped__,
        static_argnames=("graphdef", "task"),
        donate_argnames="state",
        out_shardings=(shardings, whole),
    )
    state = jax.tree.map(_sharded, state, shardings)
    others = jax.tree.map(lambda x: _sharded(x, whole), others)
    with jax.set_mesh(mesh):
        return jitted.lower(state, *others, graphdef=_structure(task, position, mesh), task=task)


def _sharded(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _structure(task: Task, position: Position, mesh: Mesh) -> Any:
    """Returns the model's graph definition; its attention knows whether tokens are sharded."""
    model = _abstract_model(task, position)
    if mesh.shape["sequence"] > 1:
        for block in model.blocks:
            block.attention.implementation = SequenceParallel("sequence")
    return nnx.graphdef(model)


def _abstract_model(task: Task, position: Position, axis_names: Any = None) -> LanguageModel:
    def make(key):
        return LanguageModel(task.model, position, task.vocab_size, key, axis_names)

    return nnx.eval_shape(make, jax.random.key(0))


def _of_state(state: Any, optimizer: Any, task: Task, position: Position, mesh: Mesh) -> Any:
    """Returns the shardings of parameters and the optimiser's state, leaves [seeds, ...]."""
    params, moments = state
    with jax.set_mesh(mesh):
        named = nnx.state(_abstract_model(task, position, _AXIS_NAMES))
    specs = jax.tree.leaves(nnx.get_partition_spec(named))
    found = [
        NamedSharding(mesh, P(None, *_spec(path, leaf, spec, mesh)))
        for (path, leaf), spec in zip(jax.tree.leaves_with_path(params), specs, strict=True)
    ]
    of_params = jax.tree.unflatten(jax.tree.structure(params), found)
    of_moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        moments,
        of_params,
        transform_non_params=lambda _: NamedSharding(mesh, P()),
    )
    return of_params, of_moments


def _spec(path: Any, leaf: Any, spec: P, mesh: Mesh) -> P:
    module, kind = (getattr(key, "key", None) for key in path[-3:-1])
    if kind != "kernel" or module not in _OTHER_KERNELS:
        return spec
    spec = _OTHER_KERNELS[module]
    divides = all(
        axis is None or size % mesh.shape[axis] == 0
        for size, axis in zip(leaf.shape[1:], spec, strict=False)
    )
    return spec if divides else P()


def place(tree: Any, shardings: Any) -> Any:
    """Returns arrays with other shardings; all processes have to call it."""
    return jax.jit(lambda x: x, out_shardings=shardings)(tree)


def gather(tree: Any, mesh: Mesh) -> Any:
    """Returns sharded arrays whole, on the first device of each process."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), place(tree, NamedSharding(mesh, P())))


def agreed(answers: list[bool]) -> list[bool]:
    """Returns the answers of process 0 in all processes."""
    return [bool(x) for x in multihost_utils.broadcast_one_to_all(np.array(answers))]
