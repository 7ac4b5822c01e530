"""Meshes of devices, and attention that the compiler cannot divide over them."""

import abc
import dataclasses
import itertools
import math
from typing import Any, ClassVar

import jax
from jax.sharding import AxisType, PartitionSpec

from posenc_jax.checks import require
from posenc_jax.engine.problem import Implementation, Problem, vary_over


def mesh_of(problem: Problem) -> Any:
    """Returns the mesh that q is on, else the one that is set."""
    mesh = jax.typeof(problem.q).sharding.mesh
    return jax.sharding.get_abstract_mesh() if mesh.empty else mesh


def open_axes(mesh: Any, *kinds: AxisType) -> tuple[str, ...]:
    """Returns the mesh axes of some kinds that have several devices, by default all but manual."""
    kinds = kinds or (AxisType.Auto, AxisType.Explicit)
    named = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in named if kind in kinds and mesh.shape[name] > 1)


def _device_count(mesh: Any, axes: Any) -> int:
    """Returns the number of devices along some axes of a mesh: a name, names, or None."""
    axes = (axes,) if isinstance(axes, str) else axes or ()
    for name in axes:
        require(
            name in mesh.axis_names,
            f"attention: {name!r} is no axis of the mesh, which has {mesh.axis_names}; "
            "see jax.set_mesh.",
        )
    return math.prod(mesh.shape[name] for name in axes)


def _checks_varying(mesh: Any) -> bool:
    """Returns whether a `shard_map` around this checks over which axes arrays vary."""
    return any(jax.typeof(jax.lax.axis_index(x)).mat.varying for x in mesh.manual_axes)


def placement_is_known(problem: Problem) -> bool:
    """Returns whether traces show the devices of a problem.

    `jax.jit(in_shardings=)` shows its mesh to the compiler alone.
    """
    return jax.device_count() == 1 or not mesh_of(problem).empty


def divides_heads(problem: Problem) -> bool:
    """Returns whether a mesh divides the heads, or may do so after tracing."""
    mesh = mesh_of(problem)
    spec = (*jax.typeof(problem.q).sharding.spec, None, None, None)
    return bool(open_axes(mesh, AxisType.Auto)) or spec[2] is not None


def mesh_refusal(problem: Problem, mesh: Any, batch: Any, heads: Any) -> str | None:
    """Returns why mesh axes cannot share the batch and the heads of a problem, or None."""
    sizes = problem.sizes()
    rows, parts = _device_count(mesh, batch), _device_count(mesh, heads)
    spec = (*jax.typeof(problem.q).sharding.spec, None, None)
    if spec[1] is not None or any(spec[3:]):
        return (
            f"with kernels, only batch and heads may be sharded, got q sharded {spec[:-2]}; "
            "posenc_jax.sharding has attention over a sharded sequence"
        )
    for count, axes, devices, noun in (
        (sizes.batch, batch, rows, "rows of the batch"),
        (sizes.num_heads, heads, parts, "query heads"),
    ):
        if count % devices:
            return f"{count} {noun} cannot be sharded over {devices} devices ({axes})"
    if sizes.kv_heads % parts and parts % sizes.kv_heads:
        return f"{sizes.kv_heads} key heads cannot be sharded over {parts} devices ({heads})"
    return None


def problem_specs(problem: Problem, mesh: Any, batch: Any, heads: Any) -> Any:
    """Returns a problem of partition specs, with arrays sharded over batch and heads.

    Every device has all key heads if there are fewer of them than devices for the heads.

    Raises:
      ValueError: unless the axes are of the mesh, q is sharded over them alone, and their devices
        divide B and N, and divide K or are a multiple of it.
    """
    reason = mesh_refusal(problem, mesh, batch, heads)
    require(reason is None, f"attention: {reason}.")
    kv_heads = problem.v.shape[2]
    by_key_head = kv_heads % _device_count(mesh, heads) == 0
    names = {"B": batch, "N": heads, "K": heads}

    def spec(axes, x):
        if "K" in axes and x.shape[2] == kv_heads and not by_key_head:
            axes = axes.replace("K", "-")
        pairs = zip(axes, x.shape, strict=False)
        return PartitionSpec(
            *(None if size == 1 and axis != "K" else names.get(axis) for axis, size in pairs)
        )

    return problem.map_arrays(spec)


def _with_local_key_head(p: Problem, specs: Any, heads: Any) -> Problem:
    """Returns the problem with the one key head of this device's queries, where it has all."""

    def take(x, spec):
        if heads is None or spec[2] is not None:
            return x
        sharing = jax.lax.axis_size(heads) // x.shape[2]
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(heads) // sharing, 1, 2)

    rules = tuple(rule.with_pairs(None) for rule in specs.rules)
    keys, specs = p.tokens("k"), dataclasses.replace(specs, mask=None, rules=rules).tokens("k")
    names = "k", "v", "features"
    return p.with_tokens("k", keys | {n: jax.tree.map(take, keys[n], specs[n]) for n in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardMapped(Implementation):
    """Attention that the compiler cannot partition: devices compute their parts in a `shard_map`.

    Attributes:
      interpret: run in Pallas' interpreter, on any platform: True or its parameters.
      cross_compile: compile where no such device is attached, for one that is described.
      batch_axes, head_axes: axes of an automatic mesh over which the batch and the heads are
        sharded: a name, a tuple of names, or () for none. The compiler cannot partition a kernel
        and will choose the sharding of q only later; arrays that it shards otherwise are
        resharded. Explicit axes are known and need none of this.
    """

    interpret: Any = False
    cross_compile: bool = False
    batch_axes: str | tuple[str, ...] | None = None
    head_axes: str | tuple[str, ...] | None = None
    platform: ClassVar[str]
    """As `jax.default_backend` names it."""
    check_vma: ClassVar[bool] = True
    """Whether results say over which axes of a `shard_map` they vary."""

    @abc.abstractmethod
    def device_refusal(self, problem: Problem) -> str | None:
        """Returns why one device cannot compute its part, given as types of arrays, or None."""

    @abc.abstractmethod
    def on_device(self, problem: Problem) -> tuple[jax.Array, Any]:
        """Computes a problem on one device, or one device's part of it."""

    def refusal(self, problem: Problem) -> str | None:
        anywhere = self.interpret or self.cross_compile
        if not anywhere and problem.platform != self.platform:
            return (
                f"{type(self).__name__} has kernels for the platform {self.platform}, and the "
                f"platform is {problem.platform}"
            )
        automatic = open_axes(mesh_of(problem), AxisType.Auto)
        if automatic and self.batch_axes is None and self.head_axes is None:
            return (
                f"the mesh has automatic axes {automatic}, and the compiler cannot partition a "
                f"kernel: give {type(self).__name__}(batch_axes=, head_axes=), or use explicit "
                "axes or jax.shard_map"
            )
        if not self.check_vma and _checks_varying(mesh_of(problem)):
            return "inside jax.shard_map it needs check_vma=False"
        return self.device_refusal(self._part(problem))

    def axes(self, problem: Problem) -> tuple[Any, Any]:
        """Returns the mesh axes of the batch and of the heads."""
        if open_axes(mesh_of(problem), AxisType.Explicit):
            batch, _, heads = (*jax.typeof(problem.q).sharding.spec, None, None, None)[:3]
            return batch, heads
        return self.batch_axes or None, self.head_axes or None

    def _part(self, problem: Problem) -> Problem:
        """Returns the types of the arrays that one device has."""
        mesh, (batch, heads) = mesh_of(problem), self.axes(problem)
        rows, parts = (_device_count(mesh, axes) for axes in (batch, heads))
        counts = {"B": rows, "N": parts, "K": parts}

        def divided(axes, x):
            sizes = (
                max(1, n // counts.get(axis, 1))
                for n, axis in itertools.zip_longest(x.shape, axes[: x.ndim])
            )
            return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)

        return problem.map_arrays(divided)

    def on_mesh(self, problem: Problem, mesh: Any, spec: Any) -> tuple[jax.Array, Any]:
        batch, _, heads = (*spec, None, None, None)[:3]
        specs = problem_specs(problem, mesh, batch, heads)
        with jax.sharding.use_abstract_mesh(mesh):
            problem = jax.tree.map(jax.sharding.reshard, problem, specs)
            return self._sharded(problem, mesh, batch, heads)

    def _sharded(self, problem: Problem, mesh: Any, batch: Any, heads: Any) -> Any:
        """Computes each device's part of the batch and of the heads."""
        specs = problem_specs(problem, mesh, batch, heads)
        out = PartitionSpec(batch, None, heads)
        alone = dataclasses.replace(self, batch_axes=None, head_axes=None)
        run = jax.shard_map(
            lambda p: alone(_with_local_key_head(p, specs, heads)),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(out, out),
            axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
            # The interpreter mixes varying arrays with others.
            check_vma=self.check_vma and not self.interpret,
        )
        return run(problem)

    def __call__(self, problem: Problem) -> tuple[jax.Array, Any]:
        mesh = mesh_of(problem)
        if open_axes(mesh, AxisType.Explicit):  # And q is whole on every device.
            return self.on_mesh(problem, mesh, PartitionSpec())
        if open_axes(mesh) or self.batch_axes or self.head_axes:
            return self._sharded(problem, mesh, self.batch_axes or None, self.head_axes or None)
        return self.on_device(vary_over(problem))
