"""Model types with multi-head latent attention, and DeepSeek-V4.

Readers that only one row or one family needs precede the table.
"""

import dataclasses
from typing import Any

from posenc_jax.hf.config_reader import TrackedConfig, head_size, layer_count
from posenc_jax.hf.layer_kinds import LOCAL, LayerKinds, all_global, cycle, layer_of, layers_of
from posenc_jax.hf.model_type import GATE, LATENT, Layers, ModelType
from posenc_jax.hf.rope import RopeSettings, read_rope, refuse_by_length, rope_dict
from posenc_jax.hf.rotary import rotating_flags, with_temperature
from posenc_jax.schemes.combinators.chain import chain
from posenc_jax.schemes.layer_spec import LayerSpec
from posenc_jax.schemes.logit_scale.ssmax import SSMax
from posenc_jax.schemes.rotary.learned_rope import LearnedRoPE
from posenc_jax.schemes.rotary.rope import RoPE
from posenc_jax.schemes.rotary.scaling.yarn import yarn_logit_scale
from posenc_jax.schemes.rotary.vo_rope import VORoPE
from posenc_jax.schemes.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class Latent:
    """Reads multi-head latent attention: the last dimensions of a query and a key rotate.

    Attributes:
      interleave: whether pairs are neighbours; None: the config says.
      in_place: whether rotated pairs stay neighbours; the logits are the same.
      kinds: the kind of each layer.
    """

    interleave: bool | None = None
    in_place: bool = False
    kinds: LayerKinds = all_global

    def __call__(self, config: TrackedConfig) -> tuple[LayerSpec, ...]:
        """Returns RoPE on the end of a head, and a temperature if the config has one."""
        scheme = with_temperature(config, lambda settings: RoPE(**self.fields(config, settings)))
        return tuple(layer_of(config, kind, scheme) for kind in self.kinds(config))

    def fields(self, config: TrackedConfig, settings: RopeSettings) -> dict[str, Any]:
        """Returns the fields of RoPE."""
        refuse_by_length(config, settings.scaling)
        start, dim = config.need("qk_nope_head_dim"), config.need("qk_rope_head_dim")
        config.ignore("head_dim")
        config.check(
            settings.fraction in (1.0, dim / (start + dim)),
            f"partial_rotary_factor={settings.fraction}, and a rotary part of {dim} out of "
            f"{start + dim} dimensions",
        )
        interleave = self.interleave
        if interleave is None:
            # DeepSeek-V3.2 has no such key; null is false.
            interleave = config.get("rope_interleave", "rope_interleave" not in config.defaults)
        else:
            config.only("rope_interleave", interleave)
        layout = "interleaved" if self.in_place else "interleaved_to_half"
        out = {"head_dim": start + dim, "rotary_start": start, "theta": settings.theta}
        return out | {"layout": layout if interleave else "half", "scaling": settings.scaling}


def latent_scale(config: TrackedConfig, layer: int) -> float | None:
    """Returns the factor on q . k of multi-head latent attention with DeepSeek's YaRN."""
    rope = TrackedConfig(rope_dict(config) or {}, f"{config.label} in its rope parameters")
    mscale = rope.get("mscale_all_dim")
    if not mscale:
        return None
    size = config.need("qk_nope_head_dim") + config.need("qk_rope_head_dim")
    return yarn_logit_scale(size, rope.need("factor"), mscale)


_KINDS = {0: LOCAL, 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
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
    main = _scheme(config, parts["main"], "rope_theta")
    compress = _scheme(config, parts["compress"], "compress_rope_theta")
    window = config.need("sliding_window")
    schemes = (main if kind == LOCAL else compress for kind in _kinds(config))
    return tuple(LayerSpec(scheme, window) for scheme in schemes)


def _scheme(config: TrackedConfig, part: dict[str, Any], base: str) -> Scheme:
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


def _kinds(config: TrackedConfig) -> list[str]:
    """Returns the kind of each layer: `layer_types`, else `compress_ratios` as released."""
    count, kinds = layer_count(config), config.explicit("layer_types")
    ratios = config.explicit("compress_ratios")
    if ratios is not None:
        unknown = sorted(set(ratios) - set(_KINDS))
        config.check(not unknown, f"compress_ratios {unknown}; known: {[*_KINDS]}")
        by_ratio = [_KINDS[ratio] for ratio in ratios]
        config.check(
            kinds is None or kinds[:count] == by_ratio[:count],
            "layer_types and compress_ratios that contradict each other",
        )
        kinds = by_ratio
    if kinds is None:
        kinds = [_KINDS[128]] * 2 + [_KINDS[4 if i % 2 else 128] for i in range(count)]
    kinds = kinds[:count]
    config.check_count("layer_types", kinds, count)
    unknown = sorted(set(kinds) - set(_KINDS.values()))
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


_GATED = f"{LATENT}, and {GATE}"


def _latent(layers: Any, lacks: str = LATENT, **settings: Any) -> ModelType:
    return ModelType(layers, lacks, scale=latent_scale, **settings)


ROWS: dict[str, ModelType] = {
    "deepseek_v2": _latent(Latent(interleave=True, in_place=True)),
    "axk1 deepseek_v3 deepseek_v32 mistral4 youtu": _latent(Latent()),
    "glm4_moe_lite": _latent(Latent(), same={"head_dim": "qk_rope_head_dim"}),
    "glm_moe_dsa": _latent(Latent(interleave=True)),
    "axk2": _latent(Latent(interleave=True), _GATED),
    "hy_v4": _latent(Latent(interleave=False), _GATED, sinks=True),
    "minicpm3": _latent(Latent(interleave=False)),
    "bailing_hybrid": _latent(
        Latent(interleave=True, kinds=cycle("NNNNNF", "layer_group_size")), _GATED
    ),
    "longcat_flash": _latent(_longcat_flash),
    "mistral_large4_text": _latent(_mistral_large4),
    "deepseek_v4": ModelType(
        _deepseek_v4, "one array for keys and values, and compressed entries", sinks=True
    ),
}
