"""Model types with linear attention, convolutions or Mamba in some layers.

Readers that only one row or one family needs precede the table.
"""

from posenc_jax.hf.config_reader import TrackedConfig, head_size, layer_count
from posenc_jax.hf.layer_kinds import (
    CONVOLUTION,
    EXPERTS,
    FULL,
    HYBRID,
    LINEAR,
    LOCAL,
    MLP,
    STATE_SPACE,
    cycle,
    declared,
    layers_of,
    mamba,
    on_sides_of,
    window_of,
    without_positions,
)
from posenc_jax.hf.model_type import (
    BY_KEY,
    GATE,
    GEMMA,
    LATENT,
    NONE,
    PROJECTED,
    RMS,
    Layers,
    ModelType,
)
from posenc_jax.hf.rope import read_rope, rope_dict
from posenc_jax.hf.rotary import Multimodal, Rotating, rotation, windowed


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
    kinds = {"attention": LOCAL, "recurrent": STATE_SPACE}
    return [kinds[blocks[i % len(blocks)]] for i in range(count)]


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
    if kinds is None and (full is None or linear is None):
        kinds = [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    if kinds is None:
        part.check(
            sorted([*full, *linear]) == [*range(1, count + 1)],
            f"full_attn_layers={full} and kda_layers={linear}, which are not {count} layers from "
            "1 on",
        )
        kinds = [FULL if i + 1 in full else LINEAR for i in range(count)]
    return kinds


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
    dim, heads = config.need("hidden_size"), config.need("num_attention_heads")
    config.implied("attention_head_dim", 2 * dim // heads)
    if not config.get("use_mem_rope", False):
        config.ignore("rope_parameters", "rope_scaling", "rope_theta")
        return without_positions(lambda _: kinds)(config)
    scheme = rotation(config, read_rope(config), 2 * dim // heads)
    return layers_of(config, kinds, [scheme] * len(kinds))


def _zamba_scale(config: TrackedConfig, layer: int) -> float:
    """Returns the factor on q . k, of half of the head dim."""
    dim, heads = config.need("hidden_size"), config.need("num_attention_heads")
    return (config.get("attention_head_dim", 2 * dim // heads) / 2) ** -0.5


_LINEAR_BUT_4TH = cycle("NNNF", "full_attention_interval")
_QWEN3_5 = Multimodal("interleaved", kinds=_LINEAR_BUT_4TH, sections=(11, 11, 10), partial=True)
_TWICE_AS_WIDE = "inputs of twice the width of its outputs"

ROWS: dict[str, ModelType] = {
    "qwen3_next": ModelType(Rotating(partial=True, kinds=_LINEAR_BUT_4TH), GATE, qk_norm=GEMMA),
    "qwen3_5_text qwen3_5_moe_text": ModelType(_QWEN3_5, GATE, qk_norm=GEMMA),
    "qwen4_exp_text": ModelType(
        _QWEN3_5, f"keys that an indexer selects, and {GATE}", qk_norm=GEMMA
    ),
    "bamba": ModelType(_half_rotary, BY_KEY),
    "granitemoehybrid": ModelType(
        Rotating(kinds=_granite_hybrid, rotates=_unless_nope),
        BY_KEY,
        scale_key="attention_multiplier",
    ),
    "jamba": ModelType(without_positions(_jamba), NONE),
    "lfm2": ModelType(Rotating(kinds=_lfm2), NONE, qk_norm=RMS),
    "lfm2_moe": ModelType(Rotating(kinds=_lfm2_moe), NONE, qk_norm=RMS),
    "minimax": ModelType(windowed(_minimax), NONE),
    "nemotron_h": ModelType(without_positions(_nemotron_h), NONE),
    "olmo_hybrid": ModelType(
        Rotating(kinds=_olmo_hybrid, rotates=_unless_null), BY_KEY, qk_norm=PROJECTED
    ),
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
}
