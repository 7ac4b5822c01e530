"""Attention by the flash attention for TPUs that comes with JAX, "splash attention".

It takes no rules; rotary schemes need none. Its source is
`jax.experimental.pallas.ops.tpu.splash_attention`. Differences there: a query that sees no key gets
the mean of the values, the log-sum-exp has no gradient, and masks are computed while tracing.
"""

import dataclasses

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.engine.mesh import ShardMapped, mesh_of, mesh_refusal
from posenc_jax.engine.problem import Problem, feature_refusal


@dataclasses.dataclass(frozen=True)
class Splash(ShardMapped):
    """JAX's splash attention for TPU v4, v5e, v5p, v6e and 7x, without rules.

    It has first derivatives in reverse mode. Parts of the cotangent of q are rounded to its dtype
    before their sum, for each of up to 8 blocks of keys; longer sequences have a kernel that sums
    in float32.

    Attributes:
      block: queries and keys per tile, a multiple of 128. Default: 1024, half of that in float32,
        for head dims beyond 128 and on v4, and less where that takes less time.
      interpret, cross_compile, batch_axes, head_axes: see `ShardMapped`; `interpret` is a bool.
    """

    block: int | None = None
    name = "splash"
    platform = "tpu"
    check_vma = False  # Its results do not say over which axes they vary.

    def __post_init__(self):
        require(
            self.block is None or (self.block > 0 and self.block % 128 == 0),
            f"Splash: block must be a multiple of 128 queries and keys, got {self.block}.",
        )

    def refusal(self, problem: Problem) -> str | None:
        p = problem
        reason = feature_refusal(
            {
                "rules": p.rules,
                "dropout": p.dropout_seeds is not None,
                "prefix_length": p.prefix_length is not None,
                "k_visible_until and sink tokens of windows": p.k_visible_until is not None,
                "block_mask": p.block_mask is not None,
                "mask": p.mask is not None,
                "sinks per query": p.sinks is not None and not p.same_sinks,
                "positions of its own": (p.is_causal or p.window is not None) and not p.contiguous,
                "log-sum-exp with a gradient": p.needs_lse,
            }
        )
        return reason or super().refusal(p) or mesh_refusal(p, mesh_of(p), *self.axes(p))

    def device_refusal(self, problem: Problem) -> str | None:
        p = problem
        if p.q.dtype not in (jnp.bfloat16, jnp.float32) or not p.q.dtype == p.k.dtype == p.v.dtype:
            return "q, k and v must all be bfloat16 or all float32"
        if max(p.q.shape[3], p.v.shape[3]) > 256:
            return 'head dims beyond 256 need implementation="xla"'
        if self.interpret:
            return None
        from posenc_jax.kernels.tpu.chip import chip_refusal

        return chip_refusal("TPU v4")

    def on_device(self, problem: Problem) -> tuple[jax.Array, jax.Array]:
        # Imported here: Pallas takes half of the time that this package adds to `import jax`.
        from posenc_jax.kernels.tpu.splash import attend

        out = attend(problem, self.block, bool(self.interpret))
        return out, jnp.full(out.shape[:3], jnp.nan)
