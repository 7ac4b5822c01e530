"""Memory of attention with each scheme against length, from the compiled programs.

Nothing runs. Temporary memory excludes arguments and results; the largest array is read from the
program's text. If no array grows with T x S, twice the length needs at most twice the memory;
`jax.nn` holds all logits and needs four times the memory.
"""

import argparse
import math

import jax

import posenc_jax as pe
from experiments.bench import peers
from experiments.bench.cases import (
    DTYPES,
    add_common_arguments,
    attend_with,
    make_arguments,
    named_schemes,
    sizes_of,
)
from experiments.bench.compile import compile_program, with_gradients

SCHEMES = "t5,alibi,fire,shaw"
PASSES = {"forward": lambda f: f, "forward+backward": with_gradients}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's settings."""
    lengths = "--lengths", (512, 1024, 2048, 4096, 8192), "T"
    add_common_arguments(parser, sizes=lengths, schemes=SCHEMES)


def run(options: argparse.Namespace) -> dict:
    """Compiles everything; returns the numbers."""
    results = []
    for passes, transform in PASSES.items():
        print(f"\n{passes}: temporary memory in MB, causal, {options.dtype}")
        heads = "".join(f"{f'T = {n}':>9s}" for n in options.lengths)
        print(f"  {'':24s}{heads} {'a doubling':>11s} {'largest array':>14s} {'compile s':>10s}")
        words = named_schemes(options.schemes, sizes_of(options.heads, options.head_dim, 1))
        for name in (*words, *peers.NAIVE):
            print(f"  {name:24s}", end="", flush=True)
            facts = {}
            for length in options.lengths:
                f, arguments = _function(name, length, options)
                _, facts[length] = compile_program(transform(f), arguments)
                print(f"{facts[length]['megabytes']:9.1f}", end="", flush=True)
            last, growth = facts[options.lengths[-1]], _growth(facts)
            print(
                f" {f'{growth:.2f}x' if growth else '-':>11s} {last['largest_megabytes']:14.1f}"
                f" {last['compile_seconds']:10.2f}",
                flush=True,
            )
            results.append({"name": name, "what": passes, "growth": growth, "lengths": facts})
    shape = {"batch": options.batch, "heads": options.heads, "head_dim": options.head_dim}
    return {**shape, "dtype": options.dtype, "results": results}


def _function(name: str, length: int, options: argparse.Namespace) -> tuple:
    """Returns an attention function and the shapes of its arguments."""
    dtype = DTYPES[options.dtype]
    shape = options.batch, length, options.heads, options.head_dim
    sizes = sizes_of(options.heads, options.head_dim, length)
    if name in peers.NAIVE:
        f = peers.NAIVE[name]
        scheme = pe.T5(num_heads=options.heads)
        *inputs, params = jax.eval_shape(lambda: make_arguments(scheme, shape, dtype))
        return f, (*inputs, params["table"]) if f is peers.with_matrix else tuple(inputs)
    scheme = named_schemes(options.schemes, sizes)[name]
    return attend_with(scheme), jax.eval_shape(lambda: make_arguments(scheme, shape, dtype))


def _growth(facts: dict[int, dict]) -> float | None:
    """Returns the factor of memory per doubling of the length; None for one length."""
    *before, last = facts
    if not before:
        return None
    ratio = facts[last]["megabytes"] / facts[before[-1]]["megabytes"]
    return ratio ** (1 / math.log2(last / before[-1]))
