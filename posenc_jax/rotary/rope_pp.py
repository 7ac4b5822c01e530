r"""RoPE++: some heads use the imaginary part of the rotary product, which RoPE throws away.

    real heads        Re(q conj(k) e^(i (m - n) w))    as in RoPE
    imaginary heads   Im of the same

An imaginary head is one whose q turns by m w - pi / 2 while k turns by n w: nothing else
changes, and keys are cached as in RoPE. It weighs distant tokens more.

    heads="second_half" (default)  the second half of the query heads     "imagh"
    heads="odd"                    every second one                       "imagx"
    heads="all"                    all                                    "imago"
    heads="added"                  each head, real and then imaginary     "imag1", "imag2"

On the right is the authors' word. With "added", `query` returns twice the heads and so does
attention: [B, T, 2 N, V], the paper's RoPE++. Keys and values stay; the projection of the
output reads 2 N heads. The Flax layers have no such projection: use `scheme_attention`.

Paper: Liu et al. Beyond Real: Imaginary Extension of Rotary Position Embeddings for
Long-Context LLMs. 2025. https://arxiv.org/abs/2512.07525
Reference code: OpenMOSS/rope_pp, rope_pp/modeling_llama_rope_pp.py.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from posenc_jax.angles import cos_sin
from posenc_jax.checks import require
from posenc_jax.rotary.frequencies import FrequencyMap, rope_frequencies
from posenc_jax.rotary.layouts import check_layout
from posenc_jax.rotary.rotate import apply_rotation
from posenc_jax.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class RoPEPlusPlus(Scheme):
    """RoPE with imaginary heads (Liu et al. 2025).

    Attributes:
      head_dim: H.
      heads: "second_half", "odd", "all" or "added": which heads are imaginary.
      theta: the base of the frequencies.
      layout: what makes a pair; see `posenc_jax.rotary.layouts`.
      scaling: a map of the frequencies, or a tuple of maps.

    Raises:
      ValueError: for an unknown choice of heads or layout, an odd H, or `theta` not positive.

    >>> scheme = RoPEPlusPlus(head_dim=4, heads="added")
    >>> scheme.query({}, jnp.ones((1, 1, 3, 4)), jnp.array([[0]])).shape
    (1, 1, 6, 4)
    """

    head_dim: int
    heads: str = "second_half"
    theta: float = 10000.0
    layout: str = "half"
    scaling: FrequencyMap | tuple[FrequencyMap, ...] = FrequencyMap()  # noqa: RUF009, frozen
    name: ClassVar[str] = "rope_pp"

    def __post_init__(self):
        check_layout(self.name, self.layout)
        choices = ("second_half", "odd", "all", "added")
        require(
            self.heads in choices, f"rope_pp: heads must be one of {choices}, got {self.heads!r}."
        )
        rope_frequencies(self.head_dim, self.theta, self.scaling)

    @property
    def traits(self):
        return Traits(relative=True)

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H], rotated; [B, T, 2 N, H] with heads added."""
        cos, sin = self._tables(q, coordinates)
        if self.heads == "all":
            return self._turned(q, sin, -cos)
        if self.heads == "second_half":
            count = q.shape[2]
            require(count % 2 == 0, f"rope_pp: needs an even number of heads, got {count}.")
            a, b = jnp.split(q, 2, 2)
            return jnp.concatenate([self._turned(a, cos, sin), self._turned(b, sin, -cos)], 2)
        if self.heads == "odd":
            odd = (jnp.arange(q.shape[2]) % 2 == 1)[None, None, :, None]
            return jnp.where(odd, self._turned(q, sin, -cos), self._turned(q, cos, sin))
        both = jnp.stack([self._turned(q, cos, sin), self._turned(q, sin, -cos)], 3)
        return both.reshape(*q.shape[:2], -1, self.head_dim)

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], rotated as in RoPE."""
        return self._turned(k, *self._tables(k, coordinates))

    def _tables(self, x, coordinates):
        require(
            x.shape[-1] == self.head_dim,
            f"rope_pp: the scheme is for head_dim {self.head_dim}, got q or k of shape {x.shape}.",
        )
        frequencies, factor = rope_frequencies(self.head_dim, self.theta, self.scaling)
        cos, sin = cos_sin(coordinates, frequencies)
        return (cos, sin) if factor == 1.0 else (factor * cos, factor * sin)

    def _turned(self, x, cos, sin):
        return apply_rotation(x, cos, sin, layout=self.layout)
