"""Attention layers of small models of transformers; `makers/hf_layers.py` writes layers.npz."""

import importlib
import json
import pathlib

import numpy as np
import pytest

import posenc_jax as pe
from tests.hf.layer_arrays import computed
from tests.oracle import embed
from tests.support import recorded

FILE = pathlib.Path(__file__).with_name("layers.npz")
ABOUT, ARRAYS = recorded(FILE)
KINDS = ABOUT["model_types"]
TOLERANCE = 1e-6  # Of the greatest number of an output; float32 against float64.


def arrays_of(prefix):
    return {n.removeprefix(prefix): x for n, x in ARRAYS.items() if n.startswith(prefix)}


@pytest.mark.parametrize("kind", KINDS)
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
        out = computed(spec, arrays, positions, is_causal=layer["is_causal"])
        np.testing.assert_allclose(
            out, arrays["out"], atol=TOLERANCE * np.abs(arrays["out"]).max(), err_msg=str(layer)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_attend_are_those_of_transformers(kind):
    config = KINDS[kind]["config"]
    several = None in {layer["decoder"] for layer in KINDS[kind]["layers"]}
    halves = [None] if several else [False, True]
    specs = [pe.from_hf(config, decoder=decoder) for decoder in halves]
    attend = [i for half in specs for i, spec in enumerate(half) if spec.mixer == "attention"]
    assert attend == KINDS[kind]["attention"]
    assert all(
        spec == pe.LayerSpec(pe.NoPE(), mixer=spec.mixer)
        for half in specs
        for spec in half
        if spec.mixer != "attention"
    )


@pytest.mark.parametrize("kind", [n.split(".")[0] for n in ARRAYS if n.endswith(".table")])
def test_tables_equal_those_of_transformers(kind):
    decoder = KINDS[kind]["layers"][-1]["decoder"]
    scheme = pe.from_hf(KINDS[kind]["config"], decoder=decoder)[0].scheme
    table = ARRAYS[f"{kind}.table"]
    rows = ARRAYS[f"{kind}.rows"].reshape(1, -1, table.shape[1])
    positions = np.arange(rows.shape[1], dtype=np.int32)[None]
    out = embed(scheme, {"table": table}, np.zeros_like(rows), positions)
    np.testing.assert_allclose(out, rows, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.needs("torch", "transformers>=5.23")
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_what_transformers_gives(kind):
    maker = importlib.import_module("tests.makers.hf_layers")
    about, arrays = maker.make(KINDS[kind]["config"])
    assert json.loads(json.dumps(about)) == KINDS[kind]
    assert arrays.keys() == {n for n in ARRAYS if n.startswith(f"{kind}.")}
    for name, x in arrays.items():
        np.testing.assert_allclose(x, ARRAYS[name], rtol=1e-6, atol=1e-6)
