r"""Transformer-XL: projected sinusoidal encodings of the distance as a second set of keys.

    logits[i, j] = ((q_i + u) . k_j + (q_i + v) . W r(i - j)) / sqrt(H)
    r(d) = [sin(d w), cos(d w)],        w_m = 10000^(-2 m / D)

The learned vectors u and v of each head are content and position biases that do not depend on the
query. W is [N, D, H], as large as the projection of the keys. Distances are clipped at `clamp`; the
authors clamp for long memories in evaluation.

For tokens that are not in order, angle addition gives sin((i - j) w) from the angles i w and j w:
W^T (q_i + v), rotated by the angles of i, is multiplied with the encoding of j. XLNet has the same
two terms for distances of both signs; its term for pairs of segments is omitted.

Paper: Dai et al. Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context.
2019. https://arxiv.org/abs/1901.02860
Reference code: kimiyoung/transformer-xl, pytorch/mem_transformer.py,
RelPartialLearnableMultiHeadAttn.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import integers_from, positive_fields, query_heads, require
from posenc_jax.engine.rules import DotBias
from posenc_jax.ops.init import normals
from posenc_jax.schemes.scheme import Scheme, Traits


def _frequencies(model_dim: int) -> np.ndarray:
    return 10000.0 ** (-np.arange(0, model_dim, 2) / model_dim)


@dataclasses.dataclass(frozen=True)
class _ProjectedEncoding:
    """The projected encoding of a distance, W r."""

    model_dim: int
    clamp: int | None

    def __call__(self, shared, project, distance):
        if self.clamp is not None:
            distance = jnp.clip(distance, -self.clamp, self.clamp)
        cos, sin = cos_sin(distance, _frequencies(self.model_dim))
        return jnp.dot(jnp.concatenate([sin, cos]), project, precision="highest")


@dataclasses.dataclass(frozen=True)
class _ByAngleAddition:
    """q_feature . W r(q - k) of one pair, from the encodings of q and k."""

    model_dim: int

    def __call__(self, shared, project, q_feature, k_feature, q, k):
        weights = jnp.dot(project, q_feature.astype(jnp.float32), precision="highest")
        of_sin, of_cos = jnp.split(weights, 2)
        frequencies = _frequencies(self.model_dim)
        (cos_q, sin_q), (cos_k, sin_k) = (cos_sin(x, frequencies) for x in (q, k))
        rotated = jnp.concatenate(
            [of_sin * sin_q + of_cos * cos_q, of_cos * sin_q - of_sin * cos_q]
        )
        return jnp.dot(rotated, jnp.concatenate([cos_k, sin_k]), precision="highest")


@dataclasses.dataclass(frozen=True)
class TransformerXL(Scheme):
    """Relative positional attention of Transformer-XL (Dai et al. 2019).

    Attributes:
      num_heads: the number of query heads, N.
      head_dim: the head dim, H.
      model_dim: D, the size of the encodings; even.
      clamp: largest distance, to which larger ones are clipped; None: no clipping.
      stddev: standard deviation of the initial parameters.

    Raises:
      ValueError: for sizes below one, an odd model_dim, or a negative clamp.

    >>> params = TransformerXL(num_heads=8, head_dim=64, model_dim=512).init(jax.random.key(0))
    >>> params["u"].shape, params["project"].shape
    ((8, 64), (8, 512, 64))
    """

    num_heads: int
    head_dim: int
    model_dim: int
    clamp: int | None = None
    stddev: float = 0.02
    name: ClassVar[str] = "transformer_xl"
    traits: ClassVar = Traits(relative=True)

    def __post_init__(self):
        positive_fields(self, "num_heads", "head_dim", "model_dim")
        require(
            self.model_dim % 2 == 0,
            f"transformer_xl: model_dim must be even, got {self.model_dim}.",
        )
        integers_from(0, "transformer_xl", clamp=self.clamp or 0)

    @property
    def param_axes(self):
        vector = "num_heads head_dim"
        return {"u": vector, "v": vector, "project": "num_heads model_dim head_dim"}

    def init(self, key):
        """Returns {"u", "v": float32 [N, H], "project": float32 [N, D, H]}."""
        heads, dim = self.num_heads, self.head_dim
        shapes = {"u": (heads, dim), "v": (heads, dim), "project": (heads, self.model_dim, dim)}
        return normals(jax.random.split(key, 3), self.stddev, shapes)

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns q + v, float32 [B, T, N, H]."""
        query_heads("transformer_xl", q, self.num_heads, self.head_dim)
        return q.astype(jnp.float32) + params["v"][None, None], None, state

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q + u."""
        return (q.astype(jnp.float32) + params["u"][None, None]).astype(q.dtype)

    def rules(self, params, q_features=None, k_features=None):
        clamp = self.clamp
        return DotBias(
            _ProjectedEncoding(self.model_dim, clamp),
            heads=params["project"],
            q_features=q_features,
            bounds=(None, None) if clamp is None else (-clamp, clamp),
            scaled=True,
            pair=_ByAngleAddition(self.model_dim) if clamp is None else None,
        )
