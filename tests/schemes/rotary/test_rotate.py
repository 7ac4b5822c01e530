"""Rotation by given tables: one for all heads, or sets of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.schemes.rotary import rotate


def test_each_set_of_tables_rotates_consecutive_heads():
    random = np.random.default_rng(0)
    x, *tables = (np.float32(random.normal(size=s)) for s in [(2, 5, 6, 8)] + 2 * [(2, 5, 3, 4)])
    rotate = jax.jit(pe.apply_rotation)
    whole = rotate(x, *tables)
    for head in range(6):
        alone = rotate(x[:, :, head : head + 1], *(t[:, :, head // 2] for t in tables))
        np.testing.assert_array_equal(whole[:, :, head], alone[:, :, 0])


@pytest.mark.parametrize("shape", [(2, 5, 4, 4), (2, 4, 4), (3, 5, 4), (2, 5, 5), (5, 4)])
def test_tables_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match=r"apply_rotation: cos and sin must .* x \(2, 5, 6, 8"):
        pe.apply_rotation(jnp.ones((2, 5, 6, 8)), jnp.ones(shape), jnp.ones(shape))


@pytest.mark.parametrize("dtype", [jnp.int32, bool])
def test_integers_are_refused(dtype):
    """Rotated numbers are fractions: a result in the dtype of x would be truncated."""
    x, tables = jnp.ones((2, 5, 6, 8), dtype), [jnp.ones((2, 5, 4))] * 2
    with pytest.raises(TypeError, match=f"x must be floating, got {x.dtype}"):
        pe.apply_rotation(x, *tables)
    with pytest.raises(TypeError, match=f"x must be floating, got {x.dtype}"):
        pe.apply_rope(x, jnp.arange(5))


def test_concrete_tables_are_not_copied_and_traced_ones_are_materialised():
    x = jnp.ones((1, 5, 2, 8))
    cos, sin = pe.cos_sin(jnp.arange(5)[None], pe.rope_frequencies(8)[0])
    closed = jax.make_jaxpr(lambda x: pe.apply_rotation(x, cos, sin))(x)
    traced_tables = jax.make_jaxpr(pe.apply_rotation)(x, cos, sin)
    assert "scatter" not in str(closed)
    assert "scatter" in str(traced_tables)
    np.testing.assert_allclose(
        jax.jit(pe.apply_rotation)(x, cos, sin), pe.apply_rotation(x, cos, sin), rtol=1e-6
    )


@pytest.mark.parametrize("rows", [1, 6, 40])  # Many rows that share a table are rotated otherwise.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("layout", ["half", "interleaved", "interleaved_negative"])
def test_all_forms_of_the_rotation_agree(layout, dtype, rows):
    random = np.random.default_rng(1)
    x, g = random.normal(size=(2, 1, 5, rows, 12)).astype(dtype)
    angles = random.normal(size=(1, 5, 1, 4))
    c, s = np.cos(angles), -np.sin(angles) if "negative" in layout else np.sin(angles)

    def wanted(x, s):
        x = np.array(x, np.float64)
        pair = np.s_[..., 2:6], np.s_[..., 6:10]
        if layout != "half":
            pair = np.s_[..., 2:10:2], np.s_[..., 3:10:2]
        a, b = x[pair[0]].copy(), x[pair[1]].copy()
        x[pair[0]], x[pair[1]] = a * c - b * s, b * c + a * s
        return x, (a, b)

    tables = np.float32(np.cos(angles[:, :, 0])), np.float32(np.sin(angles[:, :, 0]))

    @jax.jit
    def rotated_and_pulled(g, *arrays):
        out, pull = jax.vjp(lambda *a: pe.apply_rotation(*a, layout=layout, start=2), *arrays)
        return out, *pull(g)

    out, dx, dcos, dsin = rotated_and_pulled(g, x, *tables)
    near = {"rtol": 2**-8, "atol": 1e-6} if dtype == jnp.bfloat16 else {"atol": 2e-6}
    rotated, (a, b) = wanted(x, s)
    back, (ga, gb) = wanted(g, -s)
    np.testing.assert_allclose(np.float64(out), rotated, **near)
    np.testing.assert_allclose(np.float64(dx), back, **near)
    rotation = (gb * a - ga * b).sum(2)
    np.testing.assert_allclose(dcos, (ga * a + gb * b).sum(2), atol=1e-5)
    np.testing.assert_allclose(dsin, -rotation if "negative" in layout else rotation, atol=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_product_that_tpus_run_has_the_same_bits(layout, sign):
    random = np.random.default_rng(0)
    x, angles = random.normal(size=(2, 9, 3, 12)).astype(jnp.bfloat16), random.normal(size=(9, 6))
    tables = [np.float32(f(angles))[None, :, None] for f in (np.cos, np.sin)]
    rotation = rotate.Rotation(read=layout, write=layout, start=0, sign=sign)

    @jax.jit
    def both(x, *tables):
        return [f(x, *tables, rotation) for f in (rotate._by_product, rotate._by_parts)]

    np.testing.assert_array_equal(*(np.float32(out) for out in both(x, *tables)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_only_tpus_rotate_16_bits_by_a_product(dtype):
    x = jax.ShapeDtypeStruct((2, 9, 3, 12), dtype)
    tables = [jax.ShapeDtypeStruct((1, 9, 6), jnp.float32)] * 2
    traced = jax.jit(pe.apply_rotation).trace(x, *tables)
    has_product = [
        "dot" in traced.lower(lowering_platforms=(on,)).as_text() for on in ("tpu", "cpu")
    ]
    assert has_product == [dtype == jnp.bfloat16, False]
