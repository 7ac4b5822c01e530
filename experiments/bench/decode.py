"""One new token, or a chunk of tokens, attending to a cache of keys and values, with each scheme.

The cache has room for the new tokens only, and is donated: every call writes the same slots. The
reference is attention without positions. `jax.nn` attends to a cache of the same layout, with slots
masked by position and T5's bias as a row.
"""

import argparse
import dataclasses

import jax

import posenc_jax as pe
from experiments.bench import peers
from experiments.bench.cases import (
    DTYPES,
    add_common_arguments,
    make_arguments,
    named_schemes,
    positives,
    sizes_of,
)
from experiments.bench.peers import compile_program
from experiments.bench.timing import show, side_by_side

SCHEMES = "rope,t5,alibi,fire,shaw"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's settings."""
    slots = "--slots", (1024, 2048, 4096, 8192, 16384, 32768), "sizes of the cache"
    add_common_arguments(parser, sizes=slots, schemes=SCHEMES, seconds=4.0)
    parser.add_argument(
        "--tokens", type=positives, default=(1, 64), help="new tokens (default: 1,64)"
    )


def run(options: argparse.Namespace) -> dict:
    """Measures every size of the cache and number of new tokens; returns the numbers."""
    results = []
    for tokens in options.tokens:
        for slots in options.slots:
            print(f"\ncompiling {tokens} after {slots - tokens} ...", flush=True)
            cases = all_cases(tokens, slots, options)
            timings = side_by_side(
                {name: case.call for name, case in cases.items()},
                rounds=options.rounds,
                seconds=options.seconds,
                inner=max(1, 16384 // (slots * tokens)),
            )
            show(f"decode: {_say(tokens)} after {slots - tokens} in the cache", timings)
            rows = [dataclasses.asdict(t) | dict(cases[t.name].facts) for t in timings]
            results.append({"tokens": tokens, "slots": slots, "rows": rows})
    shape = {"batch": options.batch, "heads": options.heads, "head_dim": options.head_dim}
    return {**shape, "dtype": options.dtype, "results": results}


def _say(tokens: int) -> str:
    return "one token" if tokens == 1 else f"{tokens} tokens at once"


def all_cases(tokens: int, slots: int, options: argparse.Namespace) -> dict[str, peers.Case]:
    """Returns the cases of this library and of `jax.nn` by name."""
    shape = options.batch, slots, options.heads, options.head_dim
    dtype = DTYPES[options.dtype]
    sizes = sizes_of(options.heads, options.head_dim, slots)
    schemes = named_schemes(options.schemes, sizes)
    cases = {
        name: our_case(scheme, make_arguments(scheme, shape, dtype), tokens)
        for name, scheme in schemes.items()
    }
    t5 = pe.T5(num_heads=options.heads)
    arguments = make_arguments(t5, shape, dtype)
    ours = {"none": cases["none"], "t5": our_case(t5, arguments, tokens)}
    return cases | peers.agreeing(peers.with_cache(arguments, tokens), ours)


def our_case(
    scheme: pe.Scheme, arguments: tuple, tokens: int, implementation: str | None = None
) -> peers.Case:
    """Returns attention of the last `tokens` tokens to a cache of the earlier ones.

    Earlier tokens are written by the default implementation.
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
    scale = dim**-0.5
    first, last = slice(None, slots - tokens), slice(slots - tokens, None)

    def part(slots: slice) -> tuple:
        return tuple(None if y is None else y[:, slots] for y in (q, k, v, x))

    def attend(cache, params, q, k, v, x, implementation=None):
        return pe.scheme_attention(
            scheme,
            params,
            q,
            k,
            v,
            x=x,
            cache=cache,
            scale=scale,
            is_causal=True,
            implementation=implementation,
        )

    def step(cache, *arguments):
        out, after = attend(cache, *arguments, implementation)
        # With the old counters and state, the next call writes the same slots again.
        before = {"length": cache.length, "next_positions": cache.next_positions}
        return out, dataclasses.replace(after, state=cache.state, **before)

    fill = jax.jit(lambda *arguments: attend(*arguments)[1], donate_argnums=0)
    cache = fill(cache, params, *part(first))
    fresh = params, *part(last)
    program, facts = compile_program(step, (cache, *fresh), donate_argnums=0)

    def call():
        nonlocal cache
        out, cache = program(cache, *fresh)
        return out

    return peers.Case(call, facts)
