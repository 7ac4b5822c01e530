r"""Resonance RoPE: wavelengths are whole numbers of tokens.

    w'_p = 2 pi / round(2 pi / w_p)

A pair of a wavelength below the trained length then repeats, beyond that length, exactly the
angles of training. Pairs of frequency zero are unchanged. Put it after the map that extends the
context: `(YaRN(...), Resonance())` is the paper's Resonance YaRN.

The authors reduce positions modulo the wavelength and tile the table, so that angles repeat to
the bit. Here they come from integer arithmetic (see `posenc_jax.angles`) and repeat within 2e-7
at any int32 position.

Paper: Wang et al. Resonance RoPE: Improving Context Length Generalization of Large Language
Models. 2024. https://arxiv.org/abs/2403.00071
Reference code: sheryc/resonance_rope,
llama_finetuning/scaled_rope/LlamaYaRNScaledResonanceRotaryEmbedding.py.
"""

import dataclasses

import numpy as np

from posenc_jax.checks import require
from posenc_jax.schemes.rotary.frequencies import FrequencyMap


@dataclasses.dataclass(frozen=True)
class Resonance(FrequencyMap):
    """Rounds wavelengths to whole numbers (Wang et al. 2024).

    Raises:
      ValueError: for frequencies with a wavelength that rounds to zero.

    >>> 2 * np.pi / Resonance()(np.array([1.0, 0.1]), head_dim=4, theta=100.0)[0]
    array([ 6., 63.])
    """

    def __call__(self, frequencies, head_dim, theta):
        moving = frequencies > 0
        wavelengths = np.round(2 * np.pi / np.where(moving, frequencies, 1.0))
        require(
            bool(np.all(wavelengths >= 1)),
            f"Resonance: wavelengths must round to 1 at least, got frequencies {frequencies}.",
        )
        return np.where(moving, 2 * np.pi / wavelengths, 0.0), 1.0
