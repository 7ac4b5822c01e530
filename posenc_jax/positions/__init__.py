"""Positions and coordinates as data: packing, padding, random draws, image grids."""

from posenc_jax.positions.packing import bilevel as bilevel
from posenc_jax.positions.packing import count_up as count_up
from posenc_jax.positions.packing import digit_places as digit_places
from posenc_jax.positions.packing import from_padding_mask as from_padding_mask
from posenc_jax.positions.packing import from_segment_ids as from_segment_ids
from posenc_jax.positions.random import continuous as continuous
from posenc_jax.positions.random import random_floats as random_floats
from posenc_jax.positions.random import randomized as randomized
from posenc_jax.positions.random import randomized_distances as randomized_distances
from posenc_jax.positions.random import shifted as shifted
from posenc_jax.positions.random import skip_wise as skip_wise
from posenc_jax.positions.random import spaced_floats as spaced_floats
