r"""Cosine and sine where each pair of dimensions reads one of several coordinate axes.

    angle of pair p = c[axis(p)] w_p

for coordinates c of A axes (time, row and column of an image patch): what M-RoPE and axial
RoPE share (Wang et al. Qwen2-VL. 2024. https://arxiv.org/abs/2409.12191).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import coordinate_values, require


def axes_cos_sin(
    where: str, coordinates: jax.Array, axes: Sequence[int], frequencies: np.ndarray | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine, float32 [B, T, P].

    Args:
      where: the scheme's name, for errors.
      coordinates: [A, B, T], or [B, T] for a number that stands on every axis (text).
      axes: the axis that each pair reads, P numbers.
      frequencies: radians per unit, [P].

    Raises:
      ValueError: for coordinates of another rank, or with too few axes.
      TypeError: for coordinates that are neither integers nor float32.

    >>> at = jnp.array([[[1]], [[2]]])
    >>> axes_cos_sin("axial", at, (0, 1), np.array([0.0, 1.0]))[0]
    Array([[[ 1.        , -0.41614684]]], dtype=float32)
    """
    coordinates = coordinate_values(where, coordinates)
    if coordinates.ndim == 2:
        return cos_sin(coordinates, frequencies)
    require(
        coordinates.ndim == 3 and coordinates.shape[0] > max(axes),
        f"{where}: coordinates must be [A, B, T] with A > {max(axes)}, or [B, T] for all axes "
        f"alike, got {coordinates.shape}.",
    )
    by_pair = jnp.moveaxis(coordinates[np.asarray(axes)], 0, -1)
    cos, sin = cos_sin(by_pair, frequencies[:, None])
    return cos[..., 0], sin[..., 0]
