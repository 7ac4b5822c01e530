"""The config of DeepSeek-V4, whose layers have one of two rotations, and rotate values too.

The model applies its norms, of q without weights and of the array that is both k and v.
"""

from typing import Any

from posenc_jax.hf.config_reader import TrackedConfig, head_size, layer_count
from posenc_jax.hf.layer_kinds import LOCAL
from posenc_jax.hf.model_type import Layers, ModelType
from posenc_jax.hf.rope import read_rope, refuse_by_length, rope_dict
from posenc_jax.schemes.layer_spec import LayerSpec
from posenc_jax.schemes.rotary.vo_rope import VORoPE
from posenc_jax.schemes.scheme import Scheme

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
        other = config.explicit("compress_rope_parameters")
        config.check_ignored(other in (None, rope), f"compress_rope_parameters={other}")
        compress = {"attention_factor": 1.0} | rope if kind == "yarn" else rope
        parts = {"main": {}, "compress": compress}
    config.check_ignored(
        all(part.get("truncate", True) for part in parts.values()), "truncate=false"
    )
    schemes = {
        "main": _scheme(config, parts["main"], "rope_theta"),
        "compress": _scheme(config, parts["compress"], "compress_rope_theta"),
    }
    window = config.need("sliding_window")
    return tuple(
        LayerSpec(schemes["main" if kind == LOCAL else "compress"], window)
        for kind in _kinds(config)
    )


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
    config.check(len(kinds) == count, f"{len(kinds)} layer_types for {count} layers")
    unknown = sorted(set(kinds) - set(_KINDS.values()))
    config.check(not unknown, f"layer_types {unknown}")
    return kinds


TYPES = {
    "deepseek_v4": ModelType(
        _deepseek_v4,
        unsupported="one array for keys and values, and compressed entries",
        sinks=True,
    )
}
