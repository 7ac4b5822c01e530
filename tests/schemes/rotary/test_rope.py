"""RoPE against the code of GPT-NeoX and GPT-J, and the paper's formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import apply_rope, matches_products, qkv, turned
from tests.support import ROTARY_OPTIONS, golden

OPTIONS = {pe.RoPE: {**ROTARY_OPTIONS}}

GOLDEN = golden("rope")


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_matches_the_code_of_gpt_neox_and_gpt_j(layout):
    out = apply_rope(np.float32(GOLDEN["x"])[None], np.arange(7), layout=layout, rotary_dim=8)
    np.testing.assert_allclose(out[0], GOLDEN[layout], rtol=0, atol=1e-6)


@pytest.mark.parametrize("shift", [0, 10**6])
def test_attention_matches_the_paper_at_any_shift(shift):
    matches_products(
        pe.RoPE(head_dim=12), lambda q, k, i, j, w: turned(q, (i - j) * w) @ k, start=shift
    )


@pytest.mark.parametrize(
    "layout, dim", [("interleaved", 66), ("interleaved_to_half", 66), ("half", 128)]
)
def test_wide_heads_in_16_bits_are_those_of_32(layout, dim):
    x, positions = qkv(2, 5, 3, dim=dim)[0].astype(jnp.bfloat16), 257 + np.arange(5)

    @jax.jit
    def rotated_and_back(x):
        out, pull = jax.vjp(lambda x: pe.apply_rope(x, positions, layout=layout), x)
        return out, pull(x)[0]

    exact = rotated_and_back(x.astype("f4"))
    for half, whole in zip(rotated_and_back(x), exact, strict=True):
        assert half.dtype == jnp.bfloat16
        np.testing.assert_array_equal(half, np.asarray(whole).astype(jnp.bfloat16))


def rope_of(x, positions, dtype="i4", **options):
    return lambda: pe.apply_rope(np.zeros(x, "f4"), np.zeros(positions, dtype), **options)


ERRORS = [
    (pe.RoPE, {"rotary_dim": 0}, "rotary dim must be even and positive, got 0"),
    (pe.RoPE, {"rotary_dim": 10}, r"rotary_dim must be in \[0, head_dim=8\], got 10"),
    (pe.RoPE, {"theta": 0.0}, "theta must be positive, got 0.0"),
    (pe.RoPE, {"theta": float("inf")}, "theta must be finite, got inf"),
    (rope_of((5, 8), (5,)), {}, r"rope: x must be \[B, T, N, H\], got shape \(5, 8\)"),
    (rope_of((2, 5, 1, 7), (5,)), {}, "rope: rotary dim must be even and positive, got 7"),
    (rope_of((2, 5, 1, 8), (5,), rotary_dim=10), {}, r"rope: rotary_dim must be in .*, got 10"),
    *(
        (rope_of((2, 5, 1, 8), shape), {}, rf"rope: positions must be .* \[B, T\].*, {shape[-1]}\)")
        for shape in ((4,), (3, 5), (2, 2, 5))
    ),
    (rope_of((2, 5, 1, 8), (5,), bool), {}, "rope: positions must be integers.*got", TypeError),
]
