r"""Learnable Fourier features: sines and cosines of learned frequencies, and an MLP over them.

    f = [cos(W c), sin(W c)] / sqrt(F),      x <- x + GELU(f W1 + b1) W2 + b2

for coordinates c of A axes and W of F / 2 rows. At initialisation the inner product of two f decays
with the distance of their points, in all directions alike. W is initialised from a normal of
standard deviation gamma^-2, as in the code; the paper calls this the variance. GELU is the exact
form. The paper can encode groups of axes separately; here all axes are one group.

Coordinates [B, T] are used for all axes. The paper scales coordinates to [0, 1] over the image.

Paper: Li et al. Learnable Fourier Features for Multi-Dimensional Spatial Positional Encoding.
2021. https://arxiv.org/abs/2106.02795
Reference code: willGuimont/learnable_fourier_positional_encoding.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.angles import cos_sin
from posenc_jax.checks import coordinate_values, positive, positive_fields, require
from posenc_jax.ops.init import torch_uniforms
from posenc_jax.schemes.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class LearnableFourier(Scheme):
    """Learnable Fourier features (Li et al. 2021).

    Attributes:
      model_dim: the model dim, D.
      axes: number A of coordinate axes.
      num_features: F, even.
      width: number of hidden units.
      gamma: the initial standard deviation of W is gamma^-2.

    Raises:
      ValueError: for sizes below one, an odd `num_features`, or a gamma that is not positive.

    >>> params = LearnableFourier(model_dim=8).init(jax.random.key(0))
    >>> params["waves"].shape
    (384, 2)
    """

    model_dim: int
    axes: int = 2
    num_features: int = 768
    width: int = 32
    gamma: float = 10.0
    name: ClassVar[str] = "fourier"
    param_axes: ClassVar = {"out": "width model_dim", "out_bias": "model_dim"}

    def __post_init__(self):
        positive_fields(self, "model_dim", "axes", "num_features", "width")
        require(
            self.num_features % 2 == 0,
            f"fourier: num_features must be even, got {self.num_features}.",
        )
        positive("fourier", gamma=self.gamma)

    @property
    def traits(self):
        return Traits(num_axes=self.axes)

    def init(self, key):
        """Returns {"waves": W [F / 2, A]} and the MLP, initialised as torch.nn.Linear."""
        waves, *keys = jax.random.split(key, 5)
        network = {
            "in": ((self.num_features, self.width), self.num_features),
            "in_bias": ((self.width,), self.num_features),
            "out": ((self.width, self.model_dim), self.width),
            "out_bias": ((self.model_dim,), self.width),
        }
        normal = jax.random.normal(waves, (self.num_features // 2, self.axes), jnp.float32)
        return {"waves": self.gamma**-2 * normal, **torch_uniforms(keys, network)}

    def embed(self, params, x, coordinates):
        given_shape = jnp.shape(coordinates)
        coordinates = coordinate_values("fourier", coordinates)
        if coordinates.ndim == 2:
            coordinates = jnp.broadcast_to(coordinates[None], (self.axes, *coordinates.shape))
        require(
            coordinates.shape == (self.axes, *x.shape[:2]) and x.shape[2:] == (self.model_dim,),
            f"fourier: x must be [B, T, {self.model_dim}] and coordinates [{self.axes}, B, T], "
            f"got {x.shape} and {given_shape}.",
        )
        cos, sin = cos_sin(coordinates[0], params["waves"][:, 0])
        for a in range(1, self.axes):  # cos and sin of a sum of angles, each of them exact.
            c, s = cos_sin(coordinates[a], params["waves"][:, a])
            cos, sin = cos * c - sin * s, sin * c + cos * s
        features = jnp.concatenate([cos, sin], -1) * self.num_features**-0.5
        hidden = (
            jnp.dot(features, params["in"], precision="highest") + params["in_bias"][None, None]
        )
        hidden = jax.nn.gelu(hidden, approximate=False)
        encoding = jnp.dot(hidden, params["out"], precision="highest")
        encoding = encoding + params["out_bias"][None, None]
        return (x.astype(jnp.float32) + encoding).astype(x.dtype)
