"""Makes layers.npz: python -m tests.makers hf_layers [NAME or CONFIG ...], with the group `parity`.

The file has, for a small model of each of these model types with random weights, one attention
layer of each kind: its projections, norms and sinks, and its output before gates and projections,
for `computed` in the test; the numbers of the layers that attend; and the tables of positions. All
layers must equal those of `from_hf`. Without arguments all are made again, from the configs in the
file. A new one is JSON, '{"model_type": "jamba", "attn_layer_period": 2}', with small sizes added.

`draws` compares small configs of a model type with `from_hf` for a test: one of the raw configs in
`raw_configs.json` and some further keys, with offsets of positions.
"""

import dataclasses
import json
import logging
import random
import re
import warnings

import numpy as np
import torch
import transformers

import posenc_jax as pe
from tests.hf.test_layers import ARRAYS, FILE, KINDS
from tests.hf.test_raw_configs import CASES
from tests.makers import hf_models

CAUSAL_TOKENS = 12
# Small sizes, under the names that config classes have for them.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **{"encoder_layers": 4, "num_key_value_heads": 2},
    **{"vocab_size": 64, "type_vocab_size": 2, "pad_token_id": 0, "bos_token_id": 1},
    **{"eos_token_id": 2, "embedding_size": 32, "intermediate_size_mlp": 16, "d_kv": 8},
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "d_inner", "ffn_dim"), 16),
    **dict.fromkeys(("ffn_hidden_size", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 16),
    **{"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "n_shared_experts": 1},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 1, "topk_group": 1, "num_shared_experts": 1, "moe_num_experts": 4, "moe_k": 2},
    **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "moe_num_shared_experts": 1},
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64, "q_lora_rank": 12},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
    **{"o_groups": 2, "o_lora_rank": 5, "hc_mult": 2, "vocab_size_per_layer_input": 64},
    **{"num_decoder_layers": 2, "unpadded_vocab_size": 64, "num_mtp_layers": 0},
    **{"num_nextn_predict_layers": 0, "first_k_dense_replace": 1, "rotary_dim": 4},
    **{"relative_attention": True, "pos_att_type": "c2p|p2c", "n_layers_per_attn_res_block": 1},
    **{"loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_gate_rank": 4, "emb_dim": 32},
}
# Further sizes of recorded layers.
RECORDED = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
RECORDED |= {"rms_norm_eps": 0.03, "norm_eps": 0.03, "sliding_window": 7}
# Values that are drawn for classes that have the keys.
VALUES = {
    **dict.fromkeys(("attention_bias", "use_qkv_bias", "qkv_bias", "use_bias", "bias"), (0, 1)),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "rope_interleave", "alibi"), (0, 1)),
    **dict.fromkeys(("multi_query", "new_decoder_architecture", "is_decoder"), (0, 1)),
    **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx"), (0, 1)),
    **dict.fromkeys(("use_sliding_window", "share_att_key", "position_biased_input"), (0, 1)),
    "head_dim": (8, 16),
    "max_position_embeddings": (24, 512),
    "sliding_window": (None, 2, 3, 7),
    "max_window_layers": (0, 1, 9),
    "attention_chunk_size": (5, 9),
    "attn_logit_softcapping": (None, 2.0),
    "query_pre_attn_scalar": (4, 100),
    "attention_multiplier": (0.1, 0.5),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps"), (1e-6, 0.03)),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (0.25, 0.5, 1.0)),
    "rope_theta": (1e3, 5e5),
    "no_rope_layer_interval": (2, 3),
    "local_attention": (4, 5),
    "clip_qkv": (None, 0.5),
    "pos_att_type": (["c2p"], ["p2c"]),
    "max_relative_positions": (6, 30),
    "attention_window": (4, 6, 8, [4, 8, 24, 12]),
    "is_causal": (True, False),
    "decoder_attention_heads": (2, 8),
}


def sizes_of(kind):
    """The small sizes that the config class of a model type has keys for."""
    cls = transformers.CONFIG_MAPPING[kind]
    fields = {field.name for field in dataclasses.fields(cls)} | {*cls.attribute_map}
    sizes = {n: x for n, x in SIZES.items() if n in fields and n not in cls.attribute_map}
    as_many = "qk_rope_head_dim" in fields or kind == "esmc"
    return sizes | ({"num_key_value_heads": 4} if as_many else {}), fields


def small_config(text):
    """The config of a model type in the file, or a new one with small sizes."""
    if not text.startswith("{"):
        return KINDS[text]["config"]
    config = json.loads(text)
    sizes, fields = sizes_of(config["model_type"])
    return sizes | {n: x for n, x in RECORDED.items() if n in fields} | config


def draw(kind, rng):
    """The `config.json` of a small model of a type, without its `model_type`."""
    sizes, fields = sizes_of(kind)
    aliases = transformers.CONFIG_MAPPING[kind].attribute_map
    raw = KINDS[kind]["config"] if kind in KINDS else sizes
    case = {aliases.get(n, n): x for n, x in rng.choice(CASES[kind])["raw"].items()}
    layers = next((len(x) for n, x in case.items() if n.endswith("layer_types") and x), None)
    raw = {n: x for n, x in raw.items() if n != "model_type"}
    raw |= {n: x for n, x in case.items() if n not in sizes and (n in fields or n[:2] == "ro")}
    if layers is not None:
        raw |= {n: layers for n in ("num_hidden_layers", "n_layer", "num_layers") if n in raw}
    if "_vl_" in kind and not any(n.startswith("rope_") for n in case):
        sections = [1, 1, 2] if kind.startswith("ernie") else [2, 1, 1]  # Time is its last axis.
        raw |= {"head_dim": 8, "rope_scaling": {"rope_type": "default", "mrope_section": sections}}
    if kind.startswith("inkling"):
        kinds = {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "log_scaling_n_floor": 6}
        raw = kinds | {"rel_extent": 9, "sliding_window_size": 7} | raw
    if kind == "esm" and rng.random() < 0.5:
        raw["position_embedding_type"] = "rotary"
    if kind == "dory":
        raw["initializer_range"] = 0.3  # Its factors on queries and gates are divided by it.
    if kind == "ernie4_5_vl_moe_text":
        raw["moe_intermediate_size"] = [8, 8]
    for name, values in VALUES.items():
        if name in fields and name not in case and rng.random() < 0.2:
            value = rng.choice(values)
            raw[name] = bool(value) if values == (0, 1) else value
    return raw


def draws(kind, seed, count):
    """Yields (raw config, offset, outcome, text), until transformers has run `count` draws.

    The outcome is that of `hf_models.check`; draws that transformers refuses do not count.
    """
    done = 0
    for i in range(8 * count):
        rng = random.Random(f"{seed} {kind} {i}")
        raw = draw(kind, rng)
        # Llama 4 counts tokens for its scale, whatever their positions.
        rotates = "rope_parameters" in sizes_of(kind)[1] and kind != "llama4_text"
        offset = rng.choice((0, 0, 100)) if rotates else 0
        outcome, text = hf_models.check(kind, raw, seed, offset)
        yield raw, offset, outcome, text
        done += outcome != "transformers"
        if done == count:
            return


def numbers(x):
    return np.asarray(x.detach() if isinstance(x, torch.Tensor) else x).astype(np.float32)


def make(config):
    """(description, arrays) of a model type."""
    raw, kind = {n: x for n, x in config.items() if n != "model_type"}, config["model_type"]
    assert hf_models.check(kind, raw, 0, 0) == ("same", ""), kind
    model, layers, tables = hf_models.run(kind, raw, 0)
    about = {"config": config, "attention": [], "layers": []}
    arrays = {}
    halves = ("encoder", "decoder") if model.config.is_encoder_decoder else (None,)
    for half in halves:
        decoder = None if half is None else half == "decoder"
        specs, recorded = pe.from_hf(about["config"], decoder=decoder), set()
        for i, layer in enumerate(x for x in layers if x["name"].startswith(half or "")):
            index = hf_models.index_of(layer, i)
            if re.search("Delta|Lightning", type(layer["module"]).__name__):
                continue  # Linear attention.
            about["attention"].append(index)
            if specs[index] in recorded:
                continue
            recorded.add(specs[index])
            values = hf_models.layer_arrays(specs[index], layer, model.config)
            want = numbers(hf_models.expected_output(layer))
            values = {n: x for n, x in values.items() if n != "x"}
            if isinstance(specs[index].scheme, pe.DeBERTa):
                params = hf_models.scheme_params(specs[index].scheme, layer, {})
                values |= {f"param.{n}": x for n, x in params.items()}
            values["out"] = want.reshape(*values["q"].shape[:3], -1)
            is_causal = hf_models.is_causal(layer)
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
    hf_models.write(FILE, "attention layers of whole models", about, arrays)
