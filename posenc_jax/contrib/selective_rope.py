r"""Selective RoPE: rotation by angles that are predicted from content and accumulate.

    (x_p, x_{p + P}) rotate by tau_p c[t, p],   tau_p = temp_max theta^(-2p / H)
    c[t] = sum_{s <= t} phi[s],                 phi = conv(W_2 W_1 x / |x|)

for both queries and keys: the angle between a query and a key is the sum of the phi of the tokens
after the key. RoPE is phi = 1. The convolution is over the last `width` tokens, one filter per
channel; x is normalised in `groups` parts of D / groups. The authors have a set of angles per head.

Padding contributes neither to c nor to the convolution. c runs on over packed segments: only its
differences within one matter. It is float32: angles lose precision as it grows, also in the
authors' code. It is cached with each key, `groups` times H / 2 numbers. Gates and biases, which the
authors' configurations leave off, are not implemented.

Paper: Movahedi, Carstensen et al. Selective Rotary Position Embedding. 2025.
https://arxiv.org/abs/2511.17388
Reference code: timurcarstensen/selective-rope, src/selective_rope/modules/rotary.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import activations, positive, positive_fields, require
from posenc_jax.ops.init import torch_uniforms
from posenc_jax.ops.short_conv import short_convolution
from posenc_jax.schemes.rotary.base import ContentRotary


@dataclasses.dataclass(frozen=True)
class SelectiveRoPE(ContentRotary):
    """Rotary embedding by angles predicted from content (Movahedi, Carstensen et al. 2025).

    Attributes:
      head_dim: the head dim, H.
      model_dim: the model dim, D.
      groups: the number of sets of angles for consecutive heads; it divides D and the number of
        key heads.
      rank: the width between W_1 and W_2.
      width: the number of tokens that the convolution spans.
      theta: the base of the temperatures.
      temp_max: the largest temperature.
      learn_temperature: whether tau is learned.

    Raises:
      ValueError: for sizes below one, an odd H, groups not dividing D, or numbers not positive.

    >>> SelectiveRoPE(head_dim=4, model_dim=8).init(jax.random.key(0))["conv"].shape
    (4, 2)
    """

    model_dim: int
    groups: int = 1
    rank: int = 16
    width: int = 4
    theta: float = 500000.0
    temp_max: float = 1.0
    learn_temperature: bool = False
    name: ClassVar[str] = "selective_rope"
    param_axes: ClassVar = {"down": "model_dim rank"}

    def __post_init__(self):
        super().__post_init__()
        positive_fields(self, "model_dim", "rank", "width")
        require(
            self.model_dim % self.groups == 0,
            f"selective_rope: groups={self.groups} must divide model_dim={self.model_dim}.",
        )
        positive("selective_rope", temp_max=self.temp_max)

    def init(self, key):
        """Returns {"down": [D, rank], "up": [rank, C], "conv": [width, C]}, torch's initial values.

        C is groups * H / 2; "temperature" [H / 2] is there if it is learned.
        """
        channels = self.groups * self.head_dim // 2
        network = {
            "down": ((self.model_dim, self.rank), self.model_dim),
            "up": ((self.rank, channels), self.rank),
            "conv": ((self.width, channels), self.width),
        }
        params = torch_uniforms(jax.random.split(key, 3), network)
        if self.learn_temperature:
            params["temperature"] = self._initial_temperature()
        return params

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns c of every token, float32 [B, T, groups, H / 2], for queries and for keys."""
        x = activations(self.name, x, self.model_dim, "angles")
        batch, length = x.shape[:2]
        if segment_ids is None:
            segment_ids = jnp.zeros_like(x[:, :, 0], jnp.int32)  # Sharded as x is.
        tokens = (segment_ids >= 0)[:, :, None]
        grouped = batch, length, self.groups
        x = jnp.where(tokens, x, 0.0).reshape(*grouped, self.model_dim // self.groups)
        x = x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
        x = jnp.dot(x.reshape(batch, length, self.model_dim), params["down"], precision="highest")
        phi = jnp.dot(x, params["up"], precision="highest")
        total, recent = (jnp.zeros_like(phi.sum(1)), None) if state is None else state
        phi, recent = short_convolution(phi, params["conv"], segment_ids, recent)
        sums = total[:, None] + jnp.cumsum(jnp.where(tokens, phi, 0.0), 1)
        c = sums.reshape(*grouped, sums.shape[2] // self.groups)
        return c, c, (sums[:, -1] if length else total, recent)

    def cos_sin(self, params, coordinates):
        """Returns the tables of the sums c, [B, T, groups, H / 2]."""
        tau = params["temperature"] if self.learn_temperature else self._initial_temperature()
        angles = coordinates * tau[None, None, None]
        return jnp.cos(angles), jnp.sin(angles)

    def _initial_temperature(self):
        return jnp.asarray(self.temp_max * self.base_frequencies, jnp.float32)
