"""The arguments of `Attention`: sizes, biases of projections and causality of model types."""

import dataclasses
from typing import Any

from posenc_jax.checks import divides, require
from posenc_jax.hf.config_reader import TrackedConfig, head_size
from posenc_jax.hf.config_reader import is_decoder as _reads_decoder
from posenc_jax.hf.layer_kinds import is_causal as _flag_of_causality
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.layer_spec import LayerSpec

PROJECTIONS = "query", "key", "value", "out"
# Whether q, k, v and the output have biases, or the keys that say so, from the modeling files.
_NONE, _ALL, _QKV = (False, False), (True, True), (True, False)
_BOTH = "attention_bias", "attention_bias"
_BIASES: dict[str, tuple[bool | str, bool | str]] = {
    **dict.fromkeys(("apertus", "arcee", "cohere", "cohere2", "dots1", "eurobert"), _BOTH),
    **dict.fromkeys(("flex_olmo", "gemma", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss"), _BOTH),
    **dict.fromkeys(("granite", "granitemoe", "hyperclovax", "jais2", "llama"), _BOTH),
    **dict.fromkeys(("llama4_text", "modernbert", "nemotron", "olmo", "olmo2", "olmo3"), _BOTH),
    **dict.fromkeys(("olmoe", "phimoe", "qwen3", "qwen3_moe", "smollm3"), _BOTH),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), _BOTH),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "helium", "solar_open"), ("attention_bias", False)),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "starcoder2"), ("use_bias", "use_bias")),
    "ernie4_5_vl_moe_text": ("use_bias", "use_bias"),
    "falcon": ("bias", "bias"),
    "opt": ("enable_bias", "enable_bias"),
    "qwen2_moe": ("qkv_bias", False),
    "stablelm": ("use_qkv_bias", False),
    "seed_oss": ("attention_bias", "attention_out_bias"),
    **dict.fromkeys(("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"), _QKV),
    **dict.fromkeys(("albert", "bert", "bloom", "camembert", "deberta-v2", "distilbert"), _ALL),
    **dict.fromkeys(("electra", "gpt2", "persimmon", "phi", "roberta", "roformer"), _ALL),
    **dict.fromkeys(("whisper", "xlm-roberta"), _ALL),
    **dict.fromkeys(("codegen", "cwm", "exaone4", "exaone_moe", "gptj", "minimax_m2"), _NONE),
    **dict.fromkeys(("ministral", "ministral3", "mistral", "mixtral", "mpt", "mt5"), _NONE),
    **dict.fromkeys(("nomic_bert", "phi3", "t5", "umt5"), _NONE),
}
# What the attention of other model types has that `Attention` has not.
_OTHERWISE = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32"), "latent projections"),
    **dict.fromkeys(("mistral4", "mistral_large4_text"), "latent projections"),
    "deepseek_v4": "one array for keys and values, and compressed entries",
    "gemma4_text": "a norm of values, and heads whose size differs by layer",
    "bitnet": "a norm before the output projection",
    **dict.fromkeys(("beam", "qwen3_next"), "a gate on its output"),
    "inkling_text": "convolutions of keys and values",
    **dict.fromkeys(("swin", "swinv2"), "stages of different widths"),
    **dict.fromkeys(("pixtral", "dinov3_vit"), "a grid of an image as its input"),
    "xlnet": "two streams",
    "wav2vec2-bert": "a table that ends earlier in the future",
}
_ENCODERS = "albert deberta-v2 distilbert eurobert modernbert nomic_bert".split()
_ENCODERS_UNLESS = "bert camembert electra roberta roformer xlm-roberta".split()
_HALVES = "mt5", "t5", "umt5", "whisper"
_ONE_KEY_HEAD_PER_QUERY_HEAD = {
    *(*_ENCODERS_UNLESS, *_HALVES, "albert", "bloom", "codegen", "deberta-v2", "distilbert"),
    *("gpt2", "gpt_neox", "gptj", "modernbert", "mpt", "nomic_bert", "opt", "persimmon"),
}

_EVEN = _ONE_KEY_HEAD_PER_QUERY_HEAD - {"t5", "mt5", "umt5", "nomic_bert"}  # H = D / N.


def attention_options(
    config: TrackedConfig, layers: tuple[LayerSpec, ...]
) -> tuple[dict[str, Any], ...]:
    """The arguments of `Attention` for each layer.

    Raises:
      ValueError: for attention that `Attention` does not have.
    """
    kind = config.values["model_type"]
    require(
        kind in _BIASES,
        f"the attention of {kind} has {_OTHERWISE.get(kind)}, which Attention does not have.",
    )
    for part in (config.values, config.values.get("attn_config") or {}):
        clip = part.get("clip_qkv")
        require(
            clip is None or kind not in ("mpt", "olmo", "olmoe"),
            f"{config.where} has clip_qkv={clip}, and Attention clips no projections.",
        )
    require(
        config.given("per_layer_config") is None,
        f"{config.where} has per_layer_config: its layers have different sizes.",
    )
    dim, heads = config.need("hidden_size"), config.need("num_attention_heads")
    if kind == "whisper" and config.decoder:
        heads = config.need("decoder_attention_heads")
    size, kv_heads = head_size(config), _key_heads(config, heads)
    require(
        kind not in _EVEN or config.values.get("head_dim") in (None, dim // heads),
        f"{config.where} has head_dim={size}, which transformers ignores for its type.",
    )
    divides("num_kv_heads", num_attention_heads=heads, num_key_value_heads=kv_heads)
    options = {
        "model_dim": dim,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": size,
        "use_bias": _biases(config),
        "is_causal": _is_causal(config),
    }
    return tuple(options | {"position": _inside_attention(layer)} for layer in layers)


def _key_heads(config: TrackedConfig, heads: int) -> int:
    kind = config.values["model_type"]
    if kind == "falcon":
        if config.get("new_decoder_architecture", False):
            return config.get("num_kv_heads", heads)
        return 1 if config.get("multi_query", True) else heads
    if kind in _ONE_KEY_HEAD_PER_QUERY_HEAD:
        given = config.given("num_key_value_heads")
        require(
            given in (None, heads),
            f"{config.where} has num_key_value_heads={given}, which transformers ignores for its "
            "type.",
        )
        return heads
    return config.get("num_key_value_heads", heads)


def _biases(config: TrackedConfig) -> bool | dict[str, bool]:
    """Whether the projections have biases: one answer, or one for each."""
    made = [
        config.get(x, False) if isinstance(x, str) else x
        for x in _BIASES[config.values["model_type"]]
    ]
    by_name = dict(zip(PROJECTIONS, (*[bool(made[0])] * 3, bool(made[1])), strict=True))
    if config.values["model_type"] == "whisper":
        by_name["key"] = False
    return by_name["out"] if len(set(by_name.values())) == 1 else by_name


def _is_causal(config: TrackedConfig) -> bool:
    kind = config.values["model_type"]
    if kind in _HALVES:
        return _reads_decoder(config) and _flag_of_causality(config)
    if kind in _ENCODERS:
        return False
    if kind in _ENCODERS_UNLESS:
        return config.get("is_decoder", False) and _flag_of_causality(config)
    both_ways = kind == "gemma3_text" and config.get("use_bidirectional_attention")
    return _flag_of_causality(config) and not both_ways


def _inside_attention(layer: LayerSpec) -> LayerSpec:
    """The layer without a scheme that acts on the token embedding alone."""
    if layer.scheme.acts_in_attention:
        return layer
    return dataclasses.replace(layer, scheme=NoPE())
