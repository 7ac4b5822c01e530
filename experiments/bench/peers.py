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
    """Compiles a function, with options of `jax.jit`.

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


def agreeing(cases: Mapping[str, Case], ours: Mapping[str, Case]) -> dict[str, Case]:
    """Returns the cases; raises `RuntimeError` if numbers differ from ours of the same scheme."""
    for name, case in cases.items():
        for a, b in zip(
            jax.tree.leaves(case.call()), jax.tree.leaves(ours[case.like].call()), strict=True
        ):
            limit = 4e-2 if b.dtype == jnp.bfloat16 else 2e-4
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
