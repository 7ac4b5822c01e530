"""Cases of kernels beside those of `posenc_jax.kernels.checks`: other rules and arguments."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

import posenc_jax as pe
from posenc_jax.engine.problem import repeat_heads
from posenc_jax.engine.rules import ContentBias, LogitBias
from posenc_jax.kernels.checks import cases
from posenc_jax.kernels.checks.cases import Case, RuleCase
from tests import oracle
from tests.engine.rules import KINDS, explicit_mask


def _rule(make, rules):
    """Returns a rule whose features are arrays like q and k; `make` gives its other parameters."""

    def arrays(random, c):
        q, k = (c.batch, c.length, c.heads, c.dim), (c.batch, c.key_count, c.kv_heads, c.dim)
        features = {name: random.normal(size=size) for name, size in (("q", q), ("k", k))}
        return features | {"params": make(random, c)}

    return RuleCase(arrays, lambda p: rules(p["params"], p["q"], p["k"]))


def _of_kind(random, c, name):
    return KINDS[name].make(random, c.heads, c.dim)


def _scalars(shared, head, q, k):
    """KERPLE's logarithm."""
    return -head["r"] * jnp.log1p(head["s"] * jnp.abs(q - k).astype(jnp.float32))


def _hiding(shared, head, q, k):
    return jnp.where((q - k) % 3 == 1, -jnp.inf, -shared * (q - k).astype(jnp.float32))


def _hides(slope):
    return (LogitBias(_hiding, shared=slope, relative=True),)


def _past(shared, head, q, k):
    """NaN at later keys."""
    return -shared * jnp.log1p((q - k).astype(jnp.float32))


def _by_query_head(params, q, k):
    """Features of keys per query head."""
    features = repeat_heads(k, q.shape[2])
    heads = jnp.linspace(0.5, 1.5, q.shape[2])[None, None, :, None]
    return KINDS["wide"].rules(params, q, features * heads)[1:]


def _distance_and_pairs(params, q, k):
    """Rules by distance, and of pairs, which are infinite for padding of zero and NaN ahead."""

    def falls(shared, head, q_idx, k_idx):
        return -0.5 * jnp.log1p((q_idx - k_idx).astype(jnp.float32))

    def divides(shared, head, row, col, q_idx, k_idx):
        return -jnp.abs(q_idx - k_idx).astype(jnp.float32) / (64.0 * row * col)

    features = {"q_features": 1.0 + q[..., 0] ** 2, "k_features": 1.0 + k[..., 0] ** 2}
    pairs = LogitBias(falls), ContentBias(divides, **features)
    return (*pairs, *_hides(params))


SEVERAL = "pair", "hiding", "separable"
cases.RULES |= {
    name: _rule(lambda random, c, name=name: _of_kind(random, c, name), KINDS[name].rules)
    for name in ("scaled", "narrow", "wide", "unbounded")
} | {
    "kerple by pair": RuleCase(
        lambda random, c: {"r": np.linspace(0.2, 0.9, c.heads), "s": np.ones(c.heads)},
        lambda p: (LogitBias(_scalars, heads=p),),
    ),
    "hiding": RuleCase(lambda random, c: {"slope": np.float64(0.05)}, lambda p: _hides(p["slope"])),
    "past": RuleCase(
        lambda random, c: {"slope": np.float64(0.5)},
        lambda p: (LogitBias(_past, shared=p["slope"]),),
    ),
    "several": RuleCase(
        lambda random, c: {name: cases.RULES[name].make(random, c) for name in SEVERAL},
        lambda p: tuple(rule for name in SEVERAL for rule in cases.RULES[name].rules(p[name])),
    ),
    "distance and pairs": _rule(lambda random, c: np.float64(0.05), _distance_and_pairs),
    "by query head": _rule(lambda random, c: _of_kind(random, c, "wide"), _by_query_head),
    # With a rule by distance, and another array that heads and rows share.
    "all pairs": _rule(
        lambda random, c: random.normal(size=(c.heads, c.length, c.key_count)),
        KINDS["all_pairs"].rules,
    ),
}


def case_of(rule="none", **settings):
    """Returns a case of a rule, by default 200 tokens and two heads of 64 in float32."""
    return Case(rule, rule, **{"length": 200, "dim": 64, "dtype": "float32"} | settings)


def arrays_of_case(case, *, prefix=None, sinks_per_query=False, value_dim=None):
    """Returns the arrays of a case, with more arguments of `attention`."""
    x, random = dict(cases.inputs(case)), np.random.default_rng(1)
    if prefix is not None:
        x["prefix_length"] = np.array(prefix, np.int32)
    if sinks_per_query:
        shape = x["q"].shape[:3]
        x["sinks"] = np.linspace(-1.0, 3.0, np.prod(shape), dtype=np.float32).reshape(shape)
    if value_dim is not None:
        for name in ("v", "d_out"):
            shape = *x[name].shape[:3], value_dim
            x[name] = random.normal(size=shape).astype(x[name].dtype)
    return x


def program(case, implementation, lse=True):
    """Returns the function of the arrays: output, log-sum-exp and all gradients, by name."""
    return cases.program(case, implementation, gradients=True, lse=lse)


def exact(case, x):
    """Returns all results of a case without a rule, by NumPy in float64."""
    names = "q_positions", "k_positions", "q_coordinates", "k_visible_until"
    options = {"is_causal": case.causal} | {name: x[name] for name in names if name in x}
    if case.images:
        sides = case.window[0], case.length
        options["window"] = pe.SlidingWindow(sides, by="coordinates")
    if case.blocks:
        options["mask"] = pe.block_mask(cases._in_blocks, case.length, case.length)
    seen = explicit_mask(options, case.batch, case.heads, case.length)["mask"]
    rows = []
    for row, of_row in enumerate(seen):
        *arrays, d_out, d_lse = (x[n][row : row + 1] for n in ("q", "k", "v", "d_out", "d_lse"))
        numbers = {"added": np.zeros(of_row.shape, "f4"), "scale": case.dim**-0.5}
        parts = oracle.attention(arrays, seen=of_row, d_out=d_out, d_lse=d_lse, **numbers)
        rows.append(parts[:5])
    results = (np.concatenate(parts).swapaxes(1, 2) for parts in zip(*rows, strict=True))
    return dict(zip(("output", "lse", "dq", "dk", "dv"), results, strict=True))


def assert_equals_the_reference(case, implementation, x=None, lse=True, expected=None):
    """Compares all results to 3e-5 of the largest of each, or 1e-4; of rules none may be zero."""
    x = arrays_of_case(case) if x is None else x
    got = jax.device_get(program(case, implementation, lse)(x))
    if expected is None:
        expected = jax.device_get(program(case, "reference", lse)(x))
    # The reference adds angles of up to 200 in float32, the rule takes their differences.
    assert_close(got, expected, 1e-4 if case.rule == "unbounded" else 3e-5)
    for name, y in got.items():  # A rule may read the features of `_rule`, or their sizes alone.
        empty = [x for x in jax.tree.leaves(y) if not np.any(x)]
        assert not empty or name in ("gradient of q", "gradient of k"), name


def rules_of(name, dim):
    """Returns the rules of a kind for 64 tokens with two heads."""
    q = jnp.zeros((1, 64, 2, dim))
    return KINDS[name].rules(KINDS[name].make(np.random.default_rng(0), 2, dim), q, q)


def refusal(implementation, rules=(), dtype=jnp.bfloat16, dim=64, batch=1, **options):
    """Returns why an implementation refuses a call."""
    q = jnp.zeros((batch, 64, 2, dim), dtype)
    with pytest.raises(NotImplementedError) as error:
        pe.attention(q, q, q, rules=rules, implementation=implementation, **options)
    return str(error.value)


def on_mesh(mesh, x, batch, heads):
    """Returns arrays on a mesh: key heads where they divide, parameters whole."""

    def put(y, *spec):
        return jax.device_put(y, NamedSharding(mesh, PartitionSpec(*spec[: y.ndim])))

    def token(y):
        fits = y.ndim > 2 and heads is not None and y.shape[2] % mesh.shape[heads] == 0
        return put(y, batch, None, heads if fits else None)

    whole = {"params": jax.tree.map(put, x["params"])}
    return {name: token(y) for name, y in x.items() if name != "params"} | whole


def assert_close(got, expected, tolerance=3e-5):
    """Compares numbers to 3e-5 of the largest of each array."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max()))


def abstract_device(kind):
    """Returns a described TPU of a kind."""
    about = {"device_kind": kind, "num_cores": 1, "platform": "tpu"}
    known = inspect.signature(AbstractDevice).parameters  # jax 0.10.0 has no platform there.
    return AbstractDevice(**{name: x for name, x in about.items() if name in known})


def described(kind):
    """Returns a context in which programs are compiled for a TPU of a kind."""
    mesh = AbstractMesh((1,), ("x",), abstract_device=abstract_device(kind))
    return jax.sharding.use_abstract_mesh(mesh)


def _equations(jaxpr, inside=False):
    """Yields the equations of a jaxpr, nested ones included, and whether a kernel has them."""
    for equation in jaxpr.eqns:
        yield equation, inside
        within = inside or equation.primitive.name == "pallas_call"
        for x in jax.tree.leaves(list(equation.params.values())):
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                yield from _equations(x, within)


def arrays_of(jaxpr):
    """Returns the types of the results of all equations of a jaxpr."""
    return [x.aval for e, _ in _equations(jaxpr) for x in e.outvars if hasattr(x.aval, "shape")]


def products_in_kernels(jaxpr):
    """Returns the matrix products of the kernels in a jaxpr."""
    return [e for e, inside in _equations(jaxpr) if inside and e.primitive.name == "dot_general"]
