"""The rotary part of a config: base, rotated fraction of a head, and frequency map.

Configs of transformers 4 have the keys `rope_theta` and `rope_scaling`, configs of version 5 have
both in `rope_parameters`. Every key is read or refused, and contradictions are refused.
"""

import dataclasses
import math
from typing import Any

from posenc_jax.checks import require
from posenc_jax.engine.rule import as_tuple
from posenc_jax.hf.config_reader import TrackedConfig
from posenc_jax.schemes.rotary.frequencies import FrequencyMap, PerSequenceMap
from posenc_jax.schemes.rotary.scaling.dynamic_ntk import DynamicNTK
from posenc_jax.schemes.rotary.scaling.interpolation import PI
from posenc_jax.schemes.rotary.scaling.llama3 import Llama3
from posenc_jax.schemes.rotary.scaling.longrope import LongRoPE
from posenc_jax.schemes.rotary.scaling.p_rope import Proportional
from posenc_jax.schemes.rotary.scaling.yarn import YaRN

_OTHER_NAMES = {"su": "longrope", "deepseek_yarn": "yarn"}


@dataclasses.dataclass(frozen=True)
class RopeSettings:
    """The rotary settings of a config.

    Attributes:
      theta: the base.
      fraction: the fraction of a head that rotates, with the frequencies of a head of that size.
      scaling: the frequency map.
    """

    theta: float
    fraction: float
    scaling: FrequencyMap | tuple[FrequencyMap, ...]


def rope_dict(config: TrackedConfig) -> dict[str, Any] | None:
    """Returns the dict under `rope_parameters` or its older name, or None.

    Raises:
      ValueError: if there are both and they differ.
    """
    new, old = config.explicit("rope_parameters"), config.explicit("rope_scaling")
    config.check(not (new and old and new != old), f"rope_parameters={new} and rope_scaling={old}")
    rope = old or new
    return config.defaults.get("rope_parameters") if rope is None else rope


def pop_keys(
    config: TrackedConfig, *names: str, default: str = "default"
) -> tuple[dict[str, Any], list[Any]]:
    """Returns the rotary dict without some keys, and the values of these keys or None.

    Args:
      config: has the dict.
      *names: the keys.
      default: a `rope_type` of this model type, which changes coordinates but not frequencies; it
        becomes "default".
    """
    part = TrackedConfig(rope_dict(config) or {}, f"{config.label} in its rope parameters")
    rope = {key: value for key, value in part.values.items() if key not in names}
    types = {key: "default" for key in ("rope_type", "type") if rope.get(key) == default}
    return rope | types, [part.explicit(name) for name in names]


def refuse_partial(config: TrackedConfig, settings: RopeSettings) -> None:
    """Raises `ValueError` for a part of a head, for model types that never rotate a part."""
    config.check_ignored(settings.fraction == 1.0, f"partial_rotary_factor={settings.fraction}")


def refuse_by_length(config: TrackedConfig, scaling: Any) -> None:
    """Raises `ValueError` for a frequency map that depends on the length of each row."""
    config.check(
        not (isinstance(scaling, PerSequenceMap) and scaling.per_sequence),
        f"{type(scaling).__name__}, whose frequencies depend on the length of each row, which is "
        "not supported for its type",
    )


def read_rope(
    config: TrackedConfig, rope: dict | None = None, base: str = "rope_theta"
) -> RopeSettings:
    """Returns the rotary settings in a config and its rotary dict.

    Args:
      config: has base, fraction and lengths if the dict does not.
      rope: the dict; None: `rope_dict(config)`.
      base: the key of the base outside the dict.

    Raises:
      ValueError: if a key is unknown or missing, or two contradict each other.
    """
    rope = rope_dict(config) or {} if rope is None else rope
    part = TrackedConfig(rope, f"{config.label} in its rope parameters")
    theta = _agree(part, "rope_theta", config, base)
    if "rotary_emb_base" in config.defaults:  # GPT-NeoX.
        fraction = _agree(part, "partial_rotary_factor", config, "rotary_pct")
        fraction = config.defaults.get("partial_rotary_factor") if fraction is None else fraction
    else:
        fraction = _agree(part, "partial_rotary_factor", config, "partial_rotary_factor")
    require(theta is not None, f"{config.label} must have {base!r}.")
    kinds = [part.get("rope_type"), part.get("type")]
    part.check(
        None in kinds or kinds[0] == kinds[1] or _OTHER_NAMES.get(kinds[1]) == kinds[0],
        f"rope_type={kinds[0]!r} and type={kinds[1]!r}",
    )
    kind = kinds[0] or kinds[1] or "default"
    kind = _OTHER_NAMES.get(kind, kind)
    part.check(kind in _READERS, f"rope_type={kind!r}; supported: {sorted(_READERS)}")
    config.ignore("original_max_position_embeddings")  # Phi-3's configs have it with any map.
    fraction = 1.0 if fraction is None else fraction
    if kind == "proportional":
        settings = RopeSettings(theta, 1.0, _proportional(part, fraction))
    else:
        settings = RopeSettings(theta, fraction, _READERS[kind](part, config))
    part.finish(all_keys=True)
    return settings


def _agree(part, name, config, outside):
    """Returns a number from the dict or the config, else the model type's default."""
    values = [x for x in (part.get(name), config.explicit(outside)) if x is not None]
    config.check(len(set(values)) < 2, f"{name} as {' and as '.join(map(str, values))}")
    value = values[0] if values else config.get(outside)
    return None if value is None else float(value)


def _length(part: TrackedConfig, config: TrackedConfig) -> int:
    """Returns the trained length, from the dict or the config, else `max_position_embeddings`."""
    name = "original_max_position_embeddings"
    inside, outside = part.get(name), config.get(name)
    config.check(None in (inside, outside) or inside == outside, f"{name} {inside} and {outside}")
    return int(inside or outside or config.need("max_position_embeddings"))


def fraction_of(dim: int, head_dim: int) -> float:
    """Returns the part of a head whose product with it is `dim` after truncation, as it is read.

    >>> int(88 * (60 / 88)), int(88 * fraction_of(60, 88))
    (59, 60)
    """
    fraction = dim / head_dim
    return fraction if int(head_dim * fraction) == dim else math.nextafter(fraction, 2.0)


def _factor(part: TrackedConfig, config: TrackedConfig, length: int) -> float:
    """Returns the factor, by default the greatest length divided by the trained one."""
    factor = part.get("factor")
    return float(config.need("max_position_embeddings") / length if factor is None else factor)


def _dynamic(part, config):
    """Returns dynamic NTK, whose trained length is `max_position_embeddings` in transformers."""
    name, length = "original_max_position_embeddings", config.need("max_position_embeddings")
    part.check(
        part.get(name, length) == length,
        f"{name}={part.get(name)}, and max_position_embeddings={length} is the trained length "
        "with rope_type='dynamic'",
    )
    return DynamicNTK(float(part.need("factor")), int(length), length=None)


def _yarn(part, config):
    length = _length(part, config)
    factor = _factor(part, config, length)
    mscale, mscale_all_dim = part.get("mscale", 0.0), part.get("mscale_all_dim", 0.0)
    if not (mscale and mscale_all_dim):  # transformers reads both or none.
        part.check_ignored(mscale in (0.0, 1.0), f"mscale={mscale} without mscale_all_dim")
        part.check_ignored(
            not mscale_all_dim or "qk_rope_head_dim" in config.defaults,  # Of `latent_scale`.
            f"mscale_all_dim={mscale_all_dim} without mscale",
        )
        mscale, mscale_all_dim = 1.0, 0.0
    attention_factor = part.get("attention_factor")
    part.ignore("finetuned")  # Of the code of the YaRN paper's models.
    yarn = YaRN(
        factor=factor,
        original_max_position=length,
        beta_fast=float(part.get("beta_fast") or 32.0),
        beta_slow=float(part.get("beta_slow") or 1.0),
        truncate=part.truth("truncate", True),
    )
    if attention_factor is not None:
        part.check_ignored(
            mscale_all_dim in (0.0, mscale),
            f"mscale={mscale} and mscale_all_dim={mscale_all_dim} beside attention_factor",
        )
        return dataclasses.replace(yarn, attention_factor=float(attention_factor))
    return dataclasses.replace(yarn, mscale=float(mscale), mscale_all_dim=float(mscale_all_dim))


def _longrope(part, config):
    length = _length(part, config)
    overall = part.get("attention_factor")
    for name in ("short_mscale", "long_mscale"):
        value, is_read = part.get(name), config.model_type == "phimoe"
        part.check_ignored(value is None or is_read, f"{name}={value}")
    short, long = (part.get(f"{kind}_mscale", overall) for kind in ("short", "long"))  # Phi-3.5-MoE
    part.check(
        short == long and overall in (None, short),
        f"a factor on attention of {short} for short texts, {long} for long ones and {overall} "
        "for all; LongRoPE has one",
    )
    return LongRoPE(
        short_factor=tuple(map(float, part.need("short_factor"))),
        long_factor=tuple(map(float, part.need("long_factor"))),
        factor=max(1.0, _factor(part, config, length)),  # A shorter length changes nothing.
        original_max_position=length,
        long=False if part.get("short_factor") == part.get("long_factor") else None,  # MiniCPM 3.
        attention_factor=None if short is None else float(short),
    )


def _llama3(part, config):
    return Llama3(
        factor=float(part.need("factor")),
        original_max_position=_length(part, config),
        low_freq_factor=float(part.need("low_freq_factor")),
        high_freq_factor=float(part.need("high_freq_factor")),
    )


def _proportional(part, fraction):
    factor = float(part.get("factor", 1.0))
    proportional = Proportional(fraction=fraction)
    return proportional if factor == 1.0 else (proportional, PI(factor=factor))


_READERS = {
    "default": lambda part, config: FrequencyMap(),
    "linear": lambda part, config: PI(factor=float(part.need("factor"))),
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}


_LENGTH = "factor", "original_max_position"
_WRITTEN: dict[type[FrequencyMap], tuple[str, tuple[str, ...]]] = {
    PI: ("linear", ("factor",)),
    DynamicNTK: ("dynamic", _LENGTH),
    Llama3: ("llama3", (*_LENGTH, "low_freq_factor", "high_freq_factor")),
    YaRN: ("yarn", (*_LENGTH, "beta_fast", "beta_slow", "truncate", "attention_factor")),
    LongRoPE: ("longrope", (*_LENGTH, "short_factor", "long_factor", "attention_factor")),
    Proportional: ("proportional", ("fraction",)),
}
"""The `rope_type` of each map, and its fields."""
_THEIR_NAMES = {
    "original_max_position": "original_max_position_embeddings",
    "fraction": "partial_rotary_factor",
}


def write_rope(
    theta: float, fraction: float | None, scaling: FrequencyMap | tuple[FrequencyMap, ...]
) -> dict[str, Any]:
    """Returns the dict that `read_rope` reads, as in transformers 5.

    Args:
      theta: the base.
      fraction: the fraction of a head that rotates; None: it is not written. 1.0 is: the default of
        some model types is a part.
      scaling: the frequency map.

    Raises:
      ValueError: for frequency maps that transformers does not have.
    """
    maps = tuple(m for m in as_tuple(scaling) if m != FrequencyMap())
    out: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if fraction is not None:
        out["partial_rotary_factor"] = fraction
    if not maps:
        return out
    first, *others = maps
    kind, names = _WRITTEN.get(type(first), ("", ()))
    if isinstance(first, LongRoPE) and first.magnitude == "yarn":
        first = dataclasses.replace(
            first, magnitude="su", attention_factor=0.1 * math.log(first.factor) + 1.0
        )
    if isinstance(first, YaRN) and first.mscale_all_dim:
        names = (*names, "mscale", "mscale_all_dim")
    more = {_THEIR_NAMES.get(n, n): getattr(first, n) for n in names}
    if isinstance(first, Proportional) and others and isinstance(others[0], PI):
        more["factor"] = others.pop(0).factor
    require(
        kind != "" and not others and _in_transformers(first),
        f"to_hf: transformers has no rope_type for {maps}.",
    )
    require(
        kind != "proportional" or fraction in (None, 1.0),
        f"to_hf: transformers has no rope_type for {maps} on {fraction} of a head.",
    )
    more = {n: list(x) if isinstance(x, tuple) else x for n, x in more.items() if x is not None}
    return out | {"rope_type": kind} | more


def _in_transformers(m: FrequencyMap) -> bool:
    """Returns whether the settings of a map that transformers has are read there."""
    if isinstance(m, DynamicNTK):
        return m.length is None
    if isinstance(m, YaRN):
        return m.ramp == "index" and (m.mscale == 1.0 or bool(m.mscale_all_dim))
    if isinstance(m, LongRoPE):
        return m.long is None or m.short_factor == m.long_factor
    return True
