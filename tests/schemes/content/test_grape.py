"""GRAPE-A against the authors' bias modules, in float64."""

import jax
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.rule import added_logits
from tests.oracle import attend, qkv, softmax_attention
from tests.support import initial, parameters

OPTIONS = {pe.GRAPEA: {"gate": "query", "init_omega": initial(2.0)}}


def softplus(x):
    return np.log1p(np.exp(x))


def authors(params, q, k, gate):
    """model-architectures/GRAPE at f5b539f, QueryKeyGatedAdditiveBias.forward: [N, T, T].

    Keys are repeated for the heads that share them; there is no clamp of the future.
    """
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    q, k = (np.asarray(x[0], np.float64) for x in (q, k))
    k = np.repeat(k, q.shape[1] // k.shape[1], 1)
    length, heads, dim = q.shape
    power = 2 ** int(np.floor(np.log2(heads)))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    out = np.zeros((heads, length, length))
    for n in range(heads):
        rate = np.zeros((length, length))
        for used, name, x in (("query", "v", q), ("key", "u", k)):
            if gate in (used, "both"):
                unit = p[name][n] / np.linalg.norm(p[name][n])
                gates = softplus((x[:, n] * unit).sum(-1) / np.sqrt(dim))
                rate = rate + (gates[:, None] if used == "query" else gates[None])
        distance = abs(np.arange(length)[:, None] - np.arange(length)[None])
        out[n] = -distance * softplus(p["omega"][n]) * slopes[n] * rate
    return out


def make(**options):
    """A different omega per head, as after training."""
    scheme = pe.GRAPEA(head_dim=8, **options)
    params = parameters(scheme)
    return scheme, params | {
        "omega": params["omega"] + np.linspace(-1, 1, scheme.num_heads, dtype="f4")
    }


@pytest.mark.parametrize("gate, heads", [("key", 6), ("query", 12), ("both", 6)])
def test_attention_matches_the_authors(gate, heads):
    scheme, params = make(num_heads=heads, gate=gate)
    arrays = qkv(length=21, heads=heads)
    bias = authors(params, *arrays[:2], gate)
    expected = softmax_attention(*arrays, lambda q, k, n, i, j: q @ k / np.sqrt(8) + bias[n, i, j])
    out = attend(scheme, params, *arrays, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_a_direction_of_zeros_has_a_gradient():
    """As of `torch.nn.functional.normalize`, which divides by 1e-6 there."""
    scheme = pe.GRAPEA(num_heads=6, head_dim=8)
    params, arrays = parameters(scheme), qkv(length=5)
    params |= {"u": params["u"] * (np.arange(6) > 0)[:, None]}

    @jax.jit
    @jax.grad
    def gradient(params):
        out, _ = pe.scheme_attention(scheme, params, *arrays, is_causal=True)
        return (out**2).sum()

    u = gradient(params)["u"]
    assert np.isfinite(u).all() and np.abs(u).max(1).min() > 0


def test_the_bias_at_far_positions():
    scheme, params = make(num_heads=12, gate="both")
    q, k, _ = qkv(length=3, heads=12)
    positions = np.array([1, 257, 10**6])

    @jax.jit
    def added(q, k, at):
        features = scheme.features(params, None, q, k, None, None, None)[:2]
        return added_logits(scheme.rules(params, *features), at[None], at[None])[0]

    got = added(q, k, positions)
    near = authors(params, q, k, "both")
    steps = abs(np.arange(3)[:, None] - np.arange(3)[None])
    far = abs(positions[:, None] - positions[None]) / np.maximum(steps, 1)
    np.testing.assert_allclose(got, near * far, rtol=2e-6)
