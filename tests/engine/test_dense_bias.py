"""An array of all pairs as a rule, against float64 NumPy; kernels are interpreted."""

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
from tests.oracle import attention, qkv
from tests.support import gpu_interpreted, gpu_lowered, slow

TILES = XLA(Blocks(16, 8), Blocks(8, 16))
# Larger blocks in the backward pass: more tiles than the bias has.
KERNELS = PallasTPU(Blocks(128, 128), Blocks(256, 384), interpret=True)
OF_GPU = PallasGPU(interpret=True)
# The first axes of the bias are those of two rows and all heads, or one.
CASES = [
    (Dense(block=2**12), 63, 3, "B", np.float32, 4.0),
    (TILES, 63, 3, "N", np.float32, None),
    (KERNELS, 200, 3, "B", np.float32, 4.0),
]
CASES += [
    pytest.param(*case, marks=slow)
    for case in [
        ("reference", 63, 3, "N", np.float32, 4.0),
        (TILES, 63, 3, "B", np.float32, 4.0),
        (KERNELS, 200, 3, "N", jnp.bfloat16, None),
        (KERNELS, 63, 3, "BN", np.float32, None),
    ]
]
CASES += [
    pytest.param(OF_GPU, *case, None, marks=[gpu_interpreted, slow])
    for case in [
        (63, 1, "", jnp.bfloat16),
        (200, 3, "B", jnp.bfloat16),
        (200, 3, "N", np.float32),
    ]
]


@pytest.mark.parametrize(
    ("implementation", "length", "kv_heads", "axes", "dtype", "softcap"), CASES, ids=str
)
def test_output_and_gradients_equal_float64(implementation, length, kv_heads, axes, dtype, softcap):
    """Beside a rule by distance, with padding at the end of each row.

    -inf hides keys as `mask` does: NaN and inf in a key that it hides from all queries, and NaN for
    later keys, reach no output and no gradient. A query without keys has zeros and a log-sum-exp of
    -inf.
    """
    random, heads = np.random.default_rng(1), 2 * kv_heads
    lead = 2 if "B" in axes else 1, heads if "N" in axes else 1
    shapes = [(2, length, n, 24) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, d_out = (random.normal(size=shape).astype("f4") for shape in shapes)
    ids = np.where(np.arange(length) < np.array([[length - 5], [40]]), 0, -1).astype(np.int32)
    later = np.triu(np.ones((length, length), bool), 1)
    hidden = random.random((length, length)) < 0.3
    hidden[7], hidden[:, [5, 30]] = True, True
    bias = random.normal(size=(*lead, length, length))
    bias = jnp.asarray(np.where(later, np.nan, np.where(hidden, -np.inf, bias)), dtype)
    options = {"q_segment_ids": ids, "is_causal": True, "softcap": softcap}
    options["implementation"] = implementation

    @jax.jit
    def run(q, k, v, bias):
        def attend(q, k, v, bias):
            rules = pe.DenseBias(bias), pe.ALiBi(num_heads=heads).rules({})
            return pe.attention(q, k, v, rules=rules, return_lse=True, **options)

        out, pull, lse = jax.vjp(attend, q, k, v, bias, has_aux=True)
        return out, lse, *pull(d_out)

    real, zeros = ids == 0, np.zeros((1, length, heads), "f4")
    d_out = np.where(real[..., None, None], d_out, 0.0)
    slopes, at = np.asarray(pe.alibi_slopes(heads)), np.arange(length)
    alibi = -slopes[:, None, None] * np.abs(at[:, None] - at).astype("f4")
    exact, rows = np.where(later | hidden, 0.0, np.asarray(bias, "f4")), []
    for row in range(2):
        sees = real[row, :, None] & real[row] & ~later & ~hidden
        arrays, g = [x[row : row + 1] for x in (q, k, v)], d_out[row][None]
        added = exact[min(row, lead[0] - 1)] + alibi
        numbers = {"scale": 24**-0.5, "softcap": softcap}
        rows.append(attention(arrays, added, sees, g, zeros, **numbers))
    *expected, d_logits, _ = zip(*rows, strict=True)
    expected = [np.concatenate(x) for x in expected]
    shared = tuple(axis for axis in (0, 1) if lead[axis] == 1)
    of_bias = np.stack(d_logits).sum(shared, keepdims=True)
    for x in (k, v):
        x[:, 5], x[:, 30] = np.nan, np.inf
    *got, d_bias = run(q, k, v, bias)
    assert_close(got, expected, 2e-6)
    assert d_bias.dtype == dtype
    assert_close(d_bias, of_bias, 2e-6 if dtype == np.float32 else 2.0**-8)


def test_it_belongs_to_slots_when_a_rule_sorts_the_keys():
    """Stick-breaking needs keys in the order of their positions."""
    random, (q, k, v) = np.random.default_rng(0), qkv(length=9)
    bias, order = random.normal(size=(1, 6, 9, 9)).astype("f4"), random.permutation(9)

    @jax.jit
    def attend(bias, q, k, v, positions):
        rules = pe.DenseBias(bias), pe.StickBreaking().rules({})
        return pe.attention(q, k, v, rules=rules, q_positions=positions, is_causal=True)

    positions = np.arange(9, dtype=np.int32)
    straight = attend(bias, q, k, v, positions)
    moved = attend(bias[:, :, order][..., order], *(x[:, order] for x in (q, k, v)), order)
    np.testing.assert_allclose(moved, straight[:, order], atol=1e-5)


@pytest.mark.parametrize(
    "pairs, error, message",
    [
        (np.zeros((9, 9), "f4"), ValueError, r"\[B or 1, N or 1, T, S\] with B, N, T, S = \(3, 6"),
        (np.zeros((3, 3, 9, 9), "f4"), ValueError, r"got \(3, 3, 9, 9\)"),
        (np.zeros((1, 1, 9, 1), "f4"), ValueError, r"got \(1, 1, 9, 1\)"),
        (np.zeros((1, 1, 9, 9), bool), TypeError, "a boolean array is a mask"),
    ],
)
def test_other_arrays_are_refused(pairs, error, message):
    with pytest.raises(error, match=message):
        pe.attention(*qkv(batch=3, length=9), rules=pe.DenseBias(jnp.asarray(pairs)))


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
        dots = KINDS["wide"].rules(KINDS["wide"].make(np.random.default_rng(0), 2, 64), q, q)
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
