"""RoPE against `x + 1` on the same arrays.

Adding one reads and writes each element once, so no rotation can be faster. Forward+backward is
measured against `x + 1, y + 1`. "concatenating" is the usual way in JAX: cosines and sines of the
positions, halves rotated and concatenated.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import posenc_jax as pe
from experiments.bench.cases import DTYPES, add_common_arguments
from experiments.bench.timing import show, side_by_side

SHAPES = ((4, 2048, 16, 64), (1, 8192, 8, 128))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's settings."""
    add_common_arguments(parser, seconds=6.0)
    parser.add_argument("--theta", type=float, default=10000.0, help="base (default: 10000)")


def run(options: argparse.Namespace) -> dict:
    """Measures everything; returns the numbers."""
    timed = functools.partial(side_by_side, rounds=options.rounds, seconds=options.seconds)
    out = []
    for shape in SHAPES:
        for name, dtype in DTYPES.items():
            title = f"{shape} {name}"
            for backward, passes in enumerate(("forward", "forward+backward")):
                cases = all_cases(shape, dtype, options.theta, bool(backward))
                timings = timed(cases)
                show(f"rope {title} {passes}", timings)
                rows = [dataclasses.asdict(timing) for timing in timings]
                out.append({"shape": shape, "dtype": name, "what": passes, "timings": rows})
    return {"results": out}


def rotations(length: int, theta: float) -> dict:
    """Returns the rotations to measure, by name."""
    positions = jnp.arange(length, dtype=jnp.int32)
    plain = {
        layout: functools.partial(pe.apply_rope, positions=positions, theta=theta, layout=layout)
        for layout in ("half", "interleaved")
    }
    return plain | {"concatenating": functools.partial(concatenating, theta=theta)}


def concatenating(x: jax.Array, theta: float) -> jax.Array:
    """Returns x [B, T, N, H] rotated, in the layout "half"."""
    half = x.shape[-1] // 2
    positions = jnp.arange(x.shape[1], dtype=jnp.int32).astype(jnp.float32)
    steps = theta ** -(jnp.arange(half, dtype=jnp.int32).astype(jnp.float32) / half)
    angles = (positions[:, None] * steps[None])[None, :, None]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def both(rotate: Callable) -> Callable:
    """Returns a function of x, or of x and a cotangent."""

    def call(x, *dy):
        if not dy:
            return rotate(x)
        y, pull = jax.vjp(rotate, x)
        return y, *pull(*dy)

    return call


def all_cases(shape, dtype, theta: float, backward: bool) -> dict:
    """Returns the cases, forward or forward and backward, the reference first."""
    unit, count = jnp.asarray(1, dtype), 2 if backward else 1
    functions = {"x + 1, y + 1" if backward else "x + 1": lambda *xs: [x + unit for x in xs]}
    functions |= {name: both(f) for name, f in rotations(shape[1], theta).items()}
    arrays = [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(count)]
    return {name: functools.partial(jax.jit(f), *arrays) for name, f in functions.items()}
