"""RoPE against `x + 1` on the same arrays, and its tables against `jnp.cos` and `jnp.sin`.

Adding one reads and writes each element once, so no rotation can be faster. Forward+backward is
measured against `x + 1, y + 1`. Tables are computed inside the rotation, or passed to it, as by
layers that share them. The table alone is measured near position 1 000 000, with its error against
float64. `--peers` adds the usual way in JAX, equinox, Hugging Face's transformers and
rotary-embedding-torch; a library whose numbers differ from ours is left out.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from experiments.bench.cases import DTYPES, add_common_arguments
from experiments.bench.peers import Case, agreeing
from experiments.bench.rope_peers import both, rope_peers
from experiments.bench.timing import show, side_by_side

SHAPES = ((4, 2048, 16, 64), (1, 8192, 8, 128))
TABLE = (8192, 64)
FAR = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's settings."""
    add_common_arguments(parser, peers=True, seconds=6.0)
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
                if options.peers:
                    arrays = arrays_of(shape, dtype)[: 1 + backward]
                    cases |= _peers(cases, arrays, options.theta)
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
    return plain | with_tables


def arrays_of(shape, dtype) -> list[jax.Array]:
    """Returns the array to rotate, and the cotangent of the result."""
    return [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(2)]


def _peers(cases: dict, arrays: list[jax.Array], theta: float) -> dict:
    """Returns the rotations of other libraries whose numbers equal ours."""
    # Angles in float32 are off by some 1e-3 at position 8192.
    cases_of_peers = agreeing(
        rope_peers(arrays, theta), lambda like: Case(cases[like]), tolerance=3e-3
    )
    return {name: case.call for name, case in cases_of_peers.items()}


def all_cases(shape, dtype, theta: float, backward: bool) -> dict:
    """Returns the cases, forward or forward and backward, the reference first."""
    unit, count = jnp.asarray(1, dtype), 2 if backward else 1
    functions = {"x + 1, y + 1" if backward else "x + 1": lambda *xs: [x + unit for x in xs]}
    functions |= {name: both(f) for name, f in rotations(shape[1], shape[3], theta).items()}
    arrays = arrays_of(shape, dtype)[:count]
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
