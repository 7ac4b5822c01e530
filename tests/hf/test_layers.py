"""Attention layers of small models of transformers; `makers/hf_layers.py` writes layers.npz.

qk_norms.npz has norms of queries and keys of further model types: their input, their output, scale
and bias, in float64 from small models with random weights.
"""

import collections
import functools
import importlib
import json
import math
import pathlib

import jax
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.mask import window_sides
from posenc_jax.hf.model_types import MODEL_TYPES
from tests.makers.hf_table import NOT_RUN
from tests.oracle import attend, embed
from tests.support import recorded, slow_but

FILE = pathlib.Path(__file__).with_name("layers.npz")
ABOUT, ARRAYS = recorded(FILE)
KINDS = ABOUT["model_types"]
TOLERANCE = 1e-6  # Of the greatest number of an output; float32 against float64.
NORMED, NORMS = recorded(FILE.with_name("qk_norms.npz"))
NORMED = NORMED["model_types"]


def live(test):
    """Marks a comparison with the installed transformers; it needs the group `parity`."""
    test = pytest.mark.needs("torch", "transformers>=5.24")(test)
    return pytest.mark.filterwarnings("ignore")(test)


def computed(spec, arrays, positions, *, params=None, clip=None, is_causal):
    """The output of attention [B, T, N, H] of a `LayerSpec`, for positions [B, T].

    `arrays` has q, k and v as projected, and as far as there are any: x, the input of the layer;
    sinks; a factor on rotated queries, "q_factor"; and the parameters of norms, "q_norm.scale".
    `params` are those of the scheme, and `clip` is the bound of queries and keys after their norm.
    """
    positions = np.asarray(positions)
    scheme = spec.scheme if spec.scheme.acts_in_attention else pe.NoPE()
    params = scheme.init(jax.random.key(0)) if params is None else params
    norms = tuple(norm_params(arrays, n) for n in "qk")
    q, k, v = (np.asarray(arrays[n]) for n in "qkv")
    rotates, norm = scheme.acts == pe.Acts.QK, spec.qk_norm
    if clip is not None:  # Between the norm and the rotation.
        q, k = rotated(None, norm, params, norms, q, k, positions)
        q, k, norm = np.clip(q, -clip, clip), np.clip(k, -clip, clip), None
    if rotates or norm is not None:
        q, k = rotated(scheme if rotates else None, norm, params, norms, q, k, positions)
    q = np.asarray(q) * np.asarray(arrays.get("q_factor", 1.0), np.float32)
    # Chunks of transformers begin at the first token.
    chunks = None if spec.chunk_size is None else (positions - positions[:, :1]) // spec.chunk_size
    options = {"scale": spec.scale, "softcap": spec.softcap, "window": spec.window}
    options["sinks"] = np.asarray(arrays["sinks"]) if spec.sinks else None
    if rotates or not scheme.acts:
        seen = visible(positions[0], is_causal, spec.window, None if chunks is None else chunks[0])
        return softmax_attention(q, k, v, seen, spec.scale, spec.softcap, options["sinks"])
    options |= {"segment_ids": chunks, "is_causal": is_causal, "x": arrays.get("x")}
    return attend(scheme, params, q, k, v, positions=positions, **options)


def norm_params(arrays, which):
    """The parameters of the norm of "q" or "k"."""
    prefix = f"{which}_norm."
    return {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}


@functools.partial(jax.jit, static_argnums=(0, 1))
def rotated(scheme, norm, params, norms, q, k, positions):
    """Queries and keys after norm and rotation, as far as there are any."""
    early = norm is not None and not norm.after_rotation
    q, k = (norm(p, x) if early else x for p, x in zip(norms, (q, k), strict=True))
    if scheme is not None:
        q, k = scheme.query(params, q, positions), scheme.key(params, k, positions)
    late = norm is not None and norm.after_rotation
    return tuple(norm(p, x) if late else x for p, x in zip(norms, (q, k), strict=True))


def visible(positions, is_causal, window, chunks=None):
    """The keys that each query sees, bool [T, S]."""
    distance = positions[:, None] - positions
    seen = distance >= 0 if is_causal else np.ones(distance.shape, bool)
    if window is not None:
        left, right = window_sides(window)
        seen &= (distance <= left if left >= 0 else True) & (-distance <= right)
    return seen if chunks is None else seen & (chunks[:, None] == chunks)


def softmax_attention(q, k, v, seen, scale=None, softcap=None, sinks=None):
    """Attention in float64, of queries and keys that are normalised and rotated."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (x.repeat(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = np.einsum("btnh,bsnh->bnts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
    weights = np.exp(np.where(seen, logits, -np.inf))
    total = weights.sum(-1) + (0.0 if sinks is None else np.exp(sinks)[:, None])
    return np.einsum("bnts,bsnh->btnh", weights / total[..., None], v)


def arrays_of(prefix):
    return {n.removeprefix(prefix): x for n, x in ARRAYS.items() if n.startswith(prefix)}


# One model type of each row of the table; the others are read alike.
QUICK = {id(MODEL_TYPES[kind]): kind for kind in KINDS}.values()


@pytest.mark.parametrize("kind", slow_but(KINDS, *QUICK))
def test_layers_equal_those_of_transformers(kind):
    config = KINDS[kind]["config"]
    for number, layer in enumerate(KINDS[kind]["layers"]):
        arrays = arrays_of(f"{kind}.{number}.")
        spec = pe.from_hf(config, decoder=layer["decoder"])[layer["layer"]]
        assert spec.mixer == "attention" and spec.sinks == ("sinks" in arrays)
        assert any(n.startswith("q_norm.") for n in arrays) == bool(
            spec.qk_norm is not None and spec.qk_norm.scale != "none"
        )
        positions = np.arange(arrays["q"].shape[1], dtype=np.int32)[None]
        params = {n[6:]: x for n, x in arrays.items() if n.startswith("param.")} or None
        out = computed(spec, arrays, positions, params=params, is_causal=layer["is_causal"])
        np.testing.assert_allclose(
            out, arrays["out"], atol=TOLERANCE * np.abs(arrays["out"]).max(), err_msg=str(layer)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_attend_are_those_of_transformers(kind):
    halves = {layer["decoder"] for layer in KINDS[kind]["layers"]}
    halves = [None] if None in halves else [False, True]
    specs = [pe.from_hf(KINDS[kind]["config"], decoder=decoder) for decoder in halves]
    places = [(i, spec) for half in specs for i, spec in enumerate(half)]
    assert [i for i, x in places if x.mixer == "attention"] == KINDS[kind]["attention"]
    others = [x for _, x in places if x.mixer != "attention"]
    assert others == [pe.LayerSpec(pe.NoPE(), mixer=x.mixer) for x in others]


@pytest.mark.parametrize("kind", [n.split(".")[0] for n in ARRAYS if n.endswith(".rows")])
def test_tables_equal_those_of_transformers(kind):
    decoder = KINDS[kind]["layers"][-1]["decoder"]
    scheme = pe.from_hf(KINDS[kind]["config"], decoder=decoder)[0].scheme
    table = ARRAYS[f"{kind}.table"]
    rows = ARRAYS[f"{kind}.rows"].reshape(1, -1, table.shape[1])
    positions = np.arange(rows.shape[1], dtype=np.int32)[None]
    out = embed(scheme, {"table": table}, np.zeros_like(rows), positions)
    np.testing.assert_allclose(out, rows, atol=1e-6)


@pytest.mark.parametrize("kind", NORMED)
def test_norms_of_queries_and_keys_equal_transformers(kind):
    sections = {"rope_parameters": {"mrope_section": [2, 1, 1]}} if "_vl_" in kind else {}
    layers = pe.from_hf(NORMED[kind]["config"] | sections)
    with_norm = [i for i, layer in enumerate(layers) if layer.qk_norm is not None]
    assert with_norm == NORMED[kind]["layers"]
    norm, heads = layers[with_norm[0]].qk_norm, (4, 2)
    shapes = [{n: x.shape for n, x in norm.init(n_heads, 8).items()} for n_heads in heads]
    inputs, outputs, params = [], [], []
    for which, count, like in zip("qk", heads, shapes, strict=True):
        sizes = [(1, 2, count, 8)] * 2 + [*like.values()]
        ends = np.cumsum([math.prod(shape) for shape in sizes])
        *parts, remainder = np.split(NORMS[f"{kind}.{which}"], ends)
        assert remainder.size == 0
        x, y, *learned = (p.reshape(s) for p, s in zip(parts, sizes, strict=True))
        inputs, outputs = [*inputs, x], [*outputs, y]
        params.append(dict(zip(like, learned, strict=True)))
    out = rotated(None, norm, {}, params, *inputs, None)
    for x, y in zip(out, outputs, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


@live
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_what_transformers_gives(kind):
    maker = importlib.import_module("tests.makers.hf_layers")
    about, arrays = maker.make(KINDS[kind]["config"])
    assert json.loads(json.dumps(about)) == KINDS[kind]
    assert arrays.keys() == {n for n in ARRAYS if n.startswith(f"{kind}.")}
    for name, x in arrays.items():
        np.testing.assert_allclose(x, ARRAYS[name], rtol=1e-6, atol=1e-6)


@live
def test_layers_of_small_models_with_drawn_configs():
    maker = importlib.import_module("tests.makers.hf_layers")
    outcomes = collections.Counter()
    for kind in MODEL_TYPES.keys() - NOT_RUN:
        for raw, offset, outcome, text in maker.draws(kind, seed=0, count=2):
            assert outcome not in ("differs", "error"), (kind, raw, offset, text)
            outcomes[outcome] += 1
    assert outcomes["same"] > 250


@live
def test_the_window_of_a_config_object_is_that_of_its_model():
    import torch
    import transformers

    config = transformers.Gemma3TextConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1, "sliding_window": 12},
        **{"layer_types": ["sliding_attention"], "use_bidirectional_attention": True},
        attn_implementation="eager",
    )
    model = transformers.Gemma3TextModel(config).eval()
    with torch.no_grad():
        weights = model(torch.arange(40)[None], output_attentions=True).attentions[0][0, 0]
    reach = max(abs(i - j) for i, j in weights.nonzero().tolist())
    assert pe.from_hf(config)[0].window == reach + 1 == 7
