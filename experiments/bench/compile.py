"""Compiles functions, and reads the memory of the programs."""

import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax

_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]+)\]")


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
      The program, and its figures: seconds of tracing and compiling, megabytes of temporary memory
      (without arguments and results), and megabytes of its largest array.
    """
    began = time.perf_counter()
    program = jax.jit(f, **options).lower(*arguments).compile()
    seconds = time.perf_counter() - began
    memory: Any = program.memory_analysis()
    return program, {
        "megabytes": memory.temp_size_in_bytes / 1e6,
        "largest_megabytes": largest_array(program.as_text() or "") / 1e6,
        "compile_seconds": seconds,
    }


def largest_array(text: str) -> int:
    """Returns the bytes of the largest array that a program's text names.

    >>> largest_array("add = f32[2,3]{1,0} add(bf16[8] a, pred[5] b)")
    24
    """
    sizes = [
        math.prod(map(int, shape.split(","))) * (1 if kind == "pred" else max(int(bits) // 8, 1))
        for kind, bits, shape in _ARRAY.findall(text)
    ]
    return max(sizes, default=0)
