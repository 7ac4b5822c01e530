"""What every scheme keeps, whatever it does. Schemes come from the export list.

Most properties are those of `posenc_jax.testing`, which users run on schemes of their own; those
that only this repository needs are below. Cases in which a scheme has no code of its own are slow.
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

import posenc_jax as pe
from posenc_jax import testing
from posenc_jax.testing.case import BATCH, LENGTH
from posenc_jax.testing.properties import mirrored_change
from tests.support import (
    KINDS,
    build,
    close,
    is_contrib,
    make_batch,
    output,
    parameters,
    slow,
    slow_but,
)

# Windows are large enough for 130 tokens, the most that `posenc_jax.testing` uses, or small enough
# that some keys are far.
SETTINGS = {
    "swin": {"window": (16, 16)},
    "swin_v2": {"window": (16, 16), "width": 16},
    "rerope": {"window": 7, "leak": 1.0, "restart": 2},
    "self_extend": {"window": 5, "group": 3},
    "dual_chunk": {"chunk": 6, "local": 2},
}
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
WHOLE = {"learned", "t5", "rope"}
"""One scheme of each place: on the embedding, in the rules, on queries and keys."""
OF_SETTINGS = {
    *("hashable_and_equal_by_value", "parameters_are_deterministic_and_float32"),
    "declared_axes_have_their_sizes",
}
"""Properties of `contrib` that are measured by default."""
ALONE = {
    "jit_equals_eager": {"fox"},
    "eight_devices_give_the_same_numbers": {"fox"},
    "positions_default_to_counting": {"learned", "fox"},
    "bfloat16_is_near_float32": {"learned", "t5", "fox", "rope"},
    "tiles_equal_the_reference_in_an_encoder": {"t5", "shaw"},
    "ring_cache_equals_the_whole": set(),
    "rejected_drafts_leave_no_trace": {"fox", "rope"},
    "coordinates_do_not_scale_q_and_k": {"rope"},
    "fractions_of_coordinates_change_the_output": {"learned", "t5", "rope"},
    "empty_batches_and_sequences": {"learned", "t5", "fox", "path", "rope"},
}
"""The schemes of properties that need programs of their own, or many operations."""
IN_TILES = {"rules", "attend"}
OF_TOKENS = IN_TILES | {"mix", "features"}
IN_CACHES = {"mix", "features", "attend"}
"""Hooks that act within tiles, and hooks that see other tokens or their states."""
STATELESS = {"cope", "grape_a", "repo", "shaw"}
"""Features of a token that depend on it alone: what a prompt shows, single steps do."""
WITHOUT_PROMISES = {"cope", "fire", "grape_a", "stick_breaking"}
"""Their rules promise tiles nothing, such as a distance or bounds, or read whole rows."""
LIKE_OTHERS = {"self_extend", "dual_chunk", "kerple", "swin_v2", "rope_mixed", "path", "repo"}
LIKE_OTHERS |= {"rope_by_length", "partial_key_offset", "pope", "swin", "tupe", "xpos"}
LIKE_OTHERS |= {"deberta", "transformer_xl", "learned_rope"}
"""Other schemes have their hooks, or their own tests compare what these would."""
NEEDS = {
    "tiles_equal_the_reference": IN_TILES,
    "tiles_equal_the_reference_padded": IN_TILES,
    "tiles_equal_the_reference_packed": IN_TILES,
    "every_parameter_has_a_gradient": OF_TOKENS,
    "later_tokens_have_no_influence": OF_TOKENS,
    "queries_without_keys_give_zeros": OF_TOKENS,
    "nan_in_padding_stays_there": OF_TOKENS,
    "nan_in_a_row_stays_in_that_row": OF_TOKENS,
    "prompt_then_steps_equal_the_whole": IN_CACHES,
    "steps_from_an_empty_cache_equal_the_whole": IN_CACHES,
    "steps_after_left_padding_equal_rows_alone": IN_CACHES,
    "steps_after_right_padding_equal_rows_alone": IN_CACHES,
    "nan_in_the_padding_of_a_prompt_stays_there": IN_CACHES,
    "coordinates_travel_with_the_cache": IN_CACHES,
    "storage_order_does_not_matter": IN_CACHES,
    "segment_ids_alone_are_packed_rows": OF_TOKENS,
    "first_logits_deviate_by_one": {"rules"},
    "kinds_of_rules_are_declared": {"rules"},
    "rules_are_constant_beyond_bounds": {"rules"},
    "tells_past_from_future": {"rules"},
}
"""The hooks of which a scheme has one where a property is measured by default, if not for all.

tests/makers/serving.py has caches of all schemes; tests/modules/test_param_dtypes.py reads the
dtypes of every scheme in its traced program.
"""


def is_quick(kind, name):
    """Whether a property of a scheme is measured by default."""
    cls = pe.SCHEMES[kind]
    if is_contrib(cls):
        return name in OF_SETTINGS
    if name in ALONE:
        return kind in ALONE[name]
    if not (needs := NEEDS.get(name)):
        return True
    if kind in LIKE_OTHERS or (kind in WITHOUT_PROMISES and needs == IN_TILES):
        return False
    if kind == "inkling" and needs == IN_CACHES and "order" not in name:
        return False  # Caches store nothing of its features.
    if kind == "fox" and name == "tells_past_from_future":
        return False  # It is not mirrored, as RoPE is not.
    if kind in STATELESS and ("prompt" in name or name.startswith("steps_after")):
        return False
    if name == "every_parameter_has_a_gradient" and cls.init is not pe.Scheme.init:
        return True
    hooks = {x for x in OF_TOKENS if getattr(cls, x) is not getattr(pe.Scheme, x)}
    return bool(hooks & needs) or (kind in WHOLE and needs != IN_TILES)


@functools.lru_cache(2)
def case_of(kind, tiles):
    """All properties of a scheme share what it compiles."""
    case = testing.Case(build(pe.SCHEMES[kind], **SETTINGS.get(kind, {})))
    if not tiles:
        case.implementations = ("reference",)
    return case


@functools.lru_cache(2)
def spread(case):
    """Returns a batch for eight devices, on an explicit mesh, and the program for it."""
    x = np.random.default_rng(0).normal(size=(8, LENGTH, case.model_dim)).astype("f4")
    sharding = NamedSharding(MESH, PartitionSpec("data"))
    run = jax.jit(functools.partial(case.model, case.scheme, implementation="reference"))
    return x, sharding, run


def sharding_over_eight_devices_is_kept(case):
    """Shardings on an explicit mesh are checked while tracing."""
    with jax.set_mesh(MESH):
        x, sharding, run = spread(case)
        sharded = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        out, _ = jax.eval_shape(run, case.params, case.weights, sharded)
    assert out.sharding.spec[0] == "data"


def eight_devices_give_the_same_numbers(case):
    with jax.set_mesh(MESH):
        x, sharding, run = spread(case)
        out, _ = run(case.params, case.weights, jax.device_put(x, sharding))
    assert out.sharding.spec[0] == "data"
    pairs = np.split(x, 8 // BATCH)  # The properties have compiled a batch of this size.
    close(out, np.concatenate([case.run(pair)[0] for pair in pairs]), 1e-5)


def empty_batches_and_sequences(case):
    """Traced, with gradients: there is nothing to compute."""
    for batch, length in ((0, 4), (2, 0)):
        tokens, scheme, params = make_batch(batch, length), case.scheme, case.params
        total = jax.grad(lambda params, t=tokens, s=scheme: output(s, params, t).sum())
        assert jax.eval_shape(total, params) == jax.eval_shape(lambda p=params: p)
        out = jax.eval_shape(lambda params, t=tokens, s=scheme: output(s, params, t), params)
        assert out.shape[:2] == (batch, length)


def tells_past_from_future(case):
    """As its traits say."""
    change = mirrored_change(case)
    assert change is None or (change < 2e-5) == case.scheme.traits.mirrored


PROPERTIES = {
    name: prop.check
    for name, prop in testing.PROPERTIES.items()
    if name != "reversed_sequences_have_reversed_outputs"  # `tells_past_from_future` has more.
} | {
    check.__name__: check
    for check in (
        sharding_over_eight_devices_is_kept,
        eight_devices_give_the_same_numbers,
        empty_batches_and_sequences,
        tells_past_from_future,
    )
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if is_quick(kind, name) else slow)
        for kind in pe.SCHEMES
        for name in PROPERTIES
    ],
)
def test_property(kind, name):
    tiles = name.startswith("tiles") or is_quick(kind, "tiles_equal_the_reference")
    PROPERTIES[name](case_of(kind, tiles))


@pytest.mark.parametrize("kind", pe.SCHEMES)
def test_settings_are_documented_and_the_paper_is_cited(kind):
    cls = pe.SCHEMES[kind]
    for field in dataclasses.fields(cls):
        assert re.search(rf"^ *(\w+, )*{field.name}(, \w+)*:", cls.__doc__, re.M), field.name
    assert "https://arxiv.org/abs/" in sys.modules[cls.__module__].__doc__


@pytest.fixture(params=slow_but(sorted({*KINDS, "t5"}), "t5"))
def one_of_a_kind(request):
    """Schemes that a model treats alike are the same to transformations of a model."""
    return build(pe.SCHEMES[request.param])


def test_vmap_over_the_batch(one_of_a_kind, tokens):
    scheme = one_of_a_kind
    params = parameters(scheme)
    one = jax.jit(jax.vmap(lambda t: output(scheme, params, t)))  # Arrays without a batch axis.
    close(one(tokens), output(scheme, params, tokens), 1e-5)


def test_remat_and_scan_over_layers(one_of_a_kind, tokens):
    scheme = one_of_a_kind
    stacked = jax.tree.map(lambda *x: np.stack(x), *(parameters(scheme, seed=n) for n in range(3)))

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
