"""Weights of `torch.nn.Linear`, whose outputs are W x + b, as weights of `Attention`."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe

D, N, K, H = 5, 6, 2, 4


@pytest.fixture
def draws():
    return np.random.RandomState(0)


def test_heads_are_those_of_the_linear_layer(draws):
    x = draws.standard_normal((3, D))
    weight, bias = draws.standard_normal((N * H, D)), draws.standard_normal(N * H)
    out = np.einsum("td,dnh->tnh", x, pe.heads_from_linear(weight, N))
    expected = (x @ weight.T + bias).reshape(3, N, H)
    np.testing.assert_allclose(out + pe.heads_from_linear(bias, N), expected, atol=1e-12)
    heads, weight = draws.standard_normal((3, N, H)), draws.standard_normal((D, N * H))
    out = np.einsum("tnh,nhd->td", heads, pe.heads_from_linear(weight, N, output=True))
    np.testing.assert_allclose(out, heads.reshape(3, -1) @ weight.T, atol=1e-12)


def test_one_projection_is_cut_into_three(draws):
    q, k, v = (draws.standard_normal((n, H, D)) for n in (N, K, K))
    concatenated = np.concatenate([q, k, v]).reshape(-1, D)
    groups = [x for i in range(K) for x in (*q[3 * i : 3 * i + 3], k[i], v[i])]
    by_group = np.stack(groups).reshape(-1, D)
    for order, weight in (("concatenated", concatenated), ("by_group", by_group)):
        for source, part in ((weight, slice(None)), (weight[:, 0], 0)):
            parts = pe.split_qkv(jnp.asarray(source), N, K, order=order)
            for out, expected in zip(parts, (q, k, v), strict=True):
                expected = expected[..., part].reshape(out.shape)
                np.testing.assert_array_equal(out, jnp.asarray(expected))


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="outputs=24 must be a multiple of num_heads=5"):
        pe.heads_from_linear(np.zeros((24, D)), 5)
    with pytest.raises(ValueError, match="inputs=24 must be a multiple of num_heads=5"):
        pe.heads_from_linear(np.zeros((D, 24)), 5, output=True)
    with pytest.raises(ValueError, match=r"weight must be \[D, N\*H\], got \(5,\)"):
        pe.heads_from_linear(np.zeros(5), 1, output=True)
    with pytest.raises(ValueError, match="outputs=24 must be a multiple of heads=10"):
        pe.split_qkv(np.zeros((24, D)), N, K)
    with pytest.raises(ValueError, match=r"order must be one of .*, got 'neox'"):
        pe.split_qkv(np.zeros((40, D)), N, K, order="neox")
