"""Which query sees which key: masks by order, and the table and skipped tiles of `block_mask`."""

import functools
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import posenc_jax as pe
from posenc_jax.engine.block_mask import EMPTY, FULL, PARTIAL
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.mask import visible, window_sides
from posenc_jax.engine.xla import XLA
from tests.support import parameters, slow

B, T, S, N, H = 2, 70, 53, 4, 8
GROUPS = np.arange(T) // 13


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def of_groups(b, h, q_idx, kv_idx, groups):
    return (groups[q_idx] == groups[kv_idx] + h) | (q_idx + b == kv_idx)


def in_blocks(b, h, q_idx, kv_idx):
    return q_idx // 16 == kv_idx // 16


def brute_force(function, batch, heads, *arrays, q=None):
    """The mask of all pairs, by NumPy."""
    b, h, i, j = np.ogrid[:batch, :heads, :T, :S]
    i = i if q is None else q[:, None, :, None]
    return np.broadcast_to(function(b, h, i, j, *arrays), (batch, heads, T, S))


def tokens(length=T, batch=1, heads=2):
    return np.random.default_rng(0).normal(size=(batch, length, heads, H)).astype("f4")


@pytest.mark.parametrize(("is_traced", "size"), [(False, 16), (True, 128)])
def test_the_table_counts_the_pairs_of_blocks(size, is_traced):
    shifted, sizes = np.arange(T) + np.array([[0], [9]]), {"batch": B, "num_heads": N}
    for function, arrays, options, expected in (
        (causal, (), {}, brute_force(causal, 1, 1)),
        (of_groups, (GROUPS,), sizes, brute_force(of_groups, B, N, GROUPS)),
        (causal, (), {"q_idx": shifted}, brute_force(causal, 2, 1, q=shifted)),
    ):
        make = functools.partial(pe.block_mask, function, T, S, block_size=size, **options)
        mask = (jax.jit(make) if is_traced else make)(*arrays)
        pairs, table = jax.jit(lambda mask: mask.pairs())(mask), np.asarray(mask.table)
        np.testing.assert_array_equal(pairs, expected)
        for i, j in np.ndindex(table.shape[2:]):
            block = expected[:, :, i * size : (i + 1) * size, j * size : (j + 1) * size]
            kind = np.where(block.all((2, 3)), FULL, np.where(block.any((2, 3)), PARTIAL, EMPTY))
            np.testing.assert_array_equal(table[:, :, i, j], kind)
        seen = np.zeros(T + S - 1, bool)
        for i, j in np.argwhere(expected.any((0, 1))):
            seen[i - j + S - 1] = True
        np.testing.assert_array_equal(mask.distances, seen)


@pytest.mark.parametrize("tile", [(16, 16), (24, 40), (7, 90)])
def test_tiles_of_any_size_are_covered(tile):
    """A tile that meets hidden and visible blocks is neither skipped nor whole."""
    for function, arrays, batch, heads in ((of_groups, (GROUPS,), B, N), (in_blocks, (), 1, 1)):
        sizes = {"batch": batch, "num_heads": heads, "block_size": 16}
        mask = pe.block_mask(function, T, S, *arrays, **sizes)
        q, k = tile
        sizes = q, k, -(-T // q) * q, -(-S // k) * k
        live, whole = jax.device_get(jax.jit(lambda mask, sizes=sizes: mask.tiles(*sizes))(mask))
        pairs = brute_force(function, batch, heads, *arrays)
        for b, i, j in np.ndindex(live.shape):
            part = pairs[b, :, i * q : (i + 1) * q, j * k : (j + 1) * k]
            assert live[b, i, j] or not part.any()
            assert part.all() or not whole[b, i, j]
            if tile == (16, 16):  # The size of the blocks: neither is a bound.
                assert (live[b, i, j], whole[b, i, j]) == (part.any(), part.all())


def _loss(mask, qkv, implementation):
    out = pe.attention(*qkv, mask=mask, implementation=implementation)
    return (out**2).sum(), out


def test_hidden_tiles_are_skipped_and_whole_ones_not_masked():
    """The function is called back for the tiles in which it is evaluated."""
    calls = []

    def counted(b, h, q_idx, kv_idx):
        jax.debug.callback(lambda q, k: calls.append((int(q) // 8, int(k) // 8)), q_idx, kv_idx)
        return q_idx >= kv_idx

    q = tokens(48)
    mask = pe.block_mask(counted, 48, 48, block_size=8)
    jax.effects_barrier()
    calls.clear()
    out = jax.jit(_loss, static_argnums=2)(mask, (q, q, q), XLA(Blocks(8, 8)))[1]
    jax.block_until_ready(out)
    jax.effects_barrier()
    assert set(calls) == {(i, i) for i in range(6)}
    np.testing.assert_allclose(out, pe.attention(q, q, q, is_causal=True), atol=1e-6)


@slow
@pytest.mark.parametrize("apart", [False, True])
def test_packed_rows_with_traced_ids(apart):
    """Rules by distance need tokens side by side: tokens that are moved have no table."""
    ids = (np.arange(T) % 3 if apart else np.arange(T) // 30)[None].repeat(2, 0)
    mask = pe.block_mask(of_groups, T, T, GROUPS, batch=2, num_heads=2, block_size=16)
    q, t5 = tokens(batch=2), pe.T5(2, num_buckets=8, max_distance=20)
    rules = t5.rules(parameters(t5))

    def attend(q, ids, implementation):
        options = {"rules": rules, "mask": mask, "is_causal": True, "q_segment_ids": ids}
        return pe.attention(q, q, q, implementation=implementation, **options)

    out = jax.jit(attend, static_argnums=2)(q, ids, XLA(Blocks(16, 16)))
    np.testing.assert_allclose(out, attend(q, ids, "reference"), atol=1e-5)


@slow
def test_one_mask_serves_calls_of_jit_without_tracing():
    """It is a pytree: other numbers do not trace again."""
    traces = []

    @jax.jit
    def attend(q, mask):
        traces.append(1)
        return pe.attention(q, q, q, mask=mask)

    q = tokens()
    for shift in 0, 3:
        index = {"q_idx": np.arange(T) + shift, "kv_idx": np.arange(T)}
        out = attend(q, pe.block_mask(causal, T, T, **index))
        seen = np.tri(T, T, shift, dtype=bool)[None, None]
        expected = pe.attention(q, q, q, mask=seen, implementation="reference")
        np.testing.assert_allclose(out, expected, atol=1e-5)
    assert len(traces) == 1


@slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_mask_of_rows_and_heads_on_a_mesh(kind):
    mask = pe.block_mask(of_groups, T, T, GROUPS, batch=4, num_heads=N, block_size=16)
    qkv = [tokens(batch=4, heads=n) for n in (N, 2, 2)]
    f = jax.jit(jax.grad(_loss, 1, has_aux=True), static_argnums=2)
    expected = jax.device_get(f(mask, qkv, "reference"))
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "heads"), axis_types=(kind,) * 2)):
        spread = [jax.device_put(x, P("data", None, "heads")) for x in qkv]
        got = jax.device_get(f(mask, spread, "xla"))
    chex.assert_trees_all_close(got, expected, atol=3e-5)


def test_arrays_of_a_mask_have_no_gradient():
    def attend(limit, q):
        mask = pe.block_mask(below, T, T, limit, block_size=16)
        return (pe.attention(q, q, q, mask=mask, implementation="xla") ** 2).sum()

    slope, of_q = jax.jit(jax.grad(attend, (0, 1)))(jnp.float32(9.5), tokens())
    assert slope == 0 and np.isfinite(of_q).all() and np.any(of_q)


def below(b, h, q_idx, kv_idx, limit):
    return jnp.abs(q_idx - kv_idx).astype(jnp.float32) < limit


@slow
def test_a_mask_that_hides_everything_gives_zeros():
    mask = pe.block_mask(lambda b, h, i, j: i < j - 1000, T, T)
    for word in ("xla", "dense", "reference"):
        assert not np.any(pe.attention(*[tokens()] * 3, mask=mask, implementation=word))


def test_masks_that_do_not_fit_are_refused():
    for function, arrays, options, message in (
        (of_groups, [GROUPS], {"batch": 2}, "block_mask: of_groups reads h; give num_heads="),
        (of_groups, [GROUPS], {"num_heads": 2}, "block_mask: of_groups reads b; give batch="),
        (lambda b, h, i, j: i - j, [], {}, r"must return one bool, got \['int32\[\]'\]"),
        (below, [3], {}, "arrays must be arrays, got 3"),
        (causal, [], {"q_idx": np.arange(3)}, r"q_idx must be \[70\] or .*got \(3,\)"),
        (causal, [], {"block_size": 0}, "block_size must be >= 1, got 0"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            pe.block_mask(function, T, S, *arrays, **options)
    q = tokens()
    for mask, shape in (
        (pe.block_mask(causal, T, S), "1, 1, 70, 53"),
        (pe.block_mask(of_groups, T, T, GROUPS, batch=1, num_heads=3), "1, 3, 70, 70"),
    ):
        message = r"mask must be a block_mask of \[B or 1, N .* = \(1, 2, 70, 70\), got "
        with pytest.raises(ValueError, match=rf"{message}\({shape}\)"):
            pe.attention(q, q, q, mask=mask)
    for word in ("jax", "splash"):
        with pytest.raises(NotImplementedError, match=f'implementation="{word}"'):
            pe.attention(q, q, q, mask=pe.block_mask(causal, T, T), implementation=word)


def sees(i, j, *, causal, window, prefix, until, a, b):
    """The words of the documentation, in their order."""
    seen = j <= i or not causal
    if isinstance(window, int):  # W tokens with the query's own among them.
        seen = seen and abs(i - j) < window
    elif window is not None:  # Inclusive on both sides; negative for no limit.
        left_side, right_side = (20 if side < 0 else side for side in window)
        seen = seen and -right_side <= i - j <= left_side
    seen = seen or (prefix is not None and j < prefix)
    return seen and i < until and a == b and a >= 0


windows = st.one_of(st.none(), st.integers(1, 6), st.tuples(st.integers(-1, 5), st.integers(-1, 5)))


@settings(deadline=None, max_examples=40)
@given(
    st.booleans(),
    windows,
    st.booleans(),
    st.sampled_from("qkb"),
    st.sampled_from((0, 2**31 - 12, 3 - 2**31)),
    st.integers(0, 2**16),
)
def test_matches_the_rule(causal, window, has_prefix, segments_of, shift, seed):
    """At any integers. Each row has its prefix; segments of one side alone hide only padding."""
    random = np.random.default_rng(seed)
    i, j = random.integers(-3, 9, (2, 5)), random.integers(-3, 9, (2, 7))
    a, b = random.integers(-2, 2, (2, 5)), random.integers(-2, 2, (2, 7))
    until, prefix = random.integers(-3, 12, (2, 7)), random.integers(0, 7, 2)
    i, j, until, prefix = (x + shift for x in (i, j, until, prefix))
    i, j, a, b, until, prefix = (x.astype(np.int32) for x in (i, j, a, b, until, prefix))
    got = visible(
        *(i, j, None if segments_of == "k" else a, None if segments_of == "q" else b),
        is_causal=causal,
        window=window,
        prefix_length=prefix if has_prefix else None,
        k_visible_until=until,
    )
    for r, t, s in np.ndindex(2, 5, 7):
        options = {"causal": causal, "window": window, "until": until[r, s]}
        options["prefix"] = prefix[r] if has_prefix else None
        a_id, b_id = a[r, t], b[r, s]
        if segments_of != "b":
            a_id = b_id = a_id if segments_of == "q" else b_id
        assert got[r, t, s] == sees(i[r, t], j[r, s], **options, a=a_id, b=b_id)


def test_sides_of_a_window():
    assert window_sides(4) == window_sides(np.int64(4)) == (3, 3)
    positions = jnp.arange(3, dtype=jnp.int32)[None]
    assert visible(positions, positions, window=sys.maxsize).all()


@pytest.mark.parametrize("window", [2.5, (3,), (1, 2, 3), (1.0, 2), "4"], ids=str)
def test_a_malformed_window_is_refused(window):
    with pytest.raises(TypeError, match="window must be an integer, a pair or a SlidingWindow"):
        window_sides(window)
