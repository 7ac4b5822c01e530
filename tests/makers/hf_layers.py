"""Makes layers.npz: python -m tests.makers hf_layers [NAME or CONFIG ...], with the group parity.

Runs a small model of each of these model types with random weights, and records one attention layer
of each kind: its projections, norms and sinks, and its output before gates and projections, for
`layer_arrays.computed`; the numbers of the layers that attend; and the tables of positions. All
layers must equal those of `from_hf`, by `hf_fuzz.check`.

The file has the configs. A new one is JSON, '{"model_type": "jamba", "attn_layer_period": 2}';
small sizes are added to it. Without arguments all are made again.
"""

import json
import logging
import re
import warnings

import numpy as np
import torch
import transformers

import posenc_jax as pe
from tests.hf.test_layers import ARRAYS, FILE, KINDS
from tests.makers import hf_draw, hf_fuzz, hf_fuzz_layers, hf_fuzz_models

CAUSAL_TOKENS = 12
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 4}
SIZES |= {"rms_norm_eps": 0.03, "norm_eps": 0.03, "sliding_window": 7}


def small_config(text):
    """The config of a model type in the file, or a new one with small sizes."""
    if not text.startswith("{"):
        return KINDS[text]["config"]
    config = json.loads(text)
    cls, fields = (
        transformers.CONFIG_MAPPING[config["model_type"]],
        hf_draw.fields_of(config["model_type"]),
    )
    aliases = cls.attribute_map
    sizes = {n: x for n, x in hf_draw.SIZES.items() if n in fields}
    sizes |= {n: x for n, x in SIZES.items() if n in fields and n not in aliases}
    return {n: x for n, x in (sizes | config).items() if aliases.get(n) not in sizes | config}


def numbers(x):
    return np.asarray(x.detach() if isinstance(x, torch.Tensor) else x).astype(np.float32)


def make(config):
    """(description, arrays) of a model type."""
    raw, kind = {n: x for n, x in config.items() if n != "model_type"}, config["model_type"]
    assert hf_fuzz.check(kind, raw, 0, 0) == ("same", ""), kind
    model, layers, tables = hf_fuzz_models.run(kind, raw, 0)
    about = {"config": config, "attention": [], "layers": []}
    arrays = {}
    halves = ("encoder", "decoder") if model.config.is_encoder_decoder else (None,)
    for half in halves:
        decoder = None if half is None else half == "decoder"
        specs, recorded = pe.from_hf(about["config"], decoder=decoder), set()
        for i, layer in enumerate(x for x in layers if x["name"].startswith(half or "")):
            index = hf_fuzz_layers.index_of(layer, i)
            if re.search("Delta|Lightning", type(layer["module"]).__name__):
                continue  # Linear attention.
            about["attention"].append(index)
            if specs[index] in recorded:
                continue
            recorded.add(specs[index])
            values = hf_fuzz_layers.layer_arrays(specs[index], layer, model.config)
            want = numbers(hf_fuzz_layers.wanted(layer))
            values = {n: x for n, x in values.items() if n != "x"}
            values["out"] = want.reshape(*values["q"].shape[:3], -1)
            is_causal = hf_fuzz_layers.is_causal(layer)
            if is_causal:  # Later tokens change nothing.
                values |= {n: values[n][:, :CAUSAL_TOKENS] for n in ("q", "k", "v", "out")}
            prefix = f"{kind}.{len(about['layers'])}."
            arrays |= {prefix + n: numbers(x) for n, x in values.items()}
            about["layers"].append({"layer": index, "decoder": decoder, "is_causal": is_causal})
    if tables:
        weight, rows = tables[0]
        arrays |= {f"{kind}.table": numbers(weight), f"{kind}.rows": numbers(rows)}
    return about, arrays


def main(argv):
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    about, arrays = dict(KINDS), dict(ARRAYS)
    for text in argv or KINDS:
        config = small_config(text)
        kind = config["model_type"]
        about[kind], of_kind = make(config)
        arrays = {n: x for n, x in arrays.items() if not n.startswith(f"{kind}.")} | of_kind
        print(kind, about[kind]["attention"], about[kind]["layers"], flush=True)
    origin = f"transformers {transformers.__version__}, attention layers of whole models in float64"
    described = {"origin": origin, "torch": torch.__version__, "model_types": about}
    np.savez_compressed(FILE, about=np.array(json.dumps(described)), **arrays)
    print(FILE.stat().st_size)
