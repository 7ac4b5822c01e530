"""Makes layers.npz: python -m tests.makers hf_layers [NAME ...], with the group parity.

Runs a small model of each of these model types with random weights, and records one attention layer
of each kind: its projections, norms and sinks, and its output before gates and projections, for
`layer_arrays.computed`; the numbers of the layers that attend; and the tables of positions. All
layers must equal those of `from_hf`, by `hf_fuzz.check`.
"""

import json
import logging
import pathlib
import re
import warnings

import numpy as np
import torch
import transformers

import posenc_jax as pe
from tests.makers import hf_draw, hf_fuzz, hf_fuzz_layers, hf_fuzz_models

FILE = pathlib.Path(__file__).parents[1] / "hf" / "layers.npz"
CAUSAL_TOKENS = 12
FULL, LOCAL, LINEAR, CONVOLUTION = (
    *("full_attention", "sliding_attention", "linear_attention", "conv"),
)
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 4}
SIZES |= {"rms_norm_eps": 0.03, "norm_eps": 0.03}
WINDOW = {"sliding_window": 7}
THETAS = {"layer_rope_theta": [0, 100.0, 1e4, 1e4], "attention_multiplier": 0.3} | WINDOW
GROUPED = {"head_dim": 16, "partial_rotary_factor": 0.5}
MROPE = GROUPED | {"rope_parameters": {"rope_theta": 1e3, "mrope_section": [2, 1, 1]}}
LATENT = {"num_key_value_heads": 2, "head_dim": 8}
ALPHA = {"rope_scaling": {"type": "dynamic", "alpha": 8.0, "factor": 1.0}, "rope_theta": 1e4}
ENCODER = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1}
ENCODER |= {"decoder_layers": 1, "max_position_embeddings": 24}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "shared_intermediate_size": 16}
BERT = {"max_position_embeddings": 24, "num_hidden_layers": 1}
INDEXER = {f"indexer_{n}": 1 for n in ("n_heads", "kv_heads")}
INDEXER |= {"indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 4}
TOWERS = {
    f"{name}_config": {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    for name in ("vision", "audio")
}
KINDS = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
KINDS |= {"linear_num_value_heads": 2}
CASES = {
    "aria_text": {},
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": LATENT | {"layer_group_size": 2},
    "emu3_text_model": {},
    "gemma4_unified_text": WINDOW | {"global_head_dim": 16, "num_kv_shared_layers": 0},
    "minicpm3": LATENT,
    "minimax": WINDOW,
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 4, "mamba_d_state": 8},
    **dict.fromkeys(("bert-generation", "biogpt", "ernie", "megatron-bert", "roc_bert"), BERT),
    **dict.fromkeys(("data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl"), BERT),
    "xmod": BERT | {"default_language": "en_XX"},
    "internlm3": {},
    "iquestcoder": {},
    "glm_moe_dsa": LATENT,
    "granitemoeshared": {"attention_multiplier": 0.3, "shared_intermediate_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "kolibri1": WINDOW | {"num_hidden_layers": 5},
    "mellum": WINDOW | {"layer_types": [FULL, LOCAL] * 2},
    **dict.fromkeys(("mvp", "plbart"), ENCODER),
    "olmo_hybrid": KINDS,
    "youtu": LATENT,
    "afmoe": WINDOW | {"global_attn_every_n_layers": 2},
    "bart": ENCODER,
    "cohere2_moe": WINDOW
    | {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 16}
    | {"sliding_window_pattern": 2},
    "flint": WINDOW,
    "gemma3n_text": WINDOW
    | {"num_hidden_layers": 5, "hidden_size_per_layer_input": 8, "laurel_rank": 4},
    "glm4_moe_lite": LATENT,
    "gpt_bigcode": {"n_head": 2, "n_layer": 1, "n_positions": 24},
    "gpt_neo": {"num_heads": 2, "num_layers": 2, "window_size": 7, "max_position_embeddings": 24}
    | {"attention_types": [[["global", "local"], 1]]},
    "granite_swa": THETAS,
    "granitemoe_swa": THETAS,
    "granitemoehybrid": MAMBA
    | {"position_embedding_type": "rope", "layer_types": [LINEAR, FULL] * 2}
    | {"attention_multiplier": 0.3},
    "hunyuan_v1_dense": ALPHA,
    "hunyuan_v1_moe": ALPHA,
    "hy_v3": {},
    "hy_v4": LATENT,
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 2, "layer_types": [LINEAR, FULL] * 2}
    | LATENT,
    "laguna": WINDOW | GROUPED | {"layer_types": [FULL, LOCAL] * 2, "head_dim": 16},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": [CONVOLUTION, FULL] * 2},
    "lfm3": WINDOW | {"num_hidden_layers": 5},
    "longcat_flash": LATENT | {"num_layers": 1, "expert_ffn_hidden_size": 8, "zero_expert_num": 2},
    "mbart": ENCODER,
    **dict.fromkeys(("blenderbot", "blenderbot-small", "marian", "pegasus"), ENCODER),
    "gpt_neox_japanese": {"rotary_pct": 0.5, "rotary_emb_base": 100},
    "openai-gpt": {"n_head": 2, "n_layer": 1, "n_positions": 24},
    "phi4_multimodal": WINDOW | TOWERS | {"partial_rotary_factor": 0.5},
    "rembert": BERT | {"input_embedding_size": 8},
    "mimo_v2_flash": WINDOW | {"head_dim": 24},
    "minimax_m3_vl_text": {"head_dim": 16, "rotary_dim": 8, "dense_intermediate_size": 16}
    | {"rope_parameters": {"rope_theta": 1e3, "partial_rotary_factor": 0.5}},
    "modernbert-decoder": {"local_attention": 12},
    "muse_spark_text": WINDOW | {"qk_scale_factor": 1.5},
    "nanochat": {},
    "qwen3_5_moe_text": MROPE,
    "qwen3_5_text": MROPE,
    "qwen4_exp_text": MROPE | INDEXER | {"hc_lowrank": 8},
    "ctrl": {"dff": 16, "n_positions": 24, "n_layer": 1, "n_head": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 0.5, "rope_theta": 1e4},
        **{
            "ffn_config": {"moe_num_experts": 2, "ffn_hidden_size": 16},
            "n_heads": 2,
            "n_layers": 1,
        },
    },
    "nemotron_h": {"hybrid_override_pattern": "M*E-", "mamba_num_heads": 4, "mamba_head_dim": 8}
    | {"ssm_state_size": 8, "n_groups": 2, "moe_shared_expert_intermediate_size": 8},
    "recurrent_gemma": {"attention_window_size": 7, "lru_width": 32, "num_key_value_heads": 1}
    | {"num_attention_heads": 2, "num_hidden_layers": 3},
    "zamba": {"mamba_d_state": 8, "attention_head_dim": 16, "attn_layer_period": 2}
    | {"attn_layer_offset": 0},
    "zamba2": {
        "layers_block_type": [LINEAR, "hybrid"] * 2,
        "use_mem_rope": True,
        "n_mamba_heads": 4,
    }
    | {"mamba_d_state": 8, "chunk_size": 8},
    "vaultgemma": WINDOW | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5},
}
CASES["laguna"].pop("partial_rotary_factor")


def raw_config(kind):
    fields = hf_draw.fields_of(kind)
    raw = {n: x for n, x in hf_draw.SIZES.items() if n in fields}
    aliases = transformers.CONFIG_MAPPING[kind].attribute_map
    raw |= {n: x for n, x in SIZES.items() if n in fields and n not in aliases}
    raw |= CASES[kind]
    return {n: x for n, x in raw.items() if aliases.get(n) not in raw}


def numbers(x):
    return np.asarray(x.detach() if isinstance(x, torch.Tensor) else x).astype(np.float32)


def make(kind):
    """(description, arrays) of a model type."""
    raw = raw_config(kind)
    assert hf_fuzz.check(kind, raw, 0, 0) == ("same", ""), kind
    model, layers, tables = hf_fuzz_models.run(kind, raw, 0)
    about = {"config": {"model_type": kind} | raw, "attention": [], "layers": []}
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
    about, arrays = {}, {}
    for kind in argv or CASES:
        about[kind], of_kind = make(kind)
        arrays |= of_kind
        print(kind, about[kind]["attention"], about[kind]["layers"], flush=True)
    if argv:
        return
    origin = f"transformers {transformers.__version__}, attention layers of whole models in float64"
    described = {"origin": origin, "torch": torch.__version__, "model_types": about}
    np.savez_compressed(FILE, about=np.array(json.dumps(described)), **arrays)
    print(FILE.stat().st_size)
