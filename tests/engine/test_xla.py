"""The tiled engine: sizes, reproducible bits, NaN, transformations and derivatives."""

import dataclasses
import functools
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine import blocks
from posenc_jax.engine.blocks import Blocks, Visibility, make_plan
from posenc_jax.engine.tables import strip_tile
from posenc_jax.engine.toeplitz import _row_by_row_sums, diagonal_sums, toeplitz_tile_vjp
from posenc_jax.engine.xla import XLA
from tests import oracle
from tests.engine.rules import KINDS
from tests.support import slow


def _tokens(length, *, batch=1, heads=2, dim=8, seed=0):
    random = np.random.default_rng(seed)
    return list(random.normal(size=(3, batch, length, heads, dim)).astype(np.float32))


TABLE = np.random.default_rng(4).normal(size=(2, 8)).astype(np.float32)


def _t5(table=TABLE, **options):
    scheme = pe.T5(num_heads=2, num_buckets=8, max_distance=12, **options)
    return scheme.rules({"table": table})


def _attend(q, k, v, **options):
    options = {"is_causal": True, "implementation": "xla"} | options
    return pe.attention(q, k, v, **options)


@pytest.mark.parametrize(
    ("length", "keys", "heads"),
    [(1, 1, 2), (7, 300, 8), (63, 63, 12), (1000, 1000, 8), (2048, 4096, 1), (513, 513, 256)],
)
def test_blocks_cover_the_tokens_and_waste_little(length, keys, heads):
    p = make_plan(length, keys, heads)
    for size in (p.forward, p.backward):
        assert p.length % size.q == 0
        assert p.keys % size.k == 0
    assert length <= p.length <= 1.25 * length + 16
    assert keys <= p.keys <= 1.25 * keys + 16


@pytest.mark.parametrize("at", [1e6, pytest.param(2.0**31, marks=slow)])
def test_equal_coordinates_are_near_at_any_place(at):
    """Where float32 has no number between a coordinate and one a horizon later."""
    where, tiles = jnp.full((1, 40), at, jnp.float32), XLA(Blocks(16, 16))
    options = {"rules": _t5(), "q_coordinates": where, "k_coordinates": where}
    out, expected = (
        _attend(*_tokens(40), implementation=i, **options) for i in (tiles, "reference")
    )
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (5, -1), (9, 3), (-1, 6)])
@pytest.mark.parametrize("horizon", [0, 7, None])
def test_tiles_that_are_known_while_tracing(causal, window, horizon):
    """A tile has a visible pair, and an interior one nothing but pairs without mask and rule."""
    flags = {field.name: False for field in dataclasses.fields(Visibility)}
    flags |= {"is_causal": causal, "window": window, "by_slot": True}
    see = Visibility(**flags | {"has_terms": horizon != 0, "horizon": horizon})
    live, interior = see.known_tiles(Blocks(4, 6), 24, 36)
    distance = np.arange(24)[:, None] - np.arange(36)
    left_side, right_side = (np.inf if n < 0 else n for n in window or (-1, -1))
    seen = (distance <= left_side) & (-distance <= (0 if causal else right_side))
    free = seen & (distance >= horizon if horizon else horizon == 0)
    tiles = [x.reshape(6, 4, 6, 6).swapaxes(1, 2).reshape(6, 6, -1) for x in (seen, free)]
    np.testing.assert_array_equal(live, tiles[0].any(-1))
    np.testing.assert_array_equal(interior, tiles[1].all(-1))
    assert see.known_tiles(Blocks(4, 6), 4 * 2**8, 6 * 2**8) is None
    segmented = dataclasses.replace(see, segments=True)
    assert segmented.known_tiles(Blocks(4, 6), 24, 36) is None


def test_sizes_of_blocks_by_platform():
    """On GPUs as large as memory allows; on TPUs many heads do not make them smaller."""
    for heads, size in (4, 1024), (64, 512), (512, 256), (4096, 128):
        plan = make_plan(4096, 4096, heads, platform="gpu")
        assert plan.forward == plan.backward == Blocks(size, size)
    for heads in (8, 64):
        assert make_plan(2048, 2048, heads, platform="tpu").forward == Blocks(512, 256)
    assert make_plan(1024, 1024, 64).forward == Blocks(128, 128)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("2048K\n", (512, 256, 256)), ("512K\n", (256, 256, 128)), (None, (256, 256, 128))],
)
def test_large_caches_have_large_tiles_of_long_rows(text, sizes, monkeypatch):
    """As measured on an Intel Xeon; an AMD EPYC keeps what was measured there."""

    def read(path):
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(pathlib.Path, "read_text", read)
    blocks._cache_per_core.cache_clear()
    try:
        plans = [make_plan(2048, 2048, heads).forward for heads in (4, 8, 16)]
        assert plans == [Blocks(n, n) for n in sizes]
        plan = make_plan(4096, 4096, 16)
        assert plan.backward == Blocks(sizes[2], sizes[2])
        assert plan.forward == (Blocks(512, 512) if sizes[0] == 512 else plan.backward)
        assert make_plan(4096, 4096, 4, skips=True).forward == Blocks(256, 256)
    finally:
        blocks._cache_per_core.cache_clear()


def test_the_same_bits_in_every_run_and_packed_equals_separate():
    """Packed rows, as segments of one row, equal the rows computed with padding after them."""
    q, k, v = _tokens(600)
    ids = np.repeat(np.int32([0, 1]), 300)[None]

    def loss(q, k, v, table, ids):
        out = _attend(q, k, v, rules=_t5(table), q_segment_ids=ids)
        return jnp.sum(out**2), out

    run = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))
    first, second = run(q, k, v, TABLE, ids), run(q, k, v, TABLE, ids)
    chex.assert_trees_all_equal(first, second)
    alone = np.repeat(np.int32([0, -1]), 300)[None]
    rows = [run(*(np.roll(x, -n, 1) for x in (q, k, v)), TABLE, alone) for n in (0, 300)]
    (*grads, d_table), (*later_grads, later_d_table) = jax.device_get([x[0] for x in rows])
    pairs = zip(grads, later_grads, strict=True)
    joined = [np.concatenate([x[:, :300] for x in pair], 1) for pair in pairs]
    chex.assert_trees_all_close(first[0][:3], tuple(joined), atol=3e-5)
    np.testing.assert_allclose(first[0][3], d_table + later_d_table, atol=2e-3)


def test_a_bad_row_stays_alone():
    q, k, v = _tokens(40, batch=3)

    def loss(q):
        out = _attend(q, k, v, rules=_t5())
        return jnp.sum(out), out

    bad = q.copy()
    bad[1, 7] = np.nan
    run = jax.jit(jax.grad(loss, has_aux=True))
    (grad, out), (_, clean) = (jax.device_get(run(x)) for x in (bad, q))
    assert np.all(np.isnan(out[1, 7]))
    for x in (out, grad):
        assert np.all(np.isfinite(x[0])) and np.all(np.isfinite(x[2]))
    np.testing.assert_array_equal(out[1, :7], clean[1, :7])
    np.testing.assert_array_equal(out[1, 8:], clean[1, 8:])


@slow
def test_under_vmap():
    arrays = np.stack(_tokens(40, batch=4), 1)

    def loss(table, qkv):
        return jnp.sum(_attend(*qkv[:, None], rules=_t5(table)) ** 2)

    grad, tables = jax.jit(jax.grad(loss)), np.stack([TABLE] * 4)
    one_by_one = np.stack([grad(TABLE, x) for x in arrays])
    np.testing.assert_allclose(jax.jit(jax.vmap(grad))(tables, arrays), one_by_one, atol=1e-4)


@slow
def test_hessian_vector_products():
    """Forward mode over reverse mode, through loops over tiles."""
    (q, k, v), kind = _tokens(300), KINDS["shaw"]
    point = q, kind.make(np.random.default_rng(1), 2, 8)

    def hvp(implementation):
        def loss(q, params):
            rules = kind.rules(params, q, k)
            return jnp.sum(_attend(q, k, v, rules=rules, implementation=implementation) ** 2)

        return jax.jit(lambda x: jax.jvp(jax.grad(loss, (0, 1)), x, x)[1])(point)

    chex.assert_trees_all_close(hvp("xla"), hvp("reference"), rtol=1e-3, atol=1e-3)


@slow
def test_other_orders_of_derivatives_are_right_or_raise():
    q, k, v = _tokens(40)
    rules = pe.ALiBi(num_heads=2).rules({})
    options = {"rules": rules, "is_causal": True, "softcap": 2.0}

    def grad(q, implementation):
        def loss(q):
            return jnp.sum(_attend(q, k, v, implementation=implementation, **options) ** 2)

        return jax.grad(loss)(q)

    for derivative in (lambda f: jax.jvp(f, (q,), (q,)), lambda f: jax.jacfwd(f)(q)):
        with pytest.raises(TypeError, match="custom_vjp"):
            jax.jit(lambda f=derivative: f(lambda q: _attend(q, k, v))).lower()

    @functools.partial(jax.jit, static_argnums=1)
    def twice(q, implementation):
        return jax.grad(lambda q: jnp.sum(jnp.sin(grad(q, implementation))))(q)

    np.testing.assert_allclose(twice(q, "xla"), twice(q, "reference"), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.eval_shape(functools.partial(twice, implementation=XLA(Blocks(8, 8))), q)


@slow
@pytest.mark.parametrize("dims", [(8, 1), (1, 4)])
def test_gradients_of_heads_with_one_number_in_bfloat16(dims):
    """XLA for CPUs has not all of their products."""
    heads, length = 4, 40
    random = np.random.default_rng(0)
    sizes = zip((heads, 1, 1), (dims[0], *dims), strict=True)
    arrays = [random.normal(size=(1, length, *x)).astype(jnp.bfloat16) for x in sizes]
    rules = pe.ALiBi(num_heads=heads).rules({})

    @jax.jit
    def grads(arrays):
        def loss(arrays):
            tiles = XLA(Blocks(16, 64), Blocks(64, 16))
            out = pe.attention(*arrays, rules=rules, implementation=tiles)
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss)(arrays)

    distances = np.abs(np.arange(length)[:, None] - np.arange(length))
    added = -np.asarray(rules.heads)[:, None, None] * distances.astype("f4")
    numbers = {"seen": np.ones((length, length), bool), "scale": dims[0] ** -0.5}
    exact = functools.partial(oracle.attention, arrays, added, d_lse=np.zeros((1, length, heads)))
    out, *_ = exact(d_out=np.zeros((1, length, heads, dims[1])), **numbers)
    _, _, *want, _, _ = exact(d_out=2 * out, **numbers)
    for x, y in zip(grads(arrays), want, strict=True):
        np.testing.assert_allclose(np.float32(x), y, rtol=0, atol=2**-7 * np.abs(y).max())


@pytest.mark.parametrize(
    ("dtypes", "size", "scale", "error"),
    [
        (("float32", "bfloat16", "bfloat16"), 1.0, 0.3, 2e-6),
        (("float32", "float32", "float16"), 1.0, 0.3, 2e-6),
        (("float16", "float16", "float16"), 1e4, 32.0, 2e-3),  # 32 q is beyond float16.
    ],
)
def test_products_have_the_digits_of_the_widest_dtype(dtypes, size, scale, error):
    sized = zip(_tokens(40), (size, 1 / size, 1.0), dtypes, strict=True)
    arrays = [jnp.asarray(x * factor, dtype) for x, factor, dtype in sized]
    d_out = _tokens(40, seed=1)[0]

    @jax.jit
    def run(q, k, v):
        def loss(q):
            out = _attend(q, k, v, scale=scale)
            return (out.astype(jnp.float32) * d_out).sum(), out

        return jax.grad(loss, has_aux=True)(q)

    zeros = np.zeros((1, 40, 40), "f4"), np.zeros((1, 40, 2))
    seen = np.tri(40, dtype=bool)
    want, _, want_d_q, *_ = oracle.attention(arrays, zeros[0], seen, d_out, zeros[1], scale=scale)
    for got, x in zip(run(*arrays), (want_d_q, want), strict=True):
        np.testing.assert_allclose(np.float64(got), x, rtol=0, atol=error * np.abs(x).max())


@pytest.mark.parametrize("shape", [(1, 6), (5, 3), (16, 16)])
def test_sums_of_diagonals(shape):
    """The sums for TPU and the sums for other platforms."""
    rows, columns = np.indices(shape)
    tile = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    diagonals = (shape[0] - 1 - rows + columns).ravel()
    expected = np.bincount(diagonals, tile.ravel())
    for sums in jax.jit(lambda x: (diagonal_sums(x), _row_by_row_sums(x)))(tile):
        np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("length", "count"), [(65, 5), (258, 7)])
@pytest.mark.parametrize("in_vjp", [False, True])
def test_products_with_a_vector_per_distance(length, count, in_vjp):
    """And their gradients, against sums over pairs in float64."""
    random = np.random.default_rng(0)
    tokens = random.normal(size=(length, 3)).astype(np.float32)
    vectors = random.normal(size=(3, length + count - 1)).astype(np.float32)
    tile = random.normal(size=(length, count)).astype(np.float32)
    distances = np.arange(length)[:, None] - np.arange(count) + count - 1

    @jax.jit
    def products(tokens, vectors, tile):
        of_tile = functools.partial(strip_tile, count=count, in_vjp=in_vjp)
        out, pull = jax.vjp(of_tile, tokens, vectors)
        return out, pull(tile)

    out, grads = products(tokens, vectors, tile)
    near = np.moveaxis(vectors.astype(np.float64)[:, distances], 0, 2)
    of_pairs = tile[..., None] * tokens[:, None].astype(np.float64)
    np.testing.assert_allclose(out, (tokens[:, None] * near).sum(-1), atol=1e-6)
    np.testing.assert_allclose(grads[0], (tile[..., None] * near).sum(1), atol=1e-4)
    expected = np.zeros(vectors.shape)
    np.add.at(expected.T, distances.ravel(), of_pairs.reshape(-1, 3))
    np.testing.assert_allclose(grads[1], expected, atol=1e-4)


def test_on_tpu_sums_of_diagonals_are_no_loop():
    tile = jnp.ones((16, 16))

    def pull(tile):
        return jax.vjp(lambda x: toeplitz_tile_vjp(x, (16, 16)), jnp.ones(31))[1](tile)

    traced = jax.jit(pull).trace(tile)
    for platform, loops in (("tpu", False), ("cpu", True)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.while" in text) is loops


@pytest.mark.parametrize("distances", [(-300, 400), (-90, -50), (50, 90)])
def test_a_rule_is_evaluated_between_its_bounds(distances):
    """And repeated beyond, with the gradient of the rule evaluated everywhere."""
    weights = np.random.default_rng(4).normal(size=(2, distances[1] - distances[0])).astype("f4")

    def outcome(table, unbounded):
        rule = _t5(table, bidirectional=True)
        if unbounded:
            rule = dataclasses.replace(rule, bounds=(None, None))
        values, pull = jax.vjp(
            lambda rule: rule._of_distances(*distances, 1.0, jnp.int32, None), rule
        )
        return values, pull(weights)[0].heads

    traced = jax.jit(outcome, static_argnums=1).trace(TABLE, False)
    evaluated = [int(n) for n in re.findall(r"i32\[(\d+)\] = iota", str(traced.jaxpr))]
    assert 0 < max(evaluated) < 25
    got, gradient = traced.lower().compile()(TABLE)
    expected, expected_gradient = jax.jit(outcome, static_argnums=1)(TABLE, True)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-5)
