r"""Swin: a learned number for every offset between two patches of a window.

    logits[n, i, j] = q_i . k_j / sqrt(H) + table[n, (dr + R - 1)(2C - 1) + dc + C - 1]

for a window of R x C patches and dr, dc the row and column of the query minus those of the key.
The table has (2R - 1)(2C - 1) entries per head; each layer has its own.

Coordinates are rows and columns, [2, B, T], anywhere in an image: only offsets count. Coordinates
[B, T] number the patches of a window row after row, as the authors flatten it: p is the patch in
row p // C and column p % C. An offset that the window does not hold is NaN and makes its query NaN.
What a shifted window must not see is hidden by segment ids.

To move a table to another window the authors interpolate it: see
`posenc_jax.resize_grid`, for the table as [N, 2R - 1, 2C - 1].

Paper: Liu et al. Swin Transformer: Hierarchical Vision Transformer using Shifted Windows. 2021.
https://arxiv.org/abs/2103.14030
Reference code: microsoft/Swin-Transformer, models/swin_transformer.py, WindowAttention.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.rules import LogitBias
from posenc_jax.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class WindowEntry:
    """A rule: the entry of a table [(2R - 1)(2C - 1)] for two patches of a window.

    Attributes:
      window: (R, C).
    """

    window: tuple[int, int]

    def __call__(self, shared, table, q, k):
        """Returns a float32 scalar; NaN where the window does not hold the offset."""
        rows, columns = self.window
        down, right = (a - b for a, b in zip(self._place(q), self._place(k), strict=True))
        inside = (jnp.abs(down) < rows) & (jnp.abs(right) < columns)
        entry = (down + rows - 1) * (2 * columns - 1) + right + columns - 1
        entry = jnp.where(inside, entry, table.shape[0])
        return table.at[entry].get(mode="fill", fill_value=jnp.nan)

    def _place(self, x):
        """Row and column of a coordinate."""
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"swin: coordinates must be integers, got {x.dtype}.")
        if jnp.ndim(x) == 0:
            return x // self.window[1], x % self.window[1]
        require(x.shape == (2,), f"swin: coordinates must have 2 axes, got {x.shape[0]}.")
        return x[0], x[1]


def check_window(name: str, window: tuple[int, int]) -> None:
    """Raises unless a window is two positive whole numbers.

    Raises:
      ValueError: for anything else.
    """
    require(
        len(window) == 2 and all(isinstance(n, int) and n >= 1 for n in window),
        f"{name}: window must be (rows, columns), both at least 1, got {window}.",
    )


@dataclasses.dataclass(frozen=True)
class Swin(Scheme):
    """The relative position bias of Swin (Liu et al. 2021).

    Attributes:
      num_heads: N.
      window: rows and columns of a window.
      stddev: of the initial table, cut off at two.

    Raises:
      ValueError: for sizes below one.

    >>> scheme = Swin(num_heads=3, window=(7, 7))
    >>> scheme.init(jax.random.key(0))["table"].shape
    (3, 169)
    """

    num_heads: int
    window: tuple[int, int] = (7, 7)
    stddev: float = 0.02
    name: ClassVar[str] = "swin"

    def __post_init__(self):
        require(self.num_heads >= 1, f"swin: num_heads must be >= 1, got {self.num_heads}.")
        require(self.stddev >= 0, f"swin: stddev must not be negative, got {self.stddev}.")
        check_window("swin", self.window)

    @property
    def traits(self):
        return Traits(num_axes=2)

    def init(self, key):
        """Returns {"table": float32 [N, (2R - 1)(2C - 1)]}."""
        rows, columns = self.window
        shape = self.num_heads, (2 * rows - 1) * (2 * columns - 1)
        return {
            "table": self.stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
        }

    def rules(self, params, q_features=None, k_features=None):
        """Returns the entry of each offset."""
        return LogitBias(WindowEntry(self.window), heads=params["table"])
