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
    LayerKinds,
    all_global,
    layer_of,
    rotating_flags,
    window_of,
)
from posenc_jax.hf.rope import (
    Rotary,
    read_rotary,
    refuse_by_length,
    refuse_partial,
    rope_dict,
    take,
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
from posenc_jax.schemes.scheme import Scheme

Family = Callable[[TrackedConfig], tuple[LayerSpec, ...]]


def rotation(
    config: TrackedConfig, rotary: Rotary, head_dim: int, layout: str = "half", partial=False
) -> Scheme:
    """RoPE as a config says, with frequencies for each sequence where the map needs them."""
    if not partial:
        refuse_partial(config, rotary)
    scaling = rotary.scaling
    dim = int(head_dim * rotary.fraction)
    settings: dict[str, Any] = {"head_dim": head_dim, "theta": rotary.theta, "layout": layout}
    settings["rotary_dim"] = 0 if dim == head_dim else dim
    if isinstance(scaling, PerSequenceMap) and scaling.per_sequence:
        return RoPEByLength(scaling=scaling, **settings)
    return RoPE(scaling=scaling, **settings)


@dataclasses.dataclass(frozen=True)
class Rotating:
    """Models with RoPE: alike in all layers, or by the kind of the layer.

    Attributes:
      layout: which dimensions form a pair.
      partial: whether the model type reads `partial_rotary_factor`.
      kinds: the kind of each layer.
      window: reads the window of the layers that have one; None: no layer has.
      bases: (kind, key) where kinds of layers have keys of their own for the base.
      scaled: kinds that `rope_scaling` of an old config applies to; empty: all.
      unrotated: kinds that never rotate.
      instead: the scheme of layers that do not rotate.
      null_rotates: whether a kind whose rope parameters are null has RoPE without scaling.
    """

    layout: str = "half"
    partial: bool = False
    kinds: LayerKinds = all_global
    window: Callable[[TrackedConfig], Window] | None = None
    bases: tuple[tuple[str, str], ...] = ()
    scaled: tuple[str, ...] = ()
    unrotated: tuple[str, ...] = (LINEAR,)
    instead: Scheme = NoPE()  # noqa: RUF009, frozen.
    null_rotates: bool = False

    def __call__(self, config: TrackedConfig) -> tuple[LayerSpec, ...]:
        """A layer for each of the config's."""
        kinds = self.kinds(config)
        window = None if self.window is None else self.window(config)
        given = self._by_kind(config, set(kinds))
        for key in ("rope_theta", "partial_rotary_factor", *(key for _, key in self.bases)):
            config.given(key)  # Read, even if no layer rotates.
        schemes = (
            self._scheme(config, kind, given[kind], head_dim)
            for kind, head_dim in zip(kinds, _head_sizes(config, kinds), strict=True)
        )
        return tuple(
            layer_of(config, kind, scheme, window)
            for kind, scheme in zip(kinds, schemes, strict=True)
        )

    def _by_kind(self, config: TrackedConfig, kinds: set[str]) -> dict[str, dict | None]:
        """The rotary dict of each kind; None: these layers do not rotate."""
        given = rope_dict(config)
        known = {FULL, LOCAL} | kinds
        if given is not None and known & given.keys():
            other = sorted(given.keys() - known, key=str)
            require(
                not other,
                f"{config.where} has rope parameters for {other} beside those for kinds of layers.",
            )
            missing = sorted(kinds - given.keys() - {*self.unrotated})
            require(
                not missing,
                f"{config.where} has layers {missing} without rope parameters.",
            )
            for part in filter(None, given.values()):
                require(
                    not isinstance(part, dict) or part.get("truncate", True),
                    f"{config.where} has truncate=false in rope parameters by the kind of layers, "
                    "where transformers ignores it.",
                )
            null = {} if self.null_rotates else None
            out = {kind: null if given.get(kind) is None else given[kind] for kind in kinds}
        else:
            require(
                not self.scaled or config.given("rope_parameters") is None,
                f"{config.where} has rope_parameters without an entry for each of {sorted(kinds)}.",
            )
            if self.scaled:
                self._check_old(config, given or {})
            out = {kind: given or {} if kind in (self.scaled or kinds) else {} for kind in kinds}
        return {kind: None if kind in self.unrotated else x for kind, x in out.items()}

    def _check_old(self, config, given):
        """Checks that transformers 4 and 5 make the same of an old config."""
        require(
            "type" not in given or "rope_type" in given,
            f"{config.where} has rope_scaling with 'type', which transformers 5 ignores for its "
            "type; the key is 'rope_type'.",
        )
        require(
            given.get("truncate", True),
            f"{config.where} has truncate=false, which transformers ignores for its type.",
        )
        theta = config.get("rope_theta")
        require(
            bool(self.bases) or theta == config.defaults["rope_theta"],
            f"{config.where} has rope_theta={theta}, which transformers 5 gives full attention "
            "alone and transformers 4 all layers; give rope_parameters for each kind.",
        )

    def _scheme(self, config, kind, given, head_dim):
        if given is None:
            return self.instead
        rotary = read_rotary(config, given, base=dict(self.bases).get(kind, "rope_theta"))
        return rotation(config, rotary, head_dim, self.layout, self.partial)


def _head_sizes(config: TrackedConfig, kinds: list[str]) -> list[int]:
    """H of each layer: Gemma 4 has another for global layers, or gives single layers theirs."""
    size, single = head_size(config), config.get("per_layer_config")
    if single is None:
        # Other model types ignore the key.
        of_global = config.get("global_head_dim") if "global_head_dim" in config.defaults else None
        return [of_global if of_global and kind == FULL else size for kind in kinds]
    out = [size] * len(kinds)
    for index, changes in single.items():
        where = f"{config.where} in per_layer_config of layer {index}"
        require(
            str(index).isdecimal() and int(index) < len(kinds),
            f"{where} is for none of its {len(kinds)} layers.",
        )
        part = TrackedConfig(changes, where)
        out[int(index)] = part.get("head_dim", size)
        part.finish()
    return out


def only_windows_rotate(layout: str, kinds: LayerKinds) -> Family:
    """RoPE in layers with a window; the others have no positions."""
    return Rotating(layout, kinds=kinds, window=window_of, unrotated=(FULL,))


def exaone4(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """RoPE in layers with a window; in all layers where none has one."""
    if config.get("sliding_window") is None:
        return Rotating(kinds=layer_kinds.exaone4, window=window_of)(config)
    return only_windows_rotate("half", layer_kinds.exaone4)(config)


def uniform(config: TrackedConfig, scheme: Scheme) -> tuple[LayerSpec, ...]:
    """The same scheme without a window in every layer."""
    return tuple(layer_of(config, kind, scheme) for kind in all_global(config))


def by_flags(
    config: TrackedConfig, kinds: list[str], rotating: Scheme, other: Scheme, window: Window = None
) -> tuple[LayerSpec, ...]:
    """One of two schemes for each layer, by `no_rope_layers`."""
    return tuple(
        layer_of(config, kind, rotating if flag else other, window)
        for kind, flag in zip(kinds, rotating_flags(config), strict=True)
    )


def llama4(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """RoPE within chunks, and every fourth layer a temperature without RoPE."""
    rotary = read_rotary(config, rope_dict(config))
    bare = NoPE()
    if config.get("attn_temperature_tuning", True):
        floor, strength = config.need("floor_scale"), config.need("attn_scale")
        bare = QueryTemperature(form="llama4", length=int(floor), strength=float(strength))
    if config.get("use_qk_norm"):  # A norm after the rotation.
        refuse_by_length(config, rotary)
    rotating = rotation(config, rotary, head_size(config), "interleaved")
    return by_flags(config, layer_kinds.llama4(config), rotating, bare)


def smollm3(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """RoPE, and every fourth layer nothing."""
    rotary = read_rotary(config, rope_dict(config))
    rotating, window = rotation(config, rotary, head_size(config)), window_of(config)
    return by_flags(config, layer_kinds.smollm3(config), rotating, NoPE(), window)


def gptj(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """The first dimensions, interleaved."""
    dim, rotary_dim = head_size(config), config.get("rotary_dim", 0)
    return uniform(config, RoPE(head_dim=dim, layout="interleaved", rotary_dim=rotary_dim))


def gpt_neox(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """RoPE, whose base transformers reads under a name of its own."""
    base, beside = config.get("rotary_emb_base"), config.given("rope_theta")
    base = (rope_dict(config) or {}).get("rope_theta", base)
    require(
        beside in (None, base),
        f"{config.where} has rope_theta={beside}, which transformers ignores for its "
        f"type; the base is rotary_emb_base={base}.",
    )
    return Rotating(partial=True, bases=((FULL, "rotary_emb_base"),))(config)


def minimax_m2(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """The first `rotary_dim` dimensions."""
    dim, head_dim = config.given("rotary_dim"), head_size(config)
    rotary = read_rotary(config, rope_dict(config))
    if dim is not None:
        require(
            rotary.fraction in (1.0, dim / head_dim),
            f"{config.where} has rotary_dim={dim} and partial_rotary_factor={rotary.fraction} for "
            f"a head of {head_dim}.",
        )
        rotary = dataclasses.replace(rotary, fraction=dim / head_dim)
    return uniform(config, rotation(config, rotary, head_dim, partial=True))


def ministral3(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """RoPE with YaRN, and a temperature on queries."""
    scheme = _with_temperature(config, lambda rotary: rotation(config, rotary, head_size(config)))
    window = window_of(config)
    kind = FULL if window is None else LOCAL
    return (layer_of(config, kind, scheme, window),) * layer_count(config)


def _with_temperature(config: TrackedConfig, make: Callable[[Rotary], Scheme]) -> Scheme:
    given, (strength, _) = take(config, "llama_4_scaling_beta", "max_position_embeddings")
    rotary = read_rotary(config, given)
    if strength is None:
        return make(rotary)
    length = int(given.get("original_max_position_embeddings") or 0)
    require(length > 0, f"{config.where} has llama_4_scaling_beta and no length.")
    heat = QueryTemperature(form="ministral3", length=length, strength=float(strength))
    return chain(make(rotary), heat)


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: the last dimensions of a query and a key rotate.

    Attributes:
      interleave: whether pairs are neighbours; None: the config says.
      in_place: whether rotated pairs stay neighbours; the logits are the same.
    """

    interleave: bool | None = None
    in_place: bool = False

    def __call__(self, config: TrackedConfig) -> tuple[LayerSpec, ...]:
        """RoPE on the end of a head, and a temperature if the config has one."""
        scheme = _with_temperature(config, lambda rotary: RoPE(**self.settings(config, rotary)))
        return uniform(config, scheme)

    def settings(self, config: TrackedConfig, rotary: Rotary) -> dict[str, Any]:
        """The fields of RoPE."""
        refuse_by_length(config, rotary)
        rest, dim = config.need("qk_nope_head_dim"), config.need("qk_rope_head_dim")
        config.given("head_dim")
        require(
            rotary.fraction in (1.0, dim / (rest + dim)),
            f"{config.where} has partial_rotary_factor={rotary.fraction}, and a rotary "
            f"part of {dim} out of {rest + dim} dimensions.",
        )
        interleave = self.interleave
        if interleave is None:
            # DeepSeek-V3.2 has no such key; null is false.
            interleave = config.get("rope_interleave", "rope_interleave" not in config.defaults)
        layout = "half"
        if interleave:
            layout = "interleaved" if self.in_place else "interleaved_to_half"
        return {
            "head_dim": rest + dim,
            "theta": rotary.theta,
            "layout": layout,
            "rotary_start": rest,
            "scaling": rotary.scaling,
        }


def mistral_large4(config: TrackedConfig) -> tuple[LayerSpec, ...]:
    """Learned frequencies in three layers of four, and a learned logit scale in all."""
    rotary = read_rotary(config, rope_dict(config))
    heat = SSMax(num_heads=config.need("num_attention_heads"), scale=0.0, offset=1.0)
    rotating = LearnedRoPE(**Latent(interleave=True).settings(config, rotary))
    return by_flags(config, all_global(config), chain(rotating, heat), heat)


@dataclasses.dataclass(frozen=True)
class Multimodal:
    """M-RoPE: pairs divided among time, row and column.

    Attributes:
      order: how pairs of the three axes alternate.
      layout: which dimensions form a pair.
      kinds: the kind of each layer.
      sections: number of pairs of each axis where the config does not say.
      time_last: whether the config has the sections of time last.
    """

    order: str = "contiguous"
    layout: str = "half"
    kinds: LayerKinds = all_global
    sections: tuple[int, ...] = ()
    time_last: bool = False

    def __call__(self, config: TrackedConfig) -> tuple[LayerSpec, ...]:
        """M-RoPE in every layer."""
        names = "mrope_section", "mrope_interleaved"
        given, (sections, interleaved) = take(config, *names, default="mrope")
        sections = self.sections if sections is None else tuple(sections)
        require(
            interleaved in (None, self.order == "interleaved"),
            f"{config.where} has mrope_interleaved={interleaved}; its type is {self.order}.",
        )
        rotary = read_rotary(config, given)
        refuse_partial(config, rotary)
        refuse_by_length(config, rotary)
        scheme = MRoPE(
            head_dim=head_size(config),
            theta=rotary.theta,
            sections=sections[-1:] + sections[:-1] if self.time_last else sections,
            order=self.order,
            layout=self.layout,
            scaling=rotary.scaling,
        )
        window = None if self.kinds is all_global else window_of(config)
        return tuple(layer_of(config, kind, scheme, window) for kind in self.kinds(config))
