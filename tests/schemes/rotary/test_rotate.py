"""Rotation by given tables: one for all heads, or sets of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posenc_jax as pe
from posenc_jax.schemes.rotary import rotate
from tests.support import close


def test_each_set_of_tables_rotates_consecutive_heads():
    random = np.random.default_rng(0)
    x, *tables = (np.float32(random.normal(size=s)) for s in [(2, 5, 6, 8)] + 2 * [(2, 5, 3, 4)])
    rotate = jax.jit(pe.apply_rotation)
    whole = rotate(x, *tables)
    for head in range(6):
        alone = rotate(x[:, :, head : head + 1], *(t[:, :, head // 2] for t in tables))
        np.testing.assert_array_equal(whole[:, :, head], alone[:, :, 0])


X, TABLE = np.ones((2, 5, 6, 8), "f4"), np.ones((2, 5, 4), "f4")


def rotation_of(x=X, table=TABLE, **options):
    return lambda: pe.apply_rotation(x, table, table, **options)


ERRORS = [
    *(
        (rotation_of(table=np.ones(shape, "f4")), {}, r"cos and sin must .* x \(2, 5, 6, 8")
        for shape in ((2, 5, 4, 4), (2, 4, 4), (3, 5, 4), (2, 5, 5), (5, 4))
    ),
    *(
        (rotation_of(start=x), {}, "apply_rotation: start must be an integer, got", TypeError)
        for x in ([2], True, np.float32(2))
    ),
    # Rotated numbers are fractions: a result in the dtype of x would be truncated.
    *(
        (rotation_of(X.astype(x)), {}, f"x must be floating, got {np.dtype(x)}", TypeError)
        for x in ("int64", bool, object)
    ),
    (lambda: pe.apply_rope(X.astype(int), np.arange(5)), {}, "x must be floating", TypeError),
]


def test_concrete_tables_are_not_copied_and_traced_ones_are_materialised():
    table = jnp.asarray(TABLE)
    closed = jax.make_jaxpr(lambda x: pe.apply_rotation(x, table, table))(X)
    traced = jax.make_jaxpr(pe.apply_rotation)(X, TABLE, TABLE)
    assert "scatter" not in str(closed) and "scatter" in str(traced)


def formula(x, cos, sin, *, layout="half", start=0):
    """`apply_rotation` by operations of JAX alone."""
    dims, cos, sin = start + np.arange(2 * cos.shape[-1]), cos[:, :, None], sin[:, :, None]
    first, second = np.split(dims, 2) if layout == "half" else (dims[::2], dims[1::2])
    a, b, sin = x[..., first], x[..., second], -sin if "negative" in layout else sin
    return x.at[..., first].set(a * cos - b * sin).at[..., second].set(b * cos + a * sin)


# Many rows that share a table are rotated otherwise.
@pytest.mark.parametrize("rows, dtype", [(1, jnp.float32), (40, jnp.float32), (40, jnp.bfloat16)])
@pytest.mark.parametrize("layout", ["half", "interleaved", "interleaved_negative"])
def test_all_forms_of_the_rotation_have_the_derivatives_of_the_formula(layout, dtype, rows):
    random = np.random.default_rng(1)
    x, g = random.normal(size=(2, 1, 5, rows, 12)).astype(dtype)
    tables, ways = np.float32(random.normal(size=(2, 2, 1, 5, 4)))

    def derived(function, x, g):
        rotated = functools.partial(function, layout=layout, start=2)
        out, pull = jax.vjp(rotated, x, *tables)
        return out, *pull(g), jax.jvp(rotated, (x, *tables), (g, *ways))[1]

    @jax.jit
    def both(x, g):
        whole = jnp.float32(x), jnp.float32(g)
        return derived(pe.apply_rotation, x, g), derived(formula, *whole)

    (*got, tangent), (*expected, whole_tangent) = both(x, g)
    rounding = 2**-8 if dtype == jnp.bfloat16 else 0.0
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.float32(ours), theirs, rtol=rounding, atol=1e-5)
    atol = 0.03 if rounding else 1e-5  # A sum of two rounded tangents.
    np.testing.assert_allclose(np.float32(tangent), whole_tangent, rtol=2 * rounding, atol=atol)


def test_curvature_in_both_modes_where_the_cotangent_is_zero_too():
    """The target of two tokens is their output."""
    random = np.random.default_rng(0)
    shapes = [(2, 5, 3, 6), (1, 5, 3), (1, 5, 3)]
    point, way = (tuple(np.float32(random.normal(size=s)) for s in shapes) for _ in range(2))
    target = np.float32(random.normal(size=shapes[0]))
    reached = np.isin(np.arange(5), [1, 2])[:, None, None]

    def curvature(rotated):
        def loss(*point):
            out = rotated(*point)
            goal = jnp.where(reached, jax.lax.stop_gradient(out), target)
            return ((out - goal) ** 2).sum() / 2

        gradient = jax.grad(loss, (0, 1, 2))

        def along(*point):
            return sum((g * w).sum() for g, w in zip(gradient(*point), way, strict=True))

        return jax.jvp(gradient, point, way)[1], jax.grad(along, (0, 1, 2))(*point)

    got, expected = jax.jit(lambda: (curvature(pe.apply_rotation), curvature(formula)))()
    jax.tree.map(lambda a, b: close(a, b, 2e-5), got, expected)


@pytest.mark.parametrize("axes", [(0, None, None), (None, 1, None), (1, 0, 2)], ids=str)
def test_a_mapped_rotation_has_the_derivatives_of_a_mapped_formula(axes):
    random = np.random.default_rng(0)
    shapes = [(2, 3, 2, 8), (1, 3, 2), (1, 3, 2)]
    arrays = [
        np.float32(random.normal(size=s if i is None else (*s[:i], 3, *s[i:])))
        for s, i in zip(shapes, axes, strict=True)
    ]
    weights = np.float32(random.normal(size=(3, *shapes[0])))

    def pulled(function):
        rotated = functools.partial(function, layout="interleaved", start=2)
        mapped, pull = jax.vjp(jax.vmap(rotated, axes), *arrays)
        return mapped, pull(weights)

    got, expected = jax.jit(lambda: (pulled(pe.apply_rotation), pulled(formula)))()
    jax.tree.map(lambda a, b: close(a, b, 1e-5), got, expected)


@pytest.mark.parametrize("where", [("data",), (None, None, "data"), (None, None, None, "data")])
def test_gradients_of_whole_tables_on_an_explicit_mesh(where):
    """Tables are sharded as they were, whatever shards x."""
    random = np.random.default_rng(0)
    x, g = np.float32(random.normal(size=(2, 2, 3, 4, 8)))
    tables = np.float32(random.normal(size=(2, 2, 3, 4)))

    @jax.jit
    def pulled(g, *arrays):
        return jax.vjp(pe.apply_rotation, *arrays)[1](g)

    expected = pulled(g, x, *tables)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spread = [jax.device_put(a, NamedSharding(mesh, PartitionSpec(*where))) for a in (g, x)]
        grads = pulled(*spread, *(jax.device_put(t, PartitionSpec()) for t in tables))
    assert grads[0].sharding.spec[: len(where)] == where
    jax.tree.map(lambda a, b: close(a, b, 1e-5), grads, expected)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_product_that_tpus_run_has_the_same_bits(layout, sign):
    random = np.random.default_rng(0)
    x, angles = random.normal(size=(2, 9, 3, 12)).astype(jnp.bfloat16), random.normal(size=(9, 6))
    tables = [np.float32(f(angles))[None, :, None] for f in (np.cos, np.sin)]
    rotation = rotate.Rotation(read=layout, write=layout, sign=sign)

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
