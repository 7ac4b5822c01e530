"""Random legal configs of the config classes of transformers, with most keys left out."""

import dataclasses
import functools
import importlib.util
import pathlib
import random
import re

from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.hf.test_layers import KINDS as KNOWN

FULL, LOCAL = "full_attention", "sliding_attention"
# Small sizes, under the names that config classes have for them.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_heads", "swa_num_attention_heads"), 4),
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
    **{"num_nextn_predict_layers": 0, "first_k_dense_replace": 1},
}
LINEAR, CONVOLUTION = "linear_attention", "conv"
# The kinds of layers of model types whose defaults have fewer.
KINDS = {
    "granitemoehybrid": (LINEAR, FULL),
    "mellum": (FULL, LOCAL),
    "kimi_linear": (LINEAR, FULL),
    "laguna": (FULL, LOCAL),
    "lfm2": (CONVOLUTION, FULL),
    "lfm2_moe": (CONVOLUTION, FULL),
    "minimax_m3_vl_text": (FULL, "minimax_m3_sparse"),
}
# Values that only these model types need; layers.npz has small sizes of each.
_MROPE = {"head_dim": 64, "partial_rotary_factor": 0.5}
_LATENT = {"num_key_value_heads": (4,)}
VALUES_OF = {
    **dict.fromkeys(("axk1", "axk2", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu"), _LATENT),
    **{kind: {"layer_rope_theta": "thetas"} for kind in ("granite_swa", "granitemoe_swa")},
    "bailing_hybrid": _LATENT | {"layer_group_size": (2, 3), "short_conv_kernel_size": (2,)},
    "bamba": {"attn_layer_indices": ([0], [1, 3])},
    "jamba": {"attn_layer_period": (2, 3), "attn_layer_offset": (0, 1)},
    "dbrx": {
        "attn_config": tuple(
            {"kv_n_heads": kv, "clip_qkv": clip, "rope_theta": 1e4}
            for kv, clip in ((1, None), (2, 0.5), (4, 8))
        ),
    },
    "nemotron_h": {"layer_types": "mixers", "num_hidden_layers": (None,)},
    "recurrent_gemma": {
        "attention_window_size": (3, 7, 64),
        "block_types": (None, ["attention", "recurrent"], ["attention"]),
    },
    "zamba": {
        **{"attn_layer_period": (2, 3), "attn_layer_offset": (0, 1)},
        "attention_head_dim": (None, 16),
    },
    "zamba2": {
        **{"use_mem_rope": (True, False), "layer_types": "hybrids"},
        **{"mamba_ngroups": (1,), "head_dim": (None,)},
    },
    "cohere2_moe": {
        "first_k_dense_replace": (0, 1, 2),
        "prefix_dense_sliding_window_pattern": (1, 2),
    },
    "gemma3n_text": {"hidden_size_per_layer_input": (8,)},
    "gpt_neo": {"window_size": (3, 7, 64)},
    "granitemoehybrid": {
        "position_embedding_type": ("rope", "nope", None),
        "layers_block_type": (None,),
    },
    "kimi_linear": _LATENT | {"full_attention_interval": (None,)},
    "laguna": {"gating": (True, "per-element"), "num_attention_heads_per_layer": "heads"},
    "longcat_flash": _LATENT | {"head_dim": (8,)},
    "lfm3": {"use_attention_gate": (True, False)},
    "mimo_v2_flash": {"head_dim": (24,), "sliding_window_size": (None, None, 6)},
    "minimax_m3_vl_text": {
        **{"head_dim": (16,), "rotary_dim": (8,), "index_block_size": (32,)},
        "shared_intermediate_size": (16,),
    },
    "muse_spark_text": {"qk_scale_factor": (1.5, 3.0)},
}
_LAYERS = "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"
# Values of keys about attention, drawn for classes that have them and, now and then, for others.
_BOOLS = """
attention_bias attention_out_bias use_qkv_bias qkv_bias use_bias bias enable_bias use_sliding_window
use_qk_norm qk_layernorm attn_temperature_tuning rope_interleave alibi multi_query
new_decoder_architecture scale_attn_weights scale_attn_by_inverse_layer_idx attention_k_eq_v
is_decoder use_bidirectional_attention reorder_and_upcast_attn
""".split()
VALUES = {
    **dict.fromkeys(_BOOLS, (True, False)),
    "num_key_value_heads": (1, 2, 4, 4),
    "num_kv_heads": (1, 2, 4),
    "head_dim": (8, 16, 8),
    "max_position_embeddings": (24, 40, 512, 4096),
    "n_positions": (24, 512),
    "original_max_position_embeddings": (16, 32, 256),
    "sliding_window": (None, 2, 3, 7, 64),
    "max_window_layers": (0, 1, 2, 9),
    "attention_chunk_size": (5, 9, 64),
    "attn_logit_softcapping": (None, 2.0, 50.0),
    "query_pre_attn_scalar": (4, 16, 100),
    "attention_multiplier": (0.1, 0.5),
    "rms_norm_eps": (1e-6, 0.03),
    "layer_norm_eps": (1e-5, 0.03),
    "layer_norm_epsilon": (1e-5, 0.03),
    "norm_eps": (1e-5, 0.03),
    "norm_epsilon": (1e-5, 0.03),
    "partial_rotary_factor": (0.25, 0.5, 1.0),
    "rotary_pct": (0.25, 0.5, 1.0),
    "rotary_emb_base": (1e3, 1e5),
    "rotary_dim": (4, 8),
    "rope_theta": (1e3, 5e5),
    "no_rope_layers": "flags",
    "no_rope_layer_interval": (2, 3, 4),
    "sliding_window_pattern": (2, 3, 6),
    "local_attention": (4, 5, 8),
    "floor_scale": (4, 8192),
    "attn_scale": (0.1, 0.4),
    "relative_attention_num_buckets": (4, 8, 32),
    "relative_attention_max_distance": (10, 128),
    "clip_qkv": (None, 0.5),
    "sliding_window_size": (3, 7),
    "rel_extent": (5, 9),
    "d_rel": (3, 4),
    "log_scaling_n_floor": (None, 4),
    "log_scaling_alpha": (0.1, 0.5),
    "compress_rope_theta": (1e3, 1.6e5),
    "global_rope_theta": (1e3, 1e5),
    "local_rope_theta": (1e3, 1e5),
    "rope_local_base_freq": (1e3, 1e5),
    "full_attention_interval": (2, 3),
    "global_attn_every_n_layers": (2, 3),
    "position_embedding_type": ("absolute",),
    "relative_attention": (True,),
    "pos_att_type": ("c2p|p2c", ["c2p"], ["p2c", "c2p"]),
    "position_buckets": (-1, 4, 8),
    "max_relative_positions": (-1, 10, 30),
    "share_att_key": (True, False),
    "position_biased_input": (True, False),
    "is_causal": (True, False),
    "dtype": ("bfloat16", "float32"),
    "embedding_multiplier": (12.0,),
    "logits_scaling": (8.0,),
    "residual_multiplier": (0.2,),
}
# Keys that classes take though they are no fields, from version 4 or from a parent.
_KEYWORDS = {"rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base", "rotary_dim"}
_KEYWORDS |= {"global_rope_theta", "local_rope_theta", "rope_local_base_freq", "head_dim", "dtype"}
_KEYWORDS |= {"full_attention_interval", "global_attn_every_n_layers", "sliding_window_pattern"}
_KEYWORDS |= {"no_rope_layer_interval", "original_max_position_embeddings", "clip_qkv"}
_KEYWORDS |= {"is_causal"}


def fields_of(kind):
    """The names that the config class of a model type has for its keys."""
    cls = CONFIG_MAPPING[kind]
    return {field.name for field in dataclasses.fields(cls)} | {*cls.attribute_map}


def takes_positions(kind):
    """Whether a model of a type rotates by the positions that it is given."""
    counts_tokens = kind == "llama4_text"  # By its scale.
    return "rope_parameters" in fields_of(kind) and not counts_tokens


def draw(kind, rng: random.Random):
    """The `config.json` of a small model of a type, without its `model_type`."""
    fields = fields_of(kind)
    cls = CONFIG_MAPPING[kind]
    raw = {n: x for n, x in SIZES.items() if n in fields}
    small = KNOWN[kind]["config"] if kind in KNOWN else {}
    drawn = {"model_type", *VALUES, *_LAYERS, *VALUES_OF.get(kind, ())}
    others = {n for n in small if n in drawn or re.search("rope|layer|pattern|idxs", n)}
    raw |= {n: x for n, x in small.items() if n not in raw and n not in others}
    if "list[int]" in str(cls.__annotations__.get("moe_intermediate_size")):
        raw["moe_intermediate_size"] = [8, 8]
    if cls.attribute_map.get("intermediate_size") == "ffn_dim":
        raw.pop("intermediate_size", None)
    layers = rng.choice((1, 2, 4, 6))
    raw |= {n: layers for n in _LAYERS if n in fields and n not in cls.attribute_map}
    raw |= {n: rng.choice(VALUES[n]) for n in ("relative_attention", "pos_att_type") if n in fields}
    names = [n for n in VALUES if n in fields and rng.random() < 0.5]
    names += [n for n in sorted(_KEYWORDS - fields) if rng.random() < 0.02]
    if rng.random() < 0.1:  # A key of other classes.
        names.append(rng.choice(sorted(VALUES)))
    for name in dict.fromkeys(names):
        if name not in raw:
            values = VALUES[name]
            raw[name] = _flags(layers, rng) if values == "flags" else rng.choice(values)
    if raw.get("use_bidirectional_attention") and "Literal" in str(
        cls.__annotations__.get("use_bidirectional_attention")
    ):
        raw["use_bidirectional_attention"] = rng.choice(("all", "vision"))
    for name, values in VALUES_OF.get(kind, {}).items():
        if values == "thetas":
            values = [None, [rng.choice((0, 1e3, 5e5)) for _ in range(layers)]]
        elif values == "heads":
            values = [None, [rng.choice((2, 4)) for _ in range(layers)]]
        elif values == "mixers":
            names = LINEAR, FULL, "moe", "mlp"
            letters = [rng.choice("M*E-") for _ in range(layers)]
            if rng.random() < 0.5:
                raw["hybrid_override_pattern"] = "".join(letters)
                continue
            values = [[names["M*E-".index(x)] for x in letters]]
        elif values == "hybrids":
            values = [[LINEAR] + [rng.choice((LINEAR, "hybrid")) for _ in range(layers - 1)]]
        raw[name] = rng.choice(values)
        if raw[name] is None:
            del raw[name]
    if kind == "gpt_neo":
        cut = rng.randint(0, layers)
        raw["attention_types"] = [[["global"], cut], [["local"], layers - cut]]
    if kind.startswith("qwen3_5"):
        raw |= _MROPE
    if "partial_rotary_factor" in fields:
        raw.setdefault("partial_rotary_factor", 0.5)
    if kind == "mpt" and rng.random() < 0.5:
        parts = {"alibi": True, "softmax_scale": 0.3, "clip_qkv": 0.5, "alibi_bias_max": 8}
        parts |= {"attn_type": "multihead_attention", "qk_ln": False}
        raw["attn_config"] = {n: x for n, x in parts.items() if rng.random() < 0.4}
    if "rope_parameters" in fields and rng.random() < 0.8:
        _draw_rope(cls, raw, layers, rng)
    if kind.startswith("qwen3_5"):
        sections = {"mrope_section": [6, 5, 5]}
        name = "rope_scaling" if "rope_scaling" in raw else "rope_parameters"
        raw[name] = (raw.get(name) or {"rope_type": "default"}) | sections
        raw[name] |= {"mrope_interleaved": True} if rng.random() < 0.5 else {}
    elif "mrope_section" in _modeling(cls):
        pairs = (raw.get("head_dim") or 8) // 2
        name = "rope_scaling" if "rope_scaling" in raw else "rope_parameters"
        halves = [[pairs // 2, pairs // 4, pairs // 4], [pairs // 4, pairs // 4, pairs // 2]]
        sections = {"mrope_section": rng.choice(halves)}  # Time is first, or last.
        raw[name] = (raw.get(name) or {"rope_type": "default"}) | sections
    if rng.random() < (0.4 if "layer_types" in fields else 0.02):
        raw["layer_types"] = _kinds(cls, layers, rng)
    if "num_key_value_heads" in fields and 4 % (getattr(cls, "num_key_value_heads", 0) or 4):
        raw.setdefault("num_key_value_heads", 2)
    if kind == "lfm2_moe":
        raw.setdefault("layer_types", _kinds(cls, layers, rng))
    if kind == "minimax_m3_vl_text":
        name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
        raw[name] = (raw.get(name) or {}) | {"partial_rotary_factor": 0.5}
    if rng.random() < 0.3:
        raw[rng.choice(sorted(VALUES.keys() & fields) or ["head_dim"])] = None
    return raw


@functools.cache
def _modeling(cls):
    """The text of the modeling file."""
    path = cls.__module__.replace("configuration_", "modeling_")
    spec = importlib.util.find_spec(path)
    return "" if spec is None else pathlib.Path(spec.origin).read_text()


def _flags(layers, rng):
    return [rng.randint(0, 1) for _ in range(layers)]


def _kinds(cls, layers, rng):
    known = set(KINDS.get(cls.model_type) or getattr(cls(), "layer_types", None) or [FULL, LOCAL])
    known |= {FULL, LOCAL} if rng.random() < 0.3 else set()
    return [rng.choice(sorted(known)) for _ in range(layers)]


def _draw_rope(cls, raw, layers, rng):
    """Adds rope parameters, under the names of transformers 4 or 5."""
    new = rng.random() < 0.5
    filled = getattr(cls(), "rope_parameters", None) or {}
    nested = [n for n, x in filled.items() if isinstance(x, dict)]
    default = None if "qk_rope_head_dim" in raw else getattr(cls, "head_dim", None)
    head_dim = raw.get("head_dim") or (default if isinstance(default, int) else 8)
    if not new:
        if rng.random() < 0.7:
            raw["rope_theta"] = rng.choice((1e3, 5e5))
        part = _part(cls, raw, head_dim, rng, theta=False)
        word = rng.choice(("type", "rope_type"))
        if part["rope_type"] != "default":
            raw["rope_scaling"] = {word if n == "rope_type" else n: x for n, x in part.items()}
        elif rng.random() < 0.5:
            raw["rope_scaling"] = None
    elif nested and rng.random() < 0.8:
        raw["rope_parameters"] = {n: _part(cls, raw, head_dim, rng) for n in nested}
    else:
        raw["rope_parameters"] = _part(cls, raw, head_dim, rng)


def _part(cls, raw, head_dim, rng, theta=True):
    kind = rng.choice(["default", "default", *sorted(ROPE_INIT_FUNCTIONS)])
    out = {"rope_type": kind}
    if theta and rng.random() < 0.8:
        out["rope_theta"] = rng.choice((1e3, 1e4, 5e5))
    if rng.random() < 0.15:
        out["partial_rotary_factor"] = rng.choice((0.25, 0.5, 1.0))
    if kind in ("linear", "dynamic", "yarn", "llama3", "longrope") and rng.random() < 0.95:
        out["factor"] = rng.choice((2.0, 4, 8.0))
    if kind in ("yarn", "llama3", "longrope") and rng.random() < 0.8:
        out["original_max_position_embeddings"] = rng.choice((8, 16, 64, 512))
    if kind == "proportional" and rng.random() < 0.3:
        out["factor"] = 2.0
    if kind == "llama3":
        out |= {"low_freq_factor": rng.choice((1.0, 2.0)), "high_freq_factor": 4.0}
    if kind == "yarn":
        more = {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.3}
        more |= {"mscale": rng.choice((0.7, 1.0)), "mscale_all_dim": rng.choice((0.8, 1.0))}
        out |= {n: x for n, x in more.items() if rng.random() < 0.3}
    if kind == "dynamic" and rng.random() < 0.5 and "alpha" in _modeling(cls):
        out["alpha"] = 8.0
    if kind == "longrope":
        share = out.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
        count = int(head_dim * share) // 2
        out["short_factor"] = [1.0 + 0.1 * i for i in range(count)]
        out["long_factor"] = [1.5 + 0.7 * i for i in range(count)]
        if rng.random() < 0.3:
            out["attention_factor"] = 1.2
    return out
