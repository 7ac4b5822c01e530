"""Schemes from configs of released model types, against the layers of transformers.

The files were written by transformers 5.23 in float64, from attention layers with random weights:
queries and keys before and after rotation, the output, and the parameters of the position encoding.
Further model types are in layers.npz. The files of Inkling-2 have whole layers. The masks of
both Inklings are causal alone.
"""

import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.hf.test_layers import below, computed, rotated
from tests.oracle import embed
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
    learned = below(arrays, "param.")
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
    """Positions and coordinates of the tokens."""
    if "grid_size" in arrays:
        rows, columns, prefix = map(int, arrays["grid_size"])
        coordinates = pe.grid_coordinates(1, rows, columns, prefix=prefix, centred=True)
    else:
        coordinates = arrays.get("positions")
    if coordinates is not None and coordinates.ndim == 2:
        return coordinates, coordinates
    return np.arange(arrays["q"].shape[1], dtype=np.int32)[None], coordinates


WHOLE, EMBEDDINGS = ("inkling2", "inkling2_local"), ("opt", "roberta", "whisper")
# Others of the same scheme are quicker.
SLOW = "mt5_encoder umt5_decoder deberta_v2_c2p deepseek_v4_compress inkling_local phi3_short"
SLOW = (*SLOW.split(), "inkling2_local")


def marked(names):
    return [pytest.param(n, marks=slow if n in SLOW else ()) for n in names]


@pytest.mark.parametrize("name", marked(n for n in NAMES if n not in (*WHOLE, *EMBEDDINGS)))
def test_attention_output_equals_transformers(name):
    about, arrays, layer = read(name)
    scheme, params = layer.scheme, parameters(layer.scheme, arrays)
    positions, coordinates = places(arrays)
    if pe.Acts.QK in scheme.acts and "q_rot" in arrays and pe.Acts.ATTENTION not in scheme.acts:
        where = positions if coordinates is None else coordinates
        out = rotated(scheme, None, params, ({}, {}), arrays["q"], arrays["k"], where)
        atol = max(ROTATED, TOLERANCE.get(name, 0.0))
        np.testing.assert_allclose(out[0], arrays["q_rot"], atol=atol)
        np.testing.assert_allclose(out[1], arrays["k_rot"], atol=atol)
    # The mask is causal alone.
    layer = pe.LayerSpec(scheme, scale=layer.scale, sinks="sinks" in arrays)
    options = {"coordinates": coordinates, "params": params, "is_causal": about["is_causal"]}
    out = computed(layer, arrays, positions, **options)
    np.testing.assert_allclose(out, arrays["out"], atol=TOLERANCE.get(name, DENSE))


@pytest.mark.parametrize("name", [n for n in NAMES if "t5" in n or n in ("bloom", "mpt")])
def test_biases_of_far_keys_equal_transformers(name):
    _, arrays, layer = read(name)
    rules = layer.scheme.rules(parameters(layer.scheme, arrays))
    bias = rules.dense(np.array([4095], np.int32), arrays["far_keys"])
    tolerance = 0 if "t5" in name else 2e-6
    np.testing.assert_allclose(bias[:, 0], arrays["far"], rtol=tolerance)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_equal_transformers(name):
    _, arrays, layer = read(name)
    params = {"table": arrays["table"]} if "table" in arrays else {}
    empty = np.zeros_like(arrays["embedded"])
    out = embed(layer.scheme, params, empty, arrays["positions"])
    np.testing.assert_allclose(out, arrays["embedded"], atol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def layer_output(spec, weights, params, x, x_k, x_v):
    def projected(x, name, heads):
        kernel = pe.heads_from_linear(weights[f"{name}_proj.weight"], heads)
        return jnp.einsum("btd,dnh->btnh", x, kernel)

    def convolved(y, x, name):
        name = f"{name}_sconv."
        if f"{name}static_weight" not in weights:
            kernel = weights[f"{name}conv1d.weight"][:, 0].T.reshape(-1, *y.shape[2:])
            scale = math.sqrt(len(kernel) + 1)
        else:  # The first tap is the token's own.
            static = weights[f"{name}static_weight"][::-1]
            dynamic = x @ weights[f"{name}weight_proj.weight"].T
            dynamic = dynamic.reshape(*y.shape[:3], -1)[..., ::-1]
            static = static.reshape(1, 1, -1, *y.shape[2:])
            kernel = static + jnp.moveaxis(dynamic, 3, 2)[..., None]
            scale = math.sqrt(2 * kernel.shape[2] + 1)
        return (y + pe.short_convolution(y, kernel)[0]) / scale

    norm = spec.qk_norm
    out, _ = pe.scheme_attention(
        spec.scheme,
        params,
        norm({"scale": weights["q_l2_clip.scale"]}, projected(x, "q", 4)),
        dataclasses.replace(norm, scale="none")({}, convolved(projected(x_k, "k", 2), x_k, "k")),
        pe.QKNorm(scale="none", epsilon=0.03)({}, convolved(projected(x_v, "v", 2), x_v, "v")),
        x=x,
        sinks=x @ weights["sink_proj.weight"].T,
        scale=spec.scale,
        is_causal=True,
        implementation="dense",
    )
    out *= jax.nn.sigmoid(projected(x, "gate", 4))
    return jnp.einsum("btnh,dnh->btd", out, weights["o_proj.weight"].reshape(-1, 4, 8))


@pytest.mark.parametrize("name", marked(WHOLE))
def test_a_whole_layer_equals_that_of_transformers(name):
    _, arrays, layer = read(name)
    inputs = [arrays.get(n, arrays["x"]) for n in ("x", "x_k", "x_v")]
    out = layer_output(layer, below(arrays, "weights."), parameters(layer.scheme, arrays), *inputs)
    np.testing.assert_allclose(out, arrays["final"], atol=2e-6)
