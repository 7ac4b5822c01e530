r"""KERPLE: a learned penalty on the logarithm of the distance, one shape per head.

    logits[n, i, j] = q_i . k_j / sqrt(H) - r1[n] * ln(1 + r2[n] |i - j|)

It is a conditionally positive definite kernel for positive r1 and r2. The paper's other one, a
power of the distance, is `posenc_jax.contrib.KERPLEPower`.

Parameters are kept positive as in the authors' code: before each use they are projected onto
[0.01, inf). The gradient is taken at the projected value (straight through), so a parameter at the
bound can leave it. The authors write the projected value back after each step; here the optimiser's
value stays.

The authors share one set of parameters between all layers. The third form in their code, which
multiplies logits by exp(-r3 |i - j|^r4) and has no released results, is omitted. NeMo's
scheme of this name is -b ln(1 + a |i - j|^p), all three learned, initialised with ALiBi's slopes,
1 and 1, and not projected; it contains the log form.

Without causality nothing tells past from future: outputs for the reversed sequence are the same,
reversed. In encoders use ALiBi's `symmetry="split"`, T5 with `bidirectional=True` or RoPE.

Paper: Chi et al. KERPLE: Kernelized Relative Positional Embedding for Length
Extrapolation. 2022. https://arxiv.org/abs/2205.09921
Reference code: chijames/KERPLE, megatron/mpu/layers.py, ParallelKerpleLog (there, p and a are r1
and r2).
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import positive_fields
from posenc_jax.engine.rules import LogitBias
from posenc_jax.schemes.scheme import Scheme, Traits


def project(x, high=None):
    """Returns x clipped to [0.01, high] in float32, with the gradient of x (straight through)."""
    x = x.astype(jnp.float32)
    return jax.lax.stop_gradient(jnp.clip(x, 0.01, high)) + (x - jax.lax.stop_gradient(x))


def _log_penalty(shared, head, q, k):
    r1, r2 = head
    return -r1 * jnp.log1p(r2 * jnp.abs(q - k).astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class KERPLE(Scheme):
    """A kernel with parameters r1 and r2 per head, initially uniform from 0 to `initial`."""

    num_heads: int
    initial: ClassVar[dict[str, float]] = {}
    param_axes: ClassVar = {"r1": "num_heads", "r2": "num_heads"}
    traits: ClassVar = Traits(relative=True, shared_over_layers=True, mirrored=True)

    def __post_init__(self):
        positive_fields(self, "num_heads")

    def init(self, key):
        """Returns {"r1": U(0, initial["r1"]), "r2": U(0, initial["r2"])}, float32 [N] each."""
        return {
            name: jax.random.uniform(k, (self.num_heads,), jnp.float32, maxval=limit)
            for k, (name, limit) in zip(jax.random.split(key), self.initial.items(), strict=True)
        }


@dataclasses.dataclass(frozen=True)
class KERPLELog(KERPLE):
    """KERPLE's logarithmic kernel (Chi et al. 2022).

    Attributes:
      num_heads: the number of query heads, N.

    >>> params = {"r1": jnp.array([1.0]), "r2": jnp.array([1.0])}
    >>> KERPLELog(num_heads=1).rules(params).dense(jnp.array([2]), jnp.arange(3))[0]
    Array([[-1.0986123, -0.6931472, -0.       ]], dtype=float32)
    """

    name: ClassVar[str] = "kerple"
    initial: ClassVar[dict[str, float]] = {"r1": 2.0, "r2": 1.0}

    def rules(self, params, q_features=None, k_features=None):
        heads = project(params["r1"]), project(params["r2"])
        return LogitBias(_log_penalty, heads=heads, relative=True)
