"""The static part of a problem for TPU, and its arrays as the kernels there read them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.engine.mask import MASK_VALUE
from posenc_jax.kernels.kinds import tile_kinds
from posenc_jax.kernels.operands import Operands, Spec
from posenc_jax.kernels.tpu.schedule import schedule, tile_order
from posenc_jax.kernels.tpu.strip import Strip, line_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class TPUSpec(Spec):
    """The static part of a problem.

    Attributes:
      vmem_limit: bytes.
    """

    vmem_limit: int

    def order(self, by_key: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns `tile_order` of the forward or, with `by_key`, of the backward pass."""
        blocks = self.backward if by_key else self.forward
        sides = self.sides if self.by_slot else (-1, -1)
        return tile_order(self.length, self.keys, blocks, sides, by_key)

    def schedules(self, q: Any, k: Any, prefix: jax.Array | None) -> tuple[Any, ...]:
        """Returns the schedules of both passes, and the kinds of tiles for arrays of all pairs."""
        see = self.visibility
        schedules = tuple(
            schedule(see, q, k, prefix, blocks, self.order(by_key), by_key)
            for blocks, by_key in ((self.forward, False), (self.backward, True))
        )
        return *schedules, tile_kinds(see, q, k, prefix, self.forward) if self.pairs else None


def heads_first(x: Operands) -> Operands:
    """Returns the operands with q, k, v of [B, N, T, H]."""
    return dataclasses.replace(x, **{name: heads_before_tokens(getattr(x, name)) for name in "qkv"})


def heads_before_tokens(x: jax.Array) -> jax.Array:
    """[B, T, N, H] to [B, N, T, H], and back."""
    return jnp.swapaxes(x, 1, 2)


def bias_line(spec: TPUSpec, bias: jax.Array, first: int, strip: Strip, sign: int) -> jax.Array:
    """Returns the line of the bias of `Operands`, [N or 1, 1, L]."""
    fill = MASK_VALUE if spec.visibility.mask_in_bias else 0.0
    return line_of(bias[:, None], first, strip, sign, fill)
