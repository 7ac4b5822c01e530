"""Settings of attention other than scheme and window, and all arguments of `Attention`.

The settings of a layer are its logit scale, softcap, sinks and QK-norm; the other arguments are
sizes, biases of projections and causality.
"""

import dataclasses
from typing import Any

from posenc_jax.checks import divides, require
from posenc_jax.hf.config_reader import TrackedConfig, head_size, is_causal, is_decoder, query_heads
from posenc_jax.hf.model_type import SCALE_POWERS, ModelType
from posenc_jax.hf.model_types import MODEL_TYPES
from posenc_jax.hf.rope import refuse_by_length
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.layer_spec import LayerSpec
from posenc_jax.schemes.rotary.base import Rotary

PROJECTIONS = "query", "key", "value", "out"
_QK_NORM_KEYS = "use_qk_norm", "qk_layernorm"
_BIAS_KEYS = "attention_bias", "use_bias", "bias", "enable_bias"


def with_attention_settings(
    config: TrackedConfig, layers: tuple[LayerSpec, ...]
) -> tuple[LayerSpec, ...]:
    """Returns the layers with scale, softcap, sinks and norms.

    Raises:
      ValueError: for a setting that the model type does not have.
    """
    model_type = MODEL_TYPES[config.model_type]
    for key in model_type.ambiguous_keys:
        config.check(
            not config.explicit(key),
            f"{key}={config.values.get(key)}, which some attention functions of transformers read "
            "and others do not",
        )
    softcap, qk_norm = config.get("attn_logit_softcapping"), _qk_norm(config, model_type)
    config.check_ignored(
        softcap is None or "attn_logit_softcapping" in config.defaults,
        f"attn_logit_softcapping={softcap}",
    )
    if qk_norm is not None and qk_norm.after_rotation:
        for layer in layers:
            refuse_by_length(config, getattr(layer.scheme, "scaling", None))
    return tuple(
        layer
        if layer.mixer != "attention"
        else dataclasses.replace(
            layer,
            scale=_logit_scale(config, model_type, i),
            softcap=None if softcap is None else float(softcap),
            sinks=False
            if model_type.sinks_windowed_only and layer.window is None
            else model_type.sinks,
            qk_norm=qk_norm
            if isinstance(layer.scheme, Rotary) or not model_type.qk_norm_rotating_only
            else None,
        )
        for i, layer in enumerate(layers)
    )


def _qk_norm(config: TrackedConfig, model_type: ModelType) -> QKNorm | None:
    norm = model_type.qk_norm
    for key in _QK_NORM_KEYS:
        value = config.explicit(key)
        if key in config.defaults:
            norm = norm if config.need(key) else None
        else:
            config.check_ignored(
                value is None or value == (model_type.qk_norm is not None), f"{key}={value}"
            )
    if norm is None:
        return None
    if not isinstance(norm, QKNorm):
        return norm(config)
    if norm.kind == "clip":
        return dataclasses.replace(norm, threshold=float(config.need("qk_l2_clip_threshold")))
    epsilon = "layer_norm_eps" if norm.kind == "layer" else "rms_norm_eps"
    return dataclasses.replace(norm, epsilon=float(config.need(epsilon)))


def _logit_scale(config: TrackedConfig, model_type: ModelType, layer: int) -> float | None:
    """Returns the factor on q . k in a layer, counted from 0; None: 1/sqrt(H)."""
    scale = None if model_type.scale is None else model_type.scale(config, layer)
    for key, power in SCALE_POWERS.items():
        value = config.get(key)
        used = key in config.defaults or key == model_type.scale_key
        config.check_ignored(
            value is None or used or key == model_type.unused_scale_key, f"{key}={value}"
        )
        if value is not None and used:
            scale = float(value) ** power
    return scale


def attention_options(
    config: TrackedConfig, layers: tuple[LayerSpec, ...]
) -> tuple[dict[str, Any], ...]:
    """Returns the arguments of `Attention` for each layer.

    Raises:
      ValueError: for attention that `Attention` does not have.
    """
    model_type = MODEL_TYPES[config.model_type]
    biases = model_type.biases
    if biases is None:
        biases = next(((key,) for key in _BIAS_KEYS if key in config.defaults), (False,))
    require(
        not isinstance(biases, str),
        f"the attention of {config.model_type} has {biases}, which Attention does not have.",
    )
    for part in (config.values, config.values.get("attn_config") or {}):
        clip = part.get("clip_qkv")
        config.check(
            clip is None or not model_type.clips_projections,
            f"clip_qkv={clip}, and Attention clips no projections",
        )
    config.check(
        config.explicit("per_layer_config") is None,
        "per_layer_config: its layers have different sizes",
    )
    dim, num_heads = config.need("hidden_size"), query_heads(config)
    size, num_kv_heads = head_size(config), model_type.key_heads(config, num_heads)
    config.check_ignored(
        not model_type.ignores_head_dim
        or config.values.get("head_dim") in (None, dim // num_heads),
        f"head_dim={size}",
    )
    divides("num_kv_heads", num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)
    flags = [bool(config.get(x, False)) if isinstance(x, str) else x for x in biases]
    options = {
        "model_dim": dim,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": size,
        "use_bias": flags[0] if len({*flags}) == 1 else dict(zip(PROJECTIONS, flags, strict=True)),
        "is_causal": _is_causal(config, model_type.causality),
    }
    inside = [  # Without schemes that act on the token embedding alone.
        x if x.scheme.acts_in_attention else dataclasses.replace(x, scheme=NoPE()) for x in layers
    ]
    return tuple(options | {"position": layer} for layer in inside)


def _is_causal(config: TrackedConfig, causality: str) -> bool:
    key = "use_bidirectional_attention"
    if causality == "decoder":
        causal = is_decoder(config)
    elif causality == "is_decoder":
        causal = config.get("is_decoder", False)
    else:
        causal = causality == "causal" and not (key in config.defaults and config.get(key))
    return causal and is_causal(config)
