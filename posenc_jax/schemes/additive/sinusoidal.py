r"""Sinusoidal positions: sines and cosines of geometric wavelengths, added to the embedding.

    PE[p, 2i]     = sin(p / theta^(2i / D))
    PE[p, 2i + 1] = cos(p / theta^(2i / D)),      i = 0 .. D/2 - 1,  theta = 10000

i numbers the *pair*, not the dimension: both members of a pair share one frequency. Then
PE(p + k) is the rotation of PE(p) by the angles k / theta^(2i/D), and |PE|^2 = D / 2. At
p = 2, D = 4 this is [0.9093, -0.4161, 0.0200, 0.9998]. A widely copied worked example prints
[0.909, 0.9998, 0.0002, 1.0]: it uses the dimension in place of the pair index, which gives
D frequencies and loses both properties.

Three layouts are in use; they agree only at D = 2:

    "interleaved"  as above: sin and cos alternate (the paper, OpenNMT)
    "concat"       the same frequencies, all sines, then all cosines (Transformer-XL)
    "t2t"          all sines, then all cosines, at theta^(-i / (D/2 - 1)): the last
                   wavelength is exactly 2 pi theta; odd D ends with a zero
                   (tensor2tensor, fairseq, Whisper)

The authors multiply token embeddings by sqrt(D) before the sum. The encoding is defined at every
position, but a model need not extrapolate beyond the positions of its training.

Paper: Vaswani et al. Attention Is All You Need. 2017. https://arxiv.org/abs/1706.03762
Reference code: tensorflow/tensor2tensor, layers/common_attention.py, get_timing_signal_1d;
kimiyoung/transformer-xl, pytorch/mem_transformer.py, PositionalEmbedding.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import coordinate_values, integers, one_of, positive, require
from posenc_jax.schemes.scheme import Scheme, Traits


def sinusoidal_encoding(
    positions: jax.Array,
    dim: int,
    *,
    theta: float = 10000.0,
    layout: str = "interleaved",
) -> jax.Array:
    """Returns sinusoidal encodings, float32 [..., dim], exact at any int32 position.

    Args:
      positions: integers or float32 [...].
      dim: D; even, except in the layout "t2t".
      theta: base of the wavelengths.
      layout: "interleaved", "concat" or "t2t"; see the formulas.

    Raises:
      TypeError: for positions of another type.
      ValueError: for an odd or non-positive `dim`, a `theta` that is not positive, or an
        unknown layout.

    >>> np.asarray(sinusoidal_encoding(jnp.array([2]), 4)[0]).round(4)
    array([ 0.9093, -0.4161,  0.02  ,  0.9998], dtype=float32)
    """
    _check(dim, theta, layout)
    positions = coordinate_values("sinusoidal", positions, "positions")
    pairs = dim // 2
    last = max(pairs - 1, 1) if layout == "t2t" else dim / 2
    cos, sin = cos_sin(positions, float(theta) ** (-np.arange(pairs) / last))
    if layout == "interleaved":
        return jnp.stack([sin, cos], -1).reshape(*positions.shape, dim)
    out = jnp.concatenate([sin, cos], -1)
    return jnp.pad(out, [(0, 0)] * positions.ndim + [(0, dim % 2)])


def _check(dim: int, theta: float, layout: str) -> None:
    one_of("sinusoidal", ("interleaved", "concat", "t2t"), layout=layout)
    integers("sinusoidal", model_dim=dim)
    require(dim >= 2, f"sinusoidal: model_dim must be at least 2, got {dim}.")
    require(
        dim % 2 == 0 or layout == "t2t",
        f"sinusoidal: model_dim must be even for layout {layout!r}, got {dim}.",
    )
    positive("sinusoidal", theta=theta)


@dataclasses.dataclass(frozen=True)
class Sinusoidal(Scheme):
    """Sinusoidal absolute positions (Vaswani et al. 2017).

    Attributes:
      model_dim: the model dim, D.
      theta: base of the wavelengths.
      layout: "interleaved", "concat" or "t2t"; see the formulas.

    Raises:
      ValueError: as `sinusoidal_encoding`.

    >>> Sinusoidal(model_dim=2).embed({}, jnp.zeros((1, 1, 2)), jnp.array([[0]]))
    Array([[[0., 1.]]], dtype=float32)
    """

    model_dim: int
    theta: float = 10000.0
    layout: str = "interleaved"
    name: ClassVar[str] = "sinusoidal"
    traits: ClassVar = Traits(scale_embedding=True)

    def __post_init__(self):
        _check(self.model_dim, self.theta, self.layout)

    def embed(self, params, x, coordinates):
        encoding = sinusoidal_encoding(
            coordinates, self.model_dim, theta=self.theta, layout=self.layout
        )
        require(
            x.shape[-1] == self.model_dim and x.ndim == encoding.ndim,
            f"sinusoidal: x must be [B, T, {self.model_dim}] and coordinates [B, T], "
            f"got {x.shape} and {jnp.shape(coordinates)}.",
        )
        return (x.astype(jnp.float32) + encoding).astype(x.dtype)
