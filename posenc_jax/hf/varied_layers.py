"""Readers of the configs of model types whose layers differ, or whose keys are their own."""

import dataclasses

from posenc_jax.engine.mask import Window
from posenc_jax.hf import layer_kinds
from posenc_jax.hf.config_reader import TrackedConfig, head_size, layer_count
from posenc_jax.hf.layer_kinds import (
    FULL,
    LINEAR,
    LOCAL,
    MIXERS,
    STATE_SPACE,
    declared,
    every,
    layer_of,
    window_of,
)
from posenc_jax.hf.rope import pop_keys, read_rope, rope_dict
from posenc_jax.hf.rotary_families import Latent, Rotating, rotation, uniform
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.layer_spec import LayerSpec
from posenc_jax.schemes.rotary.scaling.interpolation import NTK

Layers = tuple[LayerSpec, ...]


def cohere2_moe(config: TrackedConfig) -> Layers:
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
    return _joined(config, kinds, schemes, window_of(config))


def _joined(config, kinds, schemes, window):
    pairs = zip(kinds, schemes, strict=True)
    return tuple(layer_of(config, kind, scheme, window) for kind, scheme in pairs)


def granite_swa(config: TrackedConfig) -> Layers:
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
    return _joined(config, kinds, schemes, window_of(config))


def _check_count(config, thetas, kinds):
    config.check(
        len(thetas) == len(kinds), f"{len(thetas)} layer_rope_theta for {len(kinds)} layers"
    )


def muse_spark(config: TrackedConfig) -> Layers:
    """Reads RoPE in layers whose `layer_rope_theta` is not 0."""
    settings, kinds = read_rope(config, rope_dict(config)), layer_kinds.muse_spark(config)
    rotating = rotation(config, settings, head_size(config))
    thetas = config.explicit("layer_rope_theta")
    if thetas is None:
        thetas = [(len(kinds) - 1 - i) % 4 and settings.theta for i in range(len(kinds))]
    config.check_ignored(
        {*thetas} <= {0, settings.theta}, f"layer_rope_theta={thetas} beside {settings.theta}"
    )
    _check_count(config, thetas, kinds)
    schemes = (rotating if theta else NoPE() for theta in thetas)
    return _joined(config, kinds, schemes, window_of(config))


def muse_spark_scale(config: TrackedConfig, layer: int) -> float | None:
    """Returns the factor on q . k: a factor on normalised queries, beside the usual one."""
    return config.need("qk_scale_factor") * head_size(config) ** -0.5


def granite_hybrid(config: TrackedConfig) -> Layers:
    """Reads RoPE or no positions in layers of attention, by `position_embedding_type`."""
    config.only("position_embedding_type", "rope", "nope")
    if config.get("position_embedding_type") == "rope":
        return Rotating(kinds=layer_kinds.granite_hybrid)(config)
    config.ignore("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    return tuple(layer_of(config, kind, NoPE()) for kind in layer_kinds.granite_hybrid(config))


def kolibri1(config: TrackedConfig) -> Layers:
    """Reads RoPE in layers with a window; in all layers if none has a window."""
    unrotated = (*MIXERS,) if config.get("sliding_window") is None else (FULL,)
    return Rotating(kinds=every(5), window=window_of, unrotated=unrotated)(config)


def jamba(config: TrackedConfig) -> Layers:
    """Reads attention without positions, and Mamba."""
    count, names = layer_count(config), ("attn_layer_period", "attn_layer_offset")
    period, offset = (config.need(name) for name in names)
    config.check(0 <= offset < period, f"attn_layer_period={period} and an offset of {offset}")
    kinds = [FULL if i % period == offset else STATE_SPACE for i in range(count)]
    written = [STATE_SPACE if kind == LINEAR else kind for kind in declared(config) or kinds]
    config.check_ignored(written == kinds, f"layer_types={written}")
    return tuple(layer_of(config, kind, NoPE()) for kind in kinds)


def olmo_hybrid(config: TrackedConfig) -> Layers:
    """Reads RoPE, or no positions if the base is null, and linear attention."""
    kinds, rope = layer_kinds.olmo_hybrid(config), rope_dict(config) or {}
    if rope.get("rope_theta", 0) is None:
        config.ignore("rope_theta")
        return tuple(layer_of(config, kind, NoPE()) for kind in kinds)
    return Rotating(kinds=layer_kinds.olmo_hybrid)(config)


def kimi_linear(config: TrackedConfig) -> Layers:
    """Reads latent attention without positions, and linear attention."""
    config.only("mla_use_nope", True)
    config.ignore("qk_nope_head_dim", "qk_rope_head_dim", "rope_theta", "rope_scaling")
    return tuple(layer_of(config, kind, NoPE()) for kind in layer_kinds.kimi_linear(config))


def hunyuan(config: TrackedConfig) -> Layers:
    """Reads RoPE, whose dynamic scaling is NTK of any length if the config has `alpha`."""
    rope, (alpha,) = pop_keys(config, "alpha")
    if not (alpha and rope.get("rope_type", rope.get("type")) == "dynamic"):
        config.check_ignored(not alpha, f"alpha={alpha}")
        return Rotating()(config)
    settings = read_rope(config, {n: x for n, x in rope.items() if n == "rope_theta"})
    settings = dataclasses.replace(settings, scaling=NTK(factor=float(alpha)))
    return uniform(config, rotation(config, settings, head_size(config)))


def glm4_moe_lite(config: TrackedConfig) -> Layers:
    """Reads latent attention, whose `head_dim` is the size of the rotary part."""
    size, dim = config.explicit("head_dim"), config.need("qk_rope_head_dim")
    config.check(size in (None, dim), f"head_dim={size} and qk_rope_head_dim={dim}")
    return Latent()(config)


def internlm3(config: TrackedConfig) -> Layers:
    """Reads RoPE. `qkv_bias` is another name of `attention_bias`."""
    bias, other = config.get("attention_bias"), config.explicit("qkv_bias")
    config.check(other in (None, bias), f"attention_bias={bias} and qkv_bias={other}")
    return Rotating()(config)


def longcat_flash(config: TrackedConfig) -> Layers:
    """Reads latent attention, twice in each layer."""
    layers = Latent(interleave=True)(config)
    if "num_hidden_layers" not in config.values:  # The key of its own is `num_layers`.
        return layers * 2
    config.check(len(layers) % 2 == 0, f"num_hidden_layers={len(layers)}, which must be even")
    return layers


def minimax_m3(config: TrackedConfig) -> Layers:
    """Reads RoPE on a part of each head, given by `partial_rotary_factor` and `rotary_dim`."""
    head_dim, dim = head_size(config), config.need("rotary_dim")
    settings = read_rope(config, rope_dict(config))
    config.check_ignored(
        int(head_dim * settings.fraction) == dim,
        f"rotary_dim={dim} beside partial_rotary_factor={settings.fraction} of {head_dim}",
    )
    return uniform(config, rotation(config, settings, head_dim, partial=True))


def mimo_v2(config: TrackedConfig) -> Layers:
    """Reads RoPE on a part of each head, with another base in layers with a window."""
    for kind, part in (config.explicit("rope_parameters") or {}).items():
        config.check(
            not isinstance(part, dict)
            or "partial_rotary_factor" in part
            or part.get("rope_type", part.get("type", "default")) == "default",
            f"no partial_rotary_factor in its {kind!r} rope parameters",
        )
    window = mimo_v2_window
    return Rotating(partial=True, kinds=layer_kinds.mimo_v2, window=window, by_kind_only=True)(
        config
    )


def mimo_v2_window(config: TrackedConfig) -> Window:
    """Returns the window: one more than `sliding_window_size`, the number of earlier tokens."""
    earlier, window = config.values.get("sliding_window_size"), config.values.get("sliding_window")
    config.read.update(("sliding_window_size", "sliding_window"))
    if earlier is None:
        return (
            config.need("sliding_window") if window is None else config.explicit("sliding_window")
        )
    config.check(
        type(earlier) is int and earlier >= 1 and window in (None, earlier, earlier + 1),
        f"sliding_window_size={earlier!r} and sliding_window={window!r}",
    )
    return earlier + 1


def modernbert_decoder_window(config: TrackedConfig) -> Window:
    """Returns half of `local_attention`, for a decoder."""
    half, window = config.need("local_attention") // 2, config.explicit("sliding_window")
    config.check_ignored(window in (None, half), f"sliding_window={window}")
    return half
