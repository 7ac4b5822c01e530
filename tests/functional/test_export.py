"""`jax.export`: sizes that are unknown, and decode steps written to a file."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import posenc_jax as pe
from posenc_jax.cache.serialization import from_bytes, to_bytes
from tests.support import parameters, slow

rng = np.random.default_rng(0)


@dataclasses.dataclass
class Case:
    """A dataclass that is not frozen."""


def _shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def test_symbolic_sizes_give_the_numbers_of_float64():
    alibi, x = pe.ALiBi(num_heads=6), rng.normal(size=(3, 63, 6, 8)).astype(np.float32)

    def attend(x):
        return pe.scheme_attention(alibi, {}, x, x, x, is_causal=True)[0]

    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b, t, 6, 8"), jnp.float32)
    got = export.deserialize(export.export(jax.jit(attend))(shape).serialize()).call(x)
    distance = np.arange(63)[:, None] - np.arange(63)
    slopes = np.array([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])  # Press et al., for 6 heads.
    logits = np.einsum("btnh,bsnh->bnts", x, x, dtype=float) / 8**0.5
    weights = np.exp(logits - slopes[:, None, None] * distance) * (distance >= 0)
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(got, np.einsum("bnts,bsnh->btnh", weights, x), atol=2e-6)


def test_tiles_refuse_symbolic_sizes():
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, t, 6, 8"), jnp.float32)
    with pytest.raises(NotImplementedError, match='symbolic sizes need "reference", "jax" or None'):
        export.export(jax.jit(lambda x: pe.attention(x, x, x, implementation="xla")))(x)


def test_a_written_cache_keeps_all_settings():
    scheme = pe.streaming(pe.chain(pe.RoPE(8, scaling=pe.YaRN(4.0, 32)), pe.ALiBi(num_heads=6)), 2)
    cache = jax.eval_shape(lambda: pe.new_cache(scheme, 3, 12, num_heads=6, head_dim=8, ring=True))
    written = export.export(jax.jit(lambda cache: cache))(cache).serialize()
    assert export.deserialize(written).out_tree == jax.tree.structure(cache)


@slow
def test_a_written_decode_step_gives_the_bits_of_the_step():
    scheme = pe.ALiBi(num_heads=6)
    params, x = parameters(scheme), rng.normal(size=(3, 5, 6, 8)).astype(np.float32)
    cache = pe.new_cache(scheme, 3, 12, num_heads=6, head_dim=8, ring=True)

    @jax.jit
    def step(params, x, cache):
        return pe.scheme_attention(scheme, params, x, x, x, cache=cache, is_causal=True, window=6)

    written = export.export(step)(*map(_shapes, (params, x, cache))).serialize()
    read = export.deserialize(written)
    for _ in range(3):
        want, after = step(params, x, cache)
        got, cache = read.call(params, x, cache)
        np.testing.assert_array_equal(got, want)
    assert jax.tree.structure(cache) == jax.tree.structure(after)


def test_reading_a_cache_imports_nothing():
    data = to_bytes(pe.RoPE(8)).replace(b"posenc_jax.schemes.rotary.rope", b"antigravity")
    with pytest.raises(ValueError, match="KVCache: import antigravity, which has RoPE"):
        from_bytes(data)
    with pytest.raises(ValueError, match="has Case"):  # It is imported, and not frozen.
        from_bytes(b'{"class": "test_export:Case", "fields": {}}')
    axes = collections.namedtuple("Axes", "row column")(0, 1)  # JSON would lose the names.
    for scheme in (pe.AxialRoPE(8, axes=axes), pe.with_positions(pe.RoPE(8), lambda p: p)):
        with pytest.raises(TypeError, match=r"cannot be written by jax\.export"):
            to_bytes(scheme)
