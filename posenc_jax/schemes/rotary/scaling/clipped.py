r"""Clipped RoPE: the frequencies of the slowest pairs are reduced to zero, by a cosine or a step.

    w'_p = w_p * (1 + cos(pi j / (n - 1))) / 2,     j = p - (P - n), for the last n of P pairs

Pairs that do not complete a period within the trained length cause the failure beyond it. The
first of the n pairs is unchanged and the last has frequency zero. `hard=True` sets all n to zero;
the steps in the spectrum then show as ripples over distance. The authors take 20 of the 64 pairs
of Llama-3-8B, after Llama's scaling: `(Llama3(), ClippedFrequencies(pairs=20))`. For fewer pairs
than n their code clips all of them; here that is an error.

The paper calls it CoPE, as is contextual position encoding.

Paper: Li et al. CoPE: Clipped RoPE as A Scalable Free Lunch for Long Context LLMs. 2026.
https://arxiv.org/abs/2602.05258
Reference code: hrlics/CoPE, modeling_cope.py.
"""

import dataclasses

import numpy as np

from posenc_jax.checks import integers, require
from posenc_jax.schemes.rotary.frequencies import FrequencyMap


@dataclasses.dataclass(frozen=True)
class ClippedFrequencies(FrequencyMap):
    """Reduces the frequencies of the slowest pairs to zero (Li et al. 2026).

    Attributes:
      pairs: n.
      hard: whether all n get frequency zero.

    Raises:
      ValueError: for more pairs than rotate, or fewer than two (one with `hard`).

    >>> ClippedFrequencies(pairs=3)(np.ones(4), head_dim=8, theta=1e4)[0]
    array([1. , 1. , 0.5, 0. ])
    """

    pairs: int = 20
    hard: bool = False

    def __post_init__(self):
        integers("ClippedFrequencies", pairs=self.pairs)
        least = 1 if self.hard else 2
        require(
            self.pairs >= least,
            f"ClippedFrequencies: pairs must be at least {least} with hard={self.hard}, "
            f"got {self.pairs}.",
        )

    def __call__(self, frequencies, head_dim, theta):
        count = len(frequencies)
        require(
            self.pairs <= count, f"ClippedFrequencies: pairs={self.pairs}, but only {count} rotate."
        )
        fade = np.zeros(self.pairs)
        if not self.hard:
            fade = 0.5 * (1 + np.cos(np.linspace(0, np.pi, self.pairs)))
        return frequencies * np.concatenate([np.ones(count - self.pairs), fade]), 1.0
