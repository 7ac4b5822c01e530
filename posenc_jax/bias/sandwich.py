r"""Sandwich: the inner product of two sinusoidal codes, added to the logits.

    logits[n, i, j] = q_i . k_j / sqrt(H) + N / (8 (n + 1)) * sum_p cos((i - j) w_p)
    w_p = 10000^(-2p / D'),     p = 0 .. D'/2 - 1,     n = 0 .. N - 1

It falls roughly with the logarithm of the distance; heads weigh it as ALiBi's slopes are
spaced. D' shapes the fall and has nothing to do with the size of a head: the paper takes
128. Nothing is learned.

At distance 0 the sum is D'/2, which makes 8 N in the first head: logits of 48 for 6 heads,
whose rounding is all that this changes in a softmax. So it is subtracted (`centred`), as NeMo
does, and a token adds nothing to its own logit. Sinks and soft caps see the difference;
`centred=False` is the equation as it stands, and the reference code. NeMo also numbers p
from 1 to D'/2 and takes D' from the head size, which is another curve. Cosines are exact at
any int32 distance (see `posenc_jax.angles`).

Paper: Chi et al. Dissecting Transformer Length Extrapolation via the Lens of Receptive Field
Analysis. 2022. https://arxiv.org/abs/2212.10356
Reference code: meta-pytorch/attention-gym, attn_gym/mods/sandwich.py.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import require
from posenc_jax.rules import LogitBias
from posenc_jax.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class _Rule:
    dim: int
    centred: bool

    def __call__(self, shared, weight, q, k):
        frequencies = 10000.0 ** (-2.0 * np.arange(self.dim // 2) / self.dim)
        cos, _ = cos_sin(q - k, frequencies)
        if self.centred:
            cos = cos - 1.0
        return weight * cos.sum()


@dataclasses.dataclass(frozen=True)
class Sandwich(Scheme):
    """The Sandwich bias (Chi et al. 2022).

    Attributes:
      num_heads: N.
      dim: D', the size of the sinusoidal codes; even.
      centred: whether the bias of distance 0 is subtracted.

    Raises:
      ValueError: if `num_heads` is less than one, or `dim` is odd or not positive.

    >>> bias = Sandwich(num_heads=8, dim=2).rules({})
    >>> np.asarray(bias.dense(jnp.array([2]), jnp.arange(3))[0]).round(3)
    array([[-1.416, -0.46 ,  0.   ]], dtype=float32)
    """

    num_heads: int
    dim: int = 128
    centred: bool = True
    name: ClassVar[str] = "sandwich"

    def __post_init__(self):
        require(self.num_heads >= 1, f"sandwich: num_heads must be >= 1, got {self.num_heads}.")
        require(
            self.dim >= 2 and self.dim % 2 == 0,
            f"sandwich: dim must be even and positive, got {self.dim}.",
        )

    @property
    def traits(self):
        return Traits(relative=True)

    def rules(self, params, q_features=None, k_features=None):
        """Returns the sum of cosines, weighted per head."""
        weights = self.num_heads / (8.0 * np.arange(1, self.num_heads + 1))
        rule = _Rule(self.dim, self.centred)
        return LogitBias(rule, heads=jnp.asarray(weights, jnp.float32), relative=True)
