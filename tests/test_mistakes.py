"""`posenc_jax.testing.check` names the cause of each mistake in a scheme, briefly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import slow

import posenc_jax as pe
from posenc_jax import testing


@dataclasses.dataclass(frozen=True)
class Slopes(pe.Scheme):
    """A right scheme: -slope * |q - k|."""

    num_heads: int

    def init(self, key):
        return {"slopes": jax.random.uniform(key, (self.num_heads,), jnp.float32, 0.1, 1.0)}

    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(slope_times_distance, heads=params["slopes"])


def distance(q, k):
    return jnp.abs(q - k).astype(jnp.float32)


def slope_times_distance(shared, slope, q, k):
    return -slope * distance(q, k)


class ClosesOverParams(Slopes):
    def rules(self, params, q_features=None, k_features=None):
        steepness = params["slopes"].mean()
        return pe.LogitBias(lambda shared, head, q, k: -steepness * distance(q, k))


class WrittenForArrays(Slopes):
    def rules(self, params, q_features=None, k_features=None):
        def rule(shared, slope, q, k):
            return -slope * distance(q[:, None], k[None, :])

        return pe.LogitBias(rule, heads=params["slopes"])


class ForgetsHeads(Slopes):
    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(slope_times_distance)


class SwapsArguments(Slopes):
    def rules(self, params, q_features=None, k_features=None):
        def rule(q, k, shared, head):
            return -head * distance(q, k)

        return pe.LogitBias(rule, heads=params["slopes"])


def difference(shared, head, q_feature, k_feature, q, k):
    return q_feature - k_feature


class Gated(Slopes):
    """Gates from q, [B, T, N]: a right scheme that has no state."""

    def gates(self, params, q):
        return jax.nn.sigmoid(q.astype(jnp.float32).mean(-1)) * params["slopes"][None, None]

    def rules(self, params, q_features=None, k_features=None):
        return pe.ContentBias(difference, q_features=q_features, k_features=k_features)


class ReturnsPair(Gated):
    def features(self, params, x, q, k, coordinates, segment_ids, state):
        gates = self.gates(params, q)
        return gates, gates


class HeadsBeforeTokens(Gated):
    def features(self, params, x, q, k, coordinates, segment_ids, state):
        gates = jnp.swapaxes(self.gates(params, q), 1, 2)
        return gates, gates, state


@dataclasses.dataclass(frozen=True)
class TwoAxes(Slopes):
    traits = pe.Traits(num_axes=2)

    def rules(self, params, q_features=None, k_features=None):
        def rule(shared, slope, q, k):
            return -slope * (distance(q[0], k[0]) + distance(q[1], k[1]))

        return pe.LogitBias(rule, heads=params["slopes"])


@dataclasses.dataclass(frozen=True)
class Misspelt(pe.Scheme):
    num_heads: int

    def rule(self, params, q_features=None, k_features=None):
        return pe.LogitBias(slope_times_distance, heads=jnp.ones(self.num_heads))


class UsesNumPy(Slopes):
    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(slope_times_distance, heads=np.asarray(params["slopes"]) ** 2)


@dataclasses.dataclass(frozen=True)
class ArrayField(Slopes):
    factors: jax.Array = dataclasses.field(default_factory=lambda: jnp.ones(6))


@dataclasses.dataclass(frozen=True)
class OwnInit(Slopes):
    def __init__(self, n):
        object.__setattr__(self, "num_heads", n)


class Bfloat16Parameters(Slopes):
    def init(self, key):
        return {"slopes": jnp.ones(self.num_heads, jnp.bfloat16)}

    def rules(self, params, q_features=None, k_features=None):
        return super().rules(jax.tree.map(jnp.float32, params))


class NotRelative(Slopes):
    traits = pe.Traits(relative=True)

    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(sum_of_both, heads=params["slopes"], relative=True)


def sum_of_both(shared, slope, q, k):
    return -slope * distance(q, k) / (1 + q).astype(jnp.float32)


class Unclipped(Slopes):
    traits = pe.Traits(relative=True)

    def init(self, key):
        return {"slopes": jax.random.normal(key, (self.num_heads, 16), jnp.float32)}

    def rules(self, params, q_features=None, k_features=None):
        table = params["slopes"]
        return pe.LogitBias(entry, heads=table, relative=True, bounds=(0, 8))


def entry(shared, table, q, k):
    return table[jnp.clip(q - k, 0, 15)]


class SumWithoutState(Gated):
    traits = pe.Traits(order_only=True)

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        sums = jnp.cumsum(self.gates(params, q), 1)
        return sums, sums, state


class ReturnsNothing(Slopes):
    def query(self, params, q, coordinates, features=None, tables=None):
        q * jnp.cos(coordinates)[:, :, None, None]


class BranchesOnValue(Slopes):
    def rules(self, params, q_features=None, k_features=None):
        def rule(shared, slope, q, k):
            if q < k:
                return 0.0
            return -slope * distance(q, k)

        return pe.LogitBias(rule, heads=params["slopes"])


class OtherName(Slopes):
    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(slope_times_distance, heads=params["slope"])


class LogOfZero(Slopes):
    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(log_distance, heads=params["slopes"])


def log_distance(shared, slope, q, k):
    return -slope * jnp.log(distance(q, k))


class MisspeltKey(Slopes):
    traits = pe.Traits(relative=True)

    def query(self, params, q, coordinates, features=None, tables=None):
        return self.rotated(q, coordinates)

    def keys(self, params, k, coordinates, features=None, tables=None):
        return self.rotated(k, coordinates)

    def rotated(self, x, coordinates):
        angles = coordinates.astype(jnp.float32)[:, :, None] * jnp.ones((1, 1, 4), jnp.float32)
        cos, sin = (f(angles)[:, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


RAISING = {
    WrittenForArrays: ["in rule: return -slope *", "q=int32[], k=int32[]", "one query and one key"],
    ForgetsHeads: ["slope_times_distance got", "`slope` is None: the rule has no heads="],
    SwapsArguments: ["order (shared, head, q, k), and rule takes (q, k, shared, head)"],
    ReturnsPair: [
        "must return (q_features, k_features, state)",
        "in features: return gates, gates",
    ],
    HeadsBeforeTokens: ["must be [B, T, N, ...] = (2, 5, 6), got (2, 6, 5)", "in rules: return pe"],
    TwoAxes: ["with coordinates [B, T]", "num_axes=2 must accept both", "q=int32[], k=int32[]"],
    Misspelt: ["is `rule` a misspelt `rules`?"],
    UsesNumPy: ["TracerArrayConversionError", 'np.asarray(params["slopes"])', "use jax.numpy"],
    ArrayField: [
        "the field `factors` holds an array",
        "Return arrays that are learned from `init`",
    ],
    OwnInit: ["the class has an `__init__` of its own"],
    ReturnsNothing: ["ReturnsNothing.query must return an array, got None (is `return` missing?)"],
    BranchesOnValue: ["in rule: if q < k:", "use jnp.where"],
    OtherName: ['heads=params["slope"]', "`init` returns; it has 'slopes'"],
}
"""Mistakes that stop `check` before it measures, with parts of the message."""

WRONG = {
    Bfloat16Parameters: (
        ["params['slopes'] is bfloat16", "`init` names another dtype"],
        "parameters_are_deterministic_and_float32",
    ),
    NotRelative: (["set relative=False"], "adding_a_constant_changes_nothing"),
    Unclipped: (
        ["`bounds` beyond which the rule still varies"],
        "tiles_equal_the_reference_in_an_encoder",
    ),
    SumWithoutState: (
        ["a state that `features` returns but does not continue from"],
        "steps_from_an_empty_cache_equal_the_whole",
    ),
    ClosesOverParams: (
        ["LogitBias.rule (tests", "is another function in each call", "heads=, shared="],
        "second_eager_call_does_not_compile",
    ),
    LogOfZero: (["the output is not finite", "log(0)"], "jit_equals_eager"),
    MisspeltKey: (["is it a misspelt `key`?"], "adding_a_constant_changes_nothing"),
}
"""Mistakes that are measured, with a property that finds them; slow cases measure them all."""


def message_of(scheme):
    with pytest.raises(AssertionError) as raised:
        testing.check(scheme)
    lines = str(raised.value).splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 100
    return " ".join(line.strip() for line in lines)


@pytest.mark.parametrize("cls", RAISING, ids=lambda cls: cls.__name__)
def test_a_mistake_that_raises_is_explained(cls):
    message = message_of(cls(6))
    for part in RAISING[cls]:
        assert part in message
    if cls not in (Misspelt, ArrayField, OwnInit):
        assert "test_mistakes.py:" in message


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_a_mistake_that_is_measured_is_explained(cls, everything, monkeypatch):
    parts, name = WRONG[cls]
    names = ["hashable_and_equal_by_value", name]
    if not everything:
        some = {name: testing.PROPERTIES[name] for name in names}
        monkeypatch.setattr(testing.properties, "PROPERTIES", some)
    message = message_of(cls(6))
    for part in parts:
        assert part in message


class Long(Slopes):
    def rules(self, params, q_features=None, k_features=None):
        return super().rules(params)

    def query(self, params, q, coordinates, features=None, tables=None):
        if q.shape[1] > 100:
            raise RuntimeError(f"{q.shape[1]} tokens are too many")
        return q


def test_what_several_properties_raise_is_printed_once(monkeypatch):
    names = ["hashable_and_equal_by_value", "tiles_equal_the_reference"]
    names += ["tiles_equal_the_reference_in_an_encoder"]
    some = {name: testing.PROPERTIES[name] for name in names}
    monkeypatch.setattr(testing.properties, "PROPERTIES", some)
    message = message_of(Long(6))
    assert message.count("130 tokens are too many") == 1
    assert all(some[name].name in message for name in names[1:])
    assert "Usual cause" not in message


def test_no_file_of_a_library_is_taken_for_the_users():
    message = message_of(UsesNumPy(6))
    assert message.count(".py:") == 1
    scheme = pe.chain(UsesNumPy(6), pe.RoPE(head_dim=8))
    assert 'np.asarray(params["slopes"])' in message_of(scheme)


def test_a_right_scheme_of_two_axes_passes_the_first_calls():
    @dataclasses.dataclass(frozen=True)
    class BothAxes(TwoAxes):
        def rules(self, params, q_features=None, k_features=None):
            def rule(shared, slope, q, k):
                q, k = (jnp.broadcast_to(x, (2,)) for x in (q, k))
                return -slope * (distance(q[0], k[0]) + distance(q[1], k[1]))

            return pe.LogitBias(rule, heads=params["slopes"])

    for trace in testing.Case(BothAxes(6)).first_calls().values():
        trace()


class Table:
    """An object of a module, which is the same in every call."""

    def rule(self, shared, slope, q, k):
        return -slope * distance(q, k)


TABLE = Table()


class OfOneObject(Slopes):
    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(TABLE.rule, heads=params["slopes"])


def test_equal_functions_compile_once():
    prop = testing.PROPERTIES["second_eager_call_does_not_compile"]
    assert prop.check(testing.Case(OfOneObject(6))) == 0
