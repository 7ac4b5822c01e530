"""Position encodings for transformers in JAX: every scheme, one interface, exact numbers.

A scheme is a frozen dataclass of settings with pure functions, `SCHEMES` is the dict of schemes by
name, and `help(posenc_jax.RoPE)` describes one:

    embedding   NoPE (none), LearnedAbsolute, Sinusoidal, Sinusoidal2D
    rotary      RoPE, LearnedRoPE, AxialRoPE, RoPEMixed, MRoPE, XPos, PoPE, RePo, VORoPE, ReRoPE,
                SelfExtend, DualChunk, RoPEByLength
    bias        ALiBi, T5, KERPLELog, FIRE, TUPE, Swin, SwinV2
    content     Shaw, TransformerXL, DeBERTa, Inkling, CoPE, FoX, GRAPEA, PaTH, StickBreaking,
                PartialKeyOffset
    logits      SSMax, QueryTemperature
    few users   contrib: schemes and random positions without a promise of stability

    frequencies of RoPE  PI, NTK, NTKByParts, YaRN, Llama3, LongRoPE, DynamicNTK, Proportional,
                         ClippedFrequencies, HighFrequenciesOnly, Resonance (FrequencyMap)
    combinations         chain, with_positions, on_axis, on_distances, streaming
    layers of a model    LayerSpec, QKNorm, SlidingWindow, layer_pattern

Functions and modules that use schemes:

    Flax layers          nnx, linen: Attention, PositionEncoding, AttentionFn
    functions            scheme_attention, scheme_cross_attention, scheme_embedding, scheme_tables,
                         new_cache (KVCache)
    attention itself     attention, AttentionCall, score_mod, block_mask (BlockMask), and rules:
                         LogitBias, ContentBias, DotBias, SeparableBias, DenseBias, ValueBias,
                         LogitsTransform
    sharded sequences    sharding: SequenceParallel, sequence_parallel_attention, zigzag
    positions            positions: padding, packing, trees, random and other positions;
                         grid_coordinates, augmented_coordinates, mrope_coordinates,
                         resize_grid, resize_learned
    Hugging Face         from_hf, scheme_from_hf, attention_options_from_hf, to_hf,
                         heads_from_linear, split_qkv, permute_qk
    parts of schemes     apply_rope, apply_rotation, cos_sin, rope_frequencies, alibi_slopes,
                         sinusoidal_encoding, t5_bucket, short_convolution, yarn_logit_scale
    your own schemes     Scheme, Rotary, Rule, Acts, Traits; testing.check
    implementations      Implementation, Problem
    names of schemes     SCHEMES

Letters, in all shapes: B batch, T queries, S keys, N query heads, K key/value heads,
H head dim, D model dim, A coordinate axes.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from posenc_jax import checks
from posenc_jax import contrib as contrib
from posenc_jax import positions as positions
from posenc_jax import sharding as sharding
from posenc_jax.angles import cos_sin as cos_sin
from posenc_jax.cache.kv_cache import KVCache as KVCache
from posenc_jax.engine.api import AttentionCall as AttentionCall
from posenc_jax.engine.api import attention as attention
from posenc_jax.engine.block_mask import BlockMask as BlockMask
from posenc_jax.engine.block_mask import block_mask as block_mask
from posenc_jax.engine.mask import SlidingWindow as SlidingWindow
from posenc_jax.engine.problem import Implementation as Implementation
from posenc_jax.engine.problem import Problem as Problem
from posenc_jax.engine.rule import Rule as Rule
from posenc_jax.engine.rules import ContentBias as ContentBias
from posenc_jax.engine.rules import DenseBias as DenseBias
from posenc_jax.engine.rules import DotBias as DotBias
from posenc_jax.engine.rules import LogitBias as LogitBias
from posenc_jax.engine.rules import LogitsTransform as LogitsTransform
from posenc_jax.engine.rules import SeparableBias as SeparableBias
from posenc_jax.engine.rules import ValueBias as ValueBias
from posenc_jax.engine.score_mod import score_mod as score_mod
from posenc_jax.functional.attention import scheme_attention as scheme_attention
from posenc_jax.functional.attention import scheme_embedding as scheme_embedding
from posenc_jax.functional.attention import scheme_tables as scheme_tables
from posenc_jax.functional.cross_attention import scheme_cross_attention as scheme_cross_attention
from posenc_jax.functional.new_cache import new_cache as new_cache
from posenc_jax.hf.api import attention_options_from_hf as attention_options_from_hf
from posenc_jax.hf.api import from_hf as from_hf
from posenc_jax.hf.api import scheme_from_hf as scheme_from_hf
from posenc_jax.hf.api import to_hf as to_hf
from posenc_jax.hf.weights import heads_from_linear as heads_from_linear
from posenc_jax.hf.weights import split_qkv as split_qkv
from posenc_jax.ops.short_conv import short_convolution as short_convolution
from posenc_jax.positions.image_grids import augmented_coordinates as augmented_coordinates
from posenc_jax.positions.image_grids import grid_coordinates as grid_coordinates
from posenc_jax.positions.image_grids import resize_grid as resize_grid
from posenc_jax.positions.mrope import mrope_coordinates as mrope_coordinates
from posenc_jax.qk_norm import QKNorm as QKNorm
from posenc_jax.schemes.additive.learned import LearnedAbsolute as LearnedAbsolute
from posenc_jax.schemes.additive.learned import resize_learned as resize_learned
from posenc_jax.schemes.additive.none import NoPE as NoPE
from posenc_jax.schemes.additive.sinusoidal import Sinusoidal as Sinusoidal
from posenc_jax.schemes.additive.sinusoidal import sinusoidal_encoding as sinusoidal_encoding
from posenc_jax.schemes.additive.sinusoidal_2d import Sinusoidal2D as Sinusoidal2D
from posenc_jax.schemes.bias.alibi import ALiBi as ALiBi
from posenc_jax.schemes.bias.alibi import alibi_slopes as alibi_slopes
from posenc_jax.schemes.bias.fire import FIRE as FIRE
from posenc_jax.schemes.bias.kerple import KERPLELog as KERPLELog
from posenc_jax.schemes.bias.swin import Swin as Swin
from posenc_jax.schemes.bias.swin_v2 import SwinV2 as SwinV2
from posenc_jax.schemes.bias.t5 import T5 as T5
from posenc_jax.schemes.bias.t5 import t5_bucket as t5_bucket
from posenc_jax.schemes.bias.tupe import TUPE as TUPE
from posenc_jax.schemes.combinators.chain import chain as chain
from posenc_jax.schemes.combinators.on_axis import on_axis as on_axis
from posenc_jax.schemes.combinators.on_distances import on_distances as on_distances
from posenc_jax.schemes.combinators.streaming import streaming as streaming
from posenc_jax.schemes.combinators.with_positions import with_positions as with_positions
from posenc_jax.schemes.content.cope import CoPE as CoPE
from posenc_jax.schemes.content.deberta import DeBERTa as DeBERTa
from posenc_jax.schemes.content.fox import FoX as FoX
from posenc_jax.schemes.content.grape import GRAPEA as GRAPEA
from posenc_jax.schemes.content.inkling import Inkling as Inkling
from posenc_jax.schemes.content.partial_key_offset import PartialKeyOffset as PartialKeyOffset
from posenc_jax.schemes.content.path import PaTH as PaTH
from posenc_jax.schemes.content.shaw import Shaw as Shaw
from posenc_jax.schemes.content.stick_breaking import StickBreaking as StickBreaking
from posenc_jax.schemes.content.transformer_xl import TransformerXL as TransformerXL
from posenc_jax.schemes.layer_spec import LayerSpec as LayerSpec
from posenc_jax.schemes.layer_spec import layer_pattern as layer_pattern
from posenc_jax.schemes.logit_scale.ssmax import SSMax as SSMax
from posenc_jax.schemes.logit_scale.temperature import QueryTemperature as QueryTemperature
from posenc_jax.schemes.rotary.axial import AxialRoPE as AxialRoPE
from posenc_jax.schemes.rotary.base import Rotary as Rotary
from posenc_jax.schemes.rotary.dual_chunk import DualChunk as DualChunk
from posenc_jax.schemes.rotary.frequencies import FrequencyMap as FrequencyMap
from posenc_jax.schemes.rotary.frequencies import rope_frequencies as rope_frequencies
from posenc_jax.schemes.rotary.layouts import permute_qk as permute_qk
from posenc_jax.schemes.rotary.learned_rope import LearnedRoPE as LearnedRoPE
from posenc_jax.schemes.rotary.mrope import MRoPE as MRoPE
from posenc_jax.schemes.rotary.per_sequence_scaling import RoPEByLength as RoPEByLength
from posenc_jax.schemes.rotary.pope import PoPE as PoPE
from posenc_jax.schemes.rotary.repo import RePo as RePo
from posenc_jax.schemes.rotary.rerope import ReRoPE as ReRoPE
from posenc_jax.schemes.rotary.rope import RoPE as RoPE
from posenc_jax.schemes.rotary.rope import apply_rope as apply_rope
from posenc_jax.schemes.rotary.rope_mixed import RoPEMixed as RoPEMixed
from posenc_jax.schemes.rotary.rotate import apply_rotation as apply_rotation
from posenc_jax.schemes.rotary.scaling.clipped import ClippedFrequencies as ClippedFrequencies
from posenc_jax.schemes.rotary.scaling.dynamic_ntk import DynamicNTK as DynamicNTK
from posenc_jax.schemes.rotary.scaling.high_frequency import (
    HighFrequenciesOnly as HighFrequenciesOnly,
)
from posenc_jax.schemes.rotary.scaling.interpolation import NTK as NTK
from posenc_jax.schemes.rotary.scaling.interpolation import PI as PI
from posenc_jax.schemes.rotary.scaling.llama3 import Llama3 as Llama3
from posenc_jax.schemes.rotary.scaling.longrope import LongRoPE as LongRoPE
from posenc_jax.schemes.rotary.scaling.ntk_by_parts import NTKByParts as NTKByParts
from posenc_jax.schemes.rotary.scaling.p_rope import Proportional as Proportional
from posenc_jax.schemes.rotary.scaling.resonance import Resonance as Resonance
from posenc_jax.schemes.rotary.scaling.yarn import YaRN as YaRN
from posenc_jax.schemes.rotary.scaling.yarn import yarn_logit_scale as yarn_logit_scale
from posenc_jax.schemes.rotary.self_extend import SelfExtend as SelfExtend
from posenc_jax.schemes.rotary.vo_rope import VORoPE as VORoPE
from posenc_jax.schemes.rotary.xpos import XPos as XPos
from posenc_jax.schemes.scheme import Acts as Acts
from posenc_jax.schemes.scheme import Scheme as Scheme
from posenc_jax.schemes.scheme import Traits as Traits

if TYPE_CHECKING:
    from posenc_jax import linen as linen
    from posenc_jax import nnx as nnx
    from posenc_jax import testing as testing

__all__ = ["SCHEMES", "contrib", "positions", "sharding"]
__all__ += [
    name
    for name, thing in list(globals().items())
    if getattr(thing, "__module__", "").startswith("posenc_jax.")
]
__version__ = "0.1.0rc1"


class _Schemes(dict[str, type[Scheme]]):
    """Scheme classes by name; the error for an unknown name suggests a similar one."""

    def __missing__(self, name):
        hint = checks.did_you_mean(str(name), self) or f"; there are {', '.join(self)}."
        raise KeyError(f"unknown scheme {name!r}{hint}")


SCHEMES: dict[str, type[Scheme]] = _Schemes(
    (thing.name, thing)
    for thing in (*list(globals().values()), *vars(contrib).values())
    if isinstance(thing, type) and issubclass(thing, Scheme) and thing.name
)
"""Every scheme class by its `name`, those of `contrib` included."""

if not TYPE_CHECKING:  # A type checker would take every name for a module.

    def __getattr__(name: str) -> ModuleType:
        """Imports `posenc_jax.nnx`, `posenc_jax.linen` and `posenc_jax.testing` on first use."""
        if name in ("linen", "nnx", "testing"):
            return importlib.import_module(f"posenc_jax.{name}")
        hint = "; it is in posenc_jax.contrib" if name in contrib.__all__ else ""
        if name in ("Attention", "AttentionFn", "PositionEncoding"):
            hint = "; it is in posenc_jax.nnx and in posenc_jax.linen"
        message = f"module {__name__!r} has no attribute {name!r}{hint}"
        # Without a hint, Python looks for a similar name of the module.
        raise AttributeError(message, name=None if hint else name, obj=sys.modules[__name__])

    def __dir__() -> list[str]:
        """Returns the public names, including modules that are imported on first use."""
        return sorted({*__all__, "linen", "nnx", "testing"})
