r"""YaRN: fast pairs are unchanged, slow pairs interpolated, and attention is sharpened.

    w'_p = m_p w_p + (1 - m_p) w_p / s         s = new length / trained length L
    q, k -> g q, g k                           g = 0.1 ln s + 1, on rotated dimensions

so that logits grow by g^2. m_p is 1 for pairs with more than `beta_fast` rotations within L, 0 for
pairs with fewer than `beta_slow`, and between them linear in

    ramp="index" (default)       the pair's index p               all code and released models
    ramp="rotations"             its number of rotations in L     the paper, equation 13

At d = 16, L = 2048, s = 4, pair 3 keeps 0.81 of its frequency with "index" and 0.48 with
"rotations". The ends of the index ramp are rounded outwards to whole pairs, which
gpt-oss does not do (`truncate=False`).

DeepSeek rotates only some dimensions of a head, and has another g:
    g = G(mscale) / G(mscale_all_dim),   G(m) = 0.1 m ln s + 1    (m = 0: no correction)
with the factor for all dimensions in the logit scale, G(mscale_all_dim)^2 / sqrt(H): give
`yarn_logit_scale` as `scale` to attention, or logits of DeepSeek-V3 are too small by half. Where
only one of the two is set, Hugging Face ignores it; here it is used, as in DeepSeek's code.

Paper: Peng et al. YaRN: Efficient Context Window Extension of Large Language Models. 2023.
https://arxiv.org/abs/2309.00071
Reference code: jquesnelle/yarn, scaled_rope/LlamaYaRNScaledRotaryEmbedding.py;
huggingface/transformers, modeling_rope_utils.py.
"""

import dataclasses
import math
from typing import ClassVar

import numpy as np

from posenc_jax.checks import not_negative, one_of, positive, require
from posenc_jax.schemes.rotary.frequencies import FrequencyMap, check_stretch
from posenc_jax.schemes.rotary.scaling.ntk_by_parts import check_rotations, index_ramp


def _magnitude(factor, mscale):
    return 0.1 * mscale * math.log(factor) + 1.0


def yarn_logit_scale(head_dim: int, factor: float, mscale_all_dim: float = 1.0) -> float:
    """Returns the factor on q . k for models that set `mscale_all_dim` (DeepSeek's MLA).

    Args:
      head_dim: H, all dimensions of a query, rotated or not (192 in DeepSeek-V3).
      factor: s, new length divided by trained length; at least 1.
      mscale_all_dim: as in `YaRN`.

    Raises:
      ValueError: for a factor below one, a negative `mscale_all_dim` or no dimensions.

    >>> round(yarn_logit_scale(192, 40.0) * 192**0.5, 4)
    1.8739
    """
    check_stretch("YaRN", factor, 1)
    not_negative("YaRN", mscale_all_dim=mscale_all_dim)
    return _magnitude(factor, mscale_all_dim) ** 2 / math.sqrt(head_dim)


@dataclasses.dataclass(frozen=True)
class YaRN(FrequencyMap):
    """Keeps fast pairs, divides slow ones, and scales the logits (Peng et al. 2023).

    Attributes:
      factor: s, new length divided by trained length; at least 1.
      original_max_position: L, the trained length.
      beta_fast: pairs with more rotations within L are unchanged.
      beta_slow: pairs with fewer rotations within L are interpolated.
      ramp: "index" or "rotations"; see the formulas.
      truncate: whether the ends of the index ramp are rounded to whole pairs.
      attention_factor: g itself.
      mscale: m of the numerator of g.
      mscale_all_dim: m of its denominator; see `yarn_logit_scale`.

    Raises:
      ValueError: for a factor below one, no trained length, rotations out of order, options
        that contradict each other, or sizes that leave no pair on the index ramp.

    >>> YaRN(factor=4.0, original_max_position=2048)(np.array([1.0, 1e-2]), 4, 1e4)[0]
    array([1.     , 0.00625])
    """

    extends_context: ClassVar[bool] = True
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ramp: str = "index"
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self):
        check_stretch("YaRN", self.factor, self.original_max_position)
        one_of("YaRN", ("index", "rotations"), ramp=self.ramp)
        check_rotations(  # Kimi K2 has 1 for both.
            "YaRN",
            "beta_fast and beta_slow",
            self.beta_fast,
            self.beta_slow,
            equal=self.ramp == "index",
        )
        require(
            self.truncate or self.ramp == "index",
            'YaRN: truncate=False is about the index ramp, but ramp is "rotations".',
        )
        not_negative("YaRN", mscale=self.mscale, mscale_all_dim=self.mscale_all_dim)
        if self.attention_factor is None:
            return
        positive("YaRN", attention_factor=self.attention_factor)
        require(
            (self.mscale, self.mscale_all_dim) == (1.0, 0.0),
            f"YaRN: attention_factor={self.attention_factor} contradicts "
            f"mscale={self.mscale} and mscale_all_dim={self.mscale_all_dim}.",
        )

    def __call__(self, frequencies, head_dim, theta):
        length, rotations = self.original_max_position, (self.beta_fast, self.beta_slow)
        if self.ramp == "index":
            keep = index_ramp("YaRN", rotations, length, head_dim, theta, truncate=self.truncate)
        else:
            count = length * frequencies / (2 * np.pi)
            keep = np.clip((count - rotations[1]) / (rotations[0] - rotations[1]), 0.0, 1.0)
        g = self.attention_factor
        if g is None:
            g = _magnitude(self.factor, self.mscale) / _magnitude(self.factor, self.mscale_all_dim)
        return keep * frequencies + (1 - keep) * frequencies / self.factor, g
