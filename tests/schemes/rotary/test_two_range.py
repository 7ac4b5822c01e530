"""Properties of all range-attention schemes, with windows below the length of the tests.

The common suite compares their tiles with the reference.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.kernels.kernel_cases import arrays_of
from tests.oracle import turned
from tests.support import close, output, slow, slow_but

KINDS = [
    pe.ReRoPE(head_dim=8, window=7, leak=1.0, restart=2),
    pe.SelfExtend(head_dim=8, window=5, group=3),
    pe.DualChunk(head_dim=8, chunk=6, local=2),
]
kinds = pytest.mark.parametrize("scheme", KINDS, ids=lambda s: s.name)


@slow
def test_ranges_with_equal_angles_are_one_attention(tokens):
    """STRING that restarts at its window is RoPE; sinks count once, and dropout is the same."""
    options = {"dropout_key": jax.random.key(3), "dropout_rate": 0.3, "window": 9}

    def loss(tokens, sinks, scheme):
        out = output(scheme, {}, tokens, sinks=sinks, implementation="xla", **options)
        return (out**2).sum(), out

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)
    schemes = pe.ReRoPE(head_dim=8, window=4, leak=1.0), pe.RoPE(head_dim=8)
    got, expected = (run(tokens, np.linspace(-1.0, 2.0, 6, dtype="f4"), s) for s in schemes)
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

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, v)
    shapes = [array.shape for array in arrays_of(jaxpr.jaxpr)]
    assert (1, length, 2, 8) in shapes and all(shape.count(length) < 2 for shape in shapes)


@kinds
def test_softcap_is_refused(scheme, tokens):
    with pytest.raises(NotImplementedError, match=f"{scheme.name}: softcap"):
        output(scheme, {}, tokens, softcap=20.0)
    with pytest.raises(ValueError, match=f"{scheme.name}: return_lse"):
        positions = jnp.arange(tokens.q.shape[1])[None]
        call = pe.AttentionCall(return_lse=True)
        scheme.attend({}, tokens.q, tokens.k, tokens.v, positions, positions, None, None, call)


@pytest.mark.parametrize(
    "i, window", [(0, (11, 0)), *(pytest.param(*x, marks=slow) for x in [(1, (3, 0)), (2, None)])]
)
def test_ranges_are_the_same_by_position_and_by_coordinate(i, window, tokens):
    """Coordinates that are given are compared by a rule, positions by masks that skip tiles."""
    by_rule = {"coordinates": jnp.arange(tokens.q.shape[1])}
    out, expected = (
        output(KINDS[i], {}, tokens, implementation="xla", window=window, **more)
        for more in ({}, by_rule)
    )
    close(out, expected, 1e-5)


@pytest.mark.parametrize("scheme", slow_but(KINDS, KINDS[2]), ids=lambda s: s.name)
def test_ranges_at_the_least_positions_and_of_great_segment_ids(scheme, tokens):
    """The same as from position 0 and of small ids, by the same program."""
    slots = np.arange(tokens.q.shape[1])[None]
    first = -(2**31) + 2 * (scheme.name == "self_extend")  # Groups begin where they did.
    later = slots >= 8
    least = {"positions": np.int32(slots + first), "segment_ids": np.int32(3 + 2**27 * later)}
    plain = {"positions": np.int32(slots), "segment_ids": np.int32(3 + later)}
    for names in (["positions"], ["positions", "segment_ids"]):
        out, expected = (
            output(scheme, {}, tokens, implementation="xla", **{n: x[n] for n in names})
            for x in (least, plain)
        )
        close(out, expected, 1e-5)


def test_rotation_at_a_slope_and_an_offset_is_exact_at_any_distance():
    x = np.random.default_rng(0).normal(size=(1, 1, 6, 12)).astype("f4")
    scaling = pe.YaRN(factor=1.0, original_max_position=64, attention_factor=1.25)
    scheme = pe.ReRoPE(head_dim=12, scaling=scaling)
    frequencies, _ = pe.rope_frequencies(12)
    for position, slope, offset in [(1, 1.0, 0.5), (257, 0.25, 31.25), (10**6, 1 / 3, 32768.75)]:
        out = scheme.rotated(jnp.asarray(x), jnp.array([[position]]), slope=slope, offset=offset)
        expected = 1.25 * turned(x, (slope * position + offset) * frequencies)
        np.testing.assert_allclose(out, expected, atol=2e-6)
