"""Properties of all range-attention schemes, with windows below the length of the tests.

The common suite runs them with the published windows, where all of its 19 tokens are near.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.mask import LEAST_LOGIT
from posenc_jax.positions import from_segment_ids
from posenc_jax.schemes.rotary.two_range import Far, OutOfRange
from tests.support import BATCH, close, make_batch, output, slow

SCHEMES = [
    pe.ReRoPE(head_dim=8, window=4),
    pe.ReRoPE(head_dim=8, window=5, leak=0.25),
    pe.ReRoPE(head_dim=8, window=7, leak=1.0, restart=2),
    pe.SelfExtend(head_dim=8, window=5, group=3),
    pe.DualChunk(head_dim=8, chunk=6, local=2),
]
KINDS = SCHEMES[2:]  # Leak and restart are numbers in the code that all of ReRoPE runs.
each = pytest.mark.parametrize(
    "scheme",
    [pytest.param(s, marks=() if s in KINDS else slow) for s in SCHEMES],
    ids=lambda s: f"{s.name}-{SCHEMES.index(s)}",
)
kinds = pytest.mark.parametrize("scheme", KINDS, ids=lambda s: s.name)


count = jax.jit(from_segment_ids)


LIKE = {"xlarerope", "referenceself_extend", "xlaself_extend", "referencedual_chunk"}
FEW = (0, 1), (2, 2)
MASKS = [{}, {"window": (9, 2), "is_causal": False}, {"window": 6, "contiguous": True}]


@pytest.mark.parametrize(
    "scheme, options",
    [
        pytest.param(s, o, id=f"{s.name}-{o}", marks=() if (i, j) in FEW else slow)
        for i, s in enumerate(KINDS)
        for j, o in enumerate(MASKS)
    ],
)
def test_implementations_agree_with_their_gradients(scheme, options):
    tokens = make_batch(length=63)
    sinks = jnp.linspace(-1.0, 1.0, 6)
    segments = np.tile(np.repeat([0, 1, -1], [40, 20, 3]), (BATCH, 1))
    placement = {"segment_ids": segments, "positions": count(segments)}

    def loss(arrays, implementation):
        tokens, sinks = arrays
        out = output(
            scheme, {}, tokens, sinks=sinks, implementation=implementation, **placement, **options
        )
        return (out**2).sum(), out

    parts = [
        jax.jit(jax.value_and_grad(functools.partial(loss, implementation=i), has_aux=True))(
            (tokens, sinks)
        )
        for i in ("reference", "xla")
    ]
    ((_, a), da), ((_, b), db) = parts
    close(a, b, 1e-5)
    for x, y in zip(jax.tree.leaves(da), jax.tree.leaves(db), strict=True):
        assert np.isfinite(x).all()
        close(x, y, 5e-5 * max(1.0, float(np.abs(x).max())))


@pytest.mark.parametrize(
    "scheme, implementation",
    [
        pytest.param(s, i, id=f"{s.name}-{i}", marks=slow if i + s.name in LIKE else ())
        for s in KINDS
        for i in ("reference", "xla")
    ],
)
def test_sinks_count_once_and_dropout_drops_the_same_weights(scheme, tokens, implementation):
    """Where all ranges have equal angles the merge is one attention, with all its options."""
    same = (
        scheme.replace(window=10**6)
        if hasattr(scheme, "window")
        else scheme.replace(chunk=10**6, local=1)
    )
    options = {"sinks": jnp.linspace(-1.0, 2.0, 6), "implementation": implementation}
    options |= {"dropout_rate": 0.3, "dropout_key": jax.random.key(3), "window": 7}
    close(output(same, {}, tokens, **options), output(pe.RoPE(head_dim=8), {}, tokens, **options))
    dropped = output(scheme, {}, tokens, **options)
    otherwise = output(scheme, {}, tokens, **options | {"dropout_key": jax.random.key(4)})
    assert np.abs(dropped - otherwise).max() > 0.01


@pytest.mark.parametrize("implementation", ["xla", pytest.param("reference", marks=slow)])
def test_two_ranges_with_equal_angles_are_one_attention(tokens, implementation):
    """STRING that restarts at its window is RoPE, computed in two ranges."""
    scheme = pe.ReRoPE(head_dim=8, window=4, leak=1.0)
    options = {"sinks": jnp.linspace(-1.0, 2.0, 6), "implementation": implementation}
    options |= {"dropout_rate": 0.3, "dropout_key": jax.random.key(3), "window": 9}

    def loss(tokens, sinks, scheme):
        out = output(scheme, {}, tokens, **options | {"sinks": sinks})
        return (out**2).sum(), out

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)
    got, expected = (run(tokens, options["sinks"], s) for s in (scheme, pe.RoPE(head_dim=8)))
    close(got[1], expected[1], 1e-5)
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(expected[0]), strict=True):
        close(a, b, 1e-4)


@kinds
def test_no_array_grows_with_queries_times_keys(scheme):
    length = 512
    q, k, v = (jax.ShapeDtypeStruct((1, length, n, 8), "float32") for n in (2, 1, 1))

    def loss(q, k, v):
        out, _ = pe.scheme_attention(scheme, {}, q, k, v, is_causal=True, implementation="xla")
        return (out**2).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).as_text()
    assert f"{length}x{length}" not in text and f"{length}x" in text


@each
def test_softcap_is_refused(scheme, tokens):
    with pytest.raises(NotImplementedError, match=f"{scheme.name}: softcap"):
        output(scheme, {}, tokens, softcap=20.0)
    with pytest.raises(ValueError, match=f"{scheme.name}: return_lse"):
        positions = jnp.arange(tokens.q.shape[1])[None]
        call = pe.AttentionCall(return_lse=True)
        scheme.attend({}, tokens.q, tokens.k, tokens.v, positions, positions, None, None, call)


def test_the_rule_masks_the_keys_of_other_ranges():
    bias = pe.LogitBias(OutOfRange(Far(2), 1), heads=jnp.zeros(1))
    row = bias.dense(jnp.array([3]), jnp.arange(4))[0, 0]
    np.testing.assert_array_equal(row, np.array([0, 0, LEAST_LOGIT, LEAST_LOGIT], "f4"))


def test_rotation_at_a_slope_and_an_offset_is_exact_at_any_distance():
    x = np.random.default_rng(0).normal(size=(1, 1, 6, 12)).astype("f4")
    scaling = pe.YaRN(factor=1.0, original_max_position=64, attention_factor=1.25)
    scheme = pe.ReRoPE(head_dim=12, scaling=scaling)
    frequencies, _ = pe.rope_frequencies(12)
    for position, slope, offset in [(1, 1.0, 0.5), (257, 0.25, 31.25), (10**6, 1 / 3, 32768.75)]:
        out = scheme.rotated(jnp.asarray(x), jnp.array([[position]]), slope=slope, offset=offset)
        angle = (slope * position + offset) * frequencies
        a, b = np.split(x.astype(np.float64), 2, -1)
        c, s = 1.25 * np.cos(angle), 1.25 * np.sin(angle)
        expected = np.concatenate([a * c - b * s, b * c + a * s], -1)
        np.testing.assert_allclose(out, expected, atol=2e-6)
