"""Layer patterns of released models, and models whose layers differ."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc_jax as pe
from posenc_jax.nnx import Attention
from tests.support import slow

LOCAL = pe.RoPE(head_dim=8)


def normal(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("count, every", [(12, 4), (13, 6)])
def test_local_layers_are_those_of_transformers(count, every):
    """`(i + 1) % every != 0`: smollm3, llama4, cohere2 (every 4th) and gemma3 (every 6th)."""
    layers = pe.layer_pattern(count, *[pe.LayerSpec(LOCAL, window=4)] * (every - 1), pe.NoPE())
    is_local = [layer.scheme == LOCAL for layer in layers]
    assert is_local == [(i + 1) % every != 0 for i in range(count)]
    assert [layer.window for layer in layers] == [4 if local else None for local in is_local]


def test_the_last_layer_of_gemma_4_is_global():
    long = pe.RoPE(head_dim=8, theta=1e6, scaling=pe.Proportional(0.25))
    layers = pe.layer_pattern(8, *[pe.LayerSpec(LOCAL, window=4)] * 5, long, last=long)
    assert [i for i, layer in enumerate(layers) if layer.scheme == long] == [5, 7]
    assert layers[-1].window is None
    windowed = pe.layer_pattern(2, LOCAL, last=pe.LayerSpec(long, window=9))
    assert windowed[-1].window == 9
    assert hash(layers) == hash(pe.layer_pattern(8, *layers[:6], last=long))


@pytest.mark.parametrize("is_causal, window", [pytest.param(True, 3, marks=slow), (False, (1, 7))])
def test_chunks_hide_what_a_mask_would(is_causal, window):
    """Llama 4: tokens attend within their chunk, in packed and padded rows and in a cache."""
    spec = pe.LayerSpec(LOCAL, window=window, chunk_size=4)
    layer, masked = (
        Attention(16, 2, position=y, is_causal=is_causal, rngs=nnx.Rngs(0))
        for y in (spec, dataclasses.replace(spec, chunk_size=None))
    )
    x = normal(2, 19, 16)
    ids = np.array([[-1] * 2 + [0] * 17, [0] * 11 + [1] * 6 + [-1] * 2], np.int32)
    positions = np.array([[0, 0, *range(17)], [*range(6, 17), *range(6, 12), 6, 6]], np.int32)
    mask = (positions[:, :, None] // 4 == positions[:, None] // 4)[:, None]
    run = nnx.jit(lambda layer, x, **options: layer(x, **options))
    places = {"positions": positions, "segment_ids": ids}
    expected = run(masked, x, mask=mask, **places)
    np.testing.assert_allclose(run(layer, x, **places), expected, atol=2e-6)
    first = np.arange(19) // 4  # Without positions, they count from zero.
    mask = (first[:, None] == first)[None, None]
    np.testing.assert_allclose(run(layer, x), run(masked, x, mask=mask), atol=2e-6)
    if not is_causal:
        return
    cache, outs = layer.new_cache(2, 19), []
    for part in (slice(0, 7), *(slice(t, t + 1) for t in range(7, 12)), slice(12, 19)):
        here = {name: array[:, part] for name, array in places.items()}
        y, cache = run(layer, x[:, part], cache=cache, **here)
        outs.append(y)
    real = ids >= 0
    np.testing.assert_allclose(np.concatenate(outs, 1)[real], expected[real], atol=2e-6)
    y, cache = run(layer, x[:1], cache=layer.new_cache(1, 19), segment_ids=ids[:1])
    np.testing.assert_allclose(y[:, 2:], expected[:1, 2:], atol=2e-6)  # Padding has no positions.


def test_what_chunks_do_not_go_with():
    layer = Attention(16, 2, position=pe.LayerSpec(LOCAL, chunk_size=4), rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="a ring for chunk_size=4; use a full cache"):
        layer.new_cache(2, 8, ring=True)
    x = jnp.ones((1, 5, 16))
    with pytest.raises(NotImplementedError, match="prefix_length in a layer with chunks"):
        layer(x, prefix_length=jnp.array([2]))


def test_drope_replaces_rope_by_nope_in_the_same_state():
    """Trained with RoPE, then without; longer sequences are evaluated with a temperature."""
    heat = pe.QueryTemperature(form="log_n_clipped", length=12)
    trained, *others = (
        Attention(16, 2, position=scheme, is_causal=True, rngs=nnx.Rngs(n))
        for n, scheme in enumerate((LOCAL, pe.NoPE(), heat))
    )
    for layer in others:
        assert jax.tree.structure(nnx.state(layer)) == jax.tree.structure(nnx.state(trained))
        nnx.update(layer, nnx.state(trained, nnx.Param))
    cool, hot = nnx.jit(lambda layers, x: [f(x) for f in layers])(others, normal(1, 20, 16))
    np.testing.assert_allclose(hot[:, :12], cool[:, :12], atol=1e-6)
    assert np.abs(hot[:, 12:] - cool[:, 12:]).max() > 1e-4


STATES = pe.LayerSpec(pe.NoPE(), mixer="state_space")
NO_ATTENTION = {"scheme": pe.NoPE(), "mixer": "convolution"}
ERRORS = [
    (lambda: pe.layer_pattern(0, LOCAL), {}, "num_layers must be >= 1, got 0"),
    (lambda: pe.layer_pattern(3), {}, "the pattern must have from 1 to 3 layers, got 0"),
    (lambda: pe.layer_pattern(3, *[LOCAL] * 4), {}, "must have from 1 to 3 layers, got 4"),
    (lambda: pe.layer_pattern(4, [LOCAL]), {}, r"must be Schemes or .*, got \[RoPE", TypeError),
    (lambda: pe.layer_pattern(4, LOCAL, last=pe.NoPE), {}, "NoPE'>; call it: NoPE", TypeError),
    (
        lambda: Attention(16, 2, position=STATES, rngs=nnx.Rngs(0)),
        {},
        "must be a layer of attention, .*'state",
    ),
    (pe.LayerSpec, {"scheme": "rope"}, "scheme must be a Scheme, got 'rope'", TypeError),
    (pe.LayerSpec, {"scheme": LOCAL, "window": -2}, "window must be at least 1 token, got -2"),
    (pe.LayerSpec, {"scheme": LOCAL, "chunk_size": 2.5}, "chunk_size must be .*2.5", TypeError),
    *(
        (pe.LayerSpec, {"scheme": scheme, "chunk_size": 4}, "attends within its window alone, got")
        for scheme in (
            pe.chain(pe.SSMax(2), pe.streaming(LOCAL, 2)),
            pe.RoPEByLength(8, scaling=pe.DynamicNTK(2.0, 4, None)),
        )
    ),
    (pe.LayerSpec, NO_ATTENTION | {"mixer": "mamba"}, "mixer must be one of"),
    *(
        (pe.LayerSpec, NO_ATTENTION | settings, "'convolution' has no settings of attention")
        for settings in ({"window": 3}, {"sinks": True}, {"scale": 1.0}, {"scheme": LOCAL})
    ),
]
