r"""ClippedFrequencies RoPE: the slowest pairs fade out, with a cosine or at once.

    w'_p = w_p * (1 + cos(pi j / (n - 1))) / 2,     j = p - (P - n), for the last n of P pairs

Pairs that do not complete a turn within the trained length are what fails beyond it. The
first of the n pairs stays and the last stops. `hard=True` stops all n, which makes steps in
the spectrum that show as ripples over distance. The authors take 20 of the 64 pairs of
Llama-3-8B, after its own scaling: `(Llama3(), ClippedFrequencies(pairs=20))`. For fewer pairs than
n their code fades all of them; here that is an error.

The paper calls it CoPE. So is another scheme, contextual position encoding.

Paper: Li et al. CoPE: ClippedFrequencies RoPE as A Scalable Free Lunch for Long Context LLMs. 2026.
https://arxiv.org/abs/2602.05258
Reference code: hrlics/CoPE, modeling_cope.py.
"""

import dataclasses

import numpy as np

from posenc_jax.checks import require
from posenc_jax.rotary.frequencies import FrequencyMap


@dataclasses.dataclass(frozen=True)
class ClippedFrequencies(FrequencyMap):
    """Fades or stops the slowest pairs (Li et al. 2026).

    Attributes:
      pairs: n, how many.
      hard: whether all of them stop.

    Raises:
      ValueError: for more pairs than there are, or too few: one is stopped by `hard` only.

    >>> ClippedFrequencies(pairs=3)(np.ones(4), head_dim=8, theta=1e4)[0]
    array([1. , 1. , 0.5, 0. ])
    """

    pairs: int = 20
    hard: bool = False

    def __post_init__(self):
        least = 1 if self.hard else 2
        require(
            self.pairs >= least,
            f"ClippedFrequencies: pairs must be at least {least} with hard={self.hard}, "
            f"got {self.pairs}.",
        )

    def __call__(self, frequencies, head_dim, theta):
        """Returns the frequencies with the last ones faded or zero, and 1."""
        count = len(frequencies)
        require(
            self.pairs <= count, f"ClippedFrequencies: pairs={self.pairs}, but only {count} rotate."
        )
        fade = np.zeros(self.pairs)
        if not self.hard:
            fade = 0.5 * (1 + np.cos(np.linspace(0, np.pi, self.pairs)))
        return frequencies * np.concatenate([np.ones(count - self.pairs), fade]), 1.0
