r"""Rotary frequencies, and maps of them: how a trained model reads further than it was trained.

A map takes the frequencies of all pairs and returns new ones and a factor on attention:

    (frequencies, head_dim, theta) -> (frequencies, attention_factor)

in float64, on the host, once. Maps compose as a tuple, left to right. Each is a subclass in a
file of its own.

Paper: Su et al. RoFormer: Enhanced Transformer with Rotary Position Embedding. 2021.
https://arxiv.org/abs/2104.09864
Reference code: huggingface/transformers, modeling_rope_utils.py.
"""

import dataclasses
import math

import jax
import numpy as np

from posenc_jax.checks import require
from posenc_jax.rules import as_tuple


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


def rope_frequencies(
    dim: int,
    theta: float = 10000.0,
    scaling: FrequencyMap | tuple[FrequencyMap, ...] = (),
) -> tuple[np.ndarray, float]:
    """Returns radians per position, float64 [dim / 2], and the factor on q and k.

    Args:
      dim: the number of rotated dimensions, even.
      theta: the base.
      scaling: maps of the frequencies, applied left to right.

    Raises:
      ValueError: for an odd or non-positive `dim`, a `theta` that is not positive and finite,
        or several maps that stretch a trained length.
      TypeError: for what is no map of frequencies.

    >>> rope_frequencies(4)[0]
    array([1.  , 0.01])
    """
    require(
        dim >= 2 and dim % 2 == 0,
        f"rope: rotary dim must be even and positive, got {dim}.",
    )
    require(theta > 0, f"rope: theta must be positive, got {theta}.")
    require(theta < math.inf, f"rope: theta must be finite, got {theta}.")
    maps = as_tuple(scaling)
    for change in maps:
        if not isinstance(change, FrequencyMap):
            raise TypeError(
                f"rope: scaling must be a FrequencyMap, pe.YaRN(...) for one, got {change!r}."
            )
    stretching = [m for m in maps if hasattr(m, "original_max_position")]
    require(
        len(stretching) < 2,
        f"rope: scaling holds several maps that stretch a trained length: {stretching}; give one.",
    )
    frequencies, factor = float(theta) ** (-2.0 * np.arange(dim // 2) / dim), 1.0
    for change in maps:
        frequencies, more = change(frequencies, dim, theta)
        factor *= more
    return frequencies, factor
