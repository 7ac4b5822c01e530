r"""Llama 3.1's scaling: long wavelengths are multiplied by the factor, short ones unchanged.

With s the factor, L the trained length and r_p = L w_p / 2 pi, the rotations of pair p within L,

    w'_p = c_p w_p + (1 - c_p) w_p / s,     c_p = (r_p - low) / (high - low), clipped to [0, 1]

This is equal to the three cases of Meta's code (wavelength above L / low: divided by s; below
L / high: kept; between: blended). It is the ramp of the YaRN paper between 1 and 4 rotations,
without its factor on attention. Llama 3.1 has the defaults, Llama 3.2 a factor of 32. Meta
published code but no equation.

Paper: Grattafiori et al. The Llama 3 Herd of Models. 2024. https://arxiv.org/abs/2407.21783
Reference code: meta-llama/llama-models, models/llama3/model.py, apply_scaling;
huggingface/transformers, modeling_rope_utils.py.
"""

import dataclasses
import math
from typing import ClassVar

import numpy as np

from posenc_jax.checks import require
from posenc_jax.schemes.rotary.frequencies import FrequencyMap, check_stretch


@dataclasses.dataclass(frozen=True)
class Llama3(FrequencyMap):
    """Keeps short wavelengths, stretches long ones: Llama 3.1 (Grattafiori et al. 2024).

    Attributes:
      factor: s, the factor on long wavelengths; at least 1.
      original_max_position: L, the trained length.
      low_freq_factor: pairs with fewer rotations within L are divided by s.
      high_freq_factor: pairs with more rotations within L are unchanged.

    Raises:
      ValueError: for a factor below one, no trained length, or low above high.

    >>> Llama3(factor=8.0)(np.array([1.0, 1e-4]), head_dim=4, theta=1e8)[0]
    array([1.00e+00, 1.25e-05])
    """

    extends_context: ClassVar[bool] = True
    factor: float = 8.0
    original_max_position: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self):
        check_stretch("Llama3", self.factor, self.original_max_position)
        require(
            0 < self.low_freq_factor <= self.high_freq_factor < math.inf,
            "Llama3: low_freq_factor must be positive and at most high_freq_factor, got "
            f"{self.low_freq_factor} and {self.high_freq_factor}.",
        )

    def __call__(self, frequencies, head_dim, theta):
        rotations = self.original_max_position * frequencies / (2 * np.pi)
        width = self.high_freq_factor - self.low_freq_factor
        if width == 0.0:  # Llama 4 Scout: no blend between the two.
            keep = (rotations >= self.low_freq_factor).astype(frequencies.dtype)
        else:
            keep = np.clip((rotations - self.low_freq_factor) / width, 0.0, 1.0)
        return keep * frequencies + (1 - keep) * frequencies / self.factor, 1.0
