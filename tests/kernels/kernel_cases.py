"""Cases of kernels beside those of `posenc_jax.kernels.checks`: other rules and arguments."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh

from posenc_jax.engine.problem import repeat_heads
from posenc_jax.engine.rules import ContentBias, LogitBias
from posenc_jax.kernels.checks import cases
from posenc_jax.kernels.checks.cases import Case, RuleCase
from tests import oracle
from tests.engine.rules import KINDS


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


def _kerple(random, c):
    return {"r": np.linspace(0.2, 0.9, c.heads), "s": np.ones(c.heads)}


def _hiding(shared, head, q, k):
    return jnp.where((q - k) % 3 == 1, -jnp.inf, -shared * (q - k).astype(jnp.float32))


def _hides(params, q, k):
    return (LogitBias(_hiding, shared=params, relative=True),)


def _past(shared, head, q, k):
    """NaN at later keys."""
    return -shared * jnp.log1p((q - k).astype(jnp.float32))


def _gate(shared, head, row, col, q, k):
    return head * jnp.tanh(row - col) - shared * (q - k).astype(jnp.float32) / 100.0


def _gated(params, q, k):
    features = {"q_features": q[..., 0], "k_features": k[..., 0]}
    return (ContentBias(_gate, heads=params, shared=jnp.float32(0.3), **features),)


def _several(params, q, k):
    separable = KINDS["separable"].rules(params["separable"], q, k)
    return *_gated(params["gates"], q, k), *_hides(params["slope"], q, k), *separable


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
    return (*pairs, *_hides(params, q, k))


def _numbers(random, c):
    """Numbers of `_several`."""
    numbers = {"gates": np.linspace(0.5, 1.0, c.heads), "slope": np.float64(0.05)}
    return numbers | {"separable": _of_kind(random, c, "separable")}


cases.RULES |= {
    name: _rule(lambda random, c, name=name: _of_kind(random, c, name), KINDS[name].rules)
    for name in ("scaled", "narrow", "wide", "unbounded")
} | {
    "kerple": _rule(
        _kerple,
        lambda params, q, k: (LogitBias(_scalars, heads=params, relative=True),),
    ),
    "kerple by pair": _rule(_kerple, lambda params, q, k: (LogitBias(_scalars, heads=params),)),
    "hiding": _rule(lambda random, c: np.float64(0.05), _hides),
    "past": _rule(
        lambda random, c: np.float64(0.5), lambda params, q, k: (LogitBias(_past, shared=params),)
    ),
    "gate": _rule(lambda random, c: np.linspace(0.5, 1.0, c.heads), _gated),
    "several": _rule(_numbers, _several),
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
    slots = np.arange(case.length)
    q, k = (x.get(f"{name}_positions", slots) for name in "qk")
    seen = (q[:, None] >= k) | (not case.causal)
    if case.images:
        away, (left_side, _) = slots[:, None] - slots, case.window
        seen &= away <= left_side
    if case.blocks:
        is_far = (slots[:, None] - slots) % 40 == 3
        seen &= (slots[:, None] // 128 + slots // 128) % 3 != np.where(is_far, 0, 1)
    rows = []
    for row in range(case.batch):
        q_row, k_row, v_row, *cotangents = (
            x[n][row : row + 1] for n in ("q", "k", "v", "d_out", "d_lse")
        )
        of_row = seen & (q[:, None] < x["k_visible_until"][row]) if case.branches else seen
        zeros, scale = np.zeros((1, *seen.shape), np.float32), case.dim**-0.5
        arrays = q_row, k_row, v_row
        rows.append(oracle.attention(arrays, zeros, of_row, *cotangents, scale=scale)[:5])
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


def arrays_of(jaxpr):
    """Returns the types of the results of all equations of a jaxpr, nested ones included."""
    arrays = [x.aval for e in jaxpr.eqns for x in e.outvars if hasattr(x.aval, "shape")]
    for x in jax.tree.leaves([list(e.params.values()) for e in jaxpr.eqns]):
        x = getattr(x, "jaxpr", x)
        arrays += arrays_of(x) if hasattr(x, "eqns") else []
    return arrays


def products_in_kernels(jaxpr, inside=False):
    """Returns the matrix products of the kernels in a jaxpr."""
    products = [e for e in jaxpr.eqns if inside and e.primitive.name == "dot_general"]
    for equation in jaxpr.eqns:
        within = inside or equation.primitive.name == "pallas_call"
        for x in jax.tree.leaves(list(equation.params.values())):
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                products += products_in_kernels(x, within)
    return products
