"""What attention needs beside scheme and window: logit scale, softcap, sinks and QK-norm."""

import dataclasses

from posenc_jax.checks import require
from posenc_jax.hf.config_reader import TrackedConfig, head_size
from posenc_jax.hf.rope import rope_dict
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.layer_spec import LayerSpec
from posenc_jax.schemes.rotary.base import Rotary
from posenc_jax.schemes.rotary.per_sequence_scaling import RoPEByLength
from posenc_jax.schemes.rotary.scaling.yarn import yarn_logit_scale

_SCALE_KEYS = {
    "query_pre_attn_scalar": (-0.5, {"gemma2", "gemma3_text"}),
    "attention_multiplier": (1.0, {"granite", "granitemoe", "hyperclovax"}),
}
_OF_PROJECTIONS = QKNorm(over="projection", scale="per_head")
_PER_HEAD = QKNorm("layer", scale="per_head")
_WITH_BIAS = QKNorm("layer", use_bias=True)
# The norm, and the key that switches it on; epsilon is read from the config.
_QK_NORMS: dict[str, tuple[QKNorm, str | None]] = {
    **dict.fromkeys(("apertus", "beam", "dots1", "exaone4", "exaone_moe"), (QKNorm(), None)),
    **dict.fromkeys(("gemma4_text", "inkling_text", "qwen3", "qwen3_moe"), (QKNorm(), None)),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), (QKNorm(), None)),
    **dict.fromkeys(("gemma3_text", "qwen3_next"), (QKNorm(scale_offset=1.0), None)),
    **dict.fromkeys(("flex_olmo", "minimax_m2", "olmo2"), (_OF_PROJECTIONS, None)),
    **dict.fromkeys(("olmo3", "olmoe"), (_OF_PROJECTIONS, None)),
    "glm4_moe": (QKNorm(), "use_qk_norm"),
    "llama4_text": (QKNorm(scale="none", after_rotation=True), "use_qk_norm"),
    "cohere": (_PER_HEAD, "use_qk_norm"),
    "stablelm": (_PER_HEAD, "qk_layernorm"),
    "persimmon": (_WITH_BIAS, "qk_layernorm"),
    "phi": (_WITH_BIAS, "qk_layernorm"),
}
_SWITCHES = "use_qk_norm", "qk_layernorm"
_SINKS = "deepseek_v4", "gpt_oss"
# Only layers that rotate have the norm.
_ONLY_ROTATING = "llama4_text", "qwen3_next"


def with_attention_settings(
    config: TrackedConfig, layers: tuple[LayerSpec, ...]
) -> tuple[LayerSpec, ...]:
    """The layers with scale, softcap, sinks and norms.

    Raises:
      ValueError: for a setting that the model type does not have.
    """
    kind, key = config.values["model_type"], "use_bidirectional_attention"
    require(
        kind not in ("gemma", "gemma2") or not config.given(key),
        f"{config.where} has {key}={config.values.get(key)}, which some attention functions of "
        "transformers read and others do not.",
    )
    settings = {
        "softcap": _softcap(config),
        "sinks": config.values["model_type"] in _SINKS,
        "qk_norm": _qk_norm(config),
    }
    layers = tuple(
        dataclasses.replace(layer, scale=logit_scale(config, i), **settings)
        for i, layer in enumerate(layers)
    )
    if config.values["model_type"] not in _ONLY_ROTATING:
        return layers
    return tuple(
        layer
        if isinstance(layer.scheme, Rotary | RoPEByLength)
        else dataclasses.replace(layer, qk_norm=None)
        for layer in layers
    )


def _softcap(config: TrackedConfig) -> float | None:
    value = config.get("attn_logit_softcapping")
    require(
        value is None or config.values["model_type"] == "gemma2",
        f"{config.where} has attn_logit_softcapping={value}, which transformers ignores for its "
        "type.",
    )
    return None if value is None else float(value)


def _qk_norm(config: TrackedConfig) -> QKNorm | None:
    norm, switch = _QK_NORMS.get(config.values["model_type"], (None, None))
    for name in _SWITCHES:
        value = config.given(name)
        require(
            value is None or name == switch or value == (norm is not None),
            f"{config.where} has {name}={value}, which transformers ignores for its type.",
        )
    if norm is None or (switch is not None and not config.need(switch)):
        return None
    name = "layer_norm_eps" if norm.kind == "layer" else "rms_norm_eps"
    return dataclasses.replace(norm, epsilon=float(config.need(name)))


def logit_scale(config: TrackedConfig, layer: int) -> float | None:
    """The factor on q . k in a layer, counted from 0; None: the scheme's own.

    Raises:
      ValueError: for a key that the model type ignores.
    """
    kind = config.values["model_type"]
    for name, (power, model_types) in _SCALE_KEYS.items():
        value = config.get(name)
        require(
            value is None or kind in model_types,
            f"{config.where} has {name}={value}, which transformers ignores for its type.",
        )
        if value is not None:
            return float(value) ** power
    if kind == "gemma4_text":
        return 1.0
    if kind == "mpt":
        part = TrackedConfig(config.get("attn_config") or {}, f"{config.where} in attn_config")
        return part.get("softmax_scale")
    if kind == "gpt2":
        scaled = config.get("scale_attn_weights", True)
        if config.get("scale_attn_by_inverse_layer_idx", False):
            return (head_size(config) ** -0.5 if scaled else 1.0) / (layer + 1)
        return None if scaled else 1.0
    if "qk_rope_head_dim" not in config.defaults:
        return None
    rope = TrackedConfig(rope_dict(config) or {}, f"{config.where} in its rope parameters")
    mscale = rope.get("mscale_all_dim")
    if not mscale:
        return None
    size = config.need("qk_nope_head_dim") + config.need("qk_rope_head_dim")
    return yarn_logit_scale(size, rope.need("factor"), mscale)
