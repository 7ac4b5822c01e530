"""A training step of a task's model with each scheme, against a model without positions.

Each measurement is one compiled call of several optimiser steps, as in training; the schemes
alternate. Compile seconds include initialisation and tracing, and for the first scheme the
compilation of shared functions.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import jax.numpy as jnp

from experiments.bench.cases import add_common_arguments, positive
from experiments.bench.timing import show, side_by_side
from experiments.settings.config_io import names

CONFIG = Path("configs/compare.toml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's settings."""
    parser.add_argument("--config", type=Path, default=CONFIG, help=f"default: {CONFIG}")
    parser.add_argument("--task", default="text", help="a task of the file (default: text)")
    parser.add_argument("--schemes", type=names, metavar="A,B", help="default: all of the file")
    parser.add_argument(
        "--steps", type=positive, default=5, help="optimiser steps a call (default: 5)"
    )
    add_common_arguments(parser, seconds=0.0)


def run(options: argparse.Namespace) -> dict:
    """Measures every scheme; returns the numbers."""
    from experiments.runs.experiment import load

    experiment = load(options.config, ["--tasks", options.task])
    schemes = ["none", *(s for s in options.schemes or experiment.schemes if s != "none")]
    (task,) = experiment.tasks.values()
    train = dataclasses.replace(task.train, steps_per_call=options.steps)
    task = dataclasses.replace(task, train=train)
    data = task.load().train
    compiled, cases = {}, {}
    for name in schemes:
        position = experiment.scheme(task.name, name)
        cases[name], compiled[name] = prepare(task, position, data)
    timings = side_by_side(cases, rounds=options.rounds, seconds=options.seconds)
    sizes = (
        f"{task.model.num_layers} layers, width {task.model.model_dim}, "
        f"batch {train.batch}, length {task.train_length}"
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


def prepare(task, position, data):
    """Returns a function of some training steps, and the seconds of its preparation.

    Args:
      task, position: the model and the batch.
      data: `Data.train` of the task.
    """
    from experiments.models.model import initialize, seed_keys
    from experiments.training.train import compiled, new_state, rates_of

    began = time.perf_counter()
    call = compiled(task, position, 1, data)
    params = initialize(task.model, position, task.vocab_size, seed_keys([0], "parameters"))
    state = new_state(params, task)
    keys, rates, first = seed_keys([0], "data"), rates_of(task, 1), jnp.int32(0)
    seconds = time.perf_counter() - began

    def steps():
        nonlocal state
        state, losses = call(state, keys, rates, first, data)
        return losses

    return steps, seconds
