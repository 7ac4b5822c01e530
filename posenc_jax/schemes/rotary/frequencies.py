r"""RoPE frequencies, and the base of the maps in `posenc_jax.schemes.rotary.scaling`.

    (frequencies, head_dim, theta) -> (frequencies, attention_factor)

is a map: from the frequencies of all pairs to new ones and a factor on rotated q and k, in
float64, on the host, once. Maps compose as a tuple, left to right. Each is a subclass in a
separate file. At most one map of a tuple extends the context.

Paper: Su et al. RoFormer: Enhanced Transformer with Rotary Position Embedding. 2021.
https://arxiv.org/abs/2104.09864
Reference code: huggingface/transformers, modeling_rope_utils.py.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax
import numpy as np

from posenc_jax.checks import positive, positive_integers, require
from posenc_jax.engine.rule import as_tuple


def static_number(caller: str, **numbers: Any) -> None:
    """Raises `TypeError` for arrays, which are traced or round to float32, and for truth values."""
    for name, value in numbers.items():
        if isinstance(value, bool):
            raise TypeError(f"{caller}: {name} must be a number, got {value!r}.")
        if isinstance(value, jax.Array):
            raise TypeError(
                f"{caller}: {name} must be a number that is known while tracing, got an array of "
                f"shape {value.shape}. To sweep it, compute frequencies as an array and use "
                "`cos_sin(positions, frequencies)` with `apply_rotation`."
            )


def check_stretch(caller: str, factor: float, original_max_position: float) -> None:
    """Raises `ValueError` for a factor below one or a missing trained length."""
    static_number(caller, factor=factor, original_max_position=original_max_position)
    require(
        1 <= factor < math.inf, f"{caller}: factor must be at least 1 and finite, got {factor}."
    )
    require(
        1 <= original_max_position < math.inf,
        f"{caller}: original_max_position must be the trained length, got {original_max_position}.",
    )


@dataclasses.dataclass(frozen=True)
class FrequencyMap:
    """The base of all maps, and the map that changes nothing (RoPE, Su et al. 2021).

    Every map raises `ValueError` for numbers out of range: when it is made, or for frequencies that
    it does not apply to.

    >>> FrequencyMap()(np.array([1.0]), head_dim=2, theta=1e4)
    (array([1.]), 1.0)
    """

    extends_context: ClassVar[bool] = False
    """Whether the map is a method of reading beyond the trained length; two of them conflict."""

    def __call__(
        self, frequencies: np.ndarray, head_dim: int, theta: float
    ) -> tuple[np.ndarray, float]:
        """Returns new frequencies, float64 [P], and a factor on the rotated q and k.

        Args:
          frequencies: radians per position, float64 [P].
          head_dim: the number of dimensions that these frequencies rotate.
          theta: the base of these frequencies.
        """
        return frequencies, 1.0


class PerSequenceMap(FrequencyMap, abc.ABC):
    """An abstract map that can depend on the length of each sequence; see `RoPEByLength`."""

    extends_context: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def per_sequence(self) -> bool:
        """Whether it depends on the length. If not, the map is fixed to one length."""

    @abc.abstractmethod
    def frozen(self, length: int) -> FrequencyMap:
        """Returns the map for sequences of `length` tokens."""

    @abc.abstractmethod
    def cos_sin(
        self,
        coordinates: jax.Array,
        lengths: jax.Array,
        frequencies: np.ndarray,
        head_dim: int,
        theta: float,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns cosine and sine times the factor, float32 [B, T, P].

        Args:
          coordinates: int32 or float32 [B, T].
          lengths: the lengths of the sequences of these tokens, [B, T] or [B, 1].
          frequencies, head_dim, theta: as for the map itself.
        """


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
        or several maps that extend the context.
      TypeError: for a traced `theta`, or a scaling that is not a map of frequencies.

    >>> rope_frequencies(4)[0]
    array([1.  , 0.01])
    """
    static_number("rope", theta=theta)
    positive_integers("rope", **{"rotary dim": dim})
    require(dim % 2 == 0, f"rope: rotary dim must be even and positive, got {dim}.")
    positive("rope", theta=theta)
    maps = as_tuple(scaling)
    for change in maps:
        if not isinstance(change, FrequencyMap):
            raise TypeError(
                f"rope: scaling must be a FrequencyMap such as pe.YaRN(...), got {change!r}."
            )
    extending = [m for m in maps if m.extends_context]
    require(
        len(extending) < 2,
        f"rope: scaling has several maps that extend the context, {extending}; give one.",
    )
    frequencies, factor = float(theta) ** (-2.0 * np.arange(dim // 2) / dim), 1.0
    for change in maps:
        frequencies, more = change(frequencies, dim, theta)
        factor *= more
    return frequencies, factor
