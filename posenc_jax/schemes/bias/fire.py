r"""FIRE: a learned function of the distance, normalised by the position of the query.

    logits[n, i, j] = q_i . k_j / sqrt(H) + f_n(psi(|i - j|) / (psi(max(i, |m| L)) + eps))
    psi(x) = ln(1 + |c x|),     f_n(x) = sum_h outer[n, h] relu(inner[h] x + inner_bias[h])

f has one hidden layer that all heads share. c (initially 0.1) sets where the logarithm bends.
The multiplier m (initially 1) scales the length L: queries before |m| L are normalised as if
they were at |m| L, so that short inputs are not stretched. In causal attention the argument of f
stays in [0, 1] at any length, which the authors name as the reason that FIRE extrapolates.

FIRE reads the position of the query, so shifting all positions changes the output. Positions
should restart at 0 in each sequence, as they do for packed sequences here, and decoding needs the
true positions.

The authors released no code; a listing in the paper and two implementations put
eps outside of the logarithm. Their last layer adds a constant per head, which cancels in the
softmax and has no gradient; it is omitted. Keys after the query are at distance |i - j|; one
implementation uses distance 0.

Without causality, and up to L tokens, nothing tells past from future: outputs for the reversed
sequence are the same, reversed.

Paper: Li et al. Functional Interpolation for Relative Positions Improves Long Context
Transformers. 2023. https://arxiv.org/abs/2310.04418
Reference code: chuanyang-Zheng/DAPE, DAPE.py, class FIRE; mcleish7/arithmetic,
cramming/architectures/embeddings.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import positive, positive_fields
from posenc_jax.engine.rules import LogitBias
from posenc_jax.engine.tokens import in_reach
from posenc_jax.ops.init import torch_uniforms
from posenc_jax.schemes.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class _Rule:
    eps: float

    def __call__(self, shared, outer, q, k):
        c, threshold, inner, inner_bias = shared
        distance = jnp.abs(q - in_reach(q, k)).astype(jnp.float32)
        length = jnp.maximum(q.astype(jnp.float32), threshold)
        x = jnp.log1p(jnp.abs(c * distance)) / (jnp.log1p(jnp.abs(c * length)) + self.eps)
        # For CPUs: a division outside of the hidden layer, where XLA would divide indices as well,
        # and a product whose cotangents are products, which take less time than sums.
        x = jax.lax.optimization_barrier(x)
        scaled = jnp.dot(inner[:, None], x[None], precision="highest")
        return jnp.dot(outer, jax.nn.relu(scaled + inner_bias), precision="highest")


@dataclasses.dataclass(frozen=True)
class FIRE(Scheme):
    """Functional interpolation for relative positions (Li et al. 2023).

    Attributes:
      num_heads: the number of query heads, N.
      width: number of hidden units.
      init_c: initial c.
      init_length: L, in tokens.
      eps: added to the denominator.

    Raises:
      ValueError: for sizes below one, or numbers that are not positive and finite.

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
    traits: ClassVar = Traits(mirrored=True)
    param_axes: ClassVar = {"outer": "num_heads width"}

    def __post_init__(self):
        positive_fields(self, "num_heads", "width")
        positive("fire", init_c=self.init_c, init_length=self.init_length, eps=self.eps)

    def init(self, key):
        """Returns {"c", "multiplier": [], "inner", "inner_bias": [width], "outer": [N, width]}.

        Layers are initialised as torch.nn.Linear is.
        """
        network = {
            "inner": ((self.width,), 1),
            "inner_bias": ((self.width,), 1),
            "outer": ((self.num_heads, self.width), self.width),
        }
        numbers = {"c": jnp.float32(self.init_c), "multiplier": jnp.float32(1.0)}
        return numbers | torch_uniforms(jax.random.split(key, 3), network)

    def rules(self, params, q_features=None, k_features=None):
        threshold = jnp.abs(params["multiplier"].astype(jnp.float32) * self.init_length)
        shared = params["c"], threshold, params["inner"], params["inner_bias"]
        return LogitBias(_Rule(self.eps), heads=params["outer"], shared=shared)
