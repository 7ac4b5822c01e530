r"""Maps of rotary frequencies: how a trained model reads further than it was trained.

A map takes the frequencies of all pairs and returns new ones and a factor on attention:

    (frequencies, head_dim, theta) -> (frequencies, attention_factor)

in float64, on the host, once. Maps compose as a tuple, left to right. Here are the two
that are one line; every other is a subclass in a file of its own.

    PI   (position interpolation)   w_p -> w_p / factor
    NTK  (NTK-aware scaling)        theta -> theta * factor^(d / (d - 2)), d the rotary dim

PI squeezes all positions into the trained range; NTK leaves the fastest pair as it is and
squeezes only the slowest by the whole factor.

Papers: Chen et al. Extending Context Window of Large Language Models via Positional
Interpolation. 2023. https://arxiv.org/abs/2306.15595
NTK-aware scaling: bloc97, 2023, as written down in Peng et al. YaRN.
https://arxiv.org/abs/2309.00071
Reference code: huggingface/transformers, modeling_rope_utils.py.
"""

import dataclasses
import math

import jax
import numpy as np

from posenc_jax.checks import require


def check_stretch(where: str, factor: float, original_max_position: float) -> None:
    """Raises `ValueError` for a factor below one or a missing trained length.

    >>> check_stretch("YaRN", 4.0, 0)
    Traceback (most recent call last):
    ValueError: YaRN: original_max_position must be the length of training, got 0.
    """
    require(1 <= factor < math.inf, f"{where}: factor must be at least 1 and finite, got {factor}.")
    require(
        1 <= original_max_position < math.inf,
        f"{where}: original_max_position must be the length of training, "
        f"got {original_max_position}.",
    )


@dataclasses.dataclass(frozen=True)
class FrequencyMap:
    """Leaves frequencies as they are; the base of all maps (RoPE, Su et al. 2021).

    >>> FrequencyMap()(np.array([1.0]), head_dim=2, theta=1e4)
    (array([1.]), 1.0)
    """

    def __call__(
        self, frequencies: np.ndarray, head_dim: int, theta: float
    ) -> tuple[np.ndarray, float]:
        """Returns new frequencies, float64 [P], and a factor on the rotated q and k.

        Args:
          frequencies: radians per position, float64 [P].
          head_dim: the number of dimensions that these frequencies rotate.
          theta: the base that they were made from.
        """
        return frequencies, 1.0

    @property
    def goes_by_length(self) -> bool:
        """Whether frequencies follow the length of each sequence; see `RoPEByLength`."""
        return False

    def frozen(self, length: int) -> "FrequencyMap":
        """Returns the map for sequences of one length."""
        return self

    def cos_sin(
        self,
        coordinates: jax.Array,
        lengths: jax.Array,
        frequencies: np.ndarray,
        head_dim: int,
        theta: float,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns cosine and sine times the factor, float32 [B, T, P], for `RoPEByLength`.

        Args:
          coordinates: int32 or float32 [B, T].
          lengths: of the sequences of these tokens, [B, T] or [B, 1].
          frequencies, head_dim, theta: as for the map itself.
        """
        raise NotImplementedError(f"{self!r} does not go by length.")


@dataclasses.dataclass(frozen=True)
class PI(FrequencyMap):
    """Position interpolation (Chen et al. 2023).

    Attributes:
      factor: new length divided by trained length; at least 1.

    Raises:
      ValueError: for a factor below one, or infinite.

    >>> PI(factor=4.0)(np.array([1.0]), head_dim=2, theta=1e4)[0]
    array([0.25])
    """

    factor: float = 1.0

    def __post_init__(self):
        check_stretch("PI", self.factor, 1)

    def __call__(self, frequencies, head_dim, theta):
        """Returns all frequencies divided by the factor, and 1."""
        return frequencies / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class NTK(FrequencyMap):
    """NTK-aware scaling of the base (bloc97 2023).

    Attributes:
      factor: new length divided by trained length; at least 1.

    Raises:
      ValueError: for a factor below one or infinite, or fewer than four rotary dimensions.

    >>> NTK(factor=4.0)(np.array([1.0, 0.01]), head_dim=4, theta=1e4)[0]
    array([1.    , 0.0025])
    """

    factor: float = 1.0

    def __post_init__(self):
        check_stretch("NTK", self.factor, 1)

    def __call__(self, frequencies, head_dim, theta):
        """Returns the frequencies of the larger base, and 1."""
        require(head_dim > 2, f"NTK: needs more than 2 rotary dimensions, got {head_dim}.")
        pair = np.arange(len(frequencies))
        return frequencies * self.factor ** (-2.0 * pair / (head_dim - 2)), 1.0
