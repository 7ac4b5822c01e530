r"""Inkling: a bias that each query mixes from a few learned functions of the distance.

    logits[n, i, j] = t_i (q_i . k_j / H + r[n, i] . bank[:, i - j])    for 0 <= i - j < extent
    r[i] = x_i W,        t_i = 1 + slope ln(max((i + 1) / log_scaling_start, 1))

The bias is zero at other distances, and the model has no rotation. All heads of a layer share
the bank; W, which projects the same x as q, is different for each head. The model
RMS-normalises q and k per head, hence 1 / H, the `scale` of its layers. Layers with global
attention have the log scaling t; without `log_scaling_start`, t is 1. In layers with a window, the
extent is the window.

The model also convolves k and v over 4 tokens, before k is normalised, and the outputs of
attention and MLP: `posenc_jax.short_convolution`, added to its input.

Inkling-2 clips q, k and r where Inkling normalises q and k, so that the factor is 1 / sqrt(H).
`QKNorm("clip")` clips q after a learned scale, and k without one; `clip` here clips r after a
learned scale. Sinks are projected from x, [B, T, N]. The sum of a convolution over W tokens and its
input is divided by sqrt(W + 1). Layers with global attention have dynamic convolutions, divided by
sqrt(2 W + 1): the kernel is the sum of a learned one, [W, K, H], and one that is projected from the
token, [B, T, W, K, 1].

Paper: none; the models are from Thinking Machines. The bias is a low-rank form of the query-side
tables of Shaw et al. (https://arxiv.org/abs/1803.02155).
Reference code: huggingface/transformers, models/inkling/modeling_inkling.py,
InklingRelativeLogits and InklingAttention; models/inkling2/modeling_inkling2.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import activations, not_negative, positive, positive_fields, require
from posenc_jax.engine.rules import DotBias
from posenc_jax.ops.init import normals
from posenc_jax.ops.take import take_row
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.scheme import Acts, Scheme, Traits


@dataclasses.dataclass(frozen=True)
class _BankColumn:
    """The column of the bank for a distance; zeros outside its extent."""

    extent: int

    def __call__(self, bank, head, distance):
        column = jnp.clip(distance, 0, self.extent - 1).astype(jnp.int32)
        inside = (distance >= 0) & (distance < self.extent)
        return jnp.where(inside, take_row(bank.T, column), 0.0)


@dataclasses.dataclass(frozen=True)
class Inkling(Scheme):
    """Relative logits from a bank of learned functions of the distance (Inkling, 2026).

    Checkpoints without `clip` need a layer with scale=1 / head_dim and `QKNorm()`.

    Attributes:
      num_heads: the number of query heads, N.
      model_dim: D, the size of x.
      rank: number of functions in the bank.
      extent: number of distances that the bank covers.
      log_scaling_start: number of tokens from which on logits are scaled by t > 1; None for
        no log scaling.
      slope: increase of t when the position grows by a factor of e.
      clip: the largest norm of the weights r of a head, after a learned scale (Inkling-2). None:
        no scale and no clip.
      stddev: standard deviation of the initial parameters.

    Raises:
      ValueError: for sizes below one, a slope that is negative or without log scaling, or a clip
        that is not positive.

    >>> params = Inkling(num_heads=8, model_dim=512).init(jax.random.key(0))
    >>> params["project"].shape, params["bank"].shape
    ((512, 8, 16), (16, 1024))
    """

    num_heads: int
    model_dim: int
    rank: int = 16
    extent: int = 1024
    log_scaling_start: int | None = None
    slope: float = 0.1
    stddev: float = 0.02
    clip: float | None = None
    name: ClassVar[str] = "inkling"
    param_axes: ClassVar = {"project": "model_dim num_heads rank", "scale": "num_heads rank"}

    def __post_init__(self):
        positive_fields(self, "num_heads", "model_dim", "rank", "extent")
        start = self.log_scaling_start
        require(
            start is None or start >= 1,
            f"inkling: log_scaling_start must be None or >= 1, got {start}.",
        )
        not_negative("inkling", slope=self.slope)
        require(
            start is not None or self.slope == Inkling.slope,
            f"inkling: slope is of log scaling, which needs log_scaling_start, got {self.slope}.",
        )
        if self.clip is not None:
            positive("inkling", clip=self.clip)

    @property
    def traits(self):
        return Traits(
            relative=self.log_scaling_start is None,
            reads_x=True,
            norm_after=self.log_scaling_start is None,
            causal_only="keys after the query have a bias of 0, all alike",
        )

    @property
    def acts(self):
        """The logits, and q with log scaling."""
        return Acts.LOGITS if self.log_scaling_start is None else Acts.LOGITS | Acts.QK

    def init(self, key):
        """Returns {"project": [D, N, rank], "bank": [rank, extent]}, float32.

        With `clip` there is also "scale", [N, rank].
        """
        project = self.model_dim, self.num_heads, self.rank
        shapes = {"project": project, "bank": (self.rank, self.extent)}
        params = normals(jax.random.split(key), self.stddev, shapes)
        return params | ({} if self.clip is None else _clip(self).init(self.num_heads, self.rank))

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns t r, the weights of the bank, float32 [B, T, N, rank]."""
        x = activations("inkling", x, self.model_dim, "weights")
        q_features = jnp.einsum("btd,dnr->btnr", x, params["project"], precision="highest")
        if self.clip is not None:
            q_features = _clip(self)(params, q_features)
        return q_features * self._log_scaling(coordinates), None, state

    def query(self, params, q, coordinates, features=None, tables=None):
        return (q.astype(jnp.float32) * self._log_scaling(coordinates)).astype(q.dtype)

    def rules(self, params, q_features=None, k_features=None):
        return DotBias(
            _BankColumn(self.extent),
            shared=params["bank"].astype(jnp.float32),
            q_features=q_features,
            bounds=(-1, self.extent),
        )

    def _log_scaling(self, coordinates):
        """Returns t, float32 [B or 1, T or 1, 1, 1]."""
        if self.log_scaling_start is None:
            return jnp.ones((1, 1, 1, 1), jnp.float32)
        ratio = (coordinates.astype(jnp.float32) + 1.0) / self.log_scaling_start
        return (1.0 + self.slope * jnp.log(jnp.maximum(ratio, 1.0)))[:, :, None, None]


def _clip(scheme: Inkling) -> QKNorm:
    """Returns the clip of the weights of the bank, with a scale per head."""
    return QKNorm("clip", scale="per_head", threshold=scheme.clip)
