"""Rotation by given tables: one for all heads, or sets of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

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


@pytest.mark.parametrize("start", [[2], True, jnp.int32(2)])
def test_a_start_that_is_no_integer_is_refused(start):
    with pytest.raises(TypeError, match="apply_rotation: start must be an integer, got"):
        pe.apply_rotation(*[np.ones((1, 5, 1, 8), "f4")] + [np.ones((1, 5, 2))] * 2, start=start)


@pytest.mark.parametrize("dtype", ["int64", bool, object])
def test_integers_are_refused(dtype):
    """Rotated numbers are fractions: a result in the dtype of x would be truncated."""
    x, tables = np.ones((2, 5, 6, 8), dtype), [jnp.ones((2, 5, 4))] * 2
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


# Many rows that share a table are rotated otherwise.
@pytest.mark.parametrize(
    "rows, dtype", [(1, jnp.float32), (6, jnp.float32), (40, jnp.float32), (40, jnp.bfloat16)]
)
@pytest.mark.parametrize("layout", ["half", "interleaved", "interleaved_negative"])
def test_all_forms_of_the_rotation_agree(layout, dtype, rows):
    random = np.random.default_rng(1)
    x, g = random.normal(size=(2, 1, 5, rows, 12)).astype(dtype)
    angles = random.normal(size=(1, 5, 1, 4))
    c, s = np.cos(angles), -np.sin(angles) if "negative" in layout else np.sin(angles)

    pair = np.s_[..., 2:6], np.s_[..., 6:10]
    if layout != "half":
        pair = np.s_[..., 2:10:2], np.s_[..., 3:10:2]

    def expected_rotation(x, s, c=c):
        x = np.array(x, np.float64)
        a, b = x[pair[0]].copy(), x[pair[1]].copy()
        x[pair[0]], x[pair[1]] = a * c - b * s, b * c + a * s
        return x, (a, b)

    tables = np.float32(np.cos(angles[:, :, 0])), np.float32(np.sin(angles[:, :, 0]))
    ways = [np.float32(random.normal(size=t.shape)) for t in tables]

    @jax.jit
    def rotated_and_derived(g, ways, *arrays):
        def rotated(*arrays):
            return pe.apply_rotation(*arrays, layout=layout, start=2)

        out, pull = jax.vjp(rotated, *arrays)
        return out, *pull(g), jax.jvp(rotated, arrays, (g, *ways))[1]

    out, dx, dcos, dsin, tangent = rotated_and_derived(g, ways, x, *tables)
    near = {"rtol": 2**-8, "atol": 1e-6} if dtype == jnp.bfloat16 else {"atol": 2e-6}
    rotated, (a, b) = expected_rotation(x, s)
    back, (ga, gb) = expected_rotation(g, -s)
    np.testing.assert_allclose(np.float64(out), rotated, **near)
    np.testing.assert_allclose(np.float64(dx), back, **near)
    dc, ds = (way[:, :, None] for way in ways)
    turned = expected_rotation(x, -ds if "negative" in layout else ds, dc)[0]
    turned[..., [0, 1, -2, -1]] = 0.0
    near_sum = {"rtol": 2**-7, "atol": 0.03} if dtype == jnp.bfloat16 else {"atol": 4e-6}
    np.testing.assert_allclose(np.float64(tangent), expected_rotation(g, s)[0] + turned, **near_sum)
    rotation = (gb * a - ga * b).sum(2)
    np.testing.assert_allclose(dcos, (ga * a + gb * b).sum(2), atol=1e-5)
    np.testing.assert_allclose(dsin, -rotation if "negative" in layout else rotation, atol=1e-5)


def _gradient(x, cos, sin, target):
    """The gradient of half the squared distance of rotated x to a target, in float64."""
    a, b = x[..., :3], x[..., 3:]
    ga, gb = a * cos - b * sin - target[..., :3], b * cos + a * sin - target[..., 3:]
    dx = np.concatenate([ga * cos + gb * sin, gb * cos - ga * sin], -1)
    return dx, (ga * a + gb * b).sum((0, 2)), (gb * a - ga * b).sum((0, 2))


def test_curvature_in_both_modes_where_the_cotangent_is_zero_too():
    """Central differences of the gradient. The target of two tokens is their output."""
    random = np.random.default_rng(0)
    shapes = [(2, 5, 3, 6), (5, 3), (5, 3)]
    point, way = ([random.normal(size=shape) for shape in shapes] for _ in range(2))

    def expanded(x, cos, sin):
        return x, cos[None, :, None], sin[None, :, None]

    def rotated(x, cos, sin):
        return pe.apply_rotation(x, cos[None], sin[None])

    target = random.normal(size=shapes[0])
    x, cos, sin = expanded(*point)
    a, b = x[..., :3], x[..., 3:]
    out = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    target[:, 1:3] = out[:, 1:3]

    @jax.jit
    def curvature(point, way, target):
        reached = (jnp.arange(5) == 1) | (jnp.arange(5) == 2)

        def loss(*point):
            out = rotated(*point)
            goal = jnp.where(reached[:, None, None], jax.lax.stop_gradient(out), target)
            return ((out - goal) ** 2).sum() / 2

        gradient = jax.grad(loss, (0, 1, 2))

        def along(*point):
            return sum((g * w).sum() for g, w in zip(gradient(*point), way, strict=True))

        back = jax.grad(along, (0, 1, 2))
        return jax.jvp(gradient, point, way)[1], back(*point)

    def moved(step):
        return _gradient(
            *expanded(*(p + step * w for p, w in zip(point, way, strict=True))), target
        )

    expected = [(a - b) / 2e-4 for a, b in zip(moved(1e-4), moved(-1e-4), strict=True)]
    arguments = [tuple(map(np.float32, arrays)) for arrays in (point, way)]
    for got in curvature(*arguments, np.float32(target)):
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("axes", [(0, None, None), (None, 1, None), (1, 0, 2)], ids=str)
def test_a_mapped_rotation_has_the_derivatives_of_one_at_a_time(axes):
    random = np.random.default_rng(0)
    shapes = [(2, 3, 2, 8), (1, 3, 2), (1, 3, 2)]
    arrays = [
        np.float32(random.normal(size=s if i is None else (*s[:i], 3, *s[i:])))
        for s, i in zip(shapes, axes, strict=True)
    ]
    weights = np.float32(random.normal(size=(3, *shapes[0])))

    def rotated(*arrays):
        return pe.apply_rotation(*arrays, layout="interleaved", start=2)

    def pulled(arrays, weights):
        mapped, pull = jax.vjp(jax.vmap(rotated, axes), *arrays)
        return mapped, pull(weights)

    mapped, grads = jax.jit(pulled)(arrays, weights)
    sums = [np.zeros(x.shape) for x in arrays]

    @jax.jit
    def one(arrays, weights):
        out, pull = jax.vjp(rotated, *arrays)
        return out, pull(weights)

    for n in range(3):
        rows = [np.s_[:] if i is None else (np.s_[:],) * i + (n,) for i in axes]
        out, pulled_back = one([x[r] for x, r in zip(arrays, rows, strict=True)], weights[n])
        np.testing.assert_allclose(mapped[n], out, atol=1e-6)
        for total, row, grad in zip(sums, rows, pulled_back, strict=True):
            total[row] += grad
    for grad, total in zip(grads, sums, strict=True):
        np.testing.assert_allclose(grad, total, atol=1e-5)


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
    for one, other in zip(grads, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


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
