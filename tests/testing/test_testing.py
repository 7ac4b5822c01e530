"""`posenc_jax.testing.check` finds schemes that are wrong, and names the property or the call."""

import dataclasses
import functools
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax import testing
from tests.support import slow, slow_but


def difference(shared, head, q_feature, k_feature, q, k):
    return q_feature - k_feature


@dataclasses.dataclass(frozen=True)
class RunningSum(pe.Scheme):
    """A bias by the sum of gates between two tokens; `broken` leaves one thing out."""

    num_heads: int
    model_dim: int
    broken: str = ""

    @property
    def traits(self):
        return pe.Traits(relative=True, order_only=self.broken != "order_only", reads_x=True)

    def init(self, key):
        shape = self.model_dim, self.num_heads
        return {"w": 0.1 * jax.random.normal(key, shape, jnp.float32)}

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        w = params["w"].astype(x.dtype)
        gates = jax.nn.log_sigmoid(jnp.einsum("btd,dn->btn", x, w).astype(jnp.float32))
        if segment_ids is not None and self.broken != "segment_ids":
            gates = jnp.where((segment_ids >= 0)[:, :, None], gates, 0.0)
        if self.broken == "causal":
            gates = jnp.flip(gates, 1)
        sums = jnp.cumsum(gates, 1)
        if state is not None and self.broken != "state":
            sums += state[:, None]
        return sums, sums, sums[:, -1]

    def rules(self, params, q_features=None, k_features=None):
        return pe.ContentBias(difference, q_features=q_features, k_features=k_features)


@dataclasses.dataclass(frozen=True)
class Rotary(pe.Scheme):
    """RoPE; `broken` changes one thing."""

    head_dim: int
    broken: str = ""

    @property
    def traits(self):
        return pe.Traits(relative=True)

    def init(self, key):
        return {"unused": jnp.ones(3, jnp.float32)} if self.broken == "gradient" else {}

    def query(self, params, q, coordinates, features=None, tables=None):
        w = 1e4 ** (-jnp.arange(0, self.head_dim, 2, dtype=jnp.float32) / self.head_dim)
        if self.broken == "slots":
            coordinates = jnp.broadcast_to(jnp.arange(q.shape[1])[None], q.shape[:2])
        if self.broken == "integers":
            coordinates = coordinates.astype(jnp.int32)
        angles = coordinates.astype(jnp.float32)[:, :, None] * w[None, None]
        if self.broken == "bfloat16":
            angles = (coordinates.astype(q.dtype)[:, :, None] * w[None, None].astype(q.dtype)) + 0
        if self.broken == "absolute":
            angles = angles * angles
        cos, sin = (f(angles)[:, :, None].astype(q.dtype) for f in (jnp.cos, jnp.sin))
        a, b = jnp.split(q, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def key(self, params, k, coordinates, features=None, tables=None):
        return self.query(params, k, coordinates)


class Remade(Rotary):
    """RoPE with a rule that closes over an array."""

    def rules(self, params, q_features=None, k_features=None):
        table = np.zeros(8, np.float32)
        return pe.LogitBias(lambda shared, head, q, k: jnp.take(table, q - k, mode="clip"))


class ByIdentity(Rotary):
    """Equal to itself only."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class KeyMisspelt(Rotary):
    """RoPE of queries alone."""

    key = pe.Scheme.key

    def keys(self, params, k, coordinates, features=None, tables=None):
        return self.query(params, k, coordinates)


class Undone(pe.SSMax):
    """A scale of q that a norm would undo."""

    traits = pe.Traits()


class Rows(pe.StickBreaking):
    """Rows of logits that traits do not tell of."""

    traits = pe.Traits(relative=True, order_only=True, causal_only="as stick-breaking is")


class HiddenValues(pe.Shaw):
    """Values that `acts` does not tell of."""

    acts = pe.Acts.LOGITS


@dataclasses.dataclass(frozen=True)
class Misnamed(pe.T5):
    """The words of the axes of a parameter in another order."""

    @property
    def param_axes(self):
        return {"table": "num_buckets num_heads"}


@dataclasses.dataclass(frozen=True)
class Unseeded(pe.T5):
    """Parameters that do not depend on the key alone."""

    def init(self, key):
        return {"table": np.random.default_rng().normal(size=(32, self.num_heads)).astype("f4")}


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


@dataclasses.dataclass(frozen=True)
class Broken(Slopes):
    """A scheme with another rule on the slopes, and other traits."""

    rule: object = slope_times_distance
    options: tuple = ()
    traits: pe.Traits = dataclasses.field(default=pe.Traits())

    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(self.rule, heads=params["slopes"], **dict(self.options))


def of_the_query_too(shared, slope, q, k):
    return -slope * (jnp.abs(q - k) + q % 50 // 40 * (k % 7)).astype(jnp.float32)


def log_distance(shared, slope, q, k):
    return -slope * jnp.log(distance(q, k))


RELATIVE = {"options": (("relative", True),), "traits": pe.Traits(relative=True)}
BOUNDED = {"options": (("relative", True), ("bounds", (0, 8)))}
FAR = {"options": (("relative", True), ("bounds", (None, 200)))}


class Bfloat16(Slopes):
    def init(self, key):
        return {"slopes": jnp.ones(self.num_heads, jnp.bfloat16)}

    def rules(self, params, q_features=None, k_features=None):
        return super().rules(jax.tree.map(jnp.float32, params))


BROKEN = {
    "running sum without segments": (
        RunningSum(6, 20, "segment_ids"),
        "steps_after_right_padding_equal_rows_alone",
    ),
    "running sum without state": (
        RunningSum(6, 20, "state"),
        "steps_from_an_empty_cache_equal_the_whole",
    ),
    "running sum from the end": (RunningSum(6, 20, "causal"), "later_tokens_have_no_influence"),
    "order_only not set": (RunningSum(6, 20, "order_only"), "coordinates_change_the_output"),
    "rule falsely relative": (Broken(6, of_the_query_too, **RELATIVE), "tiles_equal_the_reference"),
    "rule varies beyond its bounds": (
        Broken(6, **BOUNDED),
        "tiles_equal_the_reference_in_an_encoder",
    ),
    "rule varies beyond far bounds": (Broken(6, **FAR), "rules_are_constant_beyond_bounds"),
    "rows not declared": (Rows(), "kinds_of_rules_are_declared"),
    "values not declared": (HiddenValues(6, 8, keys=False), "kinds_of_rules_are_declared"),
    "scale not declared": (Undone(6), "coordinates_do_not_scale_q_and_k"),
    "integer coordinates": (Rotary(8, "integers"), "fractions_of_coordinates_change_the_output"),
    "drafts in a running sum": (RunningSum(6, 20, "segment_ids"), "rejected_drafts_leave_no_trace"),
    "trait falsely relative": (Rotary(8, "absolute"), "adding_a_constant_changes_nothing"),
    "float32 angles": (Rotary(8), "adding_a_constant_changes_nothing"),
    "bfloat16 angles": (Rotary(8, "bfloat16"), "bfloat16_is_near_float32"),
    "bfloat16 parameters": (Bfloat16(6), "parameters_are_deterministic_and_float32"),
    "positions from slots": (Rotary(8, "slots"), "coordinates_change_the_output"),
    "unused parameter": (Rotary(8, "gradient"), "every_parameter_has_a_gradient"),
    "another source of randomness": (Unseeded(6), "parameters_are_deterministic_and_float32"),
    "axes in another order": (Misnamed(6), "declared_axes_have_their_sizes"),
    "function made anew": (Remade(8), "second_eager_call_does_not_compile"),
    "equal by identity": (ByIdentity(8), "hashable_and_equal_by_value"),
}
LONG = "running sum without segments", "running sum without state", "running sum from the end"
LONG += "rule falsely relative", "drafts in a running sum"


@pytest.mark.parametrize("broken", slow_but(BROKEN, *[x for x in BROKEN if x not in LONG]))
def test_broken_scheme_fails_the_property(broken):
    scheme, name = BROKEN[broken]
    prop, case = testing.PROPERTIES[name], testing.Case(scheme)
    if not name.startswith("tiles"):
        case.implementations = ("reference",)
    with pytest.raises(AssertionError) as raised:
        prop.check(case)
    message = str(raised.value)
    assert repr(scheme) in message
    assert prop.name in message
    assert prop.cause in message
    if broken == "float32 angles":
        assert "use pe.cos_sin" in message
    if isinstance(scheme, Remade):
        assert "LogitBias.rule is another function in each call: <function Remade.rules" in message


@dataclasses.dataclass(frozen=True)
class NaN(Rotary):
    """RoPE with NaN in one place."""

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        padding = jnp.zeros_like(coordinates) if segment_ids is None else segment_ids < 0
        row = jnp.broadcast_to(padding.any(1, keepdims=True), padding.shape)
        is_nan = {"far": coordinates > 500_000, "row": row}[self.broken]
        return jnp.where(is_nan, jnp.nan, 0.0), None, state

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        return attention(q, k, v) + q_features[:, :, None, None].astype(q.dtype)


@pytest.mark.parametrize(
    "place, name",
    [
        ("far", "adding_a_constant_changes_nothing"),
        ("row", "left_padded_rows_equal_rows_alone"),
    ],
)
def test_nan_fails_the_property(place, name):
    case = testing.Case(NaN(8, place))
    case.implementations = ("reference",)
    with pytest.raises(AssertionError, match="largest error nan, tolerance"):
        testing.PROPERTIES[name].check(case)


def with_rule(rule, **options):
    return functools.partial(Broken, rule=rule, **options)


def for_arrays(shared, slope, q, k):
    return -slope * distance(q[:, None], k[None, :])


class ForgetsHeads(Slopes):
    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(slope_times_distance)


def branching(shared, slope, q, k):
    return 0.0 if q < k else -slope * distance(q, k)


def on_two_axes(shared, slope, q, k):
    return -slope * (distance(q[0], k[0]) + distance(q[1], k[1]))


class ReturnsPair(Slopes):
    def features(self, params, x, q, k, coordinates, segment_ids, state):
        return q, q


class ReturnsNothing(Slopes):
    def query(self, params, q, coordinates, features=None, tables=None):
        q * jnp.cos(coordinates)[:, :, None, None]


class ReadsX(Slopes):
    def features(self, params, x, q, k, coordinates, segment_ids, state):
        return x.sum(-1), x.sum(-1), state


class UsesNumPy(Slopes):
    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(slope_times_distance, heads=np.asarray(params["slopes"]))


@dataclasses.dataclass(frozen=True)
class Misspelt(pe.Scheme):
    num_heads: int

    def rule(self, params, q_features=None, k_features=None):
        return pe.LogitBias(slope_times_distance, heads=jnp.ones(self.num_heads))


@dataclasses.dataclass(frozen=True)
class ArrayField(Slopes):
    factors: jax.Array = dataclasses.field(default_factory=lambda: jnp.ones(6))


@dataclasses.dataclass(frozen=True)
class OwnInit(Slopes):
    def __init__(self, n):
        object.__setattr__(self, "num_heads", n)


RULE = "LogitBias.rule is called as rule(shared, head, q, k)", "in a first call"
RAISING = {
    with_rule(for_arrays): ("distance(q[:, None], k", "of one head, one query and", *RULE),
    with_rule(branching): ("if q < k", "TracerBoolConversionError", *RULE),
    with_rule(on_two_axes, traits=pe.Traits(num_axes=2)): (
        *("distance(q[0], k[0])", "a first call with coordinates [B, T], as text has them"),
    ),
    ForgetsHeads: ("return -slope *", "None and () stand for arrays that the rule was not", *RULE),
    ReturnsPair: ("ReturnsPair.features must return (q_features, k_features, state), a tuple",),
    ReturnsNothing: ("ReturnsNothing.query must return an array, got None (is `return` missing?)",),
    ReadsX: ("x is None in ReadsX.features", "sets traits = pe.Traits(reads_x=True)"),
    UsesNumPy: ('np.asarray(params["slopes"])', "TracerArrayConversionError"),
    Misspelt: ("is `rule` a misspelt `rules`?",),
    ArrayField: ("the field `factors` holds Array", "Return arrays that are learned from `init`"),
    OwnInit: ("the class has an `__init__` of its own",),
}
"""Mistakes that stop `check` before it measures, with parts of what Python prints."""


@pytest.mark.parametrize("make", RAISING)
def test_a_mistake_stops_the_first_call(make):
    with pytest.raises(Exception) as raised:
        testing.check(make(6))
    printed = "".join(traceback.format_exception(raised.value))
    for part in RAISING[make]:
        assert part in printed


class FailsWhenLong(Slopes):
    def query(self, params, q, coordinates, features=None, tables=None):
        if q.shape[1] > 100:
            raise RuntimeError(f"{q.shape[1]} tokens are too many")
        return q


LOG_OF_ZERO = Broken(6, log_distance)
SUMMARIES = [
    (
        RunningSum(6, 20, "segment_ids"),
        ["steps_after_right_padding_equal_rows_alone", "declared_axes_have_their_sizes"],
        ["1 of 4 properties fail", "a running sum in `features` that includes padding"],
    ),
    (LOG_OF_ZERO, [], ["1 of 2 properties fail; the others need it", "not finite", "log(0)"]),
    (
        FailsWhenLong(6),
        ["tiles_equal_the_reference", "tiles_equal_the_reference_in_an_encoder"],
        ["without causality: raised RuntimeError: 130 tokens are too many"],
    ),
]


def test_check_notes_what_may_be_misspelt(monkeypatch):
    some = {"hashable_and_equal_by_value": testing.PROPERTIES["hashable_and_equal_by_value"]}
    monkeypatch.setattr(testing.properties, "PROPERTIES", some)
    assert "`keys` is no hook; is it a misspelt `key`?" in testing.check(KeyMisspelt(8)).notes


@pytest.mark.parametrize(
    "scheme, names, parts", slow_but(SUMMARIES, SUMMARIES[1]), ids=lambda x: type(x).__name__
)
def test_check_names_what_fails_once(scheme, names, parts, monkeypatch):
    names = ["hashable_and_equal_by_value", "jit_equals_eager", *names]
    some = {name: testing.PROPERTIES[name] for name in names}
    monkeypatch.setattr(testing.properties, "PROPERTIES", some)
    with pytest.raises(AssertionError) as raised:
        testing.check(scheme)
    message = str(raised.value)
    for part in parts:
        assert message.count(part) == 1


@slow
def test_check_reports_what_it_measured():
    report = testing.check(RunningSum(6, 20))
    assert len(report.rows) == len(testing.PROPERTIES)
    assert all(row.error is None or row.error <= row.tolerance for row in report.rows)
    table = str(report).splitlines()
    assert table[0] == repr(report.scheme)
    assert len(table) == len(testing.PROPERTIES) + 3 and table[-1] == "No property fails."


def test_sizes_come_from_schemes_inside_others():
    case = testing.Case(pe.chain(pe.RoPE(head_dim=4), pe.ALiBi(num_heads=10)))
    assert (case.num_heads, case.num_kv_heads, case.head_dim, case.model_dim) == (10, 5, 4, 20)
    tables = (pe.LearnedAbsolute(max_length=n, model_dim=20) for n in (99, 64, 500))
    assert testing.Case(pe.chain(*tables)).max_length == 64
    sizes = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 2, "model_dim": 3, "max_length": 49}
    case = testing.Case(pe.NoPE(), **sizes)
    assert sizes == {name: getattr(case, name) for name in sizes} and case.long == 49


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="scheme must be a Scheme instance, got <class"):
        testing.check(pe.RoPE)
    with pytest.raises(ValueError, match=r"max_length must be at least 40 .* got 8"):
        testing.check(pe.LearnedAbsolute(max_length=8, model_dim=4))


def test_temperatures_of_long_texts_read_coordinates():
    """Which change nothing within a thousand tokens."""
    case = testing.Case(pe.QueryTemperature("llama4", 8192))
    for name in ("coordinates_change_the_output", "fractions_of_coordinates_change_the_output"):
        assert testing.PROPERTIES[name].check(case) is None


@dataclasses.dataclass(frozen=True)
class Identity(pe.Scheme):
    """Attention of each token to itself, without a call of attention."""

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        return jnp.repeat(v, q.shape[2] // v.shape[2], 2)


def test_attention_without_logits_has_no_deviation():
    case = testing.Case(Identity())
    assert testing.PROPERTIES["first_logits_deviate_by_one"].check(case) is None
