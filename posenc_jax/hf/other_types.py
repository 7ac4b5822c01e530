"""Model types with biases, with a table of positions at the input, or with a grid of an image.

Readers that only one row or one family needs precede the table.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from posenc_jax.hf.config_reader import (
    TrackedConfig,
    as_many_key_heads,
    head_size,
    is_causal,
    is_decoder,
    layer_count,
)
from posenc_jax.hf.layer_kinds import (
    CONVOLUTION,
    FULL,
    LayerKinds,
    declared,
    layer_of,
    layers_of,
    uniform,
)
from posenc_jax.hf.model_type import (
    ALL,
    NONE,
    RMS,
    Layers,
    LayersReader,
    ModelType,
    multi_head,
    unscaled,
)
from posenc_jax.hf.rope import pop_keys, read_rope, refuse_partial
from posenc_jax.hf.rotary import Rotating
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.additive.learned import LearnedAbsolute
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.additive.sinusoidal import Sinusoidal
from posenc_jax.schemes.bias.alibi import ALiBi
from posenc_jax.schemes.bias.swin import Swin
from posenc_jax.schemes.bias.swin_v2 import SwinV2
from posenc_jax.schemes.bias.t5 import T5
from posenc_jax.schemes.combinators.chain import chain
from posenc_jax.schemes.content.deberta import DeBERTa
from posenc_jax.schemes.content.inkling import Inkling
from posenc_jax.schemes.content.shaw import Shaw
from posenc_jax.schemes.content.transformer_xl import TransformerXL
from posenc_jax.schemes.layer_spec import LayerSpec
from posenc_jax.schemes.rotary.axial import AxialRoPE
from posenc_jax.schemes.rotary.frequencies import FrequencyMap
from posenc_jax.schemes.rotary.rope import RoPE
from posenc_jax.schemes.scheme import Scheme


def table(*, width: str = "hidden_size", offset: int = 0, reserved: bool = False) -> LayersReader:
    """Returns a reader of a learned table of positions, added to the embedding.

    Args:
      width: the key of the table's width D.
      offset: rows before position 0.
      reserved: whether the config counts those rows in its length, up to the row of padding.
    """

    def read(config):
        kind = config.get("position_embedding_type", "absolute")
        if config.model_type == "distilbert":
            config.ignore("sinusoidal_pos_embds")  # How the table starts.
        config.check(
            kind == "absolute",
            f"position_embedding_type={kind!r}, which transformers 5 does not read any more",
        )
        # RoBERTa: position 0 follows the row of padding.
        first = config.need("pad_token_id") + 1 if reserved else offset
        return uniform(config, _learned(config, width, offset=first, reserved=first * reserved))

    return read


def _learned(config, width="hidden_size", length="max_position_embeddings", offset=0, reserved=0):
    """Returns a learned table."""
    rows, dim = config.need(length) - reserved, config.need(width)
    return LearnedAbsolute(max_length=rows, model_dim=dim, offset=offset)


def _sinusoidal(config: TrackedConfig, layout: str = "concat") -> Scheme:
    return Sinusoidal(model_dim=config.need("hidden_size"), layout=layout)


def _halves(make: Callable[[TrackedConfig], Scheme]) -> LayersReader:
    """Returns a reader of a scheme in the layers of the encoder, or of the decoder."""

    def read(config):
        scheme, count = make(config), config.need("num_hidden_layers")
        key = "num_decoder_layers" if is_decoder(config) else "num_hidden_layers"
        return (LayerSpec(scheme),) * config.get(key, count)

    return read


_BUCKETS = "relative_attention_num_buckets"


def _t5(config: TrackedConfig) -> Scheme:
    """Reads buckets of both directions for the encoder, of the past for the decoder."""
    return T5(
        num_heads=config.need("num_attention_heads"),
        num_buckets=config.need(_BUCKETS),
        max_distance=config.need("relative_attention_max_distance"),
        bidirectional=not is_decoder(config),
    )


def _mpnet(config: TrackedConfig) -> Layers:
    """Reads a table at the input after two reserved rows, and T5's buckets over 128 tokens.

    The buckets are a part of each layer, with one table for all.
    """
    heads, buckets = config.need("num_attention_heads"), config.need(_BUCKETS)
    config.check_ignored(buckets == 32, f"{_BUCKETS}={buckets}")
    return uniform(
        config, chain(_learned(config, offset=2, reserved=2), T5(heads, bidirectional=True))
    )


def _longformer(config: TrackedConfig) -> Layers:
    """Reads a table of positions, and the window of each layer: half of it on each side."""
    config.implied("layer_types")
    layers, sizes = table(reserved=True)(config), config.need("attention_window")
    sizes = [sizes] * len(layers) if isinstance(sizes, int) else sizes
    config.check_count("values of attention_window", sizes, len(layers))
    config.check(all(x % 2 == 0 for x in sizes), f"attention_window={sizes}, not all even")
    return tuple(
        dataclasses.replace(layer, window=(size // 2, size // 2))
        for layer, size in zip(layers, sizes, strict=True)
    )


def _esm(config: TrackedConfig) -> Layers:
    """Reads RoPE, or a table at the input."""
    if config.get("position_embedding_type", "absolute") == "rotary":
        config.ignore("pad_token_id")
        return uniform(config, RoPE(head_size(config), theta=float(config.need("rope_theta"))))
    config.ignore("rope_theta")
    return table(reserved=True)(config)


def _layoutlm(config: TrackedConfig) -> Layers:
    """Reads the table of positions, without the tables of the boxes of words."""
    config.ignore("max_2d_position_embeddings")
    return table()(config)


def _whisper(config: TrackedConfig) -> Layers:
    """Reads sines and cosines for the encoder, a learned table for the decoder."""
    config.ignore("max_source_positions", "max_target_positions")
    if is_decoder(config):
        scheme = _learned(config, length="max_target_positions")
        return (LayerSpec(scheme),) * config.need("num_decoder_layers")
    return uniform(config, _sinusoidal(config, "t2t"))


def _gpt_neo(config: TrackedConfig) -> Layers:
    """Reads a table of positions, and a window in local layers."""
    config.implied("layer_types")
    layers, kinds = table()(config), config.explicit("attention_layers")
    if kinds is None:
        groups: Any = config.get("attention_types") or [[["global", "local"], 12]]
        try:
            kinds = [kind for pattern, times in groups for kind in list(pattern) * times]
        except (TypeError, ValueError):
            kinds = []
    config.check(
        len(kinds) == len(layers) and {*kinds} <= {"global", "local"},
        f"attention_types of {kinds!r:.80} for {len(layers)} layers",
    )
    window = config.need("window_size")
    return tuple(
        dataclasses.replace(layer, window=window if kind == "local" else None)
        for layer, kind in zip(layers, kinds, strict=True)
    )


def _alibi(config: TrackedConfig, scaled: bool = False) -> Layers:
    """Reads ALiBi, for causal attention: transformers gives later keys the most."""
    config.check(is_causal(config), "is_causal=false, for which its ALiBi is not symmetric")
    return uniform(config, ALiBi(num_heads=config.need("num_attention_heads"), scaled=scaled))


def _mpt(config: TrackedConfig) -> Layers:
    """Reads ALiBi; the authors' code can have a learned table or RoPE in its place."""
    part = config.part("attn_config")
    config.ignore("learned_pos_emb")
    for name, read in {"alibi": True, "rope": False}.items():
        part.check_ignored(part.get(name, read) == read, f"{name}={not read}")
    part.only("alibi_bias_max", 8)
    part.only("attn_type", "multihead_attention")
    part.only("qk_ln", False)
    part.only("prefix_lm", False)
    part.ignore("rope_theta", "rope_impl", "rope_dail_config", "rope_hf_config")  # Of rope=True.
    part.finish()
    return _alibi(config)


def _falcon(config: TrackedConfig) -> Layers:
    """Reads ALiBi inside the logit scale, or RoPE."""
    if config.get("alibi", False):
        config.ignore("rope_parameters", "rope_scaling", "rope_theta")
        return _alibi(config, scaled=True)
    return Rotating()(config)


def _deberta_terms(config: TrackedConfig) -> set[str]:
    """Returns the terms that are added to q . k."""
    terms = config.get("pos_att_type") or ()
    return {*(terms.lower().split("|") if isinstance(terms, str) else terms)}


def _deberta(config: TrackedConfig) -> Layers:
    """Reads disentangled attention, after a learned table at the input if the config has one."""
    relative = config.get("relative_attention", False)
    config.check(relative, f"relative_attention={relative}")
    terms = _deberta_terms(config)
    config.check(terms <= {"c2p", "p2c"}, f"pos_att_type={config.get('pos_att_type')}")
    longest = config.get("max_relative_positions", -1)
    longest = longest if longest >= 1 else config.need("max_position_embeddings")
    buckets = config.get("position_buckets", -1)
    scheme = DeBERTa(
        num_heads=config.need("num_attention_heads"),
        head_dim=head_size(config),
        model_dim=config.need("hidden_size"),
        span=buckets if buckets > 0 else longest,
        max_distance=longest if buckets > 0 else None,
        content_to_position="c2p" in terms,
        position_to_content="p2c" in terms,
        projected=bool(config.get("share_att_key", False)),
    )
    if config.get("position_biased_input"):
        width = "hidden_size" if config.get("embedding_size") is None else "embedding_size"
        return uniform(config, chain(_learned(config, width), scheme))
    return uniform(config, scheme)


def _transformer_xl(config: TrackedConfig, clamp: int = -1) -> Scheme:
    return TransformerXL(
        num_heads=config.need("num_attention_heads"),
        head_dim=head_size(config),
        model_dim=config.need("hidden_size"),
        clamp=clamp if clamp > 0 else None,
    )


def _xlnet(config: TrackedConfig) -> Layers:
    """Reads Transformer-XL's terms, in both directions and without terms for pairs of segments."""
    config.check(not config.get("bi_data", False), "bi_data")
    return uniform(config, _transformer_xl(config, config.get("clamp_len", -1)))


def _wav2vec2_bert(config: TrackedConfig) -> Layers:
    """Reads vectors on keys by distance or Transformer-XL's terms, by `position_embeddings_type`.

    Shaw's table ends equally far in both directions, the tables of these models end earlier in
    the future: repeat the last row.
    """
    heads, head_dim = config.need("num_attention_heads"), head_size(config)
    kind = config.get("position_embeddings_type", "none")
    ends = [config.need(f"{side}_max_position_embeddings") for side in ("left", "right")]
    config.ignore("rotary_embedding_base", "max_source_positions")
    config.check(
        kind in ("relative_key", "relative", "none"),
        f"position_embeddings_type={kind!r}, which rotates x before the projections",
    )
    scheme: Scheme = NoPE()
    if kind == "relative_key":
        scheme = Shaw(num_heads=heads, head_dim=head_dim, clip=max(ends), values=False)
    elif kind == "relative":
        scheme = _transformer_xl(config)
    return uniform(config, scheme)


def _inkling_kinds(config: TrackedConfig) -> list[str]:
    count, local_ids = layer_count(config), config.get("local_layer_ids")
    local_ids = {i for i in range(count) if (i + 1) % 6} if local_ids is None else {*local_ids}
    kinds = ["hybrid_sliding" if i in local_ids else "hybrid" for i in range(count)]
    return declared(config) or kinds


def _inkling(config: TrackedConfig) -> Layers:
    """Reads biases by distance: in a window, and over all tokens with a temperature.

    Inkling-2 has the same keys, and one for the norm to which weights of the biases are clipped.
    """
    common: dict[str, Any] = {"model_dim": config.need("hidden_size")}
    common["rank"] = config.need("d_rel")
    if "rel_l2_clip_threshold" in config.defaults:
        common["clip"] = float(config.need("rel_l2_clip_threshold"))
        config.implied("local_layer_ids")
    window, heads = config.need("sliding_window_size"), config.need("num_attention_heads")
    local = Inkling(num_heads=config.need("swa_num_attention_heads"), extent=window, **common)
    start, slope = config.get("log_scaling_n_floor"), config.need("log_scaling_alpha")
    scaling = {} if start is None else {"log_scaling_start": start, "slope": slope}
    far = Inkling(num_heads=heads, extent=config.need("rel_extent"), **scaling, **common)
    schemes, kinds = {"hybrid_sliding": local, "hybrid": far}, _inkling_kinds(config)
    unknown = sorted(set(kinds) - set(schemes))
    config.check(not unknown, f"layer_types {unknown}")
    return layers_of(config, kinds, (schemes[kind] for kind in kinds), window)


def _swin(config: TrackedConfig) -> Layers:
    """Reads a table of offsets, or a network of them; stages have different numbers of heads."""
    config.check(
        not config.get("use_absolute_embeddings", False),
        "use_absolute_embeddings, a table at the input as well",
    )
    depths, heads = config.need("depths"), config.need("num_heads")
    config.check(len(heads) == len(depths), f"{len(depths)} depths and num_heads={heads}")
    window, pretrained = (config.need("window_size"),) * 2, config.get("pretrained_window_sizes")
    if config.model_type == "swin":
        schemes: list[Scheme] = [Swin(num_heads=n, window=window) for n in heads]
    else:
        sizes = pretrained or [0] * len(depths)
        config.check(
            len(sizes) == len(depths), f"{len(depths)} depths and pretrained_window_sizes={sizes}"
        )
        schemes = [
            SwinV2(n, window, pretrained_window=(size, size) if size else None)
            for n, size in zip(heads, sizes, strict=True)
        ]
    stages = zip(schemes, depths, strict=True)
    return tuple(LayerSpec(scheme) for scheme, depth in stages for _ in range(depth))


def grid(
    *ignored: str,
    width: str = "hidden_size",
    kinds: LayerKinds | None = None,
    **settings: Any,
) -> LayersReader:
    """Returns a reader of RoPE over rows and columns of an image.

    The tables of patches that some towers add to their input, stretched to the size of an image,
    are no part of it. Nor are regions of an image that a layer attends to: they are segments.

    Args:
      *ignored: keys of such tables and regions.
      width: the key of the width of q.
      kinds: the kind of each layer; None: all attend.
      **settings: of `AxialRoPE`.
    """

    def read(config):
        config.ignore("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")  # In training.
        config.ignore(*ignored)
        head_dim = config.get("head_dim")
        if head_dim is None:
            head_dim = _divided(config, width)
        scheme = AxialRoPE(head_dim=head_dim, theta=_grid_theta(config), **settings)
        if kinds is None:
            return uniform(config, scheme)
        return tuple(layer_of(config, kind, scheme) for kind in kinds(config))

    return read


def _grid_theta(config):
    """Returns the base of RoPE over an image, without scaling and on all of a head."""
    rope = read_rope(config, pop_keys(config, default="axial")[0])
    refuse_partial(config, rope)
    config.check(
        rope.scaling == FrequencyMap(),
        f"{rope.scaling}, and no rope scaling is supported for its type",
    )
    return rope.theta


def _divided(config, width, heads="num_attention_heads", rate=1):
    """Returns a width divided by the number of heads, and by a rate."""
    size, count = config.need(width), config.need(heads) * rate
    config.check(size % count == 0, f"{width}={size}, which {count} does not divide")
    return size // count


def _video_grid(config: TrackedConfig) -> Layers:
    """Reads RoPE over time, rows and columns, on the largest equal parts of a head."""
    pairs = _divided(config, "hidden_size") // 6
    return grid(axes=(0, 1, 2), rotary_dim=6 * pairs)(config)


def _memory_attention(config: TrackedConfig) -> Layers:
    """Reads the layers of SAM 2 and 3 that attend to memories of earlier frames."""
    names = "feat_sizes", "k_sizes", "dropout"
    config.ignore(*(f"memory_attention_rope_{name}" for name in names))
    old, theta = config.explicit("memory_attention_rope_theta"), _grid_theta(config)
    config.check(old in (None, theta), f"memory_attention_rope_theta={old} and rope_theta={theta}")
    names = ("hidden_size", "num_attention_heads", "downsample_rate", "num_layers")
    width, heads, rate, count = (f"memory_attention_{name}" for name in names)
    head_dim = _divided(config, width, heads, config.need(rate))
    scheme = AxialRoPE(head_dim, theta=theta, axes=(1, 0), layout="interleaved")
    return (LayerSpec(scheme),) * config.need(count)


def _regions(config: TrackedConfig) -> list[str]:
    """Reads attention to a whole image, or to a region of it."""
    kinds = declared(config) or []
    config.check({*kinds} <= {FULL, "window_attention"}, f"layer_types={sorted({*kinds})}")
    return [FULL] * layer_count(config)


def _lfm3_vl(config: TrackedConfig) -> list[str]:
    """Reads convolutions in the first layers, then in every second one."""
    kinds = [CONVOLUTION if i < 2 or i % 2 else FULL for i in range(layer_count(config))]
    return declared(config) or kinds


# Factors on q . k of a layer, counted from 0 (None: 1/sqrt(H)), and numbers of key heads.


def _gpt2_scale(config: TrackedConfig, layer: int) -> float | None:
    scaled = config.get("scale_attn_weights", True)
    if config.get("scale_attn_by_inverse_layer_idx", False):
        return (head_size(config) ** -0.5 if scaled else 1.0) / (layer + 1)
    return None if scaled else 1.0


def _deberta_scale(config: TrackedConfig, layer: int) -> float:
    return ((1 + len(_deberta_terms(config))) * head_size(config)) ** -0.5


def _inkling_scale(config: TrackedConfig, layer: int) -> float:
    local = _inkling_kinds(config)[layer] == "hybrid_sliding"
    return 1 / (config.need("swa_head_dim") if local else head_size(config))


def _bigcode_scale(config: TrackedConfig, layer: int) -> float | None:
    return None if config.get("scale_attn_weights", True) else 1.0


def _bigcode_key_heads(config: TrackedConfig, num_heads: int) -> int:
    return 1 if config.get("multi_query", True) else num_heads


def _falcon_key_heads(config: TrackedConfig, num_heads: int) -> int:
    if config.get("new_decoder_architecture", False):
        return config.get("num_kv_heads", num_heads)
    return _bigcode_key_heads(config, num_heads)


_STATIC, _LEARNED = ({"static_position_embeddings": (x,)} for x in (True, False))  # mBART's.
_STAGES, _GRID = "stages of different widths", "a grid of an image as its input"

_ROBERTA = "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod"

ROWS: dict[str, ModelType] = {
    # A learned table at the input.
    "bert bert-generation ernie megatron-bert roc_bert": multi_head(
        table(), causality="is_decoder"
    ),
    "rembert": multi_head(table(width="input_embedding_size"), causality="is_decoder"),
    "openai-gpt git": multi_head(table()),
    "xlm": multi_head(table(), causality="bidirectional", only={"causal": (False,)}),
    "biogpt": multi_head(table(offset=2)),
    "distilbert": multi_head(table(), causality="bidirectional"),
    "albert": multi_head(table(width="embedding_size"), causality="bidirectional"),
    "electra": multi_head(table(width="embedding_size"), causality="is_decoder"),
    "opt": multi_head(table(offset=2), None),
    _ROBERTA: multi_head(table(reserved=True), causality="is_decoder"),
    "layoutlm": multi_head(_layoutlm, causality="bidirectional"),
    "luke": multi_head(table(reserved=True), "queries of their own between words and entities"),
    "longformer": multi_head(_longformer, "projections of their own for global tokens"),
    "esm": multi_head(_esm, causality="is_decoder"),
    "gpt2": multi_head(table(), scale=_gpt2_scale),
    "gpt_bigcode": ModelType(
        table(), ALL, key_heads=_bigcode_key_heads, ignores_head_dim=True, scale=_bigcode_scale
    ),
    "gpt_neo": multi_head(
        _gpt_neo, (False, False, False, True), scale=unscaled, only={"use_sliding_window": (True,)}
    ),
    # In an encoder and a decoder.
    "bart mbart mvp plbart": multi_head(
        _halves(lambda config: _learned(config, offset=2)),
        causality="decoder",
        only=_LEARNED | {"use_prompt": (False,)},  # MVP's, of learned keys and values.
    ),
    "blenderbot blenderbot-small": multi_head(
        _halves(_learned), causality="decoder", only=_LEARNED
    ),
    "marian pegasus": multi_head(_halves(_sinusoidal), causality="decoder", only=_STATIC),
    "whisper": multi_head(_whisper, (True, False, True, True), causality="decoder"),
    "mt5 t5 umt5": ModelType(
        _halves(_t5), causality="decoder", key_heads=as_many_key_heads, scale=unscaled
    ),
    "mpnet": multi_head(_mpnet, causality="bidirectional"),
    # Sines and cosines.
    "ctrl": multi_head(lambda config: uniform(config, _sinusoidal(config))),
    # Biases and terms of the logits.
    "bloom": multi_head(_alibi, only={"offset_alibi": (100,)}),  # Never read by transformers.
    "mpt": multi_head(
        _mpt,
        NONE,
        scale=lambda config, layer: config.part("attn_config").get("softmax_scale"),
        clips_projections=True,
    ),
    "falcon": ModelType(_falcon, key_heads=_falcon_key_heads),
    "deberta": multi_head(
        _deberta,
        (True, False, True, True),
        causality="bidirectional",
        scale=_deberta_scale,
        only={"talking_head": (False,), "position_buckets": (-1,), "share_att_key": (False,)},
    ),
    "deberta-v2": multi_head(_deberta, causality="bidirectional", scale=_deberta_scale),
    "xlnet": ModelType(_xlnet, "two streams"),
    "wav2vec2-bert": ModelType(_wav2vec2_bert, "a table that ends earlier in the future"),
    "inkling_text": ModelType(
        _inkling,
        "convolutions of keys and values",
        qk_norm=RMS,
        scale=_inkling_scale,
    ),
    "inkling2_loop_text inkling2_text": ModelType(
        _inkling,
        "convolutions of keys and values, a norm of values, and a gate on its output",
        qk_norm=QKNorm("clip", scale="per_head", threshold=1.0),
        sinks="projected",
    ),
    # Images.
    "swin swinv2": ModelType(_swin, _STAGES),
    "pixtral": ModelType(grid(frequencies="dealt"), _GRID),
    "dinov3_vit": ModelType(grid(), _GRID),
    # Towers of models of images and text.
    "ernie4_5_vl_moe_vision glm4v_moe_vision glm4v_vision paddleocr_vl_vision "
    "video_llama_3_vision": ModelType(grid(), _GRID),
    "cohere_compass_vision qwen3_5_moe_vision qwen3_5_vision qwen3_omni_moe_vision_encoder "
    "qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision": ModelType(
        grid("num_position_embeddings"), _GRID
    ),
    "exaone4_5_vision qwen2_5_omni_vision_encoder qwen2_5_vl_vision": ModelType(
        grid("window_size"), _GRID
    ),
    "qwen2_vl_vision": ModelType(grid(width="embed_dim"), _GRID),
    "glm5_next_vision glm_ocr_vision": ModelType(grid(), _GRID, qk_norm=RMS),
    "dots3_note_vision_encoder": ModelType(  # Its layers have networks of different widths.
        grid("per_layer_config"), _GRID, qk_norm=RMS
    ),
    "lfm3_vl_vision": ModelType(grid(kinds=_lfm3_vl), _GRID, qk_norm=RMS),
    "muse_glimmer_vision muse_spark_vision": ModelType(grid(kinds=_regions, axes=(1, 0)), _GRID),
    "step3p5_vision": ModelType(grid(axes=(1, 0)), _GRID),
    "kimi_k25_vision": ModelType(grid(axes=(1, 0), frequencies="alternating"), _GRID),
    "minimax_m3_vl_vision": ModelType(_video_grid, _GRID),
    "inkling2_vision": ModelType(grid(axes=(1, 0), layout="interleaved"), _GRID),
    "gemma4_vision": ModelType(
        grid("position_embedding_size", axes=(1, 0), layout="half_per_axis"),
        f"{_GRID}, and a norm of values",
        qk_norm=RMS,
        scale=unscaled,
    ),
    "sam3_vit_model": ModelType(grid("window_size", axes=(1, 0), layout="interleaved"), _GRID),
    "edgetam_video sam2_video sam3_tracker_video": ModelType(_memory_attention, _GRID),
}
