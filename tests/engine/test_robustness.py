"""Values that must not matter do not: unseen keys, far positions, padding, empty batches."""

import dataclasses
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.xla import XLA
from tests.support import slow

SMALL_TILES = XLA(Blocks(16, 8), Blocks(8, 16))
IMPLEMENTATIONS = {"dense": "dense", "xla": SMALL_TILES}
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
T, N = 40, 2


def cases(default, *axes):
    """Returns `default`, and the others of the product of all axes as slow cases."""
    others = [case for case in itertools.product(*axes) if case not in default]
    return [*default, *(pytest.param(*case, marks=slow) for case in others)]


def tokens(length=T):
    return list(np.random.default_rng(0).normal(size=(3, 1, length, N, 8)).astype(np.float32))


def parameters(scheme):
    """Returns random numbers in the shapes of the parameters."""
    random, shapes = np.random.default_rng(1), jax.eval_shape(scheme.init, jax.random.key(1))
    return jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), shapes)


@pytest.mark.parametrize(
    ("bounds", "contiguous"),
    cases([((-30, -3), True), ((2, 7), False)], ((-9, -1), (None, -5), (-4, -3)), (True, False)),
)
def test_biases_that_vary_on_one_side_only_keep_their_term(bounds, contiguous):
    low, high = bounds

    def rule(shared, slope, q, k):
        return slope * jnp.clip(q - k, low, high).astype(jnp.float32)

    slopes, qkv = np.array([0.3, -0.2], np.float32), tokens()
    bias = pe.LogitBias(rule, heads=slopes, relative=True, bounds=bounds, drop_far=True)
    positions = np.arange(T, dtype=np.int32)[None]
    places = {} if contiguous else {"q_positions": positions, "k_positions": positions}

    @jax.jit
    def outputs(bias):
        reference = pe.attention(*qkv, rules=bias, implementation="reference", **places)
        tiles = pe.attention(*qkv, rules=bias, implementation=SMALL_TILES, **places)
        return reference, tiles, pe.attention(*qkv, implementation="reference")

    expected, out, without = outputs(bias)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert np.abs(expected - without).max() > 1e-2


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32, np.int64, np.float32])
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


@pytest.mark.parametrize("window", [None, 9])
def test_positions_of_padding_and_of_other_segments_empty_no_tile(window):
    q, k, v = tokens()
    segments, positions = np.zeros((1, T), np.int32), np.arange(T, dtype=np.int32)[None]
    segments[0, 5], segments[0, 20] = -1, 1

    @jax.jit
    def run(positions):
        options = {"is_causal": True, "window": window, "q_segment_ids": segments}
        return pe.attention(
            q,
            k,
            v,
            q_positions=positions,
            k_positions=positions,
            implementation=SMALL_TILES,
            **options,
        )

    expected, visible = np.asarray(run(positions)), segments[0] == 0
    for far in (2**31 - 1, -(2**31)):
        out = np.asarray(run(np.where(visible, positions, np.int32(far))))
        np.testing.assert_array_equal(out[:, visible], expected[:, visible])


def test_biases_are_right_at_the_ends_of_int32():
    """Blocks all of whose coordinates are the last number of int32, next to that number."""

    def rule(shared, slope, q, k):
        return slope * jnp.clip(q - k, -3, 5).astype(jnp.float32)

    slopes, qkv = np.array([0.3, -0.2], np.float32), tokens()
    bias = pe.LogitBias(rule, heads=slopes, relative=True, bounds=(-3, 5), drop_far=True)

    @jax.jit
    def outputs(q_at, k_at):
        options = {"rules": bias, "q_coordinates": q_at, "k_coordinates": k_at}
        return [pe.attention(*qkv, implementation=i, **options) for i in (SMALL_TILES, "reference")]

    for end in (2**31 - 1, -(2**31)):
        near = (end + np.arange(T) - (T - 1 if end > 0 else 0)).astype(np.int32)
        last = np.full(T, end, np.int32)
        for coordinates in ((last, near), (near, last)):
            tiles, expected = outputs(*coordinates)
            np.testing.assert_allclose(tiles, expected, atol=1e-5)


@each_implementation
def test_windows_are_right_at_any_int32_distance(implementation):
    q, k, v = (x[:, :1] for x in tokens())
    k, v = np.concatenate([k, k + 1], 1), np.concatenate([np.nan * v, v], 1)
    q_at, k_at = np.int32([[2**31 - 1]]), np.int32([[-(2**31), 2**31 - 1]])
    out = pe.attention(
        q,
        k,
        v,
        q_positions=q_at,
        k_positions=k_at,
        is_causal=True,
        window=10,
        implementation=IMPLEMENTATIONS[implementation],
    )
    np.testing.assert_allclose(out, v[:, 1:], atol=1e-6)


@pytest.mark.parametrize("apart", ["rows", "segments", "axes"])
def test_far_coordinates_of_others_are_no_distances(apart):
    """Rows, segments and axes that no rule compares may be 2^32 - 2 apart."""
    length = 4
    near, far = np.arange(length) - 2**31, np.arange(length) + 2**31 - length
    q, k, v = tokens(length=length)
    alibi = pe.ALiBi(num_heads=N).rules({})
    options = {"is_causal": True, "rules": alibi}
    if apart == "segments":
        ids = np.array([[0, 0, 1, 1]])
        at = np.where(ids == 0, near, far)
        expected = pe.attention(q, k, v, q_segment_ids=ids, **options)
        out = pe.attention(q, k, v, q_positions=at, q_segment_ids=ids, **options)
    elif apart == "rows":
        q, k, v = (np.concatenate([x, x]) for x in (q, k, v))
        expected = pe.attention(q, k, v, **options)
        out = pe.attention(q, k, v, q_positions=np.stack([near, far]), **options)
    else:
        both = pe.chain(pe.on_axis(pe.RoPE(head_dim=8), 0), pe.on_axis(pe.ALiBi(N), 1))
        at = np.stack([near, far])[:, None]
        out, expected = (
            pe.scheme_attention(both, ({}, {}), q, k, v, coordinates=x, is_causal=True)[0]
            for x in (at, at - at[:, :, :1])
        )
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_distances_beyond_int32_raise_where_a_rule_would_read_them():
    q, k, v = tokens(length=2)
    positions = jnp.array([[-(2**31), 2**31 - 1]])
    alibi = pe.ALiBi(num_heads=N).rules({})
    with pytest.raises(ValueError, match=r"attention: rules need distances .* that fit int32, got"):
        pe.attention(q, k, v, rules=alibi, q_positions=positions, k_positions=positions)
    padded = jnp.array([[0, -1]])
    out = pe.attention(
        q,
        k,
        v,
        rules=alibi,
        q_positions=positions,
        k_positions=positions,
        q_segment_ids=padded,
    )
    np.testing.assert_allclose(out[:, 0], v[:, 0], atol=1e-6)


HIDDEN = [("deberta", "xla"), ("cope", "dense")]
KINDS = "none", "alibi", "cope", "deberta"


@pytest.mark.parametrize(("kind", "implementation"), cases(HIDDEN, KINDS, IMPLEMENTATIONS))
def test_nan_in_keys_hidden_by_mask_and_causality_together_stays_there(kind, implementation):
    q, k, v = tokens()
    # Key 12 is masked for the queries that causality would show it to.
    mask = np.ones((1, 1, T, T), bool)
    mask[..., 12:, 12] = False
    schemes = {
        "none": pe.NoPE(),
        "alibi": pe.ALiBi(num_heads=N),
        "deberta": pe.DeBERTa(num_heads=N, head_dim=8, model_dim=8, span=8),
        "cope": pe.CoPE(head_dim=8),
    }
    scheme, params = schemes[kind], parameters(schemes[kind])
    options = {"is_causal": True, "mask": mask, "implementation": IMPLEMENTATIONS[implementation]}

    @jax.jit
    def gradients(k, v):
        def loss(q, k, v, params):
            out, _ = pe.scheme_attention(scheme, params, q, k, v, **options)
            # The query at 12 has a key of its own only.
            return jnp.sum(jnp.sin(out.at[:, 12].set(0.0)))

        grads = jax.grad(loss, (0, 1, 2, 3))(q, k, v, params)
        return jax.tree.map(lambda x: x.at[:, 12].set(0.0) if x.ndim == 4 else x, grads)

    hidden = (np.arange(T) == 12)[:, None, None]
    bad, good = (
        gradients(*(np.where(hidden, np.float32(x), y) for y in (k, v))) for x in (np.nan, 0.0)
    )
    for a, b in zip(jax.tree.leaves(bad), jax.tree.leaves(good), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


PADDED = [("shaw", "xla"), ("alibi", "reference"), ("shaw", "dense")]


@pytest.mark.parametrize(
    ("kind", "implementation"),
    cases(PADDED, ("none", "alibi", "shaw"), ("reference", "dense", "xla")),
)
def test_nan_in_queries_of_padding_reaches_no_gradient(kind, implementation):
    q, k, v = tokens()
    segments = np.where(np.arange(T) < 30, 0, -1).astype(np.int32)[None]
    schemes = {
        "none": pe.NoPE(),
        "alibi": pe.ALiBi(num_heads=N),
        "shaw": pe.Shaw(num_heads=N, head_dim=8),
    }
    scheme, params = schemes[kind], parameters(schemes[kind])
    implementation = IMPLEMENTATIONS.get(implementation, implementation)
    options = {"is_causal": True, "q_segment_ids": segments, "implementation": implementation}

    @jax.jit
    def gradients(q):
        def loss(k, v, params):
            out = pe.attention(q, k, v, rules=scheme.rules(params, q), **options)
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss, (0, 1, 2))(k, v, params)

    padding = (segments < 0)[..., None, None]
    bad, good = (gradients(np.where(padding, np.float32(x), q)) for x in (np.nan, 0.0))
    for a, b in zip(jax.tree.leaves(bad), jax.tree.leaves(good), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "name", ["deberta", *(pytest.param(name, marks=slow) for name in ("fox", "grape_a"))]
)
def test_nan_in_cached_features_of_unused_slots_reaches_no_gradient(name):
    sizes = {"deberta": {"head_dim": 8, "span": 4}, "fox": {}, "grape_a": {"head_dim": 8}}[name]
    if name != "grape_a":
        sizes["model_dim"] = 16
    scheme = pe.SCHEMES[name](num_heads=N, **sizes)
    q, k, v = tokens(length=6)
    x = np.random.default_rng(2).normal(size=(1, 6, 16)).astype(np.float32)
    segments = np.int32([[0, 0, 0, 0, -1, -1]])

    @jax.jit
    @jax.grad
    def gradient(params, k):
        out, _ = pe.scheme_attention(
            scheme, params, q, k, v, x=x, segment_ids=segments, is_causal=True
        )
        return jnp.sum(jnp.sin(out))

    params, padding = parameters(scheme), (segments < 0)[..., None, None]
    bad, good = (gradient(params, np.where(padding, np.float32(g), k)) for g in (np.nan, 0.0))
    for a, b in zip(jax.tree.leaves(bad), jax.tree.leaves(good), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def times(shared, head, row, col, q, k):
    return head * row * col


RULES = "none", "pair", "dot", "separable"
STEPS = [("pair", None), ("dot", None), ("pair", "xla"), ("separable", "reference")]


@pytest.mark.parametrize(
    ("kind", "implementation"), cases(STEPS, RULES, (None, "reference", "dense", "xla"))
)
def test_nan_in_keys_that_a_decode_step_does_not_see_reaches_no_gradient(kind, implementation):
    """In features alone, and in keys and values too."""
    q, k, v = tokens(6)

    @jax.jit
    def gradients(k, v, features):
        def loss(q, slopes):
            rules = {
                "none": (),
                "pair": pe.ContentBias(
                    times, slopes, q_features=q[..., 0], k_features=features[..., 0]
                ),
                "dot": pe.DotBias(waves, slopes, k_features=features, bounds=(0, 3)),
                "separable": pe.SeparableBias(q[..., 0] * slopes[None, None], features[..., 0]),
            }
            out = pe.attention(
                q,
                k,
                v,
                rules=rules[kind],
                q_positions=np.int32([3]),
                k_positions=np.arange(6, dtype=np.int32),
                is_causal=True,
                implementation=implementation,
            )
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss, (0, 1))(q[:, 3:4], jnp.float32([0.3, -0.2]))

    later = np.arange(6)[:, None, None] >= 4
    bad, good = ([np.where(later, np.float32(x), y) for y in (k, v)] for x in (np.nan, 0.0))
    for bad_case, good_case in (
        ((k, v, bad[0]), (k, v, good[0])),
        ((*bad, bad[0]), (*good, good[0])),
    ):
        for a, b in zip(gradients(*bad_case), gradients(*good_case), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def waves(shared, slope, distance):
    clipped = jnp.clip(distance, 0, 3).astype(jnp.float32)
    return slope * jnp.sin(clipped + jnp.arange(8.0))


@pytest.mark.parametrize(
    ("axis", "implementation"),
    [
        (axis, name)
        for axis in ("B", "T and S", "N", "V")
        for name in (None, "reference", "dense", "xla", "jax")
        if (axis, name) != ("V", "jax")  # It needs values of the keys' head dim.
    ],
)
def test_an_empty_axis_gives_an_empty_output(axis, implementation):
    batch, length, heads, dim = 2, 5, N, 4
    batch, heads = 0 if axis == "B" else batch, 0 if axis == "N" else heads
    length = 0 if axis == "T and S" else length
    q, k = (np.ones((batch, length, n, dim), np.float32) for n in (heads, 1))
    v = k[..., : 0 if axis == "V" else dim]
    shape = *q.shape[:3], v.shape[3]
    attend = functools.partial(pe.attention, q, k, v, implementation=implementation)
    if implementation == "jax":
        assert attend().shape == shape
    else:
        assert jax.eval_shape(attend).shape == shape
        out, lse = attend(return_lse=True)
        assert out.shape == shape and lse.shape == q.shape[:3]


@pytest.mark.parametrize("length", [1, 40])
def test_calls_outside_jit_compile_once(length):
    q, k, v = tokens(length)
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def call(seed):
        rules = pe.T5(num_heads=N).rules({"table": np.full((N, 32), seed, np.float32)})
        positions = np.full((1, length), seed, np.int32)
        return pe.attention(
            q, k, v, rules=rules, q_positions=positions, k_positions=positions, is_causal=True
        ).block_until_ready()

    call(0)
    call(1)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call(2)
        call(3)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def _equal(rules, implementation, reference="reference", atol=3e-6, **options):
    """Whether the output and the gradient of q are those of the reference."""
    q, k, v = tokens()

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(implementation, q):
        def loss(q):
            out = pe.attention(q, k, v, rules=rules, implementation=implementation, **options)
            return (out**2).sum(), out

        return jax.value_and_grad(loss, has_aux=True)(q)

    (_, out), grad = gradient(implementation, q)
    (_, expected), expected_grad = gradient(reference, q)
    assert np.isfinite(expected).all() and np.isfinite(expected_grad).all()
    np.testing.assert_allclose(out, expected, atol=atol)
    np.testing.assert_allclose(grad, expected_grad, atol=10 * atol)


def _near_only(shared, slope, q, k):
    return jnp.where(q - k < 3, slope * (q - k).astype(jnp.float32), -1e9)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_far_number_of_any_size_leaves_near_ones_their_digits(contiguous):
    rule = pe.LogitBias(_near_only, np.array([-0.3, -0.2], np.float32), relative=True)
    positions = np.arange(T, dtype=np.int32)[None]
    places = {} if contiguous else {"q_positions": positions, "k_positions": positions}
    _equal(dataclasses.replace(rule, bounds=(0, 3)), SMALL_TILES, is_causal=True, **places)


def _nan_in_the_future(shared, head, q, k):
    return -jnp.log1p((q - k).astype(jnp.float32))


def _falling(shared, head, q, k):
    return -0.1 * (q - k).astype(jnp.float32)


def test_a_rule_that_is_nan_for_hidden_keys_may_stand_beside_one_by_distance():
    rules = pe.LogitBias(_falling, relative=True), pe.LogitBias(_nan_in_the_future)
    _equal(rules, SMALL_TILES, is_causal=True)


def _is_near(shared, head, q, k):
    return q - k < 2


def test_rules_may_return_booleans():
    positions = np.arange(T, dtype=np.int32)[None]
    rule = pe.LogitBias(_is_near, relative=True, bounds=(1, 2), drop_far=True)
    _equal(rule, SMALL_TILES, is_causal=True, q_positions=positions, k_positions=positions)


@pytest.mark.parametrize("implementation", ["dense", "reference"])
@pytest.mark.parametrize("number", [-1e9, 1e5])
def test_weights_sum_to_one_at_logits_of_any_size(implementation, number):
    q, k, v = (x[:, :9] for x in tokens())
    rule = pe.DenseBias(np.full((1, 1, 9, 9), number, np.float32))

    def total(v):
        return pe.attention(q, k, v, rules=rule, implementation=implementation)

    np.testing.assert_allclose(total(np.ones_like(v)), 1, rtol=1e-6)
    grad = jax.grad(lambda v: total(v).sum())(v)
    np.testing.assert_allclose(grad.sum(1), 9 * np.ones_like(grad[:, 0]), rtol=1e-5)


def _by_length(shared, heads, q_feature, k_features, logits, seen, q, k):
    return logits * jnp.log(1.0 * logits.shape[1])


def test_a_rule_on_whole_rows_gets_whole_rows():
    """Blocks of queries leave out keys that they do not see only if the rule lets them."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 1024, 1, 4)).astype(np.float32)
    rule = pe.LogitsTransform(_by_length)
    options = {"rules": rule, "is_causal": True}
    out, expected = (
        pe.attention(q, k, v, implementation=x, **options) for x in ("dense", "reference")
    )
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_the_log_sum_exp_does_not_need_values_or_keys():
    q, k, v = tokens()
    sinks = np.array([0.5, 1.0], np.float32)
    expected = pe.attention(q, k, v, return_lse=True)[1]
    lse = pe.attention(q, k, v[..., :0], return_lse=True)[1]
    np.testing.assert_allclose(lse, expected, rtol=1e-6)
    lse = pe.attention(q, k[:, :0], v[:, :0], sinks=sinks, return_lse=True)[1]
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks, lse.shape))


def _conjugate(shared, head, x, y, q, k):
    return (x * jnp.conj(y)).real


def test_complex_arrays_are_refused():
    q, k, v = tokens()
    rule = pe.ContentBias(_conjugate, q_features=q[..., 0] + 0j, k_features=k[..., 0] + 0j)
    with pytest.raises(TypeError, match="arrays of a ContentBias must be real, got complex64"):
        pe.attention(q, k, v, rules=rule)


def _earlier_only(shared, head, q, k):
    return jnp.where(q - k < 1, -jnp.inf, 0.0)


def test_a_query_that_sees_no_key_by_a_rule_has_zeros_in_jax_nn_too():
    _equal(pe.LogitBias(_earlier_only, relative=True), "jax", is_causal=True)


@pytest.mark.parametrize("implementation", [SMALL_TILES, "dense", "reference"])
def test_sinks_of_minus_infinity_are_none(implementation):
    q, k, v = tokens()
    ids = np.zeros((len(q), T), np.int32)
    ids[:, -2:] = -1

    def loss(sinks, k):
        segments = {"q_segment_ids": ids, "k_segment_ids": ids}
        out = pe.attention(q, k, v, sinks=sinks, implementation=implementation, **segments)
        return (out[:, :-2, 0] ** 2).sum()

    grads = jax.grad(loss, (0, 1))(np.array([-np.inf, 0.0], np.float32), k)
    expected = jax.grad(lambda k: loss(np.array([-100.0, 0.0], np.float32), k))(k)
    np.testing.assert_array_equal(grads[0], 0)
    np.testing.assert_allclose(grads[1], expected, atol=1e-5)


def test_a_window_as_wide_as_can_be():
    q, k, v = tokens()
    options = {"is_causal": True, "implementation": SMALL_TILES}
    out = pe.attention(q, k, v, window=sys.maxsize, **options)
    np.testing.assert_allclose(out, pe.attention(q, k, v, window=T, **options), atol=1e-6)


@pytest.mark.parametrize("order", [{"is_causal": True}, {"window": 1}])
def test_coordinates_do_not_say_which_key_is_the_first_querys_own(order):
    q, k, v = tokens()
    q, at = q[:, -2:], jnp.arange(T)
    options = {"rules": pe.ALiBi(N).rules({}), "q_coordinates": at[-2:], "k_coordinates": at}
    pe.attention(q, k, v, **options)
    with pytest.raises(ValueError, match="which key is the first query's own cannot"):
        pe.attention(q, k, v, **options, **order)
    positions = {"q_positions": at[-2:], "k_positions": at}
    pe.attention(q, k, v, **options, **positions, **order)


FAR = np.array([-(2**31), -(2**31) + 256, -(2**30), -3, 0, 1, 40, 300, 2**30, 2**31 - 128])
FAR_SCHEMES = {
    "t5": pe.T5(num_heads=N),
    "alibi": pe.ALiBi(num_heads=N, symmetry="split"),
    "shaw": pe.Shaw(num_heads=N, head_dim=8),
    "inkling": pe.Inkling(num_heads=N, model_dim=24, extent=8),
    "grape_a": pe.GRAPEA(num_heads=N, head_dim=8),
}


@pytest.mark.parametrize("name", FAR_SCHEMES)
def test_distances_beyond_int32_are_right_under_jit(name):
    """Against coordinates in float32, which holds these numbers and their distances."""
    scheme, order = FAR_SCHEMES[name], np.arange(len(FAR))
    params, (q, k, v) = parameters(scheme), tokens(length=len(FAR))
    x = np.random.default_rng(0).normal(size=(1, len(FAR), 24)).astype(np.float32)

    def output(coordinates, implementation):
        options = {"coordinates": coordinates, "implementation": implementation}
        return pe.scheme_attention(scheme, params, q, k, v, x=x, positions=order, **options)[0]

    run = jax.jit(output, static_argnums=1)
    expected = run(FAR.astype(np.float32)[None], "reference")
    for implementation in ("reference", "dense", SMALL_TILES):
        out = run(FAR.astype(np.int32)[None], implementation)
        np.testing.assert_allclose(out, expected, atol=1e-5)


def test_dense_biases_beyond_int32_raise_or_are_right():
    scheme = pe.T5(num_heads=N)
    bias = scheme.rules({"table": jnp.arange(32.0 * N).reshape(N, 32)})
    at = jnp.array([2**30]), jnp.array([-(2**30) - 1])
    with pytest.raises(ValueError, match=r"LogitBias.dense: distances must fit int32, got .* to"):
        bias.dense(*at)
    out = jax.jit(lambda q, k: bias.dense(q, k))(*at)
    np.testing.assert_array_equal(out[:, 0, 0], 32.0 * np.arange(N) + 31)
