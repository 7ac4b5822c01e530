"""Attention layers of small models of transformers and of towers of images.

`makers/hf_layers.py` writes layers.npz, and `makers/hf_towers.py` towers.npz. qk_norms.npz has
norms of queries and keys of further model types: their input, their output, scale and bias, in
float64 from small models with random weights.
"""

import collections
import functools
import importlib
import itertools
import json
import math
import pathlib

import jax
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.mask import window_sides
from posenc_jax.hf.model_types import MODEL_TYPES
from tests.makers.hf_table import NOT_RUN, TOWERS
from tests.oracle import attend, embed
from tests.support import recorded, slow_but

FILE = pathlib.Path(__file__).with_name("layers.npz")
ABOUT, ARRAYS = recorded(FILE)
KINDS = ABOUT["model_types"]
TOWERS_FILE = FILE.with_name("towers.npz")
TOWERS_ABOUT, TOWERS_ARRAYS = recorded(TOWERS_FILE)
TOWERS_ABOUT = TOWERS_ABOUT["model_types"]
TOLERANCE, TOWERS_TOLERANCE = 1e-6, 3e-6  # Of the greatest number; float32 against float64.
NORMED, NORMS = recorded(FILE.with_name("qk_norms.npz"))
NORMED = NORMED["model_types"]


def live(test):
    """Marks a comparison with the installed transformers; it needs the group `parity`."""
    test = pytest.mark.needs("torch", "transformers>=5.24")(test)
    return pytest.mark.filterwarnings("ignore")(test)


def computed(spec, arrays, positions, *, coordinates=None, params=None, clip=None, is_causal):
    """The output of attention [B, T, N, H] of a `LayerSpec`, for positions [B, T].

    `arrays` has q, k and v as projected, and as far as there are any: x, the input of the layer;
    sinks; a factor on rotated queries, "q_factor"; and the parameters of norms, "q_norm.scale".
    `coordinates` are the positions if None, `params` those of the scheme, and `clip` is the bound
    of queries and keys after their norm.
    """
    positions = np.asarray(positions)
    coordinates = positions if coordinates is None else coordinates
    scheme = spec.scheme if spec.scheme.acts_in_attention else pe.NoPE()
    params = scheme.init(jax.random.key(0)) if params is None else params
    norms = tuple(below(arrays, f"{n}_norm.") for n in "qk")
    q, k, v = (np.asarray(arrays[n]) for n in "qkv")
    rotates, norm = scheme.acts == pe.Acts.QK, spec.qk_norm
    if clip is not None:  # Between the norm and the rotation.
        q, k = rotated(None, norm, params, norms, q, k, coordinates)
        q, k, norm = np.clip(q, -clip, clip), np.clip(k, -clip, clip), None
    if rotates or norm is not None:
        q, k = rotated(scheme if rotates else None, norm, params, norms, q, k, coordinates)
    q = np.asarray(q) * np.asarray(arrays.get("q_factor", 1.0), np.float32)
    # Chunks of transformers begin at the first token.
    chunks = None if spec.chunk_size is None else (positions - positions[:, :1]) // spec.chunk_size
    options = {"scale": spec.scale, "softcap": spec.softcap, "window": spec.window}
    options["sinks"] = np.asarray(arrays["sinks"]) if spec.sinks else None
    if rotates or not scheme.acts:
        seen = visible(positions[0], is_causal, spec.window, None if chunks is None else chunks[0])
        return softmax_attention(q, k, v, seen, spec.scale, spec.softcap, options["sinks"])
    options |= {"segment_ids": chunks, "is_causal": is_causal, "x": arrays.get("x")}
    options |= {"positions": positions, "coordinates": coordinates}
    return attend(scheme, params, q, k, v, **options)


def below(arrays, prefix):
    """The arrays with a prefix, named without it."""
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


# One model type of each row of the table; the others are read alike.
QUICK = {id(MODEL_TYPES[kind]): kind for kind in KINDS}.values()


@pytest.mark.parametrize("kind", slow_but(KINDS, *QUICK))
def test_layers_equal_those_of_transformers(kind):
    config = KINDS[kind]["config"]
    for number, layer in enumerate(KINDS[kind]["layers"]):
        arrays = below(ARRAYS, f"{kind}.{number}.")
        spec = pe.from_hf(config, decoder=layer["decoder"])[layer["layer"]]
        assert spec.mixer == "attention" and spec.sinks == ("sinks" in arrays)
        assert any(n.startswith("q_norm.") for n in arrays) == bool(
            spec.qk_norm is not None and spec.qk_norm.scale != "none"
        )
        positions = np.arange(arrays["q"].shape[1], dtype=np.int32)[None]
        params = below(arrays, "param.") or None
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
    norm, inputs, outputs, params = layers[with_norm[0]].qk_norm, [], [], []
    for which, heads in (("q", 4), ("k", 2)):
        like = {n: x.shape for n, x in norm.init(heads, 8).items()}
        shapes = [(1, 2, heads, 8)] * 2 + [*like.values()]
        parts = np.split(NORMS[f"{kind}.{which}"], np.cumsum([*map(math.prod, shapes)]))
        assert parts.pop().size == 0
        x, y, *learned = (p.reshape(s) for p, s in zip(parts, shapes, strict=True))
        inputs, outputs = [*inputs, x], [*outputs, y]
        params.append(dict(zip(like, learned, strict=True)))
    out = rotated(None, norm, {}, params, *inputs, None)
    for x, y in zip(out, outputs, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def compared(spec, about, arrays):
    """The greatest error of the rotated queries and keys, if there, and of the output."""
    norms = tuple(below(arrays, f"{n}_norm.") for n in "qk")
    norms = tuple({n: np.float32(x) for n, x in p.items()} for p in norms)
    q, k = (np.float32(arrays[n]) for n in "qk")
    coordinates = np.float32(arrays["coordinates"])
    q, k = rotated(spec.scheme, spec.qk_norm, {}, norms, q, k, coordinates)
    ends = np.cumsum(about["lengths"])  # Tokens see those of their image or region.
    outputs = [
        softmax_attention(
            *(x[:, a:b] for x in (q, k, arrays["v"])), np.ones((b - a, b - a), bool), spec.scale
        )
        for a, b in itertools.pairwise([0, *ends])
    ]
    ours = {"q_rot": q, "k_rot": k, "out": np.concatenate(outputs, 1)}
    return max(np.abs(ours[n] - x).max() / np.abs(x).max() for n, x in arrays.items() if n in ours)


@pytest.mark.parametrize("kind", TOWERS)
def test_layers_of_towers_equal_those_of_transformers(kind):
    about = TOWERS_ABOUT[kind]
    spec = next(s for s in pe.from_hf(about["config"]) if s.mixer == "attention")
    assert compared(spec, about, below(TOWERS_ARRAYS, f"{kind}.")) < TOWERS_TOLERANCE


def test_parts_of_configs_are_read_by_name():
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    tower = {"depth": 2, "hidden_size": 64, "num_heads": 4}
    grid, grid16 = pe.AxialRoPE(16, theta=1e4), {"head_dim": 16, "theta": 1e4, "axes": (1, 0)}
    for kind, inner, scheme in [
        ("qwen2_5_vl", tower, grid),  # Released files have no model type of the part,
        ("qwen2_5_vl", tower | {"model_type": "qwen2_5_vl"}, grid),  # or that of the whole.
        ("qwen3_omni_moe_thinker", tower | {"model_type": "qwen3_omni_moe_vision_encoder"}, grid),
        ("step3p7", STEP, pe.AxialRoPE(**grid16)),
    ]:
        config = {"model_type": kind, "vision_config": inner}
        config["text_config"] = sizes | {"model_type": "qwen2"}
        assert pe.from_hf(config, part="vision_config") == (pe.LayerSpec(scheme),) * 2
        assert pe.scheme_from_hf(config, part="vision_config") == scheme
        assert pe.scheme_from_hf(config) == pe.RoPE(16)


def vision(kind, **config):
    return {"config": {"model_type": kind} | config, "part": "vision_config"}


STEP = {"layers": 2, "width": 64, "heads": 4}
GRID = "^attention_options_from_hf: the attention of step3p5_vision has a grid of an image"
ERRORS = [
    (pe.attention_options_from_hf, vision("step3p7", vision_config=STEP), GRID),
    (pe.from_hf, vision("llava"), r"^from_hf: the llava config has no 'vision_config'\.$"),
    (pe.from_hf, vision("gemma3", vision_config={"model_type": "gemma3"}), "'gemma3_vision'"),
]


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


@live
@pytest.mark.parametrize("kind", TOWERS)
def test_all_layers_of_towers_equal_those_of_the_installed_transformers(kind):
    maker = importlib.import_module("tests.makers.hf_towers")
    assert maker.error(kind, maker.small(kind)) < TOWERS_TOLERANCE
