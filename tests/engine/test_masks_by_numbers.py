"""Masks of large finite numbers, and of -inf in an array of all pairs, against float64 NumPy.

The first keys are padding: their own queries are masked as a whole by the number, and get the mean
of the values where it is low. Only -inf hides a key.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.dense import Dense
from posenc_jax.engine.xla import XLA
from posenc_jax.kernels.gpu.implementation import PallasGPU
from posenc_jax.kernels.operands import LOG2E
from posenc_jax.kernels.tpu.implementation import PallasTPU
from posenc_jax.sharding import SequenceParallel
from tests.kernels.kernel_cases import assert_close
from tests.oracle import qkv
from tests.support import slow

N, PAD = 6, 3
SCALE = np.float32(8**-0.5)
LEAST = float(np.finfo(np.float32).min)
TILES = XLA(Blocks(16, 8), Blocks(8, 16))
KERNELS = PallasTPU(Blocks(128, 128), Blocks(128, 128), interpret=True)


def _later_or_padding(number, head, q, k):
    return jnp.where((k > q) | (k < PAD), number, 0.0)


def _near(number, head, q, k):
    return jnp.where(q - k < PAD, number, 0.0)


def _hidden(rule, length):
    """Returns the pairs [T, T] that a rule masks by the number."""
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    return i - j < PAD if rule is _near else (j > i) | (j < PAD)


def _rule(rule, number, length):
    if rule is None:
        bias = np.where(_hidden(rule, length), np.float32(number), np.float32(0))
        return pe.DenseBias(jnp.asarray(bias)[None, None])
    return pe.LogitBias(rule, shared=jnp.float32(number), relative=rule is _near)


def _inputs(length, seed=0):
    q, k, v = qkv(length=length, seed=seed)
    random = np.random.default_rng(length)
    d_out, d_lse = (random.normal(size=(1, length, N, *x)).astype("f4") for x in ((8,), ()))
    return (q, k, v), d_out, d_lse


def _oracle(arrays, added, seen, sinks, d_out, d_lse):
    """Returns output, log-sum-exp, and cotangents of q, k, v, the bias and the sinks, in float64.

    Logits are added in float32, as -1e9 + 3 is -1e9 there.
    """
    q, k, v = (np.asarray(x[0], np.float64) for x in arrays)
    k, v = (np.repeat(x, N // x.shape[1], 1) for x in (k, v))
    products = np.einsum("tnh,snh->nts", q, k) * SCALE
    logits = (products.astype("f4") + added).astype(np.float64)
    logits = np.where(seen, logits, -np.inf)
    sinks = np.full((N, 1), -np.inf) if sinks is None else np.asarray(sinks, np.float64)[:, None]
    top = np.maximum(logits.max(-1), sinks)
    top = np.where(np.isneginf(top), 0.0, top)
    p, of_sinks = np.exp(logits - top[..., None]), np.exp(sinks - top)
    total = p.sum(-1) + of_sinks
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    total = np.where(total == 0, 1.0, total)
    p, of_sinks = p / total[..., None], of_sinks / total
    out = np.einsum("nts,snv->tnv", p, v)
    delta = np.einsum("tnv,tnv->nt", d_out[0], out) - d_lse[0].T
    ds = p * (np.einsum("tnv,snv->nts", d_out[0], v) - delta[..., None])
    d_k = np.einsum("nts,tnh->snh", ds, q) * SCALE
    d_v = np.einsum("nts,tnv->snv", p, d_out[0])
    d_k, d_v = (x.reshape(len(x), 3, -1, x.shape[2]).sum(2) for x in (d_k, d_v))
    d_q = np.einsum("nts,snh->tnh", ds, k) * SCALE
    d_sinks = -(of_sinks * delta).sum(1)
    return *(x[None] for x in (out, lse.T, d_q, d_k, d_v)), ds.sum(0), d_sinks


@functools.partial(jax.jit, static_argnums=0)
def _results(implementation, arrays, rule, sinks, d_out, d_lse):
    def attend(arrays, rule, sinks):
        out, lse = pe.attention(
            *arrays, rules=rule, sinks=sinks, return_lse=True, implementation=implementation
        )
        return (out, jnp.where(jnp.isneginf(lse), 0.0, lse)), lse

    (out, _), pull, lse = jax.vjp(attend, arrays, rule, sinks, has_aux=True)
    (q, k, v), rule, sinks = pull((out * 0 + d_out, d_lse))
    return out, lse, q, k, v, rule, sinks


def _compare(implementation, arrays, rule, added, seen, sinks, d_out, d_lse):
    results = _results(implementation, arrays, rule, sinks, d_out, d_lse)
    out, lse, q, k, v, d_rule, d_sinks = jax.device_get(results)
    want = _oracle(arrays, added, seen, sinks, d_out, d_lse)
    assert_close((out, q, k, v), (want[0], *want[2:5]))
    least = LEAST / LOG2E if isinstance(implementation, PallasTPU | PallasGPU) else LEAST
    np.testing.assert_allclose(lse, np.maximum(want[1], least), rtol=1e-6, atol=1e-5)
    if isinstance(rule, pe.DenseBias):
        assert_close(d_rule.pairs[0, 0], want[5])
    else:
        masked = np.sum(want[5], where=added == np.float32(rule.shared))
        np.testing.assert_allclose(d_rule.shared, masked, atol=3e-5 * np.abs(want[5]).sum())
    assert (d_sinks is None) == (sinks is None)
    if sinks is not None:
        assert_close(d_sinks, want[6])


@pytest.mark.parametrize(
    ("implementation", "rule", "length"),
    [
        ("reference", _near, 63),
        (Dense(block=2**12), None, 63),
        (TILES, None, 63),
        (TILES, _later_or_padding, 63),
        (TILES, _near, 63),
        (KERNELS, None, 130),
        (KERNELS, _later_or_padding, 63),
        (KERNELS, _near, 63),
        (XLA(), None, 2),
        pytest.param(XLA(), None, 700, marks=slow),
        pytest.param(XLA(), _near, 300, marks=slow),
        pytest.param(KERNELS, _near, 300, marks=slow),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_rows_masked_by_a_number(implementation, rule, length):
    """Output, log-sum-exp and all gradients; sinks of the number are logits too."""
    _compare_numbers(implementation, rule, length)


def _compare_numbers(implementation, rule, length):
    arrays, d_out, d_lse = _inputs(length)
    hidden, seen = _hidden(rule, length), np.ones((length, length), bool)
    for number in (-50.0, -1e9, -1e30, 0.7 * LEAST, LEAST):
        added = np.where(hidden, np.float32(number), np.float32(0))
        sinks = np.array([number, 0.0, -np.inf, -3.0, -1e9, number], "f4")
        masked = _rule(rule, number, length)
        for some in (None, sinks):
            _compare(implementation, arrays, masked, added, seen, some, d_out, d_lse)


@pytest.mark.parametrize("inner", [TILES, pytest.param("dense", marks=slow)], ids=str)
def test_rows_masked_by_a_number_over_a_ring(inner):
    """Devices have different numbers of keys in a row, and all tops are -1e9."""
    with jax.set_mesh(jax.make_mesh((8,), ("sequence",), axis_types=(AxisType.Auto,))):
        _compare_numbers(SequenceParallel("sequence", "ring", inner), _later_or_padding, 64)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "implementation", ["reference", Dense(block=2**12), TILES, KERNELS], ids=str
)
def test_minus_infinity_of_an_array_hides_any_key(implementation, bad):
    """NaN and inf in a key that it hides reach no output and no gradient; blind rows are zero."""
    length = 63
    arrays, d_out, d_lse = _inputs(length)
    hidden = _hidden(_near, length)
    hidden[:, [5, 40]] = True
    added = np.where(hidden, -np.inf, np.random.default_rng(1).normal(size=hidden.shape))
    added = added.astype("f4")
    q, *keys = arrays
    for x in keys:
        x[:, [5, 40]] = 0.0
    want = _oracle((q, *keys), np.where(hidden, 0.0, added), ~hidden, None, d_out, d_lse)
    for x in keys:
        x[:, [5, 40]] = bad
    rule = pe.DenseBias(jnp.asarray(added)[None, None])
    out, lse, d_q, d_k, d_v, d_rule, _ = _results(
        implementation, (q, *keys), rule, None, d_out, d_lse
    )
    assert_close((out, d_q, d_k, d_v, d_rule.pairs[0, 0]), (want[0], *want[2:6]))
    np.testing.assert_allclose(lse, want[1], rtol=1e-6, atol=1e-5)


def test_products_of_a_scaled_mask_are_rounded_in_both_passes():
    """XLA fused them with the sum after them in one pass: exp(64) times the gradient."""
    q, k, v, g = np.random.default_rng(0).normal(size=(4, 1, 300, 2, 3)).astype(np.float32)

    def gradients(implementation):
        def loss(q, k, v, number):
            rule = pe.LogitBias(_on_some_rows, shared=number, scaled=True)
            options = {"scale": 0.9, "implementation": implementation}
            return (pe.attention(q, k, v, rules=rule, **options) * g).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v, jnp.float32(-1e9))

    for got, want in zip(gradients("xla"), gradients("dense"), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def _on_some_rows(number, head, i, j):
    return jnp.where((j % 5 == 2) | (i % 3 == 1), number, 0.0)
