"""Attention by `jax.nn`, compared with ours before it is timed."""

import time
from collections.abc import Callable, Mapping
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


def t5_matrix(table: jax.Array, length: int) -> jax.Array:
    """Returns T5's bias of all queries and keys, [1, N, T, T], from its table [N, buckets]."""
    positions = jnp.arange(length, dtype=jnp.int32)
    bucket = pe.t5_bucket(positions[:, None] - positions[None])
    return jnp.moveaxis(table.T[bucket], -1, 0)[None]
