"""One token that attends to a full cache, by this library and by `jax.nn`: a part of `accelerator`.

The cache is donated, and every call writes the same slot.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import posenc_jax as pe
from experiments.bench.peers import Case, compile_program


def our_case(scheme: pe.Scheme, arguments: tuple) -> Case:
    """Returns attention of the last token, by the default implementation.

    Args:
      scheme: the scheme.
      arguments: q, k, v, parameters and, if the scheme reads it, x, of all tokens.
    """
    q, k, v, params, *inputs = arguments
    batch, slots, heads, dim = q.shape
    x = inputs[0] if inputs else None
    cache = pe.new_cache(
        scheme,
        batch,
        slots,
        num_heads=heads,
        num_kv_heads=k.shape[2],
        head_dim=dim,
        model_dim=heads * dim,
        dtype=q.dtype,
    )
    first, last = slice(None, slots - 1), slice(slots - 1, None)

    def part(slots: slice) -> tuple:
        return tuple(None if y is None else y[:, slots] for y in (q, k, v, x))

    def attend(cache, params, q, k, v, x):
        return pe.scheme_attention(scheme, params, q, k, v, x=x, cache=cache, is_causal=True)

    def step(cache, *arguments):
        out, after = attend(cache, *arguments)
        # With the old counters and state, the next call writes the same slots again.
        before = {"length": cache.length, "next_positions": cache.next_positions}
        return out, dataclasses.replace(after, state=cache.state, **before)

    fill = jax.jit(lambda *arguments: attend(*arguments)[1], donate_argnums=0)
    cache = fill(cache, params, *part(first))
    fresh = params, *part(last)
    return _with_donated_cache(step, cache, fresh)


def jax_nn_case(q: jax.Array, k: jax.Array, v: jax.Array) -> Case:
    """Returns the same without a scheme, where slots are masked by position."""
    last = jnp.int32(q.shape[1] - 1)

    def step(cache, last, q, *new):
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(x, y, last, 1)
            for x, y in zip(cache, new, strict=True)
        )
        mask = jnp.arange(keys.shape[1], dtype=jnp.int32) <= last
        out = jax.nn.dot_product_attention(q, keys, values, mask=mask[None, None, None])
        return out, (keys, values)

    cache = tuple(x.at[:, -1:].set(0) for x in (k, v))
    inputs = last, *(x[:, -1:] for x in (q, k, v))
    return _with_donated_cache(step, cache, inputs)


def _with_donated_cache(step: Callable, cache: Any, inputs: tuple) -> Case:
    """Returns calls of `step(cache, *inputs)`, each with the cache of the one before."""
    program, facts = compile_program(step, (cache, *inputs), donate_argnums=0)

    def call():
        nonlocal cache
        out, cache = program(cache, *inputs)
        return out

    return Case(call, facts)
