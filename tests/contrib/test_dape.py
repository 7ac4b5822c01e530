"""DAPE against the authors' code.

`authors` is chuanyang-Zheng/DAPE, DAPE.py, AliBi_DAPE and ParallelKerpleLog_DAPE, from torch
to NumPy in float64: `forward` from the scores of all heads on.
"""

import jax
import numpy as np
import pytest

from posenc_jax import contrib
from tests.oracle import attend, qkv, weighted
from tests.support import parameters

OPTIONS = {contrib.DAPE: {"base": "alibi", "width": 5}}


def slopes(n):
    power = 2 ** int(np.floor(np.log2(n)))
    start = 2 ** (-(2 ** -(np.log2(power) - 3)))
    powers = [start * start**i for i in range(power)]
    return powers if n == power else powers + slopes(2 * power)[0::2][: n - power]


def authors(x, params, base, positions):
    """x float64 [B, N, T, S]; future keys are masked by the caller."""
    diff = np.tril(positions[:, None] - positions[None, :]).astype(np.float64)
    if base == "alibi":
        bias = -diff * np.array(slopes(x.shape[1]))[:, None, None]
    else:
        p, a = (np.maximum(params["base"][n], 0.01)[:, None, None] for n in ("r1", "r2"))
        bias = -p * np.log(1 + a * diff)
    both = np.concatenate([x, np.tile(bias, (x.shape[0], 1, 1, 1))], 1).transpose(0, 2, 3, 1)
    hidden = both @ params["in"].T + params["in_bias"]
    hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
    mixed = hidden @ params["out"].T + 0.7  # A constant, which cancels in the softmax.
    return x + bias + mixed.transpose(0, 3, 1, 2)


def scores(q, k, params, base):
    """The logits of all heads, [B, N, T, S]."""
    q, k, params = jax.tree.map(lambda a: np.asarray(a, np.float64), (q, k, params))
    x = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    length = q.shape[1]
    return np.where(np.tri(length) > 0, authors(x, params, base, np.arange(length)), -np.inf)


@pytest.mark.parametrize(
    "options, heads, implementation",
    [({"width": 5}, 6, "xla"), ({"base": "alibi"}, 12, "reference")],
    ids=str,
)
def test_matches_the_code_of_the_authors(options, heads, implementation):
    q, k, v = qkv(batch=2, length=37, heads=heads)
    scheme = contrib.DAPE(num_heads=heads, **options)
    params = parameters(scheme, 0.2)
    out = attend(scheme, params, q, k, v, is_causal=True, implementation=implementation)
    k, v = (np.repeat(x, heads // x.shape[2], 2) for x in (k, v))
    expected = weighted(scores(q, k, params, scheme.base), v)
    np.testing.assert_allclose(out, expected, atol=1e-5)
