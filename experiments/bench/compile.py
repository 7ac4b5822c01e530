"""Compiles functions, and reads the memory of the programs."""

import time
from collections.abc import Callable
from typing import Any

import jax


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
