"""Attention by `jax.nn.dot_product_attention`, for the calls that it computes exactly.

It takes no rules; rotary schemes need none. It rounds the log-sum-exp to the dtype of the keys and
gives it no gradient, so calls that return a log-sum-exp are refused.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.engine.problem import Implementation, Problem, lacking


@dataclasses.dataclass(frozen=True)
class JaxNN(Implementation):
    """`jax.nn.dot_product_attention`, with its own choice of kernel."""

    name = "jax"
    kernel: ClassVar[str | None] = None

    def supports(self, problem: Problem) -> str | None:
        p = problem
        return lacking(
            {
                "rules": p.rules,
                "softcap": p.softcap is not None,
                "sinks": p.sinks is not None,
                "dropout": p.dropout_seeds is not None,
                "segments": p.q_segment_ids is not None,
                "prefix_length": p.prefix_length is not None,
                "positions of its own": (p.is_causal or p.window is not None) and not p.contiguous,
                "values of another head dim than keys": p.q.shape[3] != p.v.shape[3],
                "exact log-sum-exp": p.needs_lse,
            }
        )

    def __call__(self, problem: Problem) -> tuple[jax.Array, jax.Array]:
        p, window = problem, problem.window
        if window is not None:
            window = tuple(p.k.shape[1] if side < 0 else side for side in window)
        k, v, sees = p.k.astype(p.q.dtype), p.v.astype(p.q.dtype), None
        if p.mask is not None:
            # A query that sees no key gets the mean of all values there, and 0 * NaN is NaN.
            visible = p.visible()
            sees = jnp.moveaxis(visible.any(-1), 1, 2)
            used = visible.any((1, 2))[:, :, None, None]
            k, v = (jnp.where(used, x, jnp.zeros((), x.dtype)) for x in (k, v))
        options: dict[str, Any] = {"mask": p.mask, "is_causal": p.is_causal, "scale": p.scale}
        options |= {"local_window_size": window, "implementation": self.kernel}
        out = jax.nn.dot_product_attention(p.q, k, v, **options)
        if sees is not None:
            out = jnp.where(sees[..., None], out, jnp.zeros((), out.dtype))
        return out, jnp.full(out.shape[:3], jnp.nan)


@dataclasses.dataclass(frozen=True)
class CuDNN(JaxNN):
    """`jax.nn.dot_product_attention` with the flash attention of cuDNN, on NVIDIA GPUs.

    Gradients of two runs may differ in rounding unless XLA's flag `--xla_gpu_deterministic_ops`
    is set, and there is no second derivative.
    """

    name = "cudnn"
    kernel = "cudnn"

    def supports(self, problem: Problem) -> str | None:
        p = problem
        if (reason := super().supports(p)) is not None:
            return reason
        if p.mask is not None:
            return 'a mask would be an array of T x S logits; use "xla"'
        if p.window is not None and not p.is_causal:
            return 'it has windows only with is_causal; use "xla"'
        if p.q.dtype not in (jnp.bfloat16, jnp.float16) or not (
            p.q.dtype == p.k.dtype == p.v.dtype
        ):
            return "q, k and v must all be bfloat16 or all float16"
        if (capability := _compute_capability()) is None:
            return f"it needs an NVIDIA GPU, and the platform is {jax.default_backend()}"
        if capability < 8.0:
            return f"it needs compute capability 8.0 or later, and this is {capability}"
        largest = 256 if capability >= 9.0 else 128
        if p.q.shape[3] > largest or p.q.shape[3] % 8:
            return f"the head dim must be a multiple of 8 and at most {largest}"
        return None


def _compute_capability() -> float | None:
    """Returns the compute capability of the GPU, or None where there is no NVIDIA GPU."""
    if jax.default_backend() != "gpu":
        return None
    device = jax.local_devices()[0]
    return float(device.compute_capability) if "cuda" in device.client.platform_version else None
