"""Attention by `jax.nn.dot_product_attention`, for the calls that it computes exactly.

It takes rules that go by distance alone, as one array of all pairs, [1, N, T, S]; rotary schemes
need none. It rounds the log-sum-exp to the dtype of the keys and gives it no gradient, so calls
that return a log-sum-exp are refused.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.engine.lower import lower
from posenc_jax.engine.mask import LEAST_LOGIT
from posenc_jax.engine.mesh import divides_heads
from posenc_jax.engine.problem import Implementation, Problem, feature_refusal
from posenc_jax.engine.rules import LogitBias
from posenc_jax.engine.toeplitz import toeplitz_tile, toeplitz_tile_vjp

_HIDDEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
"""The least logits that JAX passes to cuDNN, which subtracts larger ones from each other."""


@dataclasses.dataclass(frozen=True)
class JaxNN(Implementation):
    """`jax.nn.dot_product_attention`, with its own choice of kernel."""

    name = "jax"
    kernel: ClassVar[str | None] = None

    def refusal(self, problem: Problem) -> str | None:
        p = problem
        other_rules = [r for r in p.rules if not (isinstance(r, LogitBias) and r.relative)]
        if p.q_coordinates.ndim == 3:
            other_rules = p.rules
        ordered = p.rules or p.is_causal or p.window is not None
        return feature_refusal(
            {
                "rules but biases by distance": other_rules,
                "softcap": p.softcap is not None,
                "sinks": p.sinks is not None,
                "dropout": p.dropout_seeds is not None,
                "segments": p.q_segment_ids is not None,
                "prefix_length": p.prefix_length is not None,
                "k_visible_until and sink tokens of windows": p.k_visible_until is not None,
                "block_mask": p.block_mask is not None,
                "positions of its own": ordered and not p.contiguous,
                "values of another head dim than keys": p.q.shape[3] != p.v.shape[3],
                "products of several dtypes": not p.q.dtype == p.k.dtype == p.v.dtype,
                "exact log-sum-exp": p.needs_lse,
            }
        )

    def __call__(self, problem: Problem) -> tuple[jax.Array, jax.Array]:
        p, window = problem, problem.window
        if window is not None:
            most = max(p.length, p.keys)  # JAX adds sides to slots in int32.
            window = tuple(most if side < 0 else min(side, most) for side in window)
        k, v, sees = p.k, p.v, None
        bias = self._bias(p) if p.rules else None
        if p.mask is not None or (bias is not None and self.kernel is None):
            # A query that sees no key gets the mean of all values there, and 0 * NaN is NaN.
            visible = p.visible()
            if bias is not None:  # A rule may hide keys, by -inf.
                hidden = jnp.isneginf(bias)
                visible &= ~hidden
                # JAX hides keys by 0.7 times the least logit.
                bias = jnp.where(hidden, LEAST_LOGIT, jnp.maximum(bias, LEAST_LOGIT / 2))
            sees = jnp.moveaxis(visible.any(-1), 1, 2)
            used = visible.any((1, 2))[:, :, None, None]
            k, v = (jnp.where(used, x, jnp.zeros((), x.dtype)) for x in (k, v))
        options: dict[str, Any] = {"mask": p.mask, "is_causal": p.is_causal, "scale": p.scale}
        options |= {"local_window_size": window, "implementation": self.kernel}
        if bias is not None:
            options["bias"] = bias
        out = jax.nn.dot_product_attention(p.q, k, v, **options)
        if sees is not None:
            out = jnp.where(sees[..., None], out, jnp.zeros((), out.dtype))
        return out, jnp.full(out.shape[:3], jnp.nan)

    def _bias(self, p: Problem) -> jax.Array:
        """Returns the rules, which go by distance alone, as one array, [1, N, T, S]."""
        by_distance = lower(p, max_table=0).bias
        assert by_distance is not None
        values = by_distance(1 - p.keys, p.length)
        # One array per head, also where heads share it: the shape that others use.
        values = jnp.broadcast_to(values, (p.num_heads, values.shape[1]))
        shape = p.length, p.keys
        if self.kernel is None:
            return jax.vmap(lambda row: toeplitz_tile(row, shape))(values)[None]
        # cuDNN takes the bias in q's dtype. Weights stay the same when another number is added to
        # all logits of a head; with the greatest at zero, the logits that take most of the weight
        # are rounded least.
        values -= jax.lax.stop_gradient(values.max(1, keepdims=True))
        values = jnp.maximum(values, _HIDDEN[p.q.dtype.name])
        bias = jax.vmap(lambda row: toeplitz_tile_vjp(row, shape))(values)[None]
        return bias.astype(p.q.dtype)


@dataclasses.dataclass(frozen=True)
class CuDNN(JaxNN):
    """`jax.nn.dot_product_attention` with the flash attention of cuDNN, on NVIDIA GPUs.

    Gradients of two runs may differ in rounding unless XLA's flag `--xla_gpu_deterministic_ops`
    is set, and there is no second derivative. Rules by distance are rounded to the dtype of q, less
    the greatest number of each head, and take N T S numbers in each pass. `jax.vmap` over their
    parameters raises in JAX for batches of more than one row.
    """

    name = "cudnn"
    kernel = "cudnn"

    def refusal(self, problem: Problem) -> str | None:
        p = problem
        if (reason := super().refusal(p)) is not None:
            return reason
        if p.mask is not None:
            return 'a mask would be an array of T x S logits; use "xla"'
        if p.window is not None and not p.is_causal:
            return 'it has windows only with is_causal; use "xla"'
        if p.q.dtype not in (jnp.bfloat16, jnp.float16):
            return "q, k and v must be bfloat16 or float16"
        if (capability := _compute_capability(p.platform)) is None:
            return f"it needs an NVIDIA GPU, and the platform is {p.platform}"
        if capability < 8.0:
            return f"it needs compute capability 8.0 or later, and this is {capability}"
        largest = 256 if capability >= 9.0 else 128
        if p.q.shape[3] > largest or p.q.shape[3] % 8:
            return f"the head dim must be a multiple of 8 and at most {largest}"
        if p.rules and (p.length % 2 or p.keys % 2):
            return f"with rules T and S must be even, got {p.length} and {p.keys}"
        if p.rules and divides_heads(p):
            return "with rules no mesh may divide the heads, and automatic axes might"
        return None


def _compute_capability(platform: str) -> float | None:
    """Returns the compute capability of the GPU, or None where there is no NVIDIA GPU."""
    if platform != "gpu":
        return None
    device = jax.local_devices(backend=platform)[0]
    return float(device.compute_capability) if "cuda" in device.client.platform_version else None
