"""Shaw et al. against tensor2tensor's code and the paper's equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests import oracle
from tests.oracle import qkv, softmax_attention
from tests.support import golden, parameters, slow

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


def attend(scheme, params, arrays, **options):
    return oracle.attend(scheme, params, *arrays, **options)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"clip{case['clip']}")
def test_matches_the_code_of_tensor2tensor(case):
    arrays = {name: jnp.array(case[name]) for name in ("q", "k", "v", "keys", "values", "out")}
    q, k, v, out = (jnp.swapaxes(arrays[name], 1, 2) for name in ("q", "k", "v", "out"))
    scheme = pe.Shaw(num_heads=q.shape[2], head_dim=q.shape[3], clip=case["clip"])
    params = {name: arrays[name][None] for name in ("keys", "values")}
    np.testing.assert_allclose(
        attend(scheme, params, (q, k, v), is_causal=case["is_causal"]), out, atol=2e-6
    )


def test_logits_worked_out_by_hand():
    # q_i . (k_j + a[clip(j - i, -1, 1)]) / sqrt(2) for q, k below; each is a sum of two products.
    q = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
    k = np.array([[1, 1], [0, 1], [-1, 0]], np.float32)
    a = np.array([[1, 0], [0, 0], [0, 1]], np.float32)  # Rows -1, 0, +1.
    dots = [[1 + 0, 0 + 0, -1 + 0], [1 + 0, 1 + 0, 0 + 1], [2 + 1, 1 + 1, -1 + 0]]
    scheme = pe.Shaw(num_heads=1, head_dim=2, clip=1, values=False)
    q_features, k_features, _ = scheme.features(
        {}, None, jnp.asarray(q)[None, :, None], None, None, None, None
    )
    rule = scheme.rules({"keys": jnp.asarray(a)[None]}, q_features, k_features)[0]
    positions = jnp.arange(3)
    terms = rule.added_logits(rule.q_features[0], None, positions, positions)[0]
    got = (q @ k.T + terms) / np.sqrt(2)
    np.testing.assert_allclose(got, np.array(dots) / np.sqrt(2), rtol=1e-6)
    printed = [
        [0.707107, 0, -0.707107],
        [0.707107, 0.707107, 0.707107],
        [2.12132, 1.414214, -0.707107],
    ]
    np.testing.assert_allclose(got, printed, atol=1e-6)


VARIANTS = [
    {},
    {"clip": 0},
    {"clip": 70},
    {"values": False},
    {"keys": False},
    {"per_head": True},
    {"per_head": True, "clip": 3},
]


@pytest.mark.parametrize(
    "options, is_causal",
    [
        pytest.param(o, causal, marks=() if causal == n % 2 or n == 6 else slow)
        for n, o in enumerate(VARIANTS)
        for causal in (True, False)
    ],
    ids=str,
)
def test_attention_matches_the_paper(options, is_causal):
    arrays = qkv(length=21)
    scheme = pe.Shaw(num_heads=6, head_dim=8, **options)
    params = jax.tree.map(lambda x: 3 * x, parameters(scheme))
    expected = paper(*arrays, params, scheme.clip, sees=lambda i, j: j <= i or not is_causal)
    np.testing.assert_allclose(
        attend(scheme, params, arrays, is_causal=is_causal), expected, atol=1e-5
    )


def test_attention_matches_the_paper_at_far_positions():
    arrays = qkv(length=21)
    positions = np.r_[1, 257, 10**6 + np.arange(19)]
    scheme = pe.Shaw(num_heads=6, head_dim=8, clip=5)
    params = parameters(scheme)
    expected = paper(*arrays, params, 5, positions=positions)
    out = attend(scheme, params, arrays, is_causal=True, positions=jnp.asarray(positions))
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
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize(
    "clip, per_head, implementation",
    [
        pytest.param(
            *(clip, per_head, i),
            marks=() if (i == "xla") == per_head ^ (clip == 80) else slow,
        )
        for clip in (5, 80)
        for per_head in (False, True)
        for i in ("reference", "xla")
    ],
)
def test_zero_beyond_matches_music_transformer(clip, per_head, implementation):
    q, k, v = qkv(kv_heads=6)
    scheme = pe.Shaw(
        num_heads=6, head_dim=8, clip=clip, values=False, per_head=per_head, zero_beyond=True
    )
    params = jax.tree.map(lambda x: 3 * x, parameters(scheme))
    options = {"is_causal": True, "implementation": implementation}
    out = attend(scheme, params, (q, k, v), **options)
    for n in range(6):
        table = params["keys"][n if per_head else 0][: clip + 1]
        expected = music_transformer(q[0, :, n], k[0, :, n], v[0, :, n], table)
        np.testing.assert_allclose(out[0, :, n], expected, atol=1e-5)
    clipped = attend(scheme.replace(zero_beyond=False), params, (q, k, v), **options)
    assert (np.abs(out - clipped).max() > 1e-3) == (clip < 62)


def test_zero_beyond_for_values():
    arrays = qkv(length=21)
    scheme = pe.Shaw(num_heads=6, head_dim=8, clip=4, zero_beyond=True)
    params = parameters(scheme)
    padded = {name: jnp.pad(x, ((0, 0), (1, 1), (0, 0))) for name, x in params.items()}
    expected = paper(*arrays, padded, 5, sees=lambda i, j: True)
    np.testing.assert_allclose(attend(scheme, params, arrays), expected, atol=1e-5)


def test_initialisation_is_glorot_and_follows_the_options():
    def shapes(**options):
        scheme = pe.Shaw(num_heads=6, head_dim=8, **options)
        return {name: x.shape for name, x in scheme.init(jax.random.key(0)).items()}

    assert shapes() == {"keys": (1, 33, 8), "values": (1, 33, 8)}
    assert shapes(keys=False, clip=0) == {"values": (1, 1, 8)}
    assert shapes(values=False, per_head=True, clip=2) == {"keys": (6, 5, 8)}
    params = pe.Shaw(num_heads=1, head_dim=512).init(jax.random.key(0))
    limit = np.sqrt(6 / (33 + 512))
    for table in params.values():  # The default initialiser of T2T's get_variable.
        assert 0.99 * limit < np.abs(table).max() <= limit
    assert np.abs(params["keys"] - params["values"]).max() > 0.01


@pytest.mark.parametrize("per_head", [False, True])
def test_gradient_of_each_row_matches_finite_differences_of_the_paper(per_head):
    arrays = qkv(length=5, heads=2, kv_heads=1, dim=3)
    weights = np.random.default_rng(5).normal(size=(1, 5, 2, 3))
    scheme = pe.Shaw(num_heads=2, head_dim=3, clip=2, per_head=per_head)
    params = parameters(scheme)

    def loss(params):
        out = attend(scheme, params, arrays)
        return (out * jnp.asarray(weights, jnp.float32)).sum()

    grad = jax.jit(jax.grad(loss))(params)
    for name, table in params.items():
        for index in np.ndindex(table.shape):
            step = np.zeros(table.shape)
            step[index] = 1e-5
            up, down = (
                paper(*arrays, params | {name: np.asarray(table, np.float64) + s}, 2, sees=all_keys)
                for s in (step, -step)
            )
            slope = ((up - down) * weights).sum() / 2e-5
            np.testing.assert_allclose(grad[name][index], slope, atol=1e-5)
            assert abs(slope) > 1e-6, (name, index)


def all_keys(i, j):
    return True


def test_causal_attention_does_not_use_rows_of_the_future():
    scheme = pe.Shaw(num_heads=6, head_dim=8, clip=4)
    arrays = qkv(length=21)

    def loss(params):
        return (attend(scheme, params, arrays, is_causal=True) ** 2).sum()

    for grad in jax.jit(jax.grad(loss))(parameters(scheme)).values():
        assert np.all(np.asarray(grad)[:, 5:] == 0)
        assert np.all(np.abs(grad[:, :5]).max(-1) > 0)


ERRORS = [
    (pe.Shaw, {"clip": -1}, "clip must not be negative, got -1"),
    (pe.Shaw, {"num_heads": 0}, "num_heads must be >= 1, got 0"),
    (pe.Shaw, {"head_dim": 0}, "head_dim must be >= 1, got 0"),
    (pe.Shaw, {"keys": False, "values": False}, "keys and values must not both be False"),
]


@pytest.mark.parametrize("change", [{"num_heads": 3}, {"head_dim": 4}])
def test_errors_name_the_shapes(change):
    scheme = pe.Shaw(**{"num_heads": 6, "head_dim": 8, "values": False} | change)
    with pytest.raises(ValueError, match=r"shaw: q must be \[B, T, .*\], got \(1, 63, 6, 8\)"):
        attend(scheme, parameters(scheme), qkv())
