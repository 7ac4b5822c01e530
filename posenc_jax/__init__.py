"""Position encodings for transformers in JAX: every scheme, one interface, exact numbers.

A scheme is a frozen dataclass of settings with pure functions, `SCHEMES` is the dict of schemes by
name, and `help(posenc_jax.RoPE)` describes one:

    embedding   NoPE (none), LearnedAbsolute, Sinusoidal, Sinusoidal2D, LearnableFourier
    rotary      RoPE, LearnedRoPE, SelectiveRoPE, AxialRoPE, RoPEMixed, MRoPE, LieRE, ComRoPE, XPos,
                PoPE, FoPE, RePo, RoPEPlusPlus, VORoPE, ReRoPE, SelfExtend, DualChunk, RoPEByLength
    bias        ALiBi, T5, KERPLELog, KERPLEPower, FIRE, Sandwich, BAM, DAPE, TUPE, Swin, SwinV2
    content     Shaw, TransformerXL, DeBERTa, Inkling, CoPE, FoX, CABLE, GRAPEA, PaTH,
                StickBreaking, PartialKeyOffset, ShortConv
    logits      SSMax, QueryTemperature

    frequencies of RoPE  PI, NTK, NTKByParts, YaRN, Llama3, LongRoPE, DynamicNTK, Proportional,
                         ClippedFrequencies, HighFrequenciesOnly, Resonance (FrequencyMap)
    combinations         chain, with_positions, on_axis, on_distances, streaming
    layers of a model    LayerSpec, QKNorm, layer_pattern

Functions and modules that use schemes:

    Flax layers          nnx, linen: Attention, PositionEncoding, AttentionFn
    functions            scheme_attention, scheme_cross_attention, scheme_embedding, scheme_tables,
                         new_cache (KVCache)
    attention itself     attention, AttentionCall, score_mod, and rules: LogitBias, ContentBias,
                         DotBias, SeparableBias, DenseBias, ValueBias, LogitsTransform
    sharded sequences    sharding: SequenceParallel, sequence_parallel_attention, zigzag
    positions            positions: padding, packing, random and other positions;
                         grid_coordinates, mrope_coordinates, resize_grid, resize_learned
    Hugging Face         from_hf, scheme_from_hf, attention_options_from_hf, to_hf,
                         heads_from_linear, split_qkv, permute_qk
    parts of schemes     apply_rope, apply_rotation, cos_sin, rope_frequencies, alibi_slopes,
                         sinusoidal_encoding, t5_bucket, short_convolution, yarn_logit_scale
    your own schemes     Scheme, Rotary, Rule, Acts, Traits; testing.check

Letters, in all shapes: B batch, T queries, S keys, N query heads, K key/value heads,
H head dim, D model dim, A coordinate axes.
"""

import difflib
import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from posenc_jax import positions, sharding
from posenc_jax.angles import cos_sin
from posenc_jax.cache.kv_cache import KVCache
from posenc_jax.engine.api import AttentionCall, attention
from posenc_jax.engine.rules import (
    ContentBias,
    DenseBias,
    DotBias,
    LogitBias,
    LogitsTransform,
    Rule,
    SeparableBias,
    ValueBias,
)
from posenc_jax.engine.score_mod import score_mod
from posenc_jax.functional.attention import scheme_attention, scheme_embedding, scheme_tables
from posenc_jax.functional.cross_attention import scheme_cross_attention
from posenc_jax.functional.new_cache import new_cache
from posenc_jax.hf.api import (
    attention_options_from_hf,
    from_hf,
    scheme_from_hf,
    to_hf,
)
from posenc_jax.hf.weights import heads_from_linear, split_qkv
from posenc_jax.ops.short_conv import short_convolution
from posenc_jax.positions.image_grids import grid_coordinates, resize_grid
from posenc_jax.positions.mrope import mrope_coordinates
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.additive.fourier import LearnableFourier
from posenc_jax.schemes.additive.learned import LearnedAbsolute, resize_learned
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.additive.sinusoidal import Sinusoidal, sinusoidal_encoding
from posenc_jax.schemes.additive.sinusoidal_2d import Sinusoidal2D
from posenc_jax.schemes.bias.alibi import ALiBi, alibi_slopes
from posenc_jax.schemes.bias.bam import BAM
from posenc_jax.schemes.bias.dape import DAPE
from posenc_jax.schemes.bias.fire import FIRE
from posenc_jax.schemes.bias.kerple import KERPLELog, KERPLEPower
from posenc_jax.schemes.bias.sandwich import Sandwich
from posenc_jax.schemes.bias.swin import Swin
from posenc_jax.schemes.bias.swin_v2 import SwinV2
from posenc_jax.schemes.bias.t5 import T5, t5_bucket
from posenc_jax.schemes.bias.tupe import TUPE
from posenc_jax.schemes.combinators.chain import chain
from posenc_jax.schemes.combinators.on_axis import on_axis
from posenc_jax.schemes.combinators.on_distances import on_distances
from posenc_jax.schemes.combinators.streaming import streaming
from posenc_jax.schemes.combinators.with_positions import with_positions
from posenc_jax.schemes.content.cable import CABLE
from posenc_jax.schemes.content.cope import CoPE
from posenc_jax.schemes.content.deberta import DeBERTa
from posenc_jax.schemes.content.fox import FoX
from posenc_jax.schemes.content.grape import GRAPEA
from posenc_jax.schemes.content.inkling import Inkling
from posenc_jax.schemes.content.partial_key_offset import PartialKeyOffset
from posenc_jax.schemes.content.path import PaTH
from posenc_jax.schemes.content.shaw import Shaw
from posenc_jax.schemes.content.short_conv import ShortConv
from posenc_jax.schemes.content.stick_breaking import StickBreaking
from posenc_jax.schemes.content.transformer_xl import TransformerXL
from posenc_jax.schemes.layer_spec import LayerSpec, layer_pattern
from posenc_jax.schemes.logit_scale.ssmax import SSMax
from posenc_jax.schemes.logit_scale.temperature import QueryTemperature
from posenc_jax.schemes.rotary.axial import AxialRoPE
from posenc_jax.schemes.rotary.base import Rotary
from posenc_jax.schemes.rotary.comrope import ComRoPE
from posenc_jax.schemes.rotary.dual_chunk import DualChunk
from posenc_jax.schemes.rotary.fope import FoPE
from posenc_jax.schemes.rotary.frequencies import FrequencyMap, rope_frequencies
from posenc_jax.schemes.rotary.layouts import permute_qk
from posenc_jax.schemes.rotary.learned_rope import LearnedRoPE
from posenc_jax.schemes.rotary.liere import LieRE
from posenc_jax.schemes.rotary.mrope import MRoPE
from posenc_jax.schemes.rotary.per_sequence_scaling import RoPEByLength
from posenc_jax.schemes.rotary.pope import PoPE
from posenc_jax.schemes.rotary.repo import RePo
from posenc_jax.schemes.rotary.rerope import ReRoPE
from posenc_jax.schemes.rotary.rope import RoPE, apply_rope
from posenc_jax.schemes.rotary.rope_mixed import RoPEMixed
from posenc_jax.schemes.rotary.rope_pp import RoPEPlusPlus
from posenc_jax.schemes.rotary.rotate import apply_rotation
from posenc_jax.schemes.rotary.scaling.clipped import ClippedFrequencies
from posenc_jax.schemes.rotary.scaling.dynamic_ntk import DynamicNTK
from posenc_jax.schemes.rotary.scaling.high_frequency import HighFrequenciesOnly
from posenc_jax.schemes.rotary.scaling.interpolation import NTK, PI
from posenc_jax.schemes.rotary.scaling.llama3 import Llama3
from posenc_jax.schemes.rotary.scaling.longrope import LongRoPE
from posenc_jax.schemes.rotary.scaling.ntk_by_parts import NTKByParts
from posenc_jax.schemes.rotary.scaling.p_rope import Proportional
from posenc_jax.schemes.rotary.scaling.resonance import Resonance
from posenc_jax.schemes.rotary.scaling.yarn import YaRN, yarn_logit_scale
from posenc_jax.schemes.rotary.selective import SelectiveRoPE
from posenc_jax.schemes.rotary.self_extend import SelfExtend
from posenc_jax.schemes.rotary.vo_rope import VORoPE
from posenc_jax.schemes.rotary.xpos import XPos
from posenc_jax.schemes.scheme import Acts, Scheme, Traits

if TYPE_CHECKING:
    from posenc_jax import linen as linen
    from posenc_jax import nnx as nnx
    from posenc_jax import testing as testing

__all__ = [
    "BAM",
    "CABLE",
    "DAPE",
    "FIRE",
    "GRAPEA",
    "NTK",
    "PI",
    "SCHEMES",
    "T5",
    "TUPE",
    "ALiBi",
    "Acts",
    "AttentionCall",
    "AxialRoPE",
    "ClippedFrequencies",
    "CoPE",
    "ComRoPE",
    "ContentBias",
    "DeBERTa",
    "DenseBias",
    "DotBias",
    "DualChunk",
    "DynamicNTK",
    "FoPE",
    "FoX",
    "FrequencyMap",
    "HighFrequenciesOnly",
    "Inkling",
    "KERPLELog",
    "KERPLEPower",
    "KVCache",
    "LayerSpec",
    "LearnableFourier",
    "LearnedAbsolute",
    "LearnedRoPE",
    "LieRE",
    "Llama3",
    "LogitBias",
    "LogitsTransform",
    "LongRoPE",
    "MRoPE",
    "NTKByParts",
    "NoPE",
    "PaTH",
    "PartialKeyOffset",
    "PoPE",
    "Proportional",
    "QKNorm",
    "QueryTemperature",
    "RePo",
    "ReRoPE",
    "Resonance",
    "RoPE",
    "RoPEByLength",
    "RoPEMixed",
    "RoPEPlusPlus",
    "Rotary",
    "Rule",
    "SSMax",
    "Sandwich",
    "Scheme",
    "SelectiveRoPE",
    "SelfExtend",
    "SeparableBias",
    "Shaw",
    "ShortConv",
    "Sinusoidal",
    "Sinusoidal2D",
    "StickBreaking",
    "Swin",
    "SwinV2",
    "Traits",
    "TransformerXL",
    "VORoPE",
    "ValueBias",
    "XPos",
    "YaRN",
    "alibi_slopes",
    "apply_rope",
    "apply_rotation",
    "attention",
    "attention_options_from_hf",
    "chain",
    "cos_sin",
    "from_hf",
    "grid_coordinates",
    "heads_from_linear",
    "layer_pattern",
    "mrope_coordinates",
    "new_cache",
    "on_axis",
    "on_distances",
    "permute_qk",
    "positions",
    "resize_grid",
    "resize_learned",
    "rope_frequencies",
    "scheme_attention",
    "scheme_cross_attention",
    "scheme_embedding",
    "scheme_from_hf",
    "scheme_tables",
    "score_mod",
    "sharding",
    "short_convolution",
    "sinusoidal_encoding",
    "split_qkv",
    "streaming",
    "t5_bucket",
    "to_hf",
    "with_positions",
    "yarn_logit_scale",
]
__version__ = "0.1.0"


class _Schemes(dict[str, type[Scheme]]):
    """Scheme classes by name; the error for an unknown name suggests a similar one."""

    def __missing__(self, name):
        near = difflib.get_close_matches(str(name), self, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(self)}."
        raise KeyError(f"unknown scheme {name!r}{hint}")


SCHEMES: dict[str, type[Scheme]] = _Schemes(
    (thing.name, thing)
    for thing in list(globals().values())
    if isinstance(thing, type) and issubclass(thing, Scheme) and thing.name
)
"""Every exported scheme class by its `name`."""

if not TYPE_CHECKING:  # A type checker would take every name for a module.

    def __getattr__(name: str) -> ModuleType:
        """Imports `posenc_jax.nnx`, `posenc_jax.linen` and `posenc_jax.testing` on first use."""
        if name in ("linen", "nnx", "testing"):
            return importlib.import_module(f"posenc_jax.{name}")
        raise AttributeError(f"module 'posenc_jax' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Returns all names, including modules that are imported on first use."""
        return sorted({*globals(), "linen", "nnx", "testing"})
