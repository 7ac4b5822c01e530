"""What every scheme keeps, whatever it does. Schemes come from the export list.

`forward` is a small model: embedding, then one attention. A scheme that acts on neither
passes most of these as NoPE does, which is what it should do.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import BATCH, KV_HEADS, LENGTH, SIZES, build, make_batch

import posenc_jax as pe
from posenc_jax import positions as at

IMPLEMENTATIONS = ["reference", "xla"]


def forward(scheme, params, tokens, *, cache=None, mixer=None, **options):
    """Embedding, attention of what it became, and the cache.

    Queries, keys and values move with the embedding, so that schemes which act there are
    seen by the tests below.
    """
    where = {name: options.get(name) for name in ("positions", "coordinates")}
    if cache is not None and where["positions"] is None:
        where["positions"] = at.count_up(*tokens.x.shape[:2], cache.next_positions)
        options = options | {"positions": where["positions"]}
    x = pe.scheme_embedding(scheme, params, tokens.x, **where)

    def moved(y):
        heads, dim = y.shape[2:]
        wide = jnp.tile(x, 1 + heads * dim // x.shape[-1])[..., : heads * dim]
        return y + wide.reshape(y.shape).astype(y.dtype)

    q, k, v = map(moved, (tokens.q, tokens.k, tokens.v))
    options = {"is_causal": True} | options
    return pe.scheme_attention(scheme, params, q, k, v, x=x, cache=cache, **options)


def output(scheme, params, tokens, **options):
    return forward(scheme, params, tokens, **options)[0]


def empty_cache(scheme, batch=BATCH, capacity=LENGTH + 5, **options):
    return pe.new_cache(
        scheme,
        batch,
        capacity,
        num_heads=SIZES["num_heads"],
        num_kv_heads=KV_HEADS,
        head_dim=SIZES["head_dim"],
        model_dim=SIZES["model_dim"],
        **options,
    )


def decode(scheme, params, tokens, chunks, cache, **options):
    """Runs chunks of tokens through a cache; `options` are split along the token axis."""
    outs, start = [], 0
    for size in chunks:
        part = slice(start, start + size)
        here = {
            name: value[:, part] if name in ("positions", "segment_ids") else value
            for name, value in options.items()
        }
        out, cache = forward(scheme, params, tokens[:, part], cache=cache, **here)
        outs.append(out)
        start += size
    return jnp.concatenate(outs, 1), cache


def close(a, b, tolerance=2e-5):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def test_initialisation_is_deterministic_and_float32(scheme):
    a, b = (scheme.init(jax.random.key(3)) for _ in range(2))
    chex.assert_trees_all_equal(a, b)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(a))


def test_is_hashable_equal_by_value_and_prints_itself(scheme):
    twin = dataclasses.replace(scheme)
    assert twin == scheme
    assert hash(twin) == hash(scheme)
    assert type(scheme).__name__ in repr(scheme)


def test_jit_equals_eager(scheme, params, tokens):
    jitted = jax.jit(functools.partial(output, scheme))
    close(jitted(params, tokens), output(scheme, params, tokens), 1e-5)


def test_vmap_over_the_batch(scheme, params, tokens):
    one = jax.vmap(lambda t: output(scheme, params, t.map(lambda a: a[None]))[0])
    close(one(tokens), output(scheme, params, tokens), 1e-5)


def test_bfloat16_in_bfloat16_out_near_float32(scheme, params, tokens):
    half = tokens.map(lambda a: a.astype(jnp.bfloat16))
    out = output(scheme, params, half)
    assert out.dtype == jnp.bfloat16
    exact = output(scheme, params, half.map(lambda a: a.astype(jnp.float32)))
    close(out.astype(jnp.float32), exact, 0.1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_learned_leaf_has_a_gradient(scheme, params, tokens, implementation):
    weights = jax.random.normal(jax.random.key(1), tokens.q.shape)

    def loss(params):
        return (output(scheme, params, tokens, implementation=implementation) * weights).sum()

    for path, leaf in jax.tree.leaves_with_path(jax.grad(loss)(params)):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 1e-4, path


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_future_has_exactly_no_influence(scheme, params, tokens, implementation):
    def early(tokens):
        out = output(scheme, params, tokens, implementation=implementation)
        return (out[:, :10] ** 2).sum()

    for leaf in jax.tree.leaves(jax.grad(early)(tokens)):
        assert np.all(np.asarray(leaf)[:, 10:] == 0)
        assert np.abs(leaf[:, :10]).max() > 0


@pytest.mark.skip(reason='implementation="pallas" needs kernels for accelerators: not written')
def test_kernels_agree_with_the_reference(scheme, params, tokens):
    outs = [output(scheme, params, tokens, implementation=i) for i in ("reference", "pallas")]
    close(outs[1], outs[0], 1e-5)


@pytest.mark.parametrize("options", [{}, {"is_causal": False}, {"window": 5}], ids=str)
def test_implementations_agree(scheme, params, tokens, options):
    outs = [output(scheme, params, tokens, implementation=i, **options) for i in IMPLEMENTATIONS]
    close(outs[1], outs[0], 1e-5)


@pytest.mark.parametrize(
    "chunks", [[LENGTH - 4, 1, 1, 1, 1], [7, 5, 6, 1], [1] * LENGTH], ids=["steps", "chunks", "all"]
)
def test_prompt_then_steps_equal_the_whole(scheme, params, tokens, chunks):
    out, _ = decode(scheme, params, tokens, chunks, empty_cache(scheme))
    close(out, output(scheme, params, tokens))


def test_decode_traces_once(scheme, params, tokens):
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, tokens, cache):
        return forward(scheme, params, tokens, cache=cache)

    cache = empty_cache(scheme)
    outs = []
    for t in range(6):
        out, cache = step(params, tokens[:, t : t + 1], cache)
        outs.append(out)
    close(jnp.concatenate(outs, 1), output(scheme, params, tokens[:, :6]))


def test_rows_padded_on_the_left_equal_rows_alone(scheme, params, tokens):
    pads = jnp.array([0, 6])
    mask = jnp.arange(LENGTH)[None] >= pads[:, None]
    positions, segments = at.from_padding_mask(mask)
    where = {"positions": positions, "segment_ids": segments}
    whole = output(scheme, params, tokens, **where)
    chunked, _ = decode(scheme, params, tokens, [10, 5, 4], empty_cache(scheme), **where)
    for row, pad in enumerate([0, 6]):
        alone = output(scheme, params, tokens[row : row + 1, pad:])
        close(whole[row, pad:], alone[0])
        close(chunked[row, pad:], alone[0])
    assert np.all(np.asarray(whole)[1, :6] == 0)


def test_decoding_goes_on_after_left_padding(scheme, params, tokens):
    positions, segments = at.from_padding_mask(jnp.arange(12)[None] >= jnp.array([[0], [4]]))
    _, cache = forward(
        scheme,
        params,
        tokens[:, :12],
        cache=empty_cache(scheme),
        positions=positions,
        segment_ids=segments,
    )
    out, _ = forward(scheme, params, tokens[:, 12:13], cache=cache)  # Positions 12 and 8.
    for row, pad in enumerate([0, 4]):
        alone = output(scheme, params, tokens[row : row + 1, pad:13])
        close(out[row, 0], alone[0, -1])


def test_packed_segments_equal_sequences_alone(scheme, params, tokens):
    segments = jnp.asarray([[0] * 8 + [1] * 11] * BATCH)
    positions = at.from_segment_ids(segments)
    for contiguous in (True, False):
        out = output(
            scheme,
            params,
            tokens,
            positions=positions,
            segment_ids=segments,
            **({"contiguous": True} if contiguous else {}),
        )
        for part in (slice(0, 8), slice(8, LENGTH)):
            close(out[:, part], output(scheme, params, tokens[:, part]))


def test_right_padded_prompts_decode_as_rows_alone(scheme, params, tokens):
    lengths = np.array([9, 6])
    mask = jnp.arange(9)[None] < lengths[:, None]
    positions, segments = at.from_padding_mask(mask)
    _, cache = forward(
        scheme,
        params,
        tokens[:, :9],
        cache=empty_cache(scheme),
        positions=positions,
        segment_ids=segments,
    )
    out, _ = forward(scheme, params, tokens[:, 9:10], cache=cache)
    for row, n in enumerate(lengths):
        alone = make_row(tokens, row, [*range(n), 9])
        close(out[row, 0], output(scheme, params, alone)[0, -1])


def make_row(tokens, row, slots):
    return tokens.map(lambda a: a[row : row + 1, np.array(slots)])


@pytest.mark.parametrize("chunk", [1, 3])
def test_ring_buffer_of_a_window(scheme, params, tokens, chunk):
    window = 4
    cache = empty_cache(scheme, capacity=window - 1 + chunk, ring=True)
    chunks = [chunk] * (18 // chunk)
    out, _ = decode(scheme, params, tokens[:, :18], chunks, cache, window=window)
    close(out, output(scheme, params, tokens[:, :18], window=window))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_in_any_order_give_the_same_output(scheme, params, tokens, implementation):
    order = jax.random.permutation(jax.random.key(5), LENGTH)
    positions = at.count_up(BATCH, LENGTH)
    # Running sums follow the order of tokens, so `side` sees them before the shuffle.
    rows, cols, _ = scheme.side(params, tokens.x, tokens.q, tokens.k, positions, None)
    q = scheme.query(params, tokens.q, positions, rows)
    k = scheme.key(params, tokens.k, positions, cols)

    def attend(pick):
        rows_, cols_ = jax.tree.map(lambda a: a[:, pick], (rows, cols))
        return pe.attention(
            q[:, pick],
            k[:, pick],
            tokens.v[:, pick],
            bias=scheme.bias(params),
            content=scheme.content(params, rows_, cols_),
            value_bias=scheme.value(params),
            q_positions=positions[:, pick],
            k_positions=positions[:, pick],
            is_causal=True,
            implementation=implementation,
        )

    close(attend(order), attend(jnp.arange(LENGTH))[:, order], 1e-5)


def test_moving_all_positions_changes_nothing_where_claimed(scheme, params, tokens):
    if not scheme.relative:
        pytest.skip("the scheme is not relative")
    here = output(scheme, params, tokens)
    for shift in (1, 257, 1_000_000):
        close(output(scheme, params, tokens, positions=at.count_up(BATCH, LENGTH, shift)), here)


def test_coordinates_are_what_the_scheme_reads(scheme, params, tokens):
    coordinates = 2 * at.count_up(BATCH, LENGTH)
    moved = output(scheme, params, tokens, coordinates=coordinates)
    here = output(scheme, params, tokens)
    if scheme.acts_on:
        assert np.abs(moved - here).max() > 1e-4
    else:
        close(moved, here, 0)


def test_coordinates_travel_with_the_cache(scheme, params, tokens):
    coordinates = 3 * at.count_up(BATCH, LENGTH)
    cache = empty_cache(scheme, coordinates=coordinates)
    outs = []
    for part in (slice(0, 12), slice(12, 18), slice(18, 19)):
        out, cache = forward(
            scheme, params, tokens[:, part], cache=cache, coordinates=coordinates[:, part]
        )
        outs.append(out)
    whole = output(scheme, params, tokens, coordinates=coordinates)
    close(jnp.concatenate(outs, 1), whole)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_that_see_nothing_are_zero_and_harmless(scheme, params, tokens, implementation):
    segments = jnp.where(jnp.arange(LENGTH)[None] < jnp.array([[4], [0]]), -1, 0)

    def loss(tokens):
        out = output(scheme, params, tokens, segment_ids=segments, implementation=implementation)
        return (out**2).sum(), out

    (_, out), grads = jax.value_and_grad(loss, has_aux=True)(tokens)
    assert np.all(np.asarray(out)[0, :4] == 0)
    chex.assert_tree_all_finite(grads)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_garbage_in_padding_stays_there(scheme, params, tokens, implementation):
    segments = jnp.where(jnp.arange(LENGTH)[None] < jnp.array([[4], [0]]), -1, 0)
    bad = tokens.map(lambda a: a.at[0, :4].set(jnp.nan))
    options = {"segment_ids": segments, "implementation": implementation}
    good = output(scheme, params, tokens, **options)
    close(output(scheme, params, bad, **options)[0, 4:], good[0, 4:], 1e-6)
    close(output(scheme, params, bad, **options)[1], good[1], 1e-6)


def test_a_nan_in_one_row_stays_in_that_row(scheme, params, tokens):
    bad = tokens.map(lambda a: a.at[0].set(jnp.nan))
    out = output(scheme, params, bad)
    assert np.isnan(out[0]).any()
    close(out[1], output(scheme, params, tokens)[1], 1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shards_over_eight_devices_to_the_same_numbers(scheme, params, kind):
    tokens = make_batch(batch=8)
    whole = output(scheme, params, tokens)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        spread = NamedSharding(mesh, PartitionSpec("data"))
        run = jax.jit(functools.partial(output, scheme))
        out = run(params, jax.device_put(tokens, spread))
    assert out.sharding.spec[0] == "data"
    close(out, whole, 1e-5)


def test_a_second_call_does_not_retrace(scheme, params, tokens):
    @functools.partial(jax.jit, static_argnums=0)
    @chex.assert_max_traces(n=1)
    def run(scheme, params, tokens, positions):
        return output(scheme, params, tokens, positions=positions)

    for shift in (0, 5):
        run(dataclasses.replace(scheme), params, tokens, at.count_up(BATCH, LENGTH, shift))


def test_remat_and_scan_over_layers(scheme, tokens):
    stacked = jax.vmap(scheme.init)(jax.random.split(jax.random.key(0), 3))

    def layer(x, params):
        moved = dataclasses.replace(tokens, q=tokens.q + x)
        return x + output(scheme, params, moved), None

    def deep(x, layer):
        return jax.lax.scan(layer, x, stacked, length=3)[0]

    zero = jnp.zeros_like(tokens.q)
    plain, again = (
        jax.jit(jax.value_and_grad(lambda x, f=f: (deep(x, f) ** 2).sum()))(zero)
        for f in (layer, jax.checkpoint(layer))
    )
    chex.assert_trees_all_close(plain, again, rtol=1e-4, atol=1e-4)


def test_every_documented_option_exists_and_the_paper_is_cited(scheme):
    import sys

    text = type(scheme).__doc__
    for field in dataclasses.fields(scheme):
        assert f"{field.name}:" in text, field.name
    assert "https://arxiv.org/abs/" in sys.modules[type(scheme).__module__].__doc__


def test_unknown_settings_are_refused(scheme):
    with pytest.raises(TypeError):
        build(type(scheme), wavelength_of_nothing=3)
