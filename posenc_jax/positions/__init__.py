"""Positions and coordinates as data: packing, padding, trees, random draws, image grids."""

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
from posenc_jax.positions.trees import Tree, from_tree

__all__ = [
    "Tree",
    "bilevel",
    "count_up",
    "digit_places",
    "from_padding_mask",
    "from_segment_ids",
    "from_tree",
    "random_floats",
    "randomized",
    "randomized_distances",
    "segment_ids_from_positions",
    "shifted",
    "spaced_floats",
]
