"""What every scheme keeps, whatever it does. Schemes come from the export list.

Most properties are those of `posenc_jax.testing`, which users run on schemes of their own.
Below are those that only this repository needs.
"""

import dataclasses
import functools
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posenc_jax as pe
from posenc_jax import testing
from posenc_jax.testing.case import BATCH, LENGTH
from posenc_jax.testing.properties import mirrored_change
from tests.support import KINDS, build, close, make_batch, output, slow

ONE_OF_EACH = {
    "learned", "t5", "shaw", "fox", "path", "short_conv", "rope", "xpos", "vo_rope",
}  # fmt: skip
"""Schemes on which everything is measured; of the others, what code of their own could break."""
IN_TILES = {"value", "rules", "attend", "output"}
IN_CACHES = {"mix", "features", "attend"}
"""Hooks that act within tiles, and hooks that see other tokens or their states."""
OF_TILES = {
    "later_tokens_have_no_influence",
    "tiles_equal_the_reference",
    "tiles_equal_the_reference_padded",
    "tiles_equal_the_reference_packed",
    "queries_without_keys_give_zeros",
    "nan_in_padding_stays_there",
    "nan_in_a_row_stays_in_that_row",
}
OF_CACHES = {
    "prompt_then_steps_equal_the_whole",
    "steps_from_an_empty_cache_equal_the_whole",
    "steps_after_left_padding_equal_rows_alone",
    "steps_after_right_padding_equal_rows_alone",
    "nan_in_the_padding_of_a_prompt_stays_there",
}
"""tests/makers/serving.py has caches of all schemes."""
OF_ONE = {
    "tiles_equal_the_reference_in_an_encoder",
    "ring_cache_equals_the_whole",
    "coordinates_travel_with_the_cache",
    "positions_default_to_counting",
    "second_call_does_not_retrace",
    "bfloat16_is_near_float32",
}
"""tests/modules/test_param_dtypes.py reads the dtypes of every scheme in its traced program."""
EAGER = {"rope", "t5", "fox", "learned"}
"""An operation that is not compiled with others costs as much as a small program."""
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))


def kind_of(scheme):
    return next(name for name, cls in pe.SCHEMES.items() if cls is type(scheme))


def hooks_of(kind):
    cls = pe.SCHEMES[kind]
    return {n for n in IN_TILES | IN_CACHES if getattr(cls, n) is not getattr(pe.Scheme, n)}


def shapes_of(scheme):
    return jax.tree.leaves(jax.eval_shape(scheme.init, jax.random.key(0)))


def is_quick(kind, name):
    """Whether a property of a scheme is measured by default."""
    if name == "jit_equals_eager":
        return kind in EAGER
    if kind in ONE_OF_EACH:
        return True
    in_tiles = hooks_of(kind) & (IN_TILES | {"features"})
    return not (
        name in OF_ONE
        or (
            name == "every_parameter_has_a_gradient"
            and not (in_tiles or shapes_of(build(pe.SCHEMES[kind])))
        )
        or (name in OF_TILES and not in_tiles)
        or (name in OF_CACHES and not hooks_of(kind) & IN_CACHES)
    )


def for_schemes(are_quick, *others):
    """Returns cases of all schemes; cases of schemes for which `are_quick` is false are slow."""
    return [
        pytest.param(kind, *other, marks=() if are_quick(kind, *other) else slow)
        for kind in pe.SCHEMES
        for other in itertools.product(*others)
    ]


@pytest.fixture(scope="session")
def case(scheme):
    """All properties of a scheme share what it compiles."""
    case = testing.Case(scheme)
    if not is_quick(kind_of(scheme), "tiles_equal_the_reference"):
        case.implementations = ("reference",)
    return case


@pytest.mark.parametrize(
    ("scheme", "name"),
    for_schemes(is_quick, testing.PROPERTIES),
    indirect=["scheme"],
    scope="session",
)
def test_property(case, name):
    testing.PROPERTIES[name].check(case)


def spread(case):
    """A batch for eight devices, on an explicit mesh, and the program for it."""
    x = np.random.default_rng(0).normal(size=(8, LENGTH, case.model_dim)).astype("f4")
    sharding = NamedSharding(MESH, PartitionSpec("data"))
    run = jax.jit(functools.partial(case.model, case.scheme, implementation="reference"))
    return x, sharding, run


def test_sharding_over_eight_devices_is_kept(case):
    """Shardings on an explicit mesh are checked while tracing."""
    with jax.set_mesh(MESH):
        x, sharding, run = spread(case)
        sharded = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        out, _ = jax.eval_shape(run, case.params, case.weights, sharded)
    assert out.sharding.spec[0] == "data"


@pytest.mark.parametrize("scheme", for_schemes(EAGER.__contains__), indirect=True, scope="session")
def test_eight_devices_give_the_same_numbers(case):
    with jax.set_mesh(MESH):
        x, sharding, run = spread(case)
        out, _ = run(case.params, case.weights, jax.device_put(x, sharding))
    assert out.sharding.spec[0] == "data"
    pairs = np.split(x, 8 // BATCH)  # The properties have compiled a batch of this size.
    close(out, np.concatenate([case.run(pair)[0] for pair in pairs]), 1e-5)


@pytest.mark.parametrize("scheme", for_schemes(hooks_of), indirect=True, scope="session")
@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0)])
def test_empty_batches_and_sequences(scheme, batch, length):
    """Traced, with gradients: there is nothing to compute."""
    tokens = make_batch(batch, length)
    params = scheme.init(jax.random.key(0))

    def total(params):
        out = output(scheme, params, tokens)
        assert out.shape[:2] == (batch, length)
        return out.sum()

    assert jax.eval_shape(jax.grad(total), params) == jax.eval_shape(lambda: params)


@pytest.mark.parametrize(
    "scheme", for_schemes(lambda kind: "rules" in hooks_of(kind)), indirect=True, scope="session"
)
def test_the_traits_say_which_schemes_tell_past_from_future(case):
    change = mirrored_change(case)
    assert change is None or (change < 2e-5) == case.scheme.traits.mirrored


def test_settings_are_documented_and_the_paper_is_cited(scheme):
    text = type(scheme).__doc__
    for field in dataclasses.fields(scheme):
        assert re.search(rf"^ *(\w+, )*{field.name}(, \w+)*:", text, re.M), field.name
    assert "https://arxiv.org/abs/" in sys.modules[type(scheme).__module__].__doc__


def test_unknown_settings_are_refused(scheme):
    with pytest.raises(TypeError):
        build(type(scheme), wavelength_of_nothing=3)


TRANSFORMED = ["fourier", "t5", "short_conv"]


@pytest.fixture(
    params=[
        pytest.param(k, marks=() if k in TRANSFORMED else slow)
        for k in sorted({*KINDS, *TRANSFORMED})
    ]
)
def one_of_a_kind(request):
    """Schemes that a model treats alike are the same to transformations of a model."""
    return build(pe.SCHEMES[request.param])


def test_vmap_over_the_batch(one_of_a_kind, tokens):
    scheme = one_of_a_kind
    params = scheme.init(jax.random.key(7))
    one = jax.vmap(lambda t: output(scheme, params, t))  # Arrays without a batch axis.
    close(one(tokens), output(scheme, params, tokens), 1e-5)


def test_remat_and_scan_over_layers(one_of_a_kind, tokens):
    scheme = one_of_a_kind
    stacked = jax.vmap(scheme.init)(jax.random.split(jax.random.key(0), 3))

    def layer(x, params):
        moved = dataclasses.replace(tokens, q=tokens.q + x)
        return x + output(scheme, params, moved), None

    def deep(x, layer):
        return jax.lax.scan(layer, x, stacked, length=3)[0]

    @jax.jit
    def slopes(x):
        return [jax.value_and_grad(lambda x, f=f: (deep(x, f) ** 2).sum())(x) for f in layers]

    layers = layer, jax.checkpoint(layer)
    for a, b in zip(*slopes(jnp.zeros_like(tokens.q)), strict=True):
        close(a, b, 1e-5 * np.abs(a).max())
