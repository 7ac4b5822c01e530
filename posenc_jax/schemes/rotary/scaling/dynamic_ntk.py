r"""Dynamic NTK: NTK-aware scaling that grows with the length of the sequence.

    theta -> theta * u^(d / (d - 2)),     u = factor * T / L - (factor - 1) for T > L, else 1

T is the length of the sequence and L the trained length; at T = L frequencies are unchanged. With
factor 1 the base grows as T / L, as in the YaRN paper. T is the length so far in released code, so
every decode step has other frequencies than the cached keys, and generation differs from one pass
over the same text.

Here T is a setting, `length`: set it to the length that the run will reach, as inference engines
do that precompute one table for their maximal length. Keys can be cached, and a prompt followed by
steps equals the whole; each length is a new program. With `length=None`, for `RoPEByLength`, each
sequence has the frequencies for its length so far, in float32 (up to 1e-6 off).

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
from posenc_jax.schemes.rotary.frequencies import PerSequenceMap, check_stretch
from posenc_jax.schemes.rotary.scaling.interpolation import NTK


@dataclasses.dataclass(frozen=True)
class DynamicNTK(PerSequenceMap):
    """Raises the base by the length of the sequence: dynamic NTK (emozilla 2023).

    Attributes:
      factor: the growth of the base beyond the trained length; at least 1.
      original_max_position: L, the trained length.
      length: T, for all sequences; None: the length of each sequence.

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
            f"DynamicNTK: length must be at least 1, got {self.length}.",
        )

    def __call__(self, frequencies, head_dim, theta):
        length = self.length
        if length is None:
            raise ValueError(
                "DynamicNTK: length=None is scaling per sequence, for the scheme RoPEByLength."
            )
        longer = max(length / self.original_max_position, 1.0)
        return NTK(self.factor * longer - (self.factor - 1))(frequencies, head_dim, theta)

    @property
    def per_sequence(self):
        return self.length is None

    def frozen(self, length):
        return dataclasses.replace(self, length=length)

    def cos_sin(self, coordinates, lengths, frequencies, head_dim, theta):
        longer = jnp.maximum(lengths.astype(jnp.float32) / self.original_max_position, 1.0)
        grown = jnp.log(self.factor * longer - (self.factor - 1))[..., None]
        power = (-2.0 * np.arange(len(frequencies)) / (head_dim - 2)).astype(np.float32)
        frequencies = frequencies.astype(np.float32)[None, None]
        slowed = jnp.broadcast_to(
            frequencies * jnp.exp(grown * power[None, None]), (*coordinates.shape, len(power))
        )
        return cos_sin(coordinates, slowed)
