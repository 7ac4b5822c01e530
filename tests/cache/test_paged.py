"""A cache in blocks: which blocks rows have, share and give back, and a pool that is exhausted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax import testing

SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
TAKE, INSERT, RESET, REWIND, APPEND = (
    testing._jit(getattr(pe.KVCache, name))
    for name in ("take", "insert", "reset", "rewind", "append")
)
CONTIGUOUS = testing._jit(lambda cache: cache.contiguous())


def empty(batch=3, capacity=8, **options):
    """A cache with every kind of array per key, whose rows can be taken back."""
    key = jax.ShapeDtypeStruct((batch, 1, 3, 4), jnp.float32)
    at = jax.ShapeDtypeStruct((2, batch, 1), jnp.float32)
    cls = pe.PagedKVCache if options else pe.KVCache
    return cls.empty(key, key, capacity, coordinates=at, k_features=(key,), **options)


def paged(batch=3, capacity=8, **options):
    return empty(batch, capacity, block_size=2, **options)


def filled(cache, count, seed, append=APPEND):
    """The cache after `count` random tokens of each row."""
    batch, numbers = cache.length.shape[-1], np.random.default_rng(seed)
    k, v, extra = numbers.normal(size=(3, batch, count, 3, 4)).astype(np.float32)
    at = numbers.integers(0, 99, (batch, count), np.int32)
    where = numbers.normal(size=(2, batch, count)).astype(np.float32)
    return append(cache, k, v, at, 0 * at, coordinates=where, k_features=(extra,))


def blocks(cache):
    """The blocks of each row; checks that the others are the free ones."""
    table, count = np.asarray(cache.block_table), np.asarray(cache.num_blocks)
    rows = [row[:n].tolist() for row, n in zip(table, count, strict=True)]
    pool = cache.free_blocks.shape[0]
    free = np.asarray(cache.free_blocks)[pool - int(cache.num_free_blocks) :].tolist()
    assert sorted([*{block for row in rows for block in row}, *free]) == list(range(pool))
    return rows


def held(cache):
    """All arrays of each row, without the contents of empty slots."""
    c = jax.tree.map(np.asarray, CONTIGUOUS(cache))
    used = c.segment_ids >= 0
    arrays = c.k, c.v, c.k_features[0], c.positions, np.moveaxis(c.coordinates, 0, -1)
    return [[x[row][used[row]] for x in arrays] for row in range(len(used))]


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_blocks_of_rows():
    cache = filled(paged(), 3, seed=1)
    assert cache.k.shape == (12, 2, 3, 4) and cache.block_size == 2 and cache.capacity == 8
    assert blocks(cache) == [[0, 1], [2, 3], [4, 5]]
    cache = RESET(cache, np.array([1]))
    assert blocks(cache) == [[0, 1], [], [4, 5]]
    cache = REWIND(cache, np.array([1, 0, 3]))
    assert blocks(cache) == [[0], [], []]
    assert blocks(filled(cache, 3, seed=2)) == [[0, 1, 2], [3, 4], [5, 6]]


def test_rows_hold_what_a_contiguous_cache_holds():
    """The same calls, and rows of each kind of cache inserted into the other."""
    both = empty(), paged(num_blocks=9)
    prompts = [filled(cache, 3, seed=5) for cache in (empty(2, 6), paged(2, 6))]
    both = [TAKE(filled(cache, 3, seed=1), np.array([2, 2, 0])) for cache in both]
    both = [filled(cache, 3, seed=2) for cache in both]
    same(*map(held, both))
    for prompt in prompts:
        new = [INSERT(cache, np.array([2, 0]), prompt) for cache in both]
        same(*map(held, new))
        same(held(new[1])[0], held(prompt)[1])
        assert [len(row) for row in blocks(new[1])] == [2, 3, 2]


def test_rows_that_continue_one_row_share_its_full_blocks():
    cache = filled(paged(), 5, seed=1)
    four = TAKE(cache, np.array([0, 2, 0, 0]))
    (a, b, last), *others = blocks(four)
    assert [row[:2] for row in others] == [blocks(cache)[2][:2], [a, b], [a, b]]
    # The last block holds one token, so rows 2 and 3 have copies of it.
    assert len({last, others[1][2], others[2][2]}) == 3 and four.num_free_blocks == 12 - 8
    before = held(four)
    same(before, [held(cache)[row] for row in (0, 2, 0, 0)])
    # A row that is taken back into a shared block gets a copy of it, and writes there.
    back = REWIND(four, np.array([2, 0, 0, 0]))
    (first, copy), *_ = blocks(back)
    assert first == a and copy != b
    after = held(filled(back, 1, seed=3))
    same([x[:3] for x in after[0]], [x[:3] for x in before[0]])
    same([[x[:5] for x in row] for row in after[1:]], before[1:])


def test_an_exhausted_pool_raises():
    cache = filled(paged(num_blocks=7), 4, seed=1)
    message = "KVCache: 1 of 7 blocks are free and 3 are needed; make it with a larger num_blocks"
    with pytest.raises(ValueError, match=message):
        filled(cache, 1, seed=2, append=pe.KVCache.append)
    with pytest.raises(ValueError, match="3 of 7 blocks are free and 4 are needed"):
        cache.insert(0, filled(paged(1), 7, seed=3))
    with pytest.raises(ValueError, match="0 of 6 blocks are free and 1 are needed"):
        filled(paged(num_blocks=6), 3, seed=1).take(np.array([0, 0, 1, 2]))
    with pytest.raises(ValueError, match="KVCache: 4 of 8 slots of row 0 are used and 5 more"):
        filled(cache, 5, seed=2, append=pe.KVCache.append)


def test_an_exhausted_pool_under_jit():
    cache = filled(paged(num_blocks=7), 4, seed=1)
    lost = filled(cache, 1, seed=2)  # Rows in front are served first.
    np.testing.assert_array_equal(lost.overflowed, [False, True, True])
    assert blocks(lost) == [[0, 1, 6], [2, 3], [4, 5]]
    # Blocks that are free again do not mend a row that lost a token.
    lost = filled(RESET(lost, np.array([0])), 1, seed=2)
    np.testing.assert_array_equal(lost.overflowed, [False, True, True])
    whole = REWIND(lost, np.array([0, 2, 2]))
    assert not whole.overflowed.any()
    same(held(whole)[1:], held(cache)[1:])
    # Of three beams, the block for the copy of the last one is missing.
    beams = TAKE(filled(paged(num_blocks=6), 3, seed=1), np.array([0, 1, 2, 1]))
    np.testing.assert_array_equal(beams.overflowed, [False, False, False, True])
    assert not REWIND(beams, np.array([0, 0, 0, 1])).overflowed.any()


def test_outputs_of_rows_without_a_block_are_nan():
    alibi = pe.ALiBi(num_heads=2)
    q, k = np.ones((2, 3, 2, 4), np.float32), np.ones((2, 3, 1, 4), np.float32)
    cache = pe.new_cache(alibi, 2, 4, **SIZES, block_size=2, num_blocks=3)
    step = testing._jit(lambda cache: pe.scheme_attention(alibi, {}, q, k, k, cache=cache)[0])
    np.testing.assert_array_equal(np.isnan(step(cache)).all((1, 2, 3)), [False, True])


def test_stacked_caches_equal_the_caches_of_their_layers():
    layers = [filled(paged(num_blocks=9), 3, seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *layers)
    assert stacked.capacity == 8 and stacked.block_size == 2
    prompt = filled(paged(1), 3, seed=3)

    def change(cache):
        cache = cache.take(np.array([1, 1, 0])).reset(2).insert(0, prompt).rewind(1)
        return filled(cache, 3, seed=4, append=pe.KVCache.append)

    found, one = testing._jit(jax.vmap(change))(stacked), testing._jit(change)
    same(found, jax.tree.map(lambda *x: np.stack(x), *map(one, layers)))
    np.testing.assert_array_equal(found.length, [[5, 5, 3]] * 2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"block_size": 0}, "PagedKVCache: block_size must be at least 1, got 0"),
        ({"block_size": 5}, "capacity must be a multiple of block_size=5, got 8"),
        ({"block_size": 4, "num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"num_blocks": 4}, "new_cache: num_blocks=4 needs block_size"),
        ({"block_size": 4, "ring": True}, "new_cache: a ring has slots of its own for each row"),
    ],
)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        pe.new_cache(pe.NoPE(), 2, 8, **SIZES, **options)
