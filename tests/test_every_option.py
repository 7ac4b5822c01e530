"""Every setting with a default changes the program of every scheme, and the frequencies of a map.

The other values to compare with are declared in the test files: `OPTIONS` at their top level
maps a class to another value of each of its settings (see `support.Option`).
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.support import (
    KINDS,
    SIZES,
    Option,
    build,
    declared,
    is_contrib,
    parameters,
    slow,
    slow_but,
)

MAPS = {
    name: cls
    for name, cls in vars(pe).items()
    if inspect.isclass(cls) and issubclass(cls, pe.FrequencyMap)
}


VALUES = {}  # Values of settings, by class.
for path, options in declared("OPTIONS"):
    assert VALUES.keys().isdisjoint(options), f"classes in {path} have OPTIONS elsewhere"
    VALUES |= options


def once(cls, field):
    """Returns the marks of a setting: where a base class has it, code of that class reads it."""
    return () if field in cls.__annotations__ and not is_contrib(cls) else slow


def settings(classes):
    return [
        pytest.param(cls, field.name, id=f"{name}-{field.name}", marks=once(cls, field.name))
        for name, cls in classes.items()
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING
    ]


def option_of(cls, field):
    option = VALUES.get(cls, {}).get(field)
    assert option is not None, (
        f"{cls.__name__}.{field} has no value to compare its default with: add "
        f"OPTIONS = {{pe.{cls.__name__}: {{{field!r}: <another value>}}}} to its test file"
    )
    return option if isinstance(option, Option) else Option(option)


KEY = jax.random.key(0, impl="unsafe_rbg")  # It compiles fastest.
POSITIONS = np.array([[0, 1, 2, 3, 5, 8, 13, 21, 30, 40, 50, 63]], np.int32)
AXES = np.stack([POSITIONS * 0 + np.arange(12, dtype=np.int32) * n % 4 for n in (1, 2, 3)])


def call_of(scheme, sinks, initial):
    """New parameters, or embedding and attention of a few tokens, with the arguments."""
    if initial:
        return scheme.init, (KEY,)
    numbers = np.random.default_rng(0)

    def normal(*shape):
        return numbers.normal(size=shape).astype(np.float32)

    at = AXES[: scheme.traits.num_axes] if scheme.traits.num_axes > 1 else None
    places = {"positions": POSITIONS, "coordinates": at}
    options = {"sinks": jnp.zeros(6, jnp.float32)} if sinks else {}

    def embedding_and_attention(params, x, q, k, v):
        x = pe.scheme_embedding(scheme, params, x, **places)
        options_of_all = {"is_causal": True, **places, **options}
        return x, pe.scheme_attention(scheme, params, q, k, v, x=x, **options_of_all)[0]

    length, dim = POSITIONS.shape[1], SIZES["head_dim"]
    x = normal(1, length, SIZES["model_dim"])
    kv_heads = getattr(scheme, "num_kv_heads", 0) or 2
    tokens = (normal(1, length, heads, dim) for heads in (6, kv_heads, kv_heads))
    return embedding_and_attention, (parameters(scheme, 1.0), x, *tokens)


@functools.cache
def lowered(*call):
    """The program, which has the settings as numbers; nothing is compiled."""
    function, arguments = call_of(*call)
    return jax.jit(function).lower(*arguments).as_text()


@functools.cache
def computed(*call):
    function, arguments = call_of(*call)
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*arguments))]


def calls_of(cls, field):
    option = option_of(cls, field)
    schemes = build(cls, **option.settings), build(cls, **option.settings | {field: option.value})
    return [(scheme, option.sinks, option.initial) for scheme in schemes]


@pytest.mark.parametrize("cls, field", settings(pe.SCHEMES))
def test_setting_of_a_scheme_changes_the_program(cls, field):
    one, other = calls_of(cls, field)
    assert lowered(*one) != lowered(*other)


@pytest.mark.parametrize("kind", slow_but(pe.SCHEMES, *KINDS))
def test_a_scheme_has_one_program(kind):
    """Programs that differ by themselves would hide a setting without effect."""
    call = build(pe.SCHEMES[kind]), False, False
    assert lowered(*call) == lowered.__wrapped__(*call)


@slow
@pytest.mark.parametrize("cls, field", settings(pe.SCHEMES))
def test_setting_of_a_scheme_changes_the_output(cls, field):
    one, other = (computed(*call) for call in calls_of(cls, field))
    assert max(np.abs(a - b).max() for a, b in zip(one, other, strict=True)) > 1e-3


@pytest.mark.parametrize("cls, field", settings(MAPS))
def test_setting_of_a_frequency_map_changes_the_frequencies(cls, field):
    option = option_of(cls, field)
    maps = cls(**option.settings), cls(**(option.settings | {field: option.value}))
    (a, factor), (b, other_factor) = (pe.rope_frequencies(64, scaling=m) for m in maps)
    assert np.abs(a - b).max() + abs(factor - other_factor) > 1e-4


def test_options_name_settings_that_exist():
    for cls, values in VALUES.items():
        assert cls in (*pe.SCHEMES.values(), *MAPS.values()), cls
        unknown = set(values) - {field.name for field in dataclasses.fields(cls)}
        assert not unknown, f"{cls.__name__} has no {sorted(unknown)}"
