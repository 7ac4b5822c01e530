"""Several schemes at once, and one scheme on other coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests import oracle
from tests.oracle import qkv, softmax_attention
from tests.support import parameters, run

ARRAYS = qkv(length=21)
SHAW, COPE = pe.Shaw(num_heads=6, head_dim=8, clip=3), pe.CoPE(head_dim=8)


def attend(scheme, params=None, **options):
    params = parameters(scheme) if params is None else params
    return oracle.attend(scheme, params, *ARRAYS, is_causal=True, **options)


def grouped(coordinates):
    return coordinates // 4


def tripled(coordinates):
    return 3 * coordinates


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_a_chain_applies_all_of_its_schemes(order):
    schemes = pe.RoPE(head_dim=8), pe.ALiBi(num_heads=6), SHAW
    params = {}, {}, parameters(SHAW)
    keys, values = (np.asarray(params[2][name][0], np.float64) for name in ("keys", "values"))
    slopes = np.asarray(pe.alibi_slopes(6), np.float64)
    q, k, v = ARRAYS

    def logit(q, k, n, i, j):
        rotated, q = np.split(q, 2)
        return (rotated @ k + q @ keys[3 + max(-3, j - i)]) / np.sqrt(8) - slopes[n] * (i - j)

    expected = softmax_attention(
        np.concatenate([pe.apply_rope(q, jnp.arange(21)), q], -1),
        pe.apply_rope(k, jnp.arange(21)),
        v,
        logit,
        value=lambda n, i, j: values[3 + max(-3, j - i)],
    )
    out = attend(pe.chain(*(schemes[n] for n in order)), tuple(params[n] for n in order))
    np.testing.assert_allclose(out, expected, atol=1e-5)


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


@pytest.mark.parametrize("scheme", [pe.T5(num_heads=6), pe.chain(pe.RoPE(head_dim=8), SHAW)])
def test_transformed_positions_equal_given_coordinates(scheme):
    wrapped = pe.with_positions(scheme, tripled)
    for positions in (np.arange(21), np.arange(21) + 7):  # Order follows positions.
        out = attend(wrapped, positions=positions)
        expected = attend(scheme, coordinates=3 * positions)
        np.testing.assert_allclose(out, expected, atol=1e-5)
        assert np.abs(out - attend(scheme, coordinates=positions)).max() > 1e-4


def test_the_outer_of_two_transforms_applies_first():
    wrapped = pe.with_positions(pe.with_positions(SHAW, grouped), tripled)
    expected = attend(SHAW, coordinates=3 * np.arange(21) // 4, implementation="xla")
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


ERRORS = [
    refused("needs at least one scheme"),
    refused("only one scheme may add to the values, got", SHAW, SHAW),
    refused(
        "only one scheme may add to the values, got",
        pe.with_positions(SHAW, grouped),
        pe.chain(pe.NoPE(), SHAW.replace(keys=False)),
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
