r"""Sinusoidal positions of image patches: half of the embedding for each axis.

    x <- x + [PE(c[a]), PE(c[b])],      PE the sinusoidal encoding with D / 2 dimensions

for two axes (a, b) of the coordinates c. Models differ:

             layout          axes      coordinates
    MAE      "concat"        (1, 0)    column and row from 0
    DETR     "interleaved"   (0, 1)    from 1, divided by the size of the image, times 2 pi

In the code of MAE the half named after rows encodes columns, because of the order in which
numpy.meshgrid returns them; its checkpoints depend on that. [CLS] has no position in MAE: prepend
it to the encoded patches. DETR adds the encoding to the queries and keys of every layer, and not to
values; here it is added to the embedding once. Coordinates [B, T] are used for both axes.

Papers: He et al. Masked Autoencoders Are Scalable Vision Learners. 2021.
https://arxiv.org/abs/2111.06377
Carion et al. End-to-End Object Detection with Transformers. 2020.
https://arxiv.org/abs/2005.12872
Reference code: facebookresearch/mae, util/pos_embed.py; huggingface/transformers, models/detr.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from posenc_jax.checks import coordinate_values, integers, one_of, positive, require
from posenc_jax.schemes.additive.sinusoidal import sinusoidal_encoding
from posenc_jax.schemes.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class Sinusoidal2D(Scheme):
    """Sinusoidal positions of two axes (MAE, DETR).

    Attributes:
      model_dim: D, a multiple of 4.
      theta: base of the wavelengths.
      layout: the layout of each half, "concat" or "interleaved", as in `Sinusoidal`.
      axes: coordinate axes of the first and of the second half, (0, 1) or (1, 0).

    Raises:
      ValueError: for a model_dim that is no multiple of 4, an unknown layout, other axes, or a
        theta that is not positive.

    >>> scheme = Sinusoidal2D(model_dim=4)
    >>> coordinates = jnp.array([[[0]], [[1]]])
    >>> scheme.embed({}, jnp.zeros((1, 1, 4)), coordinates).round(4)
    Array([[[0.8415, 0.5403, 0.    , 1.    ]]], dtype=float32)
    """

    model_dim: int
    theta: float = 10000.0
    layout: str = "concat"
    axes: tuple[int, int] = (1, 0)
    name: ClassVar[str] = "sinusoidal_2d"
    traits: ClassVar = Traits(num_axes=2)

    def __post_init__(self):
        integers("sinusoidal_2d", model_dim=self.model_dim)
        require(
            self.model_dim >= 4 and self.model_dim % 4 == 0,
            f"sinusoidal_2d: model_dim must be a multiple of 4, got {self.model_dim}.",
        )
        one_of("sinusoidal_2d", ("concat", "interleaved"), layout=self.layout)
        require(
            tuple(sorted(self.axes)) == (0, 1),
            f"sinusoidal_2d: axes must be (0, 1) or (1, 0), got {self.axes}.",
        )
        positive("sinusoidal_2d", theta=self.theta)

    def embed(self, params, x, coordinates):
        given_shape = jnp.shape(coordinates)
        coordinates = coordinate_values("sinusoidal_2d", coordinates)
        if coordinates.ndim == 2:
            coordinates = jnp.broadcast_to(coordinates[None], (2, *coordinates.shape))
        require(
            coordinates.shape == (2, *x.shape[:2]) and x.shape[2:] == (self.model_dim,),
            f"sinusoidal_2d: x must be [B, T, {self.model_dim}] and coordinates [2, B, T], "
            f"got {x.shape} and {given_shape}.",
        )
        half = self.model_dim // 2
        encodings = [
            sinusoidal_encoding(coordinates[a], half, theta=self.theta, layout=self.layout)
            for a in self.axes
        ]
        return (x.astype(jnp.float32) + jnp.concatenate(encodings, -1)).astype(x.dtype)
