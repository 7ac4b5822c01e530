r"""Selective RoPE: tokens choose by how much they turn those after them.

    (x_p, x_{p + P}) turn by tau_p c[t, p],     tau_p = temp_max theta^(-2p / H)
    c[t] = sum_{s <= t} phi[s],                 phi = conv(W_2 W_1 x / |x|)

for both queries and keys: between a query and a key stands the sum of the phi that came after
the key. RoPE is phi = 1. The convolution is over the last `width` tokens, one filter per
channel; x is normalised in `groups` parts of D / groups. With `groups` sets of angles, head n
of N has the set n * groups // N, and so have key heads; the authors have N.

Padding and neighbours in a packed batch stay out of c and of the convolution. c is float32:
angles lose precision as it grows, as the authors' do. It is cached beside each key, H / 2
numbers. Gates and biases, which the authors' configurations leave off, are not here.

Paper: Movahedi, Carstensen et al. Selective Rotary Position Embedding. 2025.
https://arxiv.org/abs/2511.17388
Reference code: timurcarstensen/selective-rope, src/selective_rope/modules/rotary.py.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.rotary.frequencies import rope_frequencies
from posenc_jax.rotary.rotate import apply_rotation
from posenc_jax.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class SelectiveRoPE(Scheme):
    """Rotary embedding by angles that tokens choose (Movahedi, Carstensen et al. 2025).

    Attributes:
      model_dim: D.
      head_dim: H.
      groups: the number of sets of angles; it divides D and the number of key heads.
      rank: the width between W_1 and W_2.
      width: the number of tokens that the convolution sees.
      theta: the base of the temperatures.
      temp_max: the largest temperature.
      learn_temperature: whether tau is learned.

    Raises:
      ValueError: for sizes below one, an odd H, groups not dividing D, or numbers not positive.

    >>> SelectiveRoPE(model_dim=8, head_dim=4).init(jax.random.key(0))["conv"].shape
    (4, 2)
    """

    model_dim: int
    head_dim: int
    groups: int = 1
    rank: int = 16
    width: int = 4
    theta: float = 500000.0
    temp_max: float = 1.0
    learn_temperature: bool = False
    name: ClassVar[str] = "selective_rope"

    def __post_init__(self):
        for name in ("model_dim", "groups", "rank", "width"):
            value = getattr(self, name)
            require(value >= 1, f"selective_rope: {name} must be >= 1, got {value}.")
        require(
            self.model_dim % self.groups == 0,
            f"selective_rope: groups={self.groups} must divide model_dim={self.model_dim}.",
        )
        require(
            0 < self.temp_max < math.inf,
            f"selective_rope: temp_max must be positive, got {self.temp_max}.",
        )
        rope_frequencies(self.head_dim, self.theta)

    @property
    def traits(self):
        return Traits(relative=True, order_only=True, reads_x=True)

    def init(self, key):
        """Returns {"down": [D, rank], "up": [rank, C], "conv": [width, C]} as torch starts them.

        C is groups * H / 2; "temperature" [H / 2] is there if it is learned.
        """
        channels = self.groups * self.head_dim // 2
        shapes = {"down": (self.model_dim, self.rank), "up": (self.rank, channels)}
        shapes["conv"] = (self.width, channels)
        params = {
            name: jax.random.uniform(k, shape, minval=-1.0, maxval=1.0) * shape[0] ** -0.5
            for k, (name, shape) in zip(jax.random.split(key, 3), shapes.items(), strict=True)
        }
        return params | ({"temperature": self._start()} if self.learn_temperature else {})

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns c of every token, float32 [B, T, groups, H / 2], for queries and for keys."""
        require(
            x is not None and x.shape[-1] == self.model_dim,
            f"selective_rope: x must be [B, T, {self.model_dim}], got {getattr(x, 'shape', None)}.",
        )
        batch, length = x.shape[:2]
        places = jnp.zeros_like(x[..., 0], jnp.int32) if segment_ids is None else segment_ids
        real = (places >= 0)[:, :, None]
        x = jnp.where(real, x.astype(jnp.float32), 0.0).reshape(batch, length, self.groups, -1)
        x = x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
        x = jnp.dot(x.reshape(batch, length, -1), params["down"], precision="highest")
        phi = jnp.dot(x, params["up"], precision="highest")
        if state is None:
            tokens = jnp.repeat(jnp.zeros_like(phi[:, :1]), self.width - 1, 1)
            state = jnp.zeros_like(phi[:, 0]), tokens, jnp.zeros_like(tokens[..., 0], jnp.int32)
        phi, *recent = self._convolved(params["conv"], phi, places + 1, *state[1:])
        sums = state[0][:, None] + jnp.cumsum(jnp.where(real, phi, 0.0), 1)
        angles = sums.reshape(batch, length, self.groups, -1)
        return angles, angles, (sums[:, -1], *recent)

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H], turned by the angles in `features`."""
        require(
            q.shape[3] == self.head_dim and q.shape[2] % self.groups == 0,
            f"selective_rope: q and k must be [B, T, a multiple of groups={self.groups}, "
            f"{self.head_dim}], got {q.shape}.",
        )
        tau = params["temperature"] if self.learn_temperature else self._start()
        angles = features * tau[None, None, None]
        return apply_rotation(q, jnp.cos(angles), jnp.sin(angles))

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], turned by the angles in `features`."""
        return self.query(params, k, coordinates, features)

    def _start(self):
        frequencies, _ = rope_frequencies(self.head_dim, self.theta)
        return jnp.asarray(self.temp_max * frequencies, jnp.float32)

    def _convolved(self, filters, phi, owners, old, old_owners):
        """The causal convolution within a sequence; owners are segment ids + 1, 0 for padding."""
        owners = jnp.concatenate([old_owners, owners], 1)
        order = jnp.argsort(owners > 0, axis=1, stable=True)  # Padding first, then tokens.
        tokens = jnp.take_along_axis(jnp.concatenate([old, phi], 1), order[:, :, None], 1)
        whose = jnp.take_along_axis(owners, order, 1)
        total, out = order.shape[1], jnp.zeros_like(tokens)
        for back in range(self.width):
            from_ = jnp.pad(tokens, ((0, 0), (back, 0), (0, 0)))[:, :total]
            same = jnp.pad(whose, ((0, 0), (back, 0)))[:, :total] == whose
            out += jnp.where(same[:, :, None], from_, 0.0) * filters[-1 - back][None, None]
        back_again = jnp.argsort(order, axis=1)[:, self.width - 1 :]
        out = jnp.take_along_axis(out, back_again[:, :, None], 1)
        kept = slice(total - (self.width - 1), total)
        return out, tokens[:, kept], whose[:, kept]
