"""Attention by `jax.nn.dot_product_attention`, for the calls that it computes exactly.

It takes rules that go by distance alone, as one array of all pairs, [1, N, T, S]; rotary schemes
need none. It rounds the log-sum-exp to the dtype of the keys and gives it no gradient, so calls
that return a log-sum-exp are refused.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.engine.lower import lower
from posenc_jax.engine.mask import LEAST_LOGIT
from posenc_jax.engine.mesh import divides_heads, mesh_of, open_axes
from posenc_jax.engine.problem import Implementation, Problem, feature_refusal
from posenc_jax.engine.rules import LogitBias
from posenc_jax.engine.toeplitz import toeplitz_tile, toeplitz_tile_vjp

_HIDDEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
"""The least logits that JAX passes to cuDNN, which subtracts larger ones from each other."""

_MOST = 2**28
"""The most numbers of an array that is given to cuDNN."""


@dataclasses.dataclass(frozen=True)
class JaxNN(Implementation):
    """`jax.nn.dot_product_attention`, with its own choice of kernel."""

    name = "jax"
    kernel: ClassVar[str | None] = None

    def refusal(self, problem: Problem) -> str | None:
        p = problem
        ordered = p.rules or p.is_causal or p.window is not None
        return feature_refusal(
            self._lacking(p)
            | {
                "segments": p.q_segment_ids is not None,
                "prefix_length": p.prefix_length is not None,
                "k_visible_until and sink tokens of windows": p.k_visible_until is not None,
                "block_mask": p.block_mask is not None,
                "positions of its own": ordered and not p.contiguous,
            }
        )

    def _lacking(self, p: Problem) -> dict[str, Any]:
        """Returns features that `jax.nn` has with no kernel, and whether a problem has them."""
        other_rules = [r for r in p.rules if not (isinstance(r, LogitBias) and r.relative)]
        if p.q_coordinates.ndim == 3:
            other_rules = p.rules
        return {
            "rules but biases by distance": other_rules,
            "softcap": p.softcap is not None,
            "sinks": p.sinks is not None,
            "dropout": p.dropout_seeds is not None,
            "values of another head dim than keys": p.q.shape[3] != p.v.shape[3],
            "products of several dtypes": not p.q.dtype == p.k.dtype == p.v.dtype,
            "exact log-sum-exp": p.needs_lse,
        }

    def __call__(self, problem: Problem) -> tuple[jax.Array, jax.Array]:
        p = problem
        k, v, visible, sees = p.k, p.v, None, None
        bias = self._bias(p) if p.rules else None
        if self._hides(p) or (bias is not None and self.kernel is None):
            # A query that sees no key gets the mean of all values there, and 0 * NaN is NaN.
            visible = p.visible()
            if bias is not None:  # A rule may hide keys, by -inf.
                visible &= ~jnp.isneginf(bias)
            sees = jnp.moveaxis(visible.any(-1), 1, 2)
            used = visible.any((1, 2))[:, :, None, None]
            k, v = (jnp.where(used, x, jnp.zeros((), x.dtype)) for x in (k, v))
        options = self._arrays(p, visible, bias)
        if self._orders(p):
            window = p.window
            if window is not None:
                most = max(p.length, p.keys)  # JAX adds sides to slots in int32.
                window = tuple(most if side < 0 else min(side, most) for side in window)
            options |= {"is_causal": p.is_causal, "local_window_size": window}
        options |= {"scale": p.scale, "implementation": self.kernel}
        out = self._attend(p.q, k, v, **options)
        if sees is not None:
            out = jnp.where(sees[..., None], out, jnp.zeros((), out.dtype))
        return out, jnp.full(out.shape[:3], jnp.nan)

    def _orders(self, p: Problem) -> bool:
        """Returns whether `jax.nn` itself compares slots, for causality and windows."""
        return True

    def _hides(self, p: Problem) -> bool:
        """Returns whether an array hides keys."""
        return p.mask is not None

    def _bias(self, p: Problem) -> jax.Array:
        """Returns the rules, which go by distance alone, as one array, float32 [1, N, T, S]."""
        values = self._by_distance(p)
        return jax.vmap(lambda row: toeplitz_tile(row, (p.length, p.keys)))(values)[None]

    def _by_distance(self, p: Problem) -> jax.Array:
        """Returns the sum of the rules, float32 [N, S + T - 1].

        One row per head, also where heads share it: the shape that others use.
        """
        by_distance = lower(p, max_table=0).bias
        assert by_distance is not None
        values = by_distance(1 - p.keys, p.length)
        return jnp.broadcast_to(values, (p.num_heads, values.shape[1]))

    def _arrays(
        self, p: Problem, visible: jax.Array | None, bias: jax.Array | None
    ) -> dict[str, Any]:
        """Returns the arrays of all pairs that `jax.nn` takes, by their names there."""
        if bias is None:
            return {"mask": p.mask}
        # JAX hides keys by 0.7 times the least logit.
        low = jnp.maximum(bias, LEAST_LOGIT / 2)
        return {"mask": p.mask, "bias": jnp.where(jnp.isneginf(bias), LEAST_LOGIT, low)}

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, **options)


@dataclasses.dataclass(frozen=True)
class CuDNN(JaxNN):
    """`jax.nn.dot_product_attention` with the flash attention of cuDNN, on NVIDIA GPUs.

    It takes causality, and windows with it, as they are. All else that hides keys, and rules by
    distance, are one array of q's dtype, of at most 2**28 numbers, which is read in each pass:
    [B, 1 or N, T, S] of segments, padding, masks, `prefix_length` and given positions,
    [1, N, T, S] of rules, [B, N, T, S] of both. Rules are rounded to the dtype of q, after
    the greatest number of each head was subtracted. Keys that some queries see must be finite, and
    rules alone must not hide all keys of a query.

    Gradients of two runs may differ in rounding unless XLA's flag `--xla_gpu_deterministic_ops`
    is set, and there is no second derivative. `jax.vmap` over the parameters of rules raises in
    JAX for batches of more than one row.
    """

    name = "cudnn"
    kernel = "cudnn"

    def refusal(self, problem: Problem) -> str | None:
        p = problem
        lacking = {"positions of its own with rules": p.rules and not p.contiguous}
        if (reason := feature_refusal(self._lacking(p) | lacking)) is not None:
            return reason
        if p.q.dtype not in (jnp.bfloat16, jnp.float16):
            return "q, k and v must be bfloat16 or float16"
        if (capability := _compute_capability(p.platform)) is None:
            return f"it needs an NVIDIA GPU, and the platform is {p.platform}"
        if capability < 8.0:
            return f"it needs compute capability 8.0 or later, and this is {capability}"
        largest = 256 if capability >= 9.0 else 128
        if p.q.shape[3] > largest or p.q.shape[3] % 8:
            return f"the head dim must be a multiple of 8 and at most {largest}"
        return self._array_refusal(p) if self.needs_array(p) else None

    def needs_array(self, p: Problem) -> bool:
        """Returns whether the kernel reads an array of all pairs."""
        return bool(p.rules) or self._hides(p)

    def _array_refusal(self, p: Problem) -> str | None:
        """Returns why the array of all pairs cannot be had, or None."""
        hides = self._hides(p)
        batch, heads, *_ = jax.eval_shape(Problem.visible, p).shape if hides else (1, 1)
        shape = batch, p.num_heads if p.rules else heads, p.length, p.keys
        if math.prod(shape) > _MOST:
            return (
                f"rules and hidden keys would be an array {shape} of more than {_MOST:,} numbers; "
                'use "xla"'
            )
        if p.length % 2 or p.keys % 2:
            return f"with rules or hidden keys T and S must be even, got {p.length} and {p.keys}"
        if p.rules and divides_heads(p):
            return "with rules no mesh may divide the heads, and automatic axes might"
        if hides and open_axes(mesh_of(p)):
            return "with hidden keys no mesh may divide the call; use it in jax.shard_map"
        return None

    def _orders(self, p: Problem) -> bool:
        return p.ordered_by_slot and (p.is_causal or p.window is None)

    def _hides(self, p: Problem) -> bool:
        arrays = p.mask, p.block_mask, p.q_segment_ids, p.k_visible_until
        ordered = p.is_causal or p.window is not None
        return (ordered and not self._orders(p)) or any(x is not None for x in arrays)

    def _bias(self, p: Problem) -> jax.Array:
        # Weights stay the same when another number is added to all logits of a head; with the
        # greatest at zero, the logits that take most of the weight are rounded least.
        values = self._by_distance(p)
        values -= jax.lax.stop_gradient(values.max(1, keepdims=True))
        return jax.vmap(lambda row: toeplitz_tile_vjp(row, (p.length, p.keys)))(values)[None]

    def _arrays(
        self, p: Problem, visible: jax.Array | None, bias: jax.Array | None
    ) -> dict[str, Any]:
        if bias is None:
            return {"mask": visible}  # An array of q's dtype, whose gradient nobody computes.
        hidden = _HIDDEN[p.q.dtype.name]
        bias = jnp.maximum(bias, hidden)
        bias = bias if visible is None else jnp.where(visible, bias, hidden)
        return {"bias": bias.astype(p.q.dtype)}

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        rows = options["bias"].shape[0] if "bias" in options else 1
        if rows == 1:
            return super()._attend(q, k, v, **options)
        # cuDNN has gradients of a bias of one row: the rows of the batch become heads.
        q, k, v = (_rows_to_heads(x) for x in (q, k, v))
        bias = options.pop("bias")
        bias = bias.reshape(1, -1, *bias.shape[2:])
        out = super()._attend(q, k, v, **options, bias=bias)
        return jnp.moveaxis(out.reshape(out.shape[1], rows, -1, out.shape[3]), 1, 0)


def _rows_to_heads(x: jax.Array) -> jax.Array:
    """Returns [B, T, N, H] as [1, T, B * N, H]."""
    return jnp.moveaxis(x, 0, 1).reshape(1, x.shape[1], -1, x.shape[3])


def _compute_capability(platform: str) -> float | None:
    """Returns the compute capability of the GPU, or None where there is no NVIDIA GPU."""
    if platform != "gpu":
        return None
    device = jax.local_devices(backend=platform)[0]
    return float(device.compute_capability) if "cuda" in device.client.platform_version else None
