"""`posenc_jax.testing.check` finds schemes that are wrong, and names the property."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax import testing


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
        return {"w": jax.random.normal(key, (self.model_dim, self.num_heads), jnp.float32)}

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


def absolute(shared, slope, q, k):
    return -slope * (jnp.abs(q - k) + q % 50 // 40 * (k % 7)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Biased(pe.Scheme):
    """A bias that also depends on the position of the query."""

    num_heads: int
    relative: bool

    def rules(self, params, q_features=None, k_features=None):
        slopes = pe.alibi_slopes(self.num_heads)
        return pe.LogitBias(absolute, heads=slopes, relative=self.relative)


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


@dataclasses.dataclass(frozen=True)
class Unhashable(pe.ALiBi):
    """A field that is a list."""

    levels: list = dataclasses.field(default_factory=lambda: [1, 2])


class Remade(Rotary):
    """RoPE with a rule that closes over an array."""

    def rules(self, params, q_features=None, k_features=None):
        table = np.zeros(8, np.float32)
        return pe.LogitBias(lambda shared, head, q, k: jnp.take(table, q - k, mode="clip"))


class ByIdentity(Rotary):
    """Equal to itself only."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


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
    "rule falsely relative": (Biased(6, relative=True), "tiles_equal_the_reference"),
    "trait falsely relative": (Rotary(8, "absolute"), "adding_a_constant_changes_nothing"),
    "bfloat16 angles": (Rotary(8, "bfloat16"), "bfloat16_is_near_float32"),
    "positions from slots": (Rotary(8, "slots"), "coordinates_change_the_output"),
    "unused parameter": (Rotary(8, "gradient"), "every_parameter_has_a_gradient"),
    "another source of randomness": (Unseeded(6), "parameters_are_deterministic_and_float32"),
    "axes in another order": (Misnamed(6), "declared_axes_have_their_sizes"),
    "function made anew": (Remade(8), "second_eager_call_does_not_compile"),
    "equal by identity": (ByIdentity(8), "hashable_and_equal_by_value"),
}


def test_a_field_without_a_hash_is_named():
    with pytest.raises(AssertionError, match="the field `levels` holds a list"):
        testing.PROPERTIES["hashable_and_equal_by_value"].check(testing.Case(Unhashable(6)))


@pytest.mark.parametrize("scheme, name", BROKEN.values(), ids=BROKEN)
def test_broken_scheme_fails_the_property(scheme, name):
    prop = testing.PROPERTIES[name]
    with pytest.raises(AssertionError) as raised:
        prop.check(testing.Case(scheme))
    message = str(raised.value)
    assert repr(scheme) in message
    assert prop.name in message
    assert prop.cause in message


@dataclasses.dataclass(frozen=True)
class NaN(Rotary):
    """RoPE with NaN in one place."""

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        padding = jnp.zeros_like(coordinates) if segment_ids is None else segment_ids < 0
        row = jnp.broadcast_to(padding.any(1, keepdims=True), padding.shape)
        is_nan = {"far": coordinates > 500_000, "padding": padding, "row": row}[self.broken]
        return jnp.where(is_nan, jnp.nan, 0.0), None, state

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        return attention(q, k, v) + q_features[:, :, None, None].astype(q.dtype)


@pytest.mark.parametrize(
    "place, name",
    [
        ("far", "adding_a_constant_changes_nothing"),
        ("padding", "queries_without_keys_give_zeros"),
        ("row", "left_padded_rows_equal_rows_alone"),
        ("row", "nan_in_padding_stays_there"),
    ],
)
def test_nan_fails_the_property(place, name):
    with pytest.raises(AssertionError, match="largest error nan, tolerance"):
        testing.PROPERTIES[name].check(testing.Case(NaN(8, place)))


def test_message_gives_the_measured_error():
    case = testing.Case(Biased(6, relative=True))
    with pytest.raises(AssertionError, match=r"largest error 0\.\d+, tolerance 0.0001\."):
        testing.PROPERTIES["tiles_equal_the_reference"].check(case)


def test_exceptions_of_a_scheme_are_named():
    class Shapes(pe.ALiBi):
        def rules(self, params, q_features=None, k_features=None):
            raise IndexError("too many indices")

    with pytest.raises(AssertionError, match="raised IndexError: too many indices"):
        testing.PROPERTIES["jit_equals_eager"].check(testing.Case(Shapes(6)))


def test_check_names_every_property_that_fails(monkeypatch):
    names = ["hashable_and_equal_by_value", "jit_equals_eager", "nan_in_padding_stays_there"]
    names += ["steps_after_right_padding_equal_rows_alone"]
    some = {name: testing.PROPERTIES[name] for name in names}
    monkeypatch.setattr(testing.properties, "PROPERTIES", some)
    with pytest.raises(AssertionError) as raised:
        testing.check(RunningSum(6, 20, "segment_ids"))
    message = str(raised.value)
    failing = {name for name, p in some.items() if p.name in message}
    assert "steps_after_right_padding_equal_rows_alone" in failing
    assert not {"hashable_and_equal_by_value", "jit_equals_eager"} & failing
    assert message.startswith(f"{len(failing)} of 4 properties fail.")


def test_check_reports_what_it_measured():
    report = testing.check(RunningSum(6, 20))
    assert len(report.rows) == len(testing.PROPERTIES)
    assert all(row.error is None or row.error <= row.tolerance for row in report.rows)
    table = str(report).splitlines()
    assert table[0] == repr(report.scheme)
    assert len(table) == len(testing.PROPERTIES) + 2


def test_sizes_come_from_schemes_inside_others():
    case = testing.Case(pe.chain(pe.RoPE(head_dim=4), pe.ALiBi(num_heads=10)))
    assert (case.num_heads, case.num_kv_heads, case.head_dim, case.model_dim) == (10, 5, 4, 20)
    tables = (pe.LearnedAbsolute(max_length=n, model_dim=20) for n in (99, 64, 500))
    assert testing.Case(pe.chain(*tables)).max_length == 64
    case = testing.Case(pe.NoPE(), num_heads=4, num_kv_heads=4, head_dim=2, model_dim=3)
    assert (case.num_heads, case.num_kv_heads, case.head_dim, case.model_dim) == (4, 4, 2, 3)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="scheme must be a Scheme instance, got <class"):
        testing.check(pe.RoPE)
    with pytest.raises(ValueError, match=r"max_length must be at least 64 .* got 8"):
        testing.check(pe.LearnedAbsolute(max_length=8, model_dim=4))
