r"""Dynamic NTK: NTK-aware scaling that grows with the length of the sequence.

    theta -> theta * u^(d / (d - 2)),     u = factor * T / L - (factor - 1) for T > L, else 1

T is the length of the sequence and L the trained length. At T = L nothing has changed; with
factor 1 the base grows as T / L, as the YaRN paper has it. In released code T is the length
so far, and every step of decoding has other frequencies. Keys that were rotated and cached
with earlier ones no longer fit: generation then differs from one pass over the same text.

Here T is a setting, `length`, and frozen: set it to the length that the run will reach.
This is what inference engines that precompute one table for their maximal length do. Keys
can be cached, and a prompt followed by steps equals the whole. One traced program per
length is the price. With `length=None` each sequence has the frequencies of its own length
so far, in float32 (up to 1e-6 off), which is `RoPEByLength`'s business.

Paper: emozilla, 2023, as written down in Peng et al. YaRN. https://arxiv.org/abs/2309.00071
Reference code: jquesnelle/yarn, scaled_rope/LlamaDynamicScaledRotaryEmbedding.py;
huggingface/transformers, modeling_rope_utils.py.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import require
from posenc_jax.rotary.frequencies import PerSequenceMap, check_stretch
from posenc_jax.rotary.scaling.interpolation import NTK


@dataclasses.dataclass(frozen=True)
class DynamicNTK(PerSequenceMap):
    """Dynamic NTK scaling (emozilla 2023) at one length.

    Attributes:
      factor: how fast the base grows beyond the trained length; at least 1.
      original_max_position: L, the trained length.
      length: T, the length of the sequence; up to L nothing changes. None goes by each
        sequence's own length.

    Raises:
      ValueError: for a factor below one, a missing length, or fewer than four rotary
        dimensions.

    >>> DynamicNTK(2.0, 2048, 4096)(np.array([1.0, 0.01]), head_dim=4, theta=1e4)[0].round(6)
    array([1.      , 0.003333])
    """

    factor: float = 1.0
    original_max_position: int = 0
    length: int | None = 0

    def __post_init__(self):
        check_stretch("DynamicNTK", self.factor, self.original_max_position)
        require(
            self.length is None or 1 <= self.length < math.inf,
            f"DynamicNTK: length must be that of the sequence, got {self.length}.",
        )

    def __call__(self, frequencies, head_dim, theta):
        """Returns the frequencies of the larger base, and 1."""
        length = self.length
        if length is None:
            raise ValueError(
                "DynamicNTK: length=None goes by the length of each sequence, and one table is for "
                "all: use RoPEByLength."
            )
        longer = max(length / self.original_max_position, 1.0)
        return NTK(self.factor * longer - (self.factor - 1))(frequencies, head_dim, theta)

    @property
    def per_sequence(self):
        """Whether each sequence has the frequencies of its own length."""
        return self.length is None

    def frozen(self, length):
        """Returns the map for sequences of `length` tokens."""
        return dataclasses.replace(self, length=length)

    def cos_sin(self, coordinates, lengths, frequencies, head_dim, theta):
        """Returns cosine and sine at the frequencies of each length."""
        longer = jnp.maximum(lengths.astype(jnp.float32) / self.original_max_position, 1.0)
        grown = jnp.log(self.factor * longer - (self.factor - 1))[..., None]
        power = (-2.0 * np.arange(len(frequencies)) / (head_dim - 2)).astype(np.float32)
        frequencies = frequencies.astype(np.float32)[None, None]
        slowed = jnp.broadcast_to(
            frequencies * jnp.exp(grown * power[None, None]), (*coordinates.shape, len(power))
        )
        return cos_sin(coordinates, slowed)
