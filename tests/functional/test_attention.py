"""One attention of a scheme: positions, coordinates, tables, the cache, and absent batch axes."""

import functools
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.api import AttentionArguments
from posenc_jax.functional.arguments import AttentionOptions
from tests.oracle import qkv
from tests.support import LENGTH, build, make_batch, parameters, run, slow

Q, K, V = qkv(batch=2, length=7)
ALIBI = pe.ALiBi(num_heads=6)
FIRST, LAST = slice(0, 4), slice(4, 7)


def attend(scheme=ALIBI, part=slice(None), **options):
    arrays = [a[:, part] for a in (Q, K, V)]
    return pe.scheme_attention(scheme, {}, *arrays, **{"is_causal": True} | options)


def compiled(function):
    """The results of a function without arguments: one program with its arrays as constants."""
    return jax.device_get(jax.jit(function)())


def new_cache(scheme=ALIBI, capacity=9, **options):
    sizes = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8} | options
    return pe.new_cache(scheme, 2, capacity, **sizes)


@slow
def test_raw_cached_keys_are_transformed_at_each_step():
    """With coordinates in the cache, and the tables of a call, which its keys do not use."""
    at, scheme = 3 * np.arange(7)[None] * np.array([[1], [2]]), pe.XPos(head_dim=8)

    def outputs():
        cache, outs = new_cache(scheme, coordinates=at), []
        for part in (FIRST, LAST):
            tables = pe.scheme_tables(scheme, {}, at[:, part])
            placed = {"coordinates": at[:, part], "tables": tables}
            out, cache = attend(scheme, part, cache=cache, **placed)
            outs.append(out)
        return jnp.concatenate(outs, 1), attend(scheme, coordinates=at)[0], cache.k

    out, expected, k = compiled(outputs)
    np.testing.assert_array_equal(k[:, :7], K)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "mrope" else slow)
        for name, cls in pe.SCHEMES.items()
        if cls.tables is not pe.Scheme.tables
    ],
)
def test_schemes_with_tables_use_those_of_the_call(name):
    scheme = build(pe.SCHEMES[name])
    arguments = parameters(scheme), make_batch(1), np.arange(LENGTH)
    expected, out, of_zeros = run(_with_tables, (scheme,), *arguments)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert np.abs(of_zeros - expected).max() > 1e-3


def _with_tables(scheme, params, tokens, positions):
    arrays, options = (tokens.q, tokens.k, tokens.v), {"x": tokens.x, "is_causal": True}
    tables, still = (pe.scheme_tables(scheme, params, p) for p in (positions, 0 * positions))
    return [
        pe.scheme_attention(scheme, params, *arrays, tables=t, **options)[0]
        for t in (None, tables, still)
    ]


def test_a_new_cache_is_shaped_like_k_v_and_coordinates():
    def shaped(**options):
        cache = jax.eval_shape(lambda: new_cache(**options))
        return cache.k.shape, cache.v.shape, cache.coordinates, cache.k.dtype

    assert shaped() == ((2, 9, 3, 8), (2, 9, 3, 8), None, jnp.float32)
    assert shaped(num_kv_heads=None, dtype=jnp.bfloat16)[::3] == ((2, 9, 6, 8), jnp.bfloat16)
    for size in (5, 0):  # No values for schemes that attend to keys.
        assert shaped(value_dim=size)[1] == (2, 9, 3, size)
    for dtype, stored in ("f8", "f4"), ("f4", "f4"), ("i8", "i4"), ("u1", "i4"):
        for lead in ((), (1,), (2,), (3, 2)):
            coordinates = shaped(coordinates=np.zeros((*lead, 7), dtype))[2]
            assert (coordinates.shape, coordinates.dtype) == ((*lead[:-1], 2, 9), stored)


@slow
def test_nan_of_a_request_ends_with_it():
    """A cache has finite values and NaN keys in their place, so that steps need no test."""
    q, k, v = Q, K, np.array(V)
    v[0, 2, 1], v[1, 1, 0, 3] = np.nan, np.inf
    scheme = pe.Shaw(num_heads=6, head_dim=8)
    params = parameters(scheme)

    def step(q, k, v, cache):
        return pe.scheme_attention(scheme, params, q, k, v, is_causal=True, cache=cache)

    def outputs():
        _, cache = step(q[:, :6], k[:, :6], v[:, :6], new_cache(scheme))
        out, used = step(q[:, 6:], k[:, 6:], v[:, 6:], cache)
        cache = used.reset(np.array([True, False])).rewind(np.array([0, 7]))
        one = q[:, :1], k[:, :1], v[:, :1]
        grad = jax.grad(lambda q: step(q, *one[1:], cache)[0].sum())(one[0])
        return out, step(*one, cache)[0], step(*one, new_cache(scheme))[0], grad

    out, again, expected, grad = compiled(outputs)
    # Two query heads for each key head; on CPU a token with NaN in one head has it in all.
    seen = np.isnan(out[:, 0]).all(-1)
    assert seen[0, 2:4].all() and seen[1, :2].all()
    np.testing.assert_array_equal(again, expected)
    assert np.isfinite(grad).all()


def test_a_cache_with_a_prefix():
    """Every query sees the keys of a prefix, and a ring evicts them."""
    options = {"window": 2, "prefix_length": jnp.array([3, 3])}

    def outputs():
        first, cache = attend(part=FIRST, cache=new_cache(), **options)
        last, _ = attend(part=LAST, cache=cache, **options)
        return jnp.concatenate([first, last], 1), attend(**options)[0]

    np.testing.assert_allclose(*compiled(outputs), atol=1e-5)
    with pytest.raises(ValueError, match="keys of prefix_length, which a ring cache evicts"):
        jax.eval_shape(
            lambda: attend(part=slice(0, 1), cache=new_cache(ring=True, capacity=4), **options)
        )


def test_a_ring_needs_a_window_and_room_for_it():
    def step(window, length=2):
        cache = new_cache(ring=True, capacity=4)
        return attend(part=slice(0, length), cache=cache, window=window)

    for window in (None, (-1, 0)):
        with pytest.raises(ValueError, match="a ring cache overwrites its oldest tokens"):
            jax.eval_shape(lambda window=window: step(window, 1))
    for window in (3, (2, 0)):  # The window's 2 past tokens, and 2 new.
        jax.eval_shape(lambda window=window: step(window))
    mask = jnp.ones((1, 1, 1, 4), bool)
    with pytest.raises(ValueError, match="mask is by slot, and the slots of a ring cache"):
        attend(part=slice(0, 1), cache=new_cache(ring=True, capacity=4), window=3, mask=mask)
    message = "2 tokens at a time with window 4 need a ring of 5 slots, and the cache has 4"
    with pytest.raises(ValueError, match=f"scheme_attention: {message}"):
        jax.eval_shape(lambda: step(4))


def step_in_ring(cache, placed, *arrays):
    options = {"cache": cache, "is_causal": True, "window": 3}
    return pe.scheme_attention(pe.NoPE(), {}, *arrays, **placed, **options)


@pytest.mark.parametrize(
    "segments, positions",
    [
        ([0, 0, 1, 1, 1, 0], [0, 1, 0, 1, 2, 2]),  # The first sequence goes on after the second.
        ([0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 3, 4]),
    ],
)
def test_tokens_out_of_order_in_a_ring_are_nan(segments, positions):
    segments, positions = (np.array(x, np.int32) for x in (segments, positions))
    segments, positions = np.stack([segments, 0 * segments]), np.stack([positions, np.arange(6)])
    cache, outs = new_cache(pe.NoPE(), 4, ring=True), []
    for t in (slice(0, 2), slice(2, 4), slice(4, 6)):
        placed = {"positions": positions[:, t], "segment_ids": segments[:, t]}
        out, cache = run(step_in_ring, (), cache, placed, *(a[:, t] for a in (Q, K, V)))
        outs.append(np.isnan(out).any((2, 3)))
    lost = np.concatenate(outs, 1)
    np.testing.assert_array_equal(lost[0], [False] * 4 + [True] * 2)
    assert not lost[1].any()


def test_the_embedding_reads_coordinates_before_positions_and_continues_after_a_cache():
    x, waves, at = np.zeros((2, 3, 4), np.float32), pe.Sinusoidal(model_dim=4), 5 + np.arange(3)
    embed = functools.partial(pe.scheme_embedding, waves, {}, x)
    q = np.ones((2, 2, 1, 4), np.float32)

    def outputs():
        empty = pe.new_cache(pe.NoPE(), 2, 9, num_heads=1, head_dim=4)
        placed = {"positions": np.array([[5, 6], [0, 1]])}
        _, cache = pe.scheme_attention(pe.NoPE(), {}, q, q, q, cache=empty, **placed)
        by_coordinates = embed(positions=np.arange(3), coordinates=at)
        return by_coordinates, embed(cache=cache), embed(cache=empty)

    by_coordinates, after, first = compiled(outputs)
    encoding = np.asarray(pe.sinusoidal_encoding(np.arange(10), 4))
    np.testing.assert_allclose(by_coordinates, [encoding[5:8]] * 2, atol=1e-6)
    np.testing.assert_allclose(after, [encoding[7:10], encoding[2:5]], atol=1e-6)
    np.testing.assert_allclose(first, [encoding[:3]] * 2, atol=1e-6)


FUNCTIONS = {
    pe.attention: (AttentionArguments, {"return_lse"}),
    pe.scheme_attention: (AttentionOptions, {"cache"}),
    pe.scheme_cross_attention: (None, set()),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_are_those_of_the_types_and_reach_the_call(function, monkeypatch):
    parameters = inspect.signature(function).parameters.values()
    names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    types, others = FUNCTIONS[function]
    assert types is None or types.__annotations__.keys() | others == names
    got = {}

    def record(**options):
        got.update(options)
        raise InterruptedError

    module = sys.modules[function.__module__]
    monkeypatch.setattr(module, "AttentionCall", record)
    scheme = () if function is pe.attention else (ALIBI, {})
    with pytest.raises(InterruptedError):
        function(*scheme, Q, K, V, **{name: name for name in names})
    not_of_calls = {"rules", "cache", "x", "memory", "norms", "tables"}
    assert set(got.values()) == names - not_of_calls
    assert all(name[-len(x) :] == x or x[-len(name) :] == name for name, x in got.items())


def test_arrays_without_a_batch_axis():
    """Options follow; [A, T] are coordinates of several axes."""
    ids, mask = np.array([0, 0, 0, 1, 1, 1, -1]), np.random.default_rng(1).random((1, 7, 7)) < 0.8
    q, k, v, x = Q[0], K[0], V[0], np.ones((7, 4), np.float32)
    heads, dim = q.shape[1:]
    options = {"is_causal": True, "q_segment_ids": ids, "softcap": 2.0, "return_lse": True}
    options |= {"rules": pe.ALiBi(heads).rules({})}
    single = {"mask": mask, "prefix_length": 2, "sinks": q[..., 0]}
    batch = {"mask": mask[None], "prefix_length": np.array([2]), "sinks": q[None, ..., 0]}
    two, at = pe.AxialRoPE(head_dim=dim), np.stack([np.arange(7), np.arange(7)[::-1]])
    embed = functools.partial(pe.scheme_embedding, pe.Sinusoidal(4), {}, positions=ids)
    axial = functools.partial(pe.scheme_attention, two, {}, segment_ids=ids)

    def outputs():
        without = (
            pe.attention(q, k, v, **options, **single),
            axial(q, k, v, coordinates=at)[0],
            embed(x),
            pe.apply_rope(q, np.arange(7)),
        )
        rows = (
            pe.attention(Q[:1], K[:1], V[:1], **options, **batch),
            axial(Q[:1], K[:1], V[:1], coordinates=at[:, None])[0],
            embed(x[None]),
            pe.apply_rope(Q[:1], np.arange(7)),
        )
        return without, jax.tree.map(lambda x: x[0], rows)

    out, expected = compiled(outputs)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), out, expected)


def test_numbers_of_numpy_are_those_of_python():
    """Static numbers are parts of a jitted function's cache key, which must compare them."""
    numpy = {"window": (np.int64(4), 2), "scale": np.float32(0.5), "softcap": np.float32(2)}
    python = {"window": (4, 2), "scale": 0.5, "softcap": 2}
    sinks = {"sinks": [0.0] * 6}, {"sinks": np.zeros(6, np.float32)}
    outs = [pe.attention(Q, K, V, **a | b) for a in (numpy, python) for b in sinks]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
