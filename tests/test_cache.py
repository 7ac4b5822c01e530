"""The cache: what it stores, the slots it writes, and overflow."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe


def empty(capacity=5, **options):
    shape = jax.ShapeDtypeStruct((2, 1, 3, 4), jnp.float32)
    value = jax.ShapeDtypeStruct((2, 1, 3, 6), jnp.float32)
    return pe.KVCache.empty(shape, value, capacity, **options)


def tokens(count, start=0):
    """k and v that number their tokens, positions and segments."""
    at = start + np.arange(count)
    number = np.broadcast_to(at[None, :, None, None] + 1.0, (2, count, 3, 1))
    k, v = (jnp.asarray(np.broadcast_to(number, (2, count, 3, n)), "f4") for n in (4, 6))
    at = jnp.asarray(np.broadcast_to(at, (2, count)), jnp.int32)
    return k, v, at, jnp.zeros_like(at)


def held(cache):
    """Which tokens the slots hold, 0 for none."""
    k, v = np.asarray(cache.k), np.asarray(cache.v)
    assert (k == k[:1, :, :1, :1]).all() and (v == k[:1, :, :1, :1]).all()
    used = np.asarray(cache.segment_ids) >= 0
    np.testing.assert_array_equal(np.where(used, cache.positions, -1) + 1, k[..., 0, 0])
    return k[0, :, 0, 0].tolist()


def test_an_empty_cache_is_all_padding():
    cache = empty(coordinates=jax.ShapeDtypeStruct((2, 2, 1), jnp.float32))
    assert cache.capacity == 5 and int(cache.length) == 0 and not cache.overflowed
    assert np.all(np.asarray(cache.segment_ids) == -1)
    assert cache.k.shape == (2, 5, 3, 4) and cache.v.shape == (2, 5, 3, 6)
    assert cache.coordinates.shape == (2, 2, 5) and cache.coordinates.dtype == jnp.float32
    assert cache.k_features is None and cache.state is None


def test_tokens_go_to_the_next_slots():
    cache = empty().append(*tokens(2))
    assert held(cache) == [1, 2, 0, 0, 0]
    cache = cache.append(*tokens(1, start=2)).append(*tokens(2, start=3))
    assert held(cache) == [1, 2, 3, 4, 5]
    assert int(cache.length) == 5 and not cache.overflowed
    np.testing.assert_array_equal(cache.next_positions, [5, 5])


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_a_ring_holds_the_newest_tokens(chunk):
    cache = empty(ring=True)
    for start in range(0, 15, chunk):
        cache = cache.append(*tokens(chunk, start))
        written = start + chunk
        assert sorted(held(cache))[-min(5, written) :] == [
            *range(max(0, written - 5) + 1, written + 1)
        ]
    assert int(cache.length) == written and not cache.overflowed


def test_the_next_position_counts_tokens_not_slots():
    k, v, at, _ = tokens(4)
    segments = jnp.array([[-1, -1, 0, 0], [0, 0, 0, -1]])
    cache = empty().append(k, v, jnp.array([[9, 9, 0, 1], [7, 8, 9, 20]]), segments)
    np.testing.assert_array_equal(cache.next_positions, [2, 10])
    nothing = jnp.full_like(segments, -1)
    np.testing.assert_array_equal(empty().append(k, v, at, nothing).next_positions, [0, 0])
    back = cache.append(k[:, :1], v[:, :1], jnp.array([[0], [0]]), jnp.array([[0], [0]]))
    np.testing.assert_array_equal(back.next_positions, [2, 10])


def test_coordinates_features_and_state_are_stored():
    shapes = {"gate": jax.ShapeDtypeStruct((2, 1, 3), jnp.float32)}
    state = {"sum": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    at = jax.ShapeDtypeStruct((2, 1), jnp.float32)
    cache = empty(coordinates=at, k_features=shapes, state=state)
    assert np.all(np.asarray(cache.state["sum"]) == 0)
    gate = jnp.arange(12.0).reshape(2, 2, 3)
    where = jnp.array([[0.5, 1.0], [2.0, 2.5]])
    for ring in (False, True):
        cache = dataclasses.replace(cache, ring=ring)
        new = cache.append(
            *tokens(2),
            coordinates=where,
            k_features={"gate": gate},
            state={"sum": jnp.ones((2, 3))},
        )
        np.testing.assert_array_equal(
            new.k_features["gate"], np.pad(gate, ((0, 0), (0, 3), (0, 0)))
        )
        np.testing.assert_array_equal(new.coordinates, np.pad(where, ((0, 0), (0, 3))))
        assert np.all(np.asarray(new.state["sum"]) == 1)


def test_arrays_are_stored_in_the_dtype_of_the_cache():
    shape = jax.ShapeDtypeStruct((2, 1, 3, 4), jnp.bfloat16)
    cache = pe.KVCache.empty(shape, shape, 5)
    k, _, at, segments = tokens(2)
    assert cache.append(k, k, at, segments).k.dtype == jnp.bfloat16


def test_a_full_cache_raises_and_overflows_under_jit():
    cache = empty().append(*tokens(4))
    with pytest.raises(ValueError, match="KVCache: 4 of 5 slots are used and 2 more tokens do not"):
        cache.append(*tokens(2))
    step = jax.jit(lambda c, *new: c.append(*new))
    assert not step(cache, *tokens(1)).overflowed
    lost = step(cache, *tokens(2))
    assert lost.overflowed and step(lost, *tokens(1)).overflowed


@pytest.mark.parametrize("ring", [False, True])
def test_more_tokens_than_slots_are_refused(ring):
    with pytest.raises(ValueError, match="KVCache: 6 tokens do not fit a cache of 5 slots"):
        jax.jit(lambda c, *new: c.append(*new))(empty(ring=ring), *tokens(6))


def test_a_cache_needs_a_slot():
    with pytest.raises(ValueError, match="KVCache: capacity must be at least 1 slot, got 0"):
        empty(0)


def test_coordinates_are_given_in_every_call_or_in_none():
    at = jnp.zeros((2, 2), jnp.int32)
    with pytest.raises(ValueError, match="KVCache: the cache was made for no coordinates; give"):
        empty().append(*tokens(2), coordinates=at)
    with pytest.raises(ValueError, match="KVCache: the cache was made for coordinates; give"):
        empty(coordinates=at).append(*tokens(2))


def test_float_coordinates_are_not_truncated_to_an_integer_cache():
    at = jnp.zeros((2, 2), jnp.int32)
    with pytest.raises(ValueError, match="made for int32 coordinates, got float32"):
        empty(coordinates=at).append(*tokens(2), coordinates=jnp.full((2, 2), 0.5))
    cache = empty(coordinates=at.astype(jnp.float32)).append(*tokens(2), coordinates=at + 3)
    np.testing.assert_array_equal(cache.coordinates[:, :2], np.full((2, 2), 3.0))


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    "index, name, shape",
    [
        (0, "k", (2, 2, 1, 4)),  # Fewer heads would fill some and leave zeros in the others.
        (0, "k", (2, 2, 3, 2)),
        (1, "v", (2, 2, 3, 4)),
        (1, "v", (1, 2, 3, 6)),
        (2, "positions", (1, 2)),
        (3, "segment_ids", (2, 1)),
    ],
    ids=str,
)
def test_arrays_of_another_shape_are_refused(ring, index, name, shape):
    new = list(tokens(2))
    new[index] = jnp.zeros(shape, new[index].dtype)
    with pytest.raises(ValueError, match=rf"KVCache: {name} must be \(2, 2.*got \({shape[0]}, "):
        empty(ring=ring).append(*new)


@pytest.mark.parametrize(
    "scheme", [pe.RoPE(head_dim=8), pe.ALiBi(num_heads=6), pe.T5(num_heads=6)], ids=lambda s: s.name
)
def test_relative_schemes_store_nothing_per_key(scheme):
    def stored(scheme):
        return jax.tree.map(jnp.shape, pe.new_cache(scheme, 2, 16, num_heads=6, head_dim=8))

    cache = stored(scheme)
    assert cache == stored(pe.NoPE())
    assert cache.k_features is cache.state is cache.coordinates is None
    assert stored(pe.Shaw(num_heads=6, head_dim=8)).k_features in (None, ())


def test_a_ring_keeps_its_sink_slots():
    shape = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)
    cache = pe.KVCache.empty(shape, shape, 5, ring=True, num_sink_tokens=2)
    for t in range(9):
        x = jnp.full((1, 1, 1, 1), float(t))
        at = jnp.full((1, 1), t, jnp.int32)
        cache = cache.append(x, x, at, jnp.zeros_like(at))
    np.testing.assert_array_equal(cache.k.ravel(), [0, 1, 8, 6, 7])
    whole = jnp.arange(9, 12, dtype=jnp.float32).reshape(1, 3, 1, 1)
    cache = cache.append(whole, whole, jnp.arange(9, 12)[None], jnp.zeros((1, 3), jnp.int32))
    np.testing.assert_array_equal(cache.k.ravel(), [0, 1, 11, 9, 10])
    with pytest.raises(ValueError, match="4 tokens do not fit a cache of 5 slots, of which 2"):
        four = jnp.zeros((1, 4, 1, 1))
        cache.append(four, four, jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 4), jnp.int32))
    for options in ({"num_sink_tokens": 5, "ring": True}, {"num_sink_tokens": 1}):
        with pytest.raises(ValueError, match="KVCache: num_sink_tokens must be below the 5 slots"):
            pe.KVCache.empty(shape, shape, 5, **options)


def test_positions_at_the_ends_of_int32_do_not_wrap():
    low, high = -(2**31), 2**31 - 1
    k, v, _, segments = tokens(5)
    at = jnp.array([[low, low + 1, low + 2, low + 3, low + 4]] * 2, jnp.int32)
    ring = empty(ring=True).append(k, v, at, segments)
    new = jnp.array([[high], [low + 5]], jnp.int32)
    lost = ring.evicts_visible(new, jnp.zeros_like(new), left=5)
    np.testing.assert_array_equal(lost, [False, True])
    one = [a[:, :1] for a in (k, v)]
    full = empty().append(*one, jnp.full((2, 1), high), jnp.zeros((2, 1), jnp.int32))
    np.testing.assert_array_equal(full.next_positions, [high, high])


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("lead", [(3,), (2, 3)])
def test_stacked_caches_equal_the_caches_of_their_layers(lead, ring):
    """Capacity, overflow and appending do not depend on the leading axes."""
    many = int(np.prod(lead))

    def stack(caches):
        return jax.tree.map(lambda *a: jnp.stack(a).reshape(*lead, *a[0].shape), *caches)

    # The last layers have up to five tokens; there two more do not fit.
    full = [max(0, i + 6 - many) for i in range(many)]
    caches = [empty(ring=ring).append(*tokens(n)) if n else empty(ring=ring) for n in full]
    stacked = stack(caches)
    assert stacked.capacity == 5
    np.testing.assert_array_equal(stacked.overflowed, np.zeros(lead, bool))

    def append(cache):
        return cache.append(*tokens(2, start=9))

    step = append
    for _ in lead:
        step = jax.vmap(step)
    for new in (jax.jit(step)(stacked), step(stacked)):
        each = [jax.jit(append)(c) for c in caches]
        jax.tree.map(np.testing.assert_array_equal, new, stack(each))
        assert new.capacity == 5 and new.overflowed.shape == lead
        lost = np.array([not ring and n + 2 > 5 for n in full]).reshape(lead)
        np.testing.assert_array_equal(new.overflowed, lost)


def test_caches_under_scan_report_their_overflow():
    stacked = jax.tree.map(lambda a: jnp.stack([a] * 3), empty())
    _, new = jax.lax.scan(lambda _, c: (None, c.append(*tokens(4))), None, stacked)
    np.testing.assert_array_equal(new.overflowed, [False] * 3)
    _, new = jax.lax.scan(lambda _, c: (None, c.append(*tokens(2))), None, new)
    np.testing.assert_array_equal(new.overflowed, [True] * 3)
