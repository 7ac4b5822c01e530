"""The cache: its arrays, the slots that it writes, overflow, and changes of rows."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.schemes.combinators.chain import reads_order
from tests.support import parameters, run, slow


def method(name):
    """A method of a cache under `jit`."""

    def call(cache, *arguments, window=None, **arrays):
        return run(_method, (name, window), cache, arguments, arrays)

    return call


def _method(name, window, cache, arguments, arrays):
    options = arrays if window is None else arrays | {"window": window}
    return getattr(cache, name)(*arguments, **options)


append, take, insert, reset, rewind = map(method, ("append", "take", "insert", "reset", "rewind"))


def empty(capacity=5, **options):
    shape = jax.ShapeDtypeStruct((2, 1, 3, 4), jnp.float32)
    value = jax.ShapeDtypeStruct((2, 1, 3, 6), jnp.float32)
    return pe.KVCache.empty(shape, value, capacity, **options)


def tokens(count, start=0):
    """k and v that number their tokens, positions and segments."""
    positions = start + np.arange(count)
    number = np.broadcast_to(positions[None, :, None, None] + 1.0, (2, count, 3, 1))
    k, v = (np.broadcast_to(number, (2, count, 3, n)).astype(np.float32) for n in (4, 6))
    positions = np.broadcast_to(positions, (2, count)).astype(np.int32)
    return k, v, positions, np.zeros_like(positions)


def test_the_next_position_counts_tokens_not_slots():
    k, v, positions, _ = tokens(4)
    segments = np.array([[-1, -1, 0, 0], [0, 0, 0, -1]], np.int32)
    cache = append(empty(), k, v, np.array([[9, 9, 0, 1], [7, 8, 9, 20]], np.int32), segments)
    np.testing.assert_array_equal(cache.next_positions, [2, 10])
    np.testing.assert_array_equal(cache.next_segment_ids, [0, 0])
    several = append(cache, k[:, :3], v[:, :3], positions[:, :3], np.array([[3, 4, -1]] * 2))
    np.testing.assert_array_equal(several.next_segment_ids, [4, 4])
    np.testing.assert_array_equal(rewind(several, np.array([1, 2])).next_segment_ids, [3, 0])
    np.testing.assert_array_equal(reset(several, 1).next_segment_ids, [4, 0])
    nothing = np.full_like(segments, -1)
    np.testing.assert_array_equal(append(empty(), k, v, positions, nothing).next_positions, [0, 0])
    zeros = np.zeros((2, 1), np.int32)
    back = append(cache, k[:, :1], v[:, :1], zeros, zeros)
    np.testing.assert_array_equal(back.next_positions, [2, 10])


def test_what_does_not_fit_is_refused():
    shape = jax.ShapeDtypeStruct((2, 1, 3, 4), jnp.float32)
    for ring in (False, True):
        with pytest.raises(ValueError, match="KVCache: 6 tokens do not fit a cache of 5 slots"):
            empty(ring=ring).append(*tokens(6))
    with pytest.raises(ValueError, match="4 tokens do not fit a cache of 5 slots, of which 2"):
        empty(ring=True, num_sink_tokens=2).append(*tokens(4))
    for options in ({"num_sink_tokens": 5, "ring": True}, {"num_sink_tokens": 1}):
        with pytest.raises(ValueError, match="KVCache: num_sink_tokens must be below the 5 slots"):
            pe.KVCache.empty(shape, shape, 5, **options)


def test_the_next_position_after_negative_ones():
    k, v, positions, segments = tokens(4)
    cache = append(empty(), k, v, positions - 7, segments)
    np.testing.assert_array_equal(cache.next_positions, [-3, -3])
    np.testing.assert_array_equal(rewind(cache, 1).next_positions, [-4, -4])
    np.testing.assert_array_equal(rewind(cache, 4).next_positions, [0, 0])
    again = append(cache, k[:, :1], v[:, :1], positions[:, :1] - 9, segments[:, :1])
    np.testing.assert_array_equal(again.next_positions, [-3, -3])


def test_a_ring_that_takes_back_all_of_its_slots_is_lost():
    """Otherwise nothing in it tells the position of the next token."""
    cache = empty(ring=True)
    for start in range(0, 9, 3):
        cache = append(cache, *tokens(3, start))
    back = rewind(cache, 4)
    assert not back.overflowed.any() and back.next_positions.tolist() == [5, 5]
    assert rewind(cache, 5).overflowed.all()
    with pytest.raises(ValueError, match=r"KVCache.rewind: 5 tokens are all of row 0 in the ring"):
        cache.rewind(5)


@pytest.mark.parametrize("position", [3, 2, 1])
@pytest.mark.parametrize(("capacity", "count"), [(5, 1), (5, 3), (3, 3)])
def test_a_ring_with_a_window_of_one_position_holds_what_shares_it(capacity, count, position):
    """As many tokens as slots overwrite the last one, which the first new one may see."""
    lost = position < 2 or (position == 2 and capacity == count)
    cache = append(empty(capacity, ring=True), *tokens(3), window=1)
    after = append(cache, *tokens(count, position), window=1)
    np.testing.assert_array_equal(after.overflowed, [lost, lost])
    again = append(after, *tokens(count, position + count), window=1)
    np.testing.assert_array_equal(again.overflowed, [lost, lost])


def test_a_full_cache_raises_and_overflows_under_jit():
    cache = append(empty(), *tokens(4))
    with pytest.raises(ValueError, match="4 of 5 slots of row 0 are used and 2 more tokens do"):
        cache.append(*tokens(2))
    assert not append(cache, *tokens(1)).overflowed.any()
    lost = append(cache, *tokens(2))
    assert lost.overflowed.all() and append(lost, *tokens(1)).overflowed.all()
    # Without the token that did not fit, the row is whole again.
    whole = rewind(lost, 1)
    assert whole.k[0, :, 0, 0].tolist() == [1, 2, 3, 4, 1] and not whole.overflowed.any()


def test_coordinates_are_given_in_every_call_or_in_none():
    zeros, real = np.zeros((2, 2), np.int32), np.full((2, 2), 0.5, np.float32)
    for cache, coordinates, message in (
        (empty(), zeros, "no coordinates; give"),
        (empty(coordinates=zeros), None, "coordinates; give"),
        (empty(coordinates=zeros), real, "int32 coordinates, got float32"),
    ):
        with pytest.raises(ValueError, match=f"KVCache: the cache was made for {message}"):
            cache.append(*tokens(2), coordinates=coordinates)
    cache = append(empty(coordinates=real), *tokens(2), coordinates=zeros + 3)
    np.testing.assert_array_equal(cache.coordinates[:, :2], zeros + 3.0)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("k", (2, 2, 1, 4)),  # Fewer heads would fill some and leave zeros in the others.
        ("v", (1, 2, 3, 6)),
        ("positions", (1, 2)),
        ("segment_ids", (2, 1)),
    ],
)
def test_arrays_of_another_shape_are_refused(name, shape):
    new = dict(zip(("k", "v", "positions", "segment_ids"), tokens(2), strict=True))
    new[name] = np.zeros(shape, new[name].dtype)
    with pytest.raises(ValueError, match=rf"KVCache: {name} must be \(2, 2.*got \({shape[0]}, "):
        empty().append(**new)


def test_positions_at_the_ends_of_int32_do_not_wrap():
    low, high = -(2**31), 2**31 - 1
    k, v, _, segments = tokens(5)
    positions = np.array([[low, low + 1, low + 2, low + 3, low + 4]] * 2, np.int32)
    ring = append(empty(ring=True), k, v, positions, segments)
    new = np.array([[high], [low + 4]], np.int32)
    after = append(ring, k[:, :1], v[:, :1], new, np.zeros_like(new), window=5)
    np.testing.assert_array_equal(after.overflowed, [False, True])
    first = [a[:, :1] for a in (k, v)]
    full = append(empty(), *first, np.full((2, 1), high, np.int32), np.zeros((2, 1), np.int32))
    np.testing.assert_array_equal(full.next_positions, [high, high])


def everything(batch=3, capacity=5, **options):
    """An empty cache with every kind of array."""
    shape = jax.ShapeDtypeStruct((batch, 1, 3, 4), jnp.float32)
    coordinates = jax.ShapeDtypeStruct((2, batch, 1), jnp.float32)
    state = {"sum": jax.ShapeDtypeStruct((batch, 2), jnp.float32)}
    arrays = {"coordinates": coordinates, "k_features": (shape,), "state": state}
    return pe.KVCache.empty(shape, shape, capacity, **arrays, **options)


def filled(cache, count, seed):
    """The cache after `count` random tokens of each row."""
    shapes = jax.tree.map(lambda x: x.shape, cache)
    batch, numbers = shapes.length[0], np.random.default_rng(seed)

    def random(old, axis=1):
        shape = list(old.shape)
        shape[axis] = count
        return numbers.normal(size=shape).astype(old.dtype)

    positions = np.broadcast_to(np.arange(count) + 10 * seed, (batch, count)).astype(np.int32)
    return append(
        cache,
        random(cache.k),
        random(cache.v),
        positions,
        np.zeros_like(positions),
        coordinates=random(cache.coordinates, -1),
        k_features=jax.tree.map(random, cache.k_features),
        state=jax.tree.map(lambda x: numbers.normal(size=x.shape).astype("f4"), cache.state),
    )


def row_of(cache, row):
    """All arrays of a row, without the contents of empty slots."""
    arrays = dataclasses.replace(cache, coordinates=np.moveaxis(cache.coordinates, 0, -1))
    arrays = jax.tree.map(lambda x: np.asarray(x)[row], arrays)
    used = arrays.segment_ids >= 0
    slots = arrays.k, arrays.v, arrays.positions, arrays.coordinates, arrays.k_features
    rows = arrays.state, arrays.length, arrays.written, arrays.next_positions, arrays.lost
    return jax.tree.leaves((jax.tree.map(lambda x: x[used], slots), rows))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_rows_move_with_all_that_belongs_to_them():
    a, b = filled(everything(), 3, seed=1), filled(everything(2, capacity=4), 2, seed=2)
    taken = take(a, np.array([2, 0, 0, 1]))
    for new, old in enumerate([2, 0, 0, 1]):
        same(row_of(taken, new), row_of(a, old))
    put = insert(a, np.array([2, 0]), b)
    for new, old in [(2, row_of(b, 0)), (0, row_of(b, 1)), (1, row_of(a, 1))]:
        same(row_of(put, new), old)
    for rows in (np.array([0, 2]), np.array([True, False, True])):
        freed = reset(a, rows)
        for row, expected in enumerate([everything(), a, everything()]):
            same(row_of(freed, row), row_of(expected, row))


def test_a_prefilled_cache_fits_a_larger_ring():
    small = filled(everything(1, capacity=4), 3, seed=1)
    into = filled(everything(capacity=7, ring=True), 4, seed=2)
    same(row_of(insert(into, 1, small), 1), row_of(small, 0))


def test_rows_that_do_not_exist_are_refused_and_left_out_under_jit():
    a, prompt = filled(everything(), 3, seed=1), filled(everything(1), 2, seed=2)
    for rows in (3, -1):
        three = np.array([0, rows, 1])
        for name, *arguments in (("take", three), ("reset", three), ("insert", rows, prompt)):
            message = rf"KVCache.{name}: rows must be from 0 to 2, got .*{rows}"
            with pytest.raises(ValueError, match=message):
                getattr(a, name)(*arguments)
        np.testing.assert_array_equal(take(a, three).overflowed, [False, True, False])
        same(insert(a, rows, prompt), a)
        same(reset(a, np.array([rows])), a)
    with pytest.raises(ValueError, match=r"insert: rows must differ, got \[1, 1\]"):
        a.insert([1, 1], everything(2))


@pytest.mark.parametrize(
    "other, message",
    [
        (lambda: everything(1, capacity=6), "must have at most 5 slots .* got 6 slots"),
        (lambda: everything(1, ring=True), "or be the same ring, got 5 slots, a ring"),
        (lambda: everything(2), "rows must be one for each of the 2 rows of the other cache"),
        (lambda: everything(1, scheme=pe.NoPE()), r"is for None, the other for NoPE\(\)"),
        (lambda: dataclasses.replace(everything(1), ids_per_segment=16), "1 ids .* the other 16"),
        (lambda: dataclasses.replace(everything(1), state=None), "arrays must be .* per row, got"),
        (
            lambda: dataclasses.replace(everything(1), coordinates=jnp.zeros((3, 1, 5), int)),
            "got .*'int32'",
        ),
        (lambda: dataclasses.replace(everything(1), k=jnp.zeros((1, 5, 2, 4))), "got .*2, 4"),
    ],
)
def test_a_cache_that_does_not_fit_is_not_inserted(other, message):
    with pytest.raises(ValueError, match=f"KVCache.insert: .*{message}"):
        everything().insert(0, other())


def test_more_tokens_than_there_are_are_not_taken_back():
    cache = append(empty(), *tokens(3))
    back = cache.rewind([0, 2])
    np.testing.assert_array_equal(back.length, [3, 1])
    np.testing.assert_array_equal(back.next_positions, [3, 1])
    for count, message in ((4, "row 0 can .* got 4"), ([1, -1], "row 1 can .* got -1")):
        with pytest.raises(ValueError, match=message):
            cache.rewind(count)
    lost = rewind(cache, np.array([4, 1]))
    np.testing.assert_array_equal(lost.overflowed, [True, False])
    np.testing.assert_array_equal(reset(lost, 0).overflowed, [False, False])
    with pytest.raises(ValueError, match="running state; make the cache with max_rewind"):
        filled(everything(), 3, seed=1).rewind(1)


def test_rows_are_integers_or_one_boolean_for_each():
    with pytest.raises(ValueError, match=r"reset: rows must be \[B\] = .* or integers, got \(3"):
        empty().reset(np.array([True, False, True]))
    with pytest.raises(ValueError, match=r"rewind: count must be an integer or \[B\] = \(2,\), g"):
        empty().rewind(np.zeros(1, int))
    with pytest.raises(TypeError, match=r"KVCache.take: rows must be integers, got float"):
        empty().take(np.array([0.0, 1.0]))


def decoded(scheme, params, dtype, values, **options):
    """The cache of a scheme with two heads after these values, a token a call."""
    cache = pe.new_cache(scheme, 1, 4, num_heads=2, head_dim=8, dtype=dtype, **options)
    q = jnp.ones((1, 1, 2, 8))

    def step(cache, value):
        out, cache = pe.scheme_attention(
            scheme, params, q, q, value * q, is_causal=True, cache=cache
        )
        return cache, out

    return jax.lax.scan(step, cache, jnp.asarray(values, jnp.float32))


def test_a_cache_on_the_host_and_rows_that_are_none():
    cache, _ = decoded(pe.NoPE(), {}, jnp.float32, [1.0, 2.0])
    other = jax.device_get(cache)
    np.testing.assert_array_equal(other.v[0, :, 0, 0], [1, 2, 0, 0])
    np.testing.assert_array_equal(other.segment_ids, [[0, 0, -1, -1]])
    for new in (other.take([0]), other.insert(0, other), cache.reset([])):
        chex.assert_trees_all_equal(new, cache)


@pytest.mark.parametrize("ring", [False, True])
def test_a_cache_of_zeros_is_empty(ring):
    """`jax.eval_shape` and Flax make one from its shapes alone."""
    cache = empty(ring=ring)
    for part in (tokens(2), tokens(1, start=2)):
        cache = append(cache, *part)
        zeros = append(jax.tree.map(np.zeros_like, cache), *part)
        chex.assert_trees_all_equal(zeros, append(empty(ring=ring), *part))


@slow
@pytest.mark.parametrize("capacity", [7, 14])
def test_a_ring_with_equal_positions_is_right_or_lost(capacity):
    """Blocks of one to three tokens at a position, some taken back, against float64."""
    rng, window, calls = np.random.default_rng(capacity), 3, 40
    step = jax.jit(
        lambda q, k, v, positions, ids, cache: pe.scheme_attention(
            pe.NoPE(), {}, q, k, v, positions=positions, segment_ids=ids, cache=cache,
            is_causal=True, window=window,
        )
    )  # fmt: skip
    cache = pe.new_cache(pe.NoPE(), 1, capacity, num_heads=1, head_dim=8, ring=True)
    rewind = jax.jit(pe.KVCache.rewind)
    held, at, checked = np.zeros((0, 17)), 0, 0
    for _ in range(calls):
        if len(held) and rng.random() < 0.2:
            count = int(rng.integers(1, min(3, len(held)) + 1))
            cache, held = rewind(cache, count), held[: len(held) - count]
            at = int(held[-1, 16]) if len(held) else 0
        real = np.arange(3) < rng.integers(1, 4)
        positions = at + np.cumsum(rng.integers(0, 2, 3) * real)
        at = int(positions[-1])
        q, k, v = rng.normal(size=(3, 3, 8)).astype(np.float32)
        new = np.concatenate([k, v, positions[:, None]], 1)[real]
        held = np.concatenate([held, new])
        out, cache = step(
            *(x[None, :, None] for x in (q, k, v)), positions[None], np.where(real, 0, -1)[None],
            cache,
        )  # fmt: skip
        if cache.overflowed[0]:
            assert np.isnan(out[0, real]).all()
            assert capacity < 14  # Six tokens in the window may be rewound: fourteen hold them.
            cache, held, at = reset(cache, 0), held[:0], 0
            continue
        distance = positions[real][:, None] - held[:, 16]
        weights = np.exp(q[real] @ held[:, :8].T / 8**0.5) * (distance >= 0) * (distance < window)
        want = weights / weights.sum(1, keepdims=True) @ held[:, 8:16]
        np.testing.assert_allclose(out[0, real, 0], want, atol=1e-5)
        checked += 1
    assert checked > 5


def test_a_prefill_with_equal_positions_is_checked_in_a_ring():
    """In a full cache they are right, so that it does not look at them."""
    (k, v, positions, ids), more = tokens(5), tokens(1, 2)
    same, falling = np.minimum(positions, 1), positions[:, ::-1].copy()
    for at, tied, lost in ((positions, False, False), (same, True, False), (falling, False, True)):
        ring = insert(empty(5, ring=True), np.arange(2), append(empty(5), k, v, at, ids))
        np.testing.assert_array_equal(ring.tied, [tied, tied])
        np.testing.assert_array_equal(ring.overflowed, [lost, lost])
        # The window of three positions from 0 on has lost the first token.
        after = append(ring, *more[:2], at.max(1, keepdims=True) + 1, ids[:, :1], window=3)
        assert after.overflowed.all() == (tied or lost)
    np.testing.assert_array_equal(rewind(ring, 5).tied, [False, False])


def test_schemes_that_read_the_order_of_keys_are_lost_at_equal_positions():
    within = pe.chain(pe.chain(pe.StickBreaking(), pe.RoPE(head_dim=4)), pe.NoPE())
    assert [reads_order(x) for x in (within, pe.StickBreaking(), pe.T5(3))] == [True, True, False]
    k, v, positions, ids = tokens(2)
    ring = append(empty(ring=True, scheme=within), k, v, 0 * positions, ids, window=3)
    assert ring.lost.all()


def test_layers_stacked_for_vmap_overflow_as_each_alone():
    """The last layers have up to five tokens; there two more do not fit."""
    full = np.array([1, 2, 3, 4, 5, 5])
    k, v, positions, _ = tokens(5)
    caches = [
        append(empty(), k, v, positions, np.tile(np.where(np.arange(5) < n, 0, -1), (2, 1)))
        for n in full
    ]
    stacked = jax.tree.map(lambda *a: np.stack(a).reshape(2, 3, *a[0].shape), *caches)
    assert stacked.capacity == 5 and stacked.max_rewind is None
    np.testing.assert_array_equal(stacked.overflowed, np.zeros((2, 3, 2), bool))
    new = run(jax.vmap(jax.vmap(lambda c: c.append(*tokens(2, start=9)))), (), stacked)
    for i, cache in enumerate(caches):
        expected = append(cache, *tokens(2, start=9))
        same(jax.tree.map(lambda x, i=i: x[i // 3, i % 3], new), expected)
    np.testing.assert_array_equal(new.overflowed[..., 0].ravel(), full + 2 > 5)
    for name, *arguments in (("take", [0]), ("reset", 0), ("insert", 0, caches[0]), ("rewind", 1)):
        with pytest.raises(ValueError, match=rf"KVCache\.{name}: .* jax\.vmap over them"):
            getattr(stacked, name)(*arguments)


def test_dtypes_and_sizes_of_stored_arrays():
    """States have the dtype of the cache, which a scan carries; activations are float32."""
    scheme = pe.chain(pe.contrib.ShortConv(num_heads=2, num_kv_heads=2, head_dim=8), pe.RoPE(8))
    params = parameters(scheme)
    options = {"dtype": jnp.bfloat16, "values": [1.0, 2.0, 3.0], "max_rewind": 2}
    cache, _ = jax.eval_shape(lambda: decoded(scheme, params, **options))
    dtypes = {x.dtype for x in jax.tree.leaves((cache.k, cache.state, cache.past_states))}
    assert cache.max_rewind == 2 and dtypes == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int32)}
    for scheme in (pe.RoPE(head_dim=8), pe.T5(num_heads=6), pe.Shaw(num_heads=6, head_dim=8)):
        cache = pe.new_cache(scheme, 2, 16, num_heads=6, head_dim=8)
        assert not jax.tree.leaves((cache.k_features, cache.state, cache.coordinates))


def test_a_value_that_overflows_in_the_cache_ends_with_its_row():
    q, dtype = np.ones((1, 1, 2, 8), np.float32), jnp.float8_e4m3fn

    def outputs():
        cache, outs = decoded(pe.NoPE(), {}, dtype, [1.0, 7e4])
        wide, _ = decoded(pe.NoPE(), {}, jnp.float32, [1.0, 7e4])
        options = {"is_causal": True}
        return outs[1], [
            pe.scheme_attention(pe.NoPE(), {}, q, q, q, cache=c.reset(0), **options)[0]
            for c in (cache, cache.insert(0, wide))
        ]

    lost, outs = jax.jit(outputs)()
    assert not np.isfinite(lost).any()
    for out in outs:
        np.testing.assert_array_equal(out, q)


def test_a_row_of_negative_positions_is_lost_in_a_ring_with_sinks():
    """Sinks are the positions 0, 1, ..., and a count of those below is not one of sinks."""
    scheme, ones = pe.streaming(pe.RoPE(head_dim=2), 2), np.ones((2, 3, 1, 2), np.float32)
    cache = pe.new_cache(scheme, 2, 6, num_heads=1, head_dim=2, ring=True)
    positions = np.array([[-3, -2, -1], [0, 1, 2]])
    options = {"window": (1, 0), "is_causal": True, "cache": cache, "positions": positions}
    out, _ = jax.jit(lambda: pe.scheme_attention(scheme, {}, ones, ones, ones, **options))()
    np.testing.assert_array_equal(np.isfinite(out[:, -1]).all((1, 2)), [False, True])


def test_a_key_that_overflows_in_the_cache_ends_with_its_row():
    """Its logit is the one of hidden slots, and the other tokens would get its weight."""
    cache = pe.new_cache(pe.NoPE(), 1, 2, num_heads=1, head_dim=2, dtype=jnp.float16)
    k = np.array([[[[1.0, 1.0]], [[1.0, 7e4]]]], np.float32)
    q = np.full((1, 2, 1, 2), -2e-5, np.float32)
    options = {"cache": cache, "is_causal": True}
    q, k = map(jnp.asarray, (q, k))  # NumPy warns when it rounds.
    out, _ = jax.jit(
        lambda: pe.scheme_attention(pe.NoPE(), {}, q, k, jnp.ones_like(k), **options)
    )()
    assert np.isfinite(out[0, 0]).all() and not np.isfinite(out[0, 1]).any()
