"""Readers of the configs of model types that rotate queries and keys."""

import dataclasses
from collections.abc import Callable
from typing import Any

from posenc_jax.checks import require
from posenc_jax.engine.mask import Window
from posenc_jax.hf import layer_kinds
from posenc_jax.hf.config_reader import TrackedConfig, head_size, layer_count
from posenc_jax.hf.layer_kinds import (
    FULL,
    LINEAR,
    LOCAL,
    MIXERS,
    LayerKinds,
    all_global,
    layer_of,
    rotating_flags,
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
from posenc_jax.schemes.logit_scale.ssmax import SSMax
from posenc_jax.schemes.logit_scale.temperature import QueryTemperature
from posenc_jax.schemes.rotary.frequencies import PerSequenceMap
from posenc_jax.schemes.rotary.learned_rope import LearnedRoPE
from posenc_jax.schemes.rotary.mrope import MRoPE
from posenc_jax.schemes.rotary.per_sequence_scaling import RoPEByLength
from posenc_jax.schemes.rotary.rope import RoPE
from posenc_jax.schemes.rotary.scaling.yarn import yarn_logit_scale
from posenc_jax.schemes.scheme import Scheme

LayersReader = Callable[[TrackedConfig], tuple[LayerSpec, ...]]


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
      scaled: kinds that `rope_scaling` of an old config applies to; empty: all.
      unrotated: kinds that never rotate.
      instead: the scheme of layers that do not rotate.
      null_rotates: whether a kind whose rope parameters are null has RoPE without scaling.
      by_kind_only: whether rope parameters must be by kind, as transformers ignores others.
    """

    layout: str = "half"
    partial: bool = False
    kinds: LayerKinds = all_global
    window: Callable[[TrackedConfig], Window] | None = None
    bases: tuple[tuple[str, str], ...] = ()
    scaled: tuple[str, ...] = ()
    unrotated: tuple[str, ...] = (*MIXERS,)
    instead: Scheme = NoPE()  # noqa: RUF009, frozen.
    null_rotates: bool = False
    by_kind_only: bool = False

    def __call__(self, config: TrackedConfig) -> tuple[LayerSpec, ...]:
        """Returns the layers."""
        kinds = self.kinds(config)
        window = None if self.window is None else self.window(config)
        ropes = self._by_kind(config, set(kinds))
        # If no layer rotates.
        config.ignore("rope_theta", "partial_rotary_factor", *(key for _, key in self.bases))
        schemes = (
            self._scheme(config, kind, ropes[kind], head_dim)
            for kind, head_dim in zip(kinds, _head_sizes(config, kinds), strict=True)
        )
        return tuple(
            layer_of(config, kind, scheme, window)
            for kind, scheme in zip(kinds, schemes, strict=True)
        )

    def _by_kind(self, config: TrackedConfig, kinds: set[str]) -> dict[str, dict | None]:
        """Returns the rotary dict of each kind; None for layers that do not rotate."""
        rope = rope_dict(config)
        known = {FULL, LOCAL} | kinds
        flat = [n for n in ("rope_theta", "partial_rotary_factor") if config.explicit(n)]
        config.check_ignored(
            not self.by_kind_only or (not flat and not known.isdisjoint(rope or {})),
            f"{flat or rope}, not rope parameters for kinds of layers",
        )
        if rope is not None and known & rope.keys():
            other = sorted(rope.keys() - known, key=str)
            config.check(not other, f"rope parameters for {other} beside those for kinds of layers")
            missing = sorted(kinds - rope.keys() - {*self.unrotated})
            config.check(not missing, f"layers {missing} without rope parameters")
            for part in filter(None, rope.values()):
                config.check(
                    not isinstance(part, dict) or part.get("truncate", True),
                    "truncate=false in rope parameters by the kind of layers, where transformers "
                    "ignores it",
                )
            null = {} if self.null_rotates else None
            out = {kind: null if rope.get(kind) is None else rope[kind] for kind in kinds}
        else:
            config.check(
                not self.scaled or config.explicit("rope_parameters") is None,
                f"rope_parameters without an entry for each of {sorted(kinds)}",
            )
            if self.scaled:
                self._check_old(config, rope or {})
            out = {kind: rope or {} if kind in (self.scaled or kinds) else {} for kind in kinds}
        return {kind: None if kind in self.unrotated else x for kind, x in out.items()}

    def _check_old(self, config, rope):
        """Checks that transformers 4 and 5 read an old config alike."""
        config.check(
            "type" not in rope or "rope_type" in rope,
            "rope_scaling with 'type', which transformers 5 ignores for its type; the key is "
            "'rope_type'",
        )
        config.check_ignored(rope.get("truncate", True), "truncate=false")
        theta = config.get("rope_theta")
        config.check(
            bool(self.bases) or theta == config.defaults["rope_theta"],
            f"rope_theta={theta}, which transformers 5 gives full attention alone and "
            "transformers 4 all layers; give rope_parameters for each kind",
        )

    def _scheme(self, config, kind, rope, head_dim):
        if rope is None:
            return self.instead
        settings = read_rope(config, rope, base=dict(self.bases).get(kind, "rope_theta"))
        return rotation(config, settings, head_dim, self.layout, self.partial)


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


def exaone4(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """Reads RoPE in layers with a window; in all layers if none has a window."""
    unrotated = (LINEAR if config.get("sliding_window") is None else FULL,)
    return Rotating(kinds=layer_kinds.exaone4, window=window_of, unrotated=unrotated)(config)


def uniform(config: TrackedConfig, scheme: Scheme) -> tuple[LayerSpec, ...]:
    """Returns layers with one scheme and no window."""
    return tuple(layer_of(config, kind, scheme) for kind in all_global(config))


def by_flags(
    config: TrackedConfig, kinds: list[str], rotating: Scheme, other: Scheme, window: Window = None
) -> tuple[LayerSpec, ...]:
    """Returns layers with one of two schemes, by `no_rope_layers`."""
    return tuple(
        layer_of(config, kind, rotating if flag else other, window)
        for kind, flag in zip(kinds, rotating_flags(config), strict=True)
    )


def llama4(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """Reads RoPE within chunks, and a temperature without RoPE in every fourth layer."""
    settings = read_rope(config, rope_dict(config))
    bare = NoPE()
    if config.get("attn_temperature_tuning", True):
        floor, strength = config.need("floor_scale"), config.need("attn_scale")
        bare = QueryTemperature(form="llama4", length=int(floor), strength=float(strength))
    rotating = rotation(config, settings, head_size(config), "interleaved")
    return by_flags(config, layer_kinds.llama4(config), rotating, bare)


def smollm3(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """Reads RoPE, and NoPE in every fourth layer."""
    settings = read_rope(config, rope_dict(config))
    rotating, window = rotation(config, settings, head_size(config)), window_of(config)
    return by_flags(config, layer_kinds.smollm3(config), rotating, NoPE(), window)


def gptj(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """Reads interleaved RoPE on the first dimensions."""
    dim, rotary_dim = head_size(config), config.get("rotary_dim")
    return uniform(config, RoPE(head_dim=dim, layout="interleaved", rotary_dim=rotary_dim))


def gpt_neox(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """Reads RoPE with the base `rotary_emb_base`."""
    base, theta = config.get("rotary_emb_base"), config.explicit("rope_theta")
    base = (rope_dict(config) or {}).get("rope_theta", base)
    config.check(
        theta in (None, base),
        f"rope_theta={theta}, which transformers ignores for its type; the base is "
        f"rotary_emb_base={base}",
    )
    return Rotating(partial=True, bases=((FULL, "rotary_emb_base"),))(config)


def minimax_m2(config: TrackedConfig) -> tuple[LayerSpec, ...]:
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


def ministral3(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """Reads RoPE with YaRN, and a temperature on queries."""
    head_dim = head_size(config)
    scheme = _with_temperature(config, lambda settings: rotation(config, settings, head_dim))
    window = window_of(config)
    kind = FULL if window is None else LOCAL
    return (layer_of(config, kind, scheme, window),) * layer_count(config)


def _with_temperature(config: TrackedConfig, make: Callable[[RopeSettings], Scheme]) -> Scheme:
    rope, (strength, _) = pop_keys(config, "llama_4_scaling_beta", "max_position_embeddings")
    settings = read_rope(config, rope)
    if strength is None:
        return make(settings)
    length = int(rope.get("original_max_position_embeddings") or 0)
    config.check(length > 0, "llama_4_scaling_beta and no length")
    temperature = QueryTemperature(form="ministral3", length=length, strength=float(strength))
    return chain(make(settings), temperature)


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
        scheme = _with_temperature(config, lambda settings: RoPE(**self.fields(config, settings)))
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
        layout = "half"
        if interleave:
            layout = "interleaved" if self.in_place else "interleaved_to_half"
        return {
            "head_dim": start + dim,
            "theta": settings.theta,
            "layout": layout,
            "rotary_start": start,
            "scaling": settings.scaling,
        }


def latent_scale(config: TrackedConfig, layer: int) -> float | None:
    """Returns the factor on q . k of multi-head latent attention with DeepSeek's YaRN."""
    rope = TrackedConfig(rope_dict(config) or {}, f"{config.label} in its rope parameters")
    mscale = rope.get("mscale_all_dim")
    if not mscale:
        return None
    size = config.need("qk_nope_head_dim") + config.need("qk_rope_head_dim")
    return yarn_logit_scale(size, rope.need("factor"), mscale)


def mistral_large4(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """Reads learned frequencies in three layers of four, and a learned logit scale in all."""
    settings = read_rope(config, rope_dict(config))
    logit_scale = SSMax(num_heads=config.need("num_attention_heads"), scale=0.0, offset=1.0)
    rotating = LearnedRoPE(**Latent(interleave=True).fields(config, settings))
    return by_flags(config, all_global(config), chain(rotating, logit_scale), logit_scale)


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
