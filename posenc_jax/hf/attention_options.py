"""The arguments of `Attention`: sizes, biases of projections and causality of model types."""

import dataclasses
from typing import Any

from posenc_jax.checks import divides, require
from posenc_jax.hf.config_reader import TrackedConfig, head_size, is_causal, is_decoder
from posenc_jax.hf.model_types import MODEL_TYPES
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.layer_spec import LayerSpec

PROJECTIONS = "query", "key", "value", "out"


def attention_options(
    config: TrackedConfig, layers: tuple[LayerSpec, ...]
) -> tuple[dict[str, Any], ...]:
    """Returns the arguments of `Attention` for each layer.

    Raises:
      ValueError: for attention that `Attention` does not have.
    """
    model_type = MODEL_TYPES[config.model_type]
    require(
        bool(model_type.biases),
        f"the attention of {config.model_type} has {model_type.unsupported}, which Attention does "
        "not have.",
    )
    for part in (config.values, config.values.get("attn_config") or {}):
        clip = part.get("clip_qkv")
        require(
            clip is None or not model_type.clips_projections,
            f"{config.label} has clip_qkv={clip}, and Attention clips no projections.",
        )
    require(
        config.explicit("per_layer_config") is None,
        f"{config.label} has per_layer_config: its layers have different sizes.",
    )
    dim, num_heads = config.need("hidden_size"), config.need("num_attention_heads")
    if config.decoder and "decoder_attention_heads" in config.defaults:
        num_heads = config.need("decoder_attention_heads")
    size, num_kv_heads = head_size(config), model_type.key_heads(config, num_heads)
    require(
        not model_type.ignores_head_dim
        or config.values.get("head_dim") in (None, dim // num_heads),
        f"{config.label} has head_dim={size}, which transformers ignores for its type.",
    )
    divides("num_kv_heads", num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)
    options = {
        "model_dim": dim,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": size,
        "use_bias": _use_bias(config, model_type.biases),
        "is_causal": _is_causal(config, model_type.causality),
    }
    return tuple(options | {"position": _inside_attention(layer)} for layer in layers)


def _use_bias(config: TrackedConfig, biases: tuple[bool | str, ...]) -> bool | dict[str, bool]:
    """Returns whether the projections have biases: one bool, or one for each projection."""
    flags = [bool(config.get(x, False)) if isinstance(x, str) else x for x in biases]
    return flags[0] if len(set(flags)) == 1 else dict(zip(PROJECTIONS, flags, strict=True))


def _is_causal(config: TrackedConfig, causality: str) -> bool:
    key = "use_bidirectional_attention"
    if causality == "decoder":
        causal = is_decoder(config)
    elif causality == "is_decoder":
        causal = config.get("is_decoder", False)
    else:
        causal = causality == "causal" and not (key in config.defaults and config.get(key))
    return causal and is_causal(config)


def _inside_attention(layer: LayerSpec) -> LayerSpec:
    """Returns the layer without a scheme that acts on the token embedding alone."""
    if layer.scheme.acts_in_attention:
        return layer
    return dataclasses.replace(layer, scheme=NoPE())
