"""Model types with rotary attention in all layers or in some.

A row of `TYPES` is a record; records with a reader of their own follow it.
"""

import dataclasses

from posenc_jax.engine.mask import Window
from posenc_jax.hf.config_reader import (
    TrackedConfig,
    as_many_key_heads,
    head_size,
    is_causal,
    layer_count,
    sees_both_sides,
    written_by,
)
from posenc_jax.hf.layer_kinds import (
    CHUNKED,
    CONVOLUTION,
    EXPERTS,
    FULL,
    HYBRID,
    LINEAR,
    LOCAL,
    MIXERS,
    MLP,
    STATE_SPACE,
    all_global,
    all_windowed,
    declared,
    every,
    from_config,
    from_max_window_layers,
    layers_of,
    on_sides_of,
    uniform,
    window_of,
    without_positions,
)
from posenc_jax.hf.model_type import (
    ALL,
    BY_KEY,
    GATE,
    GEMMA,
    LATENT,
    NONE,
    PER_HEAD,
    PROJECTED,
    QKV,
    QKV_BY_KEY,
    RMS,
    WITH_BIAS,
    Layers,
    ModelType,
    alike,
    multi_head,
    unscaled,
)
from posenc_jax.hf.rope import pop_keys, read_rope, rope_dict
from posenc_jax.hf.rotary import (
    Latent,
    Multimodal,
    Rotating,
    by_flags,
    latent_scale,
    rotating_flags,
    rotation,
    windowed,
    with_temperature,
)
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.combinators.chain import chain
from posenc_jax.schemes.logit_scale.ssmax import SSMax
from posenc_jax.schemes.logit_scale.temperature import QueryTemperature
from posenc_jax.schemes.rotary.learned_rope import LearnedRoPE
from posenc_jax.schemes.rotary.rope import RoPE
from posenc_jax.schemes.rotary.scaling.interpolation import NTK

_ROPE, _PARTIAL, _INTERLEAVED = Rotating(), Rotating(partial=True), Rotating("interleaved")
_WINDOWED, _LAST_WINDOWED = windowed(all_windowed), windowed(from_max_window_layers)
_BIDIRECTIONAL = ("use_bidirectional_attention",)
_LINEAR_BUT_4TH = every(4, "full_attention_interval", other=LINEAR)
_GATED = f"{LATENT}, and {GATE}"

TYPES: dict[str, ModelType] = {
    # Alike in all layers.
    **alike("arcee aria_text emu3_text_model iquestcoder jais2 llama", ModelType(_ROPE, BY_KEY)),
    "apertus": ModelType(_ROPE, BY_KEY, qk_norm=RMS),
    "bitnet": ModelType(_ROPE, unsupported="a norm before the output projection"),
    "eurobert": ModelType(_ROPE, BY_KEY, causality="bidirectional"),
    "gemma": ModelType(_ROPE, BY_KEY, ambiguous_keys=_BIDIRECTIONAL),
    **alike(
        "granite granitemoe granitemoeshared hyperclovax",
        ModelType(_ROPE, BY_KEY, scale_key="attention_multiplier"),
    ),
    "olmo": ModelType(_ROPE, BY_KEY, clips_projections=True),
    **alike("flex_olmo olmo2", ModelType(_ROPE, BY_KEY, qk_norm=PROJECTED)),
    "olmoe": ModelType(_ROPE, BY_KEY, qk_norm=PROJECTED, clips_projections=True),
    "hy_v3": ModelType(_ROPE, BY_KEY, qk_norm=RMS),
    "nanochat": ModelType(
        Rotating("half_negative"), BY_KEY, qk_norm=QKNorm(scale="none", after_rotation=True)
    ),
    "seed_oss": ModelType(_ROPE, (*("attention_bias",) * 3, "attention_out_bias")),
    # On a part of each head.
    "persimmon": multi_head(_PARTIAL, ALL, qk_norm=WITH_BIAS, qk_norm_key="qk_layernorm"),
    "phi": ModelType(_PARTIAL, ALL, qk_norm=WITH_BIAS, qk_norm_key="qk_layernorm"),
    "stablelm": ModelType(
        _PARTIAL, (*("use_qkv_bias",) * 3, False), qk_norm=PER_HEAD, qk_norm_key="qk_layernorm"
    ),
    "glm4_moe": ModelType(_PARTIAL, QKV_BY_KEY, qk_norm=RMS, qk_norm_key="use_qk_norm"),
    "nemotron": ModelType(_PARTIAL, BY_KEY),
    "solar_open": ModelType(_PARTIAL, QKV_BY_KEY),
    **alike("glm glm4", ModelType(Rotating("interleaved", partial=True), QKV_BY_KEY)),
    # Pairs of neighbours.
    "cohere": ModelType(_INTERLEAVED, BY_KEY, qk_norm=PER_HEAD, qk_norm_key="use_qk_norm"),
    **alike("ernie4_5 ernie4_5_moe", ModelType(_INTERLEAVED, ("use_bias",) * 4)),
    "helium": ModelType(_INTERLEAVED, QKV_BY_KEY),
    # A window in some or all layers.
    **alike("mistral mixtral", ModelType(_WINDOWED, NONE)),
    "starcoder2": ModelType(_WINDOWED, ("use_bias",) * 4),
    **alike("phi3 phi4_multimodal", ModelType(windowed(all_windowed, partial=True), NONE)),
    "phimoe": ModelType(_WINDOWED, BY_KEY),
    "qwen3_moe": ModelType(_WINDOWED, BY_KEY, qk_norm=RMS),
    "qwen2": ModelType(_LAST_WINDOWED, QKV),
    **alike("dots1 qwen3", ModelType(_LAST_WINDOWED, BY_KEY, qk_norm=RMS)),
    "vaultgemma": ModelType(windowed(every(2)), BY_KEY, scale_key="query_pre_attn_scalar"),
    "gpt_oss": ModelType(windowed(every(2)), BY_KEY, sinks=True),
    "mellum": ModelType(windowed(from_config, by_kind="required"), BY_KEY, qk_norm=RMS),
    "laguna": ModelType(
        windowed(from_config, partial=True, by_kind="required"), unsupported=GATE, qk_norm=RMS
    ),
    "cwm": ModelType(windowed(every(4, first=True)), NONE),
    "olmo3": ModelType(
        windowed(every(4), scaled=(FULL,), null_rotates=True, by_kind="read"),
        BY_KEY,
        qk_norm=PROJECTED,
    ),
    # Rotation in some layers.
    "beam": ModelType(
        windowed(
            every(6, last=True),
            instead=QueryTemperature(form="beam", length=2048),
            by_kind="required",
        ),
        unsupported=GATE,
        qk_norm=RMS,
    ),
    "afmoe": ModelType(
        windowed(every(4, "global_attn_every_n_layers"), unrotated=(FULL,)),
        unsupported=GATE,
        qk_norm=RMS,
    ),
    "cohere2": ModelType(
        windowed(every(4, "sliding_window_pattern"), layout="interleaved", unrotated=(FULL,)),
        BY_KEY,
    ),
    # M-RoPE.
    **alike(
        "qwen2_vl_text qwen2_5_vl_text",
        ModelType(Multimodal(kinds=from_max_window_layers, sections=(16, 24, 24)), QKV),
    ),
    **alike(
        "qwen3_vl_text qwen3_vl_moe_text",
        ModelType(Multimodal("interleaved", sections=(24, 20, 20)), BY_KEY, qk_norm=RMS),
    ),
    "ernie4_5_vl_moe_text": ModelType(
        Multimodal("alternating", "interleaved", sections=(22, 22, 20), time_last=True),
        ("use_bias",) * 4,
    ),
    # Linear attention in some layers.
    "qwen3_next": ModelType(
        Rotating(partial=True, kinds=_LINEAR_BUT_4TH), unsupported=GATE, qk_norm=GEMMA
    ),
    **alike(
        "qwen3_5_text qwen3_5_moe_text",
        ModelType(
            Multimodal("interleaved", kinds=_LINEAR_BUT_4TH, sections=(11, 11, 10), partial=True),
            unsupported=GATE,
            qk_norm=GEMMA,
        ),
    ),
    "qwen4_exp_text": ModelType(
        Multimodal("interleaved", kinds=_LINEAR_BUT_4TH, sections=(11, 11, 10), partial=True),
        unsupported=f"keys that an indexer selects, and {GATE}",
        qk_norm=GEMMA,
    ),
    # Multi-head latent attention.
    "deepseek_v2": ModelType(
        Latent(interleave=True, in_place=True), unsupported=LATENT, scale=latent_scale
    ),
    **alike(
        "axk1 deepseek_v3 deepseek_v32 mistral4 youtu",
        ModelType(Latent(), unsupported=LATENT, scale=latent_scale),
    ),
    "glm_moe_dsa": ModelType(Latent(interleave=True), unsupported=LATENT, scale=latent_scale),
    "axk2": ModelType(Latent(interleave=True), unsupported=_GATED, scale=latent_scale),
    "hy_v4": ModelType(
        Latent(interleave=False), unsupported=_GATED, sinks=True, scale=latent_scale
    ),
    "minicpm3": ModelType(Latent(interleave=False), unsupported=LATENT, scale=latent_scale),
    "bailing_hybrid": ModelType(
        Latent(interleave=True, kinds=every(6, "layer_group_size", other=LINEAR)),
        unsupported=_GATED,
        scale=latent_scale,
    ),
}


def _internlm3(config: TrackedConfig) -> Layers:
    """Reads RoPE. `qkv_bias` is another name of `attention_bias`."""
    bias, other = config.get("attention_bias"), config.explicit("qkv_bias")
    config.check(other in (None, bias), f"attention_bias={bias} and qkv_bias={other}")
    return Rotating()(config)


TYPES["internlm3"] = ModelType(_internlm3, BY_KEY)


def _hunyuan(config: TrackedConfig) -> Layers:
    """Reads RoPE, whose dynamic scaling is NTK of any length if the config has `alpha`."""
    config.only("use_rotary_pos_emb", True)
    rope, (alpha,) = pop_keys(config, "alpha")
    if not (alpha and rope.get("rope_type", rope.get("type")) == "dynamic"):
        config.check_ignored(not alpha, f"alpha={alpha}")
        return Rotating()(config)
    settings = read_rope(config, {n: x for n, x in rope.items() if n == "rope_theta"})
    settings = dataclasses.replace(settings, scaling=NTK(factor=float(alpha)))
    return uniform(config, rotation(config, settings, head_size(config)))


_HUNYUAN = ModelType(_hunyuan, BY_KEY, qk_norm=QKNorm(after_rotation=True))
TYPES |= alike("hunyuan_v1_dense hunyuan_v1_moe", _HUNYUAN)


def _roformer(config: TrackedConfig) -> Layers:
    """Reads interleaved RoPE."""
    config.only("rotary_value", False)
    return uniform(config, RoPE(head_dim=head_size(config), layout="interleaved"))


TYPES["roformer"] = multi_head(_roformer, ALL, causality="is_decoder")


def _gptj(config: TrackedConfig) -> Layers:
    """Reads interleaved RoPE on the first dimensions."""
    dim, rotary_dim = head_size(config), config.get("rotary_dim")
    return uniform(config, RoPE(head_dim=dim, layout="interleaved", rotary_dim=rotary_dim))


TYPES |= alike("codegen gptj", multi_head(_gptj, NONE))


def _gemma2(config: TrackedConfig) -> Layers:
    """Reads a window in every second layer, which releases also name `sliding_window_size`."""
    size, window = config.explicit("sliding_window_size"), config.get("sliding_window")
    config.check(size in (None, window), f"sliding_window_size={size} and a window of {window}")
    return windowed(every(2))(config)


TYPES["gemma2"] = ModelType(
    _gemma2, BY_KEY, scale_key="query_pre_attn_scalar", ambiguous_keys=_BIDIRECTIONAL
)


def _nomic_bert(config: TrackedConfig) -> Layers:
    """Reads RoPE, whose base releases name `rotary_emb_base`."""
    base, theta = config.explicit("rotary_emb_base"), config.explicit("rope_theta")
    config.check(
        None in (base, theta) or base == theta, f"rope_theta={theta} and rotary_emb_base={base}"
    )
    config.only("rotary_emb_fraction", 1.0)
    config.only("rotary_emb_interleaved", False)
    return (_ROPE if base is None else Rotating(bases=((FULL, "rotary_emb_base"),)))(config)


TYPES["nomic_bert"] = ModelType(
    _nomic_bert, NONE, causality="bidirectional", key_heads=as_many_key_heads
)


def _gpt_neox(config: TrackedConfig) -> Layers:
    """Reads RoPE with the base `rotary_emb_base`, on the part `rotary_pct`."""
    fraction, usual = (config.explicit(n) for n in ("partial_rotary_factor", "rotary_pct"))
    usual = config.defaults.get("partial_rotary_factor", 1.0) if usual is None else usual
    config.check_ignored(fraction in (None, usual), f"partial_rotary_factor={fraction}")
    base, theta = config.get("rotary_emb_base"), config.explicit("rope_theta")
    base = (rope_dict(config) or {}).get("rope_theta", base)
    config.check(
        theta in (None, base),
        f"rope_theta={theta}, which transformers ignores for its type; the base is "
        f"rotary_emb_base={base}",
    )
    return Rotating(partial=True, bases=((FULL, "rotary_emb_base"),))(config)


TYPES["gpt_neox"] = multi_head(_gpt_neox, BY_KEY)


TYPES["gpt_neox_japanese"] = multi_head(_gpt_neox, NONE)  # Its block adds the bias of the output.


def _minimax_m2(config: TrackedConfig) -> Layers:
    """Reads RoPE on the first `rotary_dim` dimensions."""
    dim, head_dim = config.explicit("rotary_dim"), head_size(config)
    settings = read_rope(config, rope_dict(config))
    if dim is not None:
        fraction = settings.fraction
        config.check(
            fraction in (1.0, dim / head_dim),
            f"rotary_dim={dim} and partial_rotary_factor={fraction} for a head of {head_dim}",
        )
        settings = dataclasses.replace(settings, fraction=dim / head_dim)
    return uniform(config, rotation(config, settings, head_dim, partial=True))


TYPES["minimax_m2"] = ModelType(_minimax_m2, NONE, qk_norm=PROJECTED)


def _minimax_m3(config: TrackedConfig) -> Layers:
    """Reads RoPE on a part of each head, given by `partial_rotary_factor` and `rotary_dim`."""
    head_dim, dim = head_size(config), config.need("rotary_dim")
    settings = read_rope(config, rope_dict(config))
    config.check_ignored(
        int(head_dim * settings.fraction) == dim,
        f"rotary_dim={dim} beside partial_rotary_factor={settings.fraction} of {head_dim}",
    )
    return uniform(config, rotation(config, settings, head_dim, partial=True))


TYPES["minimax_m3_vl_text"] = ModelType(_minimax_m3, unsupported="blocks of keys", qk_norm=GEMMA)


def _ministral3(config: TrackedConfig) -> Layers:
    """Reads RoPE with YaRN, and a temperature on queries."""
    head_dim = head_size(config)
    scheme = with_temperature(config, lambda settings: rotation(config, settings, head_dim))
    count, window = layer_count(config), window_of(config)
    kinds = [FULL if window is None else LOCAL] * count
    return layers_of(config, kinds, [scheme] * count, window)


TYPES["ministral3"] = ModelType(_ministral3, NONE)


def _qwen2_moe(config: TrackedConfig) -> list[str]:
    """Returns sliding attention for every second layer below `max_window_layers`."""
    window, end = window_of(config), config.get("max_window_layers")
    local = [window is not None and i % 2 == 0 and i < end for i in range(layer_count(config))]
    return declared(config) or [LOCAL if x else FULL for x in local]


TYPES["qwen2_moe"] = ModelType(windowed(_qwen2_moe), (*("qkv_bias",) * 3, False))


def _ministral(config: TrackedConfig) -> list[str]:
    """Returns sliding attention for all layers, unless `layer_types` says otherwise."""
    kind = FULL if window_of(config) is None else LOCAL
    return declared(config) or [kind] * layer_count(config)


TYPES["ministral"] = ModelType(windowed(_ministral), NONE)


def _granite_swa(config: TrackedConfig) -> Layers:
    """Reads RoPE with a base for each layer, 0 for layers without positions."""
    settings, head_dim = read_rope(config, rope_dict(config)), head_size(config)
    kinds = every(4, first=True)(config)
    thetas = config.explicit("layer_rope_theta") or [settings.theta] * len(kinds)
    schemes = (
        rotation(config, dataclasses.replace(settings, theta=float(theta)), head_dim)
        if theta
        else NoPE()
        for theta in thetas
    )
    _check_count(config, thetas, kinds)
    return layers_of(config, kinds, schemes, window_of(config))


def _check_count(config, thetas, kinds):
    config.check(
        len(thetas) == len(kinds), f"{len(thetas)} layer_rope_theta for {len(kinds)} layers"
    )


TYPES |= alike(
    "granite_swa granitemoe_swa",
    ModelType(_granite_swa, BY_KEY, sinks=True, scale_key="attention_multiplier"),
)


def _muse_spark(config: TrackedConfig) -> Layers:
    """Reads RoPE in layers whose `layer_rope_theta` is not 0."""
    settings = read_rope(config, rope_dict(config))
    rotating = rotation(config, settings, head_size(config))
    from_last = range(layer_count(config))[::-1]
    kinds = declared(config) or [LOCAL if i % 4 else FULL for i in from_last]
    thetas = config.explicit("layer_rope_theta")
    if thetas is None:
        thetas = [i % 4 and settings.theta for i in from_last]
    config.check_ignored(
        {*thetas} <= {0, settings.theta}, f"layer_rope_theta={thetas} beside {settings.theta}"
    )
    _check_count(config, thetas, kinds)
    schemes = (rotating if theta else NoPE() for theta in thetas)
    return layers_of(config, kinds, schemes, window_of(config))


def _muse_spark_scale(config: TrackedConfig, layer: int) -> float | None:
    """Returns the factor on q . k: qk_scale_factor / sqrt(H), for normalised queries."""
    return config.need("qk_scale_factor") * head_size(config) ** -0.5


TYPES["muse_spark_text"] = ModelType(
    _muse_spark,
    unsupported="a norm and a gate on its output",
    qk_norm=QKNorm(scale="none"),
    scale=_muse_spark_scale,
)


def _mimo_v2(config: TrackedConfig) -> Layers:
    """Reads RoPE on a part of each head, with another base in layers with a window."""
    for kind, part in (config.explicit("rope_parameters") or {}).items():
        config.check(
            not isinstance(part, dict)
            or "partial_rotary_factor" in part
            or part.get("rope_type", part.get("type", "default")) == "default",
            f"no partial_rotary_factor in its {kind!r} rope parameters",
        )
    kinds = declared(config) or [FULL, *every(6)(config)[1:]]
    pattern, base = config.explicit("hybrid_layer_pattern"), config.explicit("swa_rope_theta")
    config.check_ignored(
        pattern is None or [LOCAL if x else FULL for x in pattern] == kinds,
        f"hybrid_layer_pattern={pattern}",
    )
    local = (rope_dict(config) or {}).get(LOCAL)
    theta = local.get("rope_theta") if isinstance(local, dict) else None
    config.check_ignored(base in (None, theta), f"swa_rope_theta={base}")
    if config.values.get("attention_chunk_size") == config.values.get("sliding_window"):
        config.ignore("attention_chunk_size")  # Releases repeat the window.
    return Rotating(
        partial=True, kinds=lambda _: kinds, window=_mimo_v2_window, by_kind="required"
    )(config)


def _mimo_v2_window(config: TrackedConfig) -> Window:
    """Returns the window: one more than `sliding_window_size`, the number of earlier tokens."""
    earlier, window = config.values.get("sliding_window_size"), config.values.get("sliding_window")
    config.read.update(("sliding_window_size", "sliding_window"))
    if earlier is None:
        window = (
            config.need("sliding_window") if window is None else config.explicit("sliding_window")
        )
        return on_sides_of(config, window)
    config.check(
        type(earlier) is int and earlier >= 1 and window in (None, earlier, earlier + 1),
        f"sliding_window_size={earlier!r} and sliding_window={window!r}",
    )
    return on_sides_of(config, earlier + 1)


TYPES["mimo_v2_flash"] = ModelType(
    _mimo_v2,
    unsupported="values of another size than keys, and a factor on them",
    sinks=True,
    sinks_windowed_only=True,
)


def _two_sided_window_of(config: TrackedConfig) -> Window:
    """Returns the window of Gemma 3 and 4, which embedding models divide between both sides.

    Gemma 3's then has `sliding_window` tokens in all; Gemma 4's has one more on each side, as
    |i - j| may be `sliding_window // 2 + 1`.
    """
    window = window_of(config)
    config.only("use_bidirectional_attention", False, True, "all", "vision")
    both_ways = config.get("use_bidirectional_attention")
    if window is None or not sees_both_sides(config.values):
        return window
    version, size = written_by(config.values), config.need("sliding_window")
    config.check(
        not (4, 57) <= version < (5, 16) or "dev" in config.values["transformers_version"],
        f"sliding_window={size} and transformers_version, which wrote the window of one side over "
        "that of both; give the released model's window, without transformers_version",
    )
    side = size // 2 + 1
    return (side, side) if both_ways == "all" or not is_causal(config) else side


_BASES = ((FULL, "rope_theta"), (LOCAL, "rope_local_base_freq"))
TYPES["gemma3_text"] = ModelType(
    Rotating(
        kinds=every(6, "sliding_window_pattern"),
        window=_two_sided_window_of,
        bases=_BASES,
        scaled=(FULL,),
        null_rotates=True,
        by_kind="read",
    ),
    BY_KEY,
    qk_norm=GEMMA,
    scale_key="query_pre_attn_scalar",
)
TYPES["gemma3n_text"] = ModelType(
    windowed(every(5), bases=_BASES, scaled=(FULL,), null_rotates=True, by_kind="read"),
    unsupported="a norm of values, and keys that layers share",
    qk_norm=RMS,
    unused_scale_key="query_pre_attn_scalar",
    scale=unscaled,
)


def _gemma4(config: TrackedConfig) -> list[str]:
    """Returns full attention for one layer in six and the last, even if `layer_types` differs."""
    return [*every(6)(config)[:-1], FULL]


TYPES |= alike(
    "gemma4_text gemma4_unified_text",
    ModelType(
        Rotating(kinds=_gemma4, window=_two_sided_window_of, by_kind="required"),
        unsupported="a norm of values, and heads whose size differs by layer",
        qk_norm=RMS,
        scale=unscaled,
    ),
)


def _modernbert_window(config: TrackedConfig) -> Window:
    """Returns half of `local_attention` on both sides, for an encoder."""
    return (config.need("local_attention") // 2,) * 2


def _modernbert_decoder_window(config: TrackedConfig) -> Window:
    """Returns half of `local_attention`, for a decoder."""
    half, window = config.need("local_attention") // 2, config.explicit("sliding_window")
    config.check_ignored(window in (None, half), f"sliding_window={window}")
    return half


_MODERNBERT = Rotating(
    kinds=every(3, "global_attn_every_n_layers", first=True),
    bases=((FULL, "global_rope_theta"), (LOCAL, "local_rope_theta")),
    scaled=(FULL, LOCAL),
    null_rotates=True,
    by_kind="read",
)


def _modernbert(config: TrackedConfig) -> Layers:
    """Reads RoPE with a window in two of three layers."""
    config.only("position_embedding_type", "absolute", "sans_pos")  # mmBERT's; never used.
    return dataclasses.replace(_MODERNBERT, window=_modernbert_window)(config)


TYPES["modernbert"] = multi_head(_modernbert, BY_KEY, causality="bidirectional")
TYPES["modernbert-decoder"] = multi_head(
    dataclasses.replace(_MODERNBERT, window=_modernbert_decoder_window), BY_KEY
)


def _flint(config: TrackedConfig) -> list[str]:
    """Returns full attention for the first two layers, one in four, and the last."""
    count = layer_count(config)
    full = {0, 1, count - 1, *range(1, count, 4)}
    return declared(config) or [FULL if i in full else LOCAL for i in range(count)]


TYPES["flint"] = ModelType(windowed(_flint, unrotated=(FULL,)), BY_KEY, qk_norm=RMS, sinks=True)


def _cohere2_moe(config: TrackedConfig) -> Layers:
    """Reads RoPE in layers with a window, and in all layers of dense networks at the start."""
    count, dense = layer_count(config), config.get("first_k_dense_replace", 0)
    first, later = "prefix_dense_sliding_window_pattern", "sliding_window_pattern"
    periods = [config.need(name) for name in (first, later)]
    config.check(
        all(type(period) is int and period >= 1 for period in periods),
        f"{first} and {later} {periods}, which must be integers from 1",
    )
    kinds = declared(config)
    if kinds is None:
        parts = zip(periods, (dense, count - dense), strict=True)
        kinds = [LOCAL if (i + 1) % period else FULL for period, n in parts for i in range(n)]
    config.check(len(kinds) == count, f"first_k_dense_replace={dense} for {count} layers")
    networks = config.explicit("mlp_layer_types") or ["dense"] * dense
    forced = [i for i, network in enumerate(networks) if network == "dense" and periods[0] == 1]
    settings = read_rope(config, rope_dict(config))
    rotating = rotation(config, settings, head_size(config), "interleaved")
    schemes = (rotating if kind == LOCAL or i in forced else NoPE() for i, kind in enumerate(kinds))
    return layers_of(config, kinds, schemes, window_of(config))


TYPES["cohere2_moe"] = ModelType(_cohere2_moe, BY_KEY)


def _kolibri1(config: TrackedConfig) -> Layers:
    """Reads RoPE in layers with a window; in all layers if none has a window."""
    unrotated = (*MIXERS,) if config.get("sliding_window") is None else (FULL,)
    return windowed(every(5), unrotated=unrotated)(config)


TYPES["kolibri1"] = ModelType(_kolibri1, BY_KEY, qk_norm=RMS)


def _exaone4(config: TrackedConfig) -> Layers:
    """Reads RoPE in layers with a window; in all layers if none has a window."""
    if config.get("sliding_window") is None:
        config.ignore("sliding_window_pattern")
        return windowed(from_config)(config)
    return windowed(every(4, "sliding_window_pattern"), unrotated=(FULL,))(config)


TYPES |= alike("exaone4 exaone_moe", ModelType(_exaone4, NONE, qk_norm=RMS))


def _llama4(config: TrackedConfig) -> Layers:
    """Reads RoPE within chunks, and a temperature without RoPE in every fourth layer."""
    settings = read_rope(config, rope_dict(config))
    bare = NoPE()
    if config.truth("attn_temperature_tuning", True):
        floor, strength = config.need("floor_scale"), config.need("attn_scale")
        bare = QueryTemperature(form="llama4", length=int(floor), strength=float(strength))
    rotating = rotation(config, settings, head_size(config), "interleaved")
    config.ignore("attention_chunk_size")
    config.only("nope_layer_interval", 4)  # Beside the default of no_rope_layers.
    kinds = declared(config) or [CHUNKED if x else FULL for x in rotating_flags(config)]
    return by_flags(config, kinds, rotating, bare)


TYPES["llama4_text"] = ModelType(
    _llama4,
    BY_KEY,
    qk_norm=QKNorm(scale="none", after_rotation=True),
    qk_norm_key="use_qk_norm",
    qk_norm_rotating_only=True,
)


def _smollm3(config: TrackedConfig) -> Layers:
    """Reads RoPE, and NoPE in every fourth layer, which has the window if there is one."""
    settings = read_rope(config, rope_dict(config))
    rotating, window = rotation(config, settings, head_size(config)), window_of(config)
    local = [window is not None and not flag for flag in rotating_flags(config)]
    kinds = declared(config) or [LOCAL if x else FULL for x in local]
    config.check(
        LOCAL not in kinds or config.get("use_sliding_window", False),
        f"layers of type {LOCAL!r} without use_sliding_window, which some attention functions of "
        "transformers mask and others do not",
    )
    return by_flags(config, kinds, rotating, NoPE(), window)


TYPES["smollm3"] = ModelType(_smollm3, BY_KEY)


def _granite_hybrid(config: TrackedConfig) -> Layers:
    """Reads RoPE or no positions in layers of attention, by `position_embedding_type`."""
    config.only("position_embedding_type", "rope", "nope")
    kinds = declared(config) or [LINEAR] * layer_count(config)
    kinds = [STATE_SPACE if kind == LINEAR else kind for kind in kinds]
    if config.get("position_embedding_type") == "rope":
        return Rotating(kinds=lambda _: kinds)(config)
    config.ignore("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    return without_positions(config, kinds)


TYPES["granitemoehybrid"] = ModelType(_granite_hybrid, BY_KEY, scale_key="attention_multiplier")


def _lfm2(config: TrackedConfig) -> list[str]:
    """Returns full attention for layers in `full_attn_idxs`, convolutions for the others."""
    count, indices = layer_count(config), config.explicit("full_attn_idxs")
    full = range(count) if indices is None else indices
    return declared(config) or [FULL if i in full else CONVOLUTION for i in range(count)]


TYPES["lfm2"] = ModelType(Rotating(kinds=_lfm2), NONE, qk_norm=RMS)


def _required(config: TrackedConfig) -> list[str]:
    """Returns the `layer_types` of a model type without a default."""
    config.need("layer_types")
    return from_config(config)


TYPES["lfm2_moe"] = ModelType(Rotating(kinds=_required), NONE, qk_norm=RMS)


def _lfm3(config: TrackedConfig) -> list[str]:
    """Returns convolutions in every second layer, between sliding and full attention in turn."""
    cycle = LOCAL, CONVOLUTION, FULL, CONVOLUTION
    kinds = [cycle[i % 4] for i in range(layer_count(config))]
    return declared(config) or [CONVOLUTION, *kinds[1:]]


TYPES["lfm3"] = ModelType(windowed(_lfm3, by_kind="required"), unsupported=GATE, qk_norm=RMS)


def _jamba(config: TrackedConfig) -> Layers:
    """Reads attention without positions, and Mamba."""
    count, names = layer_count(config), ("attn_layer_period", "attn_layer_offset")
    period, offset = (config.need(name) for name in names)
    config.check(0 <= offset < period, f"attn_layer_period={period} and an offset of {offset}")
    kinds = [FULL if i % period == offset else STATE_SPACE for i in range(count)]
    written = [STATE_SPACE if kind == LINEAR else kind for kind in declared(config) or kinds]
    config.check_ignored(written == kinds, f"layer_types={written}")
    return without_positions(config, kinds)


TYPES["jamba"] = ModelType(_jamba, NONE)

_NEMOTRON_H = {"M": STATE_SPACE, "*": FULL, "-": MLP, "E": EXPERTS}


def _nemotron_h(config: TrackedConfig) -> Layers:
    """Reads attention without positions, Mamba, and MLPs and experts in layers of their own."""
    config.ignore("rope_theta", "partial_rotary_factor")  # Releases have them without effect.
    pattern, kinds = config.explicit("hybrid_override_pattern"), config.explicit("layer_types")
    if kinds is not None:
        config.check_ignored(pattern is None, "hybrid_override_pattern beside layer_types")
        kinds = [STATE_SPACE if kind == LINEAR else kind for kind in from_config(config)]
        return without_positions(config, kinds)
    count = config.explicit("num_hidden_layers")
    config.check(
        pattern is not None or count in (None, 4), f"{count} layers and no hybrid_override_pattern"
    )
    pattern = pattern or "ME*-"
    config.check(
        set(pattern) <= set(_NEMOTRON_H) and count in (None, len(pattern)),
        f"hybrid_override_pattern={pattern!r} and num_hidden_layers={count}; a letter of "
        f"{' '.join(_NEMOTRON_H)} stands for each layer",
    )
    return without_positions(config, [_NEMOTRON_H[letter] for letter in pattern])


TYPES["nemotron_h"] = ModelType(_nemotron_h, NONE)


def _zamba(config: TrackedConfig) -> Layers:
    """Reads attention without positions before some of the layers of Mamba."""
    names = "attn_layer_period", "attn_layer_offset"
    period, offset = (config.need(name) for name in names)
    count = layer_count(config)
    later = [HYBRID if i % period == offset else STATE_SPACE for i in range(count - 3)]
    kinds = declared(config) or [STATE_SPACE, STATE_SPACE, HYBRID, *later][:count]
    return without_positions(config, [STATE_SPACE if x == LINEAR else x for x in kinds])


def _zamba_scale(config: TrackedConfig, layer: int) -> float:
    """Returns the factor on q . k, of half of the head dim."""
    dim, heads = config.need("hidden_size"), config.need("num_attention_heads")
    return (config.get("attention_head_dim", 2 * dim // heads) / 2) ** -0.5


_TWICE_AS_WIDE = "inputs of twice the width of its outputs"
TYPES["zamba"] = ModelType(_zamba, unsupported=_TWICE_AS_WIDE, scale=_zamba_scale)


_ZAMBA2 = {*range(6, 48, 6), 47, 51}  # The layers with attention of 54.


def _zamba2(config: TrackedConfig) -> Layers:
    """Reads attention with or without RoPE before some of the layers of Mamba."""
    count = layer_count(config)
    kinds = declared(config) or [HYBRID if i in _ZAMBA2 else LINEAR for i in range(count)]
    config.check(
        config.explicit("layer_types") is not None or count == 54,
        f"{count} layers and no layers_block_type",
    )
    kinds = [STATE_SPACE if kind == LINEAR else kind for kind in kinds]
    config.check(
        not config.get("use_long_context", False),
        "use_long_context, for which transformers 4 changes the base and transformers 5 does not",
    )
    dim, heads = config.need("hidden_size"), config.need("num_attention_heads")
    size = config.explicit("attention_head_dim")
    config.check_ignored(size in (None, 2 * dim // heads), f"attention_head_dim={size}")
    if not config.get("use_mem_rope", False):
        config.ignore("rope_parameters", "rope_scaling", "rope_theta")
        return without_positions(config, kinds)
    scheme = rotation(config, read_rope(config, rope_dict(config)), 2 * dim // heads)
    return layers_of(config, kinds, [scheme] * len(kinds))


TYPES["zamba2"] = ModelType(_zamba2, unsupported=_TWICE_AS_WIDE, scale=_zamba_scale)


def _recurrent_gemma(config: TrackedConfig) -> list[str]:
    """Returns sliding attention or RG-LRU for each layer, by the pattern in `block_types`."""
    blocks, count = config.need("block_types"), layer_count(config)
    config.check({*blocks} <= {"attention", "recurrent"}, f"block_types {sorted({*blocks})}")
    kinds = {"attention": LOCAL, "recurrent": STATE_SPACE}
    return [kinds[blocks[i % len(blocks)]] for i in range(count)]


TYPES["recurrent_gemma"] = ModelType(
    Rotating(
        partial=True,
        kinds=_recurrent_gemma,
        window=lambda config: on_sides_of(config, config.need("attention_window_size")),
    ),
    (*("attention_bias",) * 3, True),
)


def _dbrx(config: TrackedConfig) -> Layers:
    """Reads RoPE, whose base is in `attn_config`."""
    part = TrackedConfig(config.get("attn_config") or {}, f"{config.label} in attn_config")
    theta, rope = part.get("rope_theta"), rope_dict(config) or {}
    if theta is not None:
        other = rope.get("rope_theta")
        config.check(
            other in (None, theta),
            f"rope_theta={theta} in attn_config, and {other} in its rope parameters",
        )
        rope = rope | {"rope_theta": theta}
    return uniform(config, rotation(config, read_rope(config, rope), head_size(config)))


def _dbrx_key_heads(config: TrackedConfig, num_heads: int) -> int:
    """Returns the number of key heads K of N heads."""
    part = TrackedConfig(config.get("attn_config") or {}, f"{config.label} in attn_config")
    return part.get("kv_n_heads", 1)


TYPES["dbrx"] = ModelType(
    _dbrx, NONE, key_heads=_dbrx_key_heads, ignores_head_dim=True, clips_projections=True
)


def _minimax(config: TrackedConfig) -> list[str]:
    """Returns linear attention for every second layer; the others have a window if there is one."""
    kinds = every(2, first=True, other=LINEAR)(config)
    config.check({*kinds} <= {FULL, LINEAR}, f"layer_types={sorted({*kinds})}")
    local = FULL if window_of(config) is None else LOCAL
    return [local if kind == FULL else kind for kind in kinds]


TYPES["minimax"] = ModelType(windowed(_minimax), NONE)


def _bamba(config: TrackedConfig) -> Layers:
    """Reads RoPE on half of a head, unless the rotary dict has another part."""
    fraction = config.explicit("partial_rotary_factor")
    config.check_ignored(fraction in (None, 0.5), f"partial_rotary_factor={fraction}")
    return Rotating(partial=True, kinds=_bamba_kinds)(config.without("partial_rotary_factor"))


def _bamba_kinds(config: TrackedConfig) -> list[str]:
    """Returns full attention for layers in `attn_layer_indices`, Mamba for the others."""
    dim, half = config.explicit("attn_rotary_emb"), head_size(config) // 2
    config.check_ignored(dim in (None, half), f"attn_rotary_emb={dim}")
    count, indices = layer_count(config), config.explicit("attn_layer_indices") or ()
    kinds = [FULL if i in indices else STATE_SPACE for i in range(count)]
    written = [STATE_SPACE if kind == LINEAR else kind for kind in declared(config) or kinds]
    config.check_ignored(written == kinds, f"layer_types={written}")
    return kinds


TYPES["bamba"] = ModelType(_bamba, BY_KEY)


def _olmo_hybrid(config: TrackedConfig) -> Layers:
    """Reads RoPE, or no positions if the base is null, and linear attention."""
    kinds, rope = every(4, other=LINEAR)(config), rope_dict(config) or {}
    kinds = kinds if FULL in kinds else [*kinds[:-1], FULL]
    if rope.get("rope_theta", 0) is None:
        config.ignore("rope_theta")
        return without_positions(config, kinds)
    return Rotating(kinds=lambda _: kinds)(config)


TYPES["olmo_hybrid"] = ModelType(_olmo_hybrid, BY_KEY, qk_norm=PROJECTED)


def _glm4_moe_lite(config: TrackedConfig) -> Layers:
    """Reads latent attention, whose `head_dim` is the size of the rotary part."""
    size, dim = config.explicit("head_dim"), config.need("qk_rope_head_dim")
    config.check(size in (None, dim), f"head_dim={size} and qk_rope_head_dim={dim}")
    return Latent()(config)


TYPES["glm4_moe_lite"] = ModelType(_glm4_moe_lite, unsupported=LATENT, scale=latent_scale)


def _longcat_flash(config: TrackedConfig) -> Layers:
    """Reads latent attention, twice in each layer."""
    layers = Latent(interleave=True)(config)
    if "num_hidden_layers" not in config.values:  # The key of its own is `num_layers`.
        return layers * 2
    config.check(len(layers) % 2 == 0, f"num_hidden_layers={len(layers)}, which must be even")
    return layers


TYPES["longcat_flash"] = ModelType(_longcat_flash, unsupported=LATENT, scale=latent_scale)


def _kimi_linear(config: TrackedConfig) -> Layers:
    """Reads latent attention without positions, and linear attention."""
    config.only("mla_use_nope", True)
    config.ignore("qk_nope_head_dim", "qk_rope_head_dim", "rope_theta", "rope_scaling")
    count, kinds = layer_count(config), declared(config)
    part = TrackedConfig(
        config.get("linear_attn_config") or {}, f"{config.label} in linear_attn_config"
    )
    full, linear = part.explicit("full_attn_layers"), part.explicit("kda_layers")
    if kinds is None and (full is None or linear is None):
        kinds = [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    if kinds is None:
        part.check(
            sorted([*full, *linear]) == [*range(1, count + 1)],
            f"full_attn_layers={full} and kda_layers={linear}, which are not {count} layers from "
            "1 on",
        )
        kinds = [FULL if i + 1 in full else LINEAR for i in range(count)]
    return without_positions(config, kinds)


TYPES["kimi_linear"] = ModelType(_kimi_linear, unsupported=LATENT)


def _mistral_large4(config: TrackedConfig) -> Layers:
    """Reads learned frequencies in three layers of four, and a learned logit scale in all."""
    settings = read_rope(config, rope_dict(config))
    logit_scale = SSMax(num_heads=config.need("num_attention_heads"), scale=0.0, offset=1.0)
    rotating = LearnedRoPE(**Latent(interleave=True).fields(config, settings))
    return by_flags(config, all_global(config), chain(rotating, logit_scale), logit_scale)


TYPES["mistral_large4_text"] = ModelType(_mistral_large4, unsupported=LATENT, scale=latent_scale)
