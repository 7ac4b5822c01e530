"""Model types of transformers with other positions: biases, tables, images."""

import dataclasses
from typing import Any

from posenc_jax.additive.learned import LearnedAbsolute
from posenc_jax.additive.none import NoPE
from posenc_jax.additive.sinusoidal import Sinusoidal
from posenc_jax.bias.alibi import ALiBi
from posenc_jax.bias.swin import Swin
from posenc_jax.bias.swin_v2 import SwinV2
from posenc_jax.bias.t5 import T5
from posenc_jax.checks import require
from posenc_jax.content.deberta import DeBERTa
from posenc_jax.content.inkling import Inkling
from posenc_jax.content.shaw import Shaw
from posenc_jax.content.transformer_xl import TransformerXL
from posenc_jax.hf.reading import Part, head_size
from posenc_jax.hf.rope import read_rotary, rope_dict
from posenc_jax.hf.rotary_families import Plain
from posenc_jax.layers import LayerSpec
from posenc_jax.rotary.axial import AxialRoPE
from posenc_jax.rotary.rope import RoPE
from posenc_jax.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class Buckets:
    """T5 and those after it."""

    own: bool = False  # Whether each layer has a table of its own.

    def __call__(self, config: Part) -> Scheme | tuple[LayerSpec, ...]:
        """The encoder's, or with `is_decoder` the decoder's."""
        scheme = T5(
            num_heads=config.need("num_attention_heads"),
            num_buckets=config.get("relative_attention_num_buckets", 32),
            max_distance=config.get("relative_attention_max_distance", 128),
            bidirectional=not config.get("is_decoder", False),
        )
        return (LayerSpec(scheme),) * config.need("num_hidden_layers") if self.own else scheme


def bloom(config: Part) -> Scheme:
    """ALiBi."""
    return ALiBi(num_heads=config.need("num_attention_heads"))


def mpt(config: Part) -> Scheme:
    """ALiBi, or a learned table."""
    part = Part(config.get("attn_config") or {}, f"{config.where} in attn_config")
    for name in ("attn_type", "attn_pdrop", "attn_impl", "clip_qkv", "softmax_scale", "qk_ln"):
        part.get(name)
    learned, rope = config.get("learned_pos_emb", True), part.get("rope", False)
    require(not rope, f"from_hf: {part.where} has rope, which transformers does not read.")
    if not part.get("alibi", True):
        require(learned, f"from_hf: {config.where} has neither ALiBi nor learned positions.")
        return LearnedAbsolute(
            max_length=config.need("max_position_embeddings"), model_dim=config.need("hidden_size")
        )
    part.only("alibi_bias_max", 8)
    return ALiBi(num_heads=config.need("num_attention_heads"))


def falcon(config: Part) -> Scheme | tuple[LayerSpec, ...]:
    """ALiBi inside the logit scale, or RoPE."""
    if config.get("alibi", False):
        rope_dict(config), config.get("rope_theta")  # Written, and not used.
        return ALiBi(num_heads=config.need("num_attention_heads"), scaled=True)
    return Plain()(config)


def deberta_v2(config: Part) -> Scheme:
    """Disentangled attention; with `share_att_key` the layer's own weights project distances."""
    relative = config.get("relative_attention", False)
    require(relative, f"from_hf: {config.where} has relative_attention={relative}.")
    config.get("position_biased_input")  # Learned positions at the input; see Learned.
    terms = config.get("pos_att_type") or ()
    terms = terms.lower().split("|") if isinstance(terms, str) else terms
    require(set(terms) <= {"c2p", "p2c"}, f"from_hf: {config.where} has pos_att_type={terms}.")
    reach = config.get("max_relative_positions", -1)
    reach = reach if reach >= 1 else config.need("max_position_embeddings")
    buckets = config.get("position_buckets", -1)
    return DeBERTa(
        num_heads=config.need("num_attention_heads"),
        head_dim=config.get("attention_head_size") or head_size(config),
        model_dim=config.need("hidden_size"),
        span=buckets if buckets > 0 else reach,
        max_distance=reach if buckets > 0 else None,
        content_to_position="c2p" in terms,
        position_to_content="p2c" in terms,
        projected=bool(config.get("share_att_key", False)),
    )


def xlnet(config: Part) -> Scheme:
    """Transformer-XL's, in both directions; the term for pairs of segments is not here."""
    require(not config.get("bi_data", False), f"from_hf: {config.where} has bi_data.")
    clamp = config.get("clamp_len", -1)
    return TransformerXL(
        num_heads=config.need("num_attention_heads"),
        head_dim=config.get("d_head") or head_size(config),
        model_dim=config.need("hidden_size"),
        clamp=clamp if clamp > 0 else None,
    )


def wav2vec2_bert(config: Part) -> Scheme:
    """By `position_embeddings_type`: vectors on keys by distance, or Transformer-XL's.

    Shaw's table ends equally far in both directions, these end earlier in the future: repeat
    its last row.
    """
    heads, head_dim = config.need("num_attention_heads"), head_size(config)
    kind = config.get("position_embeddings_type", "relative_key")
    left = config.get("left_max_position_embeddings", 64)
    right = config.get("right_max_position_embeddings", 8)
    config.get("rotary_embedding_base"), config.get("max_source_positions")
    if kind == "relative_key":
        return Shaw(num_heads=heads, head_dim=head_dim, clip=max(left, right), values=False)
    require(kind in ("relative", "none"), f"from_hf: {config.where}: {kind!r} turns x, not q.")
    if kind == "none":
        return NoPE()
    return TransformerXL(num_heads=heads, head_dim=head_dim, model_dim=config.need("hidden_size"))


def inkling(config: Part) -> tuple[LayerSpec, ...]:
    """Profiles of distance: in a window, and over all with a temperature."""
    floor, slope = config.get("log_scaling_n_floor"), config.get("log_scaling_alpha", 0.1)
    common = {"model_dim": config.need("hidden_size"), "rank": config.get("d_rel", 16)}
    window, heads = config.get("sliding_window_size", 512), config.need("num_attention_heads")
    local_heads = config.get("swa_num_attention_heads", heads)
    local = LayerSpec(Inkling(num_heads=local_heads, extent=window, **common), window)
    extent = config.get("rel_extent", 1024)
    far = LayerSpec(Inkling(num_heads=heads, extent=extent, floor=floor, slope=slope, **common))
    return tuple(local if kind == "hybrid_sliding" else far for kind in config.need("layer_types"))


@dataclasses.dataclass(frozen=True)
class Table:
    """A learned table of positions, added to the embedding."""

    offset: int = 0  # Rows before position 0,
    reserved: bool = False  # which the config counts in its length.

    def __call__(self, config: Part) -> Scheme:
        """Returns the table that this config has."""
        kind = config.get("position_embedding_type", "absolute")
        length, dim = config.need("max_position_embeddings"), config.need("hidden_size")
        require(
            kind == "absolute",
            f"from_hf: {config.where} has position_embedding_type={kind!r}, which transformers "
            "5 does not read any more.",
        )
        offset = self.offset
        if self.reserved:  # RoBERTa: positions begin after that of padding.
            offset = config.get("pad_token_id", 1) + 1
            length -= offset
        return LearnedAbsolute(max_length=length, model_dim=dim, offset=offset)


def whisper(config: Part) -> Scheme:
    """The encoder's sines and cosines, or with `is_decoder` the decoder's learned table."""
    dim, length = config.need("hidden_size"), config.get("max_target_positions", 448)
    config.get("max_source_positions")
    if config.get("is_decoder", False):
        return LearnedAbsolute(max_length=length, model_dim=dim)
    return Sinusoidal(model_dim=dim, layout="t2t")


@dataclasses.dataclass(frozen=True)
class Grid:
    """RoPE over rows and columns of an image."""

    theta: float
    settings: tuple[tuple[str, Any], ...]

    def __call__(self, config: Part) -> Scheme:
        """Returns RoPE of two axes."""
        given = rope_dict(config)
        rotary = read_rotary(config, given, theta=self.theta)
        for name in ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"):
            config.get(name)  # Of training.
        return AxialRoPE(head_dim=head_size(config), theta=rotary.theta, **dict(self.settings))


def swin(config: Part) -> tuple[LayerSpec, ...]:
    """A table of offsets in every layer; stages have different numbers of heads."""
    window = (config.need("window_size"),) * 2
    require(
        not config.get("use_absolute_embeddings", False),
        f"from_hf: {config.where} has use_absolute_embeddings, a table at the input as well.",
    )
    return _stages(config, lambda heads, stage: Swin(num_heads=heads, window=window))


def swin_v2(config: Part) -> tuple[LayerSpec, ...]:
    """A network of offsets in every layer."""
    window = (config.need("window_size"),) * 2
    before = config.get("pretrained_window_sizes") or [0] * len(config.need("depths"))

    def made(heads, stage):
        return SwinV2(num_heads=heads, window=window, pretrained_window=(before[stage],) * 2)

    return _stages(config, made)


def _stages(config, make):
    per_stage, depths = config.need("num_heads"), config.need("depths")
    stages = zip(per_stage, depths, range(len(depths)), strict=True)
    return tuple(LayerSpec(make(n, i)) for n, depth, i in stages for _ in range(depth))


def roformer(config: Part) -> Scheme:
    """RoPE, interleaved."""
    config.only("rotary_value", False)
    config.get("max_position_embeddings")
    return RoPE(head_dim=head_size(config), layout="interleaved")
