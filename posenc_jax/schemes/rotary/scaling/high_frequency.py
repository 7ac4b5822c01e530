r"""High-frequency RoPE: pairs that complete no period within the trained length do not rotate.

    w'_p = w_p   where w_p >= 2 pi / L,     else 0

In training, slower pairs go through a part of their period only, and reach unseen angles beyond L.
HoPE finds that they cause the preference for the beginning and the end of a context, and trains
without their rotation, so that they encode content alone. FoPE's code has the same boundary.
Other maps select a number of pairs (`ClippedFrequencies(hard=True)`) or a part of them
(`Proportional`). RoPE-ID, high frequencies on some of the dimensions, is
`RoPE(rotary_dim=..., theta=...)` with a small theta.

The authors of HoPE released no code; the boundary is as in FoPE's.

Paper: Chen et al. HoPE: A Novel Positional Encoding Without Long-Term Decay for Enhanced
Context Awareness and Extrapolation. 2024. https://arxiv.org/abs/2410.21216
Reference code: TsinghuaC3I/Fourier-Position-Embedding, olmo/model.py, get_inv_freq.
"""

import dataclasses
import math

import numpy as np

from posenc_jax.checks import require
from posenc_jax.schemes.rotary.frequencies import FrequencyMap


@dataclasses.dataclass(frozen=True)
class HighFrequenciesOnly(FrequencyMap):
    """Keeps the pairs that complete a period within the trained length (Chen et al. 2024).

    Attributes:
      original_max_position: L, the trained length.

    Raises:
      ValueError: for a length below one.

    >>> HighFrequenciesOnly(original_max_position=512)(
    ...     np.array([1.0, 0.01]), head_dim=4, theta=1e4
    ... )[0]
    array([1., 0.])
    """

    original_max_position: int = 4096

    def __post_init__(self):
        require(
            1 <= self.original_max_position < math.inf,
            "HighFrequenciesOnly: original_max_position must be the trained length, got "
            f"{self.original_max_position}.",
        )

    def __call__(self, frequencies, head_dim, theta):
        slow = frequencies < 2 * np.pi / self.original_max_position
        return np.where(slow, 0.0, frequencies), 1.0
