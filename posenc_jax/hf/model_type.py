"""`ModelType`: all that configs of a model type do not say, and how their layers are read.

`model_types.py` has the table of all.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from posenc_jax.hf.config_reader import TrackedConfig, as_many_key_heads, key_heads
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.layer_spec import LayerSpec, Sinks

Layers = tuple[LayerSpec, ...]
LayersReader = Callable[[TrackedConfig], Layers]
ScaleReader = Callable[[TrackedConfig, int], float | None]


@dataclasses.dataclass(frozen=True)
class ModelType:
    """The layers and the settings of attention of a model type.

    Attributes:
      layers: reads the scheme and the window of each layer.
      biases: whether the projections to q, k, v and the output have biases, as bools or as the
        keys that say so; or what `Attention` lacks for the attention of the model type. None: as
        the key says that its config class has, and none without such a key.
      qk_norm: the normalisation of queries and keys, whose epsilon the config has, or its reader; a
        key that the config class has for it switches it off.
      qk_norm_rotating_only: whether only layers that rotate have the norm.
      sinks: as in `LayerSpec`.
      sinks_windowed_only: whether only layers with a window have them.
      scale_key: the key for the factor on q . k, see `SCALE_POWERS`, beside those that the config
        class has.
      unused_scale_key: a key of `SCALE_POWERS` that releases have without effect.
      scale: reads the factor of a layer in another way; None: 1/sqrt(H).
      causality: "causal"; "bidirectional"; "is_decoder", causal with this key; or "decoder", causal
        in the decoder of an encoder and a decoder.
      key_heads: reads the number of key heads.
      ignores_head_dim: whether H is always D / N.
      clips_projections: whether `clip_qkv` clips q, k and v.
      ambiguous_keys: keys that only some attention functions of transformers read.
      only: the values of a key that are read.
      same: keys that repeat another key.
    """

    layers: LayersReader
    biases: tuple[bool | str, ...] | str | None = None
    qk_norm: QKNorm | Callable[[TrackedConfig], QKNorm] | None = None
    qk_norm_rotating_only: bool = False
    sinks: Sinks = False
    sinks_windowed_only: bool = False
    scale_key: str | None = None
    unused_scale_key: str | None = None
    scale: ScaleReader | None = None
    causality: str = "causal"
    key_heads: Callable[[TrackedConfig, int], int] = key_heads
    ignores_head_dim: bool = False
    clips_projections: bool = False
    ambiguous_keys: tuple[str, ...] = ()
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    same: Mapping[str, str] = dataclasses.field(default_factory=dict)


SCALE_POWERS = {"query_pre_attn_scalar": -0.5, "attention_multiplier": 1.0}
"""The keys for the factor on q . k, and the power of the value that it is."""

NONE, ALL, QKV = (False,) * 4, (True,) * 4, (True, True, True, False)
BY_KEY = ("attention_bias",) * 4
QKV_BY_KEY = (*("attention_bias",) * 3, False)
"""Values of `ModelType.biases`."""

RMS = QKNorm()
GEMMA = QKNorm(scale_offset=1.0)
PROJECTED = QKNorm(over="projection", scale="per_head")
PER_HEAD = QKNorm("layer", scale="per_head")
WITH_BIAS = QKNorm("layer", use_bias=True)
LATENT = "latent projections"
GATE = "a gate on its output"


def multi_head(
    layers: LayersReader, biases: tuple[bool | str, ...] | str | None = ALL, **settings: Any
) -> ModelType:
    """Returns a model type with one key head per query head, and H = D / N."""
    return ModelType(layers, biases, key_heads=as_many_key_heads, ignores_head_dim=True, **settings)


def unscaled(config: TrackedConfig, layer: int) -> float:
    """Returns 1, the factor on q . k of models without one."""
    return 1.0
