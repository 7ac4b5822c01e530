r"""Dynamic NTK: NTK-aware scaling that grows with the length of the sequence.

    theta -> theta * u^(d / (d - 2)),     u = factor * T / L - (factor - 1) for T > L, else 1

T is the length of the sequence and L the trained length. At T = L nothing has changed; with
factor 1 the base grows as T / L, as the YaRN paper has it. In released code T is the length
so far, and every step of decoding has other frequencies. Keys that were rotated and cached
with earlier ones no longer fit: generation then differs from one pass over the same text.

Here T is a setting, `length`, and frozen: set it to the length that the run will reach.
This is what inference engines that precompute one table for their maximal length do. Keys
can be cached, and a prompt followed by steps equals the whole. One traced program per
length is the price; the growing form would need raw keys in the cache.

Paper: emozilla, 2023, as written down in Peng et al. YaRN. https://arxiv.org/abs/2309.00071
Reference code: jquesnelle/yarn, scaled_rope/LlamaDynamicScaledRotaryEmbedding.py;
huggingface/transformers, modeling_rope_utils.py.
"""

import dataclasses
import math

from posenc_jax.checks import require
from posenc_jax.rotary.frequencies import NTK, FrequencyMap, check_stretch


@dataclasses.dataclass(frozen=True)
class DynamicNTK(FrequencyMap):
    """Dynamic NTK scaling (emozilla 2023) at one length.

    Attributes:
      factor: how fast the base grows beyond the trained length; at least 1.
      original_max_position: L, the trained length.
      length: T, the length of the sequence. Up to L nothing changes.

    Raises:
      ValueError: for a factor below one, a missing length, or fewer than four rotary
        dimensions.

    >>> DynamicNTK(2.0, 2048, 4096)(np.array([1.0, 0.01]), head_dim=4, theta=1e4)[0].round(6)
    array([1.      , 0.003333])
    """

    factor: float = 1.0
    original_max_position: int = 0
    length: int = 0

    def __post_init__(self):
        check_stretch("DynamicNTK", self.factor, self.original_max_position)
        require(
            1 <= self.length < math.inf,
            f"DynamicNTK: length must be that of the sequence, got {self.length}.",
        )

    def __call__(self, frequencies, head_dim, theta):
        """Returns the frequencies of the larger base, and 1."""
        longer = max(self.length / self.original_max_position, 1.0)
        return NTK(self.factor * longer - (self.factor - 1))(frequencies, head_dim, theta)
