r"""FIRE: a learned function of the distance, relative to how far the query has come.

    logits[n, i, j] = q_i . k_j / sqrt(H) + f_n(psi(|i - j|) / (psi(max(i, |m| L)) + eps))
    psi(x) = ln(1 + |c x|),     f_n(x) = sum_h outer[n, h] relu(inner[h] x + inner_bias[h])

f has one hidden layer that all heads share. c (0.1 at first) sets where the logarithm
bends, the multiplier m (1 at first) of the length L below which nothing is normalised, so
that short inputs are not stretched. The argument never leaves [0, 1] in causal attention,
however long the input: that is why FIRE extrapolates.

It reads the query's own position: restart it where a sequence starts, as packed batches
here do, and give it when decoding. Moving all positions changes the output.

The authors of FIRE released no code; the paper prints some. It and two implementations put
eps outside of the logarithm. Their last layer has a bias, one number per head for all its
logits, which no softmax sees and no gradient reaches; it is left out. For queries before
keys the distance counts as it is; one implementation has 0.

Paper: Li et al. Functional Interpolation for Relative Positions Improves Long Context
Transformers. 2023. https://arxiv.org/abs/2310.04418
Reference code: chuanyang-Zheng/DAPE, DAPE.py, class FIRE; mcleish7/arithmetic,
cramming/architectures/embeddings.py.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.ops.init import torch_uniform
from posenc_jax.rules import LogitBias
from posenc_jax.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class _Rule:
    eps: float

    def __call__(self, shared, outer, q, k):
        c, threshold, inner, inner_bias = shared
        distance = jnp.abs(q - k).astype(jnp.float32)
        reach = jnp.maximum(q.astype(jnp.float32), threshold)
        x = jnp.log1p(jnp.abs(c * distance)) / (jnp.log1p(jnp.abs(c * reach)) + self.eps)
        return jnp.dot(outer, jax.nn.relu(inner * x + inner_bias), precision="highest")


@dataclasses.dataclass(frozen=True)
class FIRE(Scheme):
    """Functional interpolation for relative positions (Li et al. 2023).

    Attributes:
      num_heads: N.
      width: the number of hidden units.
      init_c: the initial c.
      init_length: L; the initial length below which nothing is normalised.
      eps: keeps the quotient finite where psi is zero.

    Raises:
      ValueError: for sizes below one, or numbers that are not positive.

    >>> params = FIRE(num_heads=2).init(jax.random.key(0))
    >>> params["inner"].shape, params["outer"].shape
    ((32,), (2, 32))
    """

    num_heads: int
    width: int = 32
    init_c: float = 0.1
    init_length: float = 512.0
    eps: float = 1e-6
    name: ClassVar[str] = "fire"

    def __post_init__(self):
        for name in ("num_heads", "width"):
            value = getattr(self, name)
            require(value >= 1, f"fire: {name} must be >= 1, got {value}.")
        for name in ("init_c", "init_length", "eps"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"fire: {name} must be positive, got {value}.")

    def init(self, key):
        """Returns c, the multiplier of L, and the layers as torch.nn.Linear starts them."""
        inner, bias, outer = jax.random.split(key, 3)
        return {
            "c": jnp.float32(self.init_c),
            "multiplier": jnp.float32(1.0),
            "inner": torch_uniform(inner, (self.width,), 1),
            "inner_bias": torch_uniform(bias, (self.width,), 1),
            "outer": torch_uniform(outer, (self.num_heads, self.width), self.width),
        }

    def rules(self, params, q_features=None, k_features=None):
        """Returns the function of normalised distance of every head."""
        threshold = jnp.abs(params["multiplier"] * self.init_length)
        shared = params["c"], threshold, params["inner"], params["inner_bias"]
        return LogitBias(_Rule(self.eps), heads=params["outer"], shared=shared)
