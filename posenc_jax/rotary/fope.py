r"""FoPE: every pair turns by a Fourier series of frequencies, in place of one of them.

    cos_p(m) = sum_f A[f, p] cos(m w_f),    sin_p(m) = sum_f B[f, p] sin(m w_f)
    (a, b) -> (a cos_p - b sin_p,  b cos_p + a sin_p)

over the frequencies w_f of RoPE that complete a turn within the trained length L; slower ones
are dropped. There are min(#f, H / 4) such pairs. A and B start as ones spread over the
frequencies, plus normal noise, and are random but not learned (`learned=True` does learn
them). That is no rotation any more: logits depend on positions, not on distances alone.

The remaining pairs carry no position. The paper leaves them alone; the authors' code fills
their cosine and their sine with 1, which turns them by 45 degrees and doubles their part of
q . k. That is the default here; `still=True` is the paper.

With `groups` sets of A and B, head n of N has the set n * groups // N, and so have key heads;
the authors have as many sets as heads. Fixed sets follow from `seed`: give each layer its own.

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
from posenc_jax.checks import require
from posenc_jax.rotary.frequencies import rope_frequencies
from posenc_jax.rotary.rotate import apply_rotation
from posenc_jax.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class FoPE(Scheme):
    """Fourier position embedding (Hua et al. 2024).

    Attributes:
      head_dim: H.
      max_length: L, the trained length; positions may exceed it.
      groups: the number of sets of coefficients; it divides the number of key heads.
      gain: of the noise in the coefficients (0.3 to 0.6, the more the larger the model).
      theta: the base of the frequencies.
      still: whether pairs without position stay as they are.
      learned: whether coefficients are learned.
      seed: where fixed coefficients come from.

    Raises:
      ValueError: for sizes out of range, an L without frequencies, or a seed nobody reads.

    >>> FoPE(head_dim=8, max_length=64).coefficients({})["cos"].shape
    (1, 2, 2)
    """

    head_dim: int
    max_length: int
    groups: int = 1
    gain: float = 0.3
    theta: float = 10000.0
    still: bool = False
    learned: bool = False
    seed: int = 0
    name: ClassVar[str] = "fope"

    def __post_init__(self):
        require(self.head_dim >= 4, f"fope: head_dim must be >= 4, got {self.head_dim}.")
        require(self.groups >= 1, f"fope: groups must be >= 1, got {self.groups}.")
        require(0 <= self.gain < math.inf, f"fope: gain must not be negative, got {self.gain}.")
        require(
            len(self._frequencies()) > 0,
            f"fope: no frequency completes a turn within max_length={self.max_length}.",
        )
        require(
            not (self.learned and self.seed),
            f"fope: learned coefficients come from init's key, not from seed={self.seed}.",
        )

    def init(self, key):
        """Returns {"cos": ..., "sin": ...}, [groups, #f, pairs] each, if they are learned."""
        return self._random(key) if self.learned else {}

    def coefficients(self, params) -> dict[str, jax.Array]:
        """Returns A as "cos" and B as "sin", learned or fixed."""
        return params if self.learned else self._random(jax.random.key(self.seed))

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H], mapped."""
        heads = q.shape[2]
        require(
            q.shape[3] == self.head_dim and heads % self.groups == 0,
            f"fope: q and k must be [B, T, a multiple of groups={self.groups}, {self.head_dim}], "
            f"got {q.shape}.",
        )
        cos, sin = cos_sin(coordinates, self._frequencies())
        series = self.coefficients(params)
        cos, sin = (
            jnp.einsum("btf,gfp->btgp", x, series[name], precision="highest")
            for name, x in (("cos", cos), ("sin", sin))
        )
        rest = ((0, 0), (0, 0), (0, 0), (0, self.head_dim // 2 - cos.shape[-1]))
        cos = jnp.pad(cos, rest, constant_values=1.0)
        sin = jnp.pad(sin, rest, constant_values=0.0 if self.still else 1.0)
        return apply_rotation(q, cos, sin)

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], mapped."""
        return self.query(params, k, coordinates)

    def _frequencies(self):
        frequencies, _ = rope_frequencies(self.head_dim, self.theta)
        return frequencies[frequencies >= 2 * np.pi / self.max_length]

    def _random(self, key):
        count = len(self._frequencies())
        pairs = min(count, self.head_dim // 4)
        ones = np.zeros((count, pairs), np.float32)
        at = np.arange(pairs) * math.ceil(count / pairs)
        ones[at[at < count], np.arange(pairs)[at < count]] = 1.0
        # What torch's xavier_normal_ makes of two and of three axes.
        spread = count + pairs if self.groups == 1 else (count + self.groups) * pairs
        std = self.gain * math.sqrt(2 / spread)
        shape = (self.groups, count, pairs)
        return {
            name: jnp.asarray(ones)[None] + std * jax.random.normal(k, shape)
            for name, k in zip(("cos", "sin"), jax.random.split(key, 2), strict=True)
        }
