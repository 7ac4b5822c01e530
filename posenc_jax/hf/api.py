"""`from_hf` and `to_hf`: configs of transformers to schemes, and back to rotary parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from posenc_jax.checks import require
from posenc_jax.hf.model_types import MODEL_TYPES
from posenc_jax.hf.reading import Part
from posenc_jax.hf.rope import Rotary, rope_dict, write_rotary
from posenc_jax.layers import LayerSpec
from posenc_jax.rotary.layouts import rotary_dims
from posenc_jax.rotary.mrope import MRoPE
from posenc_jax.rotary.per_sequence_scaling import RoPEByLength
from posenc_jax.rotary.rope import RoPE
from posenc_jax.scheme import Scheme


def from_hf(config: Mapping[str, Any]) -> Scheme | tuple[LayerSpec, ...]:
    """Returns what a Hugging Face config says of positions.

    The model type decides what the config leaves out: the layout of pairs, which layers do not
    rotate, slopes, buckets. Names as in transformers 4 and 5 are read. The config of a model of
    several parts has one for each, as `text_config`: give that.

    Args:
      config: `config.json` as a dict.

    Returns:
      The scheme of all layers, or one `LayerSpec` for each where they differ or have tables of
      their own.

    Raises:
      ValueError: for an unknown model type, and for keys about positions that are unknown,
        missing or contradict each other; the message names them.

    >>> pe.from_hf({"model_type": "llama", "head_dim": 64, "rope_theta": 5e5}).theta
    500000.0
    """
    kind = config.get("model_type")
    require(
        kind in MODEL_TYPES,
        f"from_hf: model_type must be one of {sorted(MODEL_TYPES)}, got {kind!r}.",
    )
    part = Part(config, f"the {kind} config")
    scheme = MODEL_TYPES[str(kind)](part)
    part.finish()
    return scheme


def to_hf(
    scheme: Scheme | LayerSpec | Sequence[Scheme | LayerSpec],
    layer_types: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Returns `rope_parameters`, as configs of transformers 5 have them, for RoPE and M-RoPE.

    Layout and head size are not in them: they belong to the model type and to other keys.
    `from_hf(config | {"rope_parameters": to_hf(scheme)})` is the scheme again.

    Args:
      scheme: a scheme, or those of all layers.
      layer_types: the kind of each layer, as in the config. The dict then has one entry for
        each kind, None where layers have no positions.

    Raises:
      ValueError: for what has no such parameters, and layers of a kind that differ.

    >>> pe.to_hf(pe.RoPE(head_dim=64, theta=5e5, scaling=pe.PI(4.0)))
    {'rope_type': 'linear', 'rope_theta': 500000.0, 'factor': 4.0}
    """
    if layer_types is None:
        require(
            isinstance(scheme, Scheme | LayerSpec),
            f"to_hf: several schemes need layer_types, got {scheme!r}.",
        )
        return _parameters(_scheme(scheme))
    schemes = scheme if isinstance(scheme, Sequence) else ()
    require(
        len(schemes) == len(layer_types),
        f"to_hf: {len(layer_types)} layer_types need as many schemes, got {scheme!r}.",
    )
    out: dict[str, Any] = {}
    for one, kind in zip(map(_scheme, schemes), layer_types, strict=True):
        made = _parameters(one) if one.acts else None
        require(out.setdefault(kind, made) == made, f"to_hf: layers of type {kind!r} differ.")
    return out


def _scheme(x: Any) -> Scheme:
    return x.scheme if isinstance(x, LayerSpec) else x


def _parameters(scheme: Scheme) -> dict[str, Any]:
    if not isinstance(scheme, RoPE | RoPEByLength | MRoPE):
        raise ValueError(f"to_hf: only RoPE and MRoPE have rope parameters, got {scheme!r}.")
    dim = rotary_dims("to_hf", scheme.head_dim, scheme.rotary_dim, scheme.rotary_start)
    fraction = 1.0 if scheme.rotary_start else dim / scheme.head_dim
    out = write_rotary(Rotary(scheme.theta, fraction, scheme.scaling))
    if isinstance(scheme, MRoPE):
        out["mrope_section"] = [scheme.axes.count(axis) for axis in range(3)]
        if scheme.order == "alternating":
            out["mrope_section"] = out["mrope_section"][1:] + out["mrope_section"][:1]
        elif scheme.order == "interleaved":
            out["mrope_interleaved"] = True
    return out


def hf_logit_scale(config: Mapping[str, Any]) -> float | None:
    """Returns the factor on q . k that the model of a config uses; None: the scheme's own.

    Where a config changes it: Gemma's `query_pre_attn_scalar`, Granite's
    `attention_multiplier`, MPT's `softmax_scale`, and the `mscale_all_dim` of DeepSeek's YaRN.
    Give it to attention as `scale`.

    Raises:
      ValueError: for an unknown model type.

    >>> pe.hf_logit_scale({"model_type": "gemma3_text", "query_pre_attn_scalar": 256})
    0.0625
    """
    from posenc_jax.rotary.scaling.yarn import yarn_logit_scale

    kind = config.get("model_type")
    require(kind in MODEL_TYPES, f"hf_logit_scale: unknown model_type {kind!r}.")
    part = Part(config, f"the {kind} config")
    for name, power in (("query_pre_attn_scalar", -0.5), ("attention_multiplier", 1.0)):
        value = part.get(name)
        if value is not None:
            return float(value) ** power
    softmax_scale = (part.get("attn_config") or {}).get("softmax_scale")
    if softmax_scale is not None:
        return float(softmax_scale)
    if kind is not None and kind.startswith("gemma4"):
        return 1.0
    given = rope_dict(part) or {}
    if part.get("qk_rope_head_dim") is None or not given.get("mscale_all_dim"):
        return None
    size = part.need("qk_nope_head_dim") + part.need("qk_rope_head_dim")
    return yarn_logit_scale(size, given["factor"], given["mscale_all_dim"])
