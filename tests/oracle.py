"""Attention as the papers write it: one query, one head, one key at a time, in float64.

It shares nothing with the library. What a scheme adds is written in its own test file.
`attend` is what it is compared with.
"""

import jax
import numpy as np

import posenc_jax as pe
from tests.support import run


def attend(scheme, params, *arrays, **options):
    """The output of `scheme_attention`."""
    traced = {n: x for n, x in options.items() if isinstance(x, jax.Array | np.ndarray)}
    static = tuple(sorted((n, x) for n, x in options.items() if n not in traced))
    return run(_attend, (scheme, static), params, arrays, traced)


def _attend(scheme, static, params, arrays, traced):
    return pe.scheme_attention(scheme, params, *arrays, **dict(static), **traced)[0]


def embed(scheme, params, x, coordinates):
    """`scheme.embed`."""
    return run(_hook, (scheme, "embed"), params, x, coordinates)


def _decode(scheme, params, cache, arrays, traced):
    return pe.scheme_attention(scheme, params, *arrays, cache=cache, is_causal=True, **traced)


def decode(scheme, params, cache, *arrays, **traced):
    """The output and the cache of one causal `scheme_attention`."""
    return run(_decode, (scheme,), params, cache, arrays, traced)


def query(scheme, params, q, coordinates):
    """`scheme.query`, as NumPy."""
    return np.asarray(run(_hook, (scheme, "query"), params, q, coordinates))


def key(scheme, params, k, coordinates):
    """`scheme.key`, as NumPy."""
    return np.asarray(run(_hook, (scheme, "key"), params, k, coordinates))


def _hook(scheme, name, *arguments):
    return getattr(scheme, name)(*arguments)


def apply_rope(x, positions, **settings):
    """`posenc_jax.apply_rope`, as NumPy."""
    return np.asarray(run(_apply_rope, (tuple(sorted(settings.items())),), x, positions))


def _apply_rope(settings, x, positions):
    return pe.apply_rope(x, positions, **dict(settings))


def qkv(batch=1, length=63, heads=6, kv_heads=3, dim=8, seed=0):
    """Normal float32 numbers. 6 heads are no power of two, 63 tokens no multiple of a tile.

    They are NumPy's, as slicing these compiles nothing.
    """
    random = np.random.default_rng(seed)
    sizes = (heads, kv_heads, kv_heads)
    return tuple(random.normal(size=(batch, length, n, dim)).astype("f4") for n in sizes)


def softmax_attention(q, k, v, logit, *, positions=None, sees=lambda i, j: j <= i, value=None):
    """Returns float64 [B, T, N, V].

    Args:
      q, k, v: [B, T, N, H], [B, T, K, H], [B, T, K, V]; consecutive heads share a key head.
      logit: `logit(q_i, k_j, n, i, j)`, the logit of head n for positions i and j.
      positions: of the T tokens. Default: 0, 1, ...
      sees: `sees(i, j)`, whether the query at i sees the key at j.
      value: `value(n, i, j)`, a vector to add to the value.
    """
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    batch, length, heads, _ = q.shape
    at = list(range(length)) if positions is None else [int(p) for p in positions]
    out = np.zeros((batch, length, heads, v.shape[-1]))
    for b, t, n in np.ndindex(batch, length, heads):
        m = n * k.shape[2] // heads
        keys = [s for s in range(length) if sees(at[t], at[s])]
        x = np.array([logit(q[b, t, n], k[b, s, m], n, at[t], at[s]) for s in keys])
        weights = np.exp(x - x.max())
        weights /= weights.sum()
        for s, w in zip(keys, weights, strict=True):
            more = 0.0 if value is None else value(n, at[t], at[s])
            out[b, t, n] += w * (v[b, s, m] + more)
    return out
