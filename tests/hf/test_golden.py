"""Schemes built from configs of released model types, against transformers' own layers.

The files hold what `make_golden.py` wrote down of attention layers with random weights: queries
and keys as projected and as they meet, the output, and what positions learned.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import attend, embed

import posenc_jax as pe

FOLDER = pathlib.Path(__file__).with_name("golden")
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
# Frequencies that follow the length of each row, or are learned, are float32 numbers. Swin V2
# multiplies cosines by up to 100.
TOLERANCE = {"llama_dynamic": 5e-5, "mistral_large4": 6e-5, "swinv2": 2e-5, "xlnet": 1e-5}
DENSE, TURNED = 2e-6, 1e-6


def read(name):
    """What the file describes, its arrays, and the scheme of the layer."""
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = dict(file)
    about = json.loads(str(arrays.pop("about")))
    config = about["config"]
    decoder = config.get("is_decoder", False) if config.get("is_encoder_decoder") else None
    layer = pe.from_hf(config, decoder=decoder)[about["layer"]]
    return about, {n: jnp.asarray(x) for n, x in arrays.items()}, layer.scheme


def parameters(scheme, arrays):
    """What a layer learned about positions, under our names."""
    learned = {n.removeprefix("param."): x for n, x in arrays.items() if n.startswith("param.")}
    if "alpha" in arrays:
        heat = {"scale": arrays["scale"], "offset": arrays["bias"]}
        turned = {"alpha": arrays["alpha"][None]}
        return heat if isinstance(scheme, pe.SSMax) else (turned, heat)
    if isinstance(scheme, pe.T5):
        return {"table": arrays["table"].T}
    if isinstance(scheme, pe.Shaw):  # The last vector of the future stands for all beyond.
        rows = scheme.clip * 2 + 1 - len(arrays["table"])
        return {"keys": jnp.pad(arrays["table"], ((0, rows), (0, 0)), mode="edge")[None]}
    return learned or scheme.init(jax.random.key(0))


def places(arrays):
    """Positions and coordinates."""
    if "grid_size" in arrays:
        rows, columns, prefix = map(int, arrays["grid_size"])
        grid = pe.grid_coordinates(1, rows, columns, prefix=prefix, centred=True)
        return jnp.arange(grid.shape[-1], dtype=jnp.int32)[None], grid
    if "positions" not in arrays:
        return None, None
    at = arrays["positions"]
    if at.ndim == 2:
        return at, at
    return jnp.arange(at.shape[-1], dtype=jnp.int32)[None], at


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("opt", "roberta", "whisper")])
def test_attention_is_that_of_transformers(name):
    about, arrays, scheme = read(name)
    params = parameters(scheme, arrays)
    positions, coordinates = places(arrays)
    out = attend(
        scheme,
        params,
        *(arrays[n] for n in "qkv"),
        x=arrays.get("x"),
        positions=positions,
        coordinates=coordinates,
        is_causal=about["is_causal"],
        scale=pe.hf_logit_scale(about["config"]),
        sinks=arrays.get("sinks"),
    )
    np.testing.assert_allclose(out, arrays["out"], atol=TOLERANCE.get(name, DENSE))
    if "q_rot" in arrays and pe.Acts.ATTENTION not in scheme.acts:
        for turn, x in ((scheme.query, "q"), (scheme.key, "k")):
            atol = max(TURNED, TOLERANCE.get(name, 0.0))
            got = jax.jit(turn)(params, arrays[x], coordinates)
            np.testing.assert_allclose(got, arrays[f"{x}_rot"], atol=atol)


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(("t5", "mt5", "umt5"))])
def test_far_buckets_are_those_of_transformers(name):
    _, arrays, scheme = read(name)
    bias = scheme.rules(parameters(scheme, arrays)).dense(jnp.array([4095]), arrays["far_keys"])
    np.testing.assert_array_equal(bias[:, 0], arrays["far"])


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_far_penalties_are_those_of_transformers(name):
    _, arrays, scheme = read(name)
    bias = scheme.rules({}).dense(jnp.array([4095]), arrays["far_keys"])
    np.testing.assert_allclose(bias[:, 0], arrays["far"], rtol=2e-6)


@pytest.mark.parametrize("name", ["opt", "roberta", "whisper"])
def test_embeddings_are_those_of_transformers(name):
    _, arrays, scheme = read(name)
    params = {"table": arrays["table"]} if "table" in arrays else {}
    empty = jnp.zeros_like(arrays["embedded"])
    out = embed(scheme, params, empty, arrays["positions"])
    np.testing.assert_allclose(out, arrays["embedded"], atol=1e-6)


def test_every_file_is_read():
    assert len(NAMES) == 57
