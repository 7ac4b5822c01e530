"""Additions from outside the package, with public names only, and the list for those inside.

A scheme is added in docs/add_a_scheme.md, a backend in tests/engine/test_implementations.py, a task
in tests/experiments/test_tasks.py.
"""

import dataclasses
import sys
import types
from typing import ClassVar

import numpy as np

import posenc_jax as pe
from tests.makers import scheme_pages


@dataclasses.dataclass(frozen=True)
class Doubled(pe.FrequencyMap):
    """A frequency map."""

    extends_context: ClassVar[bool] = False
    factor: float = 2.0

    def __call__(self, frequencies, head_dim, theta):
        return self.factor * frequencies, 1.0


def test_added_frequency_map_composes():
    frequencies, factor = pe.rope_frequencies(8, scaling=(Doubled(3.0), pe.PI(factor=3.0)))
    plain, _ = pe.rope_frequencies(8)
    np.testing.assert_allclose(frequencies, plain)
    assert factor == 1.0


def test_the_list_of_missing_parts_is_complete(monkeypatch):
    path = "posenc_jax.schemes.bias.toy"
    module = types.ModuleType(path, "Toy: https://arxiv.org/abs/2601.00001")
    monkeypatch.setitem(sys.modules, path, module)
    toy = type("Toy", (pe.NoPE,), {"name": "toy", "__module__": path})
    assert scheme_pages.missing(toy) == [
        f"posenc_jax/__init__.py: from {path} import Toy as Toy",
        "posenc_jax/__init__.py: Toy in the docstring",
        "tests/schemes/bias/test_toy.py: a test with numbers from outside",
        "docs/_ext/scheme_use.py: when to take it, in WHEN",
        "python -m tests.makers scheme_pages toy writes its row in docs/schemes.md, its row in "
        "docs/decoding.csv, its picture in docs/gallery.png",
    ]
