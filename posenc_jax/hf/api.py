"""`from_hf` and `to_hf`: configs of transformers to schemes, and back to rotary parameters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from posenc_jax.checks import did_you_mean, require
from posenc_jax.hf.attention_options import attention_options, with_attention_settings
from posenc_jax.hf.config_reader import TrackedConfig, file_of, model_type_defaults
from posenc_jax.hf.model_types import MODEL_TYPES, NOT_READ
from posenc_jax.hf.rope import fraction_of, write_rope
from posenc_jax.schemes.layer_spec import LayerSpec
from posenc_jax.schemes.rotary.layouts import rotary_dims
from posenc_jax.schemes.rotary.mrope import MRoPE
from posenc_jax.schemes.rotary.per_sequence_scaling import RoPEByLength
from posenc_jax.schemes.rotary.rope import RoPE
from posenc_jax.schemes.scheme import Scheme

_Reader = Callable[[TrackedConfig], Any]


class HasToDict(Protocol):
    """A config object of transformers."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the config as a dict."""
        ...


def from_hf(
    config: Mapping[str, Any] | HasToDict,
    *,
    decoder: bool | None = None,
    part: str = "text_config",
) -> tuple[LayerSpec, ...]:
    """Returns the attention of each layer that a Hugging Face config describes.

    A `LayerSpec` has the scheme, the window, the factor on q . k, the softcap, and whether there
    are sinks and QK-norm; temperatures are schemes. It has neither norms of values (Gemma 4) and of
    latent projections (DeepSeek), nor their factors (LongCat-Flash, MiMo-V2), nor learned factors
    on rotated queries (Dory), nor clipped projections (`clip_qkv`).

    The model type implies settings that no key holds: the layout of pairs, the layers that rotate
    or have a window, slopes, buckets. A missing key has the default of transformers for this model
    type, from `posenc_jax/hf/defaults.json`. Names of transformers 4 and 5 are read. A key about
    positions or windows that is not read raises.

    Layers have separate parameters, unless `scheme.traits.shared_over_layers`; exceptions are UMT5,
    with a `T5` table in each layer, and MPNet, with one in the chains of all layers. Schemes that
    act on the embedding, such as `LearnedAbsolute`, are applied once, at the input of the model,
    though every layer names them.
    Layers without attention (linear attention, Mamba, convolutions, MLPs) are named by
    `LayerSpec.mixer` and have `NoPE`. Layers of DeepSeek-V4 that compress have the scheme and the
    window of tokens; the model adds compressed entries. Longformer's have the window of its local
    attention; tokens can also attend globally. Layers that a model runs several times (Dory, the
    looped Inkling-2) are returned once. Towers of images rotate by row and column; the tables of
    patches at their input are not read.

    Args:
      config: `config.json` as a dict, or a config object of transformers. Of a config of several
        parts the `text_config` is read; an outer key of the same name must agree with it.
      decoder: whether to read the decoder of a model with an encoder and a decoder (T5, mT5,
        UMT5, Whisper, BART, mBART, MVP, PLBart, Blenderbot, Marian, Pegasus). Required for these,
        refused for others.
      part: the key of the part to read of a config of several, such as "vision_config".

    Returns:
      The layers of the model. If they are alike, `scheme_from_hf` returns their scheme.

    Raises:
      ValueError: for an unknown model type; for keys about positions that are unknown, missing, of
        the wrong type or contradict each other; for values that the scheme refuses.
      TypeError: if the config is neither a dict nor has `to_dict`.

    >>> layers = pe.from_hf({"model_type": "gemma2", "num_hidden_layers": 4})
    >>> [layer.window for layer in layers]
    [4096, None, 4096, None]
    >>> pe.from_hf({"model_type": "llama", "head_dim": 64, "rope_theta": 5e5})[0].scheme.theta
    500000.0
    >>> config = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2, "num_heads": 16}}
    >>> pe.from_hf(config, part="vision_config")[0].scheme.name
    'axial_rope'
    """
    return _read("from_hf", config, decoder, part, _layers)


def _layers(tracked: TrackedConfig) -> tuple[LayerSpec, ...]:
    model_type = MODEL_TYPES[tracked.model_type]
    for key, values in model_type.only.items():
        tracked.only(key, *values)
    for key, other in model_type.same.items():
        value, expected = tracked.explicit(key), tracked.get(other)
        tracked.check(value in (None, expected), f"{key}={value} and {other}={expected}")
    layers = with_attention_settings(tracked, model_type.layers(tracked))
    tracked.finish()
    return layers


def attention_options_from_hf(
    config: Mapping[str, Any] | HasToDict,
    *,
    decoder: bool | None = None,
    part: str = "text_config",
) -> tuple[dict[str, Any], ...]:
    """Returns the arguments of `posenc_jax.nnx.Attention` for each layer of a model.

    They are `model_dim`, `num_heads`, `num_kv_heads`, `head_dim`, `use_bias`, `is_causal`, and
    `position`, the layer that `from_hf` returns. `heads_from_linear` and `split_qkv` convert the
    weights. The caller chooses dropout and dtypes. Schemes that act on the embedding, such as
    `LearnedAbsolute`, are omitted: they belong to the input of the model. Of layers without
    attention, whose `position.mixer` names their operation, only `position` is meant.

    Args:
      config: see `from_hf`.
      decoder: see `from_hf`.
      part: see `from_hf`.

    Returns:
      One dict for each layer. `use_bias` is a bool, or one for each of "query", "key", "value" and
      "out" if they differ.

    Raises:
      ValueError: as `from_hf`, and for model types whose attention `Attention` does not support,
        such as latent projections; the message gives the reason.

    >>> config = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4}
    >>> config |= {"num_key_value_heads": 2, "num_hidden_layers": 2}
    >>> options = pe.attention_options_from_hf(config)[0]
    >>> options["num_kv_heads"], options["head_dim"], options["use_bias"]["out"]
    (2, 16, False)
    """
    return _read(
        "attention_options_from_hf",
        config,
        decoder,
        part,
        lambda tracked: attention_options(tracked, _layers(tracked)),
    )


def scheme_from_hf(
    config: Mapping[str, Any] | HasToDict,
    *,
    decoder: bool | None = None,
    part: str = "text_config",
) -> Scheme:
    """Returns the scheme of a model whose layers are alike and attend to all tokens.

    `from_hf` returns the other settings of attention.

    Args:
      config: see `from_hf`.
      decoder: see `from_hf`.
      part: see `from_hf`.

    Raises:
      ValueError: as `from_hf`, and if layers differ or have a window; the message names them.

    >>> pe.scheme_from_hf({"model_type": "bloom", "n_head": 4}) == pe.ALiBi(num_heads=4)
    True
    """
    layers = from_hf(config, decoder=decoder, part=part)
    groups: dict[LayerSpec, list[int]] = {}
    for i, layer in enumerate(layers):
        groups.setdefault(layer, []).append(i)
    first = layers[0]
    plain = first.window is None and first.chunk_size is None and first.mixer == "attention"
    if len(groups) == 1 and plain:
        return first.scheme
    texts = "; ".join(f"layers {_ranges(i)}: {_text(layer)}" for layer, i in groups.items())
    alone = "a scheme holds no window" if first.mixer == "attention" else "no layer has attention"
    reason = "layers differ" if len(groups) > 1 else alone
    raise ValueError(f"scheme_from_hf: {reason}, use from_hf: {texts}.")


def _ranges(numbers: list[int]) -> str:
    """Returns [0, 1, 2, 4] as "0-2, 4"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _text(layer: LayerSpec) -> str:
    if layer.mixer != "attention":
        return layer.mixer
    window = "" if layer.window is None else f" in a window of {layer.window}"
    chunk = "" if layer.chunk_size is None else f" in chunks of {layer.chunk_size}"
    return f"{layer.scheme}{window}{chunk}"


def _as_dict(label: str, config: Any) -> Mapping[str, Any]:
    values = file_of(config) if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        raise TypeError(f"{label} must be a dict or have to_dict, got {config!r:.80}.")
    return values


def _read(function: str, config: Any, decoder: bool | None, part: str, read: _Reader) -> Any:
    """Returns a reader's result; its errors become a `ValueError` of the function."""
    values = _as_dict(f"{function}: config", config)
    try:
        values = values if part == "text_config" else _part_of(values, part)
        return _read_text_model(values, decoder, read)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{function}: {error}") from error


def _part_of(config: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Returns a part of a config, with its model type.

    Released files often have no type there, or repeat the type of the whole model.
    """
    kind, inner = config.get("model_type"), config.get(part)
    require(inner is not None, f"the {kind} config has no {part!r}.")
    inner = _as_dict(f"the {part} of the {kind} config", inner)
    stem = part.removesuffix("_config")
    named = inner.get("model_type", kind)
    kinds = [] if named == kind else [named]
    kinds += [f"{x}_{stem}{end}" for x in (named, kind) for end in ("", "_encoder", "_model")]
    kinds = [_RENAMED.get(str(x), x) for x in kinds]
    return {**inner, "model_type": next((x for x in kinds if x in MODEL_TYPES), kinds[0])}


# Names in released configs, which transformers replaces.
_RENAMED = {"exaone4_5_text": "exaone4", "kimi_k2": "deepseek_v3"}
_RENAMED |= {"step3p7_vision": "step3p5_vision"}
# Outer keys with another meaning than in the text_config: hidden_size of Ovis 2, PaliGemma 2.
_OF_THE_WHOLE = {"hidden_size", "is_decoder", "is_encoder_decoder", "model_type", "pad_token_id"}
_OF_THE_WHOLE |= {"text_config", "transformers_version"}
_OF_OTHER_PARTS = {"musicflamingo": {"max_position_embeddings", "rope_parameters"}}  # Of sounds.


def _read_text_model(config: Mapping[str, Any], decoder: bool | None, read: _Reader) -> Any:
    """Reads the config of the text model, under a supported model type."""
    kind, inner = config.get("model_type"), config.get("text_config")
    require(
        kind is None or isinstance(kind, str),
        f"the config must have a string as model_type, got {kind!r:.80}.",
    )
    kind = _RENAMED.get(str(kind), kind)
    if kind in NOT_READ:
        raise ValueError(f"unknown model_type {kind!r}; {NOT_READ[kind]}.")
    if kind not in MODEL_TYPES and inner is not None:
        inner = _as_dict(f"the text_config of the {kind} config", inner)
        outer = TrackedConfig(config, f"the {kind} config beside its text_config")
        outer.read.update(inner)  # Compared below.
        outer.finish()
        require(
            "model_type" in inner or f"{kind}_text" in MODEL_TYPES,
            f"the text_config of the {kind} config must have 'model_type'.",
        )
        version = config.get("transformers_version")
        inner = {"model_type": f"{kind}_text", "transformers_version": version, **inner}
        out = _read_text_model(inner, decoder, read)
        skipped = _OF_THE_WHOLE | _OF_OTHER_PARTS.get(str(kind), set())
        for key in (key for key in config if key in inner and key not in skipped):
            require(
                config[key] == inner[key] or _agrees(inner, key, config[key], decoder, read, out),
                f"the {kind} config has {key}={config[key]!r} and its text_config "
                f"{key}={inner[key]!r}.",
            )
        return out
    if kind not in MODEL_TYPES and f"{kind}_text" in MODEL_TYPES:
        kind = f"{kind}_text"  # Keys of the text model at the top, as in transformers 4.
    require(kind is not None, "the config must have 'model_type'.")
    if kind not in MODEL_TYPES:
        hint = did_you_mean(str(kind), MODEL_TYPES) or "; all are in posenc_jax.hf.model_types."
        raise ValueError(f"unknown model_type {kind!r}{hint}")
    kind = str(kind)
    defaults = model_type_defaults().get(kind)
    config = {**config, "model_type": kind}
    return read(TrackedConfig(config, f"the {kind} config", defaults, decoder))


def _agrees(config, key, value, decoder, read, out):
    """Returns whether a config with another value of a key is read alike."""
    try:
        return _read_text_model({**config, key: value}, decoder, read) == out
    except (TypeError, ValueError):
        return False


def to_hf(
    scheme: Scheme | LayerSpec | Sequence[Scheme | LayerSpec],
    layer_types: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Returns the `rope_parameters` of RoPE or M-RoPE, as in configs of transformers 5.

    Layout, head size and windows belong to the model type and to other keys.
    `from_hf(config | {"rope_parameters": to_hf(layers)})` has the same schemes, for a config
    without `rope_scaling` whose model type has `rope_parameters`.

    Args:
      scheme: a scheme, or the schemes of all layers.
      layer_types: the kind of each layer, as in the config. The dict then has one entry for
        each kind, None where layers have no positions. None: all layers are alike.

    Raises:
      ValueError: for schemes without such parameters, for a rotation inside a head, and for layers
        of one kind that differ.

    >>> pe.to_hf(pe.RoPE(head_dim=64, theta=5e5, scaling=pe.PI(4.0)))
    {'rope_type': 'linear', 'rope_theta': 500000.0, 'partial_rotary_factor': 1.0, 'factor': 4.0}
    """
    layers = scheme if isinstance(scheme, Sequence) else [scheme]
    schemes = [x.scheme if isinstance(x, LayerSpec) else x for x in layers]
    if layer_types is None:
        require(
            len(set(schemes)) == 1, f"to_hf: schemes that differ need layer_types, got {scheme!r}."
        )
        return _parameters(schemes[0])
    require(
        isinstance(scheme, Sequence) and len(schemes) == len(layer_types),
        f"to_hf: {len(layer_types)} layer_types need as many schemes, got {scheme!r}.",
    )
    out: dict[str, Any] = {}
    for layer, kind in zip(schemes, layer_types, strict=True):
        parameters = _parameters(layer) if layer.acts else None
        require(
            out.setdefault(kind, parameters) == parameters,
            f"to_hf: layers of type {kind!r} differ.",
        )
    return out


def _parameters(scheme: Scheme) -> dict[str, Any]:
    if not isinstance(scheme, RoPE | RoPEByLength | MRoPE):
        raise ValueError(f"to_hf: only RoPE and MRoPE have rope parameters, got {scheme!r}.")
    start = scheme.rotary_start
    dim = rotary_dims("to_hf", scheme.head_dim, scheme.rotary_dim, start)
    require(
        start in (0, scheme.head_dim - dim),
        f"to_hf: transformers rotates the start or the end of a head, got rotary_start={start} and "
        f"{dim} rotary dimensions of {scheme.head_dim}.",
    )
    # If the end rotates, the model type has sizes for both parts of a head.
    fraction = None if start else fraction_of(dim, scheme.head_dim)
    out = write_rope(scheme.theta, fraction, scheme.scaling)
    if isinstance(scheme, MRoPE):
        out["mrope_section"] = [scheme.axes.count(axis) for axis in range(3)]
        if scheme.order == "alternating":
            out["mrope_section"] = out["mrope_section"][1:] + out["mrope_section"][:1]
        elif scheme.order == "interleaved":
            out["mrope_interleaved"] = True
    return out
