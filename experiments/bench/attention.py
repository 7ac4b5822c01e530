"""Attention with each scheme against attention without positions, and against `jax.nn`.

Attention is causal; the backward pass has the gradients of all learned arrays. With `--segments`
each scheme also attends in packed rows. Also prints the temporary memory of the compiled program
and the seconds of compiling it. `jax.nn` takes T5's bias as a matrix. All lengths take minutes.
"""

import argparse
import dataclasses

import jax

import posenc_jax as pe
from experiments.bench import peers
from experiments.bench.cases import (
    DTYPES,
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's settings."""
    add, lengths = parser.add_argument, (512, 1024, 2048, 4096, 8192)
    add("--lengths", type=positives, default=lengths, help="T (default: 512 to 8192)")
    for name, size in (("--batch", 1), ("--heads", 8), ("--head-dim", 64)):
        add(name, type=positive, default=size, help=f"(default: {size})")
    add("--dtype", choices=tuple(DTYPES), default="float32")
    add("--schemes", type=names, default=names(SCHEMES), help=f"(default: {SCHEMES})")
    add("--segments", type=positive, default=1, help="of packed rows (default: whole rows alone)")
    add("--forward", action="store_true", help="without the backward pass")
    add(
        "--naive-to",
        type=int,
        default=4096,
        help="longest T for arrays of T x S; 0 leaves them out (default: 4096)",
    )
    add("--rounds", type=positive, default=15, help="(default: 15)")
    add("--seconds", type=float, default=10.0, help="beyond the rounds (default: 10)")


def run(options: argparse.Namespace) -> dict:
    """Measures every shape; returns the numbers."""
    shapes = [(options.batch, n, options.heads, options.head_dim) for n in options.lengths]
    passes = "forward" if options.forward else "forward+backward"
    results = []
    for shape in shapes:
        print(f"\ncompiling {shape} ...", flush=True)
        cases = all_cases(shape, options)
        timings = side_by_side(
            {name: case.call for name, case in cases.items()},
            rounds=options.rounds,
            seconds=options.seconds,
        )
        show(f"attention {shape} {options.dtype} {passes}", timings)
        print(f"\n  {'':34s} {'memory MB':>10s} {'compile s':>10s}")
        for name, case in cases.items():
            megabytes, seconds = case.facts["megabytes"], case.facts["compile_seconds"]
            print(f"  {name:34s} {megabytes:10.1f} {seconds:10.2f}", flush=True)
        rows = [dataclasses.asdict(t) | dict(cases[t.name].facts) for t in timings]
        results.append({"shape": shape, "dtype": options.dtype, "what": passes, "rows": rows})
    return {"results": results}


def all_cases(shape: tuple[int, int, int, int], options: argparse.Namespace) -> dict:
    """Returns the cases by name: ours, and `jax.nn` without a bias and with T5's as a matrix."""
    _, length, heads, dim = shape
    backward, dtype = not options.forward, DTYPES[options.dtype]

    def case(scheme, arguments, segments=1):
        return peers.jax_case(attend_with(scheme, segments=segments), arguments, backward)

    def naive(q, k, v, *table):
        bias = peers.t5_matrix(*table, length).astype(dtype) if table else None
        return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)

    cases = {}
    for name, scheme in named_schemes(options.schemes, sizes_of(heads, dim, length)).items():
        arguments = make_arguments(scheme, shape, dtype)
        for segments in sorted({1, options.segments}):
            suffix = f", {segments} segments" if segments > 1 else ""
            cases[f"{name}{suffix}"] = case(scheme, arguments, segments)
    if length > options.naive_to:
        return cases
    t5 = pe.T5(num_heads=heads)
    *qkv, params = arguments = make_arguments(t5, shape, dtype)
    theirs = {
        "jax.nn without bias": peers.jax_case(naive, (*qkv,), backward, "none"),
        "jax.nn with T5 matrix": peers.jax_case(naive, (*qkv, params["table"]), backward, "t5"),
    }
    ours = {"none": cases["none"], "t5": case(t5, arguments)}
    return cases | peers.agreeing(theirs, ours)
