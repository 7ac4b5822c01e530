r"""Stick-breaking attention: each key takes its share of what later keys have left.

    z[i, j] = q_i . k_j / sqrt(H),    b = sigmoid(z)
    p[i, j] = b[i, j] prod_{j < t < i} (1 - b[i, t])         for j < i
    out[i]  = sum_j p[i, j] v_j + (1 - sum_j p[i, j]) v_i

There is no softmax: a query walks back from its own place, and a key that takes much hides
those before it. So recent keys come first without any encoding of distance.

A token does not look at itself but for what is left over, which goes to its own value
(`remainder=False`: to nothing; the first token of a sequence then gets zeros). With
`attend_current` it is the first to take its share. All comes from the order of tokens:
what is at a later coordinate is not seen, whether or not attention is causal, and distances
are not read. Products run in float32 logarithms.

Paper: Tan et al. Scaling Stick-breaking Attention: An Efficient Implementation and In-depth
Study. 2024. https://arxiv.org/abs/2410.17980
Reference code: shawntan/stickbreaking-attention, stickbreaking_attention/sb_ref.py;
IBM/dolomite-engine, hf_models/models/stickbreaking, which adds the remainder.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.rules import LogitsTransform
from posenc_jax.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class _LogWeights:
    """Logarithms of the weights of all keys."""

    attend_current: bool
    remainder: bool

    def __call__(self, shared, heads, row, cols, logits, seen, q, k):
        own = seen & (k == q)[None]
        takes = seen & (k <= q if self.attend_current else k < q)[None]
        left = jnp.where(takes, -jax.nn.softplus(logits), 0.0)
        after = jax.lax.cumsum(left, axis=1, reverse=True)
        rest = after[:, :1]
        after = jnp.pad(after[:, 1:], ((0, 0), (0, 1)))
        weights = jnp.where(takes, after - jax.nn.softplus(-logits), -jnp.inf)
        if not self.remainder:
            return weights
        return jnp.where(
            own, jnp.logaddexp(weights, rest) if self.attend_current else rest, weights
        )


@dataclasses.dataclass(frozen=True)
class StickBreaking(Scheme):
    """Stick-breaking attention (Tan et al. 2024), in place of the softmax.

    Attributes:
      remainder: whether what no key took goes to the query's own value.
      attend_current: whether a token takes its own share first.

    >>> q = k = jnp.zeros((1, 3, 1, 2))  # Every key takes half of what is left.
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

    @property
    def traits(self):
        return Traits(relative=True, order_only=True)

    def rules(self, params, q_features=None, k_features=None):
        """Returns the rule that makes the weights."""
        return LogitsTransform(_LogWeights(self.attend_current, self.remainder), normalized=False)
