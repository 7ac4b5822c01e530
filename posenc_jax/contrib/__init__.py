"""Schemes and random positions with few users: tested like the others, without a promise.

    embedding   LearnableFourier
    rotary      ComRoPE, FoPE, LieRE, RoPEPlusPlus, SelectiveRoPE
    bias        BAM, DAPE, KERPLEPower, Sandwich
    content     CABLE, ShortConv
    positions   continuous (CAPE), skip_wise (PoSE)

They pass the tests of other schemes, and `posenc_jax.SCHEMES` has their names. Any version may
change or remove them. docs/not_included.md has the criteria for schemes in `posenc_jax`.
"""

from posenc_jax.contrib.bam import BAM
from posenc_jax.contrib.cable import CABLE
from posenc_jax.contrib.comrope import ComRoPE
from posenc_jax.contrib.dape import DAPE
from posenc_jax.contrib.fope import FoPE
from posenc_jax.contrib.fourier import LearnableFourier
from posenc_jax.contrib.kerple_power import KERPLEPower
from posenc_jax.contrib.liere import LieRE
from posenc_jax.contrib.random_positions import continuous, skip_wise
from posenc_jax.contrib.rope_pp import RoPEPlusPlus
from posenc_jax.contrib.sandwich import Sandwich
from posenc_jax.contrib.selective_rope import SelectiveRoPE
from posenc_jax.contrib.short_conv import ShortConv

__all__ = [
    "BAM",
    "CABLE",
    "DAPE",
    "ComRoPE",
    "FoPE",
    "KERPLEPower",
    "LearnableFourier",
    "LieRE",
    "RoPEPlusPlus",
    "Sandwich",
    "SelectiveRoPE",
    "ShortConv",
    "continuous",
    "skip_wise",
]
