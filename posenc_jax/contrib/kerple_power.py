r"""KERPLE's power kernel: a learned power of the distance, one shape per head.

    logits[n, i, j] = q_i . k_j / sqrt(H) - r1[n] * |i - j|^r2[n]       0 < r2 <= 2

With r2 = 1 it is ALiBi with learned slopes. Parameters are projected as in `KERPLELog`, r2 onto
[0.01, 2], and shared between all layers. In the paper the logarithmic kernel extrapolates better.

Paper: Chi et al. KERPLE: Kernelized Relative Positional Embedding for Length
Extrapolation. 2022. https://arxiv.org/abs/2205.09921
Reference code: chijames/KERPLE, megatron/mpu/layers.py, ParallelKerplePower (a and p are r1 and
r2).
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from posenc_jax.engine.rules import LogitBias
from posenc_jax.schemes.bias.kerple import KERPLE, project


def _power_penalty(shared, head, q, k):
    r1, r2 = head
    distance = jnp.abs(q - k).astype(jnp.float32)
    nonzero = distance > 0  # 0^r2 has no finite derivative.
    return jnp.where(nonzero, -r1 * jnp.where(nonzero, distance, 1.0) ** r2, 0.0)


@dataclasses.dataclass(frozen=True)
class KERPLEPower(KERPLE):
    """KERPLE's power kernel (Chi et al. 2022).

    Attributes:
      num_heads: the number of query heads, N.

    >>> params = {"r1": jnp.array([0.5]), "r2": jnp.array([2.0])}
    >>> KERPLEPower(num_heads=1).rules(params).dense(jnp.array([2]), jnp.arange(3))[0]
    Array([[-2. , -0.5,  0. ]], dtype=float32)
    """

    name: ClassVar[str] = "kerple_power"
    initial: ClassVar[dict[str, float]] = {"r1": 1.0, "r2": 2.0}

    def rules(self, params, q_features=None, k_features=None):
        heads = project(params["r1"]), project(params["r2"], 2.0)
        return LogitBias(_power_penalty, heads=heads, relative=True)
