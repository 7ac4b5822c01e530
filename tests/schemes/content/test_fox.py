"""FoX against the authors' reference for their kernel, and properties of its running sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax import testing
from posenc_jax.testing.properties import mirrored_change
from tests import oracle
from tests.oracle import qkv, softmax_attention
from tests.support import Option, initial, parameters

_FIXED = {"gate": "fixed", "min_time": 2.0, "max_time": 8.0}
OPTIONS = {
    pe.FoX: {
        "gate": Option("bias", _FIXED),
        "init_bias": initial(1.0),
        "min_time": Option(3.0, _FIXED),
        "max_time": Option(9.0, _FIXED),
    }
}


def arrays(length=21):
    q, k, v = qkv(length=length)
    return q, k, v, (np.random.default_rng(3).normal(size=(1, length, 10)) * 3).astype("f4")


def attend(scheme, params, q, k, v, x, **options):
    return oracle.attend(scheme, params, q, k, v, x=x, **options)


def authors(params, q, k, v, x, **options):
    """zhixuan-lin/forgetting-transformer at 883f260, test_op: the sums of all gates, subtracted."""
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    z = p["b"] + (np.asarray(x[0], np.float64) @ p["w"] if "w" in p else np.zeros((x.shape[1], 1)))
    sums = np.cumsum(-np.log1p(np.exp(-z)), 0)
    return softmax_attention(
        q,
        k,
        v,
        lambda q, k, n, i, j: q @ k / np.sqrt(q.size) - abs(sums[i, n] - sums[j, n]),
        **options,
    )


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_matches_the_authors_and_decays_in_both_directions(is_causal):
    scheme, tokens = pe.FoX(num_heads=6, model_dim=10), arrays()
    params = parameters(scheme) | {"b": np.linspace(-1, 6, 6, dtype=np.float32)}
    expected = authors(params, *tokens, sees=lambda i, j: j <= i or not is_causal)
    out = attend(scheme, params, *tokens, is_causal=is_causal)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "dense"])
def test_drafts_at_equal_positions_decay_in_both_directions(implementation):
    """Tokens of a tree see each other where their positions are equal, whatever their slots."""
    scheme = pe.FoX(num_heads=6, model_dim=10)
    params, tokens = parameters(scheme), arrays(length=9)
    positions = np.array([0, 1, 2, 3, 3, 3, 4, 4, 5])
    expected = authors(params, *tokens, sees=lambda i, j: positions[j] <= positions[i])
    options = {"is_causal": True, "implementation": implementation}
    out = attend(scheme, params, *tokens, positions=jnp.asarray(positions), **options)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("gate", ["bias", "fixed"])
def test_gates_independent_of_tokens_equal_alibi_with_other_slopes(gate):
    scheme = pe.FoX(num_heads=6, model_dim=10, gate=gate, min_time=2.0, max_time=64.0)
    params = scheme.init(jax.random.key(0))
    assert list(params) == (["b"] if gate == "bias" else [])
    times = 2.0 ** np.arange(1, 7)  # sigmoid(b) = exp(-1 / t): a penalty of 1 / t per token.
    q, k, v, _ = arrays()
    expected = softmax_attention(
        q, k, v, lambda q, k, n, i, j: q @ k / np.sqrt(8) - (i - j) / times[n]
    )
    out = oracle.attend(scheme, params, q, k, v, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)


ERRORS = [
    (pe.FoX, {"min_time": 1.0}, r'gate="full" has no decay times, got \(1.0, None\)'),
    (pe.FoX, {"gate": "bias"}, r"gate='bias' needs 0 < min_time <= max_time, got \(None, None\)"),
    (
        pe.FoX,
        {"gate": "fixed", "min_time": 2.0, "max_time": 4.0, "init_bias": 1.0},
        "gate='fixed' starts from its times, not from init_bias=1.0",
    ),
]


@pytest.mark.parametrize("gate", ["full", "fixed"])
def test_gates_that_do_not_read_the_token_are_mirrored(gate):
    times = {} if gate == "full" else {"min_time": 2.0, "max_time": 64.0}
    scheme = pe.FoX(num_heads=6, model_dim=20, gate=gate, **times)
    change = mirrored_change(testing.Case(scheme))
    assert scheme.traits.mirrored == (change < 2e-5) == (gate != "full")
