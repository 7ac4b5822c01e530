r"""Proportional RoPE (p-RoPE): the fastest pairs rotate, the slow ones carry no position.

    w'_p = w_p   for p < floor(fraction * d / 2),     else 0

Slow pairs carry content, which rotation over long contexts disturbs. The exponent of w_p and the
distance within a pair are as in RoPE on the whole head. `RoPE(rotary_dim=...)`, the partial factor
of GPT-NeoX and Phi, is different: it rotates the first dimensions as a small head, with all of its
wavelengths. A fraction of 0 is no position encoding, 1 is RoPE. Gemma 4 uses 0.25 in its global
layers; the paper trains 0.25 and 0.75. Configs that divide by a factor as well are
`(Proportional(), PI(factor=8.0))`.

Paper: Barbero et al. Round and Round We Go! What makes Rotary Positional Encodings useful?
2024. https://arxiv.org/abs/2410.06205
Reference code: google-deepmind/gemma, gemma/gm/math/_positional_embeddings.py;
huggingface/transformers, modeling_rope_utils.py.
"""

import dataclasses

import numpy as np

from posenc_jax.checks import require
from posenc_jax.schemes.rotary.frequencies import FrequencyMap


@dataclasses.dataclass(frozen=True)
class Proportional(FrequencyMap):
    """Keeps the fastest pairs; the others get frequency zero (Barbero et al. 2024).

    Attributes:
      fraction: the part of the pairs that rotates, in [0, 1].

    Raises:
      ValueError: for a fraction out of range.

    >>> Proportional(fraction=0.5)(np.array([1.0, 0.01]), head_dim=4, theta=1e4)[0]
    array([1., 0.])
    """

    fraction: float = 0.25

    def __post_init__(self):
        require(
            0 <= self.fraction <= 1,
            f"Proportional: fraction must be in [0, 1], got {self.fraction}.",
        )

    def __call__(self, frequencies, head_dim, theta):
        count = int(self.fraction * head_dim // 2)
        return np.where(np.arange(len(frequencies)) < count, frequencies, 0.0), 1.0
