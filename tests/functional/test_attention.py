"""One attention of a scheme: the path of positions, the cache, and refusals."""

import dataclasses
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
from posenc_jax.positions import from_padding_mask
from tests.oracle import qkv
from tests.support import LENGTH, build, make_batch, parameters, run

Q, K, V = qkv(batch=2, length=7)
ALIBI, ROPE = pe.ALiBi(num_heads=6), pe.RoPE(head_dim=8)
SHAW = pe.Shaw(num_heads=6, head_dim=8)


def attend(scheme=ALIBI, part=slice(None), *, params=None, **options):
    """Arrays among the options are constants of the program, whose values may be checked."""
    params = parameters(scheme) if params is None else params
    options = {"is_causal": True} | options
    arrays = [a[:, part] for a in (Q, K, V)]
    call = functools.partial(pe.scheme_attention, scheme, params, **options)
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(options))
    return call(*arrays) if traced else run(call, (), *arrays)


def new_cache(scheme=ALIBI, capacity=9, **options):
    sizes = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8} | options
    return pe.new_cache(scheme, 2, capacity, **sizes)


def test_default_positions_count_from_zero_and_continue_after_the_cache():
    whole, no_cache = attend()
    assert no_cache is None
    for positions in (jnp.arange(7), jnp.arange(7)[None], np.tile(np.arange(7), (2, 1))):
        np.testing.assert_allclose(attend(positions=positions)[0], whole, atol=1e-6)
    _, cache = attend(part=slice(0, 4), cache=new_cache())
    out, cache = attend(part=slice(4, 7), cache=cache)
    np.testing.assert_allclose(out, whole[:, 4:], atol=1e-5)
    np.testing.assert_array_equal(cache.positions[:, :7], np.tile(np.arange(7), (2, 1)))
    np.testing.assert_array_equal(cache.next_positions, [7, 7])


def test_coordinates_are_encoded_and_positions_mask():
    back = jnp.arange(7)[::-1]
    out, _ = attend(ROPE, coordinates=back)
    rotated = (pe.apply_rope(x, back) for x in (Q, K))
    plain = jax.jit(lambda *a: pe.attention(*a, is_causal=True))(*rotated, V)
    np.testing.assert_allclose(out, plain, atol=1e-5)
    reordered, _ = attend(ROPE, positions=back)
    assert np.abs(out - reordered).max() > 0.1


def test_segments_equal_sequences_alone():
    out, _ = attend(segment_ids=jnp.array([0, 0, 0, 1, 1, 1, 1]))
    np.testing.assert_allclose(out[:, :3], attend(part=slice(0, 3))[0], atol=1e-5)
    np.testing.assert_allclose(out[:, 3:], attend(part=slice(3, 7))[0], atol=1e-5)


def test_the_scale_is_the_schemes_own_unless_given():
    zero = {"table": np.zeros((6, 32), np.float32)}  # No bias, and T5 has no 1 / sqrt(H).
    t5 = functools.partial(attend, pe.T5(num_heads=6), params=zero)
    plain = attend(pe.NoPE())[0]
    np.testing.assert_allclose(t5()[0], attend(pe.NoPE(), scale=1.0)[0], atol=1e-6)
    np.testing.assert_allclose(t5(scale=8**-0.5)[0], plain, atol=1e-6)
    assert np.abs(t5()[0] - plain).max() > 0.01


@dataclasses.dataclass(frozen=True)
class RawKeys(pe.Scheme):
    """RoPE on raw cached keys, as schemes need whose keys depend on later tokens."""

    @property
    def traits(self):
        return pe.Traits(cache_transformed_keys=False)

    def query(self, params, q, coordinates, features=None, tables=None):
        return pe.apply_rope(q, coordinates)

    def key(self, params, k, coordinates, features=None, tables=None):
        return pe.apply_rope(k, coordinates)


@pytest.mark.parametrize("coordinates", [None, 3 * np.arange(7)[None] * np.array([[1], [2]])])
def test_raw_cached_keys_are_transformed_at_each_step(coordinates):
    placed = [{}, {}] if coordinates is None else [{"coordinates": coordinates}] * 2
    cache = new_cache(RawKeys(), coordinates=coordinates)
    parts = (slice(0, 5), slice(5, 7))
    outs = []
    for part, options in zip(parts, placed, strict=True):
        options = {name: x[:, part] for name, x in options.items()}
        out, cache = attend(RawKeys(), part, cache=cache, **options)
        outs.append(out)
    np.testing.assert_array_equal(cache.k[:, :7], K)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), attend(ROPE, **placed[0])[0], atol=1e-5)


def _causal(scheme, params, arrays, cache):
    return pe.scheme_attention(scheme, params, *arrays, cache=cache, is_causal=True)


def test_values_may_have_a_head_dim_of_their_own():
    cache = new_cache(value_dim=5)
    out, cache = run(_causal, (ALIBI,), {}, (Q, K, V[..., :5]), cache)
    np.testing.assert_allclose(out, attend()[0][..., :5], atol=1e-6)
    assert (cache.k.shape, cache.v.shape) == ((2, 9, 3, 8), (2, 9, 3, 5))
    assert new_cache(value_dim=0).v.shape == (2, 9, 3, 0)  # For schemes that attend to keys.


def test_a_new_cache_is_shaped_like_k_and_v():
    cache = pe.new_cache(ALIBI, 2, 9, num_heads=6, head_dim=8, dtype=jnp.bfloat16)
    assert cache.k.shape == cache.v.shape == (2, 9, 6, 8) and cache.k.dtype == jnp.bfloat16
    assert new_cache().k.shape == (2, 9, 3, 8)


@pytest.mark.parametrize("dtype, stored", [("f8", "f4"), ("f4", "f4"), ("i8", "i4"), ("u1", "i4")])
@pytest.mark.parametrize("lead", [(), (1,), (2,), (3, 2)])
def test_a_new_cache_stores_coordinates_as_calls_give_them(lead, dtype, stored):
    cache = new_cache(coordinates=np.zeros((*lead, 7), dtype))
    assert cache.coordinates.shape == (*lead[:-1], 2, 9) and cache.coordinates.dtype == stored


def test_a_cache_takes_the_coordinates_that_it_was_made_for():
    coordinates = np.arange(7) / 2
    out, _ = attend(coordinates=coordinates, cache=new_cache(coordinates=coordinates))
    np.testing.assert_allclose(out, attend(coordinates=coordinates)[0], atol=1e-5)


def test_a_new_cache_of_a_scheme_that_reads_x_needs_its_width():
    with pytest.raises(
        ValueError, match=r"new_cache: FoX\(.*\) reads x, so the cache needs model_d"
    ):
        new_cache(pe.FoX(num_heads=6, model_dim=20))


def test_an_overflowing_cache_raises_and_is_nan_under_jit():
    _, cache = attend(part=slice(0, 6), cache=new_cache())
    with pytest.raises(ValueError, match="6 of 9 slots of row 0 are used and 7 more tokens do not"):
        pe.scheme_attention(ALIBI, {}, Q, K, V, cache=cache, is_causal=True)
    out, cache = run(_causal, (ALIBI,), {}, (Q, K, V), cache)
    assert np.isnan(out).all() and cache.overflowed.all()
    fits, _ = run(_causal, (ALIBI,), {}, (Q, K, V), new_cache())
    assert np.isfinite(fits).all()


def test_nan_of_a_request_ends_with_it():
    """A cache has finite values and NaN keys in their place, so that steps need no test."""
    q, k, v = Q, K, np.array(V)
    v[0, 2, 1], v[1, 1, 0, 3] = np.nan, np.inf

    params = parameters(SHAW)

    @jax.jit
    def step(q, k, v, cache):
        return pe.scheme_attention(SHAW, params, q, k, v, is_causal=True, cache=cache)

    _, cache = run(_causal, (SHAW,), params, (q[:, :6], k[:, :6], v[:, :6]), new_cache(SHAW))
    out, used = step(q[:, 6:], k[:, 6:], v[:, 6:], cache)
    # Two query heads for each key head; on CPU a token with NaN in one head has it in all.
    seen = np.isnan(out[:, 0]).all(-1)
    assert seen[0, 2:4].all() and seen[1, :2].all()
    change = jax.jit(lambda c: c.reset(np.array([True, False])).rewind(np.array([0, 7])))
    cache = change(used)
    out, _ = step(q[:, :1], k[:, :1], v[:, :1], cache)
    expected, _ = step(q[:, :1], k[:, :1], v[:, :1], new_cache(SHAW))
    np.testing.assert_array_equal(out, expected)
    grad = jax.jit(jax.grad(lambda q: step(q, k[:, :1], v[:, :1], cache)[0].sum()))(q[:, :1])
    assert np.isfinite(grad).all()


def test_a_cache_for_other_heads_is_refused():
    cache = pe.new_cache(ALIBI, 2, 9, num_heads=6, head_dim=8)  # num_kv_heads was forgotten.
    with pytest.raises(ValueError, match=r"KVCache: k must be \(2, 7, 6, 8\).*got \(2, 7, 3, 8\)"):
        attend(cache=cache)


def test_a_ring_has_no_prefix():
    """Every query sees the keys of a prefix, and a ring evicts them."""
    options = {"window": 2, "prefix_length": jnp.array([3, 3])}
    whole, _ = attend(**options)
    cache, outs = new_cache(), []
    for part in (slice(0, 4), slice(4, 7)):
        out, cache = attend(part=part, cache=cache, **options)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), whole, atol=1e-5)
    with pytest.raises(ValueError, match="keys of prefix_length, which a ring cache evicts"):
        attend(part=slice(0, 1), cache=new_cache(ring=True, capacity=4), **options)


def test_a_ring_needs_a_window_and_room_for_it():
    cache = new_cache(ring=True, capacity=4)
    for window in (None, (-1, 0)):
        with pytest.raises(ValueError, match="a ring cache overwrites its oldest tokens"):
            attend(part=slice(0, 1), cache=cache, window=window)
    attend(part=slice(0, 2), cache=cache, window=3)  # The window's 2 past tokens, and 2 new.
    attend(part=slice(0, 2), cache=cache, window=(2, 0))
    message = "2 tokens at a time with window 4 need a ring of 5 slots, and the cache has 4"
    with pytest.raises(ValueError, match=f"scheme_attention: {message}"):
        attend(part=slice(0, 2), cache=cache, window=4)


@pytest.mark.parametrize("function", ["scheme_attention", "scheme_embedding"])
def test_a_cache_of_another_batch_or_of_several_layers_is_refused(function):
    def call(cache):
        if function == "scheme_attention":
            return pe.scheme_attention(ALIBI, {}, Q, K, V, cache=cache)
        return pe.scheme_embedding(pe.Sinusoidal(8), {}, jnp.zeros((2, 7, 8)), cache=cache)

    sizes = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8}
    with pytest.raises(ValueError, match=f"{function}: the cache is for batch size 5, got .* 2"):
        call(pe.new_cache(ALIBI, 5, 9, **sizes))
    stacked = jax.tree.map(lambda a: jnp.stack([a] * 3), new_cache())
    with pytest.raises(ValueError, match=f"{function}: cache must be that of one layer, got .* 1 "):
        call(stacked)


def test_the_embedding_continues_after_the_cache():
    x, waves = jnp.zeros((2, 3, 4)), pe.Sinusoidal(model_dim=4)
    placed = {"positions": np.array([[5, 6], [0, 1]])}
    sizes = {"num_heads": 1, "head_dim": 4}
    q = np.ones((2, 2, 1, 4), np.float32)
    empty = pe.new_cache(pe.NoPE(), 2, 9, **sizes)
    step = jax.jit(functools.partial(pe.scheme_attention, pe.NoPE(), {}))
    _, cache = step(q, q, q, cache=empty, **placed)
    expected = pe.sinusoidal_encoding(jnp.array([[7, 8, 9], [2, 3, 4]]), 4)
    np.testing.assert_array_equal(pe.scheme_embedding(waves, {}, x, cache=cache), expected)
    first = pe.scheme_embedding(waves, {}, x, cache=empty)
    np.testing.assert_array_equal(first, pe.scheme_embedding(waves, {}, x))


@dataclasses.dataclass(frozen=True)
class Shared(pe.Scheme):
    """RoPE that only rotates by given tables, on keys cached rotated or not."""

    raw: bool = False

    @property
    def traits(self):
        return pe.Traits(relative=True, cache_transformed_keys=not self.raw)

    def tables(self, params, coordinates):
        return pe.cos_sin(coordinates, pe.rope_frequencies(8)[0])

    def query(self, params, q, coordinates, features=None, tables=None):
        tables = self.tables(params, coordinates) if tables is None else tables
        return pe.apply_rotation(q, *tables)

    def key(self, params, k, coordinates, features=None, tables=None):
        return self.query(params, k, coordinates, features, tables)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("wrap", [lambda s: s, pe.chain, lambda s: pe.chain(s, ALIBI)])
def test_tables_may_be_computed_once_for_all_calls(wrap, raw):
    scheme, same = wrap(Shared(raw)), wrap(ROPE)
    params = scheme.init(jax.random.key(0))
    positions = 3 * jnp.arange(7)
    expected, _ = attend(same, positions=positions)
    cache = new_cache(scheme)
    for rows in (positions, jnp.stack([positions, positions])):
        tables = pe.scheme_tables(scheme, params, rows)
        out, _ = attend(scheme, positions=positions, tables=tables)
        np.testing.assert_allclose(out, expected, atol=1e-5)
    for part in (slice(0, 4), slice(4, 7)):
        tables = pe.scheme_tables(scheme, params, positions[part])
        out, cache = attend(scheme, part, cache=cache, positions=positions[part], tables=tables)
        np.testing.assert_allclose(out, expected[:, part], atol=1e-5)


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
    assert all(name.removeprefix("q_") == x.removeprefix("q_") for name, x in got.items())
    with pytest.raises(TypeError, match=f"^{function.__name__}.* unexpected keyword.*'msak'"):
        function(*scheme, Q, K, V, msak=None)


def test_a_traced_flag_is_told_from_a_wrong_one():
    with pytest.raises(TypeError, match=r"is_causal must be .*under jax.jit name it in static_arg"):
        jax.jit(attend_with)(is_causal=True)
    with pytest.raises(TypeError, match=r"is_causal must be True or False, got 'yes'[.]"):
        attend(is_causal="yes")


def test_masks_with_a_cache_have_its_capacity():
    cache = new_cache(ALIBI)
    mask = jnp.ones((2, 1, 7, cache.capacity + 1), bool)
    with pytest.raises(ValueError, match=f"the capacity of the cache, {cache.capacity}, got"):
        attend(cache=cache, mask=mask)


def test_contiguous_has_no_meaning_with_a_cache():
    with pytest.raises(ValueError, match=r"contiguous has no meaning with a cache, got .*True"):
        attend(cache=new_cache(ALIBI), contiguous=True)


def has_tables(scheme):
    params = jax.eval_shape(scheme.init, jax.random.key(0))
    tables = functools.partial(pe.scheme_tables, scheme)
    return bool(jax.tree.leaves(jax.eval_shape(tables, params, np.arange(3))))


@pytest.mark.parametrize(
    "cls", [cls for cls in pe.SCHEMES.values() if has_tables(build(cls))], ids=lambda cls: cls.name
)
def test_schemes_with_tables_use_those_of_the_call(cls):
    scheme = build(cls)
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


def test_tables_of_other_coordinates_are_refused():
    for tables in (pe.scheme_tables(Shared(), {}, jnp.arange(6)), jnp.zeros((1, 7))):
        with pytest.raises(ValueError, match=r"tables must be scheme_tables of coord.*\(2, 7\)"):
            attend(Shared(), tables=tables)
    with pytest.raises(ValueError, match="tables must be scheme_tables"):
        attend(pe.NoPE(), tables=jnp.zeros(7))


@dataclasses.dataclass(frozen=True)
class Listed(pe.Scheme):
    factors: tuple = ()

    def query(self, params, q, coordinates, features=None, tables=None):
        return q


SIZES_OF_CACHE = {"batch": 2, "capacity": 8, "num_heads": 6, "num_kv_heads": 3, "head_dim": 8}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda c: attend_with(cache={}),
            TypeError,
            "scheme_attention: cache must be a KVCache, which",
        ),
        (
            lambda c: cache_of(capacity=2.5),
            TypeError,
            "new_cache: capacity must be an integer, got",
        ),
        (lambda c: cache_of(batch=2.0), TypeError, "new_cache: batch must be an integer, got 2.0"),
        (lambda c: cache_of(num_heads=0), ValueError, "new_cache: num_heads must be >= 1, got 0"),
        (lambda c: cache_of(max_rewind=1.5), TypeError, "new_cache: max_rewind must be an integer"),
        (
            lambda c: attend_with(norms=(abs,)),
            TypeError,
            "scheme_attention: norms must be two",
        ),
        (
            lambda c: attend_with(norms=abs),
            TypeError,
            "scheme_attention: norms must be two",
        ),
        (lambda c: pe.DenseBias([[1.0]]), TypeError, "DenseBias: pairs must be an array"),
        (
            lambda c: pe.attention(Q, K, V, rules=pe.LogitBias(lambda *_: 0.0, bounds=(3,))),
            ValueError,
            r"attention: LogitBias.bounds must be \(low, high\) .*, got \(3,\)",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call(cache_of())


def attend_with(**options):
    return pe.scheme_attention(ROPE, {}, Q, K, V, **options)


def cache_of(**changes):
    return pe.new_cache(ROPE, **SIZES_OF_CACHE | changes)


def test_arrays_without_a_batch_axis():
    """Options follow; [A, T] are coordinates of several axes."""
    ids, mask = np.array([0, 0, 0, 1, 1, 1, -1]), np.random.default_rng(1).random((1, 7, 7)) < 0.8
    q, k, v = Q[0], K[0], V[0]
    heads, dim = q.shape[1:]
    options = {"is_causal": True, "q_segment_ids": ids, "softcap": 2.0, "return_lse": True}
    rules, sinks = pe.ALiBi(heads).rules({}), q[..., 0]
    single = {"mask": mask, "prefix_length": 2, "sinks": sinks}
    out, lse = pe.attention(q, k, v, rules=rules, **options, **single)
    options |= {"mask": mask[None], "prefix_length": np.array([2]), "sinks": sinks[None]}
    expected = pe.attention(Q[:1], K[:1], V[:1], rules=rules, **options)
    np.testing.assert_array_equal(out, expected[0][0])
    np.testing.assert_array_equal(lse, expected[1][0])
    two = pe.AxialRoPE(head_dim=dim)
    at = np.stack([np.arange(7), np.arange(7)[::-1]])
    out, _ = pe.scheme_attention(two, {}, q, k, v, coordinates=at, segment_ids=ids)
    expected, _ = pe.scheme_attention(
        two, {}, Q[:1], K[:1], V[:1], coordinates=at[:, None], segment_ids=ids
    )
    np.testing.assert_array_equal(out, expected[0])
    x = np.ones((7, 4), np.float32)
    embedded = pe.scheme_embedding(pe.Sinusoidal(4), {}, x, positions=ids)
    np.testing.assert_array_equal(
        embedded, pe.scheme_embedding(pe.Sinusoidal(4), {}, x[None], positions=ids)[0]
    )
    rotated = pe.apply_rope(q, np.arange(7))
    np.testing.assert_array_equal(rotated, pe.apply_rope(Q, np.arange(7))[0])
    cache = pe.new_cache(pe.NoPE(), 1, 8, num_heads=heads, num_kv_heads=k.shape[1], head_dim=dim)
    with pytest.raises(ValueError, match=r"rows of a cache are a batch; give q, k and v as \[1, T"):
        pe.scheme_attention(pe.NoPE(), {}, q, k, v, cache=cache)


@pytest.mark.parametrize(
    "scheme, params, error, message",
    [
        (pe.T5(num_heads=6), {}, ValueError, r"params lack \['table'\] of T5\(num.*make them with"),
        (
            pe.T5(num_heads=6),
            {"table": jnp.zeros((6, 16))},
            ValueError,
            r"params\['table'\] must be \(6, 32\) for T5\(num_heads=6.*, got \(6, 16\)",
        ),
        (
            pe.chain(ROPE, SHAW),
            ({}, SHAW.replace(clip=SHAW.clip - 1).init(jax.random.key(0))),
            ValueError,
            r"params\[1\]\['keys'\] must be \(",
        ),
        (
            pe.T5(num_heads=6),
            None,
            ValueError,
            r"params lack \['table'\] of T5\(num.*make them with",
        ),
        (pe.RoPE, {}, TypeError, "scheme must be a Scheme, got <class .*RoPE"),
        ("rope", {}, TypeError, "scheme must be a Scheme, got 'rope'"),
        (pe.chain(ROPE, SHAW), ({}, {}), ValueError, r"params lack \[1\]\['keys'\], \[1\]\['val"),
        (Listed([1.0]), {}, TypeError, r"settings of Listed\(.*\) must be hashable; use tuples"),
    ],
    ids=[
        *("missing", "shape", "shape in a chain", "none", "class", "name"),
        *("missing in a chain", "list"),
    ],
)
def test_malformed_schemes_and_parameters_are_named(scheme, params, error, message):
    with pytest.raises(error, match=message):
        pe.scheme_attention(scheme, params, Q, K, V)
    with pytest.raises(error, match=message):
        pe.scheme_embedding(scheme, params, jnp.zeros((2, 7, 4)))


@pytest.mark.parametrize("axes", [2, 3])
def test_axes_that_a_scheme_does_not_read_are_refused(axes):
    coordinates = jnp.zeros((axes, 2, 7))
    with pytest.raises(ValueError, match=r"ALiBi.* reads coordinates of 1 axes, .*got \("):
        attend(ALIBI, coordinates=coordinates)
    with pytest.raises(ValueError, match=r"scheme_embedding: .* reads coordinates of 1 axes"):
        pe.scheme_embedding(pe.Sinusoidal(8), {}, jnp.zeros((2, 7, 8)), coordinates=coordinates)


def test_coordinates_of_cached_keys_must_be_stored():
    coordinates = 2 * jnp.arange(7)
    with pytest.raises(
        ValueError, match=r"scheme_attention: .*make it with new_cache\(\.\.\., coo"
    ):
        attend(ALIBI, cache=new_cache(), coordinates=coordinates)
    out, _ = attend(ROPE, cache=new_cache(ROPE), coordinates=coordinates)  # Rotated keys need none.
    np.testing.assert_allclose(out, attend(ROPE, coordinates=coordinates)[0], atol=1e-5)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (
            {"positions": jnp.zeros(7)},
            TypeError,
            "float32; give real numbers as coord",
        ),
        ({"positions": jnp.zeros(7, jnp.bfloat16)}, TypeError, "must be integers, got bfloat16"),
        ({"positions": jnp.zeros(7, bool)}, TypeError, "must be integers, got bool"),
        ({"positions": np.full(7, 2**31)}, ValueError, "positions must fit int32, got 2147483648"),
        (
            {"positions": jnp.arange(6)},
            ValueError,
            r"positions must be \[7\] or .*B = 2, got \(6,\)",
        ),
        ({"positions": jnp.zeros((3, 7), int)}, ValueError, r"positions must be .*got \(3, 7\)"),
        ({"positions": jnp.int32(3)}, ValueError, r"positions must be .*got \(\)"),
        ({"coordinates": jnp.zeros(7, jnp.bfloat16)}, TypeError, "coordinates must be integers or"),
        ({"coordinates": jnp.arange(6)}, ValueError, r"coordinates must be .*got \(6,\)"),
        ({"segment_ids": jnp.zeros(7)}, TypeError, "segment_ids must be integers, got float32"),
        ({"segment_ids": jnp.arange(3)}, ValueError, r"segment_ids must be .*got \(3,\)"),
        (
            {"mask": jnp.ones((2, 7), bool)},
            ValueError,
            r"got \(2, 7\); if it is .*; padding goes into seg",
        ),
    ],
    ids=str,
)
def test_errors_name_the_argument_and_what_was_given(options, error, message):
    with pytest.raises(error, match=f"attention: .*{message}"):
        attend(**options)


@pytest.mark.parametrize(
    "name, array, message",
    [
        ("q", Q[0], r"q must be \[B, T, N, H\], got shape \(7, 6, 8\)"),
        ("k", K[0], r"k must be \[B, T, K, H\], got shape \(7, 3, 8\)"),
        ("v", V[:, :5], r"v must be \[B, T, K, V\] with the B and T of q .*got \(2, 5, 3, 8\)"),
        ("x", np.zeros((7, 20)), r"x must be \[B, T, D\], got shape \(7, 20\)"),
        # It would be broadcast: all rows would get the coordinates of one.
        ("x", np.zeros((1, 7, 20)), r"x must be \[B, T, D\] with the B and T .*got \(1, 7, 20\)"),
    ],
)
def test_arrays_of_other_tokens_than_those_of_q_are_refused(name, array, message):
    arrays = {"q": Q, "k": K, "v": V, "x": np.zeros((2, 7, 20))} | {name: array}
    with pytest.raises(ValueError, match=f"scheme_attention: {message}"):
        pe.scheme_attention(pe.NoPE(), {}, **arrays)


def test_errors_of_the_embedding():
    x, waves = jnp.zeros((2, 7, 4)), pe.Sinusoidal(model_dim=4)

    def embed(x=x, **placed):
        return pe.scheme_embedding(waves, {}, x, **placed)

    with pytest.raises(ValueError, match=r"scheme_embedding: x must be \[B, T, D\].*\(4,\)"):
        embed(x[0, 0])
    with pytest.raises(ValueError, match=r"scheme_embedding: positions must be .*got \(6,\)"):
        embed(positions=jnp.arange(6))
    with pytest.raises(ValueError, match=r"scheme_embedding: coordinates must be .*got \(6,\)"):
        embed(coordinates=jnp.arange(6))
    with pytest.raises(TypeError, match="scheme_embedding: positions must be integers, got float"):
        embed(positions=jnp.zeros(7))
    with pytest.raises(ValueError, match=r"scheme_embedding: positions must be .*got \(6,\)"):
        embed(positions=jnp.arange(6), coordinates=jnp.arange(7))


def test_the_embedding_reads_coordinates_before_positions():
    x, waves = jnp.zeros((2, 7, 4)), pe.Sinusoidal(model_dim=4)
    positions = 5 + jnp.arange(7)
    for placed in (
        {"positions": positions},
        {"positions": jnp.arange(7), "coordinates": positions},
    ):
        out = pe.scheme_embedding(waves, {}, x, **placed)
        np.testing.assert_array_equal(out[1], pe.sinusoidal_encoding(positions, 4))


def content(heads=6, q_features=Q, k_features=None):
    shaw = SHAW.replace(per_head=True)
    bias, _ = shaw.rules(shaw.init(jax.random.key(0)), q_features, None)
    return dataclasses.replace(bias, heads=bias.heads[:heads], k_features=k_features)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"q": Q[0]}, ValueError, r"q must be \[B, T, N, H\], got shape \(7, 6, 8\)"),
        ({"v": V[0]}, ValueError, r"v must be \[B, S, K, V\], got shape \(7, 3, 8\)"),
        ({"q": Q.astype("i4")}, TypeError, "q must be floating point, got int32"),
        ({"k": K[..., :4]}, ValueError, "q and k differ in head dim"),
        ({"k": K[:1], "v": V[:1]}, ValueError, "q and k differ in batch size"),
        ({"v": V[:, :5]}, ValueError, "k and v differ in B, S or K"),
        ({"q": Q[:, :, :4]}, ValueError, "4 query heads are no multiple of 3 key heads"),
        (
            {"rules": pe.ALiBi(num_heads=4).rules({})},
            ValueError,
            r"LogitBias.heads must be .*\(6, .*got \(4,",
        ),
        ({"rules": ALIBI}, TypeError, r"rules must be rules .*, got ALiBi"),
        (
            {"rules": content(q_features=None)},
            ValueError,
            "a DotBias has either q_features or k_features, got neither",
        ),
        (
            {"rules": content(q_features=Q[:, :5])},
            ValueError,
            r"DotBias.q_features must be .*\(2, 7, 6\), got \(2, 5",
        ),
        (
            {"rules": content(k_features=jnp.zeros((2, 7)))},
            ValueError,
            r"DotBias.k_features must be .*got \(2, 7\)",
        ),
        (
            {"rules": content(k_features=K)},
            ValueError,
            "a DotBias has either q_features or k_features, got both",
        ),
        (
            {"rules": content(q_features=Q[..., :4])},
            ValueError,
            r"the vectors of a DotBias have shape \(8,\) per distance and \(2, 7, 6, 4\)",
        ),
        ({"rules": content(heads=4)}, ValueError, r"DotBias.heads must be .*6, .*got \(4, "),
        (
            {"rules": pe.Shaw(num_heads=4, head_dim=8).rules(SHAW.init(jax.random.key(0)), Q)[1]},
            ValueError,
            r"ValueBias.table must be \[N, R, V\] = \(6, 33, 8\), got \(4, 33, 8\)",
        ),
        ({"mask": jnp.ones((2, 1, 7, 7))}, TypeError, "mask must be bool, got float32"),
        (
            {"mask": jnp.ones((7, 7), bool)},
            ValueError,
            r"mask must be .*\(2, 6, 7, 7\), got \(7, 7",
        ),
        (
            {"mask": jnp.ones((2, 1, 1, 7), bool)},
            ValueError,
            r"mask must be .*; one row for all queries is no mask; padding goes into",
        ),
        ({"mask": [[[[True] * 7] * 7]]}, TypeError, "mask must be an array, got list"),
        ({"q": [[[[0.0] * 8] * 6] * 7] * 2}, TypeError, "q must be an array, got list"),
        ({"window": 0}, ValueError, "window must be at least 1 token, got 0"),
        ({"is_causal": "no"}, TypeError, "is_causal must be True or False, got 'no'"),
        ({"contiguous": 1}, TypeError, "contiguous must be True or False, got 1"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive, got 0.0"),
        ({"softcap": float("inf")}, ValueError, "softcap must be finite, got inf"),
        ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
        ({"dropout_rate": None}, TypeError, "dropout_rate must be a Python number"),
        (
            {"sinks": jnp.zeros(4)},
            ValueError,
            r"sinks .*\(6,\) or .*\(2, 7, 6\), got \(4,\)",
        ),
        ({"scale": jnp.float32(1)}, TypeError, "scale must be a Python number; multiply q by"),
        ({"dropout_rate": 1.0}, ValueError, r"dropout_rate must be in \[0, 1\), got 1.0"),
        ({"dropout_rate": 0.1}, ValueError, ".*together, got dropout_rate=0.1 and no dropout_key"),
        (
            {"dropout_key": jax.random.key(0)},
            ValueError,
            ".*together, got dropout_rate=0.0 and a dropout_key",
        ),
        ({"prefix_length": 3}, ValueError, r"prefix_length must be \[B\], got shape \(\)"),
        ({"prefix_length": jnp.ones(2)}, TypeError, "prefix_length must be integers, got float32"),
        ({"prefix_length": jnp.ones(3, int)}, ValueError, r"prefix_length .*\(2,\), got \(3,\)"),
        ({"q_positions": jnp.zeros(7)}, TypeError, "q_positions must be integers, got float32"),
        ({"q_positions": jnp.arange(5)}, ValueError, r"q_positions must be \[7\].*got \(5,\)"),
        ({"k_coordinates": jnp.zeros((2, 2, 5))}, ValueError, r"k_coordinates must be \[A, 2, 7\]"),
        ({"k_positions": jnp.zeros(7)}, TypeError, "k_positions must be integers, got float32"),
        (
            {"q_coordinates": jnp.zeros((3, 2, 7)), "rules": ALIBI.rules({})},
            ValueError,
            r"LogitBias.rule .* must return one number for coordinates of 3 axes, got shape \(3,",
        ),
        (
            {"rules": dataclasses.replace(ALIBI.rules({}), relative=True, bounds=(3, 0))},
            ValueError,
            r"LogitBias.bounds must be \(low, high\) with low <= high, got \(3, 0\)",
        ),
        (
            {"rules": pe.ValueBias(lambda q, k: q.astype("f4"), jnp.zeros((6, 1, 8)))},
            ValueError,
            "ValueBias.bucket must return an integer, got float32",
        ),
        ({"q_segment_ids": jnp.zeros(7)}, TypeError, "q_segment_ids must be integers, got float32"),
        (
            {"implementation": "fast"},
            ValueError,
            "implementation must be .* one of .*'fast'",
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_attention_refuses(options, error, message):
    with pytest.raises(error, match=f"attention: {message}"):
        pe.attention(**{"q": Q, "k": K, "v": V} | options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"q_positions": jnp.arange(3)}, "positions were given for q only"),
        ({"k_positions": jnp.arange(7)}, "positions were given for k only"),
        ({"k_coordinates": jnp.arange(7)}, "coordinates were given for k only"),
        ({"is_causal": True}, "3 queries and 7 keys need q_positions and k_positions"),
        ({"window": 3}, "3 queries and 7 keys need q_positions and k_positions"),
        ({"rules": ALIBI.rules({})}, "3 queries and 7 keys need q_positions and k_positions"),
        ({"q_segment_ids": jnp.zeros(3, int)}, "q_segment_ids and k_segment_ids go together"),
        (
            {"q_positions": jnp.arange(3), "k_positions": jnp.arange(7)}
            | {"is_causal": True, "contiguous": True},
            "contiguous=True needs as many queries as keys, got 3 and 7",
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_fewer_queries_than_keys_need_positions(options, message):
    with pytest.raises(ValueError, match=f"attention: {message}"):
        pe.attention(Q[:, :3], K, V, **options)


@pytest.mark.parametrize(
    "numpy, python",
    [
        ({"window": np.int64(3)}, {"window": 3}),
        ({"window": (np.int64(4), 2)}, {"window": (4, 2)}),
        ({"scale": np.float32(0.5)}, {"scale": 0.5}),
        ({"softcap": np.float32(2)}, {"softcap": 2}),
        ({"sinks": [0.0] * 6}, {"sinks": jnp.zeros(6)}),
    ],
    ids=str,
)
def test_numbers_of_numpy_are_those_of_python(numpy, python):
    """Static numbers are parts of a jitted function's cache key, which must compare them."""
    outs = [pe.attention(Q, K, V, window=(5, 2))]
    outs += [pe.attention(Q, K, V, **options) for options in (numpy, python, numpy)]
    np.testing.assert_array_equal(outs[1], outs[2])


def test_cross_attention_needs_no_positions():
    assert pe.attention(Q[:, :3], K, V).shape == (2, 3, 6, 8)


def test_padding_takes_no_slot_of_a_ring():
    """A right-padded prompt, then chunks as long as the room of the ring."""
    q, k, v = qkv(batch=2, length=14)
    cache = new_cache(pe.NoPE(), 11, ring=True)
    real = (jnp.arange(14)[None] < jnp.array([[3], [8]])) | (jnp.arange(14)[None] >= 8)
    positions, segments = from_padding_mask(real)
    options = {"is_causal": True, "window": 4}
    placed = {"positions": positions, "segment_ids": segments}
    whole, _ = jax.jit(lambda *a: pe.scheme_attention(pe.NoPE(), {}, *a, **placed, **options))(
        q, k, v
    )

    @jax.jit
    def step(cache, placed, *arrays):
        return pe.scheme_attention(pe.NoPE(), {}, *arrays, cache=cache, **placed, **options)

    for part in (slice(0, 8), slice(8, 14)):
        here = {name: x[:, part] for name, x in placed.items()}
        out, cache = step(cache, here, *(a[:, part] for a in (q, k, v)))
        np.testing.assert_allclose(out, whole[:, part], atol=1e-5)
    np.testing.assert_array_equal(cache.length, [9, 14])


@pytest.mark.parametrize(
    "segments, positions",
    [
        ([0, 0, 1, 1, 1, 0], [0, 1, 0, 1, 2, 2]),  # The first sequence goes on after the second.
        ([0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 3, 4]),
    ],
)
def test_tokens_out_of_order_in_a_ring_are_nan(segments, positions):
    q, k, v = (a[:, :6] for a in qkv(batch=2, length=14))
    segments = jnp.array([segments, [0] * 6])
    positions = jnp.array([positions, [*range(6)]])

    @jax.jit
    def step(cache, positions, segments, *arrays):
        placed = {"positions": positions, "segment_ids": segments}
        return pe.scheme_attention(
            pe.NoPE(), {}, *arrays, cache=cache, is_causal=True, window=3, **placed
        )

    cache, outs = new_cache(pe.NoPE(), 4, ring=True), []
    for t in range(0, 6, 2):
        arrays = (a[:, t : t + 2] for a in (positions, segments, q, k, v))
        out, cache = step(cache, *arrays)
        outs.append(np.isnan(np.asarray(out)).any((2, 3)))
    lost = np.concatenate(outs, 1)
    np.testing.assert_array_equal(lost[0], [False] * 4 + [True] * 2)
    assert not lost[1].any()


def test_a_cache_of_another_scheme_is_refused():
    rope = pe.RoPE(head_dim=8)
    with pytest.raises(ValueError, match=r"cache was made for RoPE.*and the scheme is ALiBi"):
        attend(cache=pe.new_cache(rope, 2, 9, num_heads=6, num_kv_heads=3, head_dim=8))
