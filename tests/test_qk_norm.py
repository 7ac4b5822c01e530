"""QK-norm by itself and in layers; tests/hf compares its forms with transformers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc_jax as pe
from posenc_jax import linen as pl
from posenc_jax import nnx as pn
from tests.support import layer_of, slow

D, N, K, H = 20, 6, 3, 8
ROPE = pe.RoPE(head_dim=H)
X = np.random.default_rng(1).normal(size=(2, 9, D)).astype(np.float32)
NORM = pe.QKNorm(epsilon=0.01, scale_offset=1.0)
LAYER = pe.LayerSpec(ROPE, 4, scale=0.5, softcap=3.0, sinks=True, qk_norm=NORM)


@functools.partial(jax.jit, static_argnums=0)
def pulled(norm, params, x, d_out):
    out, pull = jax.vjp(lambda x: norm(params, x), x)
    return out, pull(d_out)[0]


def test_a_clip_is_its_formula_in_float64():
    norm = pe.QKNorm("clip", scale="per_head", threshold=2.0)
    x = np.random.RandomState(0).standard_normal((2, 5, N, H)).astype(np.float32)
    x[0, 0] = 0.0  # As padding is.
    scale = linspace(0.3, 1.5, N * H).reshape(N, H)
    z = np.float64(x) * scale
    length = np.sqrt((z**2).sum(-1, keepdims=True))
    clipped = length > 2.0
    assert 0.1 < clipped.mean() < 0.9
    expected = np.where(clipped, z * 2.0 / (length + 1e-6), z)
    d_out = np.random.RandomState(1).standard_normal(x.shape).astype(np.float32)
    out, d_x = pulled(norm, {"scale": scale}, x, d_out)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    unit = np.where(clipped, z / np.maximum(length, 1e-9), 0.0)
    d_z = d_out - unit * (unit * d_out).sum(-1, keepdims=True)
    d_z *= np.where(clipped, 2.0 / np.maximum(length, 1e-9), 1.0)
    np.testing.assert_allclose(d_x, d_z * scale, atol=1e-5)
    assert norm.init(N, H)["scale"].shape == (N, H) and pe.QKNorm().threshold is None


@pytest.mark.parametrize("kind, over", [("rms", "head"), ("layer", "head"), ("clip", "projection")])
def test_long_vectors_have_the_norm_of_their_direction(kind, over):
    """Squares beyond 1.8e19 overflow; gradients are those of the direction, by length."""
    norm = pe.QKNorm(kind, over, "per_head", epsilon=0.0, threshold=2.0 if kind == "clip" else None)
    x = np.random.RandomState(0).uniform(1.0, 2.0, (1, 5, N, H)).astype(np.float32)
    x[:, ::2] *= -1.0
    params = {"scale": linspace(0.7, 1.5, N * H).reshape(N, H)}
    d_out = np.random.RandomState(1).standard_normal(x.shape).astype(np.float32)
    out, d_x = pulled(norm, params, x, d_out)
    for length in (2.0**45, 2.0**55, 2.0**64, 2.0**110):
        far, d_far = pulled(norm, params, x * np.float32(length), d_out)
        np.testing.assert_allclose(far, out, rtol=1e-6)
        np.testing.assert_allclose(d_far * length, d_x, rtol=0, atol=1e-5)
    far = jax.jit(norm)(params, (x * 1e38).astype(jnp.bfloat16))
    np.testing.assert_allclose(np.float32(far), out, rtol=0, atol=0.1)


@pytest.mark.parametrize(
    "kind, over, scale", [("rms", "head", "shared"), ("layer", "projection", "per_head")]
)
def test_a_norm_is_its_formula_in_float64(kind, over, scale):
    norm = pe.QKNorm(kind, over, scale, scale_offset=1.0, use_bias=True, epsilon=0.1)
    shape = (2, 5, N, H)
    x = np.random.RandomState(0).standard_normal(shape).astype(np.float32)
    params = jax.tree.map(  # Their sum with the offset has more digits than bfloat16.
        lambda p: (p + linspace(-1.0, 1.0, p.size).reshape(p.shape)).astype(jnp.bfloat16),
        norm.init(N, H),
    )
    expected = np.empty(shape)
    gain, bias = (np.broadcast_to(np.float64(params[n]), (N, H)) for n in ("scale", "bias"))
    for b, t in np.ndindex(2, 5):
        for n in range(N):
            part = np.float64(x[b, t] if over == "projection" else x[b, t, n])
            mean = part.mean() if kind == "layer" else 0.0
            root = np.sqrt(((part - mean) ** 2).mean() + 0.1)
            expected[b, t, n] = (x[b, t, n] - mean) / root * (gain[n] + 1) + bias[n]
    out, half = jax.jit(lambda *x: [norm(params, y) for y in x])(x, x.astype(jnp.bfloat16))
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(np.float32), expected, atol=0.05)


def linspace(start, end, count):
    return np.linspace(start, end, count, dtype=np.float32)


def set_norms(layer):
    layer.query_norm.scale[...] = linspace(-0.5, 0.5, H)
    layer.key_norm.scale[...] = linspace(0.5, -0.2, H)


SIZES = {"num_kv_heads": K, "head_dim": H, "is_causal": True}


def compare(layers, module, by_hand):
    """NNX layers, their steps and a Linen module have the output written out."""
    params = {"params": nnx.to_pure_dict(nnx.state(layers[0], nnx.Param))}

    @jax.jit
    def run(x):
        outs = [by_hand(layers[0], x), module.apply(params, x)]
        for layer in layers:
            first, cache = layer(x[:, :6], cache=layer.new_cache(2, 9))
            steps = jnp.concatenate([first, layer(x[:, 6:], cache=cache)[0]], 1)
            outs += [layer(x), steps]
        return outs

    expected, *outs = run(X)
    for out in outs:
        np.testing.assert_allclose(out, expected, atol=1e-5)


def projected(layer, x):
    return [project(x) for project in (layer.query, layer.key, layer.value)]


@slow
def test_attention_takes_a_layer():
    layer = layer_of(lambda rngs: pn.Attention(D, N, position=LAYER, rngs=rngs, **SIZES))
    set_norms(layer)
    layer.sinks[...] = linspace(-1.0, 1.0, N)
    settings = {"window": 4, "scale": 0.5, "softcap": 3.0}

    def by_hand(layer, x):
        q, k, v = projected(layer, x)
        norms = layer.query_norm, layer.key_norm
        q, k = (NORM({"scale": n.scale[...]}, y) for n, y in zip(norms, (q, k), strict=True))
        options = settings | {"sinks": layer.sinks[...], "is_causal": True}
        return layer.out(pe.scheme_attention(ROPE, {}, q, k, v, **options)[0])

    module = pl.Attention(N, position=LAYER, **SIZES)
    compare([layer], module, by_hand)
    settings |= {"sinks": True, "qk_norm": NORM}
    shared = pn.PositionEncoding(ROPE, rngs=nnx.Rngs(0))
    for position in ({"position": ROPE}, {"shared_encoding": shared}):
        other = pn.Attention(D, N, rngs=nnx.Rngs(0), **position, **SIZES, **settings)
        assert other.settings == layer.settings == LAYER


def test_a_norm_after_the_rotation():
    """With a scale that differs by dimension, as in HunYuan, the order matters.

    Caches have rotated keys, or keys as projected.
    """
    norm = pe.QKNorm(epsilon=0.01, scale_offset=1.0, after_rotation=True)
    layers = [
        layer_of(
            lambda rngs, scheme=scheme: pn.Attention(
                D, N, position=scheme, qk_norm=norm, rngs=rngs, **SIZES
            )
        )
        for scheme in (ROPE, Uncached(head_dim=H))
    ]
    for layer in layers:
        set_norms(layer)

    def by_hand(layer, x):
        q, k, v = projected(layer, x)
        q, k = (pe.apply_rope(y, np.arange(9)) for y in (q, k))
        q, k = layer.query_norm(q), layer.key_norm(k)
        return layer.out(pe.attention(q, k, v, is_causal=True))

    compare(layers, pl.Attention(N, position=ROPE, qk_norm=norm, **SIZES), by_hand)


def test_schemes_that_scale_q_take_no_norm_after_it():
    """It would undo the scale; XPos's grows from the last token of a call, too."""
    q = jnp.ones((1, 2, 1, H))
    xpos, heat = pe.XPos(head_dim=H), pe.QueryTemperature()
    schemes = xpos, pe.chain(xpos, pe.ALiBi(1)), heat, pe.chain(heat, ROPE), pe.SSMax(1)
    for scheme in schemes:
        params = scheme.init(jax.random.key(0))
        with pytest.raises(NotImplementedError, match="scales q or k, so that no norm"):
            pe.scheme_attention(scheme, params, q, q, q, norms=(jnp.tanh, jnp.tanh))


@dataclasses.dataclass(frozen=True)
class Uncached(pe.RoPE):
    """RoPE whose keys are cached as projected."""

    @property
    def traits(self):
        return dataclasses.replace(super().traits, cache_transformed_keys=False)


RNGS = nnx.Rngs(0)
AFTER = pe.QKNorm(after_rotation=True)
TWICE = {"position": LAYER, "window": 3, "sinks": True}


def reranged(**inputs):
    layer = pn.Attention(D, N, head_dim=H, position=pe.ReRoPE(H), qk_norm=AFTER, rngs=RNGS)
    return layer(**inputs)


ERRORS = [
    (
        pn.Attention,
        {"model_dim": D, "num_heads": N, "head_dim": H, "rngs": RNGS} | TWICE,
        "Attention: window, sinks beside position=LayerSpec",
    ),
    (reranged, {"inputs_q": X}, "rotates q and k within its attention", NotImplementedError),
    (pe.LayerSpec, {"scheme": ROPE, "qk_norm": True}, "be a QKNorm or None, got True", TypeError),
    (pe.LayerSpec, {"scheme": ROPE, "softcap": 0}, "softcap must be positive, got 0"),
    (pe.QKNorm, {"kind": "batch"}, "kind must be one of .*, got 'batch'"),
    (pe.QKNorm, {"threshold": 3.0}, "kind='clip' alone has a threshold, got kind='rms' and"),
    (pe.QKNorm, {"kind": "clip", "threshold": -1.0}, "threshold must be positive, got -1"),
    (pe.QKNorm, {"scale_offset": float("nan")}, "scale_offset must be finite, got nan"),
    (pe.QKNorm, {"use_bias": True, "scale": "none"}, "use_bias and scale_offset need a scale"),
    (pe.QKNorm, {"scale_offset": 1.0, "scale": "none"}, "use_bias and scale_offset need a scale"),
    (pe.QKNorm, {"over": "projection"}, "over='projection' has one scale per head"),
    (
        pe.QKNorm(scale="per_head"),
        {"params": {"scale": np.ones((1, H))}, "x": np.ones((1, 1, N, H), np.float32)},
        r"QKNorm: params must be \{'scale': \(6, 8\)\}, got \{'scale': \(1, 8\)\}",
    ),
    (NORM, {"params": {}, "x": X}, r"x must be \[B, T, N, H\], got shape \(2, 9, 20\)"),
]


def test_sinks_of_a_call_that_are_none_leave_those_of_the_layer():
    layer = pn.Attention(D, N, head_dim=H, sinks=True, rngs=nnx.Rngs(0))
    layer.sinks[...] = jnp.full(N, 2.0)
    np.testing.assert_array_equal(*jax.jit(lambda x: (layer(x, sinks=None), layer(x)))(X))
