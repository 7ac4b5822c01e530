r"""ALiBi: a fixed linear penalty on the distance between query and key.

    logits[n, i, j] = q_i . k_j / sqrt(H) - slope[n] * |i - j|

For N heads, N a power of two, the slopes are 2^(-8/N), 2^(-16/N), ..., 2^(-8).
Otherwise, with P the largest power of two below N, they are the P slopes of P heads,
followed by the first N - P of every second slope of 2P heads. The paper does not say so;
its code does, and released models depend on it. A plain 2^(-8h/N) for every N, which some
libraries use, is a different model.

The paper is causal, where |i - j| = i - j. For attention that sees both sides the authors describe
three forms (`sides`), which are the same on the past of a causal model:

    "alike"    past and future cost the same
    "split"    half of the heads see the past only and half the future only, each half with the
               slopes of N / 2 heads; both see the query's own token (without softcap, which
               would bound what hides the others)
    "learned"  every head has a slope for the past and one for the future: sigmoid of a parameter

`past_bonus` lets the past count as nearer by a constant, which tells left from right: 0.5 in the
encoders of Ruoss et al. With `alibi_heads` fewer heads have slopes, as many heads would, and the
others none. The penalty is added after the 1/sqrt(H) scale; Falcon divides it by sqrt(H) as well
(`scaled`), and rounds it to bfloat16, which is not reproduced.

Paper: Press, Smith, Lewis. Train Short, Test Long: Attention with Linear Biases Enables
Input Length Extrapolation. ICLR 2022. https://arxiv.org/abs/2108.12409
Reference code: ofirpress/attention_with_linear_biases, fairseq/models/transformer.py and issue 5;
google-deepmind/randomized_positional_encodings, models/positional_encodings.py;
lucidrains/x-transformers, AlibiPositionalBias; huggingface/transformers, models/falcon.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.rules import LogitBias
from posenc_jax.scheme import Scheme, Traits


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


_HIDDEN = 1e20  # A slope that nothing survives; times any distance it is still finite.


def _penalty(shared, slope, q, k):
    return -slope * jnp.abs(q - k).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _BySide:
    """A slope for the past and one for the future."""

    past_bonus: float

    def __call__(self, shared, slopes, q, k):
        past, future = slopes
        distance = (q - k).astype(jnp.float32)
        return jnp.where(q > k, past * (self.past_bonus - distance), future * distance)


@dataclasses.dataclass(frozen=True)
class ALiBi(Scheme):
    """Attention with linear biases (Press et al. 2022).

    Attributes:
      num_heads: N.
      sides: "alike", "split" or "learned"; see the top of the file.
      alibi_heads: how many heads, the first, have a slope; 0 for all.
      past_bonus: how much nearer the past counts than it is.
      scaled: whether the penalty is multiplied by the logit scale, as q . k is.

    Raises:
      ValueError: for sizes that do not fit, or an unknown word.

    >>> ALiBi(num_heads=2).rules({}).dense(jnp.array([2]), jnp.arange(3))[0]
    Array([[-0.125 , -0.0625, -0.    ]], dtype=float32)
    """

    num_heads: int
    sides: str = "alike"
    alibi_heads: int = 0
    past_bonus: float = 0.0
    scaled: bool = False
    name: ClassVar[str] = "alibi"

    def __post_init__(self):
        require(self.num_heads >= 1, f"alibi: num_heads must be >= 1, got {self.num_heads}.")
        require(
            self.sides in ("alike", "split", "learned"),
            f'alibi: sides must be "alike", "split" or "learned", got {self.sides!r}.',
        )
        require(
            self.sides != "split" or self.num_heads % 2 == 0,
            f'alibi: sides="split" needs an even num_heads, got {self.num_heads}.',
        )
        most = self.num_heads if self.sides == "alike" else 0
        require(
            0 <= self.alibi_heads <= most,
            f"alibi: alibi_heads must be 0 to {most} with sides={self.sides!r}, "
            f"got {self.alibi_heads}.",
        )

    @property
    def traits(self):
        return Traits(relative=True)

    def init(self, key):
        """Returns {}, or {"past": ..., "future": ...}, float32 [N], where slopes are learned."""
        if self.sides != "learned":
            return {}
        made = jax.random.normal(key, (2, self.num_heads), jnp.float32) - 2.0
        return {"past": made[0], "future": made[1]}

    def rules(self, params, q_features=None, k_features=None):
        """Returns the penalty of every head."""
        if self.sides == "learned":
            slopes = jax.nn.sigmoid(params["past"]), jax.nn.sigmoid(params["future"])
        elif self.sides == "split":
            seen = alibi_slopes(self.num_heads // 2)
            hidden = jnp.full_like(seen, _HIDDEN)
            slopes = jnp.concatenate([seen, hidden]), jnp.concatenate([hidden, seen])
        else:
            count = self.alibi_heads or self.num_heads
            slope = jnp.pad(alibi_slopes(count), (0, self.num_heads - count))
            if not self.past_bonus:
                return LogitBias(_penalty, heads=slope, relative=True, scaled=self.scaled)
            slopes = slope, slope
        rule = _BySide(self.past_bonus)
        return LogitBias(rule, heads=slopes, relative=True, scaled=self.scaled)
