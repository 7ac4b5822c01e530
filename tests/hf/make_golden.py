"""Makes the golden files: python tests/hf/make_golden.py [NAME ...], with the group parity."""

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import make_mixed
import make_others
import make_rotary
import torch
from make_record import about, in_double

FOLDER = pathlib.Path(__file__).with_name("golden")
CASES = {case.__name__: case for case in make_rotary.CASES + make_mixed.CASES + make_others.CASES}


def make(name):
    """{"about": json, array name: array} of a case."""
    with in_double(), torch.no_grad():
        config, layer, is_causal, arrays = CASES[name]()
    return {"about": about(config, layer=layer, is_causal=is_causal)} | arrays


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        made = make(name)
        np.savez_compressed(FOLDER / f"{name}.npz", **made)
        print(name, {n: x.shape for n, x in made.items()}, flush=True)
