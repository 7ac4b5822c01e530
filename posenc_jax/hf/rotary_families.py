"""Model types of transformers that rotate queries and keys: from their configs to schemes."""

import dataclasses
from collections.abc import Callable
from typing import Any

from posenc_jax.additive.none import NoPE
from posenc_jax.checks import require
from posenc_jax.combinators.chain import chain
from posenc_jax.hf.reading import Part, head_size
from posenc_jax.hf.rope import Rotary, read_rotary, rope_dict
from posenc_jax.layers import LayerSpec
from posenc_jax.logit_scale.ssmax import SSMax
from posenc_jax.logit_scale.temperature import QueryTemperature
from posenc_jax.rotary.frequencies import FrequencyMap
from posenc_jax.rotary.learned_rope import LearnedRoPE
from posenc_jax.rotary.mrope import MRoPE
from posenc_jax.rotary.per_sequence_scaling import RoPEByLength
from posenc_jax.rotary.rope import RoPE
from posenc_jax.scheme import Scheme

Family = Callable[[Part], Scheme | tuple[LayerSpec, ...]]


def rotation(rotary: Rotary, head_dim: int, layout: str = "half") -> Scheme:
    """Returns RoPE as a config says, by the length of each sequence where the map asks for it."""
    scaling = rotary.scaling
    dim = int(head_dim * rotary.fraction)
    settings: dict[str, Any] = {"head_dim": head_dim, "theta": rotary.theta, "layout": layout}
    settings["rotary_dim"] = 0 if dim == head_dim else dim
    if isinstance(scaling, FrequencyMap) and scaling.goes_by_length:
        return RoPEByLength(scaling=scaling, **settings)
    return RoPE(scaling=scaling, **settings)


@dataclasses.dataclass(frozen=True)
class Plain:
    """Models that rotate in all layers alike, or with a dict for each kind of layer."""

    layout: str = "half"
    theta: float = 1e4
    fraction: float = 1.0
    local_theta: float | None = None
    bare: tuple[str, ...] = ()  # Kinds of layers that do not rotate,
    instead: Scheme = NoPE()  # noqa: RUF009, frozen: and what they have.

    def __call__(self, config: Part) -> Scheme | tuple[LayerSpec, ...]:
        """Returns RoPE, for each kind of layer where the config tells kinds apart."""
        given = rope_dict(config)
        kinds = config.get("layer_types")
        nested = given is not None and kinds is not None and set(given) & set(kinds)
        old_pair = config.get("rope_local_base_freq", config.get("local_rope_theta"))
        if not nested and old_pair is None and self.local_theta is None and not self.bare:
            return self._layer(config, given)
        if not nested:
            given = self._by_kind(config, given, old_pair)
        kinds = layer_kinds(config)
        missing = sorted(set(kinds) - set(given))
        require(
            not missing, f"from_hf: {config.where} has layers {missing} without rope parameters."
        )
        made = {kind: self._kind(config, kind, given[kind]) for kind in sorted(set(kinds))}
        return same_or_all(LayerSpec(made[k], window_of(config, k)) for k in kinds)

    def _by_kind(self, config: Part, given: dict | None, local: float | None) -> dict:
        """An old config's one dict, for each kind: scaling is for global layers alone."""
        full = given or {}
        if self.bare:
            kinds = layer_kinds(config)
            return {k: None if k in self.bare else full for k in kinds}
        theta = local if local is not None else self.local_theta
        far = config.get("rope_theta", config.get("global_rope_theta", self.theta))
        plain = {"rope_type": "default", "rope_theta": theta}
        return {"full_attention": {"rope_theta": far} | full, "sliding_attention": plain}

    def _kind(self, config: Part, kind: str, given: dict | None) -> Scheme:
        if given is None:
            return self.instead
        own = Part({k: v for k, v in config.values.items() if k != "rope_theta"}, config.where)
        theta = self.local_theta if "sliding" in kind and self.local_theta else self.theta
        out = self._layer(own, given, theta, head_dim=head_of_kind(config, kind))
        config.read |= own.read | {"rope_theta"}
        return out

    def _layer(self, config, given, theta=None, head_dim=None):
        rotary = read_rotary(config, given, theta=theta or self.theta, fraction=self.fraction)
        return rotation(rotary, head_dim or head_size(config), self.layout)


def head_of_kind(config: Part, kind: str) -> int:
    """Returns H of the layers of a kind, which Gemma 4 gives for single layers or by a name."""
    other = config.get("global_head_dim") if kind == "full_attention" else None
    changes = config.get("per_layer_config") or {}
    for index, change in changes.items():
        if layer_kinds(config)[int(index)] == kind and change.get("head_dim"):
            other = change["head_dim"]
    return other or head_size(config)


def layer_kinds(config: Part) -> list[str]:
    """Returns the kind of each layer, from `layer_types` or the older settings for it.

    Raises:
      ValueError: if there are none.
    """
    kinds = config.get("layer_types")
    if kinds is not None:
        return list(kinds)
    every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if isinstance(every, str):
        names = {"L": "sliding_attention", "G": "full_attention"}
        return [names[every[i % len(every)]] for i in range(config.need("num_hidden_layers"))]
    offset = 1
    if every is None:  # ModernBERT counts from the first layer.
        every, offset = config.need("global_attn_every_n_layers"), 0
    count = config.need("num_hidden_layers")
    return ["sliding_attention" if (i + offset) % every else "full_attention" for i in range(count)]


def window_of(config: Part, kind: str) -> Any:
    """Returns the window of a kind of layer, as `attention` takes it."""
    if kind != "sliding_attention":
        return None
    both = config.get("local_attention")
    return config.get("sliding_window") if both is None else (both // 2, both // 2)


def same_or_all(layers: Any) -> Scheme | tuple[LayerSpec, ...]:
    """Returns the scheme of all layers if they are alike, or the layers."""
    layers = tuple(layers)
    return layers[0].scheme if len({layer.scheme for layer in layers}) == 1 else layers


def chosen(config: Part, flags: Any, yes: Scheme, no: Scheme) -> Scheme | tuple[LayerSpec, ...]:
    """Returns a layer of one of two schemes for each flag."""
    flags = list(flags)
    require(
        len(flags) == config.need("num_hidden_layers"),
        f"from_hf: {config.where} has {len(flags)} flags for its layers.",
    )
    kinds = config.get("layer_types") or [""] * len(flags)
    pairs = zip(flags, kinds, strict=True)
    return same_or_all(LayerSpec(yes if on else no, window_of(config, k)) for on, k in pairs)


def rope_flags(config: Part) -> list[int]:
    """Returns which layers rotate: `no_rope_layers`, in which 1 means that it does."""
    given = config.get("no_rope_layers")
    every = config.get("no_rope_layer_interval", 4)
    return given or [int((i + 1) % every != 0) for i in range(config.need("num_hidden_layers"))]


def llama4(config: Part) -> Scheme | tuple[LayerSpec, ...]:
    """RoPE, and every fourth layer a temperature without it."""
    rotary = read_rotary(config, rope_dict(config), theta=5e5)
    bare = NoPE()
    if config.get("attn_temperature_tuning", True):
        floor, strength = config.get("floor_scale", 8192), config.get("attn_scale", 0.1)
        bare = QueryTemperature(form="llama4", length=int(floor), strength=float(strength))
    return chosen(
        config, rope_flags(config), rotation(rotary, head_size(config), "interleaved"), bare
    )


def smollm3(config: Part) -> Scheme | tuple[LayerSpec, ...]:
    """RoPE, and every fourth layer nothing."""
    rotary = read_rotary(config, rope_dict(config), theta=2e6)
    return chosen(config, rope_flags(config), rotation(rotary, head_size(config)), NoPE())


def exaone4(config: Part) -> Scheme | tuple[LayerSpec, ...]:
    """RoPE in local layers only, if there are any; else in all."""
    if config.get("sliding_window") is None:
        config.get("sliding_window_pattern")
        return Plain()(config)
    return Plain(bare=("full_attention",))(config)


def gptj(config: Part) -> Scheme:
    """The first dimensions, interleaved."""
    config.get("max_position_embeddings")
    return RoPE(
        head_dim=head_size(config), layout="interleaved", rotary_dim=config.need("rotary_dim")
    )


def ministral3(config: Part) -> Scheme:
    """RoPE with YaRN, and a temperature on queries."""
    return _with_temperature(config, lambda rotary: rotation(rotary, head_size(config)))


def _with_temperature(config, make):
    given = dict(rope_dict(config) or {})
    strength = given.pop("llama_4_scaling_beta", None)
    given.pop("max_position_embeddings", None)
    rotary = read_rotary(config, given)
    if strength is None:
        return make(rotary)
    length = int(given.get("original_max_position_embeddings") or 0)
    require(length > 0, f"from_hf: {config.where} has llama_4_scaling_beta and no length.")
    heat = QueryTemperature(form="ministral3", length=length, strength=float(strength))
    return chain(make(rotary), heat)


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: the last dimensions of a query rotate."""

    interleave: bool | None = None  # None: the config says.
    in_place: bool = False  # Whether pairs stay where they are; scores are the same.

    def __call__(self, config: Part) -> Scheme:
        """Returns RoPE on the end of a head, and a temperature if the config has one."""
        return _with_temperature(config, lambda rotary: RoPE(**self.settings(config, rotary)))

    def settings(self, config: Part, rotary: Rotary) -> dict[str, Any]:
        """Returns the fields of RoPE."""
        rest, dim = config.need("qk_nope_head_dim"), config.need("qk_rope_head_dim")
        config.get("head_dim")
        turns = config.get("rope_interleave", True) if self.interleave is None else self.interleave
        layout = "half"
        if turns:
            layout = "interleaved" if self.in_place else "interleaved_to_half"
        return {
            "head_dim": rest + dim,
            "theta": rotary.theta,
            "layout": layout,
            "rotary_start": rest,
            "scaling": rotary.scaling,
        }


def mistral_large4(config: Part) -> Scheme | tuple[LayerSpec, ...]:
    """Learned frequencies in three layers of four, and a learned softmax scale in all."""
    rotary = read_rotary(config, rope_dict(config))
    heat = SSMax(num_heads=config.need("num_attention_heads"), scale=0.0, offset=1.0)
    turned = LearnedRoPE(**Latent(interleave=True).settings(config, rotary))
    return chosen(config, rope_flags(config), chain(turned, heat), heat)


@dataclasses.dataclass(frozen=True)
class Multimodal:
    """M-RoPE: pairs dealt out to time, row and column."""

    order: str = "contiguous"
    layout: str = "half"
    theta: float = 1e4
    fraction: float = 1.0
    sections: tuple[int, ...] = ()
    time_last: bool = False  # Whether the config has the sections of time last.

    def __call__(self, config: Part) -> Scheme:
        """Returns M-RoPE."""
        given = dict(rope_dict(config) or {})
        sections = tuple(given.pop("mrope_section", self.sections))
        dealt = given.pop("mrope_interleaved", None)
        require(
            dealt in (None, self.order == "interleaved"),
            f"from_hf: {config.where} has mrope_interleaved={dealt}; its type is {self.order}.",
        )
        rotary = read_rotary(config, given, theta=self.theta, fraction=self.fraction)
        if self.time_last:
            sections = sections[-1:] + sections[:-1]
        head_dim = head_size(config)
        dim = int(head_dim * rotary.fraction)
        return MRoPE(
            head_dim=head_dim,
            theta=rotary.theta,
            sections=sections,
            order=self.order,
            layout=self.layout,
            rotary_dim=0 if dim == head_dim else dim,
            scaling=rotary.scaling,
        )
