"""Random weights that depend on names and shapes alone, so that they need not be stored."""

import zlib

import numpy as np


def random_state(shapes, seed=0):
    """{name: float32 array} of a state dict, from {name: shape}.

    `RandomState` draws the same numbers in every version of NumPy.
    """
    return {name: _draw(name, tuple(shape), seed) for name, shape in shapes.items()}


def _draw(name, shape, seed):
    draws = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    x = draws.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        return 0.2 * x + (0.0 if name.endswith("bias") else 1.0)
    gain = 1.0 if "emb" in name or "wte" in name else 2.2
    if name.endswith(".q.weight"):  # T5's, which initialises them so and has no factor on q . k.
        gain /= 8**0.5
    return x * np.float32(gain * shape[-1] ** -0.5)
