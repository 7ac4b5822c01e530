"""Model types with rotary attention in all layers, in some or, in a family, in none: one table.

Readers that only one row or one family needs precede the table: of layers with attention, of models
that have linear attention, convolutions or Mamba in some layers, and of latent attention.
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
    CONVOLUTION,
    EXPERTS,
    FULL,
    HYBRID,
    LINEAR,
    LOCAL,
    MLP,
    STATE_SPACE,
    all_global,
    all_windowed,
    cycle,
    declared,
    from_max_window_layers,
    layers_of,
    mamba,
    on_sides_of,
    uniform,
    where_local,
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
    multi_head,
    unscaled,
)
from posenc_jax.hf.rope import (
    RopeSettings,
    fraction_of,
    pop_keys,
    read_rope,
    refuse_by_length,
    rope_dict,
)
from posenc_jax.hf.rotary import (
    Latent,
    Multimodal,
    Rotating,
    latent_scale,
    rotating_flags,
    rotation,
    windowed,
    with_temperature,
)
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.combinators.chain import chain
from posenc_jax.schemes.layer_spec import LayerSpec
from posenc_jax.schemes.logit_scale.ssmax import SSMax
from posenc_jax.schemes.logit_scale.temperature import QueryTemperature
from posenc_jax.schemes.rotary.learned_rope import LearnedRoPE
from posenc_jax.schemes.rotary.rope import RoPE
from posenc_jax.schemes.rotary.scaling.interpolation import NTK
from posenc_jax.schemes.rotary.vo_rope import VORoPE
from posenc_jax.schemes.scheme import Scheme

# Kinds of layers.


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
    """Reads chunks for the layers that rotate, if chunks have a size."""
    chunked = FULL if config.get("attention_chunk_size") is None else CHUNKED
    config.only("nope_layer_interval", 4)  # Beside the default of no_rope_layers.
    return declared(config) or [chunked if x else FULL for x in rotating_flags(config)]


def _dory(config: TrackedConfig) -> list[str]:
    """Reads a pattern; releases count each MLP as a layer, with "mlp" as its kind."""
    kinds = cycle("LLLF")(config)
    return kinds[::2] if MLP in kinds else kinds


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
    names = "alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"  # Releases'.
    settings = read_rope(config, pop_keys(config, *names, default="dynamic")[0])
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
    theta, used = config.explicit("rope_theta"), config.get("rotary_emb_base")
    used = rope.get("rope_theta", used)
    config.check(
        theta in (None, used),
        f"rope_theta={theta}, which transformers ignores for its type; the base is "
        f"rotary_emb_base={used}",
    )
    return read_rope(config, rope, "rotary_emb_base")


def _rotary_dim(config: TrackedConfig, rope: dict[str, Any], base: str) -> RopeSettings:
    """Reads the number of dimensions that rotate, `rotary_dim`."""
    dim, head_dim = config.explicit("rotary_dim"), head_size(config)
    settings = read_rope(config, rope)
    if dim is None:
        return settings
    config.check(
        settings.fraction in (1.0, dim / head_dim, fraction_of(dim, head_dim)),
        f"rotary_dim={dim} and partial_rotary_factor={settings.fraction} for a head of {head_dim}",
    )
    return dataclasses.replace(settings, fraction=fraction_of(dim, head_dim))


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
    part = config.part("attn_config")
    theta, other = part.get("rope_theta"), rope.get("rope_theta")
    part.finish()
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


def _ministral3(config: TrackedConfig) -> Layers:
    """Reads RoPE with YaRN, and a temperature on queries."""
    head_dim = head_size(config)
    scheme = with_temperature(config, lambda settings: rotation(config, settings, head_dim))
    kinds = all_windowed(config)
    return layers_of(config, kinds, [scheme] * len(kinds), window_of(config))


# Settings of attention.


def _unit_norm(config: TrackedConfig) -> QKNorm:
    """Returns the norm to vectors of length sqrt(H); the model's have length 1."""
    return QKNorm(scale="none", epsilon=1e-6 / head_size(config))


def _unit_scale(config: TrackedConfig, layer: int) -> float:
    """Returns the factor on q . k, 1/sqrt(H) for vectors of length 1."""
    return head_size(config) ** -1.5


def _muse_spark_scale(config: TrackedConfig, layer: int) -> float | None:
    """Returns the factor on q . k: qk_scale_factor / sqrt(H), for normalised queries."""
    return config.need("qk_scale_factor") * head_size(config) ** -0.5


# Linear attention, convolutions or Mamba in some layers.


def _lfm2(config: TrackedConfig) -> list[str]:
    """Reads full attention for layers in `full_attn_idxs`, convolutions for the others."""
    count, indices = layer_count(config), config.explicit("full_attn_idxs")
    full = range(count) if indices is None else indices
    return declared(config) or [FULL if i in full else CONVOLUTION for i in range(count)]


def _lfm2_moe(config: TrackedConfig) -> list[str]:
    """Reads `layer_types`, which have no default."""
    config.need("layer_types")
    return cycle("F")(config)


def _granite_hybrid(config: TrackedConfig) -> list[str]:
    """Reads Mamba for all layers without `layer_types`."""
    config.only("position_embedding_type", "rope", "nope")
    return mamba(cycle("N")(config))


def _jamba(config: TrackedConfig) -> list[str]:
    """Reads attention for one layer of each period."""
    period, offset = (config.need(f"attn_layer_{x}") for x in ("period", "offset"))
    config.check(0 <= offset < period, f"attn_layer_period={period} and an offset of {offset}")
    return _fixed(config, lambda i: i % period == offset)


def _bamba(config: TrackedConfig) -> list[str]:
    """Reads full attention for layers in `attn_layer_indices`."""
    config.implied("attn_rotary_emb", head_size(config) // 2)
    indices = config.explicit("attn_layer_indices") or ()
    return _fixed(config, lambda i: i in indices)


def _fixed(config, full):
    """Returns full attention or Mamba, which `layer_types` must equal."""
    kinds = [FULL if full(i) else STATE_SPACE for i in range(layer_count(config))]
    written = mamba(declared(config) or kinds)
    config.check_ignored(written == kinds, f"layer_types={written}")
    return kinds


_NEMOTRON_H = {"M": STATE_SPACE, "*": FULL, "-": MLP, "E": EXPERTS}


def _nemotron_h(config: TrackedConfig) -> list[str]:
    """Reads attention, Mamba, and MLPs and experts in layers of their own, by letters."""
    config.ignore("rope_theta", "partial_rotary_factor")  # Releases have them without effect.
    pattern, kinds = config.explicit("hybrid_override_pattern"), config.explicit("layer_types")
    if kinds is not None:
        config.check_ignored(pattern is None, "hybrid_override_pattern beside layer_types")
        return mamba(cycle("F")(config))
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
    return [_NEMOTRON_H[letter] for letter in pattern]


def _zamba(config: TrackedConfig) -> list[str]:
    """Reads attention before some of the layers of Mamba."""
    period, offset = (config.need(f"attn_layer_{x}") for x in ("period", "offset"))
    count = layer_count(config)
    later = [HYBRID if i % period == offset else STATE_SPACE for i in range(count - 3)]
    return mamba(declared(config) or [STATE_SPACE, STATE_SPACE, HYBRID, *later][:count])


def _recurrent_gemma(config: TrackedConfig) -> list[str]:
    """Reads sliding attention or RG-LRU, by the pattern in `block_types`."""
    blocks, count = config.need("block_types"), layer_count(config)
    config.check({*blocks} <= {"attention", "recurrent"}, f"block_types {sorted({*blocks})}")
    names = [blocks[i % len(blocks)] for i in range(count)]
    config.implied("layer_types", names)
    return [LOCAL if name == "attention" else STATE_SPACE for name in names]


def _minimax(config: TrackedConfig) -> list[str]:
    """Reads linear attention for every second layer; others have the window if there is one."""
    kinds = cycle("FN")(config)
    config.check({*kinds} <= {FULL, LINEAR}, f"layer_types={sorted({*kinds})}")
    local = FULL if window_of(config) is None else LOCAL
    return [local if kind == FULL else kind for kind in kinds]


def _olmo_hybrid(config: TrackedConfig) -> list[str]:
    """Reads a pattern in which some layer has full attention."""
    kinds = cycle("NNNF")(config)
    return kinds if FULL in kinds else [*kinds[:-1], FULL]


def _kimi_linear(config: TrackedConfig) -> list[str]:
    """Reads linear attention, and full attention by lists that count from 1."""
    config.only("mla_use_nope", True)
    config.ignore("qk_nope_head_dim", "qk_rope_head_dim", "rope_theta", "rope_scaling")
    count, kinds = layer_count(config), declared(config)
    part = config.part("linear_attn_config")
    full, linear = part.explicit("full_attn_layers"), part.explicit("kda_layers")
    if full is None or linear is None:
        return kinds or [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    part.check(
        sorted([*full, *linear]) == [*range(1, count + 1)],
        f"full_attn_layers={full} and kda_layers={linear}, which are not {count} layers from 1 on",
    )
    by_lists = [FULL if i + 1 in full else LINEAR for i in range(count)]
    config.check(kinds in (None, by_lists), f"layer_types={kinds} and linear_attn_config")
    return by_lists


def _unless_nope(config: TrackedConfig, kinds: list[str]) -> list[bool]:
    """Returns True for each layer; empty if the config switches RoPE off."""
    return [True] * len(kinds) if config.get("position_embedding_type") == "rope" else []


def _unless_null(config: TrackedConfig, kinds: list[str]) -> list[bool]:
    """Returns True for each layer; empty if the base is null."""
    rope = rope_dict(config) or {}
    return [] if rope.get("rope_theta", 0) is None else [True] * len(kinds)


def _half_rotary(config: TrackedConfig) -> Layers:
    """Reads RoPE on half of a head, unless the rotary dict has another part."""
    config.implied("partial_rotary_factor", 0.5)
    return Rotating(partial=True, kinds=_bamba)(config.without("partial_rotary_factor"))


_ZAMBA2 = {*range(6, 48, 6), 47, 51}  # The layers with attention of 54.


def _zamba2(config: TrackedConfig) -> Layers:
    """Reads attention with or without RoPE before some of the layers of Mamba."""
    count = layer_count(config)
    kinds = mamba(declared(config) or [HYBRID if i in _ZAMBA2 else LINEAR for i in range(count)])
    config.check(
        config.explicit("layer_types") is not None or count == 54,
        f"{count} layers and no layers_block_type",
    )
    config.check(
        not config.get("use_long_context", False),
        "use_long_context, for which transformers 4 changes the base and transformers 5 does not",
    )
    head_dim = _zamba_head_size(config)
    config.implied("attention_head_dim", head_dim)
    if not config.get("use_mem_rope", False):
        config.ignore("rope_parameters", "rope_scaling", "rope_theta")
        return without_positions(lambda _: kinds)(config)
    scheme = rotation(config, read_rope(config), head_dim)
    return layers_of(config, kinds, [scheme] * len(kinds))


def _zamba_scale(config: TrackedConfig, layer: int) -> float:
    """Returns the factor on q . k, of half of the head dim."""
    head_dim = config.explicit("attention_head_dim") or _zamba_head_size(config)
    return (head_dim / 2) ** -0.5


def _zamba_head_size(config: TrackedConfig) -> int:
    """Returns the head dim of queries and keys, whose input has twice the hidden size."""
    dim, heads = 2 * config.need("hidden_size"), config.need("num_attention_heads")
    config.check(dim % heads == 0, f"{heads} heads, which do not divide {dim}, twice hidden_size")
    return dim // heads


# Multi-head latent attention.


_BY_RATIO = {0: LOCAL, 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
_LABELS = "main", "compress"


def _deepseek_v4(config: TrackedConfig) -> Layers:
    """Reads RoPE on q, k and v, with another base in compressing layers.

    Every layer has the window. A compressing layer also attends to compressed entries, whose keys
    and values the same scheme rotates by the position of their first token.
    """
    rope = rope_dict(config) or {}
    if any(label in rope for label in _LABELS):
        config.check(
            set(rope) - {"rope_type", "type"} == {*_LABELS},
            f"rope parameters for {sorted(rope)}; wanted those of {_LABELS}",
        )
        parts = {label: rope[label] for label in _LABELS}
        for label, part in parts.items():
            config.check(
                isinstance(part, dict) and part.get("partial_rotary_factor") is not None,
                f"no partial_rotary_factor in its {label!r} rope parameters",
            )
    else:
        theta, compress_theta = rope.get("rope_theta"), config.get("compress_rope_theta")
        config.check(
            theta in (None, compress_theta, config.explicit("rope_theta")),
            f"rope_theta={theta} in its rope parameters, for which transformers takes "
            f"compress_rope_theta={compress_theta}; give rope parameters for each of {_LABELS}",
        )
        kind = rope.get("rope_type", rope.get("type"))
        rope = rope | {"rope_theta": compress_theta}
        config.implied("compress_rope_parameters", rope)
        compress = {"attention_factor": 1.0} | rope if kind == "yarn" else rope
        parts = {"main": {}, "compress": compress}
    config.check_ignored(
        all(part.get("truncate", True) for part in parts.values()), "truncate=false"
    )
    main = _deepseek_v4_scheme(config, parts["main"], "rope_theta")
    compress = _deepseek_v4_scheme(config, parts["compress"], "compress_rope_theta")
    window = config.need("sliding_window")
    schemes = (main if kind == LOCAL else compress for kind in _deepseek_v4_kinds(config))
    return tuple(LayerSpec(scheme, window) for scheme in schemes)


def _deepseek_v4_scheme(config: TrackedConfig, part: dict[str, Any], base: str) -> Scheme:
    """Returns RoPE on the last dimensions of q, k and v."""
    kind = part.get("rope_type", part.get("type"))
    config.check(kind != "proportional", f"rope_type={kind!r}, which is not supported for its type")
    settings, head_dim = read_rope(config, part, base=base), head_size(config)
    refuse_by_length(config, settings.scaling)
    dim, fraction = config.explicit("qk_rope_head_dim"), config.explicit("partial_rotary_factor")
    fraction = part.get("partial_rotary_factor", fraction)
    config.check(
        None in (dim, fraction) or int(head_dim * fraction) == dim,
        f"qk_rope_head_dim={dim} and partial_rotary_factor={fraction} for a head of {head_dim}",
    )
    if fraction is None:
        fraction = config.defaults["partial_rotary_factor"]
    dim = int(head_dim * fraction) if dim is None else dim
    rest = config.explicit("qk_nope_head_dim")
    config.check(rest in (None, head_dim - dim), f"qk_nope_head_dim={rest} beside {dim} dimensions")
    config.only("rope_interleave", True)
    return VORoPE(
        head_dim=head_dim,
        theta=settings.theta,
        layout="interleaved",
        rotary_dim=dim,
        rotary_start=head_dim - dim,
        scaling=settings.scaling,
    )


def _deepseek_v4_kinds(config: TrackedConfig) -> list[str]:
    """Returns the kind of each layer: `layer_types`, else `compress_ratios` as released."""
    count, kinds = layer_count(config), config.explicit("layer_types")
    ratios = config.explicit("compress_ratios")
    if ratios is not None:
        unknown = sorted(set(ratios) - set(_BY_RATIO))
        config.check(not unknown, f"compress_ratios {unknown}; known: {[*_BY_RATIO]}")
        by_ratio = [_BY_RATIO[ratio] for ratio in ratios]
        config.check(
            kinds is None or kinds[:count] == by_ratio[:count],
            "layer_types and compress_ratios that contradict each other",
        )
        kinds = by_ratio
    if kinds is None:
        kinds = [_BY_RATIO[128]] * 2 + [_BY_RATIO[4 if i % 2 else 128] for i in range(count)]
    kinds = kinds[:count]
    config.check_count("layer_types", kinds, count)
    unknown = sorted(set(kinds) - set(_BY_RATIO.values()))
    config.check(not unknown, f"layer_types {unknown}")
    return kinds


def _longcat_flash(config: TrackedConfig) -> Layers:
    """Reads latent attention, twice in each layer."""
    layers = Latent(interleave=True)(config)
    if "num_hidden_layers" not in config.values:  # The key of its own is `num_layers`.
        return layers * 2
    config.check(len(layers) % 2 == 0, f"num_hidden_layers={len(layers)}, which must be even")
    return layers


def _mistral_large4(config: TrackedConfig) -> Layers:
    """Reads learned frequencies in three layers of four, and a learned logit scale in all."""
    settings = read_rope(config)
    logit_scale = SSMax(num_heads=config.need("num_attention_heads"), scale=0.0, offset=1.0)
    rotating = LearnedRoPE(**Latent(interleave=True).fields(config, settings))
    schemes = chain(rotating, logit_scale), logit_scale
    kinds, flags = all_global(config), rotating_flags(config)
    return layers_of(config, kinds, (schemes[not flag] for flag in flags))


_ROPE, _PARTIAL, _INTERLEAVED = Rotating(), Rotating(partial=True), Rotating("interleaved")
_WINDOWED, _LAST_WINDOWED = windowed(all_windowed), windowed(from_max_window_layers)
_BIDIRECTIONAL = ("use_bidirectional_attention",)
_BASES = ((FULL, "rope_theta"), (LOCAL, "rope_local_base_freq"))
_UNSCALED_NORM = QKNorm(scale="none", after_rotation=True)
_MODERNBERT = Rotating(
    kinds=cycle("FLL", "global_attn_every_n_layers"),
    window=lambda config: (config.need("local_attention") // 2,) * 2,
    bases=((FULL, "global_rope_theta"), (LOCAL, "local_rope_theta")),
    scaled=(FULL, LOCAL),
    by_kind="read",
)
_NEVER_USED = {"position_embedding_type": ("absolute", "sans_pos")}  # mmBERT has the second.
_COHERE2 = {"position_embedding_type": ("rope_gptj",), "rotary_pct": (1.0,)}
_LINEAR_BUT_4TH = cycle("NNNF", "full_attention_interval")
_QWEN3_5 = Multimodal("interleaved", kinds=_LINEAR_BUT_4TH, sections=(11, 11, 10), partial=True)
_TWICE_AS_WIDE = "inputs of twice the width of its outputs"
_GATED = f"{LATENT}, and {GATE}"


def _latent(layers: Any, lacks: str = LATENT, **settings: Any) -> ModelType:
    return ModelType(layers, lacks, scale=latent_scale, **settings)


ROWS: dict[str, ModelType] = {
    # Alike in all layers.
    "arcee aria_text exaone granite granitemoe granitemoeshared iquestcoder jais2 llama": ModelType(
        _ROPE
    ),
    "emu3_text_model": ModelType(_ROPE, BY_KEY),
    "apertus apertus1p5_text hy_v3": ModelType(_ROPE, qk_norm=RMS),
    "bitnet": ModelType(_ROPE, "a norm before the output projection"),
    "eurobert": ModelType(_ROPE, causality="bidirectional"),
    "gte jina_embeddings_v3": multi_head(_ROPE, causality="bidirectional"),
    "esmc": ModelType(
        _ROPE,
        BY_KEY,
        qk_norm=lambda config: QKNorm("layer", over="projection", scale="per_head", epsilon=1e-5),
        causality="bidirectional",
    ),
    "gemma": ModelType(_ROPE, ambiguous_keys=_BIDIRECTIONAL),
    "hyperclovax": ModelType(_ROPE, scale_key="attention_multiplier"),
    "hunyuan_v1_dense hunyuan_v1_moe": ModelType(
        Rotating(settings=_alpha),
        qk_norm=QKNorm(after_rotation=True),
        only={"use_rotary_pos_emb": (True,)},
    ),
    "internlm3": ModelType(_ROPE, same={"qkv_bias": "attention_bias"}),
    "olmo": ModelType(_ROPE, clips_projections=True),
    "flex_olmo olmo2": ModelType(_ROPE, qk_norm=PROJECTED),
    "olmoe": ModelType(_ROPE, qk_norm=PROJECTED, clips_projections=True),
    "nanochat": ModelType(Rotating("half_negative"), qk_norm=_UNSCALED_NORM),
    "nomic_bert": ModelType(
        Rotating(settings=_nomic),
        causality="bidirectional",
        key_heads=as_many_key_heads,
        only={"rotary_emb_fraction": (1.0,), "rotary_emb_interleaved": (False,)},
    ),
    "seed_oss": ModelType(_ROPE, (*("attention_bias",) * 3, "attention_out_bias")),
    "ministral3": ModelType(_ministral3),
    "dbrx": ModelType(
        Rotating(settings=_dbrx),
        key_heads=lambda config, num_heads: config.part("attn_config").get("kv_n_heads", 1),
        ignores_head_dim=True,
        clips_projections=True,
    ),
    # On a part of each head.
    "persimmon": multi_head(_PARTIAL, qk_norm=WITH_BIAS),
    "phi": ModelType(_PARTIAL, ALL, qk_norm=WITH_BIAS),
    "stablelm": ModelType(_PARTIAL, (*("use_qkv_bias",) * 3, False), qk_norm=PER_HEAD),
    "glm4_moe sarvam_moe": ModelType(_PARTIAL, QKV_BY_KEY, qk_norm=RMS),
    "nemotron": ModelType(_PARTIAL),
    "solar_open": ModelType(_PARTIAL, QKV_BY_KEY),
    "gpt_neox": multi_head(Rotating(partial=True, settings=_gpt_neox), BY_KEY),
    "gpt_neox_japanese": multi_head(  # Its block adds the bias of the output.
        Rotating(partial=True, settings=_gpt_neox), NONE
    ),
    "minimax_m2": ModelType(Rotating(partial=True, settings=_rotary_dim), qk_norm=PROJECTED),
    "minimax_m3_vl_text": ModelType(
        Rotating(partial=True, settings=_both_parts), "blocks of keys", qk_norm=GEMMA
    ),
    "glm glm4": ModelType(Rotating("interleaved", partial=True), QKV_BY_KEY),
    # Pairs of neighbours.
    "cohere": ModelType(_INTERLEAVED, qk_norm=PER_HEAD),
    "ernie4_5 ernie4_5_moe": ModelType(_INTERLEAVED),
    "helium": ModelType(_INTERLEAVED, QKV_BY_KEY),
    "roformer": multi_head(_roformer, causality="is_decoder", only={"rotary_value": (False,)}),
    "codegen gptj": multi_head(
        lambda config: _roformer(config, config.get("rotary_dim")), NONE, only={"rotary": (True,)}
    ),
    # A window in some or all layers.
    "mistral mixtral phimoe starcoder2": ModelType(_WINDOWED),
    "phi3 phi4_multimodal": ModelType(windowed(all_windowed, partial=True)),
    "qwen3_moe": ModelType(_WINDOWED, qk_norm=RMS),
    "qwen2": ModelType(_LAST_WINDOWED, QKV),
    "qwen2_moe": ModelType(
        windowed(where_local(lambda i, end: i % 2 == 0 and i < end, "max_window_layers")),
        (*("qkv_bias",) * 3, False),
    ),
    "dots1 qwen3": ModelType(_LAST_WINDOWED, qk_norm=RMS),
    "ministral": ModelType(windowed(where_local(lambda i: True))),
    "gemma2": ModelType(
        windowed(cycle("LF")),
        ambiguous_keys=_BIDIRECTIONAL,
        same={"sliding_window_size": "sliding_window"},
    ),
    "vaultgemma": ModelType(windowed(cycle("LF"))),
    "gpt_oss": ModelType(windowed(cycle("LF")), sinks=True),
    "cwm": ModelType(windowed(cycle("FLLL"))),
    # With rope parameters by the kind of layers.
    "mellum": ModelType(windowed(cycle("F"), by_kind="required"), qk_norm=RMS),
    "laguna": ModelType(windowed(cycle("F"), partial=True, by_kind="required"), GATE, qk_norm=RMS),
    "olmo3": ModelType(windowed(cycle("LLLF"), by_kind="read"), qk_norm=PROJECTED),
    "dory": ModelType(
        windowed(_dory, by_kind="required"),
        "learned factors on rotated queries, and a gate and a norm on its output",
        qk_norm=_unit_norm,
        scale=_unit_scale,
    ),
    "gemma3_text": ModelType(
        Rotating(
            kinds=cycle("LLLLLF", "sliding_window_pattern"),
            window=_two_sided_window_of,
            bases=_BASES,
            by_kind="read",
        ),
        qk_norm=GEMMA,
    ),
    "gemma3n_text": ModelType(
        windowed(cycle("LLLLF"), bases=_BASES, by_kind="read"),
        "a norm of values, and keys that layers share",
        qk_norm=RMS,
        unused_scale_key="query_pre_attn_scalar",
        scale=unscaled,
    ),
    "gemma4_text gemma4_unified_text": ModelType(
        # The last layer is global, even if `layer_types` differs.
        Rotating(
            kinds=lambda config: [*cycle("LLLLLF")(config)[:-1], FULL],
            window=_two_sided_window_of,
            by_kind="required",
        ),
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
    "modernbert": multi_head(_MODERNBERT, BY_KEY, causality="bidirectional", only=_NEVER_USED),
    "modernbert-decoder": multi_head(
        dataclasses.replace(_MODERNBERT, window=_modernbert_decoder_window),
        BY_KEY,
        only=_NEVER_USED,
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
        only=_COHERE2,
    ),
    "cohere2_moe": ModelType(
        windowed(_cohere2_moe, layout="interleaved", rotates=_dense_ones), only=_COHERE2
    ),
    "exaone4 exaone_moe": ModelType(windowed(_exaone4, rotates=_windowed_ones), qk_norm=RMS),
    "flint": ModelType(
        windowed(cycle("LFLL", first="F", last="F"), unrotated=(FULL,)), qk_norm=RMS, sinks=True
    ),
    "granite_swa granitemoe_swa": ModelType(windowed(cycle("FLLL"), rotates=_thetas), sinks=True),
    "kolibri1": ModelType(windowed(cycle("LLLLF"), rotates=_windowed_ones), BY_KEY, qk_norm=RMS),
    "lara_mini": ModelType(windowed(cycle("NLNFL"), unrotated=(FULL, LINEAR)), qk_norm=RMS),
    "llama4_text": ModelType(
        Rotating("interleaved", kinds=_llama4, rotates=rotating_flags, instead=_llama4_temperature),
        qk_norm=_UNSCALED_NORM,
        qk_norm_rotating_only=True,
    ),
    "muse_spark_text": ModelType(
        windowed(_muse_spark, rotates=_zero_thetas),
        "a norm and a gate on its output",
        qk_norm=QKNorm(scale="none"),
        scale=_muse_spark_scale,
    ),
    "smollm3": ModelType(windowed(_smollm3, rotates=rotating_flags)),
    # M-RoPE.
    "qwen2_vl_text qwen2_5_vl_text": ModelType(
        Multimodal(kinds=from_max_window_layers, sections=(16, 24, 24)), QKV
    ),
    "qwen3_vl_text qwen3_vl_moe_text": ModelType(
        Multimodal("interleaved", sections=(24, 20, 20)), qk_norm=RMS
    ),
    "ernie4_5_vl_moe_text": ModelType(
        Multimodal("alternating", "interleaved", sections=(22, 22, 20), time_last=True)
    ),
    # Linear attention, convolutions or Mamba in some layers.
    "qwen3_next": ModelType(Rotating(partial=True, kinds=_LINEAR_BUT_4TH), GATE, qk_norm=GEMMA),
    "qwen3_5_text qwen3_5_moe_text": ModelType(_QWEN3_5, GATE, qk_norm=GEMMA),
    "qwen4_exp_text": ModelType(
        _QWEN3_5, f"keys that an indexer selects, and {GATE}", qk_norm=GEMMA
    ),
    "bamba": ModelType(_half_rotary),
    "granitemoehybrid": ModelType(Rotating(kinds=_granite_hybrid, rotates=_unless_nope)),
    "jamba": ModelType(without_positions(_jamba)),
    "lfm2": ModelType(Rotating(kinds=_lfm2), qk_norm=RMS),
    "lfm2_moe": ModelType(Rotating(kinds=_lfm2_moe), qk_norm=RMS),
    "minimax": ModelType(windowed(_minimax)),
    "nemotron_h": ModelType(without_positions(_nemotron_h), NONE),
    "olmo_hybrid": ModelType(Rotating(kinds=_olmo_hybrid, rotates=_unless_null), qk_norm=PROJECTED),
    "zamba": ModelType(without_positions(_zamba), _TWICE_AS_WIDE, scale=_zamba_scale),
    "zamba2": ModelType(_zamba2, _TWICE_AS_WIDE, scale=_zamba_scale),
    "recurrent_gemma": ModelType(
        Rotating(
            partial=True,
            kinds=_recurrent_gemma,
            window=lambda config: on_sides_of(config, config.need("attention_window_size")),
        ),
        (*("attention_bias",) * 3, True),
    ),
    "lfm3": ModelType(windowed(cycle("LCFC", first="C"), by_kind="required"), GATE, qk_norm=RMS),
    "kimi_linear": ModelType(without_positions(_kimi_linear), LATENT),
    # Multi-head latent attention.
    "deepseek_v2": _latent(Latent(interleave=True, in_place=True)),
    "axk1 deepseek_v3 mistral4 sarvam_mla youtu": _latent(Latent()),
    "glm4_moe_lite": _latent(Latent(), same={"head_dim": "qk_rope_head_dim"}),
    "deepseek_v32 glm_moe_dsa": _latent(Latent(interleave=True)),
    "axk2": _latent(Latent(interleave=True), _GATED),
    "hy_v4": _latent(Latent(interleave=False), _GATED, sinks=True),
    "minicpm3": _latent(Latent(interleave=False)),
    "bailing_hybrid": _latent(
        Latent(interleave=True, kinds=cycle("NNNNNF", "layer_group_size")), _GATED
    ),
    "longcat_flash": _latent(_longcat_flash),
    "mistral_large4_text": _latent(_mistral_large4),
    "deepseek_v4": ModelType(
        _deepseek_v4,
        "one array for keys and values, and compressed entries",
        sinks=True,
        only={"use_sliding_window": (True,)},
    ),
}
