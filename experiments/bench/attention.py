"""Attention with each scheme against attention without positions, and against `jax.nn`.

Attention is causal, in float32; the backward pass has the gradients of all learned arrays. Also
prints the temporary memory of the compiled program and the seconds of compiling it. `jax.nn` takes
T5's bias as a matrix, up to a length of 4,096. All lengths take minutes.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp

import posenc_jax as pe
from experiments.bench import peers
from experiments.bench.cases import (
    attend_with,
    make_arguments,
    named_schemes,
    positive,
    positives,
    sizes_of,
)
from experiments.bench.timing import show, side_by_side
from experiments.settings.config_io import names

SCHEMES = "t5,alibi,shaw"
LONGEST_MATRIX = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's settings."""
    add, lengths = parser.add_argument, (512, 1024, 2048, 4096, 8192)
    add("--lengths", type=positives, default=lengths, help="T (default: 512 to 8192)")
    for name, size in (("--batch", 1), ("--heads", 8), ("--head-dim", 64)):
        add(name, type=positive, default=size, help=f"(default: {size})")
    add("--schemes", type=names, default=names(SCHEMES), help=f"(default: {SCHEMES})")
    add("--rounds", type=positive, default=15, help="(default: 15)")
    add("--seconds", type=float, default=10.0, help="beyond the rounds (default: 10)")


def run(options: argparse.Namespace) -> dict:
    """Measures every shape; returns the numbers."""
    shapes = [(options.batch, n, options.heads, options.head_dim) for n in options.lengths]
    results = []
    for shape in shapes:
        print(f"\ncompiling {shape} ...", flush=True)
        cases = all_cases(shape, options)
        timings = side_by_side(
            {name: case.call for name, case in cases.items()},
            rounds=options.rounds,
            seconds=options.seconds,
        )
        show(f"attention {shape} forward+backward", timings)
        print(f"\n  {'':34s} {'memory MB':>10s} {'compile s':>10s}")
        for name, case in cases.items():
            megabytes, seconds = case.facts["megabytes"], case.facts["compile_seconds"]
            print(f"  {name:34s} {megabytes:10.1f} {seconds:10.2f}", flush=True)
        rows = [dataclasses.asdict(t) | dict(cases[t.name].facts) for t in timings]
        results.append({"shape": shape, "rows": rows})
    return {"results": results}


def all_cases(shape: tuple[int, int, int, int], options: argparse.Namespace) -> dict:
    """Returns the cases by name: ours, and `jax.nn` without a bias and with T5's as a matrix."""
    _, length, heads, dim = shape

    def naive(q, k, v, *table):
        bias = peers.t5_matrix(*table, length) if table else None
        return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)

    cases = {}
    for name, scheme in named_schemes(options.schemes, sizes_of(heads, dim, length)).items():
        arguments = make_arguments(scheme, shape, jnp.float32)
        cases[name] = peers.jax_case(attend_with(scheme), arguments, True)
    if length > LONGEST_MATRIX:
        return cases
    t5 = pe.T5(num_heads=heads)
    *qkv, params = arguments = make_arguments(t5, shape, jnp.float32)
    theirs = {
        "jax.nn without bias": peers.jax_case(naive, (*qkv,), True, "none"),
        "jax.nn with T5 matrix": peers.jax_case(naive, (*qkv, params["table"]), True, "t5"),
    }
    ours = {"none": cases["none"], "t5": peers.jax_case(attend_with(t5), arguments, True)}
    return cases | peers.agreeing(theirs, ours)
