"""Merges softmax attention over parts of the keys, by the log-sum-exp of their logits.

out = sum_p exp(lse_p - lse) out_p,     lse = log sum_p exp(lse_p)
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def merge_partial_softmax(outs: Sequence[jax.Array], lses: Sequence[jax.Array]) -> jax.Array:
    """Returns attention over all keys from attention over disjoint parts of them.

    Exact, and differentiable in both arguments. A query that sees no key in any part gets zeros.
    Parts have equal weights where all logits are near -1e9: there lse has no digits for the number
    of keys. `sequence_parallel_attention` is exact there too.

    Args:
      outs: the output of each part, float32 [B, T, N, V].
      lses: the log-sum-exp of its logits, float32 [B, T, N]; -inf for a part without keys.

    >>> outs = [jnp.full((1, 1, 1, 1), 2.0), jnp.full((1, 1, 1, 1), 4.0)]
    >>> merge_partial_softmax(outs, [jnp.zeros((1, 1, 1))] * 2).item()
    3.0
    """
    lse = jnp.stack(lses)
    m = jax.lax.stop_gradient(lse.max(0))
    weights = jnp.exp(lse - jnp.where(jnp.isneginf(m), 0.0, m)[None])
    total = weights.sum(0)  # Zero where a query sees no key.
    weights = weights / jnp.where(total == 0, 1.0, total)[None]
    return (jnp.stack(outs) * weights[..., None]).sum(0)
