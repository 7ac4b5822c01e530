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


def waves(*shape):
    """Numbers that makers of golden files have too."""
    return np.sin(1 + np.arange(np.prod(shape))).reshape(shape).astype("f4")


def turned(x, angles):
    """The first and the second half of x [..., H], turned by angles [..., H / 2], in float64."""
    a, b = np.split(np.asarray(x, np.float64), 2, -1)
    c, s = np.cos(angles), np.sin(angles)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def weighted(logits, v):
    """The average of v [B, S, N, V] by the softmax of logits [B or none, N, T, S], in float64."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).reshape(-1, *logits.shape[-3:])
    return np.einsum("bnts,bsnv->btnv", weights, np.asarray(v, np.float64))


def slice_of(n, size):
    """The n-th part of that size."""
    return slice(n * size, (n + 1) * size)


def by_head(attention, q, k, v):
    """`attention(q, k, v)` of each head, [T, H], [S, H] and [S, V]: [B, T, N, V]."""
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        out[b, :, n] = attention(q[b, :, n], k[b, :, n], v[b, :, n])
    return out


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
    seen = [[s for s in range(length) if sees(i, at[s])] for i in at]
    for b, t, n in np.ndindex(batch, length, heads):
        m, keys = n * k.shape[2] // heads, seen[t]
        x = np.array([logit(q[b, t, n], k[b, s, m], n, at[t], at[s]) for s in keys])
        weights = np.exp(x - x.max())
        weights /= weights.sum()
        more = 0.0 if value is None else np.array([value(n, at[t], at[s]) for s in keys])
        out[b, t, n] = weights @ (v[b, keys, m] + more)
    return out


def matches_products(scheme, product, *, start=0, heads=6, kv_heads=3):
    """Compares causal attention from a position on with `product(q, k, i, j, frequencies)`."""
    q, k, v = qkv(length=27, heads=heads, kv_heads=kv_heads, dim=12)
    w, positions = 1e4 ** (-np.arange(6) / 6), start + np.arange(27)

    def logit(q, k, n, i, j):
        return product(q, k, i, j, w) / np.sqrt(12)

    expected = softmax_attention(q, k, v, logit, positions=positions)
    out = attend(scheme, {}, q, k, v, positions=positions, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def attention(arrays, added, seen, d_out, d_lse, *, sinks=None, scale=8**-0.5, softcap=None):
    """Returns output, log-sum-exp, and the cotangents of q, k, v, logits and sinks, in float64.

    Logits are added in float32, as -1e9 + 3 is -1e9 there.

    Args:
      arrays: q, k and v [1, T, heads, H].
      added: numbers added to the logits, [N or 1, T, S].
      seen: bool [T, S], the pairs that are not hidden.
      d_out, d_lse: the cotangents of output and log-sum-exp.
      sinks: [N] or [T, N].
      scale, softcap: as in `pe.attention`.
    """
    scale = np.float32(scale)
    q, k, v = (np.asarray(x[0], np.float64) for x in arrays)
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, 1) for x in (k, v))
    logits = np.einsum("tnh,snh->nts", q, k) * scale
    logits, slope = (logits.astype("f4") + added).astype(np.float64), 1.0
    if softcap is not None:
        bounded = np.tanh(logits / softcap)
        logits, slope = softcap * bounded, 1 - bounded**2
    logits = np.where(seen, logits, -np.inf)
    per_query = np.full(q.shape[:2], -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    per_query = np.broadcast_to(per_query, q.shape[:2]).T
    top = np.maximum(logits.max(-1), per_query)
    top = np.where(np.isneginf(top), 0.0, top)
    p, of_sinks = np.exp(logits - top[..., None]), np.exp(per_query - top)
    total = p.sum(-1) + of_sinks
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    total = np.where(total == 0, 1.0, total)
    p, of_sinks = p / total[..., None], of_sinks / total
    out = np.einsum("nts,snv->tnv", p, v)
    delta = np.einsum("tnv,tnv->nt", d_out[0], out) - d_lse[0].T
    ds = p * (np.einsum("tnv,snv->nts", d_out[0], v) - delta[..., None]) * slope
    d_k = np.einsum("nts,tnh->snh", ds, q) * scale
    d_v = np.einsum("nts,tnv->snv", p, d_out[0])
    d_k, d_v = (x.reshape(len(x), kv_heads, group, -1).sum(2) for x in (d_k, d_v))
    d_q = np.einsum("nts,snh->tnh", ds, k) * scale
    d_sinks = -(of_sinks * delta).T
    d_sinks = d_sinks if np.ndim(sinks) == 2 else d_sinks.sum(0)
    return *(x[None] for x in (out, lse.T, d_q, d_k, d_v)), ds, d_sinks
