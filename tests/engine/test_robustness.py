"""Values that must not matter do not: unseen keys, far positions, padding, empty batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.xla import XLA

SMALL_TILES = XLA(Blocks(16, 8), Blocks(8, 16))
IMPLEMENTATIONS = {"dense": "dense", "xla": SMALL_TILES}
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
T, N = 40, 2


def tokens(length=T, heads=N, dim=8, batch=1):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (batch, length, heads, dim)) for key in keys]


def gradients(loss, *arrays):
    return jax.jit(jax.grad(loss, tuple(range(len(arrays)))))(*arrays)


@pytest.mark.parametrize("bounds", [(-30, -3), (-9, -1), (None, -5), (2, 7), (-4, -3)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_biases_that_vary_on_one_side_only_keep_their_term(bounds, contiguous):
    low, high = bounds

    def rule(shared, slope, q, k):
        return slope * jnp.clip(q - k, low, high).astype(jnp.float32)

    bias = pe.LogitBias(rule, heads=jnp.array([0.3, -0.2]), relative=True, bounds=bounds)
    q, k, v = tokens()
    positions = jnp.arange(T)[None]
    places = {} if contiguous else {"q_positions": positions, "k_positions": positions}
    run = [pe.attention(q, k, v, rules=bias, implementation=i, **places)
           for i in ("reference", SMALL_TILES)]  # fmt: skip
    np.testing.assert_allclose(run[1], run[0], atol=1e-5)
    assert np.abs(run[0] - pe.attention(q, k, v)).max() > 1e-2


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


@pytest.mark.parametrize("far", [2**31 - 1, -(2**31)])
@pytest.mark.parametrize("window", [None, 9])
def test_positions_of_padding_and_of_other_segments_empty_no_tile(far, window):
    q, k, v = tokens()
    segments = jnp.zeros((1, T), jnp.int32).at[0, 5].set(-1).at[0, 20].set(1)
    positions = jnp.arange(T, dtype=jnp.int32)[None]
    moved = positions.at[0, 5].set(far).at[0, 20].set(far)

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

    keep = np.asarray(segments[0] == 0)
    np.testing.assert_array_equal(run(moved)[:, keep], run(positions)[:, keep])


@pytest.mark.parametrize("end", [2**31 - 1, -(2**31)])
@pytest.mark.parametrize("side", ["q", "k"])
def test_biases_are_right_at_the_ends_of_int32(end, side):
    """Blocks all of whose coordinates are the last number of int32, next to that number."""
    q, k, v = tokens()
    near = end + jnp.arange(T, dtype=jnp.int32) - (T - 1 if end > 0 else 0)
    coordinates = {"q_coordinates": near, "k_coordinates": near}
    coordinates[f"{side}_coordinates"] = jnp.full(T, end, jnp.int32)

    def rule(shared, slope, q, k):
        return slope * jnp.clip(q - k, -3, 5).astype(jnp.float32)

    bias = pe.LogitBias(rule, heads=jnp.array([0.3, -0.2]), relative=True, bounds=(-3, 5))
    tiles, expected = (
        pe.attention(q, k, v, rules=bias, implementation=i, **coordinates)
        for i in (SMALL_TILES, "reference")
    )
    np.testing.assert_allclose(tiles, expected, atol=1e-5)


@each_implementation
def test_windows_are_right_at_any_int32_distance(implementation):
    q, k, v = (x[:, :1] for x in tokens())
    k, v = (jnp.concatenate([x, x + 1], 1) for x in (k, v))
    q_at, k_at = jnp.array([[2**31 - 1]]), jnp.array([[-(2**31), 2**31 - 1]])
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


@pytest.mark.parametrize("kind", ["none", "alibi", "deberta", "cope"])
@each_implementation
def test_nan_in_keys_hidden_by_mask_and_causality_together_stays_there(kind, implementation):
    q, k, v = tokens()
    # Key 12 is masked for the queries that causality would show it to.
    mask = jnp.ones((1, 1, T, T), bool).at[..., 12:, 12].set(False)
    schemes = {
        "none": pe.NoPE(),
        "alibi": pe.ALiBi(num_heads=N),
        "deberta": pe.DeBERTa(num_heads=N, head_dim=8, model_dim=8, span=8),
        "cope": pe.CoPE(head_dim=8),
    }
    scheme = schemes[kind]
    params = jax.tree.map(lambda x: x + 0.1, scheme.init(jax.random.key(1)))

    def outcome(garbage):
        bad = [x.at[:, 12].set(garbage) for x in (k, v)]

        def loss(q, k, v, params):
            out, _ = pe.scheme_attention(
                scheme,
                params,
                q,
                k,
                v,
                is_causal=True,
                mask=mask,
                implementation=IMPLEMENTATIONS[implementation],
            )
            # The query at 12 has a key of its own only.
            return jnp.sum(jnp.sin(out.at[:, 12].set(0.0)))

        grads = gradients(loss, q, *bad, params)
        return jax.tree.map(lambda x: x.at[:, 12].set(0.0) if x.ndim == 4 else x, grads)

    for a, b in zip(*(jax.tree.leaves(outcome(x)) for x in (jnp.nan, 0.0)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kind", ["none", "alibi", "shaw"])
@pytest.mark.parametrize("implementation", ["reference", "dense", SMALL_TILES], ids=repr)
def test_nan_in_queries_of_padding_reaches_no_gradient(kind, implementation):
    q, k, v = tokens()
    segments = jnp.zeros((1, T), jnp.int32).at[0, 30:].set(-1)
    schemes = {
        "none": pe.NoPE(),
        "alibi": pe.ALiBi(num_heads=N),
        "shaw": pe.Shaw(num_heads=N, head_dim=8),
    }
    scheme = schemes[kind]
    params = scheme.init(jax.random.key(1))

    def outcome(garbage):
        def loss(k, v, params):
            bad = q.at[:, 30:].set(garbage)
            out = pe.attention(
                bad,
                k,
                v,
                rules=scheme.rules(params, bad),
                is_causal=True,
                q_segment_ids=segments,
                implementation=implementation,
            )
            return jnp.sum(jnp.sin(out))

        return gradients(loss, k, v, params)

    for a, b in zip(*(jax.tree.leaves(outcome(x)) for x in (jnp.nan, 0.0)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["deberta", "fox", "grape_a"])
def test_nan_in_cached_features_of_unused_slots_reaches_no_gradient(name):
    sizes = {"deberta": {"head_dim": 8, "span": 4}, "fox": {}, "grape_a": {"head_dim": 8}}[name]
    if name != "grape_a":
        sizes["model_dim"] = 16
    scheme = pe.SCHEMES[name](num_heads=N, **sizes)
    q, k, v = tokens(length=6)
    x = jax.random.normal(jax.random.key(2), (1, 6, 16))
    segments = jnp.array([[0, 0, 0, 0, -1, -1]])

    def loss(params, garbage):
        bad = jnp.where((segments < 0)[..., None, None], garbage, k)
        out, _ = pe.scheme_attention(
            scheme, params, q, bad, v, x=x, segment_ids=segments, is_causal=True
        )
        return jnp.sum(jnp.sin(out))

    params = scheme.init(jax.random.key(1))
    bad, good = (jax.jit(jax.grad(loss))(params, g) for g in (jnp.nan, 0.0))
    for a, b in zip(jax.tree.leaves(bad), jax.tree.leaves(good), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def times(shared, head, row, col, q, k):
    return head * row * col


@pytest.mark.parametrize("implementation", [None, "reference", "dense", "xla"])
@pytest.mark.parametrize("kind", ["none", "pair", "dot", "separable"])
@pytest.mark.parametrize("garbage_in", ["features", "all"])
def test_nan_in_keys_that_a_decode_step_does_not_see_reaches_no_gradient(
    kind, garbage_in, implementation
):
    q, k, v = tokens(6)
    q, slopes = q[:, 3:4], jnp.array([0.3, -0.2])

    def loss(q, slopes, garbage):
        bad_k, bad_v = (x.at[:, 4:].set(garbage) for x in (k, v))
        rows = q[..., 0]
        rules = {
            "none": (),
            "pair": pe.ContentBias(times, slopes, q_features=rows, k_features=bad_k[..., 0]),
            "dot": pe.DotBias(waves, slopes, k_features=bad_k, bounds=(0, 3)),
            "separable": pe.SeparableBias(rows * slopes[None, None], bad_k[..., 0]),
        }
        out = pe.attention(
            q,
            bad_k if garbage_in == "all" else k,
            bad_v if garbage_in == "all" else v,
            rules=rules[kind],
            q_positions=jnp.array([3]),
            k_positions=jnp.arange(6),
            is_causal=True,
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(out))

    bad, good = (jax.grad(loss, (0, 1))(q, slopes, x) for x in (jnp.nan, 0.0))
    for a, b in zip(bad, good, strict=True):
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
    q, k = jnp.ones((batch, length, heads, dim)), jnp.ones((batch, length, 1, dim))
    v = k[..., : 0 if axis == "V" else dim]
    out = pe.attention(q, k, v, implementation=implementation)
    assert out.shape == (*q.shape[:3], v.shape[3])
    if implementation != "jax":
        out, lse = pe.attention(q, k, v, return_lse=True, implementation=implementation)
        assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == q.shape[:3]


@pytest.mark.parametrize("length", [1, 40])
def test_calls_outside_jit_compile_once(length):
    q, k, v = tokens(length)
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def call(seed):
        rules = pe.T5(num_heads=N).rules({"table": jnp.full((N, 32), float(seed))})
        positions = jnp.full((1, length), seed, jnp.int32)
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
