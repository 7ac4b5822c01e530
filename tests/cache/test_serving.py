"""Rows of a cache that start, end, move and rewind independently, against lists of tokens."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import posenc_jax as pe
from posenc_jax import nnx, testing
from tests.makers import serving
from tests.support import TESTS, layer_of, slow, slow_but

ROWS, CHUNK, CAPACITY, DIM = 3, 3, 12, 8
LONGEST = CAPACITY + 2 * CHUNK  # Tokens of the whole forward pass that outputs are compared with.
WINDOW, SINKS, BACK = 4, 2, 4
VOCABULARY = np.random.default_rng(0).normal(size=(64, DIM)).astype(np.float32)
SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "model_dim": DIM}
# Rotated keys, arrays per key, running sums, and the last inputs of convolutions.
SUMS = pe.chain(
    pe.contrib.ShortConv(num_heads=2, num_kv_heads=1, head_dim=4),
    pe.RoPE(head_dim=4),
    pe.FoX(num_heads=2, model_dim=DIM),
)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A scheme, a kind of cache, and how many tokens it can take back."""

    scheme: pe.Scheme
    ring: bool
    back: int

    @property
    def window(self):
        return WINDOW if self.ring else None

    @property
    def sinks(self):
        return self.scheme.traits.num_sink_tokens

    def empty(self, batch=ROWS):
        # A ring with room to take back `BACK` tokens.
        capacity = self.sinks + WINDOW - 1 + max(CHUNK, BACK) if self.ring else CAPACITY
        options = {"ring": self.ring, "max_rewind": self.back}
        return pe.new_cache(self.scheme, batch, capacity, **SIZES, **options)


POLICIES = {
    "full": Policy(pe.FoX(num_heads=2, model_dim=DIM), False, BACK),
    "ring": Policy(SUMS, True, BACK),
    "sinks": Policy(pe.streaming(pe.RoPE(head_dim=4), SINKS), True, 0),
}


@functools.cache
def parameters(scheme):
    with jax.ensure_compile_time_eval():
        return scheme.init(jax.random.key(1))


@functools.cache
def weights():
    numbers = np.random.default_rng(1)
    return [numbers.normal(size=(DIM, n, 4)).astype(np.float32) / 3 for n in (2, 1, 1)]


def attend(policy, tokens, segment_ids, cache=None):
    """Attention over tokens [B, T] that are indices of the vocabulary."""
    x = jnp.asarray(VOCABULARY)[tokens]
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in weights())
    options = {"is_causal": True, "window": policy.window, "x": x, "implementation": "reference"}
    options |= {"segment_ids": segment_ids, "cache": cache}  # Padding anywhere in a chunk.
    return pe.scheme_attention(policy.scheme, parameters(policy.scheme), q, k, v, **options)


whole = testing.jit_fast(lambda policy, *rows: attend(policy, *rows)[0], static_argnums=0)
append = testing.jit_fast(attend, static_argnums=0)
empty = testing.jit_fast(lambda policy: policy.empty(), static_argnums=0)
take, insert, reset, rewind = (
    testing.jit_fast(getattr(pe.KVCache, name)) for name in ("take", "insert", "reset", "rewind")
)


class Row:
    """The expected contents of one row, as a list."""

    def __init__(self, tokens=(), written=0, back=0, lost=False):
        self.tokens, self.written, self.back, self.lost = list(tokens), written, back, lost

    def copy(self):
        return Row(self.tokens, self.written, self.back, self.lost)

    def append(self, tokens, policy, capacity):
        start = len(self.tokens)
        self.tokens += tokens
        self.back = min(self.back + len(tokens), policy.back)
        self.written = max(self.written, len(self.tokens))
        if policy.ring and tokens:
            overwritten = range(policy.sinks, self.first(policy, capacity))
            self.lost |= any(i > start - WINDOW for i in overwritten)

    def first(self, policy, capacity):
        """The first token after the sinks that a ring has not overwritten."""
        return self.written - capacity + policy.sinks

    def rewind(self, count, policy):
        limit = self.back if policy.back else len(self.tokens)
        if count > limit:
            self.lost = True
            return
        del self.tokens[len(self.tokens) - count :]
        self.back = max(self.back - count, 0)

    def is_lost(self, policy):
        return self.lost or (not policy.ring and len(self.tokens) > CAPACITY)


def padded(rows):
    tokens, segments = np.zeros((ROWS, LONGEST), np.int32), np.full((ROWS, LONGEST), -1, np.int32)
    for row, (numbers, ids) in enumerate(zip(rows, segments, strict=True)):
        tokens[row, : len(numbers)] = numbers
        ids[: len(numbers)] = 0
    return tokens, segments


token = st.integers(0, len(VOCABULARY) - 1)
chunk = st.lists(st.one_of(token, st.just(-1)), min_size=CHUNK, max_size=CHUNK)
operation = st.one_of(
    st.tuples(st.just("append"), st.lists(chunk, min_size=ROWS, max_size=ROWS)),
    st.tuples(st.just("append"), st.lists(chunk, min_size=ROWS, max_size=ROWS)),
    st.tuples(st.just("take"), st.lists(st.integers(0, ROWS - 1), min_size=ROWS, max_size=ROWS)),
    st.tuples(st.just("insert"), st.tuples(st.integers(0, ROWS - 1), chunk)),
    st.tuples(st.just("reset"), st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)),
    st.tuples(st.just("rewind"), st.lists(st.integers(0, BACK), min_size=ROWS, max_size=ROWS)),
)


@pytest.mark.parametrize("name", slow_but(POLICIES, "full"))
@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(operations=st.lists(operation, min_size=4, max_size=14))
def test_rows_equal_the_whole_forward_pass_of_lists(name, operations):
    """Appended, reordered, freed, reused and taken back at random; 1e-5."""
    policy = POLICIES[name]
    cache, rows = empty(policy), [Row() for _ in range(ROWS)]
    capacity = cache.capacity
    for method, value in operations:
        if method == "append":
            numbers = np.array(value, np.int32)
            out, cache = append(policy, np.maximum(numbers, 0), np.minimum(numbers, 0), cache)
            for row, new in zip(rows, value, strict=True):
                if len(row.tokens) > LONGEST - CHUNK:
                    return
                row.append([n for n in new if n >= 0], policy, capacity)
            out, expected = map(np.asarray, (out, whole(policy, *padded([r.tokens for r in rows]))))
            for i, (row, new) in enumerate(zip(rows, value, strict=True)):
                real = [n >= 0 for n in new]
                whole_row = expected[i, len(row.tokens) - sum(real) : len(row.tokens)]
                if row.is_lost(policy):
                    assert np.isnan(out[i]).all()
                else:
                    np.testing.assert_allclose(out[i][np.array(real)], whole_row, rtol=0, atol=1e-5)
        elif method == "take":
            cache, rows = take(cache, np.array(value)), [rows[i].copy() for i in value]
        elif method == "insert":
            row, new = value
            numbers = np.array([new] * ROWS, np.int32)
            prompt = np.maximum(numbers, 0), np.minimum(numbers, 0), empty(policy)
            prompt = take(append(policy, *prompt)[1], np.array([0]))
            cache, rows[row] = insert(cache, row, prompt), Row()
            rows[row].append([n for n in new if n >= 0], policy, capacity)
        elif method == "reset":
            cache = reset(cache, np.array(value))
            rows = [Row() if freed else row for row, freed in zip(rows, value, strict=True)]
        else:
            cache = rewind(cache, np.array(value))
            for row, count in zip(rows, value, strict=True):
                row.rewind(count, policy)
        np.testing.assert_array_equal(cache.length, [len(row.tokens) for row in rows])
        # The position of a row is known while the cache holds its last token.
        beyond = [
            policy.sinks < len(r.tokens) <= r.first(policy, capacity)
            if policy.ring
            else r.is_lost(policy)
            for r in rows
        ]
        np.testing.assert_array_equal(
            np.where(beyond, cache.length, cache.next_positions), cache.length
        )
        np.testing.assert_array_equal(cache.overflowed, [row.is_lost(policy) for row in rows])


def buffers(cache):
    """Shapes of the arrays that grow with the number of slots, as compiled programs print them."""
    arrays = cache.k, cache.v, cache.positions, cache.coordinates, cache.k_features
    return {str(list(x.shape)).replace(" ", "") for x in jax.tree.leaves(arrays)}


@slow
@pytest.mark.parametrize("kind", [{}, {"ring": True}], ids=str)
def test_a_donated_cache_is_written_in_place(kind):
    """No array with all slots is copied, and appending takes the same memory for any S."""
    fox = pe.FoX(num_heads=2, model_dim=DIM)
    x, coordinates = jnp.zeros((ROWS, 3, DIM)), jnp.zeros((ROWS, 3), jnp.int32)

    def step(cache):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in weights())
        options = {"is_causal": True, "window": 4, "cache": cache, "coordinates": coordinates}
        return pe.scheme_attention(fox, parameters(fox), q, k, v, x=x, **options)

    def append(cache):
        return step(cache)[1]

    def compiled(function, capacity, **donated):
        options = {"max_rewind": 2, "coordinates": coordinates, **kind}
        cache = jax.eval_shape(lambda: pe.new_cache(fox, ROWS, capacity, **SIZES, **options))
        program = jax.jit(function, **donated).lower(cache).compile()
        shapes = (re.escape(shape) for shape in buffers(cache))
        return program, re.search(rf"({'|'.join(shapes)})\S* copy\(", program.as_text())

    if not kind:  # Without donation the old cache has to be copied.
        assert compiled(append, 315)[1]
    assert not compiled(step, 315, donate_argnums=0)[1]
    sizes = []
    for capacity in (315, 1260):
        program, copied = compiled(append, capacity, donate_argnums=0)
        assert not copied
        sizes.append(program.memory_analysis().temp_size_in_bytes)
    assert sizes[0] == sizes[1]


def test_one_token_of_one_row_is_written_in_place():
    """XLA makes another operation of this write, and would fuse it into attention once more."""
    cache = jax.eval_shape(lambda: pe.new_cache(pe.NoPE(), 1, 315, **SIZES))
    x = jnp.zeros((1, 1, SIZES["num_heads"], SIZES["head_dim"]))

    def step(cache):
        kv = x[:, :, : cache.k.shape[2]]
        return pe.scheme_attention(pe.NoPE(), {}, x, kv, kv, is_causal=True, cache=cache)

    program = jax.jit(step, donate_argnums=0).lower(cache).compile()
    shape = re.escape(str(list(cache.k.shape)).replace(" ", ""))
    assert not re.search(rf"{shape}\S* copy\(", program.as_text())


@slow
@pytest.mark.parametrize("committed", [False, True])
def test_counts_stay_where_they_are_beside_keys_on_automatic_axes(committed):
    """Outside of jit too: a step compiled with the shardings of a new cache takes its prompt's."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    of = functools.partial(jax.sharding.NamedSharding, mesh)
    cache = pe.new_cache(pe.RoPE(head_dim=4), 2, 5, num_heads=2, head_dim=4)
    where = jax.tree.map(lambda x: of(P("data", None, "tensor") if x.ndim == 4 else P()), cache)
    cache = jax.device_put(cache, where) if committed else cache
    x = jax.device_put(np.ones((2, 4, 2, 4), "f4"), where.k)

    def step(cache, x):
        return pe.scheme_attention(pe.RoPE(head_dim=4), {}, x, x, x, cache=cache, is_causal=True)

    _, prompt = step(cache, x[:, :3])
    for name in ("length", "positions", "next_positions", "segment_ids"):
        assert getattr(prompt, name).sharding == getattr(cache, name).sharding
    _, after = jax.jit(step, in_shardings=(where, where.k))(prompt, x[:, 3:])
    assert after.length.tolist() == [4, 4]


@slow
def test_rows_on_explicit_axes_stay_where_they_are():
    """tests/modules/test_mesh.py has the numbers of layers on such axes."""
    scheme = pe.FoX(num_heads=4, model_dim=DIM)
    layer = layer_of(lambda rngs: nnx.Attention(DIM, 4, position=scheme, rngs=rngs))
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    of_qkv, of_x = P("data", None, "tensor", None), P("data", None, None)
    with jax.set_mesh(mesh):

        @jax.jit
        def caches():
            options = {"qkv_sharding": P(None, None, "tensor"), "max_rewind": 2}
            prompt = layer.new_cache(1, 6, **options)
            options["qkv_sharding"] = of_qkv
            return layer.new_cache(4, 8, **options), prompt, layer.new_cache(4, 8)

        cache, prompt, replicated = caches()
        for name, *arguments in (("reset", np.array([1, 0])), ("insert", 3, prompt)):
            program = testing.jit_fast(getattr(pe.KVCache, name)).lower(cache, *arguments).compile()
            new, text = program(cache, *arguments), program.as_text()
            assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, cache)
            assert not re.search(r"all-|collective-|reduce-scatter", text)
        options = {"out_sharding": of_x, "qkv_sharding": of_qkv, "cache": replicated}
        x = jax.device_put(np.ones((4, 3, DIM), np.float32), of_x)
        with pytest.raises(ValueError, match=r"k is sharded as .*'data'.*new_cache\(..., qkv_shar"):
            layer(x, **options)


def test_learned_positions_on_explicit_axes():
    """Positions of a cache and of a padded batch, with rows over four devices."""
    x = jnp.ones((4, 3, 8))
    encoding = layer_of(lambda rngs: nnx.PositionEncoding(pe.LearnedAbsolute(9, 8), rngs=rngs))
    layer = layer_of(lambda rngs: nnx.Attention(8, 2, is_causal=True, rngs=rngs))
    positions = np.arange(3, dtype=np.int32)[None] + np.arange(4, dtype=np.int32)[:, None]
    want = np.asarray(encoding.values()["table"])[np.asarray(positions)] + np.asarray(x)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))):
        x, positions = (jax.device_put(y, P("data")) for y in (x, positions))

        @jax.jit
        def run(x, positions):
            cache = layer.new_cache(4, 9, qkv_sharding=P("data", None, None, None))
            return encoding(x, positions=positions), encoding(x, cache=cache)

        out, first = run(x, positions)
    assert jax.typeof(out) == jax.typeof(first) == jax.typeof(x)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(first, np.broadcast_to(want[:1], want.shape))


def test_situations_of_a_server():
    """Some cells of docs/decoding.csv, which tests/makers/serving.py measures."""
    situations = "chunks of 64", "rows reused"
    errors = serving.measure(serving.scheme_of("t5"), "sinks", situations)
    assert max(errors.values()) < 1e-5, errors


def test_the_documentation_has_every_scheme():
    table = serving.table()
    assert list(table) == list(pe.SCHEMES), "run tests.makers serving"
    most = {}
    for name, cells in table.items():
        try:
            pe.streaming(serving.scheme_of(name), 2)
        except ValueError:
            assert cells.pop(2) == "raises"
        most[name] = max(cells, key=float)
    first, second, third = sorted(most, key=lambda name: -float(most[name]))[:3]
    words = f"{most[first]} (`{first}`; {most[second]} for `{second}`, {most[third]} or less"
    assert words in " ".join((TESTS.parent / "docs" / "serving.md").read_text().split())
    assert float(most[first]) <= 1e-5
