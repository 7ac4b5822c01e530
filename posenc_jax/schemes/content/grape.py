r"""GRAPE-A: a linear penalty on distance with a slope computed from the key, the query or both.

    logits[n, i, j] = q_i . k_j / sqrt(H) - |i - j| slope[n] softplus(omega_n) rate
    rate = softplus(u_n . k_j / sqrt(H))        gate="key" (default)
           softplus(v_n . q_i / sqrt(H))        gate="query"
           the sum of both                      gate="both"

ALiBi with a slope per token: slope[n] are ALiBi's, u and v are unit vectors, and omega is
initialised such that softplus(omega) = 1. Rates are positive, so the bias always decreases with
distance. q and k are read before `query` and `key`; the authors RMS-normalise both first. The
paper is causal; the symmetric form used here is the same there.

Of the other encodings of the paper, commuting GRAPE-M, which learns rotary frequencies, is
`LearnedRoPE`; GRAPE-AP, whose bias sums over all tokens between two, is omitted.

Paper: Zhang et al. Group Representational Position Encoding. 2025.
https://arxiv.org/abs/2512.07805
Reference code: model-architectures/GRAPE, model/llama-mha-grape-a-keygated.py,
-querygated.py and -querykeygated.py.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from posenc_jax.checks import one_of, positive, positive_fields, require
from posenc_jax.engine.rules import ContentBias
from posenc_jax.engine.tokens import in_reach
from posenc_jax.schemes.bias.alibi import alibi_slopes
from posenc_jax.schemes.scheme import Scheme, Traits


def _penalty(shared, head, q_feature, k_feature, q, k):
    slope = sum(x for x in (q_feature, k_feature) if x is not None)
    return -jnp.abs(q - in_reach(q, k)).astype(jnp.float32) * slope


@dataclasses.dataclass(frozen=True)
class GRAPEA(Scheme):
    """Additive GRAPE (Zhang et al. 2025).

    Attributes:
      num_heads: the number of query heads, N.
      head_dim: the head dim, H.
      gate: "key", "query" or "both", the source of the slope.
      init_omega: initial value of softplus(omega).

    Raises:
      ValueError: for sizes below one, an unknown gate, or an `init_omega` that is not positive.

    >>> GRAPEA(num_heads=2, head_dim=4).init(jax.random.key(0))["u"].shape
    (2, 4)
    """

    num_heads: int
    head_dim: int
    gate: str = "key"
    init_omega: float = 1.0
    name: ClassVar[str] = "grape_a"
    param_axes: ClassVar = {
        "omega": "num_heads",
        "u": "num_heads head_dim",
        "v": "num_heads head_dim",
    }
    traits: ClassVar = Traits(relative=True, mirrored=True)

    def __post_init__(self):
        positive_fields(self, "num_heads", "head_dim")
        positive("grape_a", init_omega=self.init_omega)
        one_of("grape_a", ("key", "query", "both"), gate=self.gate)

    def init(self, key):
        """Returns {"omega": [N]} and, as the gate has them, "u" and "v" [N, H]: N(0, 1 / H)."""
        x = self.init_omega + math.log(-math.expm1(-self.init_omega))  # softplus(x) = init_omega
        omega = jnp.full(self.num_heads, x, jnp.float32)
        used = {"key": "u", "query": "v", "both": "uv"}[self.gate]
        keys = dict(zip("uv", jax.random.split(key, 2), strict=True))
        shape = (self.num_heads, self.head_dim)
        std = self.head_dim**-0.5
        vectors = {n: std * jax.random.normal(keys[n], shape, jnp.float32) for n in used}
        return {"omega": omega} | vectors

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns the slopes of queries and keys, float32 [B, T, N], or None without a gate."""
        heads, dim = self.num_heads, self.head_dim
        require(
            q.shape[2:] == (heads, dim) and k.shape[3] == dim,
            f"grape_a: q must be [B, T, {heads}, {dim}] and k of the same head dim, "
            f"got {q.shape} and {k.shape}.",
        )
        omega = params["omega"].astype(jnp.float32)
        base = alibi_slopes(self.num_heads) * jax.nn.softplus(omega)
        q_features = None if self.gate == "key" else self._slopes(base, params["v"], q)
        k_features = None if self.gate == "query" else self._slopes(base, params["u"], k)
        return q_features, k_features, state

    def rules(self, params, q_features=None, k_features=None):
        return ContentBias(_penalty, q_features=q_features, k_features=k_features)

    def _slopes(self, base, direction, x):
        direction = direction.astype(jnp.float32)
        squares = jnp.sum(direction**2, -1, keepdims=True)
        # At zero the root has no derivative.
        direction = direction / jnp.sqrt(jnp.maximum(squares, 1e-12))
        grouped = direction.reshape(x.shape[2], -1, self.head_dim)  # [K, N / K, H] for keys.
        x = x.astype(jnp.float32)
        if (axis := jax.typeof(x).sharding.spec[2]) is not None:  # On an explicit mesh.
            grouped = jax.sharding.reshard(grouped, PartitionSpec(axis, None, None))
        rates = jnp.einsum("btkh,kgh->btkg", x, grouped, precision="highest")
        rates = jax.nn.softplus(
            rates.reshape(*x.shape[:2], self.num_heads) / math.sqrt(self.head_dim)
        )
        return base[None, None] * rates
