"""An array of all pairs as a rule, against `jax.nn` and float64 NumPy; kernels are interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.dense import Dense
from posenc_jax.engine.xla import XLA
from posenc_jax.kernels.gpu.implementation import PallasGPU
from posenc_jax.kernels.tpu.implementation import PallasTPU
from tests.engine.rules import KINDS
from tests.kernels.kernel_cases import arrays_of, assert_close, described
from tests.oracle import attention, qkv, softmax_attention
from tests.support import gpu_interpreted, gpu_lowered, slow

B, T, N = 3, 63, 6
Q, K, V = qkv(batch=B, length=T)
RANDOM = np.random.default_rng(0)
TILES = XLA(Blocks(16, 8), Blocks(8, 16))
KERNELS = PallasTPU(Blocks(128, 128), Blocks(128, 128), interpret=True)
OF_GPU = PallasGPU(interpret=True)
# Larger blocks in the backward pass: more tiles than the bias has.
UNEQUAL = PallasTPU(Blocks(128, 128), Blocks(256, 384), interpret=True)
CASES = [((1, N), TILES), ((B, 1), Dense(block=2**12)), ((1, 1), UNEQUAL)]
MORE_CASES = [((1, 1), TILES), ((B, N), TILES), ((B, 1), TILES), ((1, N), "reference")]
MORE_CASES += [(lead, KERNELS) for lead in ((1, 1), (B, N), (B, 1), (1, N))]
CASES += [pytest.param(*case, marks=slow) for case in MORE_CASES]
WEIGHTS = RANDOM.normal(size=(B, T, N, 8)).astype("f4")


def array(*lead):
    return RANDOM.normal(size=(*lead, T, T)).astype("f4")


def gradients_of(attend):
    def loss(bias, q, k, v):
        return (attend(bias, q, k, v) * WEIGHTS).sum()

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    return lambda bias: jax.device_get(run(bias, Q, K, V))


def jax_nn(bias, q, k, v):
    return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)


GRADIENTS_OF_JAX_NN = gradients_of(jax_nn)  # For biases [B, N, T, S].


@pytest.mark.parametrize(
    ("shape", "implementation"),
    CASES,
    ids=str,
)
def test_output_and_gradients_equal_jax_nn(shape, implementation):
    bias = array(*shape)

    def own(bias, q, k, v):
        rule = pe.DenseBias(bias)
        return pe.attention(q, k, v, rules=rule, is_causal=True, implementation=implementation)

    value, grads = gradients_of(own)(bias)
    expected_value, (d_bias, *expected) = GRADIENTS_OF_JAX_NN(np.broadcast_to(bias, (B, N, T, T)))
    shared = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
    expected = d_bias.sum(shared, keepdims=True), *expected
    np.testing.assert_allclose(value, expected_value, rtol=2e-5)
    for got, array_expected in zip(grads, expected, strict=True):
        np.testing.assert_allclose(got, array_expected, atol=2e-5)


@pytest.mark.parametrize(
    ("kernels", "length", "kv_heads", "lead", "dtype"),
    [
        (KERNELS, 200, 2, (1, N), jnp.bfloat16),
        pytest.param(KERNELS, 200, 6, (2, 1), jnp.float32, marks=slow),
        pytest.param(KERNELS, 63, 2, (2, N), jnp.float32, marks=slow),
        pytest.param(OF_GPU, 63, 2, (1, 1), jnp.bfloat16, marks=gpu_interpreted),
        pytest.param(OF_GPU, 200, 6, (2, 1), jnp.bfloat16, marks=[gpu_interpreted, slow]),
        pytest.param(OF_GPU, 200, 2, (1, N), jnp.float32, marks=[gpu_interpreted, slow]),
    ],
)
def test_kernels_equal_float64_numpy(kernels, length, kv_heads, lead, dtype):
    """As in AlphaFold: padding at the end of each row, 24 numbers per head, not causal."""
    random = np.random.default_rng(1)
    shapes = [(2, length, n, 24) for n in (N, kv_heads, kv_heads, N)]
    q, k, v, d_out = (random.normal(size=shape).astype("f4") for shape in shapes)
    bias = jnp.asarray(random.normal(size=(*lead, length, length)), dtype)
    ids = np.where(np.arange(length) < np.array([[length - 5], [40]]), 0, -1).astype(np.int32)

    @jax.jit
    def run(q, k, v, bias):
        def attend(*x):
            options = {"q_segment_ids": ids, "contiguous": True, "implementation": kernels}
            return pe.attention(*x[:3], rules=pe.DenseBias(x[3]), **options)

        out, pull = jax.vjp(attend, q, k, v, bias)
        return out, *pull(d_out)

    real, zeros = ids == 0, np.zeros((1, length, N), "f4")
    d_out = np.where(real[..., None, None], d_out, 0.0)
    exact, rows = np.asarray(bias, "f4"), []
    for row, (sees, g) in enumerate(zip(real[:, :, None] & real[:, None], d_out, strict=True)):
        arrays = [x[row : row + 1] for x in (q, k, v)]
        added = exact[min(row, lead[0] - 1)]
        rows.append(attention(arrays, added, sees, g[None], zeros, scale=24**-0.5))
    out, _, *expected, d_logits, _ = zip(*rows, strict=True)
    *got, d_bias = run(q, k, v, bias)
    assert_close(got, [np.concatenate(x) for x in (out, *expected)], 2e-6)
    shared = tuple(axis for axis in (0, 1) if lead[axis] == 1)
    expected = np.stack(d_logits).sum(shared, keepdims=True)
    assert d_bias.dtype == dtype
    assert_close(d_bias, expected, 2e-6 if dtype == jnp.float32 else 2.0**-8)


def test_attention_matches_a_float64_softmax_with_another_rule():
    """With a softcap, segments, and an array of bfloat16 that is multiplied by the scale."""
    bias = jnp.asarray(array(1, N), jnp.bfloat16)
    exact, slopes = np.asarray(bias[0], np.float64), np.asarray(pe.alibi_slopes(N), np.float64)
    segments = np.repeat([0, 1], [20, 43])[None].repeat(B, 0).astype(np.int32)

    def logit(q, k, n, i, j):
        x = (q @ k + exact[n, i, j]) / np.sqrt(8) - slopes[n] * (i - j)
        return 5.0 * np.tanh(x / 5.0)

    expected = softmax_attention(
        Q, K, V, logit, sees=lambda i, j: j <= i and segments[0, i] == segments[0, j]
    )
    rules = pe.ALiBi(num_heads=N).rules({}), pe.DenseBias(bias, scaled=True)
    options = {"rules": rules, "is_causal": True, "softcap": 5.0}
    for side in "qk":
        options[f"{side}_segment_ids"] = segments
        options[f"{side}_positions"] = np.arange(T, dtype=np.int32)[None]
    outs = jax.jit(
        lambda: [
            pe.attention(Q, K, V, implementation=implementation, **options)
            for implementation in (TILES, "dense", "reference")
        ]
    )()
    for out in outs:
        np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("implementation", "softcap"),
    [(TILES, None), ("dense", 5.0), (KERNELS, None)]
    + [
        pytest.param(*case, marks=slow)
        for case in ((TILES, 5.0), (KERNELS, 5.0), ("reference", 5.0))
    ],
    ids=str,
)
def test_minus_infinity_hides_keys(implementation, softcap):
    """As `mask` does, also for a query without keys; hidden NaN leave gradients finite."""
    later = np.triu(np.ones((T, T), bool), 1)
    hidden = RANDOM.random((B, 1, T, T)) < 0.5
    hidden[1, 0, 7] = True
    bias = np.where(later, np.nan, np.where(hidden, -np.inf, 0.0)).astype("f4")
    options = {"is_causal": True, "softcap": softcap}
    # Without a softcap, causality would be part of a rule by distance.
    others = () if softcap else (pe.ALiBi(num_heads=N).rules({}),)

    def own(bias, q, k, v):
        rules = pe.DenseBias(bias), *others
        return pe.attention(q, k, v, rules=rules, implementation=implementation, **options)

    value, grads = gradients_of(own)(bias)
    mask = {"mask": ~hidden, "rules": others, "implementation": "reference"}
    masked = pe.attention(Q, K, V, **mask, **options)
    np.testing.assert_allclose(value, (masked * WEIGHTS).sum(), rtol=1e-5)
    assert np.all(np.asarray(own(bias, Q, K, V))[1, 7] == 0.0)
    assert all(np.isfinite(grad).all() for grad in grads)
    assert np.all(np.asarray(grads[0])[hidden | later] == 0.0)


def test_it_belongs_to_slots_when_a_rule_sorts_the_keys():
    """Stick-breaking needs keys in the order of their positions."""
    order = RANDOM.permutation(T)
    bias, rule = array(1, N), pe.StickBreaking().rules({})
    positions = np.arange(T, dtype=np.int32)[None]

    def attend(bias, q, k, v, positions):
        rules = pe.DenseBias(bias), rule
        return pe.attention(
            q, k, v, rules=rules, q_positions=positions, k_positions=positions, is_causal=True
        )

    straight = attend(bias, Q, K, V, positions)
    shuffled = [x[:, order] for x in (Q, K, V, positions.repeat(B, 0))]
    moved = attend(bias[:, :, order][..., order], *shuffled)
    np.testing.assert_allclose(moved, straight[:, order], atol=1e-5)


@pytest.mark.parametrize(
    "pairs, error, message",
    [
        (np.zeros((T, T), "f4"), ValueError, r"\[B or 1, N or 1, T, S\] with B, N, T, S = \(3, 6"),
        (np.zeros((B, 3, T, T), "f4"), ValueError, r"got \(3, 3, 63, 63\)"),
        (np.zeros((1, 1, T, 1), "f4"), ValueError, r"got \(1, 1, 63, 1\)"),
        (np.zeros((1, 1, T, T), bool), TypeError, "a boolean array is a mask"),
    ],
)
def test_other_arrays_are_refused(pairs, error, message):
    with pytest.raises(error, match=message):
        pe.attention(Q, K, V, rules=pe.DenseBias(jnp.asarray(pairs)))


def test_kernels_refuse_what_they_lack():
    """Known from shapes alone."""

    def refusal(kernels, *rules, dtype=jnp.bfloat16):
        q = jnp.zeros((1, 64, 2, 64), dtype)
        with pytest.raises(NotImplementedError) as error:
            pe.attention(q, q, q, rules=rules, implementation=kernels)
        return str(error.value)

    def refusals():
        pair = jnp.zeros((1, 1, 64, 64), jnp.bfloat16)
        half = pe.DenseBias(pair.astype(jnp.float16))
        assert "must be bfloat16 or float32" in refusal(PallasTPU(cross_compile=True), half)
        if jax.__version_info__ < (0, 11, 2):
            return
        kernels, pair = PallasGPU(cross_compile=True), pe.DenseBias(pair)
        assert "add them up" in refusal(kernels, pair, pair)
        q = jnp.zeros((1, 64, 2, 64))
        dots = KINDS["wide"].rules(KINDS["wide"].make(RANDOM, 2, 64), q, q)
        assert "with a vector of a token" in refusal(kernels, pair, *dots)

    jax.eval_shape(refusals)


@pytest.mark.parametrize("kernels", [PallasTPU, pytest.param(PallasGPU, marks=gpu_lowered)])
def test_only_the_bias_and_its_cotangent_have_all_pairs(kernels):
    """Of both passes; on TPU also for lengths that are no multiple of a tile."""
    length = 3000 if kernels is PallasTPU else 3072
    q = jax.ShapeDtypeStruct((2, length, 2, 32), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 2, length, length), jnp.bfloat16)

    def loss(bias, q):
        implementation = kernels(cross_compile=True)
        out = pe.attention(q, q, q, rules=pe.DenseBias(bias), implementation=implementation)
        return jnp.sum(out.astype(jnp.float32))

    with described("TPU v5 lite"):
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(bias, q).jaxpr
    assert {x.shape for x in arrays_of(jaxpr) if x.size >= length**2 // 2} == {bias.shape}
