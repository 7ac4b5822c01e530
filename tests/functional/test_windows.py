"""`SlidingWindow`: first tokens that stay visible at their distances; windows by coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
import posenc_jax.nnx as pn
from posenc_jax.positions import from_tree
from tests import oracle
from tests.support import layer_of, run, slow

ARRAYS = oracle.qkv(length=63)
SLOPES = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]  # Press et al., for 6 heads.
WINDOW, SINKS = 9, 3
KEEPS_FIRST = pe.SlidingWindow(WINDOW, num_sink_tokens=SINKS)


def _rope(q, k, n, i, j):
    def rotated(x, at):
        z = (x[:4] + 1j * x[4:]) * np.exp(1j * at * 1e4 ** (-np.arange(4) / 4))
        return np.concatenate([z.real, z.imag])

    return rotated(q, i) @ rotated(k, j) / 8**0.5


def _product(q, k, *_):
    return q @ k / 8**0.5


def _alibi(q, k, n, i, j):
    return q @ k / 8**0.5 - SLOPES[n] * (i - j)


def _sees(i, j):
    return j <= i and (i - j < WINDOW or j < SINKS)


@pytest.mark.parametrize(
    "implementation, scheme, logit",
    [("xla", pe.RoPE(head_dim=8), _rope), ("dense", pe.ALiBi(num_heads=6), _alibi)],
)
def test_first_tokens_are_seen_at_their_distances(implementation, scheme, logit):
    options = {"is_causal": True, "window": KEEPS_FIRST, "implementation": implementation}
    out = oracle.attend(scheme, {}, *ARRAYS, **options)
    expected = oracle.softmax_attention(*ARRAYS, logit, sees=_sees)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@slow
def test_first_tokens_begin_at_position_zero():
    at = np.arange(63) - 40  # Of which the window, or a mask, hides those before 0.
    sees = (at[:, None] - at < WINDOW) | ((at >= 0) & (at < SINKS))
    options = {"positions": at, "is_causal": True}
    out = oracle.attend(pe.NoPE(), {}, *ARRAYS, window=KEEPS_FIRST, **options)
    expected = oracle.attend(pe.NoPE(), {}, *ARRAYS, mask=sees[None, None], **options)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_a_layer_decodes_in_a_ring_that_keeps_first_tokens():
    spec = pe.LayerSpec(pe.RoPE(8), window=KEEPS_FIRST)
    options = {"position": spec, "is_causal": True}
    layer = layer_of(lambda rngs: pn.Attention(16, 2, rngs=rngs, **options))
    x = np.random.default_rng(0).normal(size=(2, 40, 16)).astype("f4")

    @jax.jit
    def outputs(x):
        def step(cache, part):
            return layer(part, cache=cache)[::-1]

        cache = layer.new_cache(2, 40, tokens_per_call=4)
        cache, outs = jax.lax.scan(step, cache, x.reshape(2, 10, 4, 16).swapaxes(0, 1))
        return layer(x), outs, cache

    whole, steps, cache = outputs(x)
    np.testing.assert_allclose(np.concatenate(steps, 1), whole, atol=1e-5)
    assert cache.ring and cache.capacity == SINKS + WINDOW - 1 + 4
    plain = jax.eval_shape(lambda: layer.new_cache(2, 20, ring=True))
    assert plain.storage.num_sink_tokens == SINKS


def _images(length):
    """Text, an image of 12 tokens, text, and another image of 8: images, and their positions."""
    image = np.full(length, -1)
    image[5:17], image[30:38] = 0, 1
    at = np.arange(length)
    return image, np.where(image == 0, 5, np.where(image == 1, 30, at))


@pytest.mark.parametrize("window", [16, None])
def test_images_see_themselves_as_in_gemma_3(window):
    """transformers 5.23, masking_utils.py: causal and `kv_idx > q_idx - window`, or one image."""
    length, image, positions = 63, *_images(63)
    at = np.arange(length)
    seen = at[:, None] >= at
    seen &= (at[:, None] - at < window) if window else True
    seen |= (image[:, None] == image) & (image >= 0)
    sliding = window and pe.SlidingWindow((window - 1, -1), by="coordinates")
    options = {"positions": positions, "coordinates": at, "is_causal": True, "window": sliding}
    out = oracle.attend(pe.NoPE(), {}, *ARRAYS, **options, implementation="xla")
    expected = oracle.softmax_attention(*ARRAYS, _product, sees=lambda i, j: seen[i, j])
    np.testing.assert_allclose(out, expected, atol=1e-5)


@slow
def test_a_window_counts_depths_of_a_tree():
    """Every branch equals its sequence alone in the same window; so do steps of a cache."""
    parents = np.r_[np.arange(30) - 1, [10, 30, 31, 32, 29, 34, 35, 36, 35]]
    tree, window = run(from_tree, (), parents), pe.SlidingWindow(6, by="coordinates")
    arrays = tuple(x[:, : len(parents)] for x in ARRAYS)
    branch = np.r_[np.arange(30), 34, 35, 36, 37]

    @jax.jit
    def outputs(*arrays):
        options = {"is_causal": True, "window": window}
        whole, _ = pe.scheme_attention(pe.RoPE(8), {}, *arrays, **options, **tree._asdict())
        sizes = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8}
        cache = pe.new_cache(
            pe.RoPE(8), 1, 50, **sizes, coordinates=np.zeros(1, int), visible_until=True
        )
        outs = []
        for part in slice(0, 30), slice(30, 39):
            places = {name: x[part] for name, x in tree._asdict().items()}
            new = (x[:, part] for x in arrays)
            out, cache = pe.scheme_attention(pe.RoPE(8), {}, *new, cache=cache, **options, **places)
            outs.append(out)
        alone = (x[:, branch] for x in arrays)
        expected, _ = pe.scheme_attention(pe.RoPE(8), {}, *alone, is_causal=True, window=6)
        return whole, jnp.concatenate(outs, 1), expected

    whole, steps, expected = outputs(*arrays)
    np.testing.assert_allclose(whole[:, branch], expected, atol=1e-5)
    np.testing.assert_allclose(steps, whole, atol=1e-5)


def test_windows_that_do_not_fit_are_refused():
    for settings, message in (
        ({"window": 5, "num_sink_tokens": -1}, "num_sink_tokens must be >= 0, got -1"),
        ({"window": (-1, 0), "num_sink_tokens": 4}, "num_sink_tokens needs a window with a left"),
        ({"window": 5, "num_sink_tokens": 4, "by": "coordinates"}, "left side, by positions, got"),
        ({"window": 5, "by": "slots"}, "by must be one of .*'positions', 'coordinates'.*'slots'"),
        ({"window": 0}, "window must be at least 1 token, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            pe.SlidingWindow(**settings)
    with pytest.raises(TypeError, match="window must be an integer or a pair, got None"):
        pe.SlidingWindow(None)
    with pytest.raises(ValueError, match="chunk_size has no SlidingWindow beside it"):
        pe.LayerSpec(pe.NoPE(), window=KEEPS_FIRST, chunk_size=4)
    options = {"is_causal": True, "window": KEEPS_FIRST}

    def attend(scheme, arrays, cache=None, **options):
        return jax.eval_shape(
            lambda arrays, cache: pe.scheme_attention(scheme, {}, *arrays, cache=cache, **options),
            arrays,
            cache,
        )

    for scheme in pe.streaming(pe.RoPE(8)), pe.ReRoPE(8, window=3):
        with pytest.raises(NotImplementedError, match="a SlidingWindow, as queries have other po"):
            attend(scheme, ARRAYS, **options)
    sizes = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8}
    one = [x[:, :1] for x in ARRAYS]
    ring = pe.new_cache(pe.NoPE(), 1, 20, ring=True, **sizes)
    with pytest.raises(ValueError, match="needs a ring with its num_sink_tokens, got 0"):
        attend(pe.NoPE(), one, ring, **options)
    away = {"is_causal": True, "window": pe.SlidingWindow(5, by="coordinates")}
    with pytest.raises(ValueError, match="a ring counts positions, and the window coordinates"):
        attend(pe.NoPE(), one, ring, **away)
    cache = pe.new_cache(pe.NoPE(), 1, 20, **sizes)
    with pytest.raises(ValueError, match="the scheme or the window reads the coordinates of cac"):
        attend(pe.NoPE(), one, cache, coordinates=np.ones(1), **away)
    with pytest.raises(ValueError, match=r"needs coordinates of one axis, got \(2,\) axes"):
        pe.attention(*ARRAYS, q_coordinates=np.zeros((2, 1, 63), int), **away)


@pytest.mark.parametrize("window", [[3, 0], pe.SlidingWindow([3, 0])], ids=str)
def test_a_ring_takes_the_lists_of_a_config_for_pairs(window):
    """JSON has no pairs. An array is refused in the words of attention, not in those of `jit`."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 8)).astype(np.float32)

    def prompt(window):
        cache = pe.new_cache(pe.RoPE(8), 1, 9, num_heads=2, head_dim=8, ring=True)
        options = {"is_causal": True, "cache": cache, "window": window}
        return pe.scheme_attention(pe.RoPE(8), {}, q, k, v, **options)[0]

    np.testing.assert_array_equal(*jax.jit(lambda: (prompt(window), prompt((3, 0))))())
    with pytest.raises(TypeError, match="window must be an integer, a pair or a SlidingWindow"):
        jax.eval_shape(lambda: prompt(np.array([3, 0])))
