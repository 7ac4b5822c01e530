"""Every model type that `from_hf` reads: its layers, and settings that configs do not have.

Bases, sizes and windows that a config leaves out are in `defaults.json`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from posenc_jax.hf import bias_and_table_families as other
from posenc_jax.hf import layer_kinds, rotary_families, varied_layers
from posenc_jax.hf.bias_and_table_families import Table
from posenc_jax.hf.config_reader import TrackedConfig, as_many_key_heads, key_heads
from posenc_jax.hf.deepseek_v4 import deepseek_v4
from posenc_jax.hf.layer_kinds import (
    FULL,
    LINEAR,
    LOCAL,
    LayerKinds,
    all_windowed,
    every,
    from_max_window_layers,
    two_sided_window_of,
    window_of,
)
from posenc_jax.hf.rotary_families import (
    Latent,
    LayersReader,
    Multimodal,
    Rotating,
    latent_scale,
)
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.layer_spec import Sinks
from posenc_jax.schemes.logit_scale.temperature import QueryTemperature

ScaleReader = Callable[[TrackedConfig, int], float | None]


@dataclasses.dataclass(frozen=True)
class ModelType:
    """The layers and the settings of attention of a model type.

    Attributes:
      layers: reads the scheme and the window of each layer.
      biases: whether the projections to q, k, v and the output have biases, as bools or as the
        keys that say so; empty if `Attention` does not have the attention of the model type.
      unsupported: the reason for empty `biases`.
      qk_norm: the normalisation of queries and keys, whose epsilon the config has.
      qk_norm_key: the key that switches the norm on; None: it is always on.
      qk_norm_rotating_only: whether only layers that rotate have the norm.
      sinks: as in `LayerSpec`.
      sinks_windowed_only: whether only layers with a window have them.
      scale_key: the key for the factor on q . k, see `SCALE_POWERS`.
      scale: reads the factor of a layer in another way; None: the scheme's own.
      causality: "causal"; "bidirectional"; "is_decoder", causal with this key; or "decoder", causal
        in the decoder of an encoder and a decoder.
      key_heads: reads the number of key heads.
      ignores_head_dim: whether H is always D / N.
      clips_projections: whether `clip_qkv` clips q, k and v.
      ambiguous_keys: keys that only some attention functions of transformers read.
    """

    layers: LayersReader
    biases: tuple[bool | str, ...] = ()
    unsupported: str = ""
    qk_norm: QKNorm | None = None
    qk_norm_key: str | None = None
    qk_norm_rotating_only: bool = False
    sinks: Sinks = False
    sinks_windowed_only: bool = False
    scale_key: str | None = None
    scale: ScaleReader | None = None
    causality: str = "causal"
    key_heads: Callable[[TrackedConfig, int], int] = key_heads
    ignores_head_dim: bool = False
    clips_projections: bool = False
    ambiguous_keys: tuple[str, ...] = ()


SCALE_POWERS = {"query_pre_attn_scalar": -0.5, "attention_multiplier": 1.0}
"""The keys for the factor on q . k, and the power of the value that it is."""

_NONE, _ALL, _QKV = (False,) * 4, (True,) * 4, (True, True, True, False)
_BY_KEY = ("attention_bias",) * 4
_QKV_BY_KEY = (*("attention_bias",) * 3, False)
_LATENT = "latent projections"
_GATE = "a gate on its output"
_RMS = QKNorm()
_PROJECTED = QKNorm(over="projection", scale="per_head")
_PER_HEAD = QKNorm("layer", scale="per_head")
_WITH_BIAS = QKNorm("layer", use_bias=True)
_BIDIRECTIONAL = ("use_bidirectional_attention",)


def _windowed(kinds: LayerKinds, **settings: Any) -> LayersReader:
    return Rotating(kinds=kinds, window=window_of, **settings)


def _multi_head(layers: LayersReader, biases: tuple[bool | str, ...], **settings: Any) -> ModelType:
    """A model type with one key head per query head, and H = D / N."""
    return ModelType(layers, biases, key_heads=as_many_key_heads, ignores_head_dim=True, **settings)


def _alike(names: str, model_type: ModelType) -> dict[str, ModelType]:
    return dict.fromkeys(names.split(), model_type)


_ROPE, _PARTIAL, _INTERLEAVED = Rotating(), Rotating(partial=True), Rotating("interleaved")
_WINDOWED, _LAST_WINDOWED = _windowed(all_windowed), _windowed(from_max_window_layers)

MODEL_TYPES: dict[str, ModelType] = {
    # RoPE, alike in all layers.
    **_alike(
        "arcee aria_text emu3_text_model iquestcoder jais2 llama",
        ModelType(_ROPE, _BY_KEY),
    ),
    "apertus": ModelType(_ROPE, _BY_KEY, qk_norm=_RMS),
    "bitnet": ModelType(_ROPE, unsupported="a norm before the output projection"),
    "eurobert": ModelType(_ROPE, _BY_KEY, causality="bidirectional"),
    "gemma": ModelType(_ROPE, _BY_KEY, ambiguous_keys=_BIDIRECTIONAL),
    **_alike(
        "granite granitemoe granitemoeshared hyperclovax",
        ModelType(_ROPE, _BY_KEY, scale_key="attention_multiplier"),
    ),
    "nomic_bert": ModelType(_ROPE, _NONE, causality="bidirectional", key_heads=as_many_key_heads),
    "olmo": ModelType(_ROPE, _BY_KEY, clips_projections=True),
    **_alike("flex_olmo olmo2", ModelType(_ROPE, _BY_KEY, qk_norm=_PROJECTED)),
    "olmoe": ModelType(_ROPE, _BY_KEY, qk_norm=_PROJECTED, clips_projections=True),
    "internlm3": ModelType(varied_layers.internlm3, _BY_KEY),
    "hy_v3": ModelType(_ROPE, _BY_KEY, qk_norm=_RMS),
    **_alike(
        "hunyuan_v1_dense hunyuan_v1_moe",
        ModelType(varied_layers.hunyuan, _BY_KEY, qk_norm=QKNorm(after_rotation=True)),
    ),
    "nanochat": ModelType(
        Rotating("half_negative"), _BY_KEY, qk_norm=QKNorm(scale="none", after_rotation=True)
    ),
    "seed_oss": ModelType(_ROPE, (*("attention_bias",) * 3, "attention_out_bias")),
    "roformer": _multi_head(other.roformer, _ALL, causality="is_decoder"),
    **_alike("codegen gptj", _multi_head(rotary_families.gptj, _NONE)),
    # RoPE on a part of each head.
    "persimmon": _multi_head(_PARTIAL, _ALL, qk_norm=_WITH_BIAS, qk_norm_key="qk_layernorm"),
    "phi": ModelType(_PARTIAL, _ALL, qk_norm=_WITH_BIAS, qk_norm_key="qk_layernorm"),
    "stablelm": ModelType(
        _PARTIAL, (*("use_qkv_bias",) * 3, False), qk_norm=_PER_HEAD, qk_norm_key="qk_layernorm"
    ),
    "glm4_moe": ModelType(_PARTIAL, _QKV_BY_KEY, qk_norm=_RMS, qk_norm_key="use_qk_norm"),
    "nemotron": ModelType(_PARTIAL, _BY_KEY),
    "solar_open": ModelType(_PARTIAL, _QKV_BY_KEY),
    **_alike("glm glm4", ModelType(Rotating("interleaved", partial=True), _QKV_BY_KEY)),
    "gpt_neox": _multi_head(rotary_families.gpt_neox, _BY_KEY),
    "minimax_m2": ModelType(rotary_families.minimax_m2, _NONE, qk_norm=_PROJECTED),
    "minimax_m3_vl_text": ModelType(
        varied_layers.minimax_m3, unsupported="blocks of keys", qk_norm=QKNorm(scale_offset=1.0)
    ),
    # Interleaved RoPE.
    "cohere": ModelType(_INTERLEAVED, _BY_KEY, qk_norm=_PER_HEAD, qk_norm_key="use_qk_norm"),
    **_alike("ernie4_5 ernie4_5_moe", ModelType(_INTERLEAVED, ("use_bias",) * 4)),
    "helium": ModelType(_INTERLEAVED, _QKV_BY_KEY),
    # RoPE, and a window in some or all layers.
    **_alike("mistral mixtral", ModelType(_WINDOWED, _NONE)),
    "starcoder2": ModelType(_WINDOWED, ("use_bias",) * 4),
    "phi3": ModelType(_windowed(all_windowed, partial=True), _NONE),
    "phimoe": ModelType(_WINDOWED, _BY_KEY),
    "qwen3_moe": ModelType(_WINDOWED, _BY_KEY, qk_norm=_RMS),
    "qwen2": ModelType(_LAST_WINDOWED, _QKV),
    **_alike("dots1 qwen3", ModelType(_LAST_WINDOWED, _BY_KEY, qk_norm=_RMS)),
    "qwen2_moe": ModelType(_windowed(layer_kinds.qwen2_moe), (*("qkv_bias",) * 3, False)),
    "ministral": ModelType(_windowed(layer_kinds.ministral), _NONE),
    "ministral3": ModelType(rotary_families.ministral3, _NONE),
    "gemma2": ModelType(
        _windowed(every(2)),
        _BY_KEY,
        scale_key="query_pre_attn_scalar",
        ambiguous_keys=_BIDIRECTIONAL,
    ),
    "vaultgemma": ModelType(_windowed(every(2)), _BY_KEY, scale_key="query_pre_attn_scalar"),
    "gpt_oss": ModelType(_windowed(every(2)), _BY_KEY, sinks=True),
    **_alike(
        "granite_swa granitemoe_swa",
        ModelType(varied_layers.granite_swa, _BY_KEY, sinks=True, scale_key="attention_multiplier"),
    ),
    "mellum": ModelType(
        _windowed(layer_kinds.from_config, by_kind_only=True), _BY_KEY, qk_norm=_RMS
    ),
    "mimo_v2_flash": ModelType(
        varied_layers.mimo_v2,
        unsupported="values of another size than keys, and a factor on them",
        sinks=True,
        sinks_windowed_only=True,
    ),
    "laguna": ModelType(
        _windowed(layer_kinds.from_config, partial=True, by_kind_only=True),
        unsupported=_GATE,
        qk_norm=_RMS,
    ),
    "cwm": ModelType(_windowed(every(4, first=True)), _NONE),
    "olmo3": ModelType(
        _windowed(every(4), scaled=(FULL,), null_rotates=True), _BY_KEY, qk_norm=_PROJECTED
    ),
    "gemma3_text": ModelType(
        Rotating(
            kinds=every(6, "sliding_window_pattern"),
            window=two_sided_window_of,
            bases=((FULL, "rope_theta"), (LOCAL, "rope_local_base_freq")),
            scaled=(FULL,),
            null_rotates=True,
        ),
        _BY_KEY,
        qk_norm=QKNorm(scale_offset=1.0),
        scale_key="query_pre_attn_scalar",
    ),
    "gemma3n_text": ModelType(
        Rotating(
            kinds=every(5),
            window=window_of,
            bases=((FULL, "rope_theta"), (LOCAL, "rope_local_base_freq")),
            scaled=(FULL,),
            null_rotates=True,
        ),
        unsupported="a norm of values, and keys that layers share",
        qk_norm=_RMS,
        scale=lambda config, layer: 1.0,
    ),
    **_alike(
        "gemma4_text gemma4_unified_text",
        ModelType(
            Rotating(kinds=layer_kinds.gemma4, window=two_sided_window_of),
            unsupported="a norm of values, and heads whose size differs by layer",
            qk_norm=_RMS,
            scale=lambda config, layer: 1.0,
        ),
    ),
    "modernbert": _multi_head(
        Rotating(
            kinds=every(3, "global_attn_every_n_layers", first=True),
            window=layer_kinds.modernbert_window,
            bases=((FULL, "global_rope_theta"), (LOCAL, "local_rope_theta")),
            scaled=(FULL, LOCAL),
            null_rotates=True,
        ),
        _BY_KEY,
        causality="bidirectional",
    ),
    "modernbert-decoder": _multi_head(
        Rotating(
            kinds=every(3, "global_attn_every_n_layers", first=True),
            window=varied_layers.modernbert_decoder_window,
            bases=((FULL, "global_rope_theta"), (LOCAL, "local_rope_theta")),
            scaled=(FULL, LOCAL),
            null_rotates=True,
        ),
        _BY_KEY,
    ),
    # RoPE in some layers.
    "beam": ModelType(
        _windowed(every(6, last=True), instead=QueryTemperature(form="beam", length=2048)),
        unsupported=_GATE,
        qk_norm=_RMS,
    ),
    "qwen3_next": ModelType(
        Rotating(partial=True, kinds=every(4, "full_attention_interval", other=LINEAR)),
        unsupported=_GATE,
        qk_norm=QKNorm(scale_offset=1.0),
    ),
    "granitemoehybrid": ModelType(
        varied_layers.granite_hybrid, _BY_KEY, scale_key="attention_multiplier"
    ),
    "lfm2": ModelType(Rotating(kinds=layer_kinds.lfm2), _NONE, qk_norm=_RMS),
    "lfm2_moe": ModelType(Rotating(kinds=layer_kinds.required), _NONE, qk_norm=_RMS),
    "lfm3": ModelType(_windowed(layer_kinds.lfm3), unsupported=_GATE, qk_norm=_RMS),
    "afmoe": ModelType(
        _windowed(every(4, "global_attn_every_n_layers"), unrotated=(FULL,)),
        unsupported=_GATE,
        qk_norm=_RMS,
    ),
    "flint": ModelType(
        _windowed(layer_kinds.flint, unrotated=(FULL,)), _BY_KEY, qk_norm=_RMS, sinks=True
    ),
    "muse_spark_text": ModelType(
        varied_layers.muse_spark,
        unsupported="a norm and a gate on its output",
        qk_norm=QKNorm(scale="none"),
        scale=varied_layers.muse_spark_scale,
    ),
    "cohere2_moe": ModelType(varied_layers.cohere2_moe, _BY_KEY),
    "kolibri1": ModelType(varied_layers.kolibri1, _BY_KEY, qk_norm=_RMS),
    "jamba": ModelType(varied_layers.jamba, _NONE),
    "minimax": ModelType(_windowed(layer_kinds.minimax), _NONE),
    "bamba": ModelType(Rotating(partial=True, kinds=layer_kinds.bamba), _BY_KEY),
    "olmo_hybrid": ModelType(varied_layers.olmo_hybrid, _BY_KEY, qk_norm=_PROJECTED),
    "cohere2": ModelType(
        _windowed(every(4, "sliding_window_pattern"), layout="interleaved", unrotated=(FULL,)),
        _BY_KEY,
    ),
    **_alike("exaone4 exaone_moe", ModelType(rotary_families.exaone4, _NONE, qk_norm=_RMS)),
    "llama4_text": ModelType(
        rotary_families.llama4,
        _BY_KEY,
        qk_norm=QKNorm(scale="none", after_rotation=True),
        qk_norm_key="use_qk_norm",
        qk_norm_rotating_only=True,
    ),
    "smollm3": ModelType(rotary_families.smollm3, _BY_KEY),
    # Multi-head latent attention.
    "deepseek_v2": ModelType(
        Latent(interleave=True, in_place=True), unsupported=_LATENT, scale=latent_scale
    ),
    **_alike(
        "axk1 deepseek_v3 deepseek_v32 mistral4 youtu",
        ModelType(Latent(), unsupported=_LATENT, scale=latent_scale),
    ),
    "glm4_moe_lite": ModelType(
        varied_layers.glm4_moe_lite, unsupported=_LATENT, scale=latent_scale
    ),
    "glm_moe_dsa": ModelType(Latent(interleave=True), unsupported=_LATENT, scale=latent_scale),
    "axk2": ModelType(
        Latent(interleave=True),
        unsupported="latent projections, and a gate on its output",
        scale=latent_scale,
    ),
    "hy_v4": ModelType(
        Latent(interleave=False),
        unsupported="latent projections, and a gate on its output",
        sinks=True,
        scale=latent_scale,
    ),
    "minicpm3": ModelType(Latent(interleave=False), unsupported=_LATENT, scale=latent_scale),
    "bailing_hybrid": ModelType(
        Latent(interleave=True, kinds=every(6, "layer_group_size", other=LINEAR)),
        unsupported="latent projections, and a gate on its output",
        scale=latent_scale,
    ),
    "kimi_linear": ModelType(varied_layers.kimi_linear, unsupported=_LATENT),
    "longcat_flash": ModelType(
        varied_layers.longcat_flash, unsupported=_LATENT, scale=latent_scale
    ),
    "deepseek_v4": ModelType(
        deepseek_v4, unsupported="one array for keys and values, and compressed entries", sinks=True
    ),
    "mistral_large4_text": ModelType(
        rotary_families.mistral_large4, unsupported=_LATENT, scale=latent_scale
    ),
    # M-RoPE.
    **_alike(
        "qwen2_vl_text qwen2_5_vl_text",
        ModelType(Multimodal(kinds=from_max_window_layers, sections=(16, 24, 24)), _QKV),
    ),
    **_alike(
        "qwen3_vl_text qwen3_vl_moe_text",
        ModelType(Multimodal("interleaved", sections=(24, 20, 20)), _BY_KEY, qk_norm=_RMS),
    ),
    **_alike(
        "qwen3_5_text qwen3_5_moe_text",
        ModelType(
            Multimodal(
                "interleaved",
                kinds=every(4, "full_attention_interval", other=LINEAR),
                sections=(11, 11, 10),
                partial=True,
            ),
            unsupported=_GATE,
            qk_norm=QKNorm(scale_offset=1.0),
        ),
    ),
    "ernie4_5_vl_moe_text": ModelType(
        Multimodal("alternating", "interleaved", sections=(22, 22, 20), time_last=True),
        ("use_bias",) * 4,
    ),
    # Biases.
    **_alike(
        "mt5 t5 umt5",
        ModelType(other.t5, _NONE, causality="decoder", key_heads=as_many_key_heads),
    ),
    "bloom": _multi_head(other.bloom, _ALL),
    "mpt": _multi_head(other.mpt, _NONE, scale=other.mpt_scale, clips_projections=True),
    "falcon": ModelType(other.falcon, ("bias",) * 4, key_heads=other.falcon_key_heads),
    "deberta-v2": _multi_head(other.deberta_v2, _ALL, causality="bidirectional"),
    "xlnet": ModelType(other.xlnet, unsupported="two streams"),
    "wav2vec2-bert": ModelType(
        other.wav2vec2_bert, unsupported="a table that ends earlier in the future"
    ),
    "inkling_text": ModelType(
        other.inkling, unsupported="convolutions of keys and values", qk_norm=_RMS
    ),
    "inkling2_text": ModelType(
        other.inkling,
        unsupported="convolutions of keys and values, a norm of values, and a gate on its output",
        qk_norm=QKNorm("clip", scale="per_head", threshold=1.0),
        sinks="projected",
    ),
    "swin": ModelType(other.swin, unsupported="stages of different widths"),
    "swinv2": ModelType(other.swin_v2, unsupported="stages of different widths"),
    # Tables of positions.
    "gpt2": _multi_head(Table(), _ALL, scale=other.gpt2_scale),
    "gpt_bigcode": ModelType(
        Table(),
        _ALL,
        key_heads=other.bigcode_key_heads,
        ignores_head_dim=True,
        scale=other.bigcode_scale,
    ),
    "gpt_neo": _multi_head(
        other.gpt_neo, (False, False, False, True), scale=lambda config, layer: 1.0
    ),
    **_alike("bart mbart mvp plbart", _multi_head(other.bart, _ALL, causality="decoder")),
    **_alike(
        "bert bert-generation ernie megatron-bert roc_bert",
        _multi_head(Table(), _ALL, causality="is_decoder"),
    ),
    "biogpt": _multi_head(Table(offset=2), _ALL),
    "distilbert": _multi_head(Table(), _ALL, causality="bidirectional"),
    "albert": _multi_head(Table(width="embedding_size"), _ALL, causality="bidirectional"),
    "electra": _multi_head(Table(width="embedding_size"), _ALL, causality="is_decoder"),
    "opt": _multi_head(Table(offset=2), ("enable_bias",) * 4),
    **_alike(
        "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod",
        _multi_head(Table(reserved=True), _ALL, causality="is_decoder"),
    ),
    "whisper": _multi_head(other.whisper, (True, False, True, True), causality="decoder"),
    # Image grids.
    "pixtral": ModelType(other.pixtral, unsupported="a grid of an image as its input"),
    "dinov3_vit": ModelType(other.dinov3, unsupported="a grid of an image as its input"),
}
