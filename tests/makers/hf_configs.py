"""Makes the files of config defaults: python -m tests.makers hf_configs [CONFIG ...].

With transformers 5.24; a CONFIG is JSON, a further case of a model type.

Writes `posenc_jax/hf/defaults.json`, the defaults of the config class of every model type, and
`golden/raw_configs.json`: raw configs, the keys that the config class adds, changes or drops
beyond those defaults, and the window and the chunk of every layer; and `causal_lm_types.json`, the
model types of all causal language models. PyTorch is not needed.
"""

import dataclasses
import importlib.util
import json
import pathlib
import re
import sys

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from posenc_jax.hf.model_types import MODEL_TYPES

FOLDER = pathlib.Path(__file__).parents[1] / "hf"
DEFAULTS = FOLDER.parents[1] / "posenc_jax" / "hf" / "defaults.json"
GOLDEN = FOLDER / "golden" / "raw_configs.json"
NAMES = FOLDER / "causal_lm_types.json"
CASES = json.loads(GOLDEN.read_text())["model_types"]
ORIGIN = f"transformers {transformers.__version__}, configuration classes"

# Keys that some reader looks up.
KEYS = """
hidden_size embedding_size dim d_model n_embd embed_dim num_attention_heads n_head n_heads num_heads
encoder_attention_heads num_hidden_layers n_layer n_layers num_layers encoder_layers
decoder_layers num_decoder_layers head_dim d_kv d_head attention_head_size qk_nope_head_dim
qk_rope_head_dim global_head_dim per_layer_config depths depth
max_position_embeddings n_positions max_seq_len original_max_position_embeddings
max_source_positions max_target_positions pad_token_id
rope_parameters rope_scaling rope_theta rotary_emb_base rope_local_base_freq global_rope_theta
local_rope_theta partial_rotary_factor rotary_pct rotary_dim rope_interleave rotary_value
rotary_embedding_base no_rope_layers no_rope_layer_interval
layer_types sliding_window use_sliding_window max_window_layers sliding_window_pattern
local_attention sliding_window_size local_layer_ids attention_chunk_size
use_bidirectional_attention window_size pretrained_window_sizes use_absolute_embeddings
attn_logit_softcapping use_qk_norm qk_layernorm rms_norm_eps layer_norm_eps
query_pre_attn_scalar attention_multiplier scale_attn_weights scale_attn_by_inverse_layer_idx
attn_temperature_tuning floor_scale attn_scale log_scaling_n_floor log_scaling_alpha
is_decoder is_encoder_decoder relative_attention_num_buckets relative_attention_max_distance
alibi learned_pos_emb attn_config relative_attention position_biased_input pos_att_type
max_relative_positions position_buckets share_att_key bi_data clamp_len
position_embeddings_type left_max_position_embeddings right_max_position_embeddings
compress_rope_theta compress_ratios d_rel rel_extent swa_num_attention_heads position_embedding_type
sinusoidal_pos_embds
num_key_value_heads num_kv_heads multi_query new_decoder_architecture decoder_attention_heads
attention_bias attention_out_bias use_qkv_bias qkv_bias use_bias bias enable_bias is_causal
layer_rope_theta qk_scale_factor full_attn_idxs global_attn_every_n_layers
prefix_dense_sliding_window_pattern attention_types attention_layers
""".split()
GEMMA4 = "gemma4_text", "gemma4_unified_text"
MEMORY = "downsample_rate", "hidden_size", "num_attention_heads", "num_layers"
MEMORY = tuple(f"memory_attention_{name}" for name in MEMORY)
# Keys that only these model types read.
KEYS_OF = {
    "cohere2_moe": ("mlp_layer_types",),
    "granitemoehybrid": ("layers_block_type",),
    "longformer": ("attention_window",),
    "rembert": ("input_embedding_size",),
    "inkling_text": ("swa_head_dim",),
    **dict.fromkeys(
        ("inkling2_text", "inkling2_loop_text"), ("qk_l2_clip_threshold", "rel_l2_clip_threshold")
    ),
    "jamba": ("layers_block_type", "attn_layer_period", "attn_layer_offset"),
    "bamba": ("layers_block_type", "attn_layer_indices"),
    "bailing_hybrid": ("layer_group_size",),
    "nemotron_h": ("layers_block_type", "hybrid_override_pattern"),
    "recurrent_gemma": ("attention_window_size", "block_types"),
    **dict.fromkeys(("edgetam_video", "sam2_video", "sam3_tracker_video"), MEMORY),
    "xlm": ("emb_dim", "causal"),
    "zamba": ("layers_block_type", "attn_layer_period", "attn_layer_offset", "attention_head_dim"),
    "zamba2": ("layers_block_type", "use_mem_rope", "use_long_context", "attention_head_dim"),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3", "lfm3_vl_vision"), ("norm_eps",)),
}


def keys_of(model_type):
    names = [*KEYS, *KEYS_OF.get(model_type, ())]
    return [n for n in names if (model_type, n) != ("dbrx", "attn_config")]  # A config of its own.


def plain(value):
    """JSON of a value: tuples are lists, sub-configs dicts."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    return json.loads(json.dumps(value))


def defaults(model_type):
    """{key: value} of the fields of a config class, and of keys that it reads without a field."""
    cls = CONFIG_MAPPING[model_type]
    out = {
        field.name: field.default
        for field in dataclasses.fields(cls)
        if field.name in keys_of(model_type) and field.default not in (None, dataclasses.MISSING)
    }
    if not out.get("is_encoder_decoder"):  # Of every class.
        out = {n: x for n, x in out.items() if n not in ("is_encoder_decoder", "is_decoder")}
    padded = "camembert", "data2vec-text", "esm", "longformer", "luke", "xmod"
    if "roberta" not in model_type and model_type not in padded:
        out.pop("pad_token_id", None)
    if "rope_parameters" not in {field.name for field in dataclasses.fields(cls)}:
        return plain(out)
    filled, theta = cls().rope_parameters, out.get("rope_theta", cls.default_theta)
    if isinstance(theta, dict):  # Each kind of layer has a key for its base.
        modernbert = "global_rope_theta", "local_rope_theta"
        names = dict.fromkeys(("modernbert", "modernbert-decoder"), modernbert)
        names = names.get(model_type, ("rope_theta", "rope_local_base_freq"))
        out |= dict(zip(names, (theta["global"], theta["local"]), strict=True))
        return plain(out)
    out["rope_theta"] = theta
    if model_type == "deepseek_v4":  # Two sets of parameters, not by the kinds of layers.
        return plain(out | {"partial_rotary_factor": cls.default_partial_rotary_factor})
    kinds = filled.values() if FULL in filled else [filled]
    if any(kind is None or kind["rope_type"] != "default" for kind in kinds) or any(
        kind["rope_theta"] != theta for kind in kinds
    ):
        if cls(rope_theta=1.0).rope_parameters.get("rope_theta") == 1.0:
            filled.pop("rope_theta")  # The base is read from the config.
        if "qk_rope_head_dim" in out:  # Implied by these sizes.
            filled.pop("partial_rotary_factor", None)
        out["rope_parameters"] = filled
    elif filled.get("partial_rotary_factor", 1.0) != 1.0:
        out["partial_rotary_factor"] = filled["partial_rotary_factor"]
    if model_type == "mimo_v2_flash":
        out["partial_rotary_factor"] = 0.334  # Of its modeling file, for the type "default".
    if model_type in ("gpt_neox", "gpt_neox_japanese"):
        out["rotary_emb_base"] = out.pop("rope_theta")
    if model_type in GEMMA4:
        layers = plain(cls())["per_layer_config"].values()
        out["global_head_dim"] = max(layer["head_dim"] for layer in layers)
    return plain(out)


SIZES = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"num_hidden_layers": 7}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LOCAL, FULL = "sliding_attention", "full_attention"


def raw_configs(model_type):
    """Configs with most keys left out: those of the file, or for a new model type a few."""
    if model_type in CASES:
        return [case["raw"] for case in CASES[model_type]]
    cls = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(cls)}
    sizes = {n: x for n, x in SIZES.items() if n in fields or n in cls.attribute_map}
    window = {"sliding_window": 17}
    more = [{}]
    if "rope_parameters" in fields:
        more += [{"rope_theta": 54321.0}, {"rope_scaling": YARN, "max_position_embeddings": 2048}]
        more += [{"partial_rotary_factor": 0.25, "head_dim": 64}]
    if "sliding_window" in fields:
        more += [window, {"sliding_window": None}]
    if "layer_types" in fields:
        more += [window | {"layer_types": [FULL, LOCAL, LOCAL, FULL, LOCAL, LOCAL, FULL]}]
    return [{}, *(sizes | keys for keys in more)]


# Model types without a modeling file, and those whose file they use.
BORROWED = dict.fromkeys(("exaone", "internlm3", "iquestcoder"), "llama")
BORROWED |= {"sarvam_mla": "deepseek_v3", "sarvam_moe": "glm4_moe"}


def windows(config):
    """The window and the chunk of each layer, by the masks that the model's own file makes."""
    path = type(config).__module__.replace("configuration_", "modeling_")
    if config.model_type in BORROWED:
        name = BORROWED[config.model_type]
        path = f"transformers.models.{name}.modeling_{name}"
    spec = importlib.util.find_spec(path)
    code = pathlib.Path(spec.origin).read_text()
    count = config.num_hidden_layers
    size = getattr(config, "sliding_window", None)
    by_kind = (
        re.search(r"layer_types?\[|block_type\[|in enumerate\(.*layer_types", code) is not None
    )
    kinds = getattr(config, "layer_types", None) or []
    if "create_bidirectional_sliding_window_mask" in code and size is not None:
        size = [size, size]  # The mask of an encoder has |q - k| <= size.
    if not getattr(config, "is_causal", True) and size is not None:
        size = [size, size]
    if config.model_type == "gpt_neo":
        window = [config.window_size if x == "local" else None for x in config.attention_layers]
    elif config.model_type == "longformer":
        sizes = config.attention_window
        sizes = [sizes] * count if isinstance(sizes, int) else sizes
        window = [[x // 2, x // 2] for x in sizes]
    elif config.model_type == "minimax":
        window = [size if kind == "full_attention" else None for kind in kinds]
    elif config.model_type == "deepseek_v4":
        window = [size] * count  # Beside compressed entries, which have a mask of their own.
    elif not re.search(r"create_\w*sliding_window\w*mask", code):
        window = [None] * count
    elif by_kind and kinds:
        window = [size if "sliding" in kind else None for kind in kinds]
    else:
        window = [size] * count
    chunked = "create_chunked_causal_mask" in code
    chunks = [config.attention_chunk_size if k == "chunked_attention" else None for k in kinds]
    return window, chunks if chunked else [None] * count


def completed(model_type, raw):
    """What transformers makes of a raw config; None where it refuses it."""
    cls = CONFIG_MAPPING[model_type]
    try:
        config = cls.from_dict(json.loads(json.dumps(raw)))
    except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError) as error:
        print(f"{model_type} refuses {raw}: {str(error)[:150]}", file=sys.stderr)
        return None
    full = {n: x for n, x in plain(config).items() if n in keys_of(model_type) and x is not None}
    known = defaults(model_type) | raw
    filled = {n: x for n, x in full.items() if known.get(n) != x}
    dropped = sorted(
        n for n, x in known.items() if n in keys_of(model_type) and x is not None and n not in full
    )
    case = {"raw": raw, "filled": filled, "dropped": dropped}
    if hasattr(config, "num_hidden_layers") and not hasattr(config, "depths"):
        case["windows"], case["chunks"] = windows(config)
    return case


def golden(added=()):
    """The cases of all model types; `added` are configs of further cases."""
    out = {}
    for name in sorted(MODEL_TYPES):
        raws = raw_configs(name)
        for config in added:
            if config["model_type"] == name:
                raws.append({key: x for key, x in config.items() if key != "model_type"})
        out[name] = [case for raw in raws if (case := completed(name, raw))]
    return {"origin": ORIGIN, "model_types": out}


def write(path, content):
    """One line for each entry."""
    lines = []
    for name, value in content["model_types"].items():
        text = json.dumps(value, sort_keys=not isinstance(value, list))
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"    {json.dumps(x)}" for x in value) + "\n  ]"
        lines.append(f"  {json.dumps(name)}: {text}")
    head = json.dumps(content["origin"])
    path.write_text(f'{{"origin": {head}, "model_types": {{\n' + ",\n".join(lines) + "\n}}\n")


def all_defaults():
    return {"origin": ORIGIN, "model_types": {n: defaults(n) for n in sorted(MODEL_TYPES)}}


def causal_lm_types():
    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def main(argv):
    write(DEFAULTS, all_defaults())
    write(GOLDEN, golden([json.loads(text) for text in argv]))
    about = {"origin": f"transformers {transformers.__version__}"}
    names = json.dumps(about | {"model_types": causal_lm_types()}, indent=1)
    NAMES.write_text(names + "\n")
    for path in (DEFAULTS, GOLDEN, NAMES):
        print(path.name, path.stat().st_size)
