r"""FoPE: every pair is mapped by a Fourier series of frequencies instead of a single one.

    cos_p(m) = sum_f A[f, p] cos(m w_f),    sin_p(m) = sum_f B[f, p] sin(m w_f)
    (a, b) -> (a cos_p - b sin_p,  b cos_p + a sin_p)

over the frequencies w_f of RoPE that complete a period within the trained length L; slower ones
are dropped. There are min(#f, H / 4) such pairs. A and B have one entry of 1 per pair, spread over
the frequencies, plus normal noise; they are random and fixed, or learned with `learned=True`. The
map is not a rotation: logits depend on positions, not on distances alone.

The remaining pairs carry no position. The paper leaves them unchanged; the authors' code sets
their cosine and sine to 1, which rotates them by 45 degrees and doubles their part of q . k. That
is the default here; `rotate_clipped=False` is the paper.

The authors have a set of A and B per head. Fixed sets follow from `seed`: give each layer its own.

Paper: Hua et al. Fourier Position Embedding: Enhancing Attention's Periodic Extension for
Length Generalization. 2024. https://arxiv.org/abs/2412.17739
Reference code: TsinghuaC3I/Fourier-Position-Embedding, olmo/model.py, FourierEmbedding.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import positive, require
from posenc_jax.schemes.rotary.base import Rotary
from posenc_jax.schemes.scheme import Traits


@dataclasses.dataclass(frozen=True)
class FoPE(Rotary):
    """Fourier position embedding (Hua et al. 2024).

    Attributes:
      head_dim: the head dim, H.
      trained_length: L; positions may exceed it.
      groups: the number of sets of coefficients for consecutive heads; it divides the number of
        key heads.
      gain: the scale of the noise in the coefficients (0.3 to 0.6, larger for larger models).
      theta: the base of the frequencies.
      rotate_clipped: whether pairs without position are rotated by 45 degrees.
      learned: whether coefficients are learned.
      seed: the seed of the fixed coefficients.

    Raises:
      ValueError: for sizes out of range, an L without frequencies, or a seed with `learned`.

    >>> FoPE(head_dim=8, trained_length=64).coefficients({})["cos"].shape
    (1, 2, 2)
    """

    head_dim: int
    trained_length: int
    groups: int = 1
    gain: float = 0.3
    theta: float = 10000.0
    rotate_clipped: bool = True
    learned: bool = False
    seed: int = 0
    name: ClassVar[str] = "fope"
    traits: ClassVar = Traits()

    def __post_init__(self):
        super().__post_init__()
        require(self.head_dim >= 4, f"fope: head_dim must be >= 4, got {self.head_dim}.")
        positive("fope", trained_length=self.trained_length)
        require(
            len(self._frequencies()) > 0,
            f"fope: no frequency completes a period within trained_length={self.trained_length}.",
        )
        require(
            not (self.learned and self.seed),
            f"fope: learned coefficients are drawn by `init`, got seed={self.seed} beside learned.",
        )

    def init(self, key):
        """Returns {"cos": ..., "sin": ...}, [groups, #f, pairs] each, if they are learned."""
        return self._random(key) if self.learned else {}

    def coefficients(self, params) -> dict[str, jax.Array]:
        """Returns A as "cos" and B as "sin", learned or fixed."""
        return params if self.learned else self._random(jax.random.key(self.seed))

    def cos_sin(self, params, coordinates):
        parts = cos_sin(coordinates, self._frequencies())
        series = self.coefficients(params)
        cos, sin = (
            jnp.einsum("btf,gfp->btgp", x, series[name], precision="highest")
            for name, x in zip(("cos", "sin"), parts, strict=True)
        )
        padding = ((0, 0), (0, 0), (0, 0), (0, self.head_dim // 2 - cos.shape[-1]))
        cos = jnp.pad(cos, padding, constant_values=1.0)
        return cos, jnp.pad(sin, padding, constant_values=float(self.rotate_clipped))

    def _frequencies(self):
        frequencies = self.base_frequencies
        return frequencies[frequencies >= 2 * np.pi / self.trained_length]

    def _random(self, key):
        count = len(self._frequencies())
        pairs = min(count, self.head_dim // 4)
        ones = np.zeros((count, pairs), np.float32)
        rows = np.arange(pairs) * math.ceil(count / pairs)
        ones[rows[rows < count], np.arange(pairs)[rows < count]] = 1.0
        # The fans of torch's xavier_normal_ for two and for three axes.
        spread = count + pairs if self.groups == 1 else (count + self.groups) * pairs
        std = self.gain * math.sqrt(2 / spread)
        shape = (self.groups, count, pairs)
        return {
            name: jnp.asarray(ones)[None] + std * jax.random.normal(k, shape, jnp.float32)
            for name, k in zip(("cos", "sin"), jax.random.split(key, 2), strict=True)
        }
