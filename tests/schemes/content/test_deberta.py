"""DeBERTa against the authors' code.

`log_bucket` and `authors` are microsoft/DeBERTa, DeBERTa/deberta/da_utils.py,
make_log_bucket_position, and disentangled_attention.py, disentangled_att_bias with the
scores of forward, from torch to NumPy in float64, for one sequence.
"""

import chex
import jax
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.schemes.content.deberta import deberta_boundaries
from tests.oracle import attend, qkv, weighted
from tests.support import Option, initial, parameters, slow

OPTIONS = {
    pe.DeBERTa: {
        "span": Option(8, {"max_distance": 512}),
        "max_distance": Option(20, {"span": 8}),
        "content_to_position": False,
        "position_to_content": False,
        "projected": True,
        "stddev": initial(0.1),
    }
}


def log_bucket(relative_pos, bucket_size, max_position):
    sign, mid = np.sign(relative_pos), bucket_size // 2
    inside = (relative_pos < mid) & (relative_pos > -mid)
    abs_pos = np.where(inside, mid - 1, np.abs(relative_pos)).astype(np.float64)
    log_pos = np.log(abs_pos / mid) / np.log((max_position - 1) / mid) * (mid - 1)
    return np.where(abs_pos <= mid, relative_pos, (np.ceil(log_pos) + mid) * sign).astype(int)


def authors(q, k, pos_key, pos_query, span, max_position, positions):
    """[T, N, H] twice and [2 span, N, H] twice, one None or neither: scores [N, T, T]."""
    q, k = (np.moveaxis(np.asarray(a, np.float64), 1, 0) for a in (q, k))
    scale_factor = 1 + (pos_key is not None) + (pos_query is not None)
    relative_pos = positions[:, None] - positions[None, :]
    if max_position is not None:
        relative_pos = log_bucket(relative_pos, span, max_position)
    query = q / np.sqrt(q.shape[-1] * scale_factor)
    score = query @ np.swapaxes(k, 1, 2)
    if pos_key is not None:
        c2p_att = np.einsum("nih,rnh->nir", query, np.asarray(pos_key, np.float64))
        c2p_pos = np.clip(relative_pos + span, 0, span * 2 - 1)
        score = score + np.take_along_axis(c2p_att, c2p_pos[None].repeat(len(q), 0), -1)
    if pos_query is not None:
        pos_query = np.asarray(pos_query, np.float64) / np.sqrt(q.shape[-1] * scale_factor)
        p2c_pos = np.clip(-relative_pos + span, 0, span * 2 - 1)
        p2c_att = np.einsum("njh,rnh->njr", k, pos_query)
        p2c_att = np.take_along_axis(p2c_att, p2c_pos[None].repeat(len(q), 0), -1)
        score = score + np.swapaxes(p2c_att, 1, 2)
    return score


def make(**options):
    scheme = pe.DeBERTa(num_heads=6, head_dim=8, model_dim=20, stddev=0.4, **options)
    return scheme, parameters(scheme)


def projected(params):
    """K and Q of the paper, [2 span, N, H]."""
    tables = {}
    for name in ("keys", "queries"):
        if name in params:
            tables[name] = params[name]
            if "table" in params:
                tables[name] = np.einsum("rd,dnh->rnh", params["table"], params[name])
    if "bias" in params:
        tables["queries"] = tables["queries"] + np.asarray(params["bias"])
    return tables.get("keys"), tables.get("queries")


VARIANTS = [
    {"span": 8, "max_distance": 20},
    {},
    {"span": 6, "max_distance": 31, "projected": True},
    {"span": 10, "max_distance": None},
    {"span": 8, "max_distance": 20, "content_to_position": False},
    {"span": 8, "max_distance": 20, "position_to_content": False},
]


@pytest.mark.parametrize(
    "n, options",
    [pytest.param(n, o, marks=slow if n in (2, 3) else ()) for n, o in enumerate(VARIANTS)],
    ids=str,
)
def test_matches_the_code_of_the_authors(n, options):
    q, k, v = qkv(length=37, kv_heads=6)
    scheme, params = make(**options)
    is_causal, far = n % 2 == 0, n % 2 == 1
    positions = np.r_[1, 257, 10**6 + np.arange(35)] if far else np.arange(37)
    scores = authors(q[0], k[0], *projected(params), scheme.span, scheme.max_distance, positions)
    expected = weighted(np.where(np.tri(37) > 0, scores, -np.inf) if is_causal else scores, v)
    options = {
        "is_causal": is_causal,
        "scale": (8 * (1 + scheme.content_to_position + scheme.position_to_content)) ** -0.5,
        "implementation": ("reference", "xla")[n // 2 % 2],
    }
    options |= {"positions": positions} if far else {}
    out = attend(scheme, params, q, k, v, **options)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("options", VARIANTS[-2:], ids=str)
def test_projections_in_place_of_the_table(options):
    scheme, params = make(**options)
    same, arrays = scheme.with_projections(params)
    assert same == scheme.replace(projected=True)
    chex.assert_trees_all_equal_shapes(arrays, jax.eval_shape(same.init, jax.random.key(0)))
    for name, expected in zip(("keys", "queries"), projected(params), strict=True):
        if expected is not None:
            np.testing.assert_allclose(arrays[name], expected, atol=1e-5)


@pytest.mark.parametrize("span, last", [(256, 512), (6, 31), (4, 5)])
def test_buckets_are_those_of_the_authors(span, last):
    distances = np.arange(-3 * last, 3 * last)
    rows = np.clip(log_bucket(distances, span, last) + span, 0, 2 * span - 1)
    scheme = pe.DeBERTa(1, head_dim=1, model_dim=1, span=span, max_distance=last, projected=True)
    params = dict.fromkeys(("keys", "queries"), np.arange(2.0 * span, dtype="f4")[:, None, None])

    @jax.jit
    def vectors(distances):
        terms = scheme.rules(params, None, None)
        assert all(term.bounds == (-last, last - 1) for term in terms)
        return [term.vectors(distances)[0, :, 0] for term in terms]

    for got in vectors(distances):
        np.testing.assert_array_equal(got, rows)


def test_boundaries_of_a_long_context_are_found_at_once():
    assert deberta_boundaries(8, 2**30)[-2:] == (1664511, 2**30)


NO_TERMS = {"content_to_position": False, "position_to_content": False}
ERRORS = [
    (pe.DeBERTa, {"max_distance": 200}, "need an even span >= 4 and a max_distance above it"),
    (pe.DeBERTa, {"span": 7}, "buckets need an even .* got span=7 and max_distance=512; or"),
    (pe.DeBERTa, NO_TERMS, " must not both be False"),
]
