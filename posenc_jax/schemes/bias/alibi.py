r"""ALiBi: a fixed linear penalty on the distance between query and key.

    logits[n, i, j] = q_i . k_j / sqrt(H) - slope[n] * |i - j|

For N heads, N a power of two, the slopes are 2^(-8/N), 2^(-16/N), ..., 2^(-8).
Otherwise, with P the largest power of two below N, they are the P slopes of P heads,
followed by the first N - P of every second slope of 2P heads. The paper does not state this
rule; its code has it, and released models depend on it. Some libraries use 2^(-8h/N) for
every N, which is a different model.

The paper is causal, where |i - j| = i - j. For bidirectional attention the authors describe
three forms (`symmetry`):

    "symmetric"  past and future keys have the same slope: nothing tells past from future, and
                 outputs for the reversed sequence are the same, reversed
    "split"      half of the heads attend to the past only and half to the future only, each half
                 with the slopes of N / 2 heads; all heads attend to the query's own token. The
                 other side is hidden by a large penalty, which a softcap would bound
    "learned"    each head learns one slope for the past and one for the future, as sigmoids

`past_offset` is subtracted from the distance of past keys, which tells past from future: 0.5 in the
encoders of Ruoss et al. With `num_biased_heads`, only the first heads have slopes, the slopes of a
model with that number of heads, and the others have no bias. The penalty is added after the
1/sqrt(H) scale; Falcon divides it by sqrt(H) as well (`scaled`), and rounds it to bfloat16, which
is not reproduced.

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

from posenc_jax.checks import finite, integers, one_of, positive_fields, positive_integers, require
from posenc_jax.engine.rules import LogitBias
from posenc_jax.schemes.scheme import Scheme, Traits


def alibi_slopes(num_heads: int) -> jax.Array:
    """Returns the slope of every head, float32 [N].

    Raises:
      ValueError: if `num_heads` is less than one.

    >>> alibi_slopes(3)
    Array([0.0625    , 0.00390625, 0.25      ], dtype=float32)
    """
    positive_integers("alibi", num_heads=num_heads)

    def geometric(n):
        return [2.0 ** (-8.0 * h / n) for h in range(1, n + 1)]

    power = 1 << (int(num_heads).bit_length() - 1)  # The largest power of two <= num_heads.
    slopes = geometric(power) + geometric(2 * power)[::2][: num_heads - power]
    return jnp.asarray(slopes, jnp.float32)


# Hides one side: exp(-slope) is 0 in float32, and slope * 2^31 is still finite.
_HIDING_SLOPE = 1e20


def _penalty(shared, slope, q, k):
    return -slope * jnp.abs(q - k).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _PenaltyBySide:
    """The penalty with one slope for past keys and one for future keys."""

    past_offset: float

    def __call__(self, shared, slopes, q, k):
        past, future = slopes
        distance = (q - k).astype(jnp.float32)
        offset = jnp.where(past < _HIDING_SLOPE, self.past_offset, 0.0)
        return jnp.where(q > k, past * (offset - distance), future * distance)


@dataclasses.dataclass(frozen=True)
class ALiBi(Scheme):
    """Attention with linear biases (Press et al. 2022).

    Attributes:
      num_heads: the number of query heads, N.
      symmetry: for encoders "split" or "learned"; "symmetric" does not tell left from right. See
        the formulas.
      num_biased_heads: number of heads with a slope, from the first on. Default: all.
      past_offset: subtracted from the distance of past keys.
      scaled: whether the penalty is multiplied by the logit scale, as q . k is.

    Raises:
      ValueError: for an unknown symmetry, a `past_offset` that is not finite, an odd `num_heads` or
        a `past_offset` from 1 with "split", or a `num_biased_heads` above `num_heads` or with a
        symmetry other than "symmetric".

    >>> ALiBi(num_heads=2).rules({}).dense(jnp.array([2]), jnp.arange(3))[0]
    Array([[-0.125 , -0.0625, -0.    ]], dtype=float32)
    """

    num_heads: int
    symmetry: str = "symmetric"
    num_biased_heads: int | None = None
    past_offset: float = 0.0
    scaled: bool = False
    name: ClassVar[str] = "alibi"
    param_axes: ClassVar = {"past": "num_heads", "future": "num_heads"}

    @property
    def traits(self):
        mirrored = self.symmetry == "symmetric" and self.past_offset == 0
        return Traits(relative=True, mirrored=mirrored)

    def __post_init__(self):
        positive_fields(self, "num_heads")
        one_of("alibi", ("symmetric", "split", "learned"), symmetry=self.symmetry)
        finite("alibi", past_offset=self.past_offset)
        if self.symmetry == "split":
            require(
                self.num_heads % 2 == 0,
                f'alibi: symmetry="split" needs an even num_heads, got {self.num_heads}.',
            )
            require(
                self.past_offset < 1,
                f'alibi: symmetry="split" needs a past_offset below 1, got {self.past_offset}.',
            )
        count = self.num_biased_heads
        integers("alibi", num_biased_heads=1 if count is None else count)
        require(
            count is None or (self.symmetry == "symmetric" and 1 <= count <= self.num_heads),
            f"alibi: num_biased_heads must be 1 to {self.num_heads}, or None with a symmetry other "
            f"than 'symmetric', got {count} with symmetry={self.symmetry!r}.",
        )

    def init(self, key):
        """Returns {}, or {"past": ..., "future": ...}, float32 [N], for learned slopes."""
        if self.symmetry != "learned":
            return {}
        past, future = jax.random.normal(key, (2, self.num_heads), jnp.float32) - 2.0
        return {"past": past, "future": future}

    def rules(self, params, q_features=None, k_features=None):
        if self.symmetry == "learned":
            slopes = jax.nn.sigmoid(params["past"]), jax.nn.sigmoid(params["future"])
        elif self.symmetry == "split":
            half = alibi_slopes(self.num_heads // 2)
            hidden = jnp.full_like(half, _HIDING_SLOPE)
            slopes = jnp.concatenate([half, hidden]), jnp.concatenate([hidden, half])
        else:
            count = self.num_heads if self.num_biased_heads is None else self.num_biased_heads
            slope = jnp.pad(alibi_slopes(count), (0, self.num_heads - count))
            if not self.past_offset:
                return LogitBias(_penalty, heads=slope, relative=True, scaled=self.scaled)
            slopes = slope, slope
        rule = _PenaltyBySide(self.past_offset)
        return LogitBias(rule, heads=slopes, relative=True, scaled=self.scaled)
