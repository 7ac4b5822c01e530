"""Settings of attention other than scheme and window: logit scale, softcap, sinks and QK-norm."""

import dataclasses

from posenc_jax.checks import require
from posenc_jax.hf.config_reader import TrackedConfig
from posenc_jax.hf.model_types import MODEL_TYPES, SCALE_POWERS, ModelType
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.layer_spec import LayerSpec
from posenc_jax.schemes.rotary.base import Rotary

_QK_NORM_KEYS = "use_qk_norm", "qk_layernorm"


def with_attention_settings(
    config: TrackedConfig, layers: tuple[LayerSpec, ...]
) -> tuple[LayerSpec, ...]:
    """Returns the layers with scale, softcap, sinks and norms.

    Raises:
      ValueError: for a setting that the model type does not have.
    """
    model_type = MODEL_TYPES[config.model_type]
    for key in model_type.ambiguous_keys:
        require(
            not config.explicit(key),
            f"{config.label} has {key}={config.values.get(key)}, which some attention functions of "
            "transformers read and others do not.",
        )
    softcap, qk_norm = _softcap(config), _qk_norm(config, model_type)
    return tuple(
        dataclasses.replace(
            layer,
            scale=_logit_scale(config, model_type, i),
            softcap=softcap,
            sinks=model_type.sinks,
            qk_norm=qk_norm
            if isinstance(layer.scheme, Rotary) or not model_type.qk_norm_rotating_only
            else None,
        )
        for i, layer in enumerate(layers)
    )


def _softcap(config: TrackedConfig) -> float | None:
    value = config.get("attn_logit_softcapping")
    require(
        value is None or "attn_logit_softcapping" in config.defaults,
        f"{config.label} has attn_logit_softcapping={value}, which transformers ignores for its "
        "type.",
    )
    return None if value is None else float(value)


def _qk_norm(config: TrackedConfig, model_type: ModelType) -> QKNorm | None:
    norm = model_type.qk_norm
    for key in _QK_NORM_KEYS:
        value = config.explicit(key)
        require(
            value is None or key == model_type.qk_norm_key or value == (norm is not None),
            f"{config.label} has {key}={value}, which transformers ignores for its type.",
        )
    if norm is None or (model_type.qk_norm_key and not config.need(model_type.qk_norm_key)):
        return None
    epsilon = "layer_norm_eps" if norm.kind == "layer" else "rms_norm_eps"
    return dataclasses.replace(norm, epsilon=float(config.need(epsilon)))


def _logit_scale(config: TrackedConfig, model_type: ModelType, layer: int) -> float | None:
    """Returns the factor on q . k in a layer, counted from 0; None: the scheme's own."""
    for key, power in SCALE_POWERS.items():
        value = config.get(key)
        require(
            value is None or key == model_type.scale_key,
            f"{config.label} has {key}={value}, which transformers ignores for its type.",
        )
        if value is not None:
            return float(value) ** power
    return None if model_type.scale is None else model_type.scale(config, layer)
