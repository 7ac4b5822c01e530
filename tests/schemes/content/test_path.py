"""PaTH against its definition and numbers from a run of the authors' code.

`layer` is the projections of fla-org/flash-linear-attention, fla/layers/path_attn.py, from torch to
NumPy in float64.
"""

import jax
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.schemes.content import path
from tests import oracle
from tests.kernels.kernel_cases import arrays_of
from tests.oracle import qkv
from tests.support import parameters, slow

OPTIONS = {
    pe.PaTH: {"num_kv_heads": 2, "rank": 4, "short_conv": False, "forget_gate": True},
}


def paper(q, k, v, w, beta, gates=None):
    """As the paper writes it, one head, query and key at a time; beta and log gates [B, T, N]."""
    q, k, v, w, beta = (np.asarray(x, np.float64) for x in (q, k, v, w, beta))
    sums = np.zeros(beta.shape) if gates is None else np.cumsum(gates, 1)
    out = np.zeros_like(v)
    for b, n, i in np.ndindex(q.shape[0], q.shape[2], q.shape[1]):
        path, logits = q[b, i, n], np.zeros(i + 1)
        for j in range(i, -1, -1):
            logits[j] = path @ k[b, j, n] + sums[b, i, n] - sums[b, j, n]
            path = path - beta[b, j, n] * (path @ w[b, j, n]) * w[b, j, n]
        weights = np.exp((logits - logits.max()) / np.sqrt(q.shape[-1]))
        out[b, i, n] = weights / weights.sum() @ v[b, : i + 1, n]
    return out


def layer(params, x, head_dim):
    """w and beta of tokens [B, T, D]."""
    x, params = jax.tree.map(lambda a: np.asarray(a, np.float64), (x, params))
    w = x
    for matrix in params["w"]:
        w = w @ matrix
    if "conv" in params:
        padded = np.pad(w, ((0, 0), (2, 0), (0, 0)))
        w = sum(padded[:, i : i + x.shape[1]] * params["conv"][i] for i in range(3))
        w = w / (1 + np.exp(-w))
    w = w.reshape(*w.shape[:2], -1, head_dim)
    w = w / np.sqrt((w**2).sum(-1, keepdims=True) + 1e-6)
    return w, 2 / (1 + np.exp(-(x @ params["beta"] + params["beta_bias"])))


def whole(scheme, params, x, arrays):
    arrays = *arrays, *layer(params, x, scheme.head_dim)
    arrays = (np.repeat(a, scheme.num_heads // a.shape[2], 2) for a in arrays)
    if "gate" not in params:
        return paper(*arrays)
    z = np.asarray(x, np.float64) @ params["gate"]["w"] + params["gate"]["b"]
    return paper(*arrays, -np.logaddexp(0, -z))


VARIANTS = [
    {"rank": None, "num_kv_heads": 3, "short_conv": False},
    {"rank": 4, "forget_gate": True},
    pytest.param({}, marks=slow),
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_matches_the_paper_and_the_layer_of_the_authors(options, monkeypatch):
    monkeypatch.setattr(path, "CHUNK", 8)
    arrays, x = qkv(length=37), np.random.default_rng(1).normal(size=(1, 37, 10)).astype("f4")
    scheme = pe.PaTH(num_heads=6, head_dim=8, model_dim=10, **options)
    params = parameters(scheme)
    out = oracle.attend(scheme, params, *arrays, x=x, is_causal=True, implementation="xla")
    np.testing.assert_allclose(out, whole(scheme, params, x, arrays), atol=1e-5)


def along_path(*arrays):
    """`attend_along_path` of arrays q, k, v, w and beta in float32."""
    call, scale = pe.AttentionCall(is_causal=True), arrays[0].shape[-1] ** -0.5
    arrays = [np.asarray(x, np.float32) for x in arrays]
    return jax.jit(lambda *a: path.attend_along_path(*a, scale, call))(*arrays)


def test_matches_a_run_of_the_authors_code():
    q = np.array([[1, 0], [0, 1], [1, 1], [0.5, -0.5]])
    k = np.array([[1, 1], [0, 1], [-1, 0], [2, 0]])
    w = np.array([[1, 0], [0, 1], [1, 1], [1, -1]], np.float64)
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    weights = [
        [1, 0, 0, 0],
        [0.330238, 0.669762, 0, 0],
        [0.37007, 0.37007, 0.259859, 0],
        [0.125873, 0.255285, 0.255285, 0.363557],
    ]
    arrays = [x[None, :, None] for x in (q, k, np.eye(4), w, np.array([0.5, 1, 1.5, 2]))]
    for got in (paper(*arrays), along_path(*arrays)):
        np.testing.assert_allclose(got[0, :, 0], weights, atol=1e-6)


@slow
def test_reflections_over_many_chunks_keep_their_precision():
    rng = np.random.default_rng(2)
    q, k, v, w = (rng.normal(size=(1, 130, 2, 8)) for _ in range(4))
    w = np.repeat(w[:, :1], 130, 1) + 0.1 * w  # Nearly equal vectors: the worst conditioned T.
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    arrays = q, k, v, w, rng.uniform(1.5, 2.0, size=(1, 130, 2))
    np.testing.assert_allclose(along_path(*arrays), paper(*arrays), atol=1e-5)


def test_a_mask_in_a_step_is_refused():
    """What it hides from this query alone is on the path of others."""
    scheme, q = pe.PaTH(num_heads=6, head_dim=8, model_dim=20), np.ones((1, 1, 6, 8), np.float32)
    options = {"mask": np.ones((1, 1, 1, 4), bool), "x": np.ones((1, 1, 20), np.float32)}

    def step():
        cache = pe.new_cache(scheme, 1, 4, num_heads=6, head_dim=8, model_dim=20)
        return oracle.decode(scheme, parameters(scheme), cache, q, q, q, **options)

    with pytest.raises(NotImplementedError, match="path: a mask in a call with a cache"):
        jax.eval_shape(step)


@slow
def test_memory_is_linear_in_the_length():
    """No array, in the gradient either, has a number for each query and key."""
    length = 16384
    q, k, v = (jax.ShapeDtypeStruct((1, length, 2, 16), np.float32),) * 3
    x = jax.ShapeDtypeStruct((1, length, 16), np.float32)
    scheme = pe.PaTH(num_heads=2, head_dim=16, model_dim=16)
    params = jax.eval_shape(scheme.init, jax.random.key(0))

    def loss(params, q, k, v, x):
        options = {"x": x, "is_causal": True, "implementation": "xla"}
        return pe.scheme_attention(scheme, params, q, k, v, **options)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3, 4)))(params, q, k, v, x)
    assert max(a.size for a in arrays_of(jaxpr.jaxpr)) < length * length / 64


ERRORS = [(pe.PaTH, {"num_kv_heads": 4}, "num_kv_heads must divide num_heads = 6, got 4")]
