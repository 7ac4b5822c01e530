"""Unseen keys, far positions, padding and empty batches do not matter; coordinates of axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.rule import as_tuple
from posenc_jax.engine.xla import XLA
from tests.oracle import attention, qkv
from tests.support import SIZES, build, parameters, slow, slow_but

SMALL_TILES = XLA(Blocks(16, 8), Blocks(8, 16))
T, N = 40, 2
SLOPES = np.array([0.3, -0.2], np.float32)
POSITIONS = np.arange(T, dtype=np.int32)
DISTANCES = POSITIONS[:, None] - POSITIONS
tokens = functools.partial(qkv, length=T, heads=N, kv_heads=N)


def clipped(low, high):
    def rule(shared, slope, q, k):
        return slope * jnp.clip(q - k, low, high).astype(jnp.float32)

    return pe.LogitBias(rule, SLOPES, relative=True, bounds=(low, high), drop_far=True)


def added_by_clipped(low, high, distances):
    return SLOPES[:, None, None] * np.clip(distances, low, high)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
def test_a_dense_bias_is_the_same_for_positions_of_every_dtype(dtype):
    alibi, positions = pe.ALiBi(num_heads=N).rules({}), np.arange(5)
    slopes = np.array([2.0**-4, 2.0**-8])[:, None, None]
    expected = -slopes * np.abs(positions[:, None] - positions[None])
    np.testing.assert_allclose(
        alibi.dense(positions.astype(dtype), positions.astype(dtype)), expected
    )


@pytest.mark.parametrize(
    ("q", "k", "error", "message"),
    [
        (jnp.arange(3), jnp.ones((2, 4), int), ValueError, r"must be .* got \(3,\) and \(2, 4\)"),
        (jnp.ones((1, 3), int), jnp.ones((2, 4), int), ValueError, r"got \(1, 3\) and \(2, 4\)"),
        (jnp.int32(3), jnp.int32(3), ValueError, r"got \(\) and \(\)"),
        (jnp.ones((2, 1, 3)), jnp.ones((2, 1, 3)), ValueError, "for coordinates of 2 axes"),
        (np.arange(3) + 2**40, np.arange(3), ValueError, "q_positions must fit int32"),
        (jnp.ones(3, jnp.bfloat16), jnp.ones(3), TypeError, "q_positions must be integers or"),
    ],
)
def test_a_dense_bias_refuses_positions_that_it_would_misread(q, k, error, message):
    with pytest.raises(error, match=message):
        pe.ALiBi(num_heads=N).rules({}).dense(q, k)


def test_positions_of_padding_and_of_other_segments_empty_no_tile():
    segments = np.zeros((1, T), np.int32)
    segments[0, 5], segments[0, 20] = -1, 1

    @jax.jit
    def run(positions):
        options = {"is_causal": True, "window": 9, "q_segment_ids": segments}
        return pe.attention(*tokens(), q_positions=positions, implementation=SMALL_TILES, **options)

    expected, visible = np.asarray(run(POSITIONS[None])), segments[0] == 0
    for far in (2**31 - 1, -(2**31)):
        out = np.asarray(run(np.where(visible, POSITIONS, np.int32(far))[None]))
        np.testing.assert_array_equal(out[:, visible], expected[:, visible])


@slow
def test_biases_are_right_at_the_ends_of_int32():
    """Blocks all of whose coordinates are the last number of int32, next to that number."""

    @jax.jit
    def outputs(q_at, k_at):
        options = {"rules": clipped(-3, 5), "q_coordinates": q_at, "k_coordinates": k_at}
        return pe.attention(*tokens(), implementation=SMALL_TILES, **options)

    zeros = np.zeros((1, T, N, 8)), np.zeros((1, T, N))
    for end in (2**31 - 1, -(2**31)):
        near = (end + np.arange(T) - (T - 1 if end > 0 else 0)).astype(np.int32)
        last = np.full(T, end, np.int32)
        for coordinates in ((last, near), (near, last)):
            q, k = (x.astype(np.int64) for x in coordinates)
            added = np.float32(added_by_clipped(-3, 5, q[:, None] - k))
            expected, *_ = attention(tokens(), added, np.ones((T, T), bool), *zeros)
            np.testing.assert_allclose(outputs(*coordinates), expected, atol=1e-5)


@slow
@pytest.mark.parametrize("apart", ["rows", "segments", "axes"])
def test_far_coordinates_of_others_are_no_distances(apart):
    """Rows, segments and axes that no rule compares may be 2^32 - 2 apart."""
    length = 4
    near, far = np.arange(length) - 2**31, np.arange(length) + 2**31 - length
    arrays, scheme, params, ids = tokens(length=length), pe.ALiBi(N), {}, None
    if apart == "segments":
        ids = np.array([[0, 0, 1, 1]])
        cases = {"positions": np.where(ids == 0, near, far)}, {}
    elif apart == "rows":
        arrays = [np.concatenate([x, x]) for x in arrays]
        cases = {"positions": np.stack([near, far])}, {}
    else:
        scheme = pe.chain(pe.on_axis(pe.RoPE(head_dim=8), 0), pe.on_axis(scheme, 1))
        params, at = ({}, {}), np.stack([near, far])[:, None]
        cases = {"coordinates": at}, {"coordinates": at - at[:, :, :1]}
    attend = functools.partial(pe.scheme_attention, scheme, params, *arrays, is_causal=True)
    out, expected = (attend(segment_ids=ids, **case)[0] for case in cases)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_distances_beyond_int32_raise_where_a_rule_would_read_them():
    q, k, v = tokens(length=2)
    options = {"rules": pe.ALiBi(num_heads=N).rules({})}
    options["q_positions"] = jnp.array([[-(2**31), 2**31 - 1]])
    with pytest.raises(ValueError, match=r"attention: rules need distances .* that fit int32, got"):
        pe.attention(q, k, v, **options)
    out = pe.attention(q, k, v, q_segment_ids=jnp.array([[0, -1]]), **options)
    np.testing.assert_allclose(out[:, 0], v[:, 0], atol=1e-6)


UNSEEN = [("shaw", SMALL_TILES)]
MORE_UNSEEN = [("cope", "dense"), ("shaw", "dense"), ("fox", SMALL_TILES)]
MORE_UNSEEN += [("grape_a", "dense"), ("alibi", SMALL_TILES)]
MORE_UNSEEN += [("deberta", SMALL_TILES)]  # test_every_scheme.py has NaN in padding.


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*UNSEEN, ("alibi", "reference"), *(pytest.param(*x, marks=slow) for x in MORE_UNSEEN)],
    ids=str,
)
def test_nan_that_nobody_sees_reaches_no_output_and_no_gradient(name, implementation):
    """Of padding, and of a key that mask and causality hide together."""
    scheme = build(pe.SCHEMES[name], **{"span": 8} if name == "deberta" else {})
    arrays, x = qkv(length=T), np.ones((1, T, SIZES["model_dim"]), np.float32)
    segments = np.where(POSITIONS < 30, 0, -1).astype(np.int32)[None]
    # Key 12 is masked for the queries that causality would show it to.
    mask = np.ones((1, 1, T, T), bool)
    mask[..., 12:, 12] = False
    options = {"is_causal": True, "mask": mask, "segment_ids": segments, "x": x}

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2, 3), has_aux=True)
    def outcome(q, k, v, params):
        arrays, how = (q, k, v), options | {"implementation": implementation}
        out, _ = pe.scheme_attention(scheme, params, *arrays, **how)
        return jnp.sum(jnp.sin(out)), out

    hidden = (segments[0] < 0)[:, None, None]
    # A running sum reads every key that is no padding.
    of_keys = hidden | ((POSITIONS == 12) & (name != "grape_a"))[:, None, None]
    unseen = hidden, of_keys, of_keys
    bad, good = (
        outcome(*map(np.where, unseen, [np.float32(g)] * 3, arrays), parameters(scheme))
        for g in (np.nan, 0.0)
    )
    for a, b in zip(jax.tree.leaves(bad), jax.tree.leaves(good), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert np.all(np.asarray(bad[1])[segments < 0] == 0)


def times(shared, head, row, col, q, k):
    return head * row * col


def waves(shared, slope, distance):
    clipped = jnp.clip(distance, 0, 3).astype(jnp.float32)
    return slope * jnp.sin(clipped + jnp.arange(8.0))


@slow
@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_nan_in_keys_that_a_decode_step_does_not_see_reaches_no_gradient(implementation):
    """In features alone, and in keys and values too."""
    q, k, v = tokens(length=6)
    options = {"q_positions": np.int32([3]), "k_positions": POSITIONS[:6], "is_causal": True}
    options["implementation"] = implementation

    @jax.jit
    def gradients(k, v, features):
        def loss(q, slopes):
            numbers = {"q_features": q[..., 0], "k_features": features[..., 0]}
            rules = (
                pe.ContentBias(times, slopes, **numbers),
                pe.DotBias(waves, slopes, k_features=features, bounds=(0, 3)),
                pe.SeparableBias(q[..., 0] * slopes[None, None], features[..., 0]),
            )
            return jnp.sum(jnp.sin(pe.attention(q, k, v, rules=rules, **options)))

        return jax.grad(loss, (0, 1))(q[:, 3:4], SLOPES)

    later = np.arange(6)[:, None, None] >= 4
    bad, good = ([np.where(later, np.float32(x), y) for y in (k, v)] for x in (np.nan, 0.0))
    expected = gradients(*good, good[0])
    for keys in ((k, v), bad):
        for a, b in zip(gradients(*keys, bad[0]), expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("implementation", [None, "reference", "dense", "xla", "jax"])
@pytest.mark.parametrize(
    "sizes", [(0, 5, N, 4), (2, 0, N, 4), (2, 5, 0, 4), (2, 5, N, 0)], ids=["B", "T", "N", "V"]
)
def test_an_empty_axis_gives_an_empty_output(sizes, implementation):
    batch, length, heads, value_dim = sizes
    q, k = (np.ones((batch, length, n, 4), np.float32) for n in (heads, 1))
    v = k if implementation == "jax" else k[..., :value_dim]  # It needs the keys' head dim.
    attend = functools.partial(pe.attention, q, k, v, implementation=implementation)
    shape = *q.shape[:3], v.shape[3]
    assert jax.eval_shape(attend).shape == shape
    if implementation != "jax":
        out, lse = jax.eval_shape(functools.partial(attend, return_lse=True))
        assert out.shape == shape and lse.shape == q.shape[:3]


def _from_start(b, h, q, k, start):
    return (k >= start) & (k <= q)


@pytest.mark.parametrize("name", ["one token", "many tokens", "steps", "block masks"])
def test_calls_outside_jit_compile_once(name):
    """From the third call on nothing is compiled, whatever the numbers."""
    length = 40 if name == "many tokens" else 1
    arrays, scheme = tokens(length=length), pe.RoPE(head_dim=8)
    cache = pe.new_cache(scheme, 1, 16, num_heads=N, head_dim=8)
    starts = jax.device_put(np.arange(4, dtype=np.int32))

    def attend(seed):
        rules = pe.T5(num_heads=N).rules({"table": np.full((N, 32), seed, np.float32)})
        places = dict.fromkeys(("q_positions", "k_positions"), np.full((1, length), seed, np.int32))
        jax.block_until_ready(pe.attention(*arrays, rules=rules, is_causal=True, **places))

    def step(seed):
        nonlocal cache
        options = {"segment_ids": np.full((1, 1), seed // 2, np.int32), "is_causal": True}
        _, cache = pe.scheme_attention(scheme, {}, *arrays, cache=cache, **options)

    def make_mask(seed):
        pe.block_mask(_from_start, 64, 64, starts[seed])

    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    call = {"steps": step, "block masks": make_mask}.get(name, attend)
    call(0)
    call(1)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call(2)
        call(3)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def _near_only(shared, slope, q, k):
    return jnp.where(q - k < 3, slope * (q - k).astype(jnp.float32), -1e9)


def _is_near(shared, head, q, k):
    return (q - k < 2).astype(jnp.int32)


def _earlier_only(shared, head, q, k):
    return jnp.where(q - k < 1, -jnp.inf, 0.0)


NEAR = pe.LogitBias(_near_only, SLOPES, relative=True, bounds=(0, 3))
INTEGERS = pe.LogitBias(_is_near, relative=True, bounds=(1, 2), drop_far=True)
EARLIER = pe.LogitBias(_earlier_only, relative=True)
OF_NEAR = np.where(DISTANCES < 3, SLOPES[:, None, None] * DISTANCES, np.float32(-1e9))
EXACT = {  # With the numbers that the rules add, and the distances from which on keys are seen.
    "a far number leaves near ones their digits": (SMALL_TILES, NEAR, {}, OF_NEAR, 0),
    "also of positions, and integers": (
        *(SMALL_TILES, (NEAR, INTEGERS), {"q_positions": POSITIONS}),
        *(OF_NEAR + (DISTANCES < 2), 0),
    ),
    "no key by a rule": ("jax", EARLIER, {}, np.zeros((1, T, T)), 1),
    "varies at later keys only": (
        *(SMALL_TILES, clipped(-30, -3), {"is_causal": False}),
        *(added_by_clipped(-30, -3, DISTANCES), -T),
    ),
    "varies at earlier keys only": (
        *(SMALL_TILES, clipped(2, 7), {"is_causal": False, "q_positions": POSITIONS}),
        *(added_by_clipped(2, 7, DISTANCES), -T),
    ),
}


@pytest.mark.parametrize(
    "name", slow_but(EXACT, "also of positions, and integers", "no key by a rule")
)
def test_rules_of_any_numbers_equal_float64(name):
    implementation, rules, options, added, first = EXACT[name]
    q, k, v = tokens()

    @jax.jit
    def gradient(q):
        def loss(q):
            settings = {"is_causal": True, "implementation": implementation} | options
            out = pe.attention(q, k, v, rules=rules, **settings)
            return (out**2).sum(), out

        return jax.grad(loss, has_aux=True)(q)

    exact = functools.partial(attention, (q, k, v), added.astype("f4"), DISTANCES >= first)
    zeros = np.zeros(q.shape), np.zeros(q.shape[:3])
    out, *_ = exact(*zeros)
    _, _, slope, *_ = exact(2 * out, zeros[1])
    for got, expected in zip(gradient(q), (slope, out), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_log_sum_exp_does_not_need_values_or_keys():
    q, k, v = tokens(length=5)
    sinks = np.array([0.5, 1.0], np.float32)
    expected = pe.attention(q, k, v, return_lse=True)[1]
    lse = pe.attention(q, k, v[..., :0], return_lse=True)[1]
    np.testing.assert_allclose(lse, expected, rtol=1e-6)
    lse = pe.attention(q, k[:, :0], v[:, :0], sinks=sinks, return_lse=True)[1]
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks, lse.shape))


def test_complex_arrays_are_refused():
    q, k, v = tokens()
    rule = pe.ContentBias(times, q_features=q[..., 0] + 0j, k_features=k[..., 0] + 0j)
    with pytest.raises(TypeError, match="arrays of a ContentBias must be real, got complex64"):
        pe.attention(q, k, v, rules=rule)


@pytest.mark.parametrize("order", [{"is_causal": True}, {"window": 1}])
def test_coordinates_do_not_say_which_key_is_the_first_querys_own(order):
    q, k, v = tokens()
    options = {"rules": pe.ALiBi(N).rules({}), "q_coordinates": POSITIONS[-2:]}
    options["k_coordinates"] = POSITIONS
    attend = functools.partial(pe.attention, q[:, -2:], k, v, **options)
    jax.eval_shape(attend)
    with pytest.raises(ValueError, match="which key is the first query's own cannot"):
        attend(**order)
    places = {"q_positions": POSITIONS[-2:], "k_positions": POSITIONS}
    jax.eval_shape(functools.partial(attend, **places, **order))


FAR = np.array([-(2**31), -(2**31) + 256, -(2**30), -3, 0, 1, 40, 300, 2**30, 2**31 - 128])
FAR_SCHEMES = {
    "t5": pe.T5(num_heads=N, bidirectional=True),
    "shaw": pe.Shaw(num_heads=N, head_dim=8),
    "grape_a": pe.GRAPEA(num_heads=N, head_dim=8),
}


@pytest.mark.parametrize("name", slow_but(FAR_SCHEMES, "shaw"))
def test_distances_beyond_int32_are_right_under_jit(name):
    """Against coordinates in float32, which holds these numbers and their distances."""
    scheme, order = FAR_SCHEMES[name], np.arange(len(FAR))
    params, (q, k, v) = parameters(scheme), tokens(length=len(FAR))

    @jax.jit
    def outputs(real, integer):
        return [
            pe.scheme_attention(
                scheme, params, q, k, v, positions=order, coordinates=at, implementation=x
            )[0]
            for at, x in ((real, "reference"), (integer, "reference"), (integer, SMALL_TILES))
        ]

    expected, *others = outputs(FAR.astype(np.float32)[None], FAR.astype(np.int32)[None])
    for out in others:
        np.testing.assert_allclose(out, expected, atol=1e-5)


def test_dense_biases_beyond_int32_raise_or_are_right():
    scheme = pe.T5(num_heads=N)
    bias = scheme.rules({"table": jnp.arange(32.0 * N).reshape(N, 32)})
    at = jnp.array([2**30]), jnp.array([-(2**30) - 1])
    with pytest.raises(ValueError, match=r"LogitBias.dense: distances must fit int32, got .* to"):
        bias.dense(*at)
    out = jax.jit(lambda q, k: bias.dense(q, k))(*at)
    np.testing.assert_array_equal(out[:, 0, 0], 32.0 * np.arange(N) + 31)


SHAW = pe.Shaw(num_heads=6, head_dim=8)
DAPE = pe.contrib.DAPE(num_heads=6)
COPE = pe.CoPE(head_dim=8)
Q, K, V = qkv(batch=2, length=7, kv_heads=6)
DOT, VALUE = SHAW.rules(parameters(SHAW), Q)


def distance(shared, head, row, col, q, k):
    return (q - k).astype(jnp.float32)


def first_axis(shared, head, row, col, q, k):
    return (q - k)[0].astype(jnp.float32)


def longest(q, k):
    return jnp.clip(jnp.abs(q - k).max(), 0, 32).astype(jnp.int32)


RULES = {
    "bias": pe.ALiBi(num_heads=6).rules({}),
    "content": pe.ContentBias(distance, q_features=Q),
    "dot": DOT,
    "row": DAPE.rules(parameters(DAPE)),
    "value": VALUE,
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_one_axis_are_refused_three(name):
    coordinates = np.zeros((3, 2, 7), np.int32)
    with pytest.raises(ValueError, match=r"attention: .* for coordinates of 3 axes"):
        pe.attention(Q, K, V, q_coordinates=coordinates, rules=RULES[name])


def sine(shared, head, q, k):
    return jax.lax.sin(q - k)  # Of floating point only.


OF_AXES = np.random.default_rng(0).integers(0, 9, (3, 2, 7), np.int32)
FLOATS = np.linspace(0.0, 3.0, 7, dtype=np.float32)


@slow
@pytest.mark.parametrize(
    ("coordinates", "rules"),
    [
        (
            OF_AXES,
            (
                pe.ContentBias(first_axis, q_features=Q),
                pe.ValueBias(longest, VALUE.table),
                COPE.rules(parameters(COPE), Q),
                *as_tuple(pe.on_axis(pe.ALiBi(num_heads=6), 1, 3).rules({})),
            ),
        ),
        (OF_AXES, pe.on_axis(DAPE, 1, 3).rules(parameters(DAPE))),
        (FLOATS, pe.LogitBias(sine)),
    ],
    ids=["content, value, row that reads none, bias", "row", "floats"],
)
def test_rules_that_read_them_are_not(coordinates, rules):
    options = {"q_coordinates": coordinates, "k_coordinates": coordinates, "rules": rules}
    tiles, expected = (
        pe.attention(Q, K, V, implementation=x, **options) for x in (XLA(Blocks(4, 4)), "reference")
    )
    np.testing.assert_allclose(tiles, expected, atol=1e-5)


def test_a_dense_bias_of_floats_is_that_of_the_function():
    expected = np.sin(FLOATS[:, None] - FLOATS[None])
    np.testing.assert_allclose(pe.LogitBias(sine).dense(FLOATS, FLOATS)[0], expected, atol=1e-6)


def test_axes_of_queries_and_keys_are_as_many():
    q, k = np.zeros((2, 2, 7), np.int32), np.zeros((3, 2, 7), np.int32)
    with pytest.raises(ValueError, match=r"as many axes, got \(2,\) and \(3,\) axes"):
        pe.attention(Q, K, V, q_coordinates=q, k_coordinates=k, rules=RULES["content"])
