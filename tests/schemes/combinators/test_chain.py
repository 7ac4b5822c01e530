"""Several schemes at once, and one scheme on other coordinates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests import oracle
from tests.oracle import qkv, softmax_attention
from tests.support import parameters, run

ARRAYS = qkv(length=21)


def attend(scheme, params=None, **options):
    params = parameters(scheme) if params is None else params
    return oracle.attend(scheme, params, *ARRAYS, is_causal=True, **options)


def grouped(coordinates):
    return coordinates // 4


@dataclasses.dataclass(frozen=True)
class Times:
    factor: int

    def __call__(self, coordinates):
        return coordinates * self.factor


@dataclasses.dataclass(frozen=True)
class Vector(pe.Scheme):
    """Adds one learned vector to values of positions that are even."""

    @property
    def acts(self):
        return pe.Acts.VALUES

    def init(self, key):
        return {"table": jnp.stack([jnp.ones((6, 8)), jnp.zeros((6, 8))], 1)}

    def rules(self, params, q_features=None, k_features=None):
        return pe.ValueBias(_parity, table=params["table"])


def _parity(q, k):
    return k % 2


def test_a_chain_applies_all_of_its_schemes():
    rope, alibi = pe.RoPE(head_dim=8), pe.ALiBi(num_heads=6)
    slopes = np.asarray(pe.alibi_slopes(6), np.float64)
    q, k, v = ARRAYS
    positions = jnp.arange(21)
    expected = softmax_attention(
        *(pe.apply_rope(x, positions) for x in (q, k)),
        v,
        lambda q, k, n, i, j: q @ k / np.sqrt(8) - slopes[n] * (i - j),
    )
    np.testing.assert_allclose(attend(pe.chain(rope, alibi)), expected, atol=1e-5)
    np.testing.assert_allclose(attend(pe.chain(alibi, rope)), expected, atol=1e-5)


def test_a_chain_embeds_in_order_with_separate_parameters():
    learned, waves = pe.LearnedAbsolute(max_length=30, model_dim=4), pe.Sinusoidal(model_dim=4)
    scheme = pe.chain(learned, waves, learned)
    params = parameters(scheme)
    assert len(params) == 3 and params[1] == {}
    first, last = params[0]["table"], params[2]["table"]
    assert np.abs(first - last).max() > 1e-3
    x = np.zeros((1, 5, 4), np.float32)
    out = run(pe.scheme_embedding, (scheme,), params, x)
    expected = first[:5] + pe.sinusoidal_encoding(jnp.arange(5), 4) + last[:5]
    np.testing.assert_allclose(out[0], expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"params lack \[2\]\['table'\]"):
        pe.scheme_embedding(scheme, params[:2], x)


def test_a_chain_with_content_and_value_rules():
    shaw, alibi = pe.Shaw(num_heads=6, head_dim=8, clip=3), pe.ALiBi(num_heads=6)
    both = pe.chain(alibi, shaw)
    params = parameters(both)
    keys, values = (np.asarray(params[1][name][0], np.float64) for name in ("keys", "values"))
    slopes = np.asarray(pe.alibi_slopes(6), np.float64)

    def row(i, j):
        return 3 + max(-3, min(3, j - i))

    expected = softmax_attention(
        *ARRAYS,
        lambda q, k, n, i, j: q @ (k + keys[row(i, j)]) / np.sqrt(8) - slopes[n] * (i - j),
        value=lambda n, i, j: values[row(i, j)],
    )
    np.testing.assert_allclose(attend(both, params), expected, atol=1e-5)


def test_a_chain_joins_the_traits_of_its_schemes():
    rope, t5, waves = pe.RoPE(head_dim=8), pe.T5(num_heads=6), pe.Sinusoidal(model_dim=8)
    assert pe.chain(rope, t5, waves).acts == pe.Acts.EMBEDDING | pe.Acts.QK | pe.Acts.LOGITS
    traits = pe.chain(waves, rope).traits
    assert traits.scale_embedding and not traits.relative and traits.cache_transformed_keys
    assert pe.chain(t5).traits.shared_over_layers
    assert not pe.chain(t5, rope).traits.shared_over_layers
    assert pe.chain(rope, t5) == pe.chain(rope, t5) != pe.chain(t5, rope)
    assert hash(pe.chain(rope, t5)) == hash(pe.chain(rope, t5))


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: pe.chain(pe.RoPE(8), s)])
def test_refusals_reach_wrapped_attention_calls(wrap):
    """A copy of a call keeps the options that a scheme refuses; a function has none to read."""
    scheme = wrap(pe.PaTH(num_heads=6, head_dim=8, model_dim=20))

    def attend(call):
        params, positions = parameters(scheme), jnp.arange(21)[None]
        x = jnp.ones((1, 21, 20))
        features = scheme.features(params, x, *ARRAYS[:2], positions, None, None)[:2]
        return scheme.attend(params, *ARRAYS, positions, positions, *features, call)

    call = pe.AttentionCall(is_causal=True, softcap=5.0).replace(scale=1.0)
    with pytest.raises(NotImplementedError, match="softcap"):
        jax.eval_shape(lambda: attend(call))
    with pytest.raises(AttributeError, match=r"softcap"):
        jax.eval_shape(lambda: attend(lambda *args: call(*args)))


@pytest.mark.parametrize(
    "scheme",
    [
        pe.T5(num_heads=6),
        pe.Shaw(num_heads=6, head_dim=8, clip=3),
        pe.chain(pe.RoPE(head_dim=8), Vector()),
    ],
    ids=lambda s: s.name or "chain",
)
def test_transformed_positions_equal_given_coordinates(scheme):
    wrapped = pe.with_positions(scheme, Times(3))
    for positions in (np.arange(21), np.arange(21) + 7):  # Order follows positions.
        out = attend(wrapped, positions=positions)
        expected = attend(scheme, coordinates=3 * positions)
        np.testing.assert_allclose(out, expected, atol=1e-5)
        assert np.abs(out - attend(scheme, coordinates=positions)).max() > 1e-4


def test_the_outer_of_two_transforms_applies_first():
    scheme = pe.Shaw(num_heads=6, head_dim=8, clip=3, values=False)
    wrapped = pe.with_positions(pe.with_positions(scheme, grouped), Times(3))
    expected = attend(scheme, coordinates=3 * np.arange(21) // 4, implementation="xla")
    np.testing.assert_allclose(attend(wrapped, implementation="xla"), expected, atol=1e-5)


def test_transformed_positions_keep_traits_except_relative():
    t5 = pe.T5(num_heads=6)
    wrapped = pe.with_positions(t5, grouped)
    assert wrapped.traits.shared_over_layers
    assert wrapped.traits.cache_transformed_keys and not wrapped.traits.relative
    bias = wrapped.rules(parameters(wrapped))[0]
    assert not bias.relative and bias.bounds == (None, None)  # 3 // 4 - 4 // 4 is not -1 // 4.


def refused(message, *schemes, error=ValueError):
    return lambda: pe.chain(*schemes), {}, f"chain: {message}", error


def without(message, scheme):
    return lambda: pe.with_positions(scheme, grouped), {}, f"with_positions: .*{message}"


SHAW, COPE = pe.Shaw(num_heads=6, head_dim=8), pe.CoPE(head_dim=8)
ERRORS = [
    refused("needs at least one scheme"),
    refused("only one scheme may add to the values, got", SHAW, SHAW),
    refused(
        "only one scheme may add to the values, got",
        pe.with_positions(SHAW, grouped),
        pe.chain(pe.NoPE(), Vector()),
    ),
    refused("only one scheme may transform rows of logits", COPE, pe.StickBreaking()),
    refused(
        "only one scheme may transform rows of logits",
        *(pe.on_axis(pe.contrib.DAPE(num_heads=6), axis) for axis in (0, 1)),
    ),
    *(
        refused(r"takes schemes one by one, chain\(RoPE\(\.\.\.\)", *schemes, error=TypeError)
        for schemes in ([[pe.NoPE()]], (pe.RoPE, pe.T5), (pe.NoPE(), "rope"), (None,))
    ),
    refused(
        r"\[_Streaming.* may change q within attention, .*; put \[RoPE.* before it",
        pe.streaming(pe.ALiBi(6), 2),
        pe.RoPE(8),
    ),
    without("NoPE.* reads no positions", pe.chain(pe.NoPE())),
    without("only the order of positions, so", COPE),
]
