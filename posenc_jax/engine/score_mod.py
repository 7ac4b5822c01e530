"""FlexAttention's `score_mod` as a rule: a function of score, batch row, head and two positions.

    def alibi(score, b, h, q_idx, kv_idx, slopes):
        return score - slopes[h] * jnp.abs(q_idx - kv_idx)

    rule = pe.score_mod(alibi, q, slopes, relative=True)
    pe.attention(q, k, v, rules=rule, is_causal=True)

PyTorch's functions capture arrays by closing over them; here they are arguments behind the others,
so that they have gradients. Claims about the function make it faster. `softcap` includes numbers
that a function adds, and attention refuses it with a function without a claim:

    none                `LogitsTransform`, on whole rows of logits
    adds=True           `LogitBias`, evaluated for pairs of tiles; `ContentBias` if it reads b
    relative=True       `LogitBias`, evaluated once per distance

A `mask_mod` is a `block_mask`, which skips the tiles that it hides.

Paper: Dong et al. Flex Attention: A Programming Model for Generating Optimized Attention Kernels.
2024. https://arxiv.org/abs/2412.05496
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from posenc_jax.checks import array_of_rank, require
from posenc_jax.engine.rules import ContentBias, LogitBias, LogitsTransform

ScoreMod = Callable[..., jax.Array]
_SCORES = (-1000.0, -30.0, -2.5, -0.7, 1.0, 2.0, 7.0, 60.0, 1000.0)
"""Scores at which a function that adds is tried; the compiler knows the slopes of sums."""


@dataclasses.dataclass(frozen=True)
class _Added:
    """The number that a function adds to any score, as a rule for pairs; NaN if a claim is false.

    If the function reads the row of the batch, the row is a feature of the query.
    """

    function: ScoreMod

    def __call__(self, arrays, head, *features_and_coordinates):
        *features, q, k = features_and_coordinates
        row = features[0] if features else jnp.int32(0)
        head, holds = head

        def of_score(score):
            out = self.function(score, row, head, q, k, *arrays)
            return jnp.asarray(out, jnp.float32)

        # The derivative of a sum is one at any score; of 20 tanh(x / 20) it is so at 0 alone.
        added, one, sums = of_score(jnp.float32(0)), jnp.float32(1), holds
        for score in _SCORES:
            _, slope = jax.jvp(of_score, (jnp.float32(score),), (one,))
            sums &= slope == 1
        return jnp.where(sums | jnp.isneginf(added), added, jnp.nan)


_TRIED = 20
"""Tokens between which a relative function is tried."""


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _is_relative(function: ScoreMod, heads: jax.Array, arrays: Any) -> jax.Array:
    """Returns whether pairs of equal distance are alike, for each head [N]."""
    at = jnp.arange(_TRIED, dtype=jnp.int32)

    def number(head, q, k):
        out = function(jnp.float32(0), jnp.int32(0), head, q, k, *arrays)
        return jnp.asarray(out, jnp.float32)

    pairs = jax.vmap(jax.vmap(number, (None, None, 0)), (None, 0, None))
    x = jax.vmap(pairs, (0, None, None))(heads, at, at)
    before, after = x[:, :-1, :-1], x[:, 1:, 1:]  # On one diagonal.
    near = jnp.abs(after - before) <= 1e-3 * (1 + jnp.abs(before))
    same = near | (after == before) | (jnp.isnan(after) & jnp.isnan(before))
    return jnp.all(same, (1, 2))


@dataclasses.dataclass(frozen=True)
class OfScores:
    """A function of the score, as a rule for the scores [N, S] of a query."""

    function: ScoreMod

    def __call__(self, arrays, heads, row, cols, logits, seen, q_idx, k):
        def of_key(score, b, h, kv_idx):
            return jnp.asarray(self.function(score, b, h, q_idx, kv_idx, *arrays), jnp.float32)

        # Hidden keys have a score of zero, where a function may have no derivative.
        one = jnp.take_along_axis(logits, jnp.argmax(seen, 1, keepdims=True), 1)
        logits = jnp.where(seen, logits, one)
        of_keys = jax.vmap(of_key, (0, None, None, 0))
        return jax.vmap(of_keys, (0, 0, 0, None))(logits, row, heads, k)


def score_mod(
    function: ScoreMod, q: jax.Array, *arrays: Any, adds: bool = False, relative: bool = False
) -> LogitBias | ContentBias | LogitsTransform:
    """Returns a `score_mod` of FlexAttention as a rule for `attention`.

    Args:
      function: `function(score, b, h, q_idx, kv_idx, *arrays) -> score`, for scalars: the score is
        float32, after the logit scale; the others are int32. Calls outside of `jit` share one
        compilation if it is a function of a module.
      q: the queries [B, T, N, H]; only the shape is read.
      *arrays: captured arrays, as pytrees. They have gradients.
      adds: whether the function returns the score plus a number that does not depend on it, or
        -inf. Where its slope at one of nine scores from -1000 to 1000 is not one, logits are NaN.
      relative: whether it adds, and the number goes by q_idx - kv_idx alone. Pairs of the first 20
        tokens are tried; if it differs at later ones alone, results are wrong, as with a
        `LogitBias`.

    Returns:
      The rule; see the top of the file. `q_idx` and `kv_idx` are coordinates of `attention`, which
      default to positions, and these to slots.

    Raises:
      TypeError: for a function that does not take these arguments, and arrays that are none.
      ValueError: for queries of another rank, a result that is not a number, a function that is not
        relative and says so, and a relative one that reads b. Under `jit` arrays are not known, and
        logits are NaN.

    >>> def later_keys_are_hidden(score, b, h, q_idx, kv_idx):
    ...     return jnp.where(kv_idx <= q_idx, score, -jnp.inf)
    >>> q = jnp.ones((1, 3, 2, 4))
    >>> rule = score_mod(later_keys_are_hidden, q, relative=True)
    >>> type(rule).__name__, rule.relative
    ('LogitBias', True)
    """
    array_of_rank("score_mod", "q", q, 4, "[B, T, N, H]")
    batch, length, num_heads, _ = q.shape
    for leaf in jax.tree.leaves(arrays):
        if not hasattr(leaf, "dtype"):
            raise TypeError(f"score_mod: arrays must be arrays, got {leaf!r:.60}.")
    index, score = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    closed = jax.make_jaxpr(function)(score, *(index,) * 4, *arrays)
    require(
        [x.shape for x in closed.out_avals] == [()]
        and closed.out_avals[0].dtype != bool
        and not jnp.issubdtype(closed.out_avals[0].dtype, jnp.complexfloating),
        f"score_mod: {getattr(function, '__name__', function)} must return one score, got "
        f"{[str(x) for x in closed.out_avals]}.",
    )
    heads = jnp.arange(num_heads, dtype=jnp.int32)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    rows = jnp.broadcast_to(rows, (batch, length, num_heads))
    if not (adds or relative):
        transform = OfScores(function)
        return LogitsTransform(transform, heads, arrays, q_features=rows, reads_seen_only=True)
    holds = jnp.ones((num_heads,), bool)
    if relative:
        holds = _is_relative(function, heads, jax.lax.stop_gradient(arrays))
        if not isinstance(holds, Tracer) and not holds.all():
            raise ValueError(
                f"score_mod: {getattr(function, '__name__', function)} is not relative: pairs of "
                "equal q_idx - kv_idx get other numbers; give adds=True."
            )
    of_b = closed.jaxpr.invars[1]
    if any(x is of_b for eqn in closed.jaxpr.eqns for x in eqn.invars):
        require(not relative, "score_mod: a function that reads b is not relative; give adds=True.")
        return ContentBias(_Added(function), (heads, holds), arrays, q_features=rows)
    return LogitBias(_Added(function), (heads, holds), arrays, relative=relative)
