r"""GRAPE-A: a linear penalty on distance whose slope the key, the query, or both choose.

    logits[n, i, j] = q_i . k_j / sqrt(H) - |i - j| slope[n] softplus(omega_n) rate
    rate = softplus(u_n . k_j / sqrt(H))        gate="key" (default)
           softplus(v_n . q_i / sqrt(H))        gate="query"
           the sum of both                      gate="both"

ALiBi with a slope per token: slope[n] are ALiBi's, u and v have length one, and omega starts
where softplus(omega) = 1. A rate is never negative, so that distance always costs. Gates
read q and k as projected; the authors normalise both before (RMS). Theirs is causal; the
symmetric form used here leaves that case unchanged.

GRAPE-A is one of several: their commuting GRAPE-M, which learns rotary frequencies, is
`LearnedRoPE`; GRAPE-AP, whose bias sums over all tokens between two, is not here.

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

from posenc_jax.bias.alibi import alibi_slopes
from posenc_jax.checks import require
from posenc_jax.rules import ContentBias
from posenc_jax.scheme import Scheme, Traits


def _penalty(shared, head, row, col, q, k):
    rate = sum(x for x in (row, col) if x is not None)
    return -jnp.abs(q - k).astype(jnp.float32) * rate


@dataclasses.dataclass(frozen=True)
class GRAPEA(Scheme):
    """Additive GRAPE (Zhang et al. 2025).

    Attributes:
      num_heads: N.
      head_dim: H.
      gate: "key", "query" or "both": who chooses the slope.
      init_omega: the initial softplus(omega).

    Raises:
      ValueError: for sizes below one, an unknown gate, or an `init_omega` not positive.

    >>> GRAPEA(num_heads=2, head_dim=4).init(jax.random.key(0))["u"].shape
    (2, 4)
    """

    num_heads: int
    head_dim: int
    gate: str = "key"
    init_omega: float = 1.0
    name: ClassVar[str] = "grape_a"

    def __post_init__(self):
        for name in ("num_heads", "head_dim"):
            value = getattr(self, name)
            require(value >= 1, f"grape_a: {name} must be >= 1, got {value}.")
        require(
            self.gate in ("key", "query", "both"),
            f'grape_a: gate must be "key", "query" or "both", got {self.gate!r}.',
        )
        require(
            0 < self.init_omega < math.inf,
            f"grape_a: init_omega must be positive, got {self.init_omega}.",
        )

    @property
    def traits(self):
        return Traits(relative=True)

    def init(self, key):
        """Returns {"omega": [N]}, and "u" and "v", [N, H], normal with 1 / sqrt(H), if used."""
        omega = jnp.full(self.num_heads, math.log(math.expm1(self.init_omega)), jnp.float32)
        used = {"key": "u", "query": "v", "both": "uv"}[self.gate]
        keys = dict(zip("uv", jax.random.split(key, 2), strict=True))
        shape = (self.num_heads, self.head_dim)
        std = self.head_dim**-0.5
        vectors = {n: std * jax.random.normal(keys[n], shape, jnp.float32) for n in used}
        return {"omega": omega} | vectors

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns the slopes that queries and keys choose, float32 [B, T, N]."""
        wanted = (self.num_heads, self.head_dim)
        require(
            q.shape[2:] == wanted and k.shape[3] == self.head_dim,
            f"grape_a: q must be [B, T, {wanted[0]}, {wanted[1]}] and k of the same head dim, "
            f"got {q.shape} and {k.shape}.",
        )
        unit = alibi_slopes(self.num_heads) * jax.nn.softplus(params["omega"])
        q_features = None if self.gate == "key" else self._rates(unit, params["v"], q)
        k_features = None if self.gate == "query" else self._rates(unit, params["u"], k)
        return q_features, k_features, state

    def rules(self, params, q_features=None, k_features=None):
        """Returns the penalty at the slope that the tokens chose."""
        return ContentBias(_penalty, q_features=q_features, k_features=k_features)

    def _rates(self, unit, direction, x):
        length = jnp.sqrt(jnp.sum(direction**2, -1, keepdims=True))
        direction = direction / jnp.maximum(length, 1e-6)
        heads = direction.reshape(x.shape[2], -1, self.head_dim)  # Those of each key head.
        x = x.astype(jnp.float32)
        gates = jnp.einsum("btkh,kgh->btkg", x, heads, precision="highest")
        gates = jax.nn.softplus(gates.reshape(*x.shape[:2], -1) / math.sqrt(self.head_dim))
        return unit[None, None] * gates
