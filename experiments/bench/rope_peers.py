"""Rotations of other libraries for `rope`, tables included.

equinox and rotary-embedding-torch cache their tables; the others compute them in each call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.peers import Case, from_torch, jax_case, working
from experiments.runs.environment import usable_cores


def rope_peers(arrays: Sequence[jax.Array], theta: float) -> dict[str, Case]:
    """Returns the rotations of the installed libraries; `like` is the layout of each.

    Args:
      arrays: x [B, T, N, H], and the output's cotangent for forward and backward.
      theta: the base.
    """
    makers = {
        "jax concatenating": _concatenating,
        "equinox": _equinox,
        "transformers": _transformers,
        "rotary_embedding_torch": _lucidrains,
    }
    return working(makers, arrays, theta)


def both(rotate: Callable) -> Callable:
    """Returns a function of x, or of x and a cotangent, for a rotation in JAX."""

    def call(x, *dy):
        if not dy:
            return rotate(x)
        y, pull = jax.vjp(rotate, x)
        return y, *pull(*dy)

    return call


def _concatenating(arrays: Sequence[jax.Array], theta: float) -> dict[str, Case]:
    """The usual way in JAX: cos and sin of the positions, halves rotated and concatenated."""

    def rotate(x):
        half = x.shape[-1] // 2
        positions = jnp.arange(x.shape[1], dtype=jnp.int32).astype(jnp.float32)
        steps = theta ** -(jnp.arange(half, dtype=jnp.int32).astype(jnp.float32) / half)
        angles = (positions[:, None] * steps[None])[None, :, None]
        cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    return {"jax concatenating": jax_case(both(rotate), tuple(arrays), False, "half")}


def _equinox(arrays: Sequence[jax.Array], theta: float) -> dict[str, Case]:
    import equinox

    x = arrays[0]
    rope = equinox.nn.RotaryPositionalEmbedding(x.shape[-1], theta, x.dtype)
    rotate = jax.vmap(jax.vmap(rope, in_axes=1, out_axes=1))
    return {"equinox": jax_case(both(rotate), tuple(arrays), False, "half")}


def _transformers(arrays: Sequence[jax.Array], theta: float) -> dict[str, Case]:
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    _, length, heads, dim = arrays[0].shape
    config = LlamaConfig(
        hidden_size=heads * dim,
        num_attention_heads=heads,
        head_dim=dim,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    torch.compiler.reset()  # Otherwise it stops compiling after some shapes.
    table, positions = llama.LlamaRotaryEmbedding(config), torch.arange(length)[None]

    def rotate(x):
        return llama.apply_rotary_pos_emb(x, x[:, :0], *table(x, positions))[0]

    return {
        "transformers": _torch_case(rotate, arrays, "half"),
        "transformers, compiled": _torch_case(torch.compile(rotate, dynamic=False), arrays, "half"),
    }


def _lucidrains(arrays: Sequence[jax.Array], theta: float) -> dict[str, Case]:
    from rotary_embedding_torch import RotaryEmbedding

    rope = RotaryEmbedding(arrays[0].shape[-1], theta=theta)
    rotate = rope.rotate_queries_or_keys
    return {"rotary-embedding-torch": _torch_case(rotate, arrays, "interleaved")}


def _torch_case(rotate: Callable, arrays: Sequence[jax.Array], like: str) -> Case:
    """Returns a rotation of [B, N, T, H], and its gradient if there is a cotangent."""
    import torch

    torch.set_num_threads(usable_cores())
    kind = torch.bfloat16 if arrays[0].dtype == jnp.bfloat16 else torch.float32
    x, *dy = (
        torch.from_numpy(np.array(a, np.float32)).transpose(1, 2).contiguous().to(kind)
        for a in arrays
    )
    x.requires_grad_(bool(dy))

    def call() -> Any:
        y = rotate(x)
        return (y, *torch.autograd.grad(y, x, *dy)) if dy else y

    call()  # Compiles, or raises.
    return Case(call, {}, like, from_torch)
