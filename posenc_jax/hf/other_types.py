"""Model types with biases, with a table of positions at the input, or with a grid of an image.

A row of `TYPES` is a record; records with a reader of their own follow it.
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
from posenc_jax.hf.layer_kinds import declared, layers_of, uniform
from posenc_jax.hf.model_type import ALL, NONE, RMS, Layers, ModelType, alike, multi_head, unscaled
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
from posenc_jax.schemes.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class Table:
    """Reads a learned table of positions, added to the embedding.

    Attributes:
      offset: rows before position 0.
      reserved: whether the config counts those rows in its length, up to the row of padding.
      width: the key of the table's width D.
    """

    offset: int = 0
    reserved: bool = False
    width: str = "hidden_size"

    def __call__(self, config: TrackedConfig) -> Layers:
        """Returns the table for every layer, though it is added at the input."""
        kind = config.get("position_embedding_type", "absolute")
        length, dim = config.need("max_position_embeddings"), config.need(self.width)
        config.ignore("sinusoidal_pos_embds")  # DistilBERT: how the table starts.
        config.check(
            kind == "absolute",
            f"position_embedding_type={kind!r}, which transformers 5 does not read any more",
        )
        offset = self.offset
        if self.reserved:  # RoBERTa: position 0 follows the row of padding.
            offset = config.need("pad_token_id") + 1
            length -= offset
        return uniform(config, LearnedAbsolute(max_length=length, model_dim=dim, offset=offset))


TYPES: dict[str, ModelType] = {
    **alike(
        "bert bert-generation ernie megatron-bert roc_bert",
        multi_head(Table(), ALL, causality="is_decoder"),
    ),
    "rembert": multi_head(Table(width="input_embedding_size"), ALL, causality="is_decoder"),
    "openai-gpt": multi_head(Table(), ALL),
    "biogpt": multi_head(Table(offset=2), ALL),
    "distilbert": multi_head(Table(), ALL, causality="bidirectional"),
    "albert": multi_head(Table(width="embedding_size"), ALL, causality="bidirectional"),
    "electra": multi_head(Table(width="embedding_size"), ALL, causality="is_decoder"),
    "opt": multi_head(Table(offset=2), ("enable_bias",) * 4),
    **alike(
        "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod",
        multi_head(Table(reserved=True), ALL, causality="is_decoder"),
    ),
}


def _gpt2_scale(config: TrackedConfig, layer: int) -> float | None:
    """Returns the factor on q . k of a layer, counted from 0; None: the scheme's own."""
    scaled = config.get("scale_attn_weights", True)
    if config.get("scale_attn_by_inverse_layer_idx", False):
        return (head_size(config) ** -0.5 if scaled else 1.0) / (layer + 1)
    return None if scaled else 1.0


TYPES["gpt2"] = multi_head(Table(), ALL, scale=_gpt2_scale)


def _bigcode_key_heads(config: TrackedConfig, num_heads: int) -> int:
    """Returns the number of key heads K of N heads."""
    return 1 if config.get("multi_query", True) else num_heads


def _bigcode_scale(config: TrackedConfig, layer: int) -> float | None:
    """Returns the factor on q . k; None: the scheme's own."""
    return None if config.get("scale_attn_weights", True) else 1.0


TYPES["gpt_bigcode"] = ModelType(
    Table(), ALL, key_heads=_bigcode_key_heads, ignores_head_dim=True, scale=_bigcode_scale
)


def _gpt_neo(config: TrackedConfig) -> Layers:
    """Reads a table of positions, and a window in local layers."""
    layers, kinds = Table()(config), config.explicit("attention_layers")
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


TYPES["gpt_neo"] = multi_head(_gpt_neo, (False, False, False, True), scale=unscaled)


def _half(config: TrackedConfig, scheme: Scheme) -> Layers:
    """Returns the layers of the encoder, or of the decoder."""
    decoder, count = is_decoder(config), config.need("num_hidden_layers")
    return (LayerSpec(scheme),) * (config.get("num_decoder_layers", count) if decoder else count)


def _bart(config: TrackedConfig, offset: int = 2) -> Layers:
    """Reads a learned table of positions in the encoder and in the decoder."""
    config.only("static_position_embeddings", False)  # mBART's and KoBART's.
    length, dim = config.need("max_position_embeddings"), config.need("hidden_size")
    return _half(config, LearnedAbsolute(max_length=length, model_dim=dim, offset=offset))


def _blenderbot(config: TrackedConfig) -> Layers:
    """Reads a table as BART's, without rows before position 0."""
    return _bart(config, offset=0)


def _marian(config: TrackedConfig) -> Layers:
    """Reads sines and cosines in the encoder and in the decoder."""
    config.only("static_position_embeddings", True)
    return _half(config, Sinusoidal(model_dim=config.need("hidden_size"), layout="concat"))


TYPES |= {
    **alike("bart mbart mvp plbart", multi_head(_bart, ALL, causality="decoder")),
    **alike("blenderbot blenderbot-small", multi_head(_blenderbot, ALL, causality="decoder")),
    **alike("marian pegasus", multi_head(_marian, ALL, causality="decoder")),
}


def _ctrl(config: TrackedConfig) -> Layers:
    """Reads sines and cosines."""
    return uniform(config, Sinusoidal(model_dim=config.need("hidden_size"), layout="concat"))


TYPES["ctrl"] = multi_head(_ctrl, ALL)


def _whisper(config: TrackedConfig) -> Layers:
    """Reads sines and cosines for the encoder, a learned table for the decoder."""
    dim, length = config.need("hidden_size"), config.need("max_target_positions")
    config.ignore("max_source_positions")
    if is_decoder(config):
        scheme = LearnedAbsolute(max_length=length, model_dim=dim)
        return (LayerSpec(scheme),) * config.need("num_decoder_layers")
    return uniform(config, Sinusoidal(model_dim=dim, layout="t2t"))


TYPES["whisper"] = multi_head(_whisper, (True, False, True, True), causality="decoder")


def _t5(config: TrackedConfig) -> Layers:
    """Reads T5's buckets: of both directions for the encoder, of the past for the decoder."""
    scheme = T5(
        num_heads=config.need("num_attention_heads"),
        num_buckets=config.need("relative_attention_num_buckets"),
        max_distance=config.need("relative_attention_max_distance"),
        bidirectional=not is_decoder(config),
    )
    return _half(config, scheme)


TYPES |= alike(
    "mt5 t5 umt5", ModelType(_t5, NONE, causality="decoder", key_heads=as_many_key_heads)
)


def _alibi(config: TrackedConfig, scaled: bool = False) -> Layers:
    """Returns layers with ALiBi, for causal attention: transformers gives later keys the most."""
    config.check(is_causal(config), "is_causal=false, for which its ALiBi is not symmetric")
    return uniform(config, ALiBi(num_heads=config.need("num_attention_heads"), scaled=scaled))


def _bloom(config: TrackedConfig) -> Layers:
    """Reads ALiBi."""
    config.only("offset_alibi", 100)  # Never read by transformers.
    return _alibi(config)


TYPES["bloom"] = multi_head(_bloom, ALL)


def _mpt(config: TrackedConfig) -> Layers:
    """Reads ALiBi, or a learned table."""
    part = TrackedConfig(config.get("attn_config") or {}, f"{config.label} in attn_config")
    learned, rope = config.get("learned_pos_emb", True), part.get("rope", False)
    part.check(not rope, "rope, which transformers does not read")
    if not part.get("alibi", True):
        config.check(learned, "neither ALiBi nor learned positions")
        length, dim = config.need("max_position_embeddings"), config.need("hidden_size")
        return uniform(config, LearnedAbsolute(max_length=length, model_dim=dim))
    part.only("alibi_bias_max", 8)
    return _alibi(config)


def _mpt_scale(config: TrackedConfig, layer: int) -> float | None:
    """Returns the factor on q . k."""
    part = TrackedConfig(config.get("attn_config") or {}, f"{config.label} in attn_config")
    return part.get("softmax_scale")


TYPES["mpt"] = multi_head(_mpt, NONE, scale=_mpt_scale, clips_projections=True)


def _falcon(config: TrackedConfig) -> Layers:
    """Reads ALiBi inside the logit scale, or RoPE."""
    if config.get("alibi", False):
        config.ignore("rope_parameters", "rope_scaling", "rope_theta")
        return _alibi(config, scaled=True)
    return Rotating()(config)


def _falcon_key_heads(config: TrackedConfig, num_heads: int) -> int:
    """Returns the number of key heads K of N heads."""
    if config.get("new_decoder_architecture", False):
        return config.get("num_kv_heads", num_heads)
    return 1 if config.get("multi_query", True) else num_heads


TYPES["falcon"] = ModelType(_falcon, ("bias",) * 4, key_heads=_falcon_key_heads)


def _deberta_v2(config: TrackedConfig) -> Layers:
    """Reads disentangled attention, after a learned table at the input if the config has one."""
    relative = config.get("relative_attention", False)
    config.check(relative, f"relative_attention={relative}")
    terms = config.get("pos_att_type") or ()
    terms = terms.lower().split("|") if isinstance(terms, str) else terms
    config.check(set(terms) <= {"c2p", "p2c"}, f"pos_att_type={terms}")
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
        length, dim = config.need("max_position_embeddings"), config.need("hidden_size")
        width = config.get("embedding_size", dim)
        return uniform(config, chain(LearnedAbsolute(max_length=length, model_dim=width), scheme))
    return uniform(config, scheme)


TYPES["deberta-v2"] = multi_head(_deberta_v2, ALL, causality="bidirectional")


def _xlnet(config: TrackedConfig) -> Layers:
    """Reads Transformer-XL's terms, in both directions and without terms for pairs of segments."""
    config.check(not config.get("bi_data", False), "bi_data")
    clamp = config.get("clamp_len", -1)
    scheme = TransformerXL(
        num_heads=config.need("num_attention_heads"),
        head_dim=head_size(config),
        model_dim=config.need("hidden_size"),
        clamp=clamp if clamp > 0 else None,
    )
    return uniform(config, scheme)


TYPES["xlnet"] = ModelType(_xlnet, unsupported="two streams")


def _wav2vec2_bert(config: TrackedConfig) -> Layers:
    """Reads vectors on keys by distance or Transformer-XL's terms, by `position_embeddings_type`.

    Shaw's table ends equally far in both directions, the tables of these models end earlier in
    the future: repeat the last row.
    """
    heads, head_dim = config.need("num_attention_heads"), head_size(config)
    kind = config.get("position_embeddings_type", "none")
    past = config.need("left_max_position_embeddings")
    future = config.need("right_max_position_embeddings")
    config.ignore("rotary_embedding_base", "max_source_positions")
    config.check(
        kind in ("relative_key", "relative", "none"),
        f"position_embeddings_type={kind!r}, which rotates x before the projections",
    )
    scheme: Scheme = NoPE()
    if kind == "relative_key":
        scheme = Shaw(num_heads=heads, head_dim=head_dim, clip=max(past, future), values=False)
    elif kind == "relative":
        dim = config.need("hidden_size")
        scheme = TransformerXL(num_heads=heads, head_dim=head_dim, model_dim=dim)
    return uniform(config, scheme)


TYPES["wav2vec2-bert"] = ModelType(
    _wav2vec2_bert, unsupported="a table that ends earlier in the future"
)


def _inkling(config: TrackedConfig) -> Layers:
    """Reads biases by distance: in a window, and over all tokens with a temperature.

    Inkling-2 has the same keys, and one for the norm to which weights of the biases are clipped.
    """
    count, local_ids = layer_count(config), config.get("local_layer_ids")
    local_ids = {i for i in range(count) if (i + 1) % 6} if local_ids is None else {*local_ids}
    kinds = declared(config)
    if kinds is None:
        kinds = ["hybrid_sliding" if i in local_ids else "hybrid" for i in range(count)]
    common: dict[str, Any] = {"model_dim": config.need("hidden_size")}
    common["rank"] = config.need("d_rel")
    if "rel_l2_clip_threshold" in config.defaults:
        common["clip"] = float(config.need("rel_l2_clip_threshold"))
        ids = config.explicit("local_layer_ids")
        config.check_ignored(ids is None, f"local_layer_ids={ids}")
    window, heads = config.need("sliding_window_size"), config.need("num_attention_heads")
    local = Inkling(num_heads=config.need("swa_num_attention_heads"), extent=window, **common)
    far = Inkling(
        num_heads=heads,
        extent=config.need("rel_extent"),
        log_scaling_start=config.get("log_scaling_n_floor"),
        slope=config.need("log_scaling_alpha"),
        **common,
    )
    schemes = {"hybrid_sliding": local, "hybrid": far}
    unknown = sorted(set(kinds) - set(schemes))
    config.check(not unknown, f"layer_types {unknown}")
    return layers_of(config, kinds, (schemes[kind] for kind in kinds), window)


TYPES["inkling_text"] = ModelType(
    _inkling, unsupported="convolutions of keys and values", qk_norm=RMS
)
TYPES["inkling2_text"] = ModelType(
    _inkling,
    unsupported="convolutions of keys and values, a norm of values, and a gate on its output",
    qk_norm=QKNorm("clip", scale="per_head", threshold=1.0),
    sinks="projected",
)


def _swin(config: TrackedConfig) -> Layers:
    """Reads a table of offsets for every layer; stages have different numbers of heads."""
    window = (config.need("window_size"),) * 2
    return _stages(config, lambda heads, stage: Swin(num_heads=heads, window=window))


def _swin_v2(config: TrackedConfig) -> Layers:
    """Reads a network of offsets for every layer."""
    window = (config.need("window_size"),) * 2
    stages = len(config.need("depths"))
    pretrained = config.get("pretrained_window_sizes") or [0] * stages
    config.check(
        len(pretrained) == stages, f"{stages} depths and pretrained_window_sizes={pretrained}"
    )

    def make(heads, stage):
        size = pretrained[stage]
        return SwinV2(heads, window, pretrained_window=(size, size) if size else None)

    return _stages(config, make)


def _stages(config: TrackedConfig, make: Callable[[int, int], Scheme]) -> Layers:
    config.check(
        not config.get("use_absolute_embeddings", False),
        "use_absolute_embeddings, a table at the input as well",
    )
    per_stage, depths = config.need("num_heads"), config.need("depths")
    config.check(len(per_stage) == len(depths), f"{len(depths)} depths and num_heads={per_stage}")
    stages = zip(per_stage, depths, range(len(depths)), strict=True)
    return tuple(LayerSpec(make(n, i)) for n, depth, i in stages for _ in range(depth))


_STAGES = "stages of different widths"
TYPES |= {
    "swin": ModelType(_swin, unsupported=_STAGES),
    "swinv2": ModelType(_swin_v2, unsupported=_STAGES),
}


def _pixtral(config: TrackedConfig) -> Layers:
    """Reads RoPE over rows and columns of an image, with frequencies dealt to them in turn."""
    return _grid(config, frequencies="dealt")


def _dinov3(config: TrackedConfig) -> Layers:
    """Reads RoPE over rows and columns of an image."""
    # Augmentation in training.
    config.ignore("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
    return _grid(config)


def _grid(config, **settings):
    rope = read_rope(config, pop_keys(config, default="axial")[0])
    refuse_partial(config, rope)
    config.check(
        rope.scaling == FrequencyMap(),
        f"{rope.scaling}, and no rope scaling is supported for its type",
    )
    return uniform(config, AxialRoPE(head_dim=head_size(config), theta=rope.theta, **settings))


_GRID = "a grid of an image as its input"
TYPES |= {
    "pixtral": ModelType(_pixtral, unsupported=_GRID),
    "dinov3_vit": ModelType(_dinov3, unsupported=_GRID),
}
