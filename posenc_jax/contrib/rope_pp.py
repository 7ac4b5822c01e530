r"""RoPE++: some heads use the imaginary part of the rotary product, which RoPE discards.

    real heads        Re(q conj(k) e^(i (m - n) w))    as in RoPE
    imaginary heads   Im(q conj(k) e^(i (m - n) w))

In an imaginary head q is rotated by m w - pi / 2; k is rotated by n w as in RoPE, and rotated keys
are cached. Such heads give larger weights to distant tokens.

    heads="second_half" (default)  the second half of the query heads     "imagh"
    heads="odd"                    every second head                      "imagx"
    heads="all"                    all                                    "imago"
    heads="added"                  each head, real and then imaginary     "imag1", "imag2"

The names on the right are the authors'. With "added", `query` and attention return twice the heads,
[B, T, 2 N, V], the paper's RoPE++. Keys and values are unchanged; the output projection reads 2 N
heads. The Flax layers have no such projection: use `scheme_attention`.

Paper: Liu et al. Beyond Real: Imaginary Extension of Rotary Position Embeddings for
Long-Context LLMs. 2025. https://arxiv.org/abs/2512.07525
Reference code: OpenMOSS/rope_pp, rope_pp/modeling_llama_rope_pp.py.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from posenc_jax.checks import one_of, require
from posenc_jax.schemes.rotary.base import ScalableRotary, check_heads


@dataclasses.dataclass(frozen=True)
class RoPEPlusPlus(ScalableRotary):
    """RoPE with imaginary heads (Liu et al. 2025).

    Attributes:
      head_dim, theta, layout, rotary_dim, rotary_start, scaling: as in `RoPE`.
      heads: "second_half", "odd", "all" or "added": which heads are imaginary.

    Raises:
      ValueError: for an unknown choice of heads, and as `RoPE`.

    >>> scheme = RoPEPlusPlus(head_dim=4, heads="added")
    >>> scheme.query({}, jnp.ones((1, 1, 3, 4)), jnp.array([[0]])).shape
    (1, 1, 6, 4)
    """

    heads: str = "second_half"
    name: ClassVar[str] = "rope_pp"

    def __post_init__(self):
        super().__post_init__()
        one_of("rope_pp", ("second_half", "odd", "all", "added"), heads=self.heads)

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H], rotated; [B, T, 2 N, H] with heads added."""
        check_heads(self.name, q, self.head_dim)
        cos, sin = self.tables(params, coordinates) if tables is None else tables
        real, imaginary = (cos, sin), (sin, -cos)
        if self.heads == "all":
            return self.rotate(q, imaginary)
        if self.heads == "second_half":
            count = q.shape[2]
            require(count % 2 == 0, f"rope_pp: needs an even number of heads, got {count}.")
            a, b = jnp.split(q, 2, 2)
            return jnp.concatenate([self.rotate(a, real), self.rotate(b, imaginary)], 2)
        if self.heads == "odd":
            odd = (jnp.arange(q.shape[2]) % 2 == 1)[None, None, :, None]
            return jnp.where(odd, self.rotate(q, imaginary), self.rotate(q, real))
        both = jnp.stack([self.rotate(q, real), self.rotate(q, imaginary)], 3)
        return both.reshape(*q.shape[:2], -1, self.head_dim)
