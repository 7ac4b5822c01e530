r"""NTK-by-parts: fast pairs are unchanged, slow pairs interpolated, pairs between blended.

With s the factor, L the trained length, w_p = theta^(-2p/d) and two ramps over pairs,

    n_p  = (theta s^(d / (d - 2)))^(-2p/d)          NTK-aware
    a_p  = beta_p n_p + (1 - beta_p) w_p / s        from NTK-aware to interpolation
    w'_p = gamma_p w_p + (1 - gamma_p) a_p          from the original to a_p

where a ramp is 1 for pairs with more than `fast` rotations within L, 0 for pairs with fewer than
`slow`, and linear in the pair's *index* between. The code uses 16 and 2 rotations for gamma, 1.25
and 0.75 for beta. The paper's equation of the same name has no NTK-aware part and a ramp linear in
the number of rotations: that is `YaRN(ramp="rotations", attention_factor=1.0)`.

A pair of r rotations has the index d ln(L / (2 pi r)) / (2 ln theta). Both ends are rounded
outwards and clipped to [0, d - 1] (not d/2 - 1), as in all code.

Paper: Peng et al. YaRN: Efficient Context Window Extension of Large Language Models. 2023.
https://arxiv.org/abs/2309.00071
Reference code: jquesnelle/yarn, scaled_rope/LlamaPartNTKScaledRotaryEmbedding.py.
"""

import dataclasses
import math
from typing import ClassVar

import numpy as np

from posenc_jax.checks import require
from posenc_jax.schemes.rotary.frequencies import FrequencyMap, check_stretch
from posenc_jax.schemes.rotary.scaling.interpolation import NTK


def index_ramp(
    caller: str,
    rotations: tuple[float, float],
    length: float,
    head_dim: int,
    theta: float,
    *,
    truncate: bool = True,
) -> np.ndarray:
    """Returns 1 for fast pairs, 0 for slow ones, and a line over the index between them.

    `rotations` are those of the pairs at the ends of the line, (fast, slow), within `length`. With
    `truncate` the ends are rounded outwards to whole pairs.
    """
    require(theta > 1, f"{caller}: needs theta above 1, got {theta}.")

    def pair(count):
        return head_dim * math.log(length / (2 * math.pi * count)) / (2 * math.log(theta))

    low, high = map(pair, rotations)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    require(
        low <= high,
        f"{caller}: with {head_dim} rotary dimensions, theta {theta} and a length of {length}, "
        f"no pair has between {rotations[0]} and {rotations[1]} rotations.",
    )
    width = high - low or 0.001  # As in all code.
    return 1 - np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)


def check_rotations(
    caller: str, name: str, fast: float, slow: float, *, equal: bool = False
) -> None:
    """Raises `ValueError` unless 0 < slow < fast; with `equal`, slow may be fast."""
    require(
        0 < slow <= fast < math.inf and (equal or slow < fast),
        f"{caller}: {name} must be rotations (fast, slow), 0 < slow {'<=' if equal else '<'} fast, "
        f"got ({fast}, {slow}).",
    )


@dataclasses.dataclass(frozen=True)
class NTKByParts(FrequencyMap):
    """Keeps fast pairs, divides slow ones, NTK between (bloc97 2023, Peng et al. 2023).

    Attributes:
      factor: s, new length divided by trained length; at least 1.
      original_max_position: L, the trained length.
      beta: rotations between which NTK-aware scaling is blended with interpolation.
      gamma: rotations between which the original frequencies are blended with the result.

    Raises:
      ValueError: for a factor below one, no trained length, rotations out of order, or sizes
        that leave no pair on a ramp.

    >>> NTKByParts(factor=2.0, original_max_position=2048)(np.array([1.0, 1e-2]), 4, 1e4)[0]
    array([1.    , 0.0075])
    """

    extends_context: ClassVar[bool] = True
    factor: float = 1.0
    original_max_position: int = 0
    beta: tuple[float, float] = (1.25, 0.75)
    gamma: tuple[float, float] = (16.0, 2.0)

    def __post_init__(self):
        check_stretch("NTKByParts", self.factor, self.original_max_position)
        for name in ("beta", "gamma"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # Files have lists.
            check_rotations("NTKByParts", name, *getattr(self, name))

    def __call__(self, frequencies, head_dim, theta):
        def ramp(rotations):
            return index_ramp("NTKByParts", rotations, self.original_max_position, head_dim, theta)

        beta, gamma = ramp(self.beta), ramp(self.gamma)
        wide, _ = NTK(self.factor)(frequencies, head_dim, theta)
        slow = beta * wide + (1 - beta) * frequencies / self.factor
        return gamma * frequencies + (1 - gamma) * slow, 1.0
