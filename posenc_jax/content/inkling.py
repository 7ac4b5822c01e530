r"""Inkling: each query mixes a few learned profiles over the distance.

    logits[n, i, j] = t_i (q_i . k_j / H + r[n, i] . bank[:, i - j])    for 0 <= i - j < extent
    r[i] = x_i W,        t_i = 1 + slope ln(max((i + 1) / floor, 1))

Beyond the extent the bank adds nothing, and no rotation is used beside it. All heads of a
layer share the bank; W gives every head weights of its own, from the same x as q. q and k
are RMS-normalised per head by the model, hence 1 / H. The temperature t, with `floor`, is
that of layers with global attention; without `floor` it is one. Layers with a window have
an extent of that window.

Papers: there is none; the model is from Thinking Machines, and its rule is that of the
query-side tables of Shaw et al. (https://arxiv.org/abs/1803.02155), of low rank.
Reference code: huggingface/transformers, models/inkling/modeling_inkling.py,
InklingRelativeLogits and InklingAttention.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.rules import DotBias
from posenc_jax.scheme import Acts, Scheme, Traits


@dataclasses.dataclass(frozen=True)
class _Profile:
    """The bank's column of a distance."""

    extent: int

    def __call__(self, bank, head, distance):
        at = jnp.clip(distance, 0, self.extent - 1).astype(jnp.int32)
        inside = (distance >= 0) & (distance < self.extent)
        return jnp.where(inside, bank[:, at], 0.0)


@dataclasses.dataclass(frozen=True)
class Inkling(Scheme):
    """Relative logits from a bank of distance profiles (Inkling, 2026).

    Attributes:
      num_heads: N.
      model_dim: D, the size of what q is projected from.
      rank: the number of profiles.
      extent: the number of distances that a profile has.
      floor: the position from which on queries are sharpened; None: none is.
      slope: how much, per factor of e.
      stddev: of the initial numbers.

    Raises:
      ValueError: for sizes below one, or a slope without a floor.

    >>> params = Inkling(num_heads=8, model_dim=512).init(jax.random.key(0))
    >>> params["project"].shape, params["bank"].shape
    ((512, 8, 16), (16, 1024))
    """

    num_heads: int
    model_dim: int
    rank: int = 16
    extent: int = 1024
    floor: int | None = None
    slope: float = 0.1
    stddev: float = 0.02
    name: ClassVar[str] = "inkling"

    def __post_init__(self):
        for name in ("num_heads", "model_dim", "rank", "extent"):
            value = getattr(self, name)
            require(value >= 1, f"inkling: {name} must be >= 1, got {value}.")
        require(
            self.floor is None or self.floor >= 1,
            f"inkling: floor must be None or >= 1, got {self.floor}.",
        )
        for name in ("slope", "stddev"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"inkling: {name} must not be negative, got {value}.")

    @property
    def traits(self):
        return Traits(relative=self.floor is None, reads_x=True)

    @property
    def acts(self):
        """The logits, and q where it is scaled by its position."""
        return Acts.LOGITS | (Acts.QK if self.floor is not None else Acts(0))

    def init(self, key):
        """Returns {"project": float32 [D, N, rank], "bank": float32 [rank, extent]}."""
        project, bank = jax.random.split(key)
        shape = (self.model_dim, self.num_heads, self.rank)
        return {
            "project": self.stddev * jax.random.normal(project, shape, jnp.float32),
            "bank": self.stddev * jax.random.normal(bank, (self.rank, self.extent), jnp.float32),
        }

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns the weights of the profiles, float32 [B, T, N, rank]."""
        require(x is not None, "inkling: it reads x, what q was projected from; got none.")
        require(
            x.shape[-1] == self.model_dim,
            f"inkling: x must be [B, T, {self.model_dim}], got {x.shape}.",
        )
        x = x.astype(jnp.float32)
        q_features = jnp.einsum("btd,dnr->btnr", x, params["project"], precision="highest")
        return q_features * self._temperature(coordinates), None, state

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q, sharpened."""
        return (q.astype(jnp.float32) * self._temperature(coordinates)).astype(q.dtype)

    def rules(self, params, q_features=None, k_features=None):
        """Returns r . bank[:, i - j]."""
        return DotBias(
            _Profile(self.extent),
            shared=params["bank"],
            q_features=q_features,
            bounds=(-1, self.extent),
        )

    def logit_scale(self, head_dim):
        """Returns 1 / H, for q and k that are RMS-normalised."""
        return 1.0 / head_dim

    def _temperature(self, coordinates):
        if self.floor is None:
            return jnp.ones((1, 1, 1, 1), jnp.float32)
        reached = (coordinates.astype(jnp.float32) + 1.0) / self.floor
        return (1.0 + self.slope * jnp.log(jnp.maximum(reached, 1.0)))[:, :, None, None]
