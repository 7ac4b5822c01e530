r"""Stick-breaking attention: weights from a stick-breaking process over the keys, latest first.

    z[i, j] = q_i . k_j / sqrt(H),    b = sigmoid(z)
    p[i, j] = b[i, j] prod_{j < t < i} (1 - b[i, t])         for j < i
    out[i]  = sum_j p[i, j] v_j + (1 - sum_j p[i, j]) v_i

There is no softmax: going back from the query, each key takes the fraction b of the remaining
weight, so that recent keys have precedence without any encoding of distance.

The query's token gets the remaining weight (`remainder=False`: no token gets it, and the output of
the first token of a sequence is zero). With `attend_current` the query's token also takes the first
fraction. Only the order of coordinates matters: later tokens are masked, whether or not attention
is causal, and distances are not read. Coordinates of a sequence must differ: the remaining weight
goes to every key at the coordinate of the query. Products are sums of float32 logarithms.

Paper: Tan et al. Scaling Stick-breaking Attention: An Efficient Implementation and In-depth
Study. 2024. https://arxiv.org/abs/2410.17980
Reference code: shawntan/stickbreaking-attention, stickbreaking_attention/sb_ref.py;
IBM/dolomite-engine, hf_models/models/stickbreaking, which adds the remainder.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.engine.rules import LogitsTransform
from posenc_jax.schemes.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class _LogWeights:
    """The logarithms of the weights of all keys of one query, [N, S]."""

    attend_current: bool
    remainder: bool

    def __call__(self, shared, heads, q_feature, k_features, logits, seen, q, k):
        attended = seen & (k <= q if self.attend_current else k < q)[None]
        log_remaining = jnp.where(attended, -jax.nn.softplus(logits), 0.0)  # log(1 - b).
        log_remaining = jax.lax.cumsum(log_remaining, axis=1, reverse=True)
        remainder = log_remaining[:, :1]
        log_remaining = jnp.pad(log_remaining[:, 1:], ((0, 0), (0, 1)))  # After all later keys.
        weights = jnp.where(attended, log_remaining - jax.nn.softplus(-logits), -jnp.inf)
        if not self.remainder:
            return weights
        is_query = seen & (k == q)[None]
        query_weight = jnp.logaddexp(weights, remainder) if self.attend_current else remainder
        return jnp.where(is_query, query_weight, weights)


@dataclasses.dataclass(frozen=True)
class StickBreaking(Scheme):
    """Stick-breaking attention (Tan et al. 2024), in place of the softmax.

    Attributes:
      remainder: whether the query's token gets the remaining weight.
      attend_current: whether the query's token takes the first fraction.

    >>> q = k = jnp.zeros((1, 3, 1, 2))  # Each key takes half of the remaining weight.
    >>> import posenc_jax as pe
    >>> v = jnp.eye(3)[None, :, None]
    >>> pe.scheme_attention(StickBreaking(), {}, q, k, v, is_causal=True)[0][0, :, 0]
    Array([[1.  , 0.  , 0.  ],
           [0.5 , 0.5 , 0.  ],
           [0.25, 0.5 , 0.25]], dtype=float32)
    """

    remainder: bool = True
    attend_current: bool = False
    name: ClassVar[str] = "stick_breaking"
    traits: ClassVar = Traits(
        relative=True,
        order_only=True,
        transforms_rows=True,
        causal_only="keys after the query have no weight",
    )

    def rules(self, params, q_features=None, k_features=None):
        return LogitsTransform(
            _LogWeights(self.attend_current, self.remainder), normalized=False, reads_seen_only=True
        )
