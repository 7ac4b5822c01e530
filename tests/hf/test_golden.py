"""Schemes from configs of released model types, against the layers of transformers.

The files were written by transformers 5.23 in float64, from attention layers with random weights:
queries and keys before and after rotation, the output, and the parameters of the position encoding.
Further model types are in layers.npz.
"""

import pathlib

import jax
import numpy as np
import pytest

import posenc_jax as pe
from tests.hf.test_layers import rotated, softmax_attention, visible
from tests.oracle import attend, embed
from tests.support import recorded, slow

FOLDER = pathlib.Path(__file__).with_name("golden")
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
# Learned frequencies and frequencies by the length of a row are float32. Swin V2 scales
# cosines by up to 100.
TOLERANCE = {"llama_dynamic": 5e-5, "mistral_large4": 6e-5, "swinv2": 2e-5, "xlnet": 1e-5}
DENSE, ROTATED = 2e-6, 1e-6


def read(name):
    """Returns the description of a file, its arrays, and the layer."""
    about, arrays = recorded(FOLDER / f"{name}.npz")
    config = about["config"]
    decoder = config.get("is_decoder", False) if config.get("is_encoder_decoder") else None
    if config["model_type"] == "deberta-v2":
        config["position_biased_input"] = False  # The layer, without the table at the input.
    layer = pe.from_hf(config, decoder=decoder)[about["layer"]]
    return about, arrays, layer


def parameters(scheme, arrays):
    """The parameters of the position encoding of a layer, as `scheme.init` names them."""
    learned = {n.removeprefix("param."): x for n, x in arrays.items() if n.startswith("param.")}
    if "alpha" in arrays:
        heat = {"scale": arrays["scale"], "offset": arrays["bias"]}
        rotary = {"alpha": arrays["alpha"][None]}
        return heat if isinstance(scheme, pe.SSMax) else (rotary, heat)
    if isinstance(scheme, pe.T5):
        return {"table": arrays["table"].T}
    if isinstance(scheme, pe.Shaw):  # The last vector of the future is repeated.
        rows = scheme.clip * 2 + 1 - len(arrays["table"])
        return {"keys": np.pad(arrays["table"], ((0, rows), (0, 0)), mode="edge")[None]}
    return learned or scheme.init(jax.random.key(0))


def places(arrays):
    """Positions and coordinates of the tokens, or None."""
    if "grid_size" in arrays:
        rows, columns, prefix = map(int, arrays["grid_size"])
        grid = pe.grid_coordinates(1, rows, columns, prefix=prefix, centred=True)
        return np.arange(grid.shape[-1], dtype=np.int32)[None], grid
    if "positions" not in arrays:
        return None, None
    positions = arrays["positions"]
    if positions.ndim == 2:
        return positions, positions
    return np.arange(positions.shape[-1], dtype=np.int32)[None], positions


# test_inkling2.py computes whole layers.
ELSEWHERE = "inkling2", "inkling2_local", "opt", "roberta", "whisper"
# Others of the same scheme are quicker.
SLOW = "mt5_encoder umt5_decoder deberta_v2_c2p deepseek_v4_compress inkling_local phi3_short"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=slow if n in SLOW.split() else ()) for n in NAMES if n not in ELSEWHERE],
)
def test_attention_output_equals_transformers(name):
    about, arrays, layer = read(name)
    scheme = layer.scheme
    params = parameters(scheme, arrays)
    positions, coordinates = places(arrays)
    q, k, v = (arrays[n] for n in "qkv")
    is_causal, settings = about["is_causal"], {"scale": layer.scale, "sinks": arrays.get("sinks")}
    if pe.Acts.QK in scheme.acts and "q_rot" in arrays and pe.Acts.ATTENTION not in scheme.acts:
        q_rot, k_rot = rotated(scheme, None, params, ({}, {}), q, k, coordinates)
        atol = max(ROTATED, TOLERANCE.get(name, 0.0))
        np.testing.assert_allclose(q_rot, arrays["q_rot"], atol=atol)
        np.testing.assert_allclose(k_rot, arrays["k_rot"], atol=atol)
    if scheme.acts in (pe.Acts.QK, pe.Acts(0)):
        q, k = (q_rot, k_rot) if scheme.acts else (q, k)
        seen = visible(np.arange(q.shape[1]), is_causal, None)  # The mask is causal alone.
        out = softmax_attention(q, k, v, seen, **settings)
    else:
        where = {"x": arrays.get("x"), "positions": positions, "coordinates": coordinates}
        out = attend(scheme, params, q, k, v, is_causal=is_causal, **where, **settings)
    np.testing.assert_allclose(out, arrays["out"], atol=TOLERANCE.get(name, DENSE))


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(("t5", "mt5", "umt5"))])
def test_buckets_of_far_keys_equal_transformers(name):
    _, arrays, layer = read(name)
    params = parameters(layer.scheme, arrays)
    bias = layer.scheme.rules(params).dense(np.array([4095], np.int32), arrays["far_keys"])
    np.testing.assert_array_equal(bias[:, 0], arrays["far"])


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_slopes_of_far_keys_equal_transformers(name):
    _, arrays, layer = read(name)
    bias = layer.scheme.rules({}).dense(np.array([4095], np.int32), arrays["far_keys"])
    np.testing.assert_allclose(bias[:, 0], arrays["far"], rtol=2e-6)


@pytest.mark.parametrize("name", ["opt", "roberta", "whisper"])
def test_embeddings_equal_transformers(name):
    _, arrays, layer = read(name)
    params = {"table": arrays["table"]} if "table" in arrays else {}
    empty = np.zeros_like(arrays["embedded"])
    out = embed(layer.scheme, params, empty, arrays["positions"])
    np.testing.assert_allclose(out, arrays["embedded"], atol=1e-6)


def test_every_file_is_read():
    assert len(NAMES) == 61
