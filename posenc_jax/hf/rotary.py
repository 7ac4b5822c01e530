"""Readers of rotary configs: RoPE by layer, in multi-head latent attention, and M-RoPE."""

import dataclasses
from collections.abc import Callable, Sequence, Set
from typing import Any, Literal

from posenc_jax.checks import require
from posenc_jax.engine.mask import Window
from posenc_jax.hf.config_reader import TrackedConfig, head_size, layer_count
from posenc_jax.hf.layer_kinds import (
    FULL,
    LOCAL,
    MIXERS,
    LayerKinds,
    all_global,
    layer_of,
    layers_of,
    window_of,
)
from posenc_jax.hf.rope import (
    RopeSettings,
    pop_keys,
    read_rope,
    refuse_by_length,
    refuse_partial,
    rope_dict,
)
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.combinators.chain import chain
from posenc_jax.schemes.layer_spec import LayerSpec
from posenc_jax.schemes.logit_scale.temperature import QueryTemperature
from posenc_jax.schemes.rotary.frequencies import PerSequenceMap
from posenc_jax.schemes.rotary.mrope import MRoPE
from posenc_jax.schemes.rotary.per_sequence_scaling import RoPEByLength
from posenc_jax.schemes.rotary.rope import RoPE
from posenc_jax.schemes.rotary.scaling.yarn import yarn_logit_scale
from posenc_jax.schemes.scheme import Scheme

_FLAT = "rope_theta", "partial_rotary_factor"


def rotation(
    config: TrackedConfig,
    settings: RopeSettings,
    head_dim: int,
    layout: str = "half",
    partial: bool = False,
) -> Scheme:
    """Returns RoPE, or `RoPEByLength` for a map that depends on the length of each sequence."""
    if not partial:
        refuse_partial(config, settings)
    scaling = settings.scaling
    dim = int(head_dim * settings.fraction)
    fields: dict[str, Any] = {"head_dim": head_dim, "theta": settings.theta, "layout": layout}
    fields["rotary_dim"] = None if dim == head_dim else dim
    if isinstance(scaling, PerSequenceMap) and scaling.per_sequence:
        return RoPEByLength(scaling=scaling, **fields)
    return RoPE(scaling=scaling, **fields)


@dataclasses.dataclass(frozen=True)
class Rotating:
    """Reads models with RoPE: alike in all layers, or by the kind of the layer.

    Attributes:
      layout: which dimensions form a pair.
      partial: whether the model type reads `partial_rotary_factor`.
      kinds: the kind of each layer.
      window: reads the window of the layers that have one; None: no layer has a window.
      bases: (kind, key) for kinds of layers with a separate key for the base.
      scaled: kinds that `rope_scaling` of an old config applies to, if `by_kind` is "read".
      unrotated: kinds that never rotate.
      rotates: reads from config and kinds whether each layer rotates, or its base; empty if the
        config switches RoPE off. None: all rotate.
      instead: the scheme of layers that do not rotate, or its reader.
      by_kind: whether rope parameters for kinds of layers are "read", and null ones rotate without
        scaling; or "required" as transformers ignores others, and null ones do not rotate. Where
        all layers share a rotation it ignores them: "refused".
      settings: reads a rotary dict.
    """

    layout: str = "half"
    partial: bool = False
    kinds: LayerKinds = all_global
    window: Callable[[TrackedConfig], Window] | None = None
    bases: tuple[tuple[str, str], ...] = ()
    scaled: tuple[str, ...] = (FULL,)
    unrotated: tuple[str, ...] = (*MIXERS,)
    rotates: Callable[[TrackedConfig, list[str]], Sequence[bool | float]] | None = None
    instead: Scheme | Callable[[TrackedConfig], Scheme] = NoPE()  # noqa: RUF009, frozen.
    by_kind: Literal["refused", "read", "required"] = "refused"
    settings: Callable[[TrackedConfig, dict, str], RopeSettings] = read_rope

    def __call__(self, config: TrackedConfig) -> tuple[LayerSpec, ...]:
        """Returns the layers."""
        kinds = self.kinds(config)
        if self.layout == "half":
            config.only("rope_interleaved", False)  # SmolLM 2's.
        window = None if self.window is None else self.window(config)
        bases = [True] * len(kinds) if self.rotates is None else self.rotates(config, kinds)
        if bases:
            ropes = self._by_kind(config, dict.fromkeys(kinds).keys()).items()
            settings = {x: self._settings(config, x, rope) for x, rope in ropes if rope is not None}
        else:
            config.ignore("rope_parameters", "rope_scaling")
            settings = {}
        # Of layers that the model lacks.
        config.ignore(*(key for _, key in self.bases), *(() if settings else _FLAT))
        instead = self.instead if isinstance(self.instead, Scheme) else self.instead(config)
        schemes = [instead] * len(kinds)
        for i, (kind, head_dim) in enumerate(zip(kinds, _head_sizes(config, kinds), strict=True)):
            if kind in settings and bases[i]:
                base = settings[kind].theta if bases[i] is True else float(bases[i])
                part = dataclasses.replace(settings[kind], theta=base)
                schemes[i] = rotation(config, part, head_dim, self.layout, self.partial)
        return layers_of(config, kinds, schemes, window)

    def _by_kind(self, config: TrackedConfig, kinds: Set[str]) -> dict[str, dict | None]:
        """Returns the rotary dict of each kind; None for layers that do not rotate."""
        rope = rope_dict(config)
        known = {FULL, LOCAL} | kinds
        full = (rope or {}).get(FULL)
        full = full if isinstance(full, dict) else {}
        if self.by_kind == "required":
            same = full if FULL in kinds else {}  # Not the default of layers that it lacks.
            flat = [n for n in _FLAT if config.explicit(n) not in (None, same.get(n))]
            config.check_ignored(
                not flat and not known.isdisjoint(rope or {}),
                f"{flat or 'one dict'}, not rope parameters for kinds of layers",
            )
        if self.by_kind != "refused" and rope is not None and known & rope.keys():
            config.check(
                not config.explicit("rope_scaling"),
                "rope_scaling for kinds of layers; the key is 'rope_parameters'",
            )
            length = "original_max_position_embeddings"  # Laguna's repeat it here.
            extra = {length} if rope.get(length) == full.get(length) else set()
            written = {"rope_type": "default", "rope_theta": None}  # By 5.0 to 5.15.
            extra |= {n for n, x in written.items() if rope.get(n) == x}
            other = sorted(rope.keys() - known - extra, key=str)
            config.check(not other, f"rope parameters for {other} beside those for kinds of layers")
            missing = sorted(kinds - rope.keys() - {*self.unrotated})
            config.check(not missing, f"layers {missing} without rope parameters")
            outside = config.explicit(length)
            for part in (part for part in rope.values() if isinstance(part, dict)):
                config.check(
                    part.get("truncate", True),
                    "truncate=false in rope parameters by the kind of layers, where transformers "
                    "ignores it",
                )
                kind = part.get("rope_type", part.get("type"))
                config.check(
                    None in (outside, kind) or part.get(length) == outside,
                    f"{length}={outside} beside rope parameters by the kind of layers, where "
                    "transformers ignores it",
                )
            local = rope.get(LOCAL)
            if not isinstance(local, dict) or local.get("rope_theta") is None:
                self._check_theta(config)
            null: dict | None = {} if self.by_kind == "read" else None
            out = {kind: null if rope.get(kind) is None else rope[kind] for kind in kinds}
        else:
            old = self.by_kind == "read"
            config.check(
                not old or config.explicit("rope_parameters") is None,
                f"rope_parameters without an entry for each of {sorted(kinds)}",
            )
            if old:
                self._check_old(config, rope or {})
            scaled = self.scaled if old else kinds
            out = {kind: rope or {} if kind in scaled else {} for kind in kinds}
        return {kind: None if kind in self.unrotated else x for kind, x in out.items()}

    def _check_old(self, config, rope):
        """Checks that transformers 4 and 5 read an old config alike."""
        config.check(
            "type" not in rope or "rope_type" in rope,
            "rope_scaling with 'type', which transformers 5 ignores for its type; the key is "
            "'rope_type'",
        )
        config.check_ignored(rope.get("truncate", True), "truncate=false")
        self._check_theta(config)

    def _check_theta(self, config):
        """Checks that transformers 4 and 5 give layers with a window the same base."""
        if self.by_kind != "read" or self.bases:
            return
        theta = config.get("rope_theta")
        config.check(
            theta in (None, config.defaults["rope_theta"]),
            f"rope_theta={theta}, which transformers 5 gives full attention alone and "
            "transformers 4 all layers; give rope_parameters for each kind",
        )

    def _settings(self, config, kind, rope):
        config = config.without(*_FLAT) if self.by_kind == "required" else config
        settings = self.settings(config, rope, dict(self.bases).get(kind, "rope_theta"))
        if not self.partial:
            refuse_partial(config, settings)
        return settings


def _head_sizes(config: TrackedConfig, kinds: list[str]) -> list[int]:
    """Returns H of each layer, which Gemma 4 sets for global layers or for single ones."""
    size, per_layer = head_size(config), config.get("per_layer_config")
    if per_layer is None:
        # Other model types ignore the key.
        full = config.get("global_head_dim") if "global_head_dim" in config.defaults else None
        return [full if full and kind == FULL else size for kind in kinds]
    out = [size] * len(kinds)
    for index, changes in per_layer.items():
        label = f"{config.label} in per_layer_config of layer {index}"
        require(
            str(index).isdecimal() and int(index) < len(kinds),
            f"{label} is for none of its {len(kinds)} layers.",
        )
        part = TrackedConfig(changes, label)
        out[int(index)] = part.get("head_dim", size)
        part.finish()
    return out


def windowed(kinds: LayerKinds, **settings: Any) -> Rotating:
    """Returns a reader of RoPE in layers with and without the window `sliding_window`."""
    return Rotating(kinds=kinds, window=window_of, **settings)


def rotating_flags(config: TrackedConfig, kinds: list[str] | None = None) -> list[bool]:
    """Returns whether each layer rotates: `no_rope_layers`, where 1 stands for a rotating layer.

    Raises:
      ValueError: if there is not one flag for each layer.
    """
    count, period = layer_count(config), config.get("no_rope_layer_interval", 4)
    flags = config.explicit("no_rope_layers") or [(i + 1) % period != 0 for i in range(count)]
    config.check_count("no_rope_layers", flags, count)
    return [bool(flag) for flag in flags]


def with_temperature(config: TrackedConfig, make: Callable[[RopeSettings], Scheme]) -> Scheme:
    """Returns a scheme of the rotary settings, with the temperature of Ministral 3 if set."""
    rope, (strength, _) = pop_keys(config, "llama_4_scaling_beta", "max_position_embeddings")
    settings = read_rope(config, rope)
    if strength is None:
        return make(settings)
    length = int(rope.get("original_max_position_embeddings") or 0)
    config.check(length > 0, "llama_4_scaling_beta and no length")
    temperature = QueryTemperature(form="ministral3", length=length, strength=float(strength))
    return chain(make(settings), temperature)


@dataclasses.dataclass(frozen=True)
class Multimodal:
    """Reads M-RoPE: pairs divided among time, row and column.

    Attributes:
      order: how pairs of the three axes alternate.
      layout: which dimensions form a pair.
      kinds: the kind of each layer.
      sections: number of pairs of each axis, for configs without them.
      time_last: whether time is the last axis of the config's sections.
      partial: whether the model type reads `partial_rotary_factor`.
    """

    order: str = "contiguous"
    layout: str = "half"
    kinds: LayerKinds = all_global
    sections: tuple[int, ...] = ()
    time_last: bool = False
    partial: bool = False

    def __call__(self, config: TrackedConfig) -> tuple[LayerSpec, ...]:
        """Returns M-RoPE in every layer."""
        config.only("use_mrope", True)
        names = "mrope_section", "mrope_interleaved"
        rope, (sections, interleaved) = pop_keys(config, *names, default="mrope")
        sections = self.sections if sections is None else tuple(sections)
        config.check(
            interleaved in (None, self.order == "interleaved"),
            f"mrope_interleaved={interleaved}; its type is {self.order}",
        )
        settings, head_dim = read_rope(config, rope), head_size(config)
        if not self.partial:
            refuse_partial(config, settings)
        refuse_by_length(config, settings.scaling)
        dim = int(head_dim * settings.fraction)
        scheme = MRoPE(
            head_dim=head_dim,
            rotary_dim=None if dim == head_dim else dim,
            theta=settings.theta,
            sections=sections[-1:] + sections[:-1] if self.time_last else sections,
            order=self.order,
            layout=self.layout,
            scaling=settings.scaling,
        )
        window = window_of(config) if "sliding_window" in config.defaults else None
        return tuple(layer_of(config, kind, scheme, window) for kind in self.kinds(config))


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
            interleave = config.get("rope_interleave", False)
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
