"""RoPE against `x + 1` on the same arrays, and its tables against `jnp.cos` and `jnp.sin`.

Adding one reads and writes each element once, so no rotation can be faster. Forward+backward is
measured against `x + 1, y + 1`. Tables are computed inside the rotation, or passed to it, as by
layers that share them. "concatenating" is the usual way in JAX: cosines and sines of the positions,
halves rotated and concatenated. The table alone is measured near position 1 000 000, with its error
against float64.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from experiments.bench.cases import DTYPES, add_common_arguments
from experiments.bench.timing import show, side_by_side

SHAPES = ((4, 2048, 16, 64), (1, 8192, 8, 128))
TABLE = (8192, 64)
FAR = 1_000_000


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
                out.append(_record(timings, shape=shape, dtype=name, what=passes))
    timings, errors = table(options.theta, timed)
    show(f"cos and sin {TABLE} at positions from {FAR}", timings)
    for name, error in errors.items():
        print(f"  greatest error of {name}: {error:.1e}")
    out.append(_record(timings, shape=TABLE, dtype="float32", what="table", errors=errors))
    return {"results": out}


def rotations(length: int, dim: int, theta: float) -> dict:
    """Returns the rotations to measure, by name."""
    positions = jnp.arange(length, dtype=jnp.int32)
    layouts = ("half", "interleaved")
    plain = {
        layout: functools.partial(pe.apply_rope, positions=positions, theta=theta, layout=layout)
        for layout in layouts
    }
    cos, sin = pe.cos_sin(positions[None], pe.rope_frequencies(dim, theta)[0])
    with_tables = {
        f"{layout}, tables given": functools.partial(
            pe.apply_rotation, cos=cos, sin=sin, layout=layout
        )
        for layout in layouts
    }
    return plain | with_tables | {"concatenating": functools.partial(concatenating, theta=theta)}


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
    functions |= {name: both(f) for name, f in rotations(shape[1], shape[3], theta).items()}
    arrays = [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(count)]
    return {name: functools.partial(jax.jit(f), *arrays) for name, f in functions.items()}


def table(theta: float, timed):
    """Returns timings of a table near a far position, and the greatest errors."""
    length, pairs = TABLE
    positions = jnp.arange(FAR, FAR + length, dtype=jnp.int32)
    frequencies, _ = pe.rope_frequencies(2 * pairs, theta)
    narrow = jnp.asarray(frequencies, jnp.float32)

    def plain(positions):
        angles = positions[:, None].astype(jnp.float32) * narrow
        return jnp.cos(angles), jnp.sin(angles)

    makers = {
        "jnp.cos and jnp.sin": jax.jit(plain),
        "posenc_jax.cos_sin": jax.jit(lambda positions: pe.cos_sin(positions, frequencies)),
    }
    timings = timed({name: functools.partial(f, positions) for name, f in makers.items()}, inner=10)
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    true = np.cos(angles), np.sin(angles)
    errors = {
        name: max(
            float(np.abs(np.asarray(a, np.float64) - b).max())
            for a, b in zip(f(positions), true, strict=True)
        )
        for name, f in makers.items()
    }
    return timings, errors


def _record(timings, **facts) -> dict:
    return {**facts, "timings": [dataclasses.asdict(timing) for timing in timings]}
