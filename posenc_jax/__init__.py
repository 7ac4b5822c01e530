"""Position encodings for transformers in JAX: every scheme, one interface, exact numbers.

Letters, in all shapes: B batch, T queries, S keys, N query heads, K key/value heads,
H head dim, D model dim, A coordinate axes.
"""

from posenc_jax.additive.fourier import LearnableFourier as LearnableFourier
from posenc_jax.additive.learned import LearnedAbsolute as LearnedAbsolute
from posenc_jax.additive.learned import resize_learned as resize_learned
from posenc_jax.additive.none import NoPE as NoPE
from posenc_jax.additive.sinusoidal import Sinusoidal as Sinusoidal
from posenc_jax.additive.sinusoidal import sinusoidal_encoding as sinusoidal_encoding
from posenc_jax.additive.sinusoidal_2d import Sinusoidal2D as Sinusoidal2D
from posenc_jax.angles import cos_sin as cos_sin
from posenc_jax.bias.alibi import ALiBi as ALiBi
from posenc_jax.bias.alibi import alibi_slopes as alibi_slopes
from posenc_jax.bias.dape import DAPE as DAPE
from posenc_jax.bias.fire import FIRE as FIRE
from posenc_jax.bias.kerple import KERPLELog as KERPLELog
from posenc_jax.bias.kerple import KERPLEPower as KERPLEPower
from posenc_jax.bias.sandwich import Sandwich as Sandwich
from posenc_jax.bias.swin import Swin as Swin
from posenc_jax.bias.swin_v2 import SwinV2 as SwinV2
from posenc_jax.bias.t5 import T5 as T5
from posenc_jax.bias.t5 import t5_bucket as t5_bucket
from posenc_jax.bias.tupe import TUPE as TUPE
from posenc_jax.cache import KVCache as KVCache
from posenc_jax.combinators.chain import chain as chain
from posenc_jax.combinators.on_axis import on_axis as on_axis
from posenc_jax.combinators.on_distances import on_distances as on_distances
from posenc_jax.combinators.streaming import streaming as streaming
from posenc_jax.combinators.with_positions import with_positions as with_positions
from posenc_jax.content.cope import CoPE as CoPE
from posenc_jax.content.deberta import DeBERTa as DeBERTa
from posenc_jax.content.fox import FoX as FoX
from posenc_jax.content.grape import GRAPEA as GRAPEA
from posenc_jax.content.inkling import Inkling as Inkling
from posenc_jax.content.path import PaTH as PaTH
from posenc_jax.content.shaw import Shaw as Shaw
from posenc_jax.content.stick_breaking import StickBreaking as StickBreaking
from posenc_jax.content.transformer_xl import TransformerXL as TransformerXL
from posenc_jax.engine.api import AttentionCall as AttentionCall
from posenc_jax.engine.api import attention as attention
from posenc_jax.functional import new_cache as new_cache
from posenc_jax.functional import scheme_attention as scheme_attention
from posenc_jax.functional import scheme_embedding as scheme_embedding
from posenc_jax.functional import scheme_tables as scheme_tables
from posenc_jax.hf.api import from_hf as from_hf
from posenc_jax.hf.api import hf_logit_scale as hf_logit_scale
from posenc_jax.hf.api import scheme_from_hf as scheme_from_hf
from posenc_jax.hf.api import to_hf as to_hf
from posenc_jax.layers import LayerSpec as LayerSpec
from posenc_jax.layers import layer_pattern as layer_pattern
from posenc_jax.logit_scale.ssmax import SSMax as SSMax
from posenc_jax.logit_scale.temperature import QueryTemperature as QueryTemperature
from posenc_jax.logit_scale.temperature import query_temperature as query_temperature
from posenc_jax.positions.image_grids import grid_coordinates as grid_coordinates
from posenc_jax.positions.image_grids import resize_grid as resize_grid
from posenc_jax.rotary.axial import AxialRoPE as AxialRoPE
from posenc_jax.rotary.axial import axial_frequencies as axial_frequencies
from posenc_jax.rotary.comrope import ComRoPE as ComRoPE
from posenc_jax.rotary.dual_chunk import DualChunk as DualChunk
from posenc_jax.rotary.fope import FoPE as FoPE
from posenc_jax.rotary.frequencies import FrequencyMap as FrequencyMap
from posenc_jax.rotary.frequencies import rope_frequencies as rope_frequencies
from posenc_jax.rotary.layouts import permute_qk as permute_qk
from posenc_jax.rotary.learned_rope import LearnedRoPE as LearnedRoPE
from posenc_jax.rotary.liere import LieRE as LieRE
from posenc_jax.rotary.mrope import MRoPE as MRoPE
from posenc_jax.rotary.mrope_coordinates import mrope_coordinates as mrope_coordinates
from posenc_jax.rotary.per_sequence_scaling import RoPEByLength as RoPEByLength
from posenc_jax.rotary.pope import PoPE as PoPE
from posenc_jax.rotary.repo import RePo as RePo
from posenc_jax.rotary.rerope import ReRoPE as ReRoPE
from posenc_jax.rotary.rope import RoPE as RoPE
from posenc_jax.rotary.rope import apply_rope as apply_rope
from posenc_jax.rotary.rope import rope_matrix as rope_matrix
from posenc_jax.rotary.rope_mixed import RoPEMixed as RoPEMixed
from posenc_jax.rotary.rope_mixed import mixed_frequencies as mixed_frequencies
from posenc_jax.rotary.rope_pp import RoPEPlusPlus as RoPEPlusPlus
from posenc_jax.rotary.rotate import apply_rotation as apply_rotation
from posenc_jax.rotary.scaling.clipped import ClippedFrequencies as ClippedFrequencies
from posenc_jax.rotary.scaling.dynamic_ntk import DynamicNTK as DynamicNTK
from posenc_jax.rotary.scaling.high_frequency import HighFrequenciesOnly as HighFrequenciesOnly
from posenc_jax.rotary.scaling.interpolation import NTK as NTK
from posenc_jax.rotary.scaling.interpolation import PI as PI
from posenc_jax.rotary.scaling.llama3 import Llama3 as Llama3
from posenc_jax.rotary.scaling.longrope import LongRoPE as LongRoPE
from posenc_jax.rotary.scaling.ntk_by_parts import NTKByParts as NTKByParts
from posenc_jax.rotary.scaling.p_rope import Proportional as Proportional
from posenc_jax.rotary.scaling.resonance import Resonance as Resonance
from posenc_jax.rotary.scaling.yarn import YaRN as YaRN
from posenc_jax.rotary.scaling.yarn import yarn_logit_scale as yarn_logit_scale
from posenc_jax.rotary.selective import SelectiveRoPE as SelectiveRoPE
from posenc_jax.rotary.self_extend import SelfExtend as SelfExtend
from posenc_jax.rotary.xpos import XPos as XPos
from posenc_jax.rotary.xpos import xpos_decay as xpos_decay
from posenc_jax.rules import ContentBias as ContentBias
from posenc_jax.rules import DotBias as DotBias
from posenc_jax.rules import LogitBias as LogitBias
from posenc_jax.rules import LogitsTransform as LogitsTransform
from posenc_jax.rules import Rule as Rule
from posenc_jax.rules import ValueBias as ValueBias
from posenc_jax.scheme import Acts as Acts
from posenc_jax.scheme import Scheme as Scheme
from posenc_jax.scheme import Traits as Traits

SCHEMES: dict[str, type[Scheme]] = {
    thing.name: thing
    for thing in list(globals().values())
    if isinstance(thing, type) and issubclass(thing, Scheme) and thing.name
}
"""Every exported scheme class by its `name`."""

__version__ = "0.1.0"
