"""Training on many devices: the mesh, and how arrays are sharded on it.

data        sequences of a batch: each device draws and computes its own
tensor      heads of attention, with a scheme's parameters per head; the MLP's inner width; logits,
            where the axis divides the vocabulary (embeddings are whole on every device)
sequence    tokens, with keys that travel between devices (`posenc_jax.sharding`)

Axes are automatic: parameters, the optimiser's state and batches get shardings here, and XLA
derives all others. The training text of a task is whole on every device. Next to `sequence`, XLA
may draw all sequences of a batch on every device before each takes its part.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.errors import ConfigError
from experiments.models.model import LanguageModel
from experiments.settings.config_io import near
from posenc_jax.sharding import SequenceParallel

AXES = ("data", "tensor", "sequence")
_AXIS_NAMES = {"num_heads": "tensor", "num_kv_heads": "tensor"}
_OTHER_KERNELS = {"up": P(None, "tensor"), "down": P("tensor"), "head": P(None, "tensor")}


def make(text: str, sharded: Iterable[tuple[str, str, int]]) -> Mesh:
    """Returns a mesh of all devices with the axes `AXES`; one that is not named has size 1.

    Args:
      text: such as "data=4,tensor=2".
      sharded: axis, setting and size of everything to be sharded over the mesh, such as
        ("tensor", "text.model.num_heads", 4).
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
    for axis, setting, size in sharded:
        if size % sizes[axis]:
            raise ConfigError(f"--mesh: {axis}={sizes[axis]} does not divide {setting} = {size}")
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def describe(mesh: Mesh) -> str:
    """Returns the axes of a mesh that are larger than 1."""
    axes = ",".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
    return axes or "one device"


def constrain(x: jax.Array, *axes: str) -> jax.Array:
    """Returns x with its first dimensions sharded over axes; without a mesh x itself."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, P(*axes))


def lower(
    advance: Any,
    arguments: Any,
    optimizer: Any,
    new_model: Callable[..., LanguageModel],
    mesh: Mesh,
    **static: Any,
) -> jax.stages.Lowered:
    """Returns `train.advance` lowered for a mesh.

    Args:
      advance, arguments: the jitted function and the shapes of its arguments.
      optimizer: the optimiser whose state is among them.
      new_model: returns the model that is trained, from a key and names of axes.
      mesh: the mesh.
      static: other static arguments than `graphdef`.
    """
    state, *others = arguments
    whole = NamedSharding(mesh, P())
    shardings = _of_state(state, optimizer, new_model, mesh)
    jitted = jax.jit(
        advance.__wrapped__,
        static_argnames=("graphdef", *static),
        donate_argnames="state",
        out_shardings=(shardings, whole),
    )
    state = jax.tree.map(_sharded, state, shardings)
    others = jax.tree.map(lambda x: _sharded(x, whole), others)
    with jax.set_mesh(mesh):
        return jitted.lower(state, *others, graphdef=_structure(new_model, mesh), **static)


def _sharded(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _structure(new_model: Callable[..., LanguageModel], mesh: Mesh) -> Any:
    """Returns the model's graph definition; its attention knows whether tokens are sharded."""
    model = nnx.eval_shape(new_model, jax.random.key(0))
    if mesh.shape["sequence"] > 1:
        for block in model.blocks:
            block.attention.implementation = SequenceParallel("sequence")
    return nnx.graphdef(model)


def _of_state(
    state: Any, optimizer: Any, new_model: Callable[..., LanguageModel], mesh: Mesh
) -> Any:
    """Returns the shardings of parameters and the optimiser's state, leaves [seeds, ...]."""
    params, moments = state
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(lambda key: new_model(key, _AXIS_NAMES), jax.random.key(0))
    named = nnx.state(model)
    specs = jax.tree.leaves(nnx.get_partition_spec(named))
    shardings = [
        NamedSharding(mesh, P(None, *_spec(path, leaf, spec, mesh)))
        for (path, leaf), spec in zip(jax.tree.leaves_with_path(params), specs, strict=True)
    ]
    of_params = jax.tree.unflatten(jax.tree.structure(params), shardings)
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
