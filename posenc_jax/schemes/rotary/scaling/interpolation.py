r"""Position interpolation and NTK-aware scaling: context extension by one factor.

    PI   (position interpolation)   w_p -> w_p / factor
    NTK  (NTK-aware scaling)        theta -> theta * factor^(d / (d - 2)), d the rotary dim

PI maps all positions into the trained range; NTK leaves the fastest pair unchanged and divides
the slowest by the whole factor.

Papers: Chen et al. Extending Context Window of Large Language Models via Positional
Interpolation. 2023. https://arxiv.org/abs/2306.15595
NTK-aware scaling: bloc97, 2023, as written down in Peng et al. YaRN.
https://arxiv.org/abs/2309.00071
Reference code: huggingface/transformers, modeling_rope_utils.py.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from posenc_jax.checks import require
from posenc_jax.schemes.rotary.frequencies import FrequencyMap, check_stretch


@dataclasses.dataclass(frozen=True)
class PI(FrequencyMap):
    """Divides all frequencies by one factor: position interpolation (Chen et al. 2023).

    Attributes:
      factor: new length divided by trained length; at least 1.

    Raises:
      ValueError: for a factor below one, or infinite.

    >>> PI(factor=4.0)(np.array([1.0]), head_dim=2, theta=1e4)[0]
    array([0.25])
    """

    extends_context: ClassVar[bool] = True
    factor: float = 1.0

    def __post_init__(self):
        check_stretch("PI", self.factor, 1)

    def __call__(self, frequencies, head_dim, theta):
        return frequencies / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class NTK(FrequencyMap):
    """Raises the base: NTK-aware scaling (bloc97 2023).

    Attributes:
      factor: new length divided by trained length; at least 1.

    Raises:
      ValueError: for a factor below one or infinite, or fewer than four rotary dimensions.

    >>> NTK(factor=4.0)(np.array([1.0, 0.01]), head_dim=4, theta=1e4)[0]
    array([1.    , 0.0025])
    """

    extends_context: ClassVar[bool] = True
    factor: float = 1.0

    def __post_init__(self):
        check_stretch("NTK", self.factor, 1)

    def __call__(self, frequencies, head_dim, theta):
        require(head_dim > 2, f"NTK: needs more than 2 rotary dimensions, got {head_dim}.")
        pair = np.arange(len(frequencies))
        return frequencies * self.factor ** (-2.0 * pair / (head_dim - 2)), 1.0
