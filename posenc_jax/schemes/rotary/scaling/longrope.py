r"""LongRoPE: a search determines a divisor for the frequency of every pair.

    w'_p = w_p / lambda_p,     q, k -> g q, g k,     g = sqrt(1 + ln s / ln L)

s is the new length divided by the trained length L. Models ship two lists of lambda, for
sequences of up to L tokens and for longer ones; g belongs to both. `magnitude="yarn"` is
g = 0.1 ln s + 1, and `attention_factor` gives g itself (Phi-3.5-MoE).

`RoPEByLength` takes the list for the length of each sequence. `RoPE` rotates by one list at every
length, which `long` selects.

Paper: Ding et al. LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens. 2024.
https://arxiv.org/abs/2402.13753
Reference code: microsoft/LongRoPE, rope/longrope.py (class LongRoPEScaledRotaryEmbedding);
huggingface/transformers, modeling_rope_utils.py.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import one_of, require
from posenc_jax.schemes.rotary.frequencies import PerSequenceMap, check_stretch


@dataclasses.dataclass(frozen=True)
class LongRoPE(PerSequenceMap):
    """Divides each frequency by a factor of its own, from two lists (Ding et al. 2024).

    Attributes:
      short_factor: lambda of every pair for sequences of up to L tokens.
      long_factor: lambda of every pair for longer ones.
      factor: s, new length divided by trained length; at least 1.
      original_max_position: L, the trained length.
      long: whether to use `long_factor`; `RoPE` needs it. Default: for sequences of more than L
        tokens, in `RoPEByLength`.
      magnitude: "su" or "yarn", the formula of g.
      attention_factor: g itself.

    Raises:
      ValueError: for a factor below one, no trained length, lists that are not positive,
        of different or the wrong length, or options that contradict each other.

    >>> LongRoPE((1.0, 1.0), (1.0, 4.0), 4.0, 4096, long=True)(np.array([1.0, 1e-2]), 4, 1e4)[0]
    array([1.    , 0.0025])
    """

    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    factor: float = 1.0
    original_max_position: int = 0
    long: bool | None = None
    magnitude: str = "su"
    attention_factor: float | None = None

    def __post_init__(self):
        check_stretch("LongRoPE", self.factor, self.original_max_position)
        require(self.original_max_position > 1, "LongRoPE: original_max_position must exceed 1.")
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # Files have lists.
            values = getattr(self, name)
            require(
                len(values) > 0 and all(0 < value < math.inf for value in values),
                f"LongRoPE: {name} must have a positive number per pair, got {values}.",
            )
        require(
            len(self.short_factor) == len(self.long_factor),
            f"LongRoPE: short_factor has {len(self.short_factor)} numbers, and long_factor "
            f"{len(self.long_factor)}.",
        )
        one_of("LongRoPE", ("su", "yarn"), magnitude=self.magnitude)
        if self.attention_factor is not None:
            require(
                0 < self.attention_factor < math.inf and self.magnitude == "su",
                f"LongRoPE: attention_factor={self.attention_factor} must be positive, and "
                f"contradicts any magnitude but the default, got {self.magnitude!r}.",
            )

    def __call__(self, frequencies, head_dim, theta):
        require(
            self.long is not None,
            "LongRoPE: long=None is scaling per sequence, for the scheme RoPEByLength; one list "
            "for all lengths needs long=True or long=False.",
        )
        stretch = np.array(self.long_factor if self.long else self.short_factor, np.float64)
        require(
            len(stretch) == len(frequencies),
            f"LongRoPE: has factors for {len(stretch)} pairs, but {len(frequencies)} rotate.",
        )
        g, s = self.attention_factor, math.log(self.factor)
        if g is None and self.magnitude == "su":
            g = math.sqrt(1 + s / math.log(self.original_max_position))
        elif g is None:
            g = 0.1 * s + 1
        return frequencies / stretch, g

    @property
    def per_sequence(self):
        return self.long is None

    def frozen(self, length):
        return dataclasses.replace(self, long=length > self.original_max_position)

    def cos_sin(self, coordinates, lengths, frequencies, head_dim, theta):
        tables = []
        for long in (False, True):
            stretched, g = dataclasses.replace(self, long=long)(frequencies, head_dim, theta)
            tables.append([g * x for x in cos_sin(coordinates, stretched)])
        is_long = (lengths > self.original_max_position)[..., None]
        short, long = tables
        return tuple(jnp.where(is_long, b, a) for a, b in zip(short, long, strict=True))
