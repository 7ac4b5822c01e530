"""Problems for the kernels of any platform, and their outcomes."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh

import posenc_jax as pe
from posenc_jax.engine.problem import repeat_heads
from posenc_jax.engine.rules import ContentBias, LogitBias, Rule
from tests.engine.rules import KINDS, explicit_mask

B = 2


def _order(length):
    return np.random.default_rng(5).permutation(length).astype(np.int32)


def _segments(length):
    """Packed rows; a segment starts and ends inside a tile, and padding is on both sides."""
    ids = np.zeros((B, length), np.int32)
    ids[0, 100:], ids[0, 190:], ids[1, :30], ids[1, 129:] = 1, -1, -1, 1
    return ids


FEATURES = {
    "plain": lambda t: {},
    "causal": lambda t: {"is_causal": True},
    "window": lambda t: {"is_causal": True, "window": 70},
    "two_sided_window": lambda t: {"window": (60, 3)},
    "segments": lambda t: {
        "is_causal": True,
        "q_segment_ids": _segments(t),
        "contiguous": True,
    },
    "both_ways_segments": lambda t: {"q_segment_ids": _segments(t), "contiguous": True},
    "prefix": lambda t: {"is_causal": True, "prefix_length": np.array([100, 20], np.int32)},
    "softcap": lambda t: {"is_causal": True, "softcap": 3.0},
    "sinks": lambda t: {
        "is_causal": True,
        "sinks": np.linspace(-1.0, 3.0, B * t * 2, dtype=np.float32).reshape(B, t, 2),
    },
    "everything": lambda t: {
        "is_causal": True,
        "prefix_length": np.array([100, 40], np.int32),
        "q_segment_ids": _segments(t),
        "contiguous": True,
        "softcap": 3.0,
        "sinks": np.array([0.3, -1.0], np.float32),
    },
    "dropout": lambda t: {
        "is_causal": True,
        "q_segment_ids": _segments(t),
        "contiguous": True,
        "dropout_rate": 0.3,
        "dropout_key": jax.random.key(8),
    },
    "permuted": lambda t: {
        "is_causal": True,
        "window": 200,
        "q_positions": _order(t),
        "k_positions": _order(t),
    },
    "chunk": lambda t: {
        "is_causal": True,
        "q_positions": np.arange(60, t, dtype=np.int32),
        "k_positions": np.arange(t, dtype=np.int32),
    },
}


def _learned(shared, head, q, k):
    """Unbounded, with two learned numbers per head: KERPLE's logarithm."""
    return -head[0] * jnp.log1p(head[1] * jnp.abs(q - k).astype(jnp.float32))


def _scalars(shared, head, q, k):
    return -head["r"] * jnp.log1p(head["s"] * jnp.abs(q - k).astype(jnp.float32))


def _same_for_all(shared, head, q, k):
    return -shared * jnp.abs(q - k).astype(jnp.float32)


def _hiding(shared, head, q, k):
    return jnp.where((q - k) % 3 == 1, -jnp.inf, -shared * (q - k).astype(jnp.float32))


def _gate(shared, head, row, col, q, k):
    return head * jnp.tanh(row - col) - shared * (q - k).astype(jnp.float32) / 100.0


def _kerple_params(heads, dim):
    return {"r": np.linspace(0.2, 0.9, heads, dtype=np.float32), "s": np.ones(heads, np.float32)}


def _kerple(params, q, k):
    heads = jnp.stack([params["r"], params["s"]], 1)
    return LogitBias(_learned, heads=heads, relative=True)


def _kerple_by_pair(params, q, k):
    return LogitBias(_scalars, heads=params)


RULES = {
    name: (lambda n, dim, kind=kind: kind.make(np.random.default_rng(3), n, dim), kind.rules)
    for name, kind in KINDS.items()
    if name in ("none", "t5", "alibi", "scaled", "separable", "narrow", "wide", "unbounded")
}
RULES |= {
    "kerple": (_kerple_params, _kerple),
    "kerple_by_pair": (_kerple_params, _kerple_by_pair),
    "same_for_all": (
        lambda n, dim: jnp.float32(0.05),
        lambda params, q, k: LogitBias(_same_for_all, shared=params, relative=True),
    ),
    "hiding": (
        lambda n, dim: jnp.float32(0.05),
        lambda params, q, k: LogitBias(_hiding, shared=params, relative=True),
    ),
    "gate": (
        lambda n, dim: {
            "shared": jnp.float32(0.3),
            "heads": np.linspace(0.5, 1.0, n, dtype=np.float32),
        },
        lambda params, q, k: ContentBias(
            _gate,
            **params,
            q_features=q[..., 0].astype(jnp.float32),
            k_features=k[..., 0].astype(jnp.float32),
        ),
    ),
}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def outcome(implementation, rule, options, arrays, dynamic):
    """Output, log-sum-exp, and the gradients of both to all that can have one."""

    def loss(arrays):
        q, k, v = (arrays[n] for n in "qkv")
        all_options = dict(options) | dynamic
        sinks = arrays.get("sinks")
        rules = RULES[rule][1](arrays["params"], q, k)
        out, lse = pe.attention(
            q,
            k,
            v,
            rules=rules,
            sinks=sinks,
            return_lse=True,
            implementation=implementation,
            **all_options,
        )
        seen = ~jnp.isneginf(lse)
        lse = jnp.where(seen, lse, 0.0)
        total = jnp.sum(out.astype(jnp.float32) * arrays["weights"])
        return total + jnp.sum(lse * arrays["lse_weights"]), (out, lse, seen)

    return jax.grad(loss, has_aux=True)(arrays)


def case_of(
    feature,
    rule,
    *,
    explicit=False,
    length=200,
    heads=2,
    kv_heads=2,
    dim=64,
    value_dim=None,
    dtype=jnp.float32,
    seed=0,
):
    """Returns the rule, the static options, the arrays and the dynamic options of a case.

    `explicit` passes the visible pairs as a mask: features then share a program of the reference.
    """
    options = FEATURES[feature](length)
    options = explicit_mask(options, B, heads, length) if explicit else options
    queries = options["q_positions"].shape[0] if "q_positions" in options else length
    random = np.random.default_rng(seed)

    def normal(*shape, dtype=np.float32):
        return jnp.asarray(random.normal(size=shape).astype(np.float32).astype(dtype))

    arrays = {
        "q": normal(B, queries, heads, dim, dtype=dtype),
        "k": normal(B, length, kv_heads, dim, dtype=dtype),
        "v": normal(B, length, kv_heads, value_dim or dim, dtype=dtype),
        "params": RULES[rule][0](heads, dim),
        "weights": normal(B, queries, heads, value_dim or dim),
        "lse_weights": normal(B, queries, heads),
    }
    if "sinks" in options:
        arrays["sinks"] = options.pop("sinks")
    dynamic = {n: x for n, x in options.items() if isinstance(x, jax.Array | np.ndarray)}
    static = tuple((n, x) for n, x in options.items() if n not in dynamic)
    return rule, static, arrays, dynamic


def assert_close(got, expected, tolerance=3e-5):
    """To 3e-5 of the largest number of each array."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max()))


def _by_query_head(params, q, k):
    """Adds logits from features of keys per query head."""
    features = repeat_heads(k, q.shape[2])
    heads = jnp.linspace(0.5, 1.5, q.shape[2])[None, None, :, None].astype(q.dtype)
    return KINDS["wide"].rules(params, q, features * heads)[1:]


RULES["by_query_head"] = (RULES["wide"][0], _by_query_head)


def _several(params, q, k):
    rules = (RULES[name][1](params[name], q, k) for name in SEVERAL)
    return jax.tree.leaves([*rules], is_leaf=lambda x: isinstance(x, Rule))


SEVERAL = ("gate", "hiding", "separable")
RULES["several"] = (lambda n, dim: {name: RULES[name][0](n, dim) for name in SEVERAL}, _several)
# With a rule by distance, and another array that heads and rows share.
RULES["all_pairs"] = (
    lambda n, dim: np.random.default_rng(3).normal(size=(n, 200, 200)).astype(np.float32),
    KINDS["all_pairs"].rules,
)
RULES["features"] = (
    lambda n, dim: {},
    lambda params, q, k: ContentBias(
        _gate,
        heads=jnp.linspace(0.5, 1.0, q.shape[2]),
        shared=jnp.float32(0.3),
        q_features=params["row"],
        k_features=params["column"],
    ),
)


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
