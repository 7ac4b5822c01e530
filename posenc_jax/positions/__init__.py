"""Positions and coordinates as data: packing, padding, random draws, image grids."""

from posenc_jax.positions.packing import (
    bilevel,
    count_up,
    digit_places,
    from_padding_mask,
    from_segment_ids,
    segment_ids_from_positions,
)
from posenc_jax.positions.random import (
    random_floats,
    randomized,
    randomized_distances,
    shifted,
    spaced_floats,
)

__all__ = [
    "bilevel",
    "count_up",
    "digit_places",
    "from_padding_mask",
    "from_segment_ids",
    "random_floats",
    "randomized",
    "randomized_distances",
    "segment_ids_from_positions",
    "shifted",
    "spaced_floats",
]
