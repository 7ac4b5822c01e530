r"""Cosine and sine for coordinates of several axes (time, row and column of an image patch).

    angle of pair p = c[axis(p)] w_p           one axis per pair: axial RoPE, M-RoPE
    angle of pair p = c[0] f_p + c[1] g_p      a combination of two: RoPE-Mixed, LieRE, ComRoPE

Coordinates [B, T] (text) have the same value on every axis.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin


def axis_per_pair(
    coordinates: jax.Array, axes: Sequence[int], frequencies: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine, float32 [B, T, P], where each of P pairs reads one axis.

    >>> coordinates = jnp.array([[[1]], [[2]]])
    >>> axis_per_pair(coordinates, (0, 1), np.array([0.0, 1.0]))[0]
    Array([[[ 1.        , -0.41614684]]], dtype=float32)
    """
    if coordinates.ndim == 2:
        return cos_sin(coordinates, frequencies)
    by_pair = jnp.moveaxis(coordinates[np.asarray(axes)], 0, -1)
    cos, sin = cos_sin(by_pair, frequencies[:, None])
    return cos[..., 0], sin[..., 0]


def sum_of_axes(
    coordinates: jax.Array, frequencies: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of `c[0] * frequencies[0] + c[1] * frequencies[1]`.

    Both are float32 [B, T, ...], for frequencies [2, ...]. Each product is exact at any int32
    coordinate; the two are added by the angle sum formula.
    """
    both = (coordinates, coordinates) if coordinates.ndim == 2 else coordinates
    (cos, sin), (cos2, sin2) = (
        cos_sin(c.reshape(*c.shape, *(1,) * (f.ndim - 1)), f)
        for c, f in zip(both, frequencies, strict=True)
    )
    return cos * cos2 - sin * sin2, sin * cos2 + cos * sin2
