"""StreamingLLM against the authors' cache, one token at a time in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, qkv, turned
from tests.support import parameters, run, slow

ARRAYS = qkv(length=40)
Q, K, V = (np.asarray(x[0], np.float64) for x in ARRAYS)
NEAR = {"is_causal": True, "window": (8, 0)}


def authors(logit, start, recent):
    """mit-han-lab/streaming-llm, examples/eval_long_ppl.py and StartRecentKVCache.__call__.

    A step, then eviction; positions are places in the cache.
    """
    cache, out = [], np.zeros((40, 6, 8))
    for i in range(40):
        cache = [*cache, i]
        for n in range(6):
            here = len(cache) - 1
            x = [logit(Q[i, n], K[j, n // 2], n, here, p) for p, j in enumerate(cache)]
            weights = np.exp(np.array(x) - max(x))
            out[i, n] = weights @ V[cache, n // 2] / weights.sum()
        if len(cache) > start + recent:
            cache = cache[:start] + cache[len(cache) - recent :]
    return out


def rope(q, k, n, i, j):
    w = 1e4 ** (-np.arange(4) / 4)
    return turned(q, i * w) @ turned(k, j * w) / np.sqrt(8)


def alibi(q, k, n, i, j):
    return q @ k / np.sqrt(8) - float(pe.alibi_slopes(6)[n]) * (i - j)


def step(scheme, cache, placement, *arrays):
    return run(_step, (scheme,), cache, placement, arrays)


def _step(scheme, cache, placement, arrays):
    options = NEAR | placement
    return pe.scheme_attention(scheme, {}, *arrays, cache=cache, **options)


SCHEMES = {"rope": (pe.RoPE(head_dim=8), rope), "alibi": (pe.ALiBi(num_heads=6), alibi)}


@pytest.mark.parametrize(
    "name, start, recent, implementation, softcap",
    [("rope", 4, 8, "reference", 0.7), ("alibi", 1, 3, "xla", None), ("rope", 3, 1, "xla", None)],
)
def test_matches_the_authors(name, start, recent, implementation, softcap):
    scheme, logit = SCHEMES[name]
    options = {"window": (recent, 0), "softcap": softcap, "implementation": implementation}
    out = attend(pe.streaming(scheme, start), {}, *ARRAYS, is_causal=True, **options)

    def capped(*arguments):
        return softcap * np.tanh(logit(*arguments) / softcap) if softcap else logit(*arguments)

    np.testing.assert_allclose(out[0], authors(capped, start, recent), atol=1e-5)


def test_a_ring_keeps_the_first_tokens():
    scheme, chunk = pe.streaming(pe.RoPE(head_dim=8), 4), 5
    assert not scheme.traits.relative  # Coordinates are clipped from 0 on.
    whole = np.asarray(attend(scheme, {}, *ARRAYS, **NEAR))
    sizes = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "ring": True}
    cache = pe.new_cache(scheme, 1, 4 + 8 + chunk, **sizes)
    for begin in range(0, 40, chunk):
        part = slice(begin, begin + chunk)
        out, cache = step(scheme, cache, {}, *(a[:, part] for a in ARRAYS))
        np.testing.assert_allclose(out, whole[:, part], atol=2e-5)
    small = pe.new_cache(scheme, 1, 4 + 8 + chunk - 1, **sizes)
    with pytest.raises(ValueError, match=f"need a ring of {4 + 8 + chunk} slots"):
        step(scheme, small, {}, *(a[:, :chunk] for a in ARRAYS))


@slow
def test_a_ring_loses_the_sink_tokens_of_a_second_sequence():
    """Sequences packed in one row: the reserved slots hold the first tokens of the first one."""
    scheme = pe.streaming(pe.RoPE(head_dim=8), 4)
    q, k, v = (np.concatenate([x, x]) for x in ARRAYS)
    segments = np.where(np.arange(40)[None] >= np.array([[40], [3]]), 1, 0)
    positions = np.stack([np.arange(40), np.r_[0:3, 0:37]]).astype(np.int32)
    placement = {"positions": positions, "segment_ids": segments}
    whole = np.asarray(attend(scheme, {}, q, k, v, **placement, **NEAR))
    cache = pe.new_cache(scheme, 2, 16, num_heads=6, num_kv_heads=3, head_dim=8, ring=True)
    for t in range(30):
        here = {name: x[:, t : t + 1] for name, x in placement.items()}
        out, cache = step(scheme, cache, here, *(x[:, t : t + 1] for x in (q, k, v)))
        out = np.asarray(out)
        # Slot 4 holds the position 1 of the second sequence, and is the first to be reused.
        assert np.isnan(out[1]).all() == (t >= 16)
        rows = slice(0, 1 if t >= 16 else 2)
        np.testing.assert_allclose(out[rows], whole[rows, t : t + 1], atol=2e-5)
    np.testing.assert_array_equal(cache.overflowed, [False, True])


def test_every_packed_sequence_keeps_its_first_tokens():
    scheme = pe.streaming(pe.ALiBi(num_heads=6), 2)
    options = {"is_causal": True, "window": (5, 0)}
    segments = np.array([[0] * 17 + [1] * 20 + [-1] * 3], np.int32)
    positions = np.r_[0:17, 0:20, [0] * 3].astype(np.int32)[None]
    placement = {"positions": positions, "segment_ids": segments}
    out = np.asarray(attend(scheme, {}, *ARRAYS, **placement, **options))
    # The same tokens first in a row, in one segment: the causal mask hides what follows.
    placement = {"positions": np.arange(40, dtype=np.int32)[None], "segment_ids": 0 * segments}
    alone = attend(scheme, {}, *(np.roll(a, -17, 1) for a in ARRAYS), **placement, **options)
    np.testing.assert_allclose(out[:, 17:37], np.asarray(alone)[:, :20], atol=1e-5)
    assert np.all(out[:, 37:] == 0)


@slow
def test_content_and_value_rules_stream():
    """Shaw clips distances: beyond the clip the first tokens are as far as any."""
    shaw = pe.Shaw(num_heads=6, head_dim=8, clip=3)
    params = parameters(shaw)
    out = attend(pe.streaming(shaw, 4), params, *ARRAYS, **NEAR)
    i, j = np.arange(40)[:, None], np.arange(40)[None]
    seen = (i - j <= 8) | (j < 4)
    expected = attend(shaw, params, *ARRAYS, is_causal=True, mask=jnp.asarray(seen)[None, None])
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_calls_without_a_causal_window_are_refused():
    scheme = pe.streaming(pe.RoPE(head_dim=8))
    for options in ({}, {"is_causal": True}, {"window": (3, 0)}):
        with pytest.raises(ValueError, match="needs is_causal=True and a window, got window"):
            attend(scheme, {}, *ARRAYS, **options)
    prefix = jnp.ones(1, int)
    with pytest.raises(NotImplementedError, match="streaming: prefix_length"):
        attend(scheme, {}, *ARRAYS, is_causal=True, window=3, prefix_length=prefix)


def refused(message, *arguments):
    return lambda: pe.streaming(*arguments), {}, f"streaming: .*{message}"


ERRORS = [
    refused("must read positions and not replace attention", pe.ReRoPE(head_dim=8)),
    refused("scales q and k", pe.chain(pe.XPos(head_dim=8), pe.ALiBi(num_heads=6))),
    refused("must depend on the distance of tokens alone", pe.FIRE(num_heads=6)),
    refused("must depend on the distance of tokens alone", pe.Sinusoidal(model_dim=8)),
    refused("CoPE.* reads all keys between", pe.chain(pe.RoPE(8), pe.CoPE(8)), 2),
    refused("first must be >= 1, got 0", pe.RoPE(head_dim=8), 0),
]
