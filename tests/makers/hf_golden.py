"""Makes the golden files: python -m tests.makers hf_golden [NAME ...], with the group parity."""

import pathlib

import numpy as np
import torch

from tests.makers import hf_mixed, hf_others, hf_rotary
from tests.makers.hf_record import about, in_double

FOLDER = pathlib.Path(__file__).parents[1] / "hf" / "golden"
CASES = hf_rotary.CASES | hf_mixed.CASES | hf_others.CASES


def make(name):
    """{"about": json, array name: array} of a case."""
    with in_double(), torch.no_grad():
        config, layer, is_causal, arrays = CASES[name]()
    return {"about": about(config, layer=layer, is_causal=is_causal)} | arrays


def main(argv):
    for name in argv or CASES:
        made = make(name)
        np.savez_compressed(FOLDER / f"{name}.npz", **made)
        print(name, {n: x.shape for n, x in made.items()}, flush=True)
