"""Names of the axes of parameters, for modules on a mesh."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from posenc_jax.checks import require
from posenc_jax.schemes.scheme import Scheme

AxisNames = Mapping[str, str | tuple[str, ...] | None]
"""From the sizes of a model to the names of the axes that have them."""

SIZES = ("num_heads", "num_kv_heads", "head_dim", "model_dim")

KERNELS = {
    "query": ("model_dim", "num_heads", "head_dim"),
    "key": ("model_dim", "num_kv_heads", "head_dim"),
    "value": ("model_dim", "num_kv_heads", "head_dim"),
    "out": ("num_heads", "head_dim", "model_dim"),
}
"""The sizes of the axes of kernels. Biases have those of the output."""


def check_axis_names(where: str, axis_names: AxisNames | None) -> None:
    """Raises for names of anything but the sizes."""
    unknown = sorted(set(axis_names or ()) - set(SIZES))
    require(
        not unknown,
        f"{where}: axis_names names axes by their size, {', '.join(SIZES)}; got {unknown}.",
    )


def names(axis_names: AxisNames, sizes: tuple[str | None, ...]) -> tuple:
    """Returns the name of each axis, None for one without."""
    return tuple(None if size is None else axis_names.get(size) for size in sizes)


@functools.lru_cache(256)
def sizes_of_params(scheme: Scheme) -> tuple[tuple[str | None, ...], ...]:
    """Returns the sizes of the axes of each parameter, in the order of `jax.tree.leaves`.

    An axis has a size that it is as long as, if it doubles with it.
    """
    shapes = _shapes(scheme)
    found: list[list[str | None]] = [[None] * len(shape) for shape in shapes]
    for size in SIZES:
        lengths: set[int] = set()
        try:  # One after the other, so that key heads divide query heads.
            scheme = _doubled(scheme, size, lengths)
            larger = _shapes(scheme)
        except ValueError:  # Another setting depends on this size.
            continue
        for axes, shape, new in zip(found, shapes, larger, strict=True):
            for i, (a, b) in enumerate(zip(shape, new, strict=True)):
                if a in lengths and b == 2 * a:
                    axes[i] = size
        shapes = larger
    return tuple(map(tuple, found))


def _shapes(scheme: Scheme) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(scheme.init, jax.random.key(0)))]


def _doubled(x: Any, size: str, lengths: set[int]) -> Any:
    """Returns a scheme, and all schemes in it, with twice a size; adds the size to `lengths`."""
    if isinstance(x, tuple):
        return tuple(_doubled(item, size, lengths) for item in x)
    if not isinstance(x, Scheme):
        return x
    changes = {}
    for field in dataclasses.fields(x):
        old = getattr(x, field.name)
        if field.name == size and isinstance(old, int):
            lengths.add(old)
            changes[size] = 2 * old
        else:
            changes[field.name] = _doubled(old, size, lengths)
    return x.replace(**changes)
