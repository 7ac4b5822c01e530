"""Model types with rotary attention in all layers or in some, in one table.

Readers that only one row or one family needs precede the table.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

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
    FULL,
    LOCAL,
    all_windowed,
    cycle,
    declared,
    from_max_window_layers,
    layers_of,
    on_sides_of,
    uniform,
    where_local,
    window_of,
)
from posenc_jax.hf.model_type import (
    ALL,
    BY_KEY,
    GATE,
    GEMMA,
    NONE,
    PER_HEAD,
    PROJECTED,
    QKV,
    QKV_BY_KEY,
    RMS,
    WITH_BIAS,
    Layers,
    ModelType,
    multi_head,
    unscaled,
)
from posenc_jax.hf.rope import RopeSettings, pop_keys, read_rope, rope_dict
from posenc_jax.hf.rotary import (
    Multimodal,
    Rotating,
    rotating_flags,
    rotation,
    windowed,
    with_temperature,
)
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.logit_scale.temperature import QueryTemperature
from posenc_jax.schemes.rotary.rope import RoPE
from posenc_jax.schemes.rotary.scaling.interpolation import NTK
from posenc_jax.schemes.scheme import Scheme

# Kinds of layers.


def _gemma4(config: TrackedConfig) -> list[str]:
    """Reads a pattern whose last layer is global, even if `layer_types` differs."""
    return [*cycle("LLLLLF")(config)[:-1], FULL]


def _cohere2_moe(config: TrackedConfig) -> list[str]:
    """Reads two patterns: one for dense networks at the start, one for later layers."""
    count, dense = layer_count(config), config.get("first_k_dense_replace", 0)
    names = "prefix_dense_sliding_window_pattern", "sliding_window_pattern"
    periods = [config.need(name) for name in names]
    config.check(
        all(type(period) is int and period >= 1 for period in periods),
        f"{' and '.join(names)} {periods}, which must be integers from 1",
    )
    kinds = declared(config)
    if kinds is None:
        parts = zip(periods, (dense, count - dense), strict=True)
        kinds = [LOCAL if (i + 1) % period else FULL for period, n in parts for i in range(n)]
    config.check(len(kinds) == count, f"first_k_dense_replace={dense} for {count} layers")
    return kinds


def _exaone4(config: TrackedConfig) -> list[str]:
    """Reads a pattern if there is a window, else full attention."""
    if config.get("sliding_window") is None:
        config.ignore("sliding_window_pattern")
        return cycle("F")(config)
    return cycle("LLLF", "sliding_window_pattern")(config)


def _muse_spark(config: TrackedConfig) -> list[str]:
    """Reads a pattern that is counted from the last layer."""
    from_last = range(layer_count(config))[::-1]
    return declared(config) or [LOCAL if i % 4 else FULL for i in from_last]


def _mimo_v2(config: TrackedConfig) -> list[str]:
    """Reads a pattern, and checks keys that releases repeat."""
    for kind, part in (config.explicit("rope_parameters") or {}).items():
        config.check(
            not isinstance(part, dict)
            or "partial_rotary_factor" in part
            or part.get("rope_type", part.get("type", "default")) == "default",
            f"no partial_rotary_factor in its {kind!r} rope parameters",
        )
    kinds = cycle("LLLLLF", first="F")(config)
    config.implied("hybrid_layer_pattern", [int(kind == LOCAL) for kind in kinds])
    local = (rope_dict(config) or {}).get(LOCAL)
    theta = local.get("rope_theta") if isinstance(local, dict) else None
    config.implied("swa_rope_theta", theta)
    if config.values.get("attention_chunk_size") == config.values.get("sliding_window"):
        config.ignore("attention_chunk_size")  # Releases repeat the window.
    return kinds


def _llama4(config: TrackedConfig) -> list[str]:
    """Reads chunks for the layers that rotate."""
    config.ignore("attention_chunk_size")
    config.only("nope_layer_interval", 4)  # Beside the default of no_rope_layers.
    return declared(config) or [CHUNKED if x else FULL for x in rotating_flags(config)]


def _smollm3(config: TrackedConfig) -> list[str]:
    """Reads the window for the layers that do not rotate."""
    flags = rotating_flags(config)
    kinds = where_local(lambda i: not flags[i])(config)
    config.check(
        LOCAL not in kinds or config.get("use_sliding_window", False),
        f"layers of type {LOCAL!r} without use_sliding_window, which some attention functions of "
        "transformers mask and others do not",
    )
    return kinds


# Windows.


def _mimo_v2_window(config: TrackedConfig) -> Window:
    """Returns one more than `sliding_window_size`, the number of earlier tokens."""
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


def _modernbert_decoder_window(config: TrackedConfig) -> Window:
    """Returns half of `local_attention`."""
    half = config.need("local_attention") // 2
    config.implied("sliding_window", half)
    return half


# Layers that rotate, and their bases.


def _windowed_ones(config: TrackedConfig, kinds: list[str]) -> list[bool]:
    """Returns whether layers have a window; True for all if none has one."""
    everywhere = config.get("sliding_window") is None
    flags = [everywhere or kind == LOCAL for kind in kinds]
    return flags if any(flags) else []


def _dense_ones(config: TrackedConfig, kinds: list[str]) -> list[bool]:
    """Returns whether layers have a window, or a dense network where these have no pattern."""
    dense = ["dense"] * config.get("first_k_dense_replace", 0)
    networks = config.explicit("mlp_layer_types") or dense
    forced = config.need("prefix_dense_sliding_window_pattern") == 1
    dense = {i for i, network in enumerate(networks) if network == "dense" and forced}
    return [kind == LOCAL or i in dense for i, kind in enumerate(kinds)]


def _thetas(config: TrackedConfig, kinds: list[str]) -> Sequence[float | bool]:
    """Returns the base of each layer, 0 for layers without positions."""
    thetas = config.explicit("layer_rope_theta") or [True] * len(kinds)
    config.check_count("layer_rope_theta", thetas, len(kinds))
    return thetas


def _zero_thetas(config: TrackedConfig, kinds: list[str]) -> list[bool]:
    """Returns whether the `layer_rope_theta` of each layer is not 0."""
    theta, thetas = read_rope(config).theta, config.explicit("layer_rope_theta")
    if thetas is None:
        return [i % 4 > 0 for i in range(layer_count(config))[::-1]]
    config.check_ignored({*thetas} <= {0, theta}, f"layer_rope_theta={thetas} beside {theta}")
    config.check_count("layer_rope_theta", thetas, len(kinds))
    return [x != 0 for x in thetas]


def _llama4_temperature(config: TrackedConfig) -> Scheme:
    if not config.truth("attn_temperature_tuning", True):
        return NoPE()
    floor, strength = config.need("floor_scale"), config.need("attn_scale")
    return QueryTemperature(form="llama4", length=int(floor), strength=float(strength))


# Rotary settings.


def _alpha(config: TrackedConfig, rope: dict[str, Any], base: str) -> RopeSettings:
    """Reads dynamic scaling as NTK of any length if the config has `alpha`."""
    _, (alpha,) = pop_keys(config, "alpha")
    if not (alpha and rope.get("rope_type", rope.get("type")) == "dynamic"):
        config.check_ignored(not alpha, f"alpha={alpha}")
        return read_rope(config, rope)
    settings = read_rope(config, {n: x for n, x in rope.items() if n == "rope_theta"})
    return dataclasses.replace(settings, scaling=NTK(factor=float(alpha)))


def _nomic(config: TrackedConfig, rope: dict[str, Any], base: str) -> RopeSettings:
    """Reads the base, which releases name `rotary_emb_base`."""
    base, theta = config.explicit("rotary_emb_base"), config.explicit("rope_theta")
    config.check(
        None in (base, theta) or base == theta, f"rope_theta={theta} and rotary_emb_base={base}"
    )
    return read_rope(config, rope, "rope_theta" if base is None else "rotary_emb_base")


def _gpt_neox(config: TrackedConfig, rope: dict[str, Any], base: str) -> RopeSettings:
    """Reads the base `rotary_emb_base`, and the part `rotary_pct`."""
    usual = config.explicit("rotary_pct")
    usual = config.defaults.get("partial_rotary_factor", 1.0) if usual is None else usual
    config.implied("partial_rotary_factor", usual)
    theta, own = config.explicit("rope_theta"), config.get("rotary_emb_base")
    own = rope.get("rope_theta", own)
    config.check(
        theta in (None, own),
        f"rope_theta={theta}, which transformers ignores for its type; the base is "
        f"rotary_emb_base={own}",
    )
    return read_rope(config, rope, "rotary_emb_base")


def _rotary_dim(config: TrackedConfig, rope: dict[str, Any], base: str) -> RopeSettings:
    """Reads the number of dimensions that rotate, `rotary_dim`."""
    dim, head_dim = config.explicit("rotary_dim"), head_size(config)
    settings = read_rope(config, rope)
    if dim is None:
        return settings
    config.check(
        settings.fraction in (1.0, dim / head_dim),
        f"rotary_dim={dim} and partial_rotary_factor={settings.fraction} for a head of {head_dim}",
    )
    return dataclasses.replace(settings, fraction=dim / head_dim)


def _both_parts(config: TrackedConfig, rope: dict[str, Any], base: str) -> RopeSettings:
    """Reads the part that `partial_rotary_factor` and `rotary_dim` both give."""
    head_dim, dim, settings = head_size(config), config.need("rotary_dim"), read_rope(config, rope)
    config.check_ignored(
        int(head_dim * settings.fraction) == dim,
        f"rotary_dim={dim} beside partial_rotary_factor={settings.fraction} of {head_dim}",
    )
    return settings


def _dbrx(config: TrackedConfig, rope: dict[str, Any], base: str) -> RopeSettings:
    """Reads the base in `attn_config`."""
    theta, other = config.part("attn_config").get("rope_theta"), rope.get("rope_theta")
    config.check(
        theta is None or other in (None, theta),
        f"rope_theta={theta} in attn_config, and {other} in its rope parameters",
    )
    return read_rope(config, rope if theta is None else rope | {"rope_theta": theta})


# Layers.


def _roformer(config: TrackedConfig, rotary_dim: int | None = None) -> Layers:
    """Reads interleaved RoPE whose base no key changes."""
    rope = RoPE(head_dim=head_size(config), layout="interleaved", rotary_dim=rotary_dim)
    return uniform(config, rope)


def _gptj(config: TrackedConfig) -> Layers:
    """Reads RoFormer's RoPE on the first dimensions."""
    return _roformer(config, config.get("rotary_dim"))


def _ministral3(config: TrackedConfig) -> Layers:
    """Reads RoPE with YaRN, and a temperature on queries."""
    head_dim = head_size(config)
    scheme = with_temperature(config, lambda settings: rotation(config, settings, head_dim))
    count, window = layer_count(config), window_of(config)
    kinds = [FULL if window is None else LOCAL] * count
    return layers_of(config, kinds, [scheme] * count, window)


# Settings of attention.


def _muse_spark_scale(config: TrackedConfig, layer: int) -> float | None:
    """Returns the factor on q . k: qk_scale_factor / sqrt(H), for normalised queries."""
    return config.need("qk_scale_factor") * head_size(config) ** -0.5


def _dbrx_key_heads(config: TrackedConfig, num_heads: int) -> int:
    return config.part("attn_config").get("kv_n_heads", 1)


_ROPE, _PARTIAL, _INTERLEAVED = Rotating(), Rotating(partial=True), Rotating("interleaved")
_WINDOWED, _LAST_WINDOWED = windowed(all_windowed), windowed(from_max_window_layers)
_BIDIRECTIONAL = ("use_bidirectional_attention",)
_BASES = ((FULL, "rope_theta"), (LOCAL, "rope_local_base_freq"))
_MODERNBERT = Rotating(
    kinds=cycle("FLL", "global_attn_every_n_layers"),
    window=lambda config: (config.need("local_attention") // 2,) * 2,
    bases=((FULL, "global_rope_theta"), (LOCAL, "local_rope_theta")),
    scaled=(FULL, LOCAL),
    by_kind="read",
)

ROWS: dict[str, ModelType] = {
    # Alike in all layers.
    "arcee aria_text emu3_text_model iquestcoder jais2 llama": ModelType(_ROPE, BY_KEY),
    "apertus": ModelType(_ROPE, BY_KEY, qk_norm=RMS),
    "bitnet": ModelType(_ROPE, "a norm before the output projection"),
    "eurobert": ModelType(_ROPE, BY_KEY, causality="bidirectional"),
    "gemma": ModelType(_ROPE, BY_KEY, ambiguous_keys=_BIDIRECTIONAL),
    "granite granitemoe granitemoeshared hyperclovax": ModelType(
        _ROPE, BY_KEY, scale_key="attention_multiplier"
    ),
    "hunyuan_v1_dense hunyuan_v1_moe": ModelType(
        Rotating(settings=_alpha),
        BY_KEY,
        qk_norm=QKNorm(after_rotation=True),
        only={"use_rotary_pos_emb": (True,)},
    ),
    "internlm3": ModelType(_ROPE, BY_KEY, same={"qkv_bias": "attention_bias"}),
    "olmo": ModelType(_ROPE, BY_KEY, clips_projections=True),
    "flex_olmo olmo2": ModelType(_ROPE, BY_KEY, qk_norm=PROJECTED),
    "olmoe": ModelType(_ROPE, BY_KEY, qk_norm=PROJECTED, clips_projections=True),
    "hy_v3": ModelType(_ROPE, BY_KEY, qk_norm=RMS),
    "nanochat": ModelType(
        Rotating("half_negative"), BY_KEY, qk_norm=QKNorm(scale="none", after_rotation=True)
    ),
    "nomic_bert": ModelType(
        Rotating(settings=_nomic),
        NONE,
        causality="bidirectional",
        key_heads=as_many_key_heads,
        only={"rotary_emb_fraction": (1.0,), "rotary_emb_interleaved": (False,)},
    ),
    "seed_oss": ModelType(_ROPE, (*("attention_bias",) * 3, "attention_out_bias")),
    "ministral3": ModelType(_ministral3, NONE),
    "dbrx": ModelType(
        Rotating(settings=_dbrx),
        NONE,
        key_heads=_dbrx_key_heads,
        ignores_head_dim=True,
        clips_projections=True,
    ),
    # On a part of each head.
    "persimmon": multi_head(_PARTIAL, ALL, qk_norm=WITH_BIAS, qk_norm_key="qk_layernorm"),
    "phi": ModelType(_PARTIAL, ALL, qk_norm=WITH_BIAS, qk_norm_key="qk_layernorm"),
    "stablelm": ModelType(
        _PARTIAL, (*("use_qkv_bias",) * 3, False), qk_norm=PER_HEAD, qk_norm_key="qk_layernorm"
    ),
    "glm4_moe": ModelType(_PARTIAL, QKV_BY_KEY, qk_norm=RMS, qk_norm_key="use_qk_norm"),
    "nemotron": ModelType(_PARTIAL, BY_KEY),
    "solar_open": ModelType(_PARTIAL, QKV_BY_KEY),
    "gpt_neox": multi_head(Rotating(partial=True, settings=_gpt_neox), BY_KEY),
    "gpt_neox_japanese": multi_head(  # Its block adds the bias of the output.
        Rotating(partial=True, settings=_gpt_neox), NONE
    ),
    "minimax_m2": ModelType(Rotating(partial=True, settings=_rotary_dim), NONE, qk_norm=PROJECTED),
    "minimax_m3_vl_text": ModelType(
        Rotating(partial=True, settings=_both_parts), "blocks of keys", qk_norm=GEMMA
    ),
    "glm glm4": ModelType(Rotating("interleaved", partial=True), QKV_BY_KEY),
    # Pairs of neighbours.
    "cohere": ModelType(_INTERLEAVED, BY_KEY, qk_norm=PER_HEAD, qk_norm_key="use_qk_norm"),
    "ernie4_5 ernie4_5_moe": ModelType(_INTERLEAVED, ("use_bias",) * 4),
    "helium": ModelType(_INTERLEAVED, QKV_BY_KEY),
    "roformer": multi_head(_roformer, ALL, causality="is_decoder", only={"rotary_value": (False,)}),
    "codegen gptj": multi_head(_gptj, NONE),
    # A window in some or all layers.
    "mistral mixtral": ModelType(_WINDOWED, NONE),
    "starcoder2": ModelType(_WINDOWED, ("use_bias",) * 4),
    "phi3 phi4_multimodal": ModelType(windowed(all_windowed, partial=True), NONE),
    "phimoe": ModelType(_WINDOWED, BY_KEY),
    "qwen3_moe": ModelType(_WINDOWED, BY_KEY, qk_norm=RMS),
    "qwen2": ModelType(_LAST_WINDOWED, QKV),
    "qwen2_moe": ModelType(
        windowed(where_local(lambda i, end: i % 2 == 0 and i < end, "max_window_layers")),
        (*("qkv_bias",) * 3, False),
    ),
    "dots1 qwen3": ModelType(_LAST_WINDOWED, BY_KEY, qk_norm=RMS),
    "ministral": ModelType(windowed(where_local(lambda i: True)), NONE),
    "gemma2": ModelType(
        windowed(cycle("LF")),
        BY_KEY,
        scale_key="query_pre_attn_scalar",
        ambiguous_keys=_BIDIRECTIONAL,
        same={"sliding_window_size": "sliding_window"},
    ),
    "vaultgemma": ModelType(windowed(cycle("LF")), BY_KEY, scale_key="query_pre_attn_scalar"),
    "gpt_oss": ModelType(windowed(cycle("LF")), BY_KEY, sinks=True),
    "cwm": ModelType(windowed(cycle("FLLL")), NONE),
    # With rope parameters by the kind of layers.
    "mellum": ModelType(windowed(cycle("F"), by_kind="required"), BY_KEY, qk_norm=RMS),
    "laguna": ModelType(windowed(cycle("F"), partial=True, by_kind="required"), GATE, qk_norm=RMS),
    "olmo3": ModelType(windowed(cycle("LLLF"), by_kind="read"), BY_KEY, qk_norm=PROJECTED),
    "gemma3_text": ModelType(
        Rotating(
            kinds=cycle("LLLLLF", "sliding_window_pattern"),
            window=_two_sided_window_of,
            bases=_BASES,
            by_kind="read",
        ),
        BY_KEY,
        qk_norm=GEMMA,
        scale_key="query_pre_attn_scalar",
    ),
    "gemma3n_text": ModelType(
        windowed(cycle("LLLLF"), bases=_BASES, by_kind="read"),
        "a norm of values, and keys that layers share",
        qk_norm=RMS,
        unused_scale_key="query_pre_attn_scalar",
        scale=unscaled,
    ),
    "gemma4_text gemma4_unified_text": ModelType(
        Rotating(kinds=_gemma4, window=_two_sided_window_of, by_kind="required"),
        "a norm of values, and heads whose size differs by layer",
        qk_norm=RMS,
        scale=unscaled,
    ),
    "mimo_v2_flash": ModelType(
        Rotating(partial=True, kinds=_mimo_v2, window=_mimo_v2_window, by_kind="required"),
        "values of another size than keys, and a factor on them",
        sinks=True,
        sinks_windowed_only=True,
    ),
    "modernbert": multi_head(
        _MODERNBERT,
        BY_KEY,
        causality="bidirectional",
        only={"position_embedding_type": ("absolute", "sans_pos")},  # mmBERT's; never used.
    ),
    "modernbert-decoder": multi_head(
        dataclasses.replace(_MODERNBERT, window=_modernbert_decoder_window), BY_KEY
    ),
    # Rotation in some layers.
    "afmoe": ModelType(
        windowed(cycle("LLLF", "global_attn_every_n_layers"), unrotated=(FULL,)), GATE, qk_norm=RMS
    ),
    "beam": ModelType(
        windowed(
            cycle("LLLLLF", last="F"),
            instead=QueryTemperature(form="beam", length=2048),
            by_kind="required",
        ),
        GATE,
        qk_norm=RMS,
    ),
    "cohere2": ModelType(
        windowed(cycle("LLLF", "sliding_window_pattern"), layout="interleaved", unrotated=(FULL,)),
        BY_KEY,
    ),
    "cohere2_moe": ModelType(
        windowed(_cohere2_moe, layout="interleaved", rotates=_dense_ones), BY_KEY
    ),
    "exaone4 exaone_moe": ModelType(windowed(_exaone4, rotates=_windowed_ones), NONE, qk_norm=RMS),
    "flint": ModelType(
        windowed(cycle("LFLL", first="F", last="F"), unrotated=(FULL,)),
        BY_KEY,
        qk_norm=RMS,
        sinks=True,
    ),
    "granite_swa granitemoe_swa": ModelType(
        windowed(cycle("FLLL"), rotates=_thetas),
        BY_KEY,
        sinks=True,
        scale_key="attention_multiplier",
    ),
    "kolibri1": ModelType(windowed(cycle("LLLLF"), rotates=_windowed_ones), BY_KEY, qk_norm=RMS),
    "llama4_text": ModelType(
        Rotating("interleaved", kinds=_llama4, rotates=rotating_flags, instead=_llama4_temperature),
        BY_KEY,
        qk_norm=QKNorm(scale="none", after_rotation=True),
        qk_norm_key="use_qk_norm",
        qk_norm_rotating_only=True,
    ),
    "muse_spark_text": ModelType(
        windowed(_muse_spark, rotates=_zero_thetas),
        "a norm and a gate on its output",
        qk_norm=QKNorm(scale="none"),
        scale=_muse_spark_scale,
    ),
    "smollm3": ModelType(windowed(_smollm3, rotates=rotating_flags), BY_KEY),
    # M-RoPE.
    "qwen2_vl_text qwen2_5_vl_text": ModelType(
        Multimodal(kinds=from_max_window_layers, sections=(16, 24, 24)), QKV
    ),
    "qwen3_vl_text qwen3_vl_moe_text": ModelType(
        Multimodal("interleaved", sections=(24, 20, 20)), BY_KEY, qk_norm=RMS
    ),
    "ernie4_5_vl_moe_text": ModelType(
        Multimodal("alternating", "interleaved", sections=(22, 22, 20), time_last=True),
        ("use_bias",) * 4,
    ),
}
