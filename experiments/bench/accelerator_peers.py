"""Attention of JAX and of other libraries, for `accelerator`: causal, [B, T, N, H], no positions.

Each is without a bias, with any matrix [1, N, T, T] as its bias, and with T5's bias as a matrix
made from its table; the gradient reaches the matrix or the table.
"""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import posenc_jax as pe
from experiments.bench.peers import t5_matrix


class Case(NamedTuple):
    """Attention that can be compiled.

    Attributes:
      name: of the scheme, or "matrix".
      by: the implementation or the library.
      attend: a function of q, k, v, params, and x where that is read.
      params: arrays, or shapes of arrays of zeros.
      scheme: the scheme, for our own.
    """

    name: str
    by: str
    attend: Callable
    params: Any
    scheme: pe.Scheme = pe.NoPE()


def peers(length: int, heads: int, table: jax.Array, platform: str) -> list[Case]:
    """Returns the cases for a length and a table of T5's; cases without a bias come first."""
    matrix = jax.ShapeDtypeStruct((1, heads, length, length), jnp.bfloat16)
    biases: dict[str, tuple[Any, Callable]] = {
        "none": ({}, lambda params: None),
        "matrix": (matrix, lambda bias: bias),
        "t5": (table, lambda table: t5_matrix(table, length)),
    }
    kernels = {
        "jax.nn": _jax_nn,
        "jax.nn cudnn": functools.partial(_jax_nn, implementation="cudnn"),
        "einsum": _einsum,
        "tokamax": _tokamax,
    }
    if platform == "tpu":
        del kernels["jax.nn cudnn"]

    def case(name: str, by: str) -> Case:
        params, bias_of = biases[name]

        def attend(q, k, v, params):
            bias = bias_of(params)
            return kernels[by](q, k, v, None if bias is None else bias.astype(q.dtype))

        return Case(name, by, attend, params)

    cases = [case(name, by) for name in biases for by in kernels]
    if platform == "tpu":
        splash = [functools.partial(_splash, block=block) for block in (512, 1024)]
        cases = [Case("none", f"splash {f.keywords['block']}", f, {}) for f in splash] + cases
    return cases


def _jax_nn(q, k, v, bias, implementation=None):
    return jax.nn.dot_product_attention(
        q, k, v, bias=bias, is_causal=True, implementation=implementation
    )


def _einsum(q, k, v, bias):
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    logits = logits / math.sqrt(q.shape[-1])
    if bias is not None:
        logits += bias
    slots = jnp.arange(q.shape[1])
    weights = jax.nn.softmax(jnp.where(slots[:, None] >= slots, logits, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights.astype(q.dtype), v)


def _tokamax(q, k, v, bias):
    import tokamax
    from absl import flags

    flags.FLAGS(sys.argv[:1])  # It parses sys.argv.
    return tokamax.dot_product_attention(q, k, v, bias=bias, is_causal=True)


def _splash(q, k, v, params, *, block):
    """JAX's splash attention with its fused backward pass; the transposes are part of it."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block = min(block, q.shape[1])
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        use_fused_bwd_kernel=True,
    )
    mask = splash.MultiHeadMask([splash.CausalMask((q.shape[1],) * 2)] * q.shape[2])
    kernel = splash.make_splash_mha_single_device(mask=mask, block_sizes=sizes)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q / math.sqrt(q.shape[-1]), k, v))
    return jnp.swapaxes(jax.vmap(kernel)(q, k, v), 1, 2)
