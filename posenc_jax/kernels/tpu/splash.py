"""Calls of JAX's splash attention: masks, blocks, padding and derivatives."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from posenc_jax.engine.problem import Problem, pad_axis
from posenc_jax.kernels.base import padded, without_derivative, without_hidden
from posenc_jax.kernels.tpu.chip import device_kind
from posenc_jax.kernels.tpu.implementation import tile_size
from posenc_jax.kernels.tpu.tile import LANES

_COMPUTED = 512  # Keys of one matrix product.
_MOST_PARTS = 8  # Of the cotangent of q, each as large as q.
_NO_QUERY, _NO_KEY = -1, -2  # Segments of padding: neither sees the other.


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The static part of a problem.

    Attributes:
      heads, length, keys: N, and T and S in whole blocks.
      is_causal, window, softcap: as in `Problem`.
      block_q, block_k: queries and keys per tile.
      precision: of matrix products.
      interpret: run in the interpreter.
    """

    heads: int
    length: int
    keys: int
    is_causal: bool
    window: tuple[int, int] | None
    softcap: float | None
    block_q: int
    block_k: int
    precision: str
    interpret: bool


def attend(p: Problem, block: int | None, interpret: bool) -> jax.Array:
    """Returns the output of a problem that `Splash` supports, [B, T, N, V].

    Args:
      p: the problem.
      block: queries and keys per tile, or None to choose.
      interpret: run in the interpreter.
    """
    # Without segments, every key is seen: by its own query, or by all.
    p = p if p.q_segment_ids is None else without_hidden(p)
    block_q, block_k = (block or _tile_size(p, n) for n in (p.length, p.keys))
    settings = _Settings(
        heads=p.num_heads,
        length=padded(p.length, block_q),
        keys=padded(p.keys, block_k),
        is_causal=p.is_causal,
        window=p.window,
        softcap=p.softcap,
        block_q=block_q,
        block_k=block_k,
        # The caller's setting would reach the kernel, and Mosaic refuses others for bfloat16.
        precision="highest" if p.q.dtype == jnp.float32 else "default",
        interpret=interpret,
    )
    q = (p.q.astype(jnp.float32) * p.scale).astype(p.q.dtype)
    arrays = {"q": pad_axis(q, 1, settings.length)}
    arrays |= {name: pad_axis(getattr(p, name), 1, settings.keys) for name in "kv"}
    arrays = {name: jnp.swapaxes(x, 1, 2) for name, x in arrays.items()}
    sinks = None if p.sinks is None else p.sinks[0, 0]  # All queries have the same.
    if p.q_segment_ids is not None:
        # A sink that takes nothing from visible keys, and all from the others, gives queries that
        # see no key zeros. Without it they get the mean of the values. JAX hides keys by -2.4e38.
        least = jnp.full((p.num_heads,), -1e30, jnp.float32)
        sinks = least if sinks is None else jnp.maximum(sinks, least)
    if sinks is not None:
        arrays["sinks"] = sinks
    out = _attend(settings, _segments(p, settings), arrays)
    return jnp.swapaxes(out, 1, 2)[:, : p.length]


def _tile_size(p: Problem, count: int) -> int:
    """Returns the size of tiles for `count` queries or keys.

    JAX's kernels may use 16 MiB of VMEM on most chips. These sizes were compiled with segments, a
    window, a softcap and sinks.
    """
    most = 1024 if p.q.dtype == jnp.bfloat16 else 512
    if max(p.q.shape[3], p.v.shape[3]) > LANES:
        most //= 2
    if device_kind() == "TPU v4":
        most //= 2
    return min(most, tile_size(count, p.q.dtype))


def _segments(p: Problem, settings: _Settings) -> kernels.SegmentIds | None:
    """Returns the segments of queries and keys, int32 [B, T] and [B, S], or None for one."""
    has_padding = settings.length > p.length or settings.keys > p.keys
    causality_hides_it = p.is_causal and p.length == p.keys
    if p.q_segment_ids is None and (causality_hides_it or not has_padding):
        return None

    def of_side(ids, count, length, padding):
        ids = jnp.zeros((p.q.shape[0], count), jnp.int32) if ids is None else ids
        ids = jnp.where(ids < 0, padding, ids)
        return pad_axis(ids - padding, 1, length) + padding

    return kernels.SegmentIds(
        of_side(p.q_segment_ids, p.length, settings.length, _NO_QUERY),
        of_side(p.k_segment_ids, p.keys, settings.keys, _NO_KEY),
    )


# The kernel has derivatives of its own. They are traced after the call, where the caller's
# precision is set again; these set the kernel's.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    settings: _Settings, segments: kernels.SegmentIds | None, arrays: dict[str, jax.Array]
) -> jax.Array:
    with jax.default_matmul_precision(settings.precision):
        return _run(settings, segments, arrays)


def _attend_forward(settings, segments, arrays):
    arrays = without_derivative("splash", arrays)
    with jax.default_matmul_precision(settings.precision):
        return jax.vjp(functools.partial(_run, settings, segments), arrays)


def _attend_backward(settings, pull, d_out):
    with jax.default_matmul_precision(settings.precision):
        (grads,) = pull(without_derivative("splash", d_out))
    if "sinks" in grads:  # In jax 0.10 they have the dtype of the output.
        grads["sinks"] = grads["sinks"].astype(jnp.float32)
    return None, grads


_attend.defvjp(_attend_forward, _attend_backward)


def _run(
    settings: _Settings, segments: kernels.SegmentIds | None, arrays: dict[str, jax.Array]
) -> jax.Array:
    """Returns the output, [B, N, T, V], of q, k and v in that order of axes."""
    kernel, sinks = _kernel(settings), arrays.get("sinks")

    def row(q, k, v, ids):
        return kernel(q, k, v, segment_ids=ids, sinks=sinks)

    return jax.vmap(row)(*(arrays[name] for name in "qkv"), segments)


@functools.lru_cache(64)
def _kernel(settings: _Settings) -> Any:
    """Returns the kernel, whose arrays are NumPy's: others would belong to one trace."""
    s = settings
    sizes: dict[str, Any] = {"block_q": s.block_q, "block_kv": s.block_k}
    sizes |= {"block_q_dkv": s.block_q, "block_kv_dkv": s.block_k}
    computed = _COMPUTED if s.block_k % _COMPUTED == 0 else s.block_k
    sizes |= {"block_kv_compute": computed, "block_kv_dkv_compute": computed}
    is_fused = s.keys // s.block_k <= _MOST_PARTS
    if not is_fused:
        sizes |= {"block_q_dq": s.block_q, "block_kv_dq": s.block_k}
    # Outside of the caller's trace and mesh.
    no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with jax.ensure_compile_time_eval(), no_mesh:
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([_mask(s)] * s.heads),
            block_sizes=kernels.BlockSizes(**sizes, use_fused_bwd_kernel=is_fused),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=s.softcap,
            interpret=s.interpret,
        )
        return jax.tree.map(np.asarray, kernel)


def _mask(s: _Settings) -> masks.Mask:
    """Returns the mask by slot of one head."""
    shape = s.length, s.keys
    before, after = (None if side < 0 else side for side in s.window or (-1, -1))
    after = 0 if s.is_causal else after
    if before is None and after is None:
        return masks.FullMask(shape)
    if before is None and after == 0:
        return _CausalMask(shape)
    return _LocalMask(shape, (before, after), 0)


# JAX computes every block of a mask while tracing, which takes seconds from T = 32,768 on.
class _CausalMask(masks.CausalMask):
    def __getitem__(self, idx):
        block = _uniform_block(idx, None, 0)
        return super().__getitem__(idx) if block is None else block


class _LocalMask(masks.LocalMask):
    def __getitem__(self, idx):
        block = _uniform_block(idx, *self.window_size)
        return super().__getitem__(idx) if block is None else block


def _uniform_block(
    block: tuple[slice, slice], before: int | None, after: int | None
) -> np.ndarray | None:
    """Returns the mask of a block where all pairs are visible or all hidden, else None.

    Args:
      block: the slices of queries and keys.
      before, after: how many tokens a query sees on either side; None for no limit.
    """
    q, k = block
    low, high = q.start - (k.stop - 1), q.stop - 1 - k.start  # Query minus key.
    shape = q.stop - q.start, k.stop - k.start
    if (before is not None and low > before) or (after is not None and high < -after):
        return _constant(False, shape)
    if (before is None or high <= before) and (after is None or low >= -after):
        return _constant(True, shape)
    return None


@functools.lru_cache(8)
def _constant(value: bool, shape: tuple[int, int]) -> np.ndarray:
    return np.full(shape, value)
