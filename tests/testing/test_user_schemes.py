"""Schemes and rules written by a user, of ten to twenty lines, that use rarer hooks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc_jax as pe
from posenc_jax.nnx import Attention
from tests import oracle
from tests.support import slow, slow_but


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
    """The output, and the gradient of the slopes."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 40, 2, 8)).astype(np.float32)
    slopes = np.array([0.5, 0.1], np.float32)

    @functools.partial(jax.jit, static_argnums=1)
    def attend(slopes, implementation):
        out = pe.attention(q, k, v, rules=cls(slopes), implementation=implementation)
        return (out**2).sum(), out

    (_, out), slope = jax.value_and_grad(attend, has_aux=True)(slopes, implementation)
    distances = np.abs(np.arange(40)[:, None] - np.arange(40))
    added = -slopes[:, None, None] * distances.astype(np.float32)
    seen, d_lse = np.ones((40, 40), bool), np.zeros((1, 40, 2))
    expected, *_, d_logits, _ = oracle.attention((q, k, v), added, seen, 2 * out, d_lse)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(slope, -(d_logits * distances).sum((1, 2)), rtol=1e-4)


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
