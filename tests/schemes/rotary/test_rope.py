"""RoPE against the code of GPT-NeoX and GPT-J, the paper's matrix, and its own properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import apply_rope, attend, qkv, softmax_attention
from tests.support import golden

OPTIONS = {
    pe.RoPE: {
        "theta": 100.0,
        "layout": "interleaved",
        "scaling": pe.PI(factor=2.0),
        "rotary_dim": 4,
        "rotary_start": 2,
    }
}

GOLDEN = golden("rope")
LAYOUTS = pytest.mark.parametrize("layout", ["half", "interleaved"])


def pairs(dim, layout):
    """The two dimensions of each pair."""
    if layout == "interleaved":
        return [(2 * p, 2 * p + 1) for p in range(dim // 2)]
    return [(p, p + dim // 2) for p in range(dim // 2)]


def rotated(x, position, theta=10000.0, layout="half", dim=None):
    """Equation 34 of the paper: each pair of one vector as a complex number, in float64."""
    out = np.array(x, np.float64)
    dim = len(out) if dim is None else dim
    for p, (a, b) in enumerate(pairs(dim, layout)):
        z = (out[a] + 1j * out[b]) * np.exp(1j * position * theta ** (-2 * p / dim))
        out[a], out[b] = z.real, z.imag
    return out


@LAYOUTS
def test_matches_the_code_of_gpt_neox_and_gpt_j(layout):
    x = jnp.array(GOLDEN["x"])[None]
    out = apply_rope(x, jnp.arange(7), layout=layout, rotary_dim=8)
    expected = GOLDEN[layout]
    np.testing.assert_allclose(out[0], expected, rtol=0, atol=1e-6)


@LAYOUTS
@pytest.mark.parametrize("theta, dim", [(1e4, 12), (5e5, 8)])
def test_matches_the_paper_at_any_position(layout, theta, dim):
    positions = np.array([[0, 1, 62, 257, 10**6, 2**31 - 1, -(2**31)]])
    x = np.random.default_rng(0).normal(size=(1, 7, 6, 12)).astype(np.float32)
    out = apply_rope(x, positions, theta=theta, layout=layout, rotary_dim=dim)
    for t, n in np.ndindex(7, 6):
        expected = rotated(x[0, t, n], positions[0, t], theta, layout, dim)
        np.testing.assert_allclose(out[0, t, n], expected, rtol=0, atol=3e-6)
    np.testing.assert_array_equal(out[0, 0], x[0, 0])  # Position 0 leaves everything.
    np.testing.assert_array_equal(out[..., dim:], x[..., dim:])


@LAYOUTS
@pytest.mark.parametrize("shift", [0, 10**6])
def test_attention_matches_the_paper(layout, shift):
    q, k, v = qkv(length=21)
    q_and_k = [
        np.stack([[rotated(y, t, 1e4, layout) for y in x] for t, x in enumerate(a[0])])[None]
        for a in (q, k)
    ]
    expected = softmax_attention(*q_and_k, v, lambda q, k, n, i, j: q @ k / np.sqrt(8))
    scheme = pe.RoPE(head_dim=8, layout=layout)
    placement = {"positions": shift + jnp.arange(21)} if shift else {}
    out = attend(scheme, {}, q, k, v, is_causal=True, **placement)
    np.testing.assert_allclose(out, expected, atol=1e-5)  # At any common shift.


@pytest.mark.parametrize("dim", [66, 128])
def test_wide_heads_in_16_bits_are_those_of_32(dim):
    x, positions = qkv(2, 5, 3, dim=dim)[0].astype(jnp.bfloat16), 257 + np.arange(5)

    @jax.jit
    def rotated_and_back(x):
        out, pull = jax.vjp(lambda x: pe.apply_rope(x, positions, layout="interleaved"), x)
        return out, pull(x)[0]

    exact = rotated_and_back(x.astype("f4"))
    for half, whole in zip(rotated_and_back(x), exact, strict=True):
        assert half.dtype == jnp.bfloat16
        np.testing.assert_array_equal(half, np.asarray(whole).astype(jnp.bfloat16))


ERRORS = [
    (pe.RoPE, {"rotary_dim": 0}, "rotary dim must be even and positive, got 0"),
    (pe.RoPE, {"rotary_dim": 10}, r"rotary_dim must be in \[0, head_dim=8\], got 10"),
    (pe.RoPE, {"theta": 0.0}, "theta must be positive, got 0.0"),
    (pe.RoPE, {"theta": float("inf")}, "theta must be finite, got inf"),
]


@pytest.mark.parametrize(
    "shape, positions, options, message",
    [
        ((5, 8), (5,), {}, r"x must be \[B, T, N, H\], got shape \(5, 8\)"),
        ((2, 5, 1, 8), (4,), {}, r"positions must be \[T\] or \[B, T\].*got \(1, 4\)"),
        ((2, 5, 1, 8), (3, 5), {}, r"positions must be \[T\] or \[B, T\].*got \(3, 5\)"),
        ((2, 5, 1, 8), (2, 2, 5), {}, r"positions must be \[T\] or \[B, T\].*got \(2, 2, 5\)"),
        (
            (2, 5, 1, 8),
            (5,),
            {"rotary_dim": 10},
            r"rotary_dim must be in \[0, head_dim=8\], got 10",
        ),
        ((2, 5, 1, 7), (5,), {}, "rotary dim must be even and positive, got 7"),
    ],
)
def test_errors_name_the_shapes(shape, positions, options, message):
    with pytest.raises(ValueError, match=f"rope: {message}"):
        pe.apply_rope(jnp.zeros(shape), jnp.zeros(positions, jnp.int32), **options)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, bool])
def test_position_dtypes_that_cannot_count_are_refused(dtype):
    with pytest.raises(TypeError, match=r"rope: positions must be integers.*got"):
        pe.apply_rope(jnp.zeros((1, 3, 1, 4)), jnp.zeros(3, dtype))
