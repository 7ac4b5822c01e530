"""Additions from outside the package, with public names only, and the list for those inside.

A backend is added in tests/engine/test_implementations.py, a task in
tests/experiments/test_tasks.py.
"""

import dataclasses
import sys
import types
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc_jax as pe
from posenc_jax import testing
from tests.makers import scheme_pages
from tests.support import slow


def logarithm(shared, slope, q, k):
    return -slope * jnp.log1p(jnp.abs(q - k).astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class LogDistance(pe.Scheme):
    """A scheme: -slope * log(1 + |q - k|) added to the logits, slopes learned."""

    num_heads: int

    @property
    def traits(self):
        return pe.Traits(relative=True)

    def init(self, key):
        return {"slopes": jnp.ones(self.num_heads, jnp.float32)}

    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(logarithm, heads=params["slopes"], relative=True)


@dataclasses.dataclass(frozen=True)
class LearnedSpeed(pe.Rotary):
    """A rotary scheme: RoPE whose frequencies have a learned factor."""

    theta: float = 100.0

    def init(self, key):
        return {"speed": jnp.ones(len(self.base_frequencies), jnp.float32)}

    def cos_sin(self, params, coordinates):
        frequencies = jnp.asarray(self.base_frequencies, jnp.float32) * params["speed"]
        angles = coordinates.astype(jnp.float32)[..., None] * frequencies[None, None]
        return jnp.cos(angles), jnp.sin(angles)


@dataclasses.dataclass(frozen=True)
class Doubled(pe.FrequencyMap):
    """A frequency map."""

    extends_context: ClassVar[bool] = False
    factor: float = 2.0

    def __call__(self, frequencies, head_dim, theta):
        return self.factor * frequencies, 1.0


@slow
def test_added_schemes_run_in_a_layer_and_in_a_chain():
    """A chain of both has the properties of a scheme; test_testing.py has one with features."""
    scheme = pe.chain(LogDistance(2), LearnedSpeed(8))
    case = testing.Case(scheme)
    case.implementations = ("reference",)
    for name in ("every_parameter_has_a_gradient", "left_padded_rows_equal_rows_alone"):
        testing.PROPERTIES[name].check(case)
    layer = pe.nnx.Attention(16, 2, position=scheme, rngs=nnx.Rngs(0))
    assert jax.eval_shape(layer, jnp.zeros((1, 5, 16))).shape == (1, 5, 16)
    assert len(jax.tree.leaves(nnx.state(layer.encoding, nnx.Param))) == 2


def test_added_frequency_map_composes():
    frequencies, factor = pe.rope_frequencies(8, scaling=(Doubled(3.0), pe.PI(factor=3.0)))
    plain, _ = pe.rope_frequencies(8)
    np.testing.assert_allclose(frequencies, plain)
    assert factor == 1.0


def test_the_list_of_missing_parts_is_complete(monkeypatch):
    path = "posenc_jax.schemes.bias.toy"
    module = types.ModuleType(path, "Toy: https://arxiv.org/abs/2601.00001")
    monkeypatch.setitem(sys.modules, path, module)
    toy = type("Toy", (LogDistance,), {"name": "toy", "__module__": path})
    assert scheme_pages.missing(toy) == [
        f"posenc_jax/__init__.py: from {path} import Toy as Toy",
        "posenc_jax/__init__.py: Toy in the docstring",
        "tests/schemes/bias/test_toy.py: a test with numbers from outside",
        "docs/_ext/scheme_use.py: when to take it, in WHEN",
        "python -m tests.makers scheme_pages toy writes its row in docs/schemes.md, its row in "
        "docs/decoding.csv, its picture in docs/gallery.png",
    ]
