"""RoPE on values against the paper's sum, pair by pair."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, decode, qkv, softmax_attention, turned
from tests.support import ROTARY_OPTIONS, slow

OPTIONS = {pe.VORoPE: {**ROTARY_OPTIONS, "qk": False}}

H, START = 8, 4


def rotated(x, position, layout):
    """The last four dimensions of x [H] rotated for a position, in float64."""
    x, angles = np.array(x, np.float64), position * 100.0 ** (-np.arange(2) / 2)
    order = [4, 6, 5, 7] if layout == "interleaved" else [4, 5, 6, 7]
    x[order] = turned(x[order], angles)
    return x


def paper(q, k, v, qk, layout, **options):
    """sum_j a_ij R(j - i) v_j, with a from R(i) q_i . R(j) k_j."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))

    def logit(q, k, n, i, j):
        return q @ (rotated(k, j - i, layout) if qk else k) / np.sqrt(H)

    def added(n, i, j):
        value = v[0, j, n * v.shape[2] // q.shape[2]]
        return rotated(value, j - i, layout) - value

    return softmax_attention(q, k, v, logit, value=added, **options)


@pytest.mark.parametrize("layout, qk", [("interleaved", True), ("half", False)])
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
    np.testing.assert_allclose(np.concatenate(outs, 1), expected, atol=2e-6)
    np.testing.assert_array_equal(cache.v, cache.k)  # Both are cached rotated.


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


YARN = pe.YaRN(factor=16.0, original_max_position=64)
ERRORS = [
    (pe.VORoPE, {"scaling": YARN}, "attention factor of 1"),
    (pe.VORoPE, {"layout": "interleaved_to_half"}, "layout must write the .* that it reads"),
    (lambda: pe.streaming(pe.VORoPE(H)), {}, "streaming: .*changes the output"),
    (
        lambda: pe.chain(pe.Shaw(num_heads=6, head_dim=H), pe.VORoPE(H, qk=False)),
        {},
        r"change at the output what .*Shaw.* add to the values",
    ),
]
