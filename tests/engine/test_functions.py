"""Functions are equal by code and constants where that is sound, and calls then compile once."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.functions import by_value, varying

traces = 0


def trace():
    global traces
    traces += 1


@dataclasses.dataclass(frozen=True)
class Setting:
    value: object

    def method(self, x):
        return x + self.value

    @functools.cached_property
    def derived(self):
        return self.value


def closed(value):
    return lambda x: x + value


def defaulted(value):
    return lambda x, y=value: x + y


def keyword(value):
    def function(x, *, y=value):
        return x + y

    return function


def nested(value):
    inner = closed(value)
    return lambda x: inner(x)


def partial(value):
    return functools.partial(add, value)


def method(value):
    return Setting(value).method


def transformed(value):
    return Composed(closed(value))


def add(x, y):
    return x + y


@dataclasses.dataclass(frozen=True)
class Composed:
    function: object

    def __call__(self, x):
        return self.function(x)


def equal(a, b):
    a, b = by_value(a), by_value(b)
    same = a == b
    assert not same or hash(a) == hash(b)
    return same


MAKERS = [closed, defaulted, keyword, nested, partial, method, transformed]


class Word(str):
    """A string that may have attributes."""


@pytest.mark.parametrize("make", MAKERS, ids=lambda f: f.__name__)
def test_equal_constants_give_equal_functions(make):
    for value in (2, 2.5, float("nan"), "w", None, (1, (2.0, "a")), np.float32(2), Setting(3), jnp):
        assert equal(make(value), make(value)), value
        assert by_value(make(value)) != make(value)
    assert by_value(make(2))(3) == 5


@pytest.mark.parametrize("make", MAKERS, ids=lambda f: f.__name__)
def test_other_constants_give_other_functions(make):
    pairs = [(1, 2), (1, 1.0), (1, True), (0.0, -0.0), ((1,), (1.0,)), (Setting(1), Setting(1.0))]
    pairs += [(np.float32(1), np.float64(1)), (np, jnp), (closed(1), closed(2)), (add, closed(1))]
    for a, b in pairs:
        assert not equal(make(a), make(b)), (a, b)


@pytest.mark.parametrize("make", MAKERS, ids=lambda f: f.__name__)
def test_what_may_change_is_never_equal(make):
    changing = [[1], {"a": 1}, {1}, np.ones(2), jnp.ones(2), object(), bytearray(2), [1].count]
    changing += [types.SimpleNamespace(a=1), Setting([1]), (1, [2]), np.poly1d([1]), Word("w")]
    for value in changing:
        assert not equal(make(value), make(value)), value
        assert varying(make(value))
    cached = Setting(1)
    assert cached.derived == 1
    assert equal(make(cached), make(Setting(1)))
    object.__setattr__(cached, "other", 2)
    assert not equal(make(cached), make(cached))


def test_code_and_globals_count():
    assert not equal(lambda x: x, lambda x: x)  # At two places.
    code = compile("def make():\n    return lambda x: x + strength", "rules.py", "exec")
    spaces = [{"strength": 1}, {"strength": 1}]
    for space in spaces:
        exec(code, space)
    one, another = (space["make"] for space in spaces)
    assert equal(one(), one())
    assert not equal(one(), another())
    before = by_value(one())
    spaces[0]["strength"] = 2
    assert before != by_value(one())
    spaces[0]["strength"] = [2]
    assert not equal(one(), one())
    assert varying(one()) == "`strength`, a list"


def test_functions_without_constants_are_returned():
    def of_itself(x):
        return of_itself(x)

    def with_attribute(x):
        return x

    with_attribute.strength = 2
    assert by_value(add) is add
    for function in (of_itself, with_attribute):
        assert by_value(function) is function
        assert varying(function)
    assert varying(add) is None
    assert by_value(by_value(closed(1))) == by_value(closed(1))
    if False:
        later = 1
    assert varying(lambda x: x + later) == "a variable without a value"


def bias(power):
    def rule(shared, slope, q, k):
        trace()
        return -slope * jnp.abs(q - k).astype(jnp.float32) ** power

    return pe.LogitBias(rule, heads=pe.alibi_slopes(2))


def test_a_second_call_outside_of_jit_does_not_trace():
    q = jnp.ones((1, 4, 2, 8), jnp.float32)

    def attention(rule):
        before = traces
        out = pe.attention(q, q, q, rules=rule, is_causal=True)
        return out, traces - before

    out, count = attention(bias(1.5))
    assert count > 0
    again, count = attention(bias(1.5))
    assert count == 0
    np.testing.assert_array_equal(again, out)
    _, count = attention(bias(0.5))
    assert count > 0


shape = []  # A global with the name of an attribute.


def test_attributes_are_no_globals():
    def make():
        return lambda shared, head, q, k: jnp.zeros(q.shape)

    assert equal(make(), make())


def test_score_mods_compare_by_value():
    def rule(slope):
        def mod(score, b, h, q_idx, kv_idx):
            return score - slope * (q_idx - kv_idx).astype(jnp.float32)

        return pe.score_mod(mod, jnp.ones((1, 4, 2, 8), jnp.float32)).rule

    assert equal(rule(1.0), rule(1.0))
    assert not equal(rule(1.0), rule(2.0))


def test_dense_does_not_trace_again():
    at = jnp.arange(4)
    before = traces
    bias(1.5).dense(at, at)
    between = traces
    bias(1.5).dense(at, at)
    assert before < between == traces


def test_gradients_of_what_a_function_closes_over():
    """It is no constant, so that its value is not kept from another call."""
    q = jnp.ones((1, 4, 2, 8), jnp.float32)
    v = q * jnp.arange(4.0)[None, :, None, None]

    def loss(slope):
        rule = lambda shared, head, q, k: slope * (q - k).astype(jnp.float32)  # noqa: E731
        out = pe.attention(q, q, v, rules=pe.LogitBias(rule))
        return out.sum()

    for slope in (0.1, 0.2):
        numeric = (loss(jnp.float32(slope + 1e-2)) - loss(jnp.float32(slope - 1e-2))) / 2e-2
        np.testing.assert_allclose(jax.grad(loss)(jnp.float32(slope)), numeric, rtol=2e-2)
