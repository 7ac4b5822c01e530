"""Names of the axes of parameters, for modules on a mesh."""

from collections.abc import Mapping, Sequence

from posenc_jax.checks import require

AxisNames = Mapping[str, str | tuple[str, ...] | None]
"""Maps sizes of a model to names of the axes with these sizes."""

SIZES = ("num_heads", "num_kv_heads", "head_dim", "model_dim")

KERNELS = {
    "query": ("model_dim", "num_heads", "head_dim"),
    "key": ("model_dim", "num_kv_heads", "head_dim"),
    "value": ("model_dim", "num_kv_heads", "head_dim"),
    "out": ("num_heads", "head_dim", "model_dim"),
}
"""The sizes of the axes of kernels. Biases have the axes of the output."""


def check_axis_names(caller: str, axis_names: AxisNames | None) -> None:
    """Raises `ValueError` for keys other than sizes."""
    unknown = sorted(set(axis_names or ()) - set(SIZES))
    require(
        not unknown,
        f"{caller}: axis_names names axes by their size, {', '.join(SIZES)}; got {unknown}.",
    )


def names(axis_names: AxisNames, sizes: Sequence[str]) -> tuple:
    """Returns the name of each axis, None for an axis of another size."""
    return tuple(axis_names.get(size) for size in sizes)
