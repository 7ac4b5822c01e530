"""What every scheme keeps, whatever it does. Schemes come from the export list.

`output` is that of a small model: embedding, then one attention. A scheme that acts on
neither passes most of these as NoPE does, which is what it should do.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import (
    BATCH,
    LENGTH,
    SIZES,
    build,
    close,
    forward,
    make_batch,
    outcome,
    output,
    programs,
)

import posenc_jax as pe
from posenc_jax import positions as at

IMPLEMENTATIONS = ["reference", "xla"]
WEIGHTS = jax.random.normal(
    jax.random.key(1), (BATCH, LENGTH, SIZES["num_heads"], SIZES["head_dim"])
)
ONE_SEGMENT = jnp.zeros((BATCH, LENGTH), jnp.int32)
PADDED = jnp.where(jnp.arange(LENGTH)[None] < jnp.array([[4], [0]]), -1, 0)


def test_initialisation_is_deterministic_and_float32(scheme):
    a, b = (jax.jit(scheme.init)(jax.random.key(3)) for _ in range(2))
    chex.assert_trees_all_equal(a, b)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(a))


def test_is_hashable_equal_by_value_and_prints_itself(scheme):
    twin = dataclasses.replace(scheme)
    assert twin == scheme
    assert hash(twin) == hash(scheme)
    assert type(scheme).__name__ in repr(scheme)


def test_jit_equals_eager(scheme, params, tokens):
    eager, _ = forward(scheme, params, tokens)
    close(output(scheme, params, tokens), eager, 1e-5)


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
    _, gradients, _ = outcome(scheme, implementation, params, tokens, WEIGHTS, ONE_SEGMENT)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 1e-4, path


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_future_has_exactly_no_influence(scheme, params, tokens, implementation):
    early = WEIGHTS.at[:, 10:].set(0)
    _, _, gradients = outcome(scheme, implementation, params, tokens, early, ONE_SEGMENT)
    for leaf in jax.tree.leaves(gradients):
        assert np.all(np.asarray(leaf)[:, 10:] == 0)
        assert np.abs(leaf[:, :10]).max() > 0


@pytest.mark.skip(reason='implementation="pallas" needs kernels for accelerators: not written')
def test_kernels_agree_with_the_reference(scheme, params, tokens):
    outs = [output(scheme, params, tokens, implementation=i) for i in ("reference", "pallas")]
    close(outs[1], outs[0], 1e-5)


@pytest.mark.parametrize("segments", ["one", "padded"])
def test_implementations_agree_with_all_gradients(scheme, params, tokens, segments):
    segments = {"one": ONE_SEGMENT, "padded": PADDED}[segments]
    outs = [outcome(scheme, i, params, tokens, WEIGHTS, segments) for i in IMPLEMENTATIONS]
    close(outs[1][0], outs[0][0], 1e-5)
    chex.assert_trees_all_close(outs[1][1:], outs[0][1:], atol=5e-5, rtol=1e-4)


def test_implementations_agree_in_an_encoder(scheme, params, tokens):
    outs = [
        output(scheme, params, tokens, implementation=i, is_causal=False) for i in IMPLEMENTATIONS
    ]
    close(outs[1], outs[0], 1e-5)


def test_packed_segments_equal_sequences_alone(scheme, params, tokens):
    segments = jnp.asarray([[0] * 6 + [1] * 13] * BATCH)
    positions = at.from_segment_ids(segments)
    for options in ({"contiguous": True}, {}):
        where = {"positions": positions, "segment_ids": segments}
        out = output(scheme, params, tokens, **where, **options)
        for part in (slice(0, 6), slice(6, LENGTH)):
            close(out[:1, part], output(scheme, params, tokens[:1, part]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_in_any_order_give_the_same_output(scheme, params, tokens, implementation):
    order = jax.random.permutation(jax.random.key(5), LENGTH)
    positions = at.count_up(BATCH, LENGTH)
    # Running sums follow the order of tokens, so `side` sees them before the shuffle.
    rows, cols, _ = scheme.features(params, tokens.x, tokens.q, tokens.k, positions, None, None)
    q = scheme.query(params, tokens.q, positions, rows)
    k = scheme.key(params, tokens.k, positions, cols)

    @jax.jit
    def attend(pick):
        rows_, cols_ = jax.tree.map(lambda a: a[:, pick], (rows, cols))
        attention = functools.partial(
            pe.attention,
            q_positions=positions[:, pick],
            k_positions=positions[:, pick],
            is_causal=True,
            implementation=implementation,
        )
        moved = (x[:, pick] for x in (q, k, tokens.v))
        places = (positions[:, pick],) * 2
        return scheme.attend(params, *moved, places, rows_, cols_, attention)

    close(attend(order), attend(jnp.arange(LENGTH))[:, order], 1e-5)


@pytest.mark.parametrize("name", [n for n, cls in pe.SCHEMES.items() if build(cls).traits.relative])
def test_moving_all_positions_changes_nothing_where_claimed(name, tokens):
    scheme = build(pe.SCHEMES[name])
    params = scheme.init(jax.random.key(7))
    here = output(scheme, params, tokens)
    for shift in (1, 257, 1_000_000):
        close(output(scheme, params, tokens, positions=at.count_up(BATCH, LENGTH, shift)), here)


def test_coordinates_are_what_the_scheme_reads(scheme, params, tokens):
    coordinates = 2 * at.count_up(BATCH, LENGTH)
    moved = output(scheme, params, tokens, coordinates=coordinates)
    here = output(scheme, params, tokens)
    if scheme.acts and not scheme.traits.order_only:
        assert np.abs(moved - here).max() > 1e-4
    else:
        close(moved, here, 2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_that_see_nothing_are_zero_and_harmless(scheme, params, tokens, implementation):
    out, *gradients = outcome(scheme, implementation, params, tokens, WEIGHTS, PADDED)
    assert np.all(np.asarray(out)[0, :4] == 0)
    chex.assert_tree_all_finite(gradients)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_garbage_in_padding_stays_there(scheme, params, tokens, implementation):
    bad = tokens.map(lambda a: a.at[0, :4].set(jnp.nan))
    good, *_ = outcome(scheme, implementation, params, tokens, WEIGHTS, PADDED)
    out, *_ = outcome(scheme, implementation, params, bad, WEIGHTS, PADDED)
    close(out[0, 4:], good[0, 4:], 1e-6)
    close(out[1], good[1], 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_in_one_row_stays_in_that_row(scheme, params, tokens, implementation):
    bad = tokens.map(lambda a: a.at[0].set(jnp.nan))
    good, *_ = outcome(scheme, implementation, params, tokens, WEIGHTS, ONE_SEGMENT)
    out, *_ = outcome(scheme, implementation, params, bad, WEIGHTS, ONE_SEGMENT)
    assert np.isnan(out[0]).any()
    close(out[1], good[1], 1e-6)


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
    output(scheme, params, tokens, positions=at.count_up(BATCH, LENGTH))
    before = programs()
    twin = dataclasses.replace(scheme)
    output(twin, params, tokens, positions=at.count_up(BATCH, LENGTH, 5))
    assert programs() == before


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
    for a, b in zip(plain, again, strict=True):
        close(a, b, 1e-5 * np.abs(a).max())


def test_every_documented_option_exists_and_the_paper_is_cited(scheme):
    import sys

    text = type(scheme).__doc__
    for field in dataclasses.fields(scheme):
        assert f"{field.name}:" in text, field.name
    assert "https://arxiv.org/abs/" in sys.modules[type(scheme).__module__].__doc__


def test_unknown_settings_are_refused(scheme):
    with pytest.raises(TypeError):
        build(type(scheme), wavelength_of_nothing=3)
