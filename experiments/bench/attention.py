"""Attention with each scheme against attention without positions, and against other libraries.

Attention is causal, with one logit scale for all cases; the backward pass has the gradients of all
learned arrays. Also prints the temporary memory of the compiled program and the seconds of
compiling it. `jax.nn` takes T5's bias as a matrix. `--peers` adds torch's SDPA and FlexAttention
and tokamax, if installed. A library whose numbers differ from ours is left out. All lengths take
some minutes.
"""

import argparse
import dataclasses
import functools

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posenc_jax as pe
from experiments.bench import peers
from experiments.bench.cases import (
    DTYPES,
    add_common_arguments,
    attend_with,
    make_arguments,
    named_schemes,
    positive,
    sizes_of,
    token_orders,
)
from experiments.bench.growth_plot import Panel, growth_plot
from experiments.bench.timing import show, side_by_side

TINY = ((32, 128, 4, 32), (16, 256, 4, 32), (8, 512, 4, 32))
SCHEMES = "t5,alibi,shaw:values=false"
"""Shaw has vectors on the keys alone, as in most models."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's settings."""
    lengths = "--lengths", (512, 1024, 2048, 4096, 8192), "T"
    add_common_arguments(parser, sizes=lengths, schemes=SCHEMES, peers=True, seconds=10.0)
    parser.add_argument("--tiny", action="store_true", help="the shapes of tiny models instead")
    parser.add_argument("--forward", action="store_true", help="without the backward pass")
    parser.add_argument(
        "--naive-to",
        type=int,
        default=4096,
        help="longest T for arrays of T x S; 0 leaves them out (default: 4096)",
    )
    parser.add_argument(
        "--positions",
        action="store_true",
        help="add cases with given positions: in order, shuffled by 64, four packed texts",
    )
    parser.add_argument(
        "--devices",
        type=positive,
        default=1,
        help="add heads sharded over that many host devices, with the memory of each",
    )


def run(options: argparse.Namespace) -> dict:
    """Measures every shape; returns the numbers."""
    shapes = [(options.batch, n, options.heads, options.head_dim) for n in options.lengths]
    passes = "forward" if options.forward else "forward+backward"
    results = []
    for shape in TINY if options.tiny else shapes:
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
            if case.facts:
                megabytes, seconds = case.facts["megabytes"], case.facts["compile_seconds"]
                print(f"  {name:34s} {megabytes:10.1f} {seconds:10.2f}", flush=True)
        rows = [dataclasses.asdict(t) | dict(cases[t.name].facts) for t in timings]
        results.append({"shape": shape, "dtype": options.dtype, "what": passes, "rows": rows})
    return {"results": results}


def plot(numbers: dict) -> str:
    """Returns time and memory against length as an SVG file's text."""
    results = numbers["results"]
    time: dict[str, dict[int, float]] = {}
    memory: dict[str, dict[int, float]] = {}
    for result in results:
        for row in result["rows"]:
            length = result["shape"][1]
            time.setdefault(row["name"], {})[length] = row["median"] * 1e3
            if "megabytes" in row:
                memory.setdefault(row["name"], {})[length] = row["megabytes"]
    measured = f"{results[0]['what']}, {results[0]['dtype']}"
    return growth_plot(
        [Panel(f"time in ms ({measured})", time), Panel("temporary memory in MB", memory)],
        against="length T",
        title=f"Time and memory of causal attention against length: {measured}",
        dashed=[name for name in time if name.startswith(peers.FOREIGN)],
    )


def all_cases(shape: tuple[int, int, int, int], options: argparse.Namespace) -> dict:
    """Returns the cases by name: ours, the naive form, other libraries."""
    _, length, heads, dim = shape
    backward = not options.forward
    dtype = DTYPES[options.dtype]

    def case(scheme, arguments, **tokens):
        return peers.jax_case(attend_with(scheme, **tokens), arguments, backward)

    cases = {}
    for name, scheme in named_schemes(options.schemes, sizes_of(heads, dim, length)).items():
        arguments = make_arguments(scheme, shape, dtype)
        cases[name] = case(scheme, arguments)
        for order, tokens in token_orders(length).items() if options.positions else ():
            cases[f"{name}, {order}"] = case(scheme, arguments, **tokens)
        if options.devices > 1:
            spread = _over_devices(arguments, options.devices)
            cases[f"{name}, {options.devices} devices"] = case(scheme, spread)
    t5 = pe.T5(num_heads=heads)
    *inputs, params = make_arguments(t5, shape, dtype)
    table = params["table"]
    others = peers.naive(inputs, table, backward) if length <= options.naive_to else {}
    if options.peers:
        others |= peers.attention_peers(inputs, table, backward)

    @functools.cache
    def ours(like: str) -> peers.Case:
        scheme = t5 if like == "t5" else pe.NoPE()
        return case(scheme, make_arguments(scheme, shape, dtype))

    return cases | peers.agreeing(others, ours)


def _over_devices(arguments: tuple, count: int) -> tuple:
    """Shards q, k and v over devices by heads, and replicates the other arrays."""
    devices = jax.devices()[:count]
    mesh = jax.make_mesh((count,), ("heads",), axis_types=(AxisType.Auto,), devices=devices)
    by_head = NamedSharding(mesh, PartitionSpec(None, None, "heads"))
    whole = NamedSharding(mesh, PartitionSpec())
    q, k, v, *others = arguments
    return (*jax.device_put((q, k, v), by_head), *jax.device_put(others, whole))
