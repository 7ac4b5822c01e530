"""Attention by `jax.nn`, compared with ours before it is timed."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe


def with_gradients(f: Callable) -> Callable:
    """Returns a function of f's output and gradients, with the output as its cotangent."""

    def both(*arguments):
        out, pull = jax.vjp(f, *arguments)
        return out, pull(out)

    return both


def compile_program(f: Callable, arguments: tuple, **options: Any) -> tuple[Any, dict]:
    """Compiles a function.

    Args:
      f: a function of arrays.
      arguments: arrays, or shapes with dtypes.
      **options: of `jax.jit`.

    Returns:
      The program, and its figures: seconds of tracing and compiling, and megabytes of temporary
      memory, without arguments and results.
    """
    began = time.perf_counter()
    program = jax.jit(f, **options).lower(*arguments).compile()
    seconds = time.perf_counter() - began
    memory: Any = program.memory_analysis()
    return program, {
        "megabytes": memory.temp_size_in_bytes / 1e6,
        "compile_seconds": seconds,
    }


class Case(NamedTuple):
    """A function to time.

    Attributes:
      call: returns the output [B, T, N, H], or the output and the gradients of q, k, v and table.
      facts: figures of the compiled program.
      like: the scheme whose numbers the results must equal.
    """

    call: Callable[[], Any]
    facts: Mapping[str, float] = MappingProxyType({})
    like: str = ""


def jax_case(f: Callable, arguments: tuple, backward: bool, like: str = "") -> Case:
    """Returns a compiled call of f, or of f and its gradients."""
    program, facts = compile_program(with_gradients(f) if backward else f, arguments)
    return Case(lambda: program(*arguments), facts, like)


def agreeing(
    cases: Mapping[str, Case], ours: Mapping[str, Case], tolerance: float = 2e-4
) -> dict[str, Case]:
    """Returns the cases after a comparison of their numbers with ours.

    Args:
      cases: by name.
      ours: our case for each `Case.like`.
      tolerance: the greatest error relative to the largest value; 4e-2 if bfloat16 comes out.

    Raises:
      RuntimeError: if the numbers of a case differ.
    """
    for name, case in cases.items():
        for a, b in zip(
            jax.tree.leaves(case.call()), jax.tree.leaves(ours[case.like].call()), strict=True
        ):
            limit = 4e-2 if b.dtype == jnp.bfloat16 else tolerance
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            error = np.abs(a - b).max() / np.abs(b).max()
            if not error <= limit:
                raise RuntimeError(f"{name} differs by {error:.1e} of the largest value")
    return dict(cases)


def without_bias(q, k, v):
    """Attention by `jax.nn`."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def with_matrix(q, k, v, table):
    """Attention by `jax.nn` with T5's bias as a matrix of all queries and keys."""
    bias = t5_matrix(table, q.shape[1]).astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)


def t5_matrix(table: jax.Array, length: int) -> jax.Array:
    """Returns T5's bias of all queries and keys, [1, N, T, T], from its table [N, buckets]."""
    positions = jnp.arange(length, dtype=jnp.int32)
    bucket = pe.t5_bucket(positions[:, None] - positions[None])
    return jnp.moveaxis(table.T[bucket], -1, 0)[None]


def naive(inputs: Sequence[jax.Array], table: jax.Array, backward: bool) -> dict[str, Case]:
    """Returns the cases of `jax.nn`: without a bias, and with T5's as a matrix."""
    return {
        "jax.nn without bias": jax_case(without_bias, tuple(inputs), backward, "none"),
        "jax.nn with T5 matrix": jax_case(with_matrix, (*inputs, table), backward, "t5"),
    }


def with_cache(arguments: tuple, tokens: int) -> dict[str, Case]:
    """Returns `jax.nn` on a cache [B, S, N, H], without a bias and with T5's as rows."""
    q, k, v, params = arguments
    slots = q.shape[1]
    start = jnp.int32(slots - tokens)
    new = tuple(y[:, slots - tokens :] for y in (q, k, v))

    def write(cache, new, start):
        return jax.lax.dynamic_update_slice_in_dim(cache, new, start, 1)

    def case(like: str, bias_of: Callable) -> Case:
        def step(cache, start, table, q, k, v):
            keys, values = write(cache[0], k, start), write(cache[1], v, start)
            distance = (start + jnp.arange(tokens, dtype=jnp.int32))[:, None] - jnp.arange(
                slots, dtype=jnp.int32
            )[None]
            out = jax.nn.dot_product_attention(
                q, keys, values, bias=bias_of(table, distance), mask=(distance >= 0)[None, None]
            )
            return out, (keys, values)

        cache = tuple(y.at[:, slots - tokens :].set(0) for y in (k, v))
        inputs = start, params["table"], *new
        program, facts = compile_program(step, (cache, *inputs), donate_argnums=0)

        def call():
            nonlocal cache
            out, cache = program(cache, *inputs)
            return out

        return Case(call, facts, like)

    def t5(table, distance):
        return jnp.moveaxis(table.T[pe.t5_bucket(distance)], -1, 0)[None].astype(q.dtype)

    return {
        "jax.nn without bias": case("none", lambda table, distance: None),
        "jax.nn with T5 rows": case("t5", t5),
    }
