"""PoPE against the lines of the reference code, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, qkv, softmax_attention
from tests.support import initial, parameters, slow

OPTIONS = {pe.PoPE: {"theta": 100.0, "rotary_dim": 4, "uniform": initial(True)}}


def reference(x, positions, bias, theta=1e4, rotary_dim=None):
    """lucidrains/PoPE-pytorch, apply_pope_to_qk, for q (no bias) or k: [B, T, N, H + d]."""
    x = np.asarray(x, np.float64)
    dim = rotary_dim or x.shape[-1]
    inv_freqs = theta ** -(np.arange(dim) / dim)
    phase = np.asarray(positions, np.float64)[None, :, None, None] * inv_freqs + bias
    magnitude = np.log1p(np.exp(x[..., :dim]))
    return np.concatenate([magnitude * np.cos(phase), magnitude * np.sin(phase), x[..., dim:]], -1)


def expected_output(q, k, v, positions, delta, **options):
    """Attention with the bias on keys, which are repeated for the heads that share them."""
    heads = q.shape[2]
    k, v = (np.repeat(x, heads // k.shape[2], 2) for x in (k, v))
    bias = np.clip(np.asarray(delta, np.float64), -2 * np.pi, 0)
    return softmax_attention(
        reference(q, positions, 0.0, **options),
        reference(k, positions, bias, **options),
        v,
        lambda a, b, n, i, j: a @ b / np.sqrt(q.shape[-1]),
    )


@pytest.mark.parametrize("options", [{"theta": 50.0}, {"rotary_dim": 3}], ids=str)
def test_attention_matches_the_reference(options):
    scheme, arrays = pe.PoPE(num_heads=6, head_dim=8, **options), qkv(length=21)
    params = {"delta": -np.abs(parameters(scheme, 3.0)["delta"])}
    params["delta"][0, :2] = 1.0, -9.0
    out = attend(scheme, params, *arrays, is_causal=True)
    expected = expected_output(*arrays, np.arange(21), params["delta"], **options)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@slow
def test_the_slope_of_delta_is_zero_beyond_its_bound_and_whole_there():
    scheme, (q, _, _) = pe.PoPE(num_heads=6, head_dim=8), qkv(length=3)

    @jax.jit
    def rotated(delta):
        return scheme.query({"delta": delta}, q, jnp.arange(3)[None])

    here, beyond = jnp.zeros((6, 8)), jnp.full((6, 8), 0.5)
    weights = jnp.arange(16.0)[None, None, None]
    slope = jax.jit(jax.grad(lambda d: (rotated(d) * weights).sum()))
    assert np.all(slope(beyond) == 0)
    rate = (
        ((rotated(here) - rotated(here - 1e-2)) / 1e-2 * weights)
        .reshape(1, 3, 6, 2, 8)
        .sum((0, 1, 3))
    )
    np.testing.assert_allclose(slope(here), rate, rtol=0.05, atol=0.3)  # Not half of it.


ERRORS = [(pe.PoPE, {"rotary_dim": 9}, r"rotary_dim must be in \[1, head_dim=8\], got 9")]
