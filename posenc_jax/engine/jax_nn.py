"""Attention by `jax.nn.dot_product_attention`: what it can do exactly, and nothing else.

It takes no rules. Rotary schemes need none, and on GPUs it can be cuDNN's kernel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.problem import Implementation, Problem


@dataclasses.dataclass(frozen=True)
class JaxNN(Implementation):
    """`jax.nn.dot_product_attention`, with its own choice of kernel."""

    name = "jax"

    def supports(self, problem: Problem) -> str | None:
        p = problem
        refused = {
            "rules": p.rules,
            "softcap": p.softcap is not None,
            "sinks": p.sinks is not None,
            "dropout": p.dropout_seeds is not None,
            "segments": p.q_segment_ids is not None,
            "prefix_length": p.prefix_length is not None,
            "positions of its own": (p.is_causal or p.window is not None) and not p.contiguous,
            "values of another head dim than keys": p.q.shape[3] != p.v.shape[3],
        }
        found = [what for what, is_there in refused.items() if is_there]
        return (
            f'it has no {" and no ".join(found)}; use "xla", or None to choose' if found else None
        )

    def __call__(self, problem: Problem) -> tuple[jax.Array, jax.Array]:
        p, window = problem, problem.window
        if window is not None:
            window = tuple(p.k.shape[1] if side < 0 else side for side in window)
        k, v, sees = p.k.astype(p.q.dtype), p.v.astype(p.q.dtype), None
        if p.mask is not None:
            # It lets a query that sees nothing look at everything, and multiplies 0 and NaN.
            visible = p.visible()
            sees = jnp.moveaxis(visible.any(-1), 1, 2)
            used = visible.any((1, 2))[:, :, None, None]
            k, v = (jnp.where(used, x, jnp.zeros((), x.dtype)) for x in (k, v))
        options: dict[str, Any] = {"mask": p.mask, "is_causal": p.is_causal, "scale": p.scale}
        options |= {"local_window_size": window, "return_residual": True}
        out, lse = jax.nn.dot_product_attention(p.q, k, v, **options)
        lse = lse.astype(jnp.float32)
        if sees is None:
            return out, lse
        out = jnp.where(sees[..., None], out, jnp.zeros((), out.dtype))
        return out, jnp.where(sees, lse, -jnp.inf)
