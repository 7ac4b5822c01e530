r"""Scalable-Softmax: the logits of each head grow with the number of keys, at a learned rate.

    q_i -> (s ln(i + 1) + b) q_i

i + 1 is the number of keys visible to a decoder's query; s and b are learned per head. The softmax
of s ln(n) z is the softmax of z with base n^s instead of e. The paper's main form has no b; other
implementations initialise s = 0.43. Mistral Large 4 initialises s = 0, b = 1, the identity.
Products are float32; transformers rounds ln(i + 1), s and b to the model's dtype first.

Paper: Nakanishi. Scalable-Softmax Is Superior for Attention. 2025.
https://arxiv.org/abs/2501.19399
Reference code: huggingface/transformers 5.23, models/mistral_large4
(MistralLarge4TextSoftmaxScaling). The author released no code.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from posenc_jax.checks import finite, positive_fields, require
from posenc_jax.schemes.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class SSMax(Scheme):
    """Scalable-Softmax (Nakanishi 2025), to be chained with any other scheme.

    Attributes:
      num_heads: the number of query heads, N.
      scale: the initial s.
      offset: the initial b; None: no b.

    Raises:
      ValueError: for `num_heads` below one, numbers that are not finite, or a scale of 0 without
        offset.

    >>> scheme = SSMax(num_heads=1, scale=0.0, offset=1.0)
    >>> scheme.query(scheme.init(None), jnp.ones((1, 1, 1, 1)), jnp.array([[15]])).item()
    1.0
    """

    num_heads: int
    scale: float = 0.43
    offset: float | None = None
    name: ClassVar[str] = "ssmax"
    traits: ClassVar = Traits(norm_after=False)
    param_axes: ClassVar = {"scale": "num_heads", "offset": "num_heads"}

    def __post_init__(self):
        positive_fields(self, "num_heads")
        finite("ssmax", scale=self.scale, offset=self.offset or 0.0)
        require(
            self.offset is not None or self.scale != 0,
            "ssmax: scale must not be 0 without an offset: all queries would be zero.",
        )

    def init(self, key):
        """Returns {"scale": [N]}, and "offset" [N] with an offset."""
        params = {"scale": jnp.full((self.num_heads,), self.scale, jnp.float32)}
        if self.offset is not None:
            params["offset"] = jnp.full((self.num_heads,), self.offset, jnp.float32)
        return params

    def query(self, params, q, coordinates, features=None, tables=None):
        require(
            q.shape[2] == self.num_heads,
            f"ssmax: the scheme is for {self.num_heads} heads, got q of shape {q.shape}.",
        )
        count = jnp.log(coordinates.astype(jnp.float32) + 1.0)
        t = params["scale"][None, None] * count[:, :, None]
        if "offset" in params:
            t = t + params["offset"][None, None]
        return (q.astype(jnp.float32) * t[..., None]).astype(q.dtype)
