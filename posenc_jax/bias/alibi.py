r"""ALiBi: a fixed linear penalty on the distance between query and key.

    logits[n, i, j] = q_i . k_j / sqrt(H) - slope[n] * |i - j|

For N heads, N a power of two, the slopes are 2^(-8/N), 2^(-16/N), ..., 2^(-8).
Otherwise, with P the largest power of two below N, they are the P slopes of P heads,
followed by the first N - P of every second slope of 2P heads. The paper does not say so;
its code does, and released models depend on it. A plain 2^(-8h/N) for every N, which some
libraries use, is a different model.

The paper is causal, where |i - j| = i - j. The symmetric form used here leaves that case
unchanged and is defined for bidirectional attention as well. The penalty is added after
the 1/sqrt(H) scale, and nothing is learned.

Paper: Press, Smith, Lewis. Train Short, Test Long: Attention with Linear Biases Enables
Input Length Extrapolation. ICLR 2022. https://arxiv.org/abs/2108.12409
Reference code: ofirpress/attention_with_linear_biases, fairseq/models/transformer.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.scheme import LogitBias, Scheme


def alibi_slopes(num_heads: int) -> jax.Array:
    """Returns the slope of every head, float32 [N].

    Raises:
      ValueError: if `num_heads` is less than one.

    >>> alibi_slopes(3)
    Array([0.0625    , 0.00390625, 0.25      ], dtype=float32)
    """
    require(num_heads >= 1, f"alibi: num_heads must be at least 1, got {num_heads}.")

    def geometric(n):
        return [2.0 ** (-8.0 * h / n) for h in range(1, n + 1)]

    power = 1 << (num_heads.bit_length() - 1)  # The largest power of two <= num_heads.
    slopes = geometric(power) + geometric(2 * power)[::2][: num_heads - power]
    return jnp.asarray(slopes, jnp.float32)


def _penalty(shared, slope, q, k):
    return -slope * jnp.abs(q - k).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class ALiBi(Scheme):
    """Attention with linear biases (Press et al. 2022).

    Attributes:
      num_heads: N.

    Raises:
      ValueError: if `num_heads` is less than one.

    >>> ALiBi(num_heads=2).bias({}).dense(jnp.array([2]), jnp.arange(3))[0]
    Array([[-0.125 , -0.0625, -0.    ]], dtype=float32)
    """

    num_heads: int
    name: ClassVar[str] = "alibi"
    relative: ClassVar[bool] = True

    def __post_init__(self):
        require(self.num_heads >= 1, f"alibi: num_heads must be >= 1, got {self.num_heads}.")

    def bias(self, params):
        """Returns the penalty of every head."""
        return LogitBias(_penalty, heads=alibi_slopes(self.num_heads), relative=True)
