"""Shaw et al. against tensor2tensor's code and the paper's equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, qkv, softmax_attention, weighted
from tests.support import golden, parameters

OPTIONS = {
    pe.Shaw: {"clip": 3, "keys": False, "values": False, "per_head": True, "zero_beyond": True}
}

GOLDEN = golden("shaw")


def paper(q, k, v, params, clip, **options):
    """Equations 3 and 4 of the paper; tables [1 or N, 2 clip + 1, H]."""

    def row(table, n, i, j):
        table = np.asarray(params[table], np.float64)
        return table[n % len(table), clip + max(-clip, min(clip, j - i))]

    def logit(q, k, n, i, j):
        key = k + row("keys", n, i, j) if "keys" in params else k
        return q @ key / np.sqrt(len(q))

    value = (lambda n, i, j: row("values", n, i, j)) if "values" in params else None
    return softmax_attention(q, k, v, logit, value=value, **options)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"clip{case['clip']}")
def test_matches_the_code_of_tensor2tensor(case):
    arrays = {name: jnp.array(case[name]) for name in ("q", "k", "v", "keys", "values", "out")}
    q, k, v, out = (jnp.swapaxes(arrays[name], 1, 2) for name in ("q", "k", "v", "out"))
    scheme = pe.Shaw(num_heads=q.shape[2], head_dim=q.shape[3], clip=case["clip"])
    params = {name: arrays[name][None] for name in ("keys", "values")}
    got = attend(scheme, params, q, k, v, is_causal=case["is_causal"])
    np.testing.assert_allclose(got, out, atol=2e-6)


VARIANTS = [
    {"clip": 0},
    {"clip": 70, "values": False},
    {"keys": False, "clip": 5},
    {"per_head": True, "clip": 3},
    {"zero_beyond": True, "clip": 4},
]


@pytest.mark.parametrize("n, options", list(enumerate(VARIANTS)), ids=str)
def test_attention_matches_the_paper(n, options):
    is_causal, arrays = n % 2 == 1, qkv(length=21)
    scheme = pe.Shaw(num_heads=6, head_dim=8, **options)
    params = jax.tree.map(lambda x: 3 * x, parameters(scheme))
    zeros = scheme.zero_beyond * 1  # Of a row at each end, which is one distance further.
    padded = {name: np.pad(x, ((0, 0), (zeros, zeros), (0, 0))) for name, x in params.items()}
    sees = {"sees": lambda i, j: j <= i or not is_causal}
    expected = paper(*arrays, padded, scheme.clip + zeros, **sees)
    out = attend(scheme, params, *arrays, is_causal=is_causal)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def music_transformer(q, k, v, embeddings):
    """Of one head, [T, H] each and the table [M, H], whose last row is distance 0.

    tensorflow/tensor2tensor, layers/common_attention.py, dot_product_self_attention_relative_v2
    with get_relative_embeddings_left and _relative_position_to_absolute_position_masked, from
    TensorFlow to NumPy in float64.
    """
    q, k, v, embeddings = (np.asarray(a, np.float64) for a in (q, k, v, embeddings))
    length, reach = len(q), len(embeddings)
    padded = np.pad(embeddings, ((max(length - reach, 0), 0), (0, 0)))
    start = max(reach - length, 0)
    relative = q @ padded[start : start + length].T
    relative = np.pad(relative, ((0, 0), (1, 0))).reshape(1 + length, length)[1:]
    logits = np.where(np.tri(length) > 0, (q @ k.T + relative) / np.sqrt(q.shape[1]), -np.inf)
    return weighted(logits[None], v[None, :, None])[0, :, 0]


@pytest.mark.parametrize(
    "clip, per_head, implementation", [(5, False, "reference"), (5, True, "xla"), (80, True, "xla")]
)
def test_zero_beyond_matches_music_transformer(clip, per_head, implementation):
    q, k, v = qkv(kv_heads=6)
    scheme = pe.Shaw(
        num_heads=6, head_dim=8, clip=clip, values=False, per_head=per_head, zero_beyond=True
    )
    params = jax.tree.map(lambda x: 3 * x, parameters(scheme))
    options = {"is_causal": True, "implementation": implementation}
    out = attend(scheme, params, q, k, v, **options)
    for n in range(6):
        table = params["keys"][n if per_head else 0][: clip + 1]
        expected = music_transformer(*(x[0, :, n] for x in (q, k, v)), table)
        np.testing.assert_allclose(out[0, :, n], expected, atol=1e-5)
    clipped = attend(scheme.replace(zero_beyond=False), params, q, k, v, **options)
    assert (np.abs(out - clipped).max() > 1e-3) == (clip < 62)


ERRORS = [(pe.Shaw, {"keys": False, "values": False}, "keys and values must not both be False")]
