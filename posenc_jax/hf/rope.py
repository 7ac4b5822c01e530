"""The rotary part of a config: base, rotated fraction of a head, and frequency map.

Configs of transformers 4 have `rope_theta` and `rope_scaling` side by side, those of version 5
have both in `rope_parameters`. Every key is read or refused, and so are contradictions.
"""

import dataclasses
import math
from typing import Any

from posenc_jax.checks import require
from posenc_jax.engine.rules import as_tuple
from posenc_jax.hf.config_reader import TrackedConfig
from posenc_jax.schemes.rotary.frequencies import FrequencyMap, PerSequenceMap
from posenc_jax.schemes.rotary.scaling.dynamic_ntk import DynamicNTK
from posenc_jax.schemes.rotary.scaling.interpolation import PI
from posenc_jax.schemes.rotary.scaling.llama3 import Llama3
from posenc_jax.schemes.rotary.scaling.longrope import LongRoPE
from posenc_jax.schemes.rotary.scaling.p_rope import Proportional
from posenc_jax.schemes.rotary.scaling.yarn import YaRN

_TYPES = {"su": "longrope"}  # Other names.


@dataclasses.dataclass(frozen=True)
class Rotary:
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
    """The dict under `rope_parameters` or its older name, or None.

    Raises:
      ValueError: if there are both and they differ.
    """
    new, old = config.given("rope_parameters"), config.given("rope_scaling")
    require(
        not (new and old and new != old),
        f"{config.where} has rope_parameters={new} and rope_scaling={old}.",
    )
    given = old or new
    return config.defaults.get("rope_parameters") if given is None else given


def take(
    config: TrackedConfig, *names: str, default: str = "default"
) -> tuple[dict[str, Any], list[Any]]:
    """The rotary dict without some keys, and their values; None for those that are missing.

    Args:
      config: has the dict.
      *names: the keys.
      default: the model type's own `rope_type`, which changes coordinates but not frequencies; it
        becomes "default".
    """
    part = TrackedConfig(rope_dict(config) or {}, f"{config.where} in its rope parameters")
    rest = {key: value for key, value in part.values.items() if key not in names}
    own = {key: "default" for key in ("rope_type", "type") if rest.get(key) == default}
    return rest | own, [part.given(name) for name in names]


def refuse_partial(config: TrackedConfig, rotary: Rotary) -> None:
    """Checks that all of a head rotates, for model types that never rotate a part.

    Raises:
      ValueError: otherwise.
    """
    require(
        rotary.fraction == 1.0,
        f"{config.where} has partial_rotary_factor={rotary.fraction}, which transformers ignores "
        "for its type.",
    )


def refuse_by_length(config: TrackedConfig, rotary: Rotary) -> None:
    """Checks that frequencies do not depend on the length of each row.

    Raises:
      ValueError: otherwise.
    """
    scaling = rotary.scaling
    require(
        not (isinstance(scaling, PerSequenceMap) and scaling.per_sequence),
        f"{config.where} has {type(scaling).__name__}, whose frequencies depend on the "
        "length of each row, which is not supported for its type.",
    )


def read_rotary(config: TrackedConfig, given: dict | None, *, base: str = "rope_theta") -> Rotary:
    """The rotary settings in a config and its rotary dict.

    Args:
      config: has base, fraction and lengths if the dict does not.
      given: the dict; None for an old config without one.
      base: the key of the base outside the dict.

    Raises:
      ValueError: if a key is unknown or missing, or two contradict each other.
    """
    part = TrackedConfig({} if given is None else given, f"{config.where} in its rope parameters")
    theta = _agree(part, "rope_theta", config, base)
    names = ["partial_rotary_factor"]
    names += ["rotary_pct"] if "rotary_emb_base" in config.defaults else []  # GPT-NeoX.
    share = _agree(part, "partial_rotary_factor", config, *names)
    require(theta is not None, f"{config.where} must have {base!r}.")
    kinds = [part.get("rope_type"), part.get("type")]
    require(
        None in kinds or kinds[0] == kinds[1] or _TYPES.get(kinds[1]) == kinds[0],
        f"{part.where} has rope_type={kinds[0]!r} and type={kinds[1]!r}.",
    )
    kind = kinds[0] or kinds[1] or "default"
    kind = _TYPES.get(kind, kind)
    require(
        kind in _READERS,
        f"{part.where} has rope_type={kind!r}; supported: {sorted(_READERS)}.",
    )
    config.given("original_max_position_embeddings")  # Phi-3 has it with any map, or none.
    share = 1.0 if share is None else share
    if kind == "proportional":
        rotary = Rotary(theta, 1.0, _proportional(part, share))
    else:
        rotary = Rotary(theta, share, _READERS[kind](part, config))
    part.finish(all_keys=True)
    return rotary


def _agree(part, name, config, *names):
    """A number from the dict or the config, else the model type's default."""
    found = [part.get(name), *(config.given(n) for n in names)]
    found = [x for x in found if x is not None]
    require(
        len(set(found)) < 2,
        f"{config.where} has {name} as {' and as '.join(map(str, found))}.",
    )
    value = found[0] if found else config.get(names[0])
    return None if value is None else float(value)


def _length(part: TrackedConfig, config: TrackedConfig) -> int:
    """The trained length, from the dict or the config, else `max_position_embeddings`."""
    name = "original_max_position_embeddings"
    inside, beside = part.get(name), config.get(name)
    require(
        None in (inside, beside) or inside == beside,
        f"{config.where} has {name} {inside} and {beside}.",
    )
    return int(inside or beside or config.need("max_position_embeddings"))


def _factor(part: TrackedConfig, config: TrackedConfig, length: int) -> float:
    """The factor; by default the greatest length divided by the trained one."""
    factor = part.get("factor")
    return float(config.need("max_position_embeddings") / length if factor is None else factor)


def _linear(part, config):
    return PI(factor=float(part.need("factor")))


def _dynamic(part, config):
    """Dynamic NTK, whose trained length is `max_position_embeddings` in transformers."""
    name, length = "original_max_position_embeddings", config.need("max_position_embeddings")
    require(
        part.get(name, length) == length,
        f"{part.where} has {name}={part.get(name)}, and max_position_embeddings={length} "
        "is the trained length with rope_type='dynamic'.",
    )
    return DynamicNTK(float(part.need("factor")), int(length), length=None)


def _yarn(part, config):
    length = _length(part, config)
    factor = _factor(part, config, length)
    of, by = part.get("mscale", 0.0), part.get("mscale_all_dim", 0.0)
    of, by = (of, by) if of and by else (1.0, 0.0)  # transformers reads both or none.
    given = part.get("attention_factor")
    made = YaRN(
        factor=factor,
        original_max_position=length,
        beta_fast=float(part.get("beta_fast") or 32.0),
        beta_slow=float(part.get("beta_slow") or 1.0),
        truncate=part.get("truncate", True),
    )
    if given is not None:
        return dataclasses.replace(made, attention_factor=float(given))
    return dataclasses.replace(made, mscale=float(of), mscale_all_dim=float(by))


def _longrope(part, config):
    length = _length(part, config)
    given = part.get("attention_factor")
    short, long = (part.get(f"{kind}_mscale", given) for kind in ("short", "long"))  # Phi-3.5-MoE
    require(
        short == long and given in (None, short),
        f"{part.where} has a factor on attention of {short} for short texts, {long} for "
        f"long ones and {given} for all; LongRoPE has one.",
    )
    given = short
    return LongRoPE(
        short_factor=tuple(map(float, part.need("short_factor"))),
        long_factor=tuple(map(float, part.need("long_factor"))),
        factor=_factor(part, config, length),
        original_max_position=length,
        long=None,
        attention_factor=None if given is None else float(given),
    )


def _llama3(part, config):
    return Llama3(
        factor=float(part.need("factor")),
        original_max_position=_length(part, config),
        low_freq_factor=float(part.need("low_freq_factor")),
        high_freq_factor=float(part.need("high_freq_factor")),
    )


def _proportional(part, share):
    factor = float(part.get("factor", 1.0))
    proportional = Proportional(fraction=share)
    return proportional if factor == 1.0 else (proportional, PI(factor=factor))


_READERS = {
    "default": lambda part, config: FrequencyMap(),
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}


def write_rotary(rotary: Rotary) -> dict[str, Any]:
    """The dict that `read_rotary` reads, as in transformers 5.

    Raises:
      ValueError: for frequency maps that transformers does not have.
    """
    maps = tuple(m for m in as_tuple(rotary.scaling) if m != FrequencyMap())
    out = {"rope_type": "default", "rope_theta": rotary.theta}
    if rotary.fraction != 1.0:
        out["partial_rotary_factor"] = rotary.fraction
    if not maps:
        return out
    writer = _WRITERS.get(type(maps[0]))
    more = None if writer is None else writer(*maps)
    require(
        more is not None and not ({*more} & {*out} - {"rope_type"}),
        f"to_hf: transformers has no rope_type for {maps}.",
    )
    return out | (more or {})


def _write_one(kind, names):
    def write(m, *others):
        if others:
            return None
        values = {theirs: getattr(m, ours) for ours, theirs in names.items()}
        values = {n: list(x) if isinstance(x, tuple) else x for n, x in values.items()}
        return {"rope_type": kind} | {n: x for n, x in values.items() if x is not None}

    return write


def _write_proportional(m, *others):
    if len(others) > 1 or (others and not isinstance(others[0], PI)):
        return None
    out = {"rope_type": "proportional", "partial_rotary_factor": m.fraction}
    return out | ({"factor": others[0].factor} if others else {})


_LENGTH = {"factor": "factor", "original_max_position": "original_max_position_embeddings"}


def _write_dynamic(m, *others):
    return None if m.length is not None else _write_one("dynamic", _LENGTH)(m, *others)


def _write_yarn(m, *others):
    names = {n: n for n in ("beta_fast", "beta_slow", "truncate", "attention_factor")}
    if m.mscale_all_dim:
        names |= {"mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
    if m.ramp != "index" or (m.mscale != 1.0 and not m.mscale_all_dim):
        return None
    return _write_one("yarn", _LENGTH | names)(m, *others)


def _write_longrope(m, *others):
    if m.long is not None:
        return None
    if m.magnitude == "yarn":
        m = dataclasses.replace(m, magnitude="su", attention_factor=0.1 * math.log(m.factor) + 1.0)
    names = {n: n for n in ("short_factor", "long_factor", "attention_factor")}
    return _write_one("longrope", _LENGTH | names)(m, *others)


_WRITERS = {
    PI: _write_one("linear", {"factor": "factor"}),
    DynamicNTK: _write_dynamic,
    Llama3: _write_one("llama3", _LENGTH | {n: n for n in ("low_freq_factor", "high_freq_factor")}),
    YaRN: _write_yarn,
    LongRoPE: _write_longrope,
    Proportional: _write_proportional,
}
