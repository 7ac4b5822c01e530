"""Schemes and rules written by a user, of ten to twenty lines, that use rarer hooks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc_jax as pe
from posenc_jax import testing
from posenc_jax.nnx import Attention
from tests.support import SIZES, slow, slow_but


def gate_difference(shared, head, row, col, q, k):
    return row - col


@dataclasses.dataclass(frozen=True)
class KeyFoX(pe.Scheme):
    """FoX with gates from the keys, one for each key head, which no layer has to provide."""

    num_heads: int
    head_dim: int

    def init(self, key):
        return {"w": jax.random.normal(key, (self.head_dim,))}

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        k = k if segment_ids is None else jnp.where(real(segment_ids, 4), k, 0.0)
        gates = jax.nn.log_sigmoid(jnp.einsum("btkh,h->btk", k, params["w"]))
        gates = jnp.repeat(gates, self.num_heads // k.shape[2], axis=2)
        if segment_ids is not None:
            gates = jnp.where(real(segment_ids, 3), gates, 0.0)
        before = jnp.zeros_like(gates[:, 0]) if state is None else state
        sums = before[:, None] + jnp.cumsum(gates, 1)
        return sums, sums, sums[:, -1]

    def rules(self, params, q_features=None, k_features=None):
        return pe.ContentBias(gate_difference, q_features=q_features, k_features=k_features)


def real(segment_ids, rank):
    return (segment_ids >= 0).reshape(*segment_ids.shape, *(1,) * (rank - 2))


@pytest.fixture(scope="module")
def chained():
    return testing.Case(pe.chain(KeyFoX(SIZES["num_heads"], SIZES["head_dim"])))


@slow
@pytest.mark.parametrize(
    "name",
    ["steps_after_right_padding_equal_rows_alone", "nan_in_the_padding_of_a_prompt_stays_there"],
)
def test_padding_does_not_change_a_running_sum_in_a_chain(chained, name):
    testing.PROPERTIES[name].check(chained)


class Undecorated(pe.NoPE):
    """A setting that is no field, for lack of a decorator."""

    temperature: float = 2.0


class LikeTorch(pe.Scheme):
    """Settings of an `__init__`, which neither equality nor a hash would see."""

    def __init__(self, strength):
        object.__setattr__(self, "strength", strength)


class Renamed(pe.NoPE):
    """A subclass without settings of its own needs no decorator."""

    name = "renamed"


def test_settings_that_would_not_be_compared_are_refused():
    for make in (Undecorated, lambda: LikeTorch(2.0)):
        with pytest.raises(
            TypeError, match=r"must be a dataclass.*put @dataclasses.dataclass\(froz"
        ):
            make()
    assert Renamed() == Renamed() and not Renamed().acts


def test_a_subclass_acts_where_its_hooks_do():
    class Biased(pe.NoPE):
        def rules(self, params, q_features=None, k_features=None):
            return pe.ALiBi(2).rules({})

    assert Biased().acts == pe.Acts.LOGITS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerPair(pe.Rule):
    """A number of one query and one key."""

    heads: jax.Array

    def on(self, transform):
        return self

    def logit(self, q, k):
        return -self.heads * jnp.abs(q.coordinates - k.coordinates).astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerTile(pe.Rule):
    """All numbers of a head at once."""

    heads: jax.Array

    def on(self, transform):
        return self

    def tile(self, q, k, seen=None):
        distances = jnp.abs(q.coordinates[:, None] - k.coordinates[None])
        return -self.heads * distances.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Unregistered(pe.Rule):
    def on(self, transform):
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Empty(Unregistered):
    """A rule without a number."""


@pytest.mark.parametrize("cls", slow_but([PerPair, PerTile], PerPair))
@pytest.mark.parametrize("implementation", slow_but(["reference", "dense", "xla"], "xla"))
def test_a_rule_is_one_method(cls, implementation):
    """Beside float64 logits in NumPy; gradients are those of "reference"."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 40, 2, 8)).astype(np.float32)
    slopes = jnp.array([0.5, 0.1])

    @functools.partial(jax.jit, static_argnums=1)
    def attend(slopes, implementation):
        out = pe.attention(q, k, v, rules=cls(slopes), implementation=implementation)
        return (out**2).sum(), out

    (_, out), slope = jax.value_and_grad(attend, has_aux=True)(slopes, implementation)
    distances = np.abs(np.arange(40)[:, None] - np.arange(40))
    logits = np.einsum("btnh,bsnh->bnts", q, k, dtype=np.float64) / 8**0.5
    logits -= np.array([0.5, 0.1])[:, None, None] * distances
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bnts,bsnh->btnh", weights, v)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    (_, expected) = jax.value_and_grad(attend, has_aux=True)(slopes, "reference")
    np.testing.assert_allclose(slope, expected, rtol=1e-5)


def test_rules_that_are_incomplete_are_named():
    q = k = v = np.ones((1, 4, 2, 8), np.float32)
    with pytest.raises(TypeError, match="Empty adds nothing: it has no `logit` and no `tile`"):
        pe.attention(q, k, v, rules=Empty())
    with pytest.raises(TypeError, match=r"Unregistered must be a pytree: put @jax.tree_util.regis"):
        pe.attention(q, k, v, rules=Unregistered())


@slow
def test_buckets_outside_of_a_table_are_the_nearest():
    """Buckets -3 to 9 of a table of 6, as with those of a function that clips."""
    numbers = np.random.default_rng(0)
    q, k, v = numbers.normal(size=(3, 1, 40, 2, 8)).astype(np.float32)
    table = numbers.normal(size=(2, 6, 8)).astype(np.float32)

    def bucket(i, j):
        return jnp.clip(i - j, -3, 9)

    def clipped(i, j):
        return jnp.clip(i - j, 0, 5)

    expected = pe.attention(q, k, v, rules=pe.ValueBias(clipped, table), implementation="reference")
    for implementation, relative in (("reference", False), ("dense", True), ("xla", True)):
        rule = pe.ValueBias(bucket, table, relative=relative)
        out = pe.attention(q, k, v, rules=rule, implementation=implementation)
        np.testing.assert_allclose(out, expected, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Wider(pe.Scheme):
    """Appends zeros to q and k, which change no product."""

    def query(self, params, q, coordinates, features=None, tables=None):
        return jnp.pad(q, ((0, 0),) * 3 + ((0, 24),))

    key = query


@slow
def test_the_factor_on_products_is_that_of_the_projections():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 12, 2, 8))
    out, expected = (pe.scheme_attention(s, {}, q, k, v)[0] for s in (Wider(), pe.NoPE()))
    np.testing.assert_allclose(out, expected, atol=1e-6)


def penalty(shared, head, q, k):
    return -head * jnp.abs(q - k).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Values(pe.Scheme):
    """A `ValueBias` that `acts` does not tell of."""

    def rules(self, params, q_features=None, k_features=None):
        return pe.ValueBias(lambda i, j: jnp.clip(i - j, 0, 3), jnp.ones((2, 4, 8)))


@dataclasses.dataclass(frozen=True)
class Sums(pe.Scheme):
    """A state that mixes rows, and features of `x`."""

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        total = x.astype(jnp.float32).sum()
        return None, None, total if state is None else state + total

    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(penalty, heads=jnp.ones(2))


@dataclasses.dataclass(frozen=True)
class Attends(pe.Scheme):
    def attend(self, params, q, k, v, i, j, f, g, attention):
        return attention.replace(return_lse=True)(q, k, v)


@dataclasses.dataclass(frozen=True)
class PythonFloat(pe.Scheme):
    num_heads: int

    def init(self, key):
        return {"strength": 0.3}

    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(penalty, heads=params["strength"] * jnp.ones(self.num_heads))


def test_mistakes_of_hooks_are_named():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 12, 2, 8))
    assert jnp.isfinite(pe.scheme_attention(Values(), {}, q, k, v)[0]).all()
    with pytest.raises(TypeError, match=r"Values has .* so: acts = pe.Acts.LOGITS \| pe.Acts.VAL"):
        pe.scheme_attention(pe.chain(pe.NoPE(), Values()), ({}, {}), q, k, v)
    with pytest.raises(TypeError, match=r"Attends.attend must return an array, got tuple"):
        pe.scheme_attention(Attends(), {}, q, k, v)
    with pytest.raises(AttributeError) as raised:
        pe.scheme_attention(Sums(), {}, q, k, v)
    assert "x is None in Sums.features" in raised.value.__notes__[0]
    with pytest.raises(ValueError, match=r"state of Sums must be \[B, ...\] with B = 3, got \(\)"):
        pe.new_cache(Sums(), 3, 8, num_heads=2, num_kv_heads=2, head_dim=8, model_dim=16)
    layer = Attention(16, 2, position=PythonFloat(2), rngs=nnx.Rngs(0))
    assert layer(jnp.ones((1, 3, 16))).shape == (1, 3, 16)
