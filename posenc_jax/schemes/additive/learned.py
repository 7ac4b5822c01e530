r"""Learned absolute positions: one trained vector per position, added to the embedding.

    x[t] <- x[t] + table[position[t] + offset]

The table has `max_length + offset` rows. A position outside it raises where positions are
concrete, and under `jit` makes that token NaN. (Indexing in JAX silently clamps to the last row.)

`offset` reproduces models that reserve rows: 2 for OPT, padding_idx + 1 for RoBERTa.
The initial standard deviation is 0.02, as in BERT.

For images of another size than in training, `resize_learned` interpolates a table of patches.

Papers: Gehring et al. Convolutional Sequence to Sequence Learning. 2017.
https://arxiv.org/abs/1705.03122
Devlin et al. BERT. 2018. https://arxiv.org/abs/1810.04805
Reference code: huggingface/transformers, models/gpt2 and models/opt.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from posenc_jax.checks import in_table, integer_positions, integers, positive_fields, require
from posenc_jax.positions.image_grids import resize_grid
from posenc_jax.schemes.scheme import Scheme


def lookup(table: jax.Array, positions: jax.Array, offset: int = 0) -> jax.Array:
    """Returns the rows [..., D] of `table` [rows, D] at integers `positions + offset`.

    Concrete positions outside the table raise `ValueError`; under `jit` their rows are NaN.
    """
    positions = integer_positions("learned", positions, "coordinates")
    rows = table.shape[0] - offset
    in_table("learned", positions, rows)
    index = jnp.where(positions < 0, rows, positions) + offset  # -1 would be the last row.
    table = jnp.asarray(table)
    # On an explicit mesh, rows are sharded as their positions are.
    axes = (*jax.typeof(index).sharding.spec, *jax.typeof(table).sharding.spec[1:])
    sharding = PartitionSpec(*axes) if any(axes) else None
    return table.at[index].get(mode="fill", fill_value=jnp.nan, out_sharding=sharding)


def resize_learned(
    table: jax.Array,
    grid: tuple[int, int],
    new_grid: tuple[int, int],
    *,
    prefix: int = 0,
    method: str = "bicubic",
    align_corners: bool = False,
    antialias: bool = False,
) -> jax.Array:
    """Returns a table of image patches, in row-major order, interpolated to another grid.

    Args:
      table: [prefix + R * C, D].
      grid, new_grid: (R, C) of the old and of the new table.
      prefix: number of initial rows for other tokens ([CLS], registers), which stay unchanged.
      method, align_corners, antialias: as in `posenc_jax.resize_grid`; ViT, DeiT and MAE use the
        defaults, Qwen3-VL "bilinear" with aligned corners, DINOv2 may antialias.

    Raises:
      ValueError: if the table does not have prefix + R * C rows, and as `resize_grid`.

    >>> resize_learned(jnp.ones((1 + 4, 8)), (2, 2), (3, 3), prefix=1).shape
    (10, 8)
    """
    rows = prefix + grid[0] * grid[1]
    require(
        jnp.ndim(table) == 2 and table.shape[0] == rows,
        f"resize_learned: table must be [{rows}, D] for {prefix} rows and a grid of {grid}, "
        f"got {jnp.shape(table)}.",
    )
    patches = table[prefix:].T.reshape(-1, *grid)
    new = resize_grid(
        patches,
        *new_grid,
        method=method,
        align_corners=align_corners,
        antialias=antialias,
    )
    return jnp.concatenate([table[:prefix], new.reshape(new.shape[0], -1).T])


@dataclasses.dataclass(frozen=True)
class LearnedAbsolute(Scheme):
    """Learned absolute positions (Gehring et al. 2017, BERT, GPT-2).

    Attributes:
      max_length: number of positions.
      model_dim: the model dim, D.
      offset: number of reserved rows before position 0.
      stddev: standard deviation of the initial table.

    Raises:
      ValueError: for sizes below one, or a negative offset.

    >>> scheme = LearnedAbsolute(max_length=8, model_dim=4)
    >>> scheme.init(jax.random.key(0))["table"].shape
    (8, 4)
    """

    max_length: int
    model_dim: int
    offset: int = 0
    stddev: float = 0.02
    name: ClassVar[str] = "learned"
    param_axes: ClassVar = {"table": "rows model_dim"}

    def __post_init__(self):
        positive_fields(self, "max_length", "model_dim")
        integers("learned", offset=self.offset)
        require(self.offset >= 0, f"learned: offset must be >= 0, got {self.offset}.")

    def init(self, key):
        """Returns {"table": float32 [max_length + offset, D]}."""
        shape = (self.max_length + self.offset, self.model_dim)
        return {"table": self.stddev * jax.random.normal(key, shape, jnp.float32)}

    def embed(self, params, x, coordinates):
        rows = lookup(params["table"], coordinates, self.offset)
        require(
            x.shape[-1] == self.model_dim and x.ndim == rows.ndim,
            f"learned: x must be [B, T, {self.model_dim}] and coordinates [B, T], "
            f"got {x.shape} and {jnp.shape(coordinates)}.",
        )
        return (x.astype(jnp.float32) + rows).astype(x.dtype)
