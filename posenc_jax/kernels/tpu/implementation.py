"""`implementation="pallas"` on TPU."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.problem import LogSumExp, Problem
from posenc_jax.kernels.base import Kernels, padded, rule_refusal, without_hidden
from posenc_jax.kernels.tpu.backward import backward, backward_refusal
from posenc_jax.kernels.tpu.chip import chip_refusal, default_vmem_limit
from posenc_jax.kernels.tpu.forward import forward, forward_refusal
from posenc_jax.kernels.tpu.spec import TPUSpec
from posenc_jax.kernels.tpu.tile import LANES

_DTYPES = (jnp.bfloat16, jnp.float32)


@dataclasses.dataclass(frozen=True)
class PallasTPU(Kernels):
    """Flash attention kernels for TPU v5e, v5p, v6e and 7x, with any bias by distance.

    Attributes:
      forward, backward: queries and keys per tile, multiples of 128. Default: 1024 x 1024,
        512 x 512 in float32, and smaller tiles where these take less time.
      forward_only: serve problems whose backward pass needs more memory than there is; all
        derivatives raise.
      interpret, cross_compile, batch_axes, head_axes: see `ShardMapped`; parameters of the
        interpreter are `jax.experimental.pallas.tpu.InterpretParams`.
    """

    forward: Blocks | None = None
    backward: Blocks | None = None
    forward_only: bool = False
    platform = "tpu"
    mask_by_distance = True  # Then a mask takes one operation per pair.

    def __post_init__(self):
        for name in ("forward", "backward"):
            blocks = getattr(self, name)
            require(
                blocks is None or (blocks.q % LANES == 0 and blocks.k % LANES == 0),
                f"PallasTPU: {name} must have multiples of {LANES} queries and keys, got {blocks}.",
            )

    def platform_refusal(self) -> str | None:
        return None if self.interpret else chip_refusal()

    def device_refusal(self, problem: Problem) -> str | None:
        p = problem
        if p.q.dtype not in _DTYPES or not p.q.dtype == p.k.dtype == p.v.dtype:
            return "q, k and v must all be bfloat16 or all float32"
        if any(x.pairs is not None and x.pairs.dtype not in _DTYPES for x in p.rules):
            return "an array of all pairs must be bfloat16 or float32"
        if (reason := self.platform_refusal()) is not None:
            return reason
        return rule_refusal(p, lambda counts: None) or _refusal_from_shapes(self._memory_refusal, p)

    def _memory_refusal(self, p: Problem) -> str | None:
        """Returns why a pass needs more memory than there is, or None."""
        spec, operands, _ = self.prepared(without_hidden(p))
        reason = forward_refusal(spec, operands)
        return reason if reason or self.forward_only else backward_refusal(spec, operands)

    def on_device(self, problem: Problem) -> tuple[jax.Array, LogSumExp]:
        return self.run(without_hidden(problem))

    def make_spec(self, problem: Problem, **fields: Any) -> TPUSpec:
        p = problem
        blocks = Blocks(tile_size(p.length, p.q.dtype), tile_size(p.keys, p.q.dtype))
        ahead, back = self.forward or blocks, self.backward or blocks
        return TPUSpec(
            **fields,
            length=padded(p.length, ahead.q, back.q),
            keys=padded(p.keys, ahead.k, back.k),
            forward=ahead,
            backward=back,
            interpret=self.interpret,
            vmem_limit=default_vmem_limit(),
        )

    def run_forward(self, spec, x):
        return forward(spec, x)

    def run_backward(self, spec, x, d_out, lse, delta):
        if self.forward_only:
            raise NotImplementedError("PallasTPU(forward_only=True) has no derivatives.")
        return backward(spec, x, d_out, lse, delta)


def _refusal_from_shapes(question: Callable[[Problem], str | None], p: Problem) -> str | None:
    """Returns the answer to a question about the types of the arrays; nothing is computed."""
    answers = []
    jax.eval_shape(lambda p: answers.append(question(p)), p)
    return answers[0]


def tile_size(count: int, dtype: Any) -> int:
    """Returns the size of tiles that takes the least time for `count` queries and `count` keys.

    By the compiler's schedule, a step of the grid takes as long as 2**16 pairs of a large tile.
    Exact products of float32 have too much code for tiles of 1024.
    """
    sizes = (512, 256, 128) if dtype == jnp.float32 else (1024, 512, 256, 128)
    return min(sizes, key=lambda size: (-(-count // size)) ** 2 * (size * size + 2**16))
