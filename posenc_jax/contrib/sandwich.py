r"""Sandwich: the inner product of two sinusoidal encodings, added to the logits.

    logits[n, i, j] = q_i . k_j / sqrt(H) + N / (8 (n + 1)) * sum_p cos((i - j) w_p)
    w_p = 10000^(-2p / D'),     p = 0 .. D'/2 - 1,     n = 0 .. N - 1

The sum falls roughly with the logarithm of the distance; the weights of the heads are spaced as
ALiBi's slopes are. D' sets the shape of the decay and is independent of the head dim; the paper
uses 128. Nothing is learned.

At distance 0 the sum is D'/2, so the bias of the first head is N / 8 * D'/2 = 8 N for D' = 128:
48 for 6 heads. This constant cancels in the softmax except for rounding, so it is subtracted
(`centred`), as in NeMo, and the bias of the query's own token is 0. Attention sinks and softcaps
do depend on it; `centred=False` is the paper's equation and the reference code. NeMo also numbers
p from 1 to D'/2 and takes D' from the head dim, which gives a different curve. Cosines are exact
at any int32 distance (see `posenc_jax.angles`).

Without causality nothing tells past from future: outputs for the reversed sequence are the same,
reversed.

Paper: Chi et al. Dissecting Transformer Length Extrapolation via the Lens of Receptive Field
Analysis. 2022. https://arxiv.org/abs/2212.10356
Reference code: meta-pytorch/attention-gym, attn_gym/mods/sandwich.py.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import positive_fields, require
from posenc_jax.engine.rules import LogitBias
from posenc_jax.schemes.scheme import Scheme, Traits


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
      num_heads: the number of query heads, N.
      dim: D', the size of the sinusoidal encodings; even.
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
    traits: ClassVar = Traits(relative=True, mirrored=True)

    def __post_init__(self):
        positive_fields(self, "num_heads")
        require(
            self.dim >= 2 and self.dim % 2 == 0,
            f"sandwich: dim must be even and positive, got {self.dim}.",
        )

    def rules(self, params, q_features=None, k_features=None):
        weights = self.num_heads / (8.0 * np.arange(1, self.num_heads + 1))
        rule = _Rule(self.dim, self.centred)
        return LogitBias(rule, heads=jnp.asarray(weights, jnp.float32), relative=True)
