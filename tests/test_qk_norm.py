"""QK-norm by itself and in layers; tests/hf compares its forms with transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc_jax as pe
from posenc_jax import linen as pl
from posenc_jax import nnx as pn

D, N, K, H = 20, 6, 3, 8
ROPE = pe.RoPE(head_dim=H)
X = np.random.default_rng(1).normal(size=(2, 9, D)).astype(np.float32)
NORM = pe.QKNorm(epsilon=0.01, scale_offset=1.0)
LAYER = pe.LayerSpec(ROPE, 4, scale=0.5, softcap=3.0, sinks=True, qk_norm=NORM)


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
    out, pull = jax.vjp(lambda x: norm({"scale": scale}, x), x)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    d_out = np.random.RandomState(1).standard_normal(x.shape).astype(np.float32)
    unit = np.where(clipped, z / np.maximum(length, 1e-9), 0.0)
    d_z = d_out - unit * (unit * d_out).sum(-1, keepdims=True)
    d_z *= np.where(clipped, 2.0 / np.maximum(length, 1e-9), 1.0)
    np.testing.assert_allclose(pull(d_out)[0], d_z * scale, atol=1e-5)
    assert norm.init(N, H)["scale"].shape == (N, H) and pe.QKNorm().threshold is None


@pytest.mark.parametrize("over", ["head", "projection"])
@pytest.mark.parametrize("kind", ["rms", "layer", "clip"])
def test_long_vectors_have_the_norm_of_their_direction(kind, over):
    """Squares beyond 1.8e19 overflow; gradients are those of the direction, by length."""
    norm = pe.QKNorm(kind, over, "per_head", epsilon=0.0, threshold=2.0 if kind == "clip" else None)
    x = np.random.RandomState(0).uniform(1.0, 2.0, (1, 5, N, H)).astype(np.float32)
    x[:, ::2] *= -1.0
    params = {"scale": linspace(0.7, 1.5, N * H).reshape(N, H)}
    out, pull = jax.vjp(lambda x: norm(params, x), x)
    for length in (2.0**45, 2.0**55, 2.0**64, 2.0**110):
        far, pull_far = jax.vjp(lambda x: norm(params, x), x * np.float32(length))
        np.testing.assert_allclose(far, out, rtol=1e-6)
        np.testing.assert_allclose(pull_far(out)[0] * length, pull(out)[0], rtol=0, atol=1e-5)
    far = norm(params, jnp.asarray(x * 1e38, jnp.bfloat16))
    np.testing.assert_allclose(np.float32(far), out, rtol=0, atol=0.1)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("over, scale", [("head", "shared"), ("projection", "per_head")])
def test_a_norm_is_its_formula_in_float64(kind, over, scale):
    norm = pe.QKNorm(kind, over, scale, scale_offset=1.0, use_bias=True, epsilon=0.1)
    shape = (2, 5, N, H)
    x = np.random.RandomState(0).standard_normal(shape).astype(np.float32)
    params = jax.tree.map(
        lambda p: np.asarray(p) + linspace(-1.0, 1.0, p.size).reshape(p.shape), norm.init(N, H)
    )
    wanted = np.empty(shape)
    gain, bias = (np.broadcast_to(np.float64(params[n]), (N, H)) for n in ("scale", "bias"))
    for b, t in np.ndindex(2, 5):
        for n in range(N):
            part = np.float64(x[b, t] if over == "projection" else x[b, t, n])
            mean = part.mean() if kind == "layer" else 0.0
            root = np.sqrt(((part - mean) ** 2).mean() + 0.1)
            wanted[b, t, n] = (x[b, t, n] - mean) / root * (gain[n] + 1) + bias[n]
    out, half = jax.jit(lambda *x: [norm(params, y) for y in x])(x, x.astype(jnp.bfloat16))
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(np.float32), wanted, atol=0.05)


def linspace(start, end, count):
    return np.linspace(start, end, count, dtype=np.float32)


@jax.jit
def by_hand(x, kernels, scales, sinks):
    """Attention of `LAYER` from its parts."""
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in kernels[:3])
    q, k = (NORM({"scale": s}, y) for s, y in zip(scales, (q, k), strict=True))
    out, _ = pe.scheme_attention(
        ROPE, {}, q, k, v, is_causal=True, window=4, scale=0.5, softcap=3.0, sinks=sinks
    )
    return jnp.einsum("btnh,nhd->btd", out, kernels[3])


def test_nnx_attention_takes_a_layer():
    rngs = nnx.Rngs(0)
    layer = pn.Attention(
        D, N, position=LAYER, num_kv_heads=K, head_dim=H, is_causal=True, rngs=rngs
    )
    layer.query_norm.scale[...] = linspace(-0.5, 0.5, H)
    layer.key_norm.scale[...] = linspace(0.5, -0.2, H)
    layer.sinks[...] = linspace(-1.0, 1.0, N)
    kernels = [p.kernel[...] for p in (layer.query, layer.key, layer.value, layer.out)]
    scales = [p.scale[...] for p in (layer.query_norm, layer.key_norm)]
    wanted = by_hand(X, kernels, scales, layer.sinks[...])
    run = nnx.jit(lambda layer, x, cache=None: layer(x, cache=cache))
    np.testing.assert_allclose(run(layer, X), wanted, atol=1e-6)

    cache, steps = layer.new_cache(2, 9), []
    for part in np.split(X, range(5, 9), axis=1):
        y, cache = run(layer, part, cache)
        steps.append(y)
    np.testing.assert_allclose(np.concatenate(steps, 1), wanted, atol=1e-5)


def test_linen_attention_takes_a_layer():
    module = pl.Attention(N, H, LAYER, num_kv_heads=K, is_causal=True)
    params = module.init(jax.random.key(0), X)["params"]
    params["query_norm"]["scale"] = linspace(-0.5, 0.5, H)
    params["key_norm"]["scale"] = linspace(0.5, -0.2, H)
    params["sinks"] = linspace(-1.0, 1.0, N)
    kernels = [params[n]["kernel"] for n in ("query", "key", "value", "out")]
    scales = [params[n]["scale"] for n in ("query_norm", "key_norm")]
    wanted = by_hand(X, kernels, scales, params["sinks"])
    out = jax.jit(module.apply)({"params": params}, X)
    np.testing.assert_allclose(out, wanted, atol=1e-6)
    assert module.new_cache(2, 9).k.shape == (2, 9, K, H)


@pytest.mark.parametrize("name", ["rope", "keys_as_projected"])
def test_a_norm_after_the_rotation(name):
    """With a scale that differs by dimension, as in HunYuan, the order matters."""
    norm = pe.QKNorm(epsilon=0.01, scale_offset=1.0, after_rotation=True)
    scheme = ROPE if name == "rope" else Uncached(head_dim=H)
    sizes = {"num_kv_heads": K, "head_dim": H, "is_causal": True}
    layer = pn.Attention(D, N, position=scheme, qk_norm=norm, rngs=nnx.Rngs(0), **sizes)
    layer.query_norm.scale[...] = linspace(-0.5, 0.5, H)
    layer.key_norm.scale[...] = linspace(0.5, -0.2, H)

    @nnx.jit
    def whole_and_by_hand(layer, x):
        q, k, v = (p(x) for p in (layer.query, layer.key, layer.value))
        q, k = (pe.apply_rope(y, np.arange(9)) for y in (q, k))
        q, k = (n(y) for n, y in zip((layer.query_norm, layer.key_norm), (q, k), strict=True))
        return layer(x), layer.out(pe.attention(q, k, v, is_causal=True))

    out, wanted = whole_and_by_hand(layer, X)
    np.testing.assert_allclose(out, wanted, atol=1e-6)
    module = pl.Attention(N, position=scheme, qk_norm=norm, **sizes)
    params = {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
    np.testing.assert_allclose(jax.jit(module.apply)(params, X), wanted, atol=1e-6)
    run, cache = nnx.jit(lambda layer, x, cache: layer(x, cache=cache)), layer.new_cache(2, 9)
    for part in (slice(0, 5), slice(5, 6), slice(6, 9)):
        y, cache = run(layer, X[:, part], cache)
        np.testing.assert_allclose(y, wanted[:, part], atol=1e-5)


def test_xpos_takes_no_norm_after_its_factors():
    """They grow from the last token of a call, so that steps would differ from a whole pass."""
    q = jnp.ones((1, 2, 1, H))
    for scheme in (pe.XPos(head_dim=H), pe.chain(pe.XPos(head_dim=H), pe.ALiBi(1))):
        params = scheme.init(jax.random.key(0))
        with pytest.raises(NotImplementedError, match="scales q and k by call, so that no norm"):
            pe.scheme_attention(scheme, params, q, q, q, norms=(jnp.tanh, jnp.tanh))


@dataclasses.dataclass(frozen=True)
class Uncached(pe.RoPE):
    """RoPE whose keys are cached as projected."""

    @property
    def traits(self):
        return dataclasses.replace(super().traits, cache_transformed_keys=False)


def test_arguments_are_those_of_a_layer():
    settings = {"window": 4, "scale": 0.5, "softcap": 3.0, "sinks": True, "qk_norm": NORM}
    common = {"head_dim": H, "is_causal": True}
    one = pn.Attention(D, N, position=LAYER, rngs=nnx.Rngs(0), **common)
    other = pn.Attention(D, N, position=ROPE, rngs=nnx.Rngs(0), **common, **settings)
    np.testing.assert_array_equal(one(X), other(X))
    encoding = pn.PositionEncoding(ROPE, rngs=nnx.Rngs(0))
    shared = pn.Attention(D, N, shared_encoding=encoding, rngs=nnx.Rngs(0), **common, **settings)
    np.testing.assert_array_equal(one(X), shared(X))


def test_errors():
    with pytest.raises(ValueError, match="Attention: window, sinks beside position=LayerSpec"):
        pn.Attention(D, N, head_dim=H, position=LAYER, window=3, sinks=True, rngs=nnx.Rngs(0))
    after = pe.QKNorm(after_rotation=True)
    layer = pn.Attention(D, N, head_dim=H, position=pe.ReRoPE(H), qk_norm=after, rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="rotates q and k within its attention"):
        layer(jnp.ones((1, 2, D)))
    with pytest.raises(TypeError, match="qk_norm must be a QKNorm or None, got True"):
        pe.LayerSpec(ROPE, qk_norm=True)
    with pytest.raises(ValueError, match="softcap must be positive, got 0"):
        pe.LayerSpec(ROPE, softcap=0)
    with pytest.raises(ValueError, match=r"kind must be one of .*, got 'batch'"):
        pe.QKNorm("batch")
    with pytest.raises(ValueError, match="kind='clip' alone has a threshold, got kind='rms' and"):
        pe.QKNorm(threshold=3.0)
    with pytest.raises(ValueError, match="threshold must be positive, got -1"):
        pe.QKNorm("clip", threshold=-1.0)
    with pytest.raises(ValueError, match="use_bias=True needs a scale"):
        pe.QKNorm(scale="none", use_bias=True)
    with pytest.raises(ValueError, match="over='projection' has one scale per head"):
        pe.QKNorm(over="projection")
    with pytest.raises(ValueError, match=r"x must be \[B, T, N, H\], got shape \(2, 3, 4\)"):
        NORM(NORM.init(1, 4), jnp.ones((2, 3, 4)))


def test_sinks_of_a_call_that_are_none_leave_those_of_the_layer():
    layer = pn.Attention(D, N, head_dim=H, sinks=True, rngs=nnx.Rngs(0))
    layer.sinks[...] = jnp.full(N, 2.0)
    x = jnp.ones((1, 3, D))
    np.testing.assert_array_equal(layer(x, sinks=None), layer(x))
