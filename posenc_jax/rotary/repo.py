r"""RePo: tokens say themselves where they are, and RoPE turns by that.

    z[t] = W (silu(G x_t) * C x_t)       a real number per head; G, C: D -> D / 8
    q, k turn by z[t] w_p                w_p as in RoPE

The place in the sequence is not read at all: order is known from the causal mask, and the
authors keep RoPE in the first layers (5 of 16). With `groups` sets of positions, head n of N
has the set n * groups // N, and so have key heads; the authors have N. Beside a key its z is
cached, `groups` numbers, though only `key` reads it.

Angles are products in float32: z is small, where positions are not.

Paper: Li et al. RePo: Language Models with Context Re-Positioning. 2025.
https://arxiv.org/abs/2512.14391
Reference code: SakanaAI/repo, OLMo/olmo/model.py, dynamic_position_encoding_swigluex_multihead.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.angles import cos_sin
from posenc_jax.checks import require
from posenc_jax.rotary.frequencies import rope_frequencies
from posenc_jax.rotary.layouts import check_layout
from posenc_jax.rotary.rotate import apply_rotation
from posenc_jax.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class RePo(Scheme):
    """RoPE at positions that are predicted from content (Li et al. 2025).

    Attributes:
      model_dim: D.
      head_dim: H.
      groups: the number of sets of positions; it divides the number of key heads.
      width: the width of the gated layer; 0 for D / 8.
      theta: the base of the frequencies.
      layout: what makes a pair; see `posenc_jax.rotary.layouts`.
      init_std: the standard deviation of the initial weights.

    Raises:
      ValueError: for sizes out of range, an unknown layout, or numbers not positive.

    >>> RePo(model_dim=16, head_dim=4).init(jax.random.key(0))["out"].shape
    (2, 1)
    """

    model_dim: int
    head_dim: int
    groups: int = 1
    width: int = 0
    theta: float = 10000.0
    layout: str = "half"
    init_std: float = 0.02
    name: ClassVar[str] = "repo"

    def __post_init__(self):
        check_layout(self.name, self.layout)
        require(self.groups >= 1, f"repo: groups must be >= 1, got {self.groups}.")
        require(self.width >= 0, f"repo: width must be >= 0, got {self.width}.")
        require(
            bool(self.width) or self.model_dim >= 8,
            f"repo: model_dim={self.model_dim} has no eighth; give a width.",
        )
        require(self.init_std > 0, f"repo: init_std must be positive, got {self.init_std}.")
        rope_frequencies(self.head_dim, self.theta)

    @property
    def traits(self):
        return Traits(relative=True, order_only=True, reads_x=True)

    def init(self, key):
        """Returns {"gate": [D, width], "content": [D, width], "out": [width, groups]}; normal."""
        width = self.width or self.model_dim // 8
        shapes = {"gate": (self.model_dim, width), "content": (self.model_dim, width)}
        shapes["out"] = (width, self.groups)
        keys = jax.random.split(key, 3)
        return {
            name: self.init_std * jax.random.normal(k, shape)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns the positions z, float32 [B, T, groups], for queries and for keys."""
        if x is None:
            raise ValueError("repo: positions are made from x; give it to scheme_attention.")
        require(
            x.shape[-1] == self.model_dim,
            f"repo: x must be [B, T, {self.model_dim}], got {x.shape}.",
        )
        x = x.astype(jnp.float32)
        gate, content = (
            jnp.dot(x, params[name], precision="highest") for name in ("gate", "content")
        )
        z = jnp.dot(jax.nn.silu(gate) * content, params["out"], precision="highest")
        return z, z, state

    def query(self, params, q, coordinates, features: Any = None, tables=None):
        """Returns q [B, T, N, H], turned as at the positions in `features`."""
        heads = q.shape[2]
        require(
            q.shape[3] == self.head_dim and heads % self.groups == 0,
            f"repo: q and k must be [B, T, a multiple of groups={self.groups}, {self.head_dim}], "
            f"got {q.shape}.",
        )
        cos, sin = cos_sin(features, rope_frequencies(self.head_dim, self.theta)[0])
        return apply_rotation(q, cos, sin, layout=self.layout)

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], turned as at the positions in `features`."""
        return self.query(params, k, coordinates, features)
