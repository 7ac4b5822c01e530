"""`implementation="jax"` and "cudnn": exact where they do not refuse."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import qkv
from support import one_of_all

import posenc_jax as pe
from posenc_jax.engine import jax_nn
from posenc_jax.engine.api import choose, make_problem
from posenc_jax.engine.rules import as_tuple

Q, K, V = qkv(batch=2, length=12, heads=4, kv_heads=2)


def _blind():
    """Query 3 of row 1 sees nothing, and nobody sees key 5."""
    mask = np.random.default_rng(4).random((2, 1, 12, 12)) < 0.5
    mask[1, 0, 3] = mask[:, 0, :, 5] = False
    return mask


CASES = [({}, True), ({"is_causal": True}, False), ({"window": (3, 1), "scale": 0.2}, False)]
CASES += [({"is_causal": True, "window": 4}, True)]
MORE_CASES = [(options, not masked) for options, masked in CASES]


@pytest.mark.parametrize(
    ("options", "masked"), [*CASES, *(pytest.param(*case, marks=one_of_all) for case in MORE_CASES)]
)
def test_equals_the_reference(options, masked):
    options = options | ({"mask": _blind()} if masked else {})
    k, v = K.copy(), V.copy()
    if masked:
        k[:, 5] = v[:, 5] = np.nan

    def run(implementation):
        def loss(q, k, v):
            out = pe.attention(q, k, v, **options, implementation=implementation)
            return jnp.sum(out**2), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(Q, k, v)

    chex.assert_trees_all_close(run("jax"), run("reference"), atol=5e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": pe.ALiBi(num_heads=4).rules({})}, "rules"),
        ({"sinks": jnp.zeros(4)}, "sinks"),
        ({"softcap": 2.0}, "softcap"),
        ({"return_lse": True}, "log-sum-exp"),
        ({"q_segment_ids": np.zeros((2, 12), np.int32)}, "segments"),
        ({"is_causal": True, "q_positions": np.arange(12), "k_positions": np.arange(12)}, "posi"),
    ],
)
def test_refuses_what_it_cannot_do(options, message):
    with pytest.raises(NotImplementedError, match=message):
        pe.attention(Q, K, V, **options, implementation="jax")


@pytest.fixture
def on_gpu(monkeypatch):
    """A GPU of compute capability 8.0, and what `jax.nn` computes on it."""
    asked = []
    attend = jax.nn.dot_product_attention

    def fake(*args, implementation, **options):
        asked.append(implementation)
        with jax.numpy_dtype_promotion("standard"):
            return attend(*args, **options, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", fake)
    monkeypatch.setattr(jax_nn, "_compute_capability", lambda: 8.0)
    return asked


def _problem(q, k, v, **options):
    return make_problem(q, k, v, as_tuple(options.pop("rules", ())), pe.AttentionCall(**options))


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "window": 4}])
def test_cudnn_is_asked_for_the_same_attention(on_gpu, options):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (Q, K, V))
    run = functools.partial(pe.attention, q, k, v, **options)
    got, expected = run(implementation="cudnn"), run(implementation="reference")
    assert on_gpu == ["cudnn"]
    chex.assert_trees_all_close(got, expected, atol=2e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": _blind()}, "mask"),
        ({"window": 4}, "windows only with is_causal"),
        ({"rules": pe.ALiBi(num_heads=4).rules({})}, "rules"),
    ],
)
def test_cudnn_refuses_what_it_cannot_do(on_gpu, options, message):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (Q, K, V))
    with pytest.raises(NotImplementedError, match=message):
        pe.attention(q, k, v, **options, implementation="cudnn")


def test_cudnn_needs_a_gpu_of_its_dtypes_and_head_dims(on_gpu, monkeypatch):
    def message(q, **options):
        problem = _problem(q, q, q, **options)
        return jax_nn.CuDNN().supports(dataclasses.replace(problem, needs_lse=False))

    half = jnp.zeros((1, 64, 2, 136), jnp.bfloat16)
    assert message(half[..., :128]) is None
    assert "at most 128" in message(half)
    assert "multiple of 8" in message(half[..., :36])
    assert "bfloat16" in message(half[..., :128].astype(jnp.float32))
    monkeypatch.setattr(jax_nn, "_compute_capability", lambda: 9.0)
    assert message(half) is None
    monkeypatch.setattr(jax_nn, "_compute_capability", lambda: 7.5)
    assert "8.0 or later" in message(half)
    monkeypatch.undo()
    assert "NVIDIA GPU" in message(half)


def test_none_chooses_cudnn_on_gpus_where_it_serves(on_gpu):
    def chosen(q, needs_lse=False, **options):
        problem = dataclasses.replace(_problem(q, q, q, **options), needs_lse=needs_lse)
        return choose(problem, "gpu").name

    half = jnp.zeros((1, 64, 4, 64), jnp.bfloat16)
    assert chosen(half, is_causal=True) == "cudnn"
    assert chosen(half, needs_lse=True) == "xla"
    assert chosen(half.astype(jnp.float32)) == "xla"
    assert chosen(half, rules=pe.ALiBi(num_heads=4).rules({})) == "xla"
    assert chosen(half[:, :1]) == "dense"
