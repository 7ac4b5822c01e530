"""RoPE on values against the paper's sum, pair by pair, and against RoPE."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, decode, qkv, softmax_attention
from tests.support import slow

OPTIONS = {
    pe.VORoPE: {
        "theta": 100.0,
        "layout": "interleaved",
        "scaling": pe.PI(factor=2.0),
        "rotary_dim": 4,
        "rotary_start": 2,
        "qk": False,
    }
}

H, START = 8, 4


def turned(x, angle_of_position, *, layout="interleaved", theta=100.0):
    """The last four dimensions of x [H] rotated for a position, in float64."""
    x = np.array(x, np.float64)
    for p in range(2):
        a, b = (START + 2 * p, START + 2 * p + 1) if layout == "interleaved" else (4 + p, 6 + p)
        angle = angle_of_position * theta ** (-p / 2)
        c, s = np.cos(angle), np.sin(angle)
        x[a], x[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    return x


def paper(q, k, v, qk, layout, **options):
    """sum_j a_ij R(j - i) v_j, with a from R(i) q_i . R(j) k_j."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))

    def logit(q, k, n, i, j):
        return q @ (turned(k, j - i, layout=layout) if qk else k) / np.sqrt(H)

    def added(n, i, j):
        value = v[0, j, n * v.shape[2] // q.shape[2]]
        return turned(value, j - i, layout=layout) - value

    return softmax_attention(q, k, v, logit, value=added, **options)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("qk", [True, False])
def test_matches_the_paper(layout, qk):
    scheme = pe.VORoPE(H, theta=100.0, layout=layout, rotary_start=START, qk=qk)
    arrays = qkv(length=33)
    out = attend(scheme, {}, *arrays, is_causal=True, scale=H**-0.5)
    np.testing.assert_allclose(out, paper(*arrays, qk, layout), atol=2e-6)


@slow
def test_keys_and_values_of_one_array_decode_as_in_deepseek_v4():
    """One head of keys, which are the values too; positions that are no count."""
    scheme = pe.VORoPE(H, theta=100.0, layout="interleaved", rotary_start=START)
    q, k, _ = qkv(length=9, kv_heads=1)
    cache = pe.new_cache(scheme, 1, 12, num_heads=6, num_kv_heads=1, head_dim=H)
    outs = []
    for size, start in [(7, 0), (1, 7), (1, 8)]:
        part = slice(start, start + size)
        here = {"positions": np.arange(50, 59, dtype=np.int32)[None, part]}
        out, cache = decode(scheme, {}, cache, q[:, part], k[:, part], k[:, part], **here)
        outs.append(out)
    expected = paper(q, k, k, True, "interleaved")
    np.testing.assert_allclose(jnp.concatenate(outs, 1), expected * 1.0, atol=2e-6)
    np.testing.assert_array_equal(cache.v, cache.k)  # Both are cached rotated.


def test_output_far_from_zero_is_exact():
    """The distance counts alone, two million tokens from the start."""
    scheme = pe.VORoPE(H, theta=100.0)
    arrays = qkv(length=9)
    near, far = (
        attend(
            scheme, {}, *arrays, positions=np.arange(9, dtype=np.int32)[None] + n, is_causal=True
        )
        for n in (0, 2_000_000)
    )
    np.testing.assert_allclose(near, far, atol=1e-6)


def test_a_chain_undoes_values_in_reverse():
    """The two rotate other pairs of the same dimensions, which do not commute."""
    half, interleaved = pe.VORoPE(H), pe.VORoPE(H, layout="interleaved")
    positions, (_, _, v) = jnp.arange(5)[None], qkv(length=5)
    both = pe.chain(half, interleaved)
    rotated = both.value(({}, {}), v, positions)
    np.testing.assert_allclose(
        rotated, interleaved.value({}, half.value({}, v, positions), positions), atol=1e-6
    )
    np.testing.assert_allclose(both.output(({}, {}), rotated, positions), v, atol=1e-6)
    assert str(both.acts) == "q, k, v, output"
    assert str(pe.VORoPE(H, qk=False).acts) == "v, output"


def test_refuses_scaled_tables_streaming_and_values_of_rules():
    with pytest.raises(ValueError, match="attention factor of 1"):
        pe.VORoPE(H, scaling=pe.YaRN(factor=16.0, original_max_position=64))
    with pytest.raises(ValueError, match="layout must write the dimensions that it reads"):
        pe.VORoPE(H, layout="interleaved_to_half")
    with pytest.raises(ValueError, match="changes the output"):
        pe.streaming(pe.VORoPE(H))
    with pytest.raises(ValueError, match=r"change at the output what .*Shaw.* add to the values"):
        pe.chain(pe.Shaw(num_heads=6, head_dim=H), pe.VORoPE(H, qk=False))
