r"""Swin V2: a bias computed from 2-D offsets by a network, and cosine attention.

    logits[n, i, j] = g[n] cos(q_i, k_j) + 16 sigmoid(f_n(l(dr), l(dc)))
    l(d) = sign(d) log2(1 + |8 d / (R - 1)|) / log2(8)

f is a network 2 -> 512 -> N with ReLU and no bias in its last layer. The logarithm maps offsets
into [-1.06, 1.06], so that a model fine-tuned with a larger window extrapolates little; R and C in
l are then the sizes of the window in training (`pretrained_window`).

cos(q, k) is the dot product of unit vectors, and g[n] = exp(min(tau[n], ln 100)) is learned,
initially 10. q has length g[n] sqrt(H), so that the factor 1/sqrt(H) of layers leaves g[n].

Coordinates are as for Swin. f runs once per offset of the window, not once per pair.

Paper: Liu et al. Swin Transformer V2: Scaling Up Capacity and Resolution. 2021.
https://arxiv.org/abs/2111.09883
Reference code: microsoft/Swin-Transformer, models/swin_transformer_v2.py, WindowAttention.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import positive_fields, require
from posenc_jax.engine.rules import LogitBias
from posenc_jax.ops.init import torch_uniforms
from posenc_jax.schemes.bias.swin import WindowEntry, check_window
from posenc_jax.schemes.scheme import Scheme, Traits


def log_offsets(window: tuple[int, int], pretrained: tuple[int, int]) -> np.ndarray:
    """Returns (l(dr), l(dc)) for every offset of a window, float32 [(2R - 1)(2C - 1), 2].

    The largest offset of the window in training, `pretrained`, is scaled to 8.
    """
    axes = [8.0 * np.arange(1 - n, n) / (m - 1) for n, m in zip(window, pretrained, strict=True)]
    offsets = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    return (np.sign(offsets) * np.log2(1 + np.abs(offsets)) / np.log2(8)).astype(np.float32)


def _normalise(x, scale=1.0):
    squares = (x.astype(jnp.float32) ** 2).sum(-1, keepdims=True)
    length = jnp.sqrt(jnp.maximum(squares, 1e-24))
    return (x.astype(jnp.float32) / length * scale).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class SwinV2(Scheme):
    """The log-spaced continuous position bias of Swin V2, with its attention (Liu et al. 2021).

    Attributes:
      num_heads: the number of query heads, N.
      window: rows and columns of a window.
      pretrained_window: rows and columns of the window in training. Default: `window`.
      width: number of hidden units.

    Raises:
      ValueError: for sizes below one, or a window in training with a single row or column.

    >>> params = SwinV2(num_heads=3).init(jax.random.key(0))
    >>> params["in"].shape, params["out"].shape
    ((512, 2), (3, 512))
    """

    num_heads: int
    window: tuple[int, int] = (8, 8)
    pretrained_window: tuple[int, int] | None = None
    width: int = 512
    name: ClassVar[str] = "swin_v2"
    param_axes: ClassVar = {"out": "num_heads width", "tau": "num_heads"}
    traits: ClassVar = Traits(num_axes=2, norm_after=False)

    def __post_init__(self):
        positive_fields(self, "num_heads", "width")
        check_window("swin_v2: window", self.window)
        check_window("swin_v2: pretrained_window", self._trained)
        require(
            min(self._trained) >= 2,
            "swin_v2: offsets are divided by the size of the window in training minus one; both "
            f"sizes must be at least 2, got {self._trained}.",
        )

    @property
    def _trained(self):
        return self.window if self.pretrained_window is None else self.pretrained_window

    def init(self, key):
        """Returns {"in", "in_bias", "out"}, initialised as torch.nn.Linear, and {"tau": [N]}."""
        network = {
            "in": ((self.width, 2), 2),
            "in_bias": ((self.width,), 2),
            "out": ((self.num_heads, self.width), self.width),
        }
        tau = jnp.full(self.num_heads, math.log(10.0), jnp.float32)
        return torch_uniforms(jax.random.split(key, 3), network) | {"tau": tau}

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H] normalised to length g[n] sqrt(H)."""
        gain = jnp.exp(jnp.minimum(params["tau"].astype(jnp.float32), math.log(100.0)))
        gain *= math.sqrt(q.shape[-1])
        return _normalise(q, gain[None, None, :, None])

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H] normalised to length one."""
        return _normalise(k)

    def rules(self, params, q_features=None, k_features=None):
        offsets = jnp.asarray(log_offsets(self.window, self._trained))
        hidden = jnp.einsum("ra,wa->rw", offsets, params["in"], precision="highest")
        hidden = jax.nn.relu(hidden + params["in_bias"][None])
        table = jnp.einsum("nw,rw->nr", params["out"], hidden, precision="highest")
        return LogitBias(WindowEntry(self.window), heads=16.0 * jax.nn.sigmoid(table))
