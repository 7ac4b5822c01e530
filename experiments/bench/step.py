"""A training step of the text model with each scheme, against the same without positions.

Each measurement is one compiled call of several optimiser steps, as training makes them; the
schemes take turns. The text is random bytes, which cost the same. Compile seconds hold making the
parameters, tracing and compiling; the first scheme pays for what all need.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.clock import show, side_by_side

CONFIG = Path("configs/compare.toml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's settings."""
    parser.add_argument("--config", type=Path, default=CONFIG, help=f"default: {CONFIG}")
    parser.add_argument("--schemes", help="names with commas between (default: the config's)")
    parser.add_argument("--calls", type=int, default=15, help="rounds (default: 15)")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="go on that long beyond the rounds (default: 0)"
    )
    parser.add_argument("--steps", type=int, default=5, help="optimiser steps a call (default: 5)")


def run(options: argparse.Namespace) -> dict:
    """Measures every scheme; returns the numbers."""
    from experiments.config import load

    experiment = load(options.config)
    names = options.schemes.split(",") if options.schemes else list(experiment.schemes)
    names = ["none", *(name for name in names if name != "none")]
    recipe = dataclasses.replace(experiment.text.train, steps_per_call=options.steps)
    task = dataclasses.replace(experiment.text, train=recipe)
    experiment = dataclasses.replace(experiment, text=task)
    compiled, cases = {}, {}
    for name in names:
        cases[name], compiled[name] = prepare(task, experiment.scheme("text", name))
    timings = side_by_side(cases, rounds=options.calls, seconds=options.seconds)
    sizes = (
        f"{task.model.num_layers} layers, width {task.model.model_dim}, "
        f"batch {recipe.batch}, length {task.train_length}"
    )
    show(f"{options.steps} training steps: {sizes}", timings)
    print(f"\n  {'':34s} {'steps/s':>9s} {'compile s':>10s}")
    for timing in timings:
        rate = options.steps / timing.least
        print(f"  {timing.name:34s} {rate:9.1f} {compiled[timing.name]:10.1f}")
    rows = [
        dataclasses.asdict(timing)
        | {"steps_per_second": options.steps / timing.least}
        | {"compile_seconds": compiled[timing.name]}
        for timing in timings
    ]
    return {"sizes": sizes, "steps_per_call": options.steps, "results": rows}


def prepare(task, scheme):
    """Returns a function that makes some training steps, and the seconds until it could."""
    from experiments.model import initialize, structure
    from experiments.train import advance, make_optimizer, seed_keys

    data = jnp.asarray(np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8))
    began = time.perf_counter()
    graphdef = structure(task.model, scheme, task.vocab_size)
    params = initialize(task.model, scheme, task.vocab_size, seed_keys([0], "parameters"))
    state = params, jax.vmap(make_optimizer(task.train).init)(params)
    keys, first = seed_keys([0], "data"), jnp.int32(0)
    call = advance.lower(state, keys, first, data, graphdef=graphdef, task=task).compile()
    seconds = time.perf_counter() - began

    def steps():
        nonlocal state
        state, losses = call(state, keys, first, data)
        return losses

    return steps, seconds
