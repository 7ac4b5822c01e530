"""Every setting with a default changes the numbers, of every scheme and frequency map.

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
from tests.support import SIZES, TESTS, Option, build, declared, parameters, run, slow

MAPS = {
    name: cls
    for name, cls in vars(pe).items()
    if inspect.isclass(cls) and issubclass(cls, pe.FrequencyMap)
}


OPTIONS, FILES = {}, {}  # Values of settings, and the file that they are in, by class.
for path, options in declared("OPTIONS"):
    for cls, values in options.items():
        assert cls not in OPTIONS, f"{cls.__name__} has OPTIONS in {FILES[cls]} and {path}"
        OPTIONS[cls], FILES[cls] = values, path


def where(cls):
    """The test file that the options of a class belong in."""
    family = cls.__module__.split(".")[1:]
    default = TESTS.joinpath(*family[:-1], f"test_{family[-1]}.py")
    return FILES.get(cls, default).relative_to(TESTS.parent)


def once(cls, field):
    """Returns the marks of a setting: where a base class has it, code of that class reads it."""
    return () if field in cls.__annotations__ else slow


def settings(classes):
    return [
        pytest.param(cls, field.name, id=f"{name}-{field.name}", marks=once(cls, field.name))
        for name, cls in classes.items()
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING
    ]


def option_of(cls, field):
    option = OPTIONS.get(cls, {}).get(field)
    assert option is not None, (
        f"{cls.__name__}.{field} has no value to compare its default with: add "
        f"OPTIONS = {{pe.{cls.__name__}: {{{field!r}: <another value>}}}} to {where(cls)}"
    )
    return option if isinstance(option, Option) else Option(option)


KEY = jax.random.key(0, impl="unsafe_rbg")  # It compiles fastest.
POSITIONS = np.array([[0, 1, 2, 3, 5, 8, 13, 21, 30, 40, 50, 63]], np.int32)
AXES = np.stack([POSITIONS * 0 + np.arange(12, dtype=np.int32) * n % 4 for n in (1, 2, 3)])


def embedding_and_attention(scheme, sinks, params, x, q, k, v):
    at = AXES[: scheme.traits.num_axes] if scheme.traits.num_axes > 1 else None
    where = {"positions": POSITIONS, "coordinates": at}
    x = pe.scheme_embedding(scheme, params, x, **where)
    options = {"sinks": jnp.zeros(6, jnp.float32)} if sinks else {}
    out, _ = pe.scheme_attention(scheme, params, q, k, v, x=x, is_causal=True, **where, **options)
    return x, out


@functools.cache
def output(scheme, sinks):
    """Embedding and attention of a few tokens, with random parameters."""
    numbers = np.random.default_rng(0)

    def normal(*shape):
        return numbers.normal(size=shape).astype(np.float32)

    length, dim = POSITIONS.shape[1], SIZES["head_dim"]
    x = normal(1, length, SIZES["model_dim"])
    kv_heads = getattr(scheme, "num_kv_heads", 0) or 2
    q, k, v = (normal(1, length, heads, dim) for heads in (6, kv_heads, kv_heads))
    return run(embedding_and_attention, (scheme, sinks), parameters(scheme, 1.0), x, q, k, v)


@pytest.mark.parametrize("cls, field", settings(pe.SCHEMES))
def test_setting_of_a_scheme_changes_the_output(cls, field):
    option = option_of(cls, field)
    schemes = build(cls, **option.given), build(cls, **(option.given | {field: option.value}))
    if option.initial:
        a, b = (jax.tree.leaves(scheme.init(KEY)) for scheme in schemes)
    else:
        a, b = (output(scheme, option.sinks) for scheme in schemes)
    assert max(np.abs(x - y).max() for x, y in zip(a, b, strict=True)) > 1e-3


@pytest.mark.parametrize("cls, field", settings(MAPS))
def test_setting_of_a_frequency_map_changes_the_frequencies(cls, field):
    option = option_of(cls, field)
    maps = cls(**option.given), cls(**(option.given | {field: option.value}))
    (a, factor), (b, other_factor) = (pe.rope_frequencies(64, scaling=m) for m in maps)
    assert np.abs(a - b).max() + abs(factor - other_factor) > 1e-4


def test_options_name_settings_that_exist():
    for cls, values in OPTIONS.items():
        assert cls in (*pe.SCHEMES.values(), *MAPS.values()), f"{where(cls)}: {cls}"
        unknown = set(values) - {field.name for field in dataclasses.fields(cls)}
        assert not unknown, f"{where(cls)}: {cls.__name__} has no {sorted(unknown)}"
