"""What every scheme keeps, whatever it does. Schemes come from the export list.

Most properties are those of `posenc_jax.testing`, which users run on schemes of their own.
Below are those that only this repository needs.
"""

import dataclasses
import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import EVERY_CASE, KINDS, build, close, output

import posenc_jax as pe
from posenc_jax import testing
from posenc_jax.testing.case import BATCH, LENGTH


@pytest.fixture(scope="session")
def case(scheme):
    """All properties of a scheme share what it compiles."""
    return testing.Case(scheme)


OF_KINDS = {
    "ring_cache_equals_the_whole",
    "coordinates_travel_with_the_cache",
    "jit_equals_eager",
    "positions_default_to_counting",
}
"""Properties that schemes of a kind share; tests/cache/make_serving.py has caches of all."""
OF_RULES = {"tiles_equal_the_reference_in_an_encoder"}
"""Properties of schemes that act within attention; for the others, of one of each kind."""


@pytest.mark.parametrize("name", testing.PROPERTIES)
def test_property(case, name):
    scheme = case.scheme
    one_of_a_kind = type(scheme) in {pe.SCHEMES[kind] for kind in KINDS}
    has_rules = bool(scheme.acts & (pe.Acts.LOGITS | pe.Acts.VALUES | pe.Acts.ATTENTION))
    applies = name not in OF_KINDS and (name not in OF_RULES or has_rules)
    if not (applies or one_of_a_kind or EVERY_CASE):
        pytest.skip("CASES=all runs it")
    testing.PROPERTIES[name].check(case)


def test_sharded_over_eight_devices_gives_the_same_numbers(case):
    # On an explicit mesh, whose shardings are checked while tracing; numbers need one of a kind.
    x = np.random.default_rng(0).normal(size=(8, LENGTH, case.model_dim)).astype("f4")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spread = NamedSharding(mesh, PartitionSpec("data"))
        run = jax.jit(functools.partial(case.model, case.scheme, implementation="reference"))
        sharded = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread)
        out, _ = jax.eval_shape(run, case.params, case.weights, sharded)
        assert out.sharding.spec[0] == "data"
        if type(case.scheme) not in {pe.SCHEMES[kind] for kind in KINDS} and not EVERY_CASE:
            return
        out, _ = run(case.params, case.weights, jax.device_put(x, spread))
    assert out.sharding.spec[0] == "data"
    pairs = np.split(x, 8 // BATCH)  # The properties have compiled a batch of this size.
    close(out, np.concatenate([case.run(pair)[0] for pair in pairs]), 1e-5)


def test_settings_are_documented_and_the_paper_is_cited(scheme):
    text = type(scheme).__doc__
    for field in dataclasses.fields(scheme):
        assert re.search(rf"^ *(\w+, )*{field.name}(, \w+)*:", text, re.M), field.name
    assert "https://arxiv.org/abs/" in sys.modules[type(scheme).__module__].__doc__


def test_unknown_settings_are_refused(scheme):
    with pytest.raises(TypeError):
        build(type(scheme), wavelength_of_nothing=3)


@pytest.fixture(params=KINDS)
def one_of_a_kind(request):
    """Schemes that a model treats alike are the same to transformations of a model."""
    return build(pe.SCHEMES[request.param])


def test_vmap_over_the_batch(one_of_a_kind, tokens):
    scheme = one_of_a_kind
    params = scheme.init(jax.random.key(7))
    one = jax.vmap(lambda t: output(scheme, params, t.map(lambda a: a[None]))[0])
    close(one(tokens), output(scheme, params, tokens), 1e-5)


def test_remat_and_scan_over_layers(one_of_a_kind, tokens):
    scheme = one_of_a_kind
    stacked = jax.vmap(scheme.init)(jax.random.split(jax.random.key(0), 3))

    def layer(x, params):
        moved = dataclasses.replace(tokens, q=tokens.q + x)
        return x + output(scheme, params, moved), None

    def deep(x, layer):
        return jax.lax.scan(layer, x, stacked, length=3)[0]

    zero = jnp.zeros_like(tokens.q)
    plain, again = (
        jax.jit(jax.value_and_grad(lambda x, f=f: (deep(x, f) ** 2).sum()))(zero)
        for f in (layer, jax.checkpoint(layer))
    )
    for a, b in zip(plain, again, strict=True):
        close(a, b, 1e-5 * np.abs(a).max())
