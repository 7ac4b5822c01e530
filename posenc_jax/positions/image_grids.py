"""Image grids: coordinates of patches, and learned grids resized to another resolution."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import (
    array_of_rank,
    floating,
    integers_from,
    one_of,
    positive_integers,
    require,
)


def _weights(size: int, new: int, method: str, align_corners: bool) -> np.ndarray:
    """Returns interpolation weights, float64 [new, size]."""
    steps = np.arange(new)
    if align_corners:
        x = steps * ((size - 1) / max(new - 1, 1))
    else:
        x = (steps + 0.5) * (size / new) - 0.5
        x = x if method == "bicubic" else np.maximum(x, 0.0)
    first = np.floor(x).astype(int)
    part = x - first
    if method == "bilinear":
        around = {0: 1 - part, 1: part}
    else:

        def cubic(x):
            a, x = -0.75, np.abs(x)
            near = ((a + 2) * x - (a + 3)) * x * x + 1
            return np.where(x <= 1, near, a * (((x - 5) * x + 8) * x - 4))

        around = {n: cubic(part - n) for n in (-1, 0, 1, 2)}
    out = np.zeros((new, size))
    for n, weight in around.items():
        np.add.at(out, (steps, np.clip(first + n, 0, size - 1)), weight)
    return out


def resize_grid(
    grid: jax.Array,
    rows: int,
    columns: int,
    *,
    method: str = "bicubic",
    align_corners: bool = False,
    antialias: bool = False,
) -> jax.Array:
    """Returns a grid [..., R, C] interpolated to [..., rows, columns], as PyTorch does.

    The cubic kernel has a = -0.75, as in `torch.nn.functional.interpolate`, which released
    models use, and the border is repeated. With `antialias` the kernel has
    a = -0.5, weights at the border are normalised, and the kernel widens when the grid shrinks, as
    in `jax.image.resize` and in PyTorch.

    Args:
      grid: [..., R, C].
      rows, columns: the new size.
      method: "bicubic" (ViT, Swin) or "bilinear".
      align_corners: whether the centres of the corner cells coincide (Qwen3-VL), rather than
        the outer edges.
      antialias: whether to filter as `jax.image.resize` (DINOv2 with `interpolate_antialias`).

    Raises:
      ValueError: for an unknown method, sizes below one, or `antialias` with `align_corners`.
      TypeError: for a grid of integers, which the cubic kernel would overflow.

    >>> resize_grid(jnp.array([[0.0, 1.0]]), 1, 4, method="bilinear")
    Array([[0.  , 0.25, 0.75, 1.  ]], dtype=float32)
    """
    floating("resize_grid", "grid", grid)
    one_of("resize_grid", ("bicubic", "bilinear"), method=method)
    positive_integers("resize_grid", rows=rows, columns=columns)
    require(
        min(grid.shape[-2:]) >= 1,
        f"resize_grid: grid must have a row and a column, got shape {grid.shape}.",
    )
    require(
        not (antialias and align_corners),
        "resize_grid: antialias has no align_corners, in PyTorch neither.",
    )
    if antialias:
        filter_name = {"bicubic": "cubic", "bilinear": "linear"}[method]
        shape = (*grid.shape[:-2], rows, columns)
        return jax.image.resize(grid.astype(jnp.float32), shape, filter_name).astype(grid.dtype)
    down, across = (
        jnp.asarray(_weights(size, new, method, align_corners), jnp.float32)
        for size, new in zip(grid.shape[-2:], (rows, columns), strict=True)
    )
    exact = grid.astype(jnp.float32)
    out = jnp.einsum("...rc,xr,yc->...xy", exact, down, across, precision="highest")
    return out.astype(grid.dtype)


def grid_coordinates(
    batch: int, rows: int, columns: int, *, prefix: int = 0, centred: bool = False
) -> jax.Array:
    """Returns coordinates [2, B, prefix + rows * columns] of patches in row-major order.

    Args:
      batch: the batch size, B.
      rows, columns: the size of the grid.
      prefix: number of tokens before the patches (CLS, registers), at coordinate 0.
      centred: whether coordinates are the patches' centres on a scale from -2 pi to 2 pi,
        float32, for any grid size (DINOv3). Default: int32 from 0.

    Raises:
      ValueError: for a size below one.

    >>> grid_coordinates(1, 2, 2, prefix=1)[:, 0]
    Array([[0, 0, 0, 1, 1],
           [0, 0, 1, 0, 1]], dtype=int32)
    """
    positive_integers("grid_coordinates", batch=batch, rows=rows, columns=columns)
    integers_from(0, "grid_coordinates", prefix=prefix)
    grid = np.indices((rows, columns)).reshape(2, 1, -1)
    if centred:
        size = np.array([rows, columns])[:, None, None]
        grid = 2 * np.pi * ((2 * grid + 1) / size - 1)
    grid = np.pad(grid, ((0, 0), (0, 0), (prefix, 0)))
    kind = jnp.float32 if centred else jnp.int32
    return jnp.broadcast_to(jnp.asarray(grid, kind), (2, batch, grid.shape[-1]))


def augmented_coordinates(
    key: jax.Array,
    coordinates: jax.Array,
    *,
    prefix: int = 0,
    shift: float = 0.0,
    jitter: float = 1.0,
    rescale: float = 1.0,
) -> jax.Array:
    """Moves and stretches the coordinates of patches at random, as DINOv3 does in training.

    The names are `pos_embed_shift`, `pos_embed_jitter` and `pos_embed_rescale` of its configs; a
    null is the default here. transformers draws once for all images: give one key for a batch.

    Args:
      key: a random key.
      coordinates: float [A, B, T], from -2 pi to 2 pi, as `grid_coordinates(centred=True)` returns.
      prefix: number of tokens before the patches, whose coordinates stay.
      shift: s; each axis moves by 2 pi u, u uniform in [-s, s].
      jitter: j; each axis is multiplied by a log-uniform number in [1/j, j].
      rescale: r; all axes are multiplied by one log-uniform number in [1/r, r].

    Raises:
      ValueError: for a negative shift, a jitter or rescale below 1, and a prefix beyond T.

    >>> grid = grid_coordinates(1, 2, 2, prefix=1, centred=True)
    >>> augmented_coordinates(jax.random.key(0), grid, rescale=2.0).shape
    (2, 1, 5)
    """
    require(
        shift >= 0 and min(jitter, rescale) >= 1,
        f"augmented_coordinates: shift must be 0 or more and factors 1 or more, got shift={shift}, "
        f"jitter={jitter}, rescale={rescale}.",
    )
    array_of_rank("augmented_coordinates", "coordinates", coordinates, 3, "[A, B, T]")
    require(
        0 <= prefix <= coordinates.shape[2],
        f"augmented_coordinates: prefix must be 0 to T = {coordinates.shape[2]}, got {prefix}.",
    )
    floating("augmented_coordinates", "coordinates", coordinates)
    shapes = [(len(coordinates), 1, 1)] * 2 + [(1, 1, 1)]
    keys = jax.random.split(key, 3)
    moved, *powers = (
        jax.random.uniform(k, shape, minval=-1.0, maxval=1.0)
        for k, shape in zip(keys, shapes, strict=True)
    )
    power = powers[0] * math.log(jitter) + powers[1] * math.log(rescale)
    out = (coordinates + 2.0 * math.pi * shift * moved) * jnp.exp(power)
    return out.at[..., :prefix].set(coordinates[..., :prefix])
