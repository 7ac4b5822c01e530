r"""Normalisation of queries and keys after their projection, before or after their rotation.

    rms     y = x / sqrt(mean(x^2) + epsilon) * (scale + scale_offset)
    layer   y = (x - mean(x)) / sqrt(var(x) + epsilon) * (scale + scale_offset) + bias
    clip    y = z min(1, threshold / (|z| + epsilon)),   z = x * (scale + scale_offset)

Means and the norm |z| are over one head (Qwen3, Gemma 3; Inkling-2 clips), or over all heads of a
token (OLMo 2).

Papers: Henry et al. Query-Key Normalization for Transformers. 2020.
https://arxiv.org/abs/2010.04245
Dehghani et al. Scaling Vision Transformers to 22 Billion Parameters. 2023.
https://arxiv.org/abs/2302.05442
Reference code: huggingface/transformers 5.24, modeling_*.py of the model types in
`posenc_jax/hf/model_types.py`.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from posenc_jax.checks import (
    array_of_rank,
    finite,
    floating,
    not_negative,
    one_of,
    positive,
    require,
)


@dataclasses.dataclass(frozen=True)
class QKNorm:
    """QK-norm: how an attention layer normalises its queries and its keys.

    Attributes:
      kind: "rms"; "layer", with the mean subtracted; or "clip", which shortens vectors that are
        longer than the threshold.
      over: extent of the mean: "head", H numbers, or "projection", the N H numbers of a token.
      scale: the shape of the learned scale: "shared" by heads, [H]; "per_head", [N, H]; "none".
      scale_offset: a number added to the scale; 1 where weights store the scale minus 1 (Gemma).
      use_bias: whether there is a learned bias, shaped like the scale.
      epsilon: a number added to the mean square, or to the norm of a vector.
      after_rotation: whether it follows the position encoding of q and k (HunYuan) instead of
        preceding it. Schemes that scale q or k, or replace attention, refuse it.
      threshold: the largest norm of a vector, for "clip".

    Raises:
      ValueError: for unknown words, a negative epsilon, a bias or an offset without a scale, a bias
        of a clip, one scale shared by the heads of a projection, and a threshold that is not
        positive, is missing for a clip or is given for another kind.

    >>> norm = QKNorm(epsilon=0.0)
    >>> norm(norm.init(num_heads=1, head_dim=2), jnp.array([[[[1.0, 7.0]]]]))
    Array([[[[0.2, 1.4]]]], dtype=float32)
    """

    kind: Literal["rms", "layer", "clip"] = "rms"
    over: Literal["head", "projection"] = "head"
    scale: Literal["shared", "per_head", "none"] = "shared"
    scale_offset: float = 0.0
    use_bias: bool = False
    epsilon: float = 1e-6
    after_rotation: bool = False
    threshold: float | None = None

    def __post_init__(self):
        one_of("QKNorm", ("rms", "layer", "clip"), kind=self.kind)
        one_of("QKNorm", ("head", "projection"), over=self.over)
        one_of("QKNorm", ("shared", "per_head", "none"), scale=self.scale)
        finite("QKNorm", scale_offset=self.scale_offset)
        not_negative("QKNorm", epsilon=self.epsilon)
        require(
            self.scale != "none" or not (self.use_bias or self.scale_offset),
            "QKNorm: use_bias and scale_offset need a scale, got scale='none'.",
        )
        require(
            (self.kind == "clip") == (self.threshold is not None),
            f"QKNorm: kind='clip' alone has a threshold, got kind={self.kind!r} and "
            f"threshold={self.threshold}.",
        )
        if self.threshold is not None:
            positive("QKNorm", threshold=self.threshold)
            require(not self.use_bias, "QKNorm: kind='clip' has no bias, got use_bias=True.")
        require(
            self.over == "head" or self.scale != "shared",
            "QKNorm: over='projection' has one scale per head, scale='per_head', or 'none', got "
            "'shared'.",
        )

    def init(self, num_heads: int, head_dim: int) -> dict[str, jax.Array]:
        """Returns {"scale", "bias"}, float32 [H] or [N, H], as far as they are learned.

        Args:
          num_heads: N of queries, K of keys.
          head_dim: the head dim, H.
        """
        if self.scale == "none":
            return {}
        shape = (head_dim,) if self.scale == "shared" else (num_heads, head_dim)
        params = {"scale": jnp.full(shape, 1.0 - self.scale_offset, jnp.float32)}
        return params | ({"bias": jnp.zeros(shape, jnp.float32)} if self.use_bias else {})

    def __call__(self, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        """Returns x [B, T, N, H] normalised, in its dtype; the arithmetic is float32.

        Raises:
          ValueError: if x is not of rank 4, or params have other shapes than `init` returns.
          TypeError: if x is not floating.
        """
        floating("QKNorm", "x", x)
        array_of_rank("QKNorm", "x", x, 4, "[B, T, N, H]")
        types = jax.eval_shape(lambda: self.init(*x.shape[-2:]))
        of_norm = {name: params[name] for name in types if name in params}
        expected, shapes = (jax.tree.map(jnp.shape, tree) for tree in (types, of_norm))
        require(shapes == expected, f"QKNorm: params must be {expected}, got {shapes}.")
        axes = -1 if self.over == "head" else (-2, -1)
        y = x.astype(jnp.float32)
        # Squares of large numbers overflow, and cubes of their inverses, in gradients, underflow.
        # Powers of two change no digit.
        _, exponent = jnp.frexp(jnp.abs(jax.lax.stop_gradient(y)).max(axes, keepdims=True))
        factor = jnp.ldexp(
            jnp.float32(1.0), -jnp.where(exponent > 20, jnp.minimum(exponent, 120), 0)
        )
        y, epsilon = y * factor, self.epsilon * factor
        if self.kind == "layer":
            y = y - y.mean(axes, keepdims=True)
        if self.kind != "clip":
            y = y * jax.lax.rsqrt(jnp.square(y).mean(axes, keepdims=True) + epsilon * factor)
        if self.scale != "none":
            y = y * (_of_heads(params["scale"]) + self.scale_offset)
        if self.use_bias:
            y = y + _of_heads(params["bias"])
        if self.threshold is not None:
            squares = jnp.square(y).sum(axes, keepdims=True)
            # A vector of zeros has no gradient, where the root's would be infinite.
            norm = jnp.sqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))
            y = y * jnp.minimum(self.threshold / (norm + epsilon), 1.0 / factor)
        return y.astype(x.dtype)


def _of_heads(x: jax.Array) -> jax.Array:
    """Returns [1, 1, 1 or N, H] for [H] or [N, H]."""
    return x.astype(jnp.float32).reshape(1, 1, -1, x.shape[-1])
