r"""PaTH: between a key and a query stands the product of one reflection per token.

    logits[i, j] = q_i^T H_i H_{i-1} ... H_{j+1} k_j / sqrt(H),    H_t = I - beta_t w_t w_t^T

w_t is a unit vector and beta_t = 2 sigmoid(.) a number, both made from the token, so the
path from j to i can rotate, reflect or forget by what was read on the way.

w is a projection of x (of rank 32 where every query head has its own, as published), a
causal convolution over 3 tokens of a segment and SiLU. Later tokens are not seen, whether
or not attention is causal. A query walks back over chunks of 64 keys; within a chunk, all
reflections are one triangular system, solved once for all queries. Cached keys are raw,
w and beta are cached beside them (the authors rewrite all cached keys at every step), so a
decode step solves the systems anew.

`forget_gate` is PaTH-FoX: the gates of FoX, whose sums are multiplied by the scale of the logits
as the authors' kernels have it; FoX itself adds them after the scale.

Paper: Yang et al. PaTH Attention: Position Encoding via Accumulating Householder
Transformations. 2025. https://arxiv.org/abs/2505.16381
Reference code: fla-org/flash-linear-attention, fla/layers/path_attn.py, and
naive_path_attn in tests/ops/test_path_attn.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.content.fox import FoX
from posenc_jax.content.path_walk import attend_along_path
from posenc_jax.ops.init import torch_uniform
from posenc_jax.ops.short_conv import short_convolution
from posenc_jax.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class PaTH(Scheme):
    """PaTH attention (Yang et al. 2025).

    Attributes:
      num_heads: N.
      head_dim: H.
      model_dim: D.
      num_kv_heads: how many heads have reflections of their own, K or N; 0 for N.
      rank: of the projection to w; 0 for a full matrix.
      short_conv: whether w is convolved over 3 tokens.
      forget_gate: whether a gate per token and query head forgets what came before.

    Raises:
      ValueError: for sizes below one, or heads that do not divide.

    >>> scheme = PaTH(num_heads=4, head_dim=16, model_dim=64)
    >>> params = scheme.init(jax.random.key(0))
    >>> [matrix.shape for matrix in params["w"]], params["beta"].shape
    ([(64, 32), (32, 64)], (64, 4))
    """

    num_heads: int
    head_dim: int
    model_dim: int
    num_kv_heads: int = 0
    rank: int = 32
    short_conv: bool = True
    forget_gate: bool = False
    name: ClassVar[str] = "path"

    def __post_init__(self):
        for name in ("num_heads", "head_dim", "model_dim"):
            value = getattr(self, name)
            require(value >= 1, f"path: {name} must be >= 1, got {value}.")
        require(self.rank >= 0, f"path: rank must not be negative, got {self.rank}.")
        require(
            self.num_kv_heads >= 0 and self.num_heads % (self.num_kv_heads or 1) == 0,
            f"path: num_kv_heads must divide num_heads = {self.num_heads}, "
            f"got {self.num_kv_heads}.",
        )

    @property
    def traits(self):
        return Traits(relative=True, order_only=True, reads_x=True)

    def init(self, key):
        """Returns the projections and kernels, as torch.nn.Linear and Conv1d start."""
        heads = self.num_kv_heads or self.num_heads
        dim, width = self.model_dim, heads * self.head_dim
        keys = jax.random.split(key, 5)

        if self.rank:
            down = torch_uniform(keys[0], (dim, self.rank), dim)
            w = down, torch_uniform(keys[1], (self.rank, width), self.rank)
        else:
            w = (torch_uniform(keys[0], (dim, width), dim),)
        params = {"w": w, "beta": torch_uniform(keys[2], (dim, heads), dim)}
        params["beta_bias"] = torch_uniform(keys[3], (heads,), dim)
        if self.short_conv:
            params["conv"] = torch_uniform(keys[4], (3, width), 3)
        if self.forget_gate:
            params["gate"] = self._fox.init(jax.random.fold_in(key, 5))
        return params

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns sums of gates for queries; w, beta and those sums for keys; and the state."""
        if x is None:
            raise ValueError("path: w and beta are made from x; give it to scheme_attention.")
        require(
            x.shape[-1] == self.model_dim and q.shape[2:] == (self.num_heads, self.head_dim),
            f"path: x must be [B, T, {self.model_dim}] and q [B, T, {self.num_heads}, "
            f"{self.head_dim}], got {x.shape} and {q.shape}.",
        )
        state, forgotten = (None, None) if state is None else state
        sums = None
        if self.forget_gate:
            gate = params["gate"], x, q, k, coordinates, segment_ids, forgotten
            sums, _, forgotten = self._fox.features(*gate)
        x = x.astype(jnp.float32)
        if segment_ids is None:
            segment_ids = jnp.zeros(x.shape[:2], jnp.int32)
        x = jnp.where((segment_ids >= 0)[:, :, None], x, 0.0)
        w = x
        for matrix in params["w"]:
            w = jnp.dot(w, matrix, precision="highest")
        if self.short_conv:
            w, state = short_convolution(w, params["conv"], segment_ids, state)
            w = jax.nn.silu(w)
        w = w.reshape(*w.shape[:2], -1, self.head_dim)
        w *= jax.lax.rsqrt(jnp.sum(w * w, -1, keepdims=True) + 1e-6)
        beta = jnp.dot(x, params["beta"], precision="highest") + params["beta_bias"][None, None]
        return sums, (w, 2.0 * jax.nn.sigmoid(beta), sums), (state, forgotten)

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        """Returns attention whose logits follow the path of each key to the query."""
        if attention.softcap is not None:
            raise NotImplementedError("path: softcap comes before what the path adds.")
        scale = self.head_dim**-0.5 if attention.scale is None else attention.scale
        w, beta, sums = k_features
        if self.forget_gate:
            gates = dataclasses.replace(self._fox.rules({}, q_features, sums), scaled=True)
            attention = attention.replace(extra_rules=(*attention.extra_rules, gates))
        return attend_along_path(q, k, v, w, beta, scale, attention)

    @property
    def _fox(self) -> FoX:
        return FoX(self.num_heads, self.model_dim)
