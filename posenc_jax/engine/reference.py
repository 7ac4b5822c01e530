"""Attention by its formula: all logits, one softmax. It defines correct results.

Only `engine.api` imports this file, to list it; tests compare the other implementations with it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from posenc_jax.engine.dropout import keep_mask
from posenc_jax.engine.problem import Implementation, LogSumExp, Problem, repeat_heads, softmax
from posenc_jax.engine.rule import added_logits


@dataclasses.dataclass(frozen=True)
class Reference(Implementation):
    """Materialises logits [B, N, T, S]; differentiable to any order, in both modes."""

    name = "reference"

    def __call__(self, problem: Problem) -> tuple[jax.Array, LogSumExp]:
        p = problem.sorted_keys() if problem.whole_rows and not problem.contiguous else problem
        p = p.per_query_head().without_unseen_keys()
        q, k, v = (repeat_heads(x, p.num_heads).astype(jnp.float32) for x in (p.q, p.k, p.v))
        seen = p.visible()

        scaled = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest")
        unscaled = jnp.zeros_like(scaled)
        for rule in p.rules:
            if rule.whole_rows:
                continue
            coordinates = p.q_coordinates, p.k_coordinates
            term = added_logits(rule, *coordinates, seen)
            if term is not None and rule.scaled:
                scaled += term
            elif term is not None:
                unscaled += term
        logits = p.scale * scaled + unscaled
        if p.rules:  # They hide keys by -inf, under a softcap too.
            seen &= ~jnp.isneginf(logits)
            logits = jnp.where(seen, logits, 0.0)
        if p.softcap is not None:
            logits = p.softcap * jnp.tanh(logits / p.softcap)
        logits = _transformed(p, logits, seen)
        # Rules on whole rows hide keys by -inf, too; a row of them has no gradient.
        logits = jnp.where(seen & ~jnp.isneginf(logits), logits, -jnp.inf)
        weights, lse = softmax(logits, None if p.sinks is None else jnp.moveaxis(p.sinks, 1, 2))
        weights = weights if p.normalized else jnp.exp(logits)
        if p.dropout_seeds is not None:
            keep = keep_mask(p.dropout_seeds, p.dropout_rate, p.q_slots, p.k_slots)
            weights = jnp.where(keep, weights / (1.0 - p.dropout_rate), 0.0)
        out = jnp.einsum("bnts,bsnv->btnv", weights, v, precision="highest")
        for rule in p.rules:
            values = jax.vmap(rule.added_values)(weights, p.q_coordinates, p.k_coordinates)
            out = out if values is None else out + values
        return out.astype(p.q.dtype), jax.tree.map(lambda x: jnp.moveaxis(x, 1, 2), lse)


def _transformed(p: Problem, logits: jax.Array, seen: jax.Array) -> jax.Array:
    """Applies the rules on whole rows, to logits that are zero for keys that are not seen."""
    coordinates = p.q_coordinates, p.k_coordinates
    for rule in p.rules:
        if rule.whole_rows:
            rule = rule.expanded()
            features = rule.q_features, rule.k_features
            logits = jnp.where(seen, logits, 0.0)
            logits = jax.vmap(rule.transformed_logits)(logits, seen, *features, *coordinates)
    return logits
