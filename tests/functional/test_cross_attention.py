"""Attention to another sequence, as a function and in the layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc_jax as pe
import posenc_jax.linen as pl
import posenc_jax.nnx as pn
from tests.support import BATCH, KV_HEADS, LENGTH, SIZES, build, close, layer_of, make_batch

N, H, D, T = SIZES["num_heads"], SIZES["head_dim"], SIZES["model_dim"], 7
TOKENS, RNG = make_batch(), np.random.default_rng(0)


@pytest.mark.parametrize("name", ["shaw", "vo_rope"])
def test_the_last_tokens_of_a_sequence_as_another_one(name):
    """Attention of the end of a sequence to all of it equals self-attention there."""
    scheme = build(pe.SCHEMES[name])
    params, tokens = scheme.init(jax.random.key(0)), TOKENS
    positions = jnp.asarray(np.stack([5 + np.arange(LENGTH), 2 * np.arange(LENGTH)]), jnp.int32)
    ids = jnp.asarray([[0] * LENGTH, [0] * 9 + [1] * 8 + [-1] * 2], jnp.int32)
    last = slice(LENGTH - T, None)

    @jax.jit
    def run(tokens):
        arrays = tokens.x, tokens.q, tokens.k, tokens.v
        x, q, k, v = arrays
        whole, _ = pe.scheme_attention(
            scheme, params, q, k, v, x=x, positions=positions, segment_ids=ids, is_causal=True
        )
        cross = pe.scheme_cross_attention(
            scheme,
            params,
            q[:, last],
            k,
            v,
            x=x[:, last],
            memory=x,
            positions=positions[:, last],
            k_positions=positions,
            segment_ids=ids[:, last],
            k_segment_ids=ids,
            is_causal=True,
        )
        return whole[:, last], cross

    expected, out = run(tokens)
    close(out, expected)


def test_layers_attend_to_a_memory_as_flax_does():
    """With the arguments of `nnx.MultiHeadAttention`, and other widths of keys.

    Queries without segments see all keys but padding.
    """
    x = RNG.normal(size=(BATCH, T, D)).astype(np.float32)
    keys, values = RNG.normal(size=(2, BATCH, 11, 13)).astype(np.float32)
    options = {"num_kv_heads": KV_HEADS, "in_kv_features": 13, "use_bias": True}
    layer = layer_of(lambda rngs: pn.Attention(D, N, head_dim=H, rngs=rngs, **options))
    options["decode"] = False
    stock = layer_of(lambda rngs: nnx.MultiHeadAttention(N, D, N * H, rngs=rngs, **options))
    nnx.update(layer, nnx.state(stock, nnx.Param))
    module = pl.Attention(num_heads=N, num_kv_heads=KV_HEADS, head_dim=H, use_bias=True)
    params = {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
    padded = jnp.arange(11)[None] < jnp.array([[11], [6]])

    @jax.jit
    def run(*inputs):
        options = {"k_segment_ids": jnp.where(padded, jnp.arange(11), -1)}
        return (
            stock(*inputs, mask=padded[:, None, None]),
            layer(*inputs, **options),
            module.apply(params, *inputs, **options),
        )

    for inputs in ((x, keys), (x, keys, values)):
        expected, *outs = run(*inputs)
        for out in outs:
            close(out, expected)


def test_a_layer_with_a_scheme_needs_the_positions_of_both():
    x = RNG.normal(size=(BATCH, T, D)).astype(np.float32)
    layer = layer_of(lambda rngs: pn.Attention(D, N, head_dim=H, position=pe.RoPE(H), rngs=rngs))
    frames = jnp.arange(T) / 2
    run = jax.jit(lambda *inputs, **places: layer(*inputs, **places))
    close(run(x, x, coordinates=frames, k_coordinates=frames), run(x, coordinates=frames))
    for places, missing in (({}, ""), ({"positions": jnp.arange(T)}, "k_")):
        message = rf"RoPE\(.*by their positions; give {missing}positions or {missing}coordinates"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda x, places=places: layer(x, x, **places), x)


def test_what_has_no_meaning_is_refused():
    x = np.ones((BATCH, T, D), np.float32)
    sizes = {"num_kv_heads": KV_HEADS, "head_dim": H}
    layer = layer_of(lambda rngs: pn.Attention(D, N, rngs=rngs, **sizes))

    def call(*inputs, **options):
        jax.eval_shape(lambda inputs: layer(*inputs, **options), inputs)

    with pytest.raises(ValueError, match="inputs_v needs inputs_k beside it"):
        call(x, None, x)
    with pytest.raises(ValueError, match="keys of another sequence have no cache"):
        call(x, x, cache=layer.new_cache(BATCH, T))
    with pytest.raises(ValueError, match="q and k differ in batch size"):
        call(x, x[:1])
    places = {"positions": jnp.arange(T), "k_positions": jnp.arange(T)}
    for cls in (pe.FoX, pe.contrib.ShortConv):
        layer.encoding = layer_of(lambda rngs, c=cls: pn.PositionEncoding(build(c), rngs=rngs))
        with pytest.raises(NotImplementedError, match=f"{cls.__name__}.* a running state of one"):
            call(x, x, **places)
