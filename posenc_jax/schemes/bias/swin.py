r"""Swin: a learned number for every offset between two patches of a window.

    logits[n, i, j] = q_i . k_j / sqrt(H) + table[n, (dr + R - 1)(2C - 1) + dc + C - 1]

for a window of R x C patches and dr, dc the offsets of row and column from the key to the query.
The table has (2R - 1)(2C - 1) entries per head; each layer has its own.

Coordinates are rows and columns, [2, B, T], of patches anywhere in an image; only their offsets
matter. Coordinates [B, T] number the patches of a window in row-major order, as the authors
flatten it: patch p is in row p // C and column p % C. The bias of an offset larger than the window
is NaN, and so is the output of its query. Shifted windows mask their
regions by segment ids, and then need `positions=jnp.arange(R * C)`, as by default positions restart
in each region.

The authors transfer a table to another window size by interpolation: `posenc_jax.resize_grid`, with
the table as [N, 2R - 1, 2C - 1].

Paper: Liu et al. Swin Transformer: Hierarchical Vision Transformer using Shifted Windows. 2021.
https://arxiv.org/abs/2103.14030
Reference code: microsoft/Swin-Transformer, models/swin_transformer.py, WindowAttention.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import positive_fields, require
from posenc_jax.engine.rules import LogitBias
from posenc_jax.schemes.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class WindowEntry:
    """A rule that looks up the offset of two patches in a table [(2R - 1)(2C - 1)].

    Attributes:
      window: (R, C).
    """

    window: tuple[int, int]

    def __call__(self, shared, table, q, k):
        """Returns a float32 scalar; NaN for an offset larger than the window."""
        rows, columns = self.window
        (q_row, q_column), (k_row, k_column) = self._row_and_column(q), self._row_and_column(k)
        row_offset, column_offset = q_row - k_row, q_column - k_column
        inside = (jnp.abs(row_offset) < rows) & (jnp.abs(column_offset) < columns)
        entry = (row_offset + rows - 1) * (2 * columns - 1) + column_offset + columns - 1
        entry = jnp.where(inside, entry, table.shape[0])
        return table.at[entry].get(mode="fill", fill_value=jnp.nan)

    def _row_and_column(self, x):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"swin: coordinates must be integers, got {x.dtype}.")
        if jnp.ndim(x) == 0:
            return x // self.window[1], x % self.window[1]
        require(x.shape == (2,), f"swin: coordinates must have 2 axes, got {x.shape[0]}.")
        return x[0], x[1]


def check_window(name: str, window: tuple[int, int]) -> None:
    """Raises `ValueError` unless a window is a pair of positive integers."""
    require(
        isinstance(window, tuple | list)
        and len(window) == 2
        and all(isinstance(n, int | np.integer) and n >= 1 for n in window),
        f"{name} must be (rows, columns), both at least 1, got {window}.",
    )


@dataclasses.dataclass(frozen=True)
class Swin(Scheme):
    """The relative position bias of Swin (Liu et al. 2021).

    Attributes:
      num_heads: the number of query heads, N.
      window: rows and columns of a window.
      stddev: standard deviation of the initial table.

    >>> scheme = Swin(num_heads=3, window=(7, 7))
    >>> scheme.init(jax.random.key(0))["table"].shape
    (3, 169)
    """

    num_heads: int
    window: tuple[int, int] = (7, 7)
    stddev: float = 0.02
    name: ClassVar[str] = "swin"
    param_axes: ClassVar = {"table": "num_heads offsets"}
    traits: ClassVar = Traits(num_axes=2)

    def __post_init__(self):
        positive_fields(self, "num_heads")
        check_window("swin: window", self.window)

    def init(self, key):
        """Returns {"table": float32 [N, (2R - 1)(2C - 1)]}."""
        rows, columns = self.window
        shape = self.num_heads, (2 * rows - 1) * (2 * columns - 1)
        return {"table": self.stddev * jax.random.normal(key, shape, jnp.float32)}

    def rules(self, params, q_features=None, k_features=None):
        return LogitBias(WindowEntry(self.window), heads=params["table"])
