r"""Transformer-XL: sinusoidal encodings of the distance, projected as keys are.

    logits[i, j] = ((q_i + u) . k_j + (q_i + v) . W r(i - j)) / sqrt(H)
    r(d) = [sin(d w), cos(d w)],        w_m = 10000^(-2 m / D)

The vectors u and v of every head stand for queries of their own: what is asked of any
content, and of any distance. W is [D, N, H], as large as the projection of keys. With
`clamp`, distances beyond are one; the authors clamp at long memories in evaluation.

r is known at all distances, so that where tokens do not stand in order, angle addition
gives sin((i - j) w) from i w and j w: a query's part, rotated, dot the encoding of j.
XLNet has the same two terms for distances of both signs; its term for pairs of segments
is not here.

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
from posenc_jax.checks import require
from posenc_jax.rules import DotBias
from posenc_jax.scheme import Scheme, Traits


def _frequencies(model_dim: int) -> np.ndarray:
    return 10000.0 ** (-np.arange(0, model_dim, 2) / model_dim)


@dataclasses.dataclass(frozen=True)
class _Projected:
    """The projected encoding of a distance, W r."""

    model_dim: int
    clamp: int | None

    def __call__(self, shared, project, distance):
        if self.clamp is not None:
            distance = jnp.clip(distance, -self.clamp, self.clamp)
        cos, sin = cos_sin(distance, _frequencies(self.model_dim))
        return jnp.dot(jnp.concatenate([sin, cos]), project, precision="highest")


@dataclasses.dataclass(frozen=True)
class _Rotated:
    """(W^T row) . r(q - k), by angle addition."""

    model_dim: int

    def __call__(self, shared, project, row, col, q, k):
        weights = jnp.dot(project, row.astype(jnp.float32), precision="highest")
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
      num_heads: N.
      head_dim: H.
      model_dim: D, the size of the encodings; even.
      clamp: the distance from which on all distances are one; None: no such distance.
      stddev: of the initial numbers.

    Raises:
      ValueError: for sizes below one, an odd model_dim, or a negative clamp or stddev.

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

    def __post_init__(self):
        for name in ("num_heads", "head_dim", "model_dim"):
            value = getattr(self, name)
            require(value >= 1, f"transformer_xl: {name} must be >= 1, got {value}.")
        require(
            self.model_dim % 2 == 0,
            f"transformer_xl: model_dim must be even, got {self.model_dim}.",
        )
        for name in ("clamp", "stddev"):
            value = getattr(self, name)
            require(
                value is None or value >= 0,
                f"transformer_xl: {name} must not be negative, got {value}.",
            )

    @property
    def traits(self):
        return Traits(relative=True)

    def init(self, key):
        """Returns {"u", "v": float32 [N, H], "project": float32 [N, D, H]}."""
        heads, dim = self.num_heads, self.head_dim
        shapes = {"u": (heads, dim), "v": (heads, dim), "project": (heads, self.model_dim, dim)}
        keys = jax.random.split(key, len(shapes))
        return {
            name: self.stddev * jax.random.normal(k, shape, jnp.float32)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns q + v, which meets the distances."""
        require(
            q.shape[2:] == (self.num_heads, self.head_dim),
            f"transformer_xl: q must be [B, T, {self.num_heads}, {self.head_dim}], got {q.shape}.",
        )
        return q.astype(jnp.float32) + params["v"][None, None], None, state

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q + u, which meets the keys."""
        return (q.astype(jnp.float32) + params["u"][None, None]).astype(q.dtype)

    def rules(self, params, q_features=None, k_features=None):
        """Returns (q_i + v) . W r(i - j)."""
        clamp = self.clamp
        return DotBias(
            _Projected(self.model_dim, clamp),
            heads=params["project"],
            q_features=q_features,
            bounds=(None, None) if clamp is None else (-clamp, clamp),
            scaled=True,
            pair=_Rotated(self.model_dim) if clamp is None else None,
        )
