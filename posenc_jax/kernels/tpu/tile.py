"""Operations on a tile: products, layouts, masks and the running softmax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.dropout import is_kept
from posenc_jax.engine.mask import LEAST_LOGIT, MASK_VALUE, add_saturated, in_units
from posenc_jax.engine.problem import LogSumExp
from posenc_jax.engine.terms import AllPairsTerm
from posenc_jax.kernels.operands import LOG2E, Spec
from posenc_jax.kernels.tpu.strip import LANES


def poison(scratch: Any) -> None:
    """Fills scratch memory with NaN and the least integers, to show reads of what was not written.

    The setting `jax_pallas_poison_buffers` asks for it. Pallas itself fills the memory of
    `run_scoped` alone.
    """
    for ref in jax.tree.leaves(scratch):
        floating = jnp.issubdtype(ref.dtype, jnp.floating)
        least = jnp.nan if floating else jnp.iinfo(ref.dtype).min
        ref[...] = jnp.full(ref.shape, least, ref.dtype)


def poisons() -> bool:
    """Returns whether kernels are to `poison` their scratch memory."""
    return getattr(jax.config, "jax_pallas_poison_buffers", False)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Returns a float32 product over the two axes, exact for float32 arrays.

    The dtype alone sets the precision: Mosaic refuses products of bfloat16 at the higher precision
    that `jax_default_matmul_precision` may ask for.
    """
    exact = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def to_column(row: jax.Array) -> jax.Array:
    """[1, T] to [T, 128], equal in all lanes."""
    return jnp.swapaxes(jnp.broadcast_to(row, (LANES, row.shape[1])), 0, 1)


def to_row(column: jax.Array) -> jax.Array:
    """[T, 128], equal in all lanes, to [1, T]."""
    return jnp.swapaxes(column, 0, 1)[:1]


def lanes(column: jax.Array, count: int) -> jax.Array:
    """[T, 128], equal in all lanes, to [T, count]."""
    if count <= LANES:
        return column[:, :count]
    wide = jnp.tile(column, (1, -(-count // LANES)))
    return wide if wide.shape[1] == count else wide[:, :count]


def kept_pairs(spec: Spec, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns the pairs that dropout keeps, of `dropout_rows` and int32 slots of keys."""
    return is_kept(rows, jax.lax.bitcast_convert_type(slots, jnp.uint32), spec.dropout_rate)


def add_pairs(
    spec: Spec, s: jax.Array, term: AllPairsTerm, tile: jax.Array, see: jax.Array | None
) -> jax.Array:
    """Adds an array of all pairs to the logits of a tile; its -inf hides keys, NaN or not.

    Args:
      spec: the static part.
      s: logits in units of `spec.unit`.
      term: has the factor.
      tile: of the array.
      see: `visible`, or None where all pairs are. Hidden entries may be NaN, and so would be the
        derivative of a softcap.
    """
    tile = tile.astype(jnp.float32)
    if see is not None and spec.softcap is not None:
        tile = jnp.where(see, tile, 0.0)
    s = s + in_units(tile, spec.unit * term.factor)
    return jnp.where(tile == MASK_VALUE, MASK_VALUE, s)


def soft_cap(softcap: float, s: jax.Array, bounded: jax.Array, may_hide: bool) -> jax.Array:
    """Returns capped logits in units of log 2.

    Args:
      softcap: the cap.
      s: the logits, divided by the cap.
      bounded: tanh(s).
      may_hide: whether logits may be -inf, which stays.
    """
    capped = softcap * LOG2E * bounded
    return jnp.where(s == -jnp.inf, s, capped) if may_hide else capped


def start_softmax(scratch: dict[str, Any]) -> None:
    """Sets the running maximum, sum and output before the first key."""
    scratch["m"][...] = jnp.full(scratch["m"].shape, LEAST_LOGIT, jnp.float32)
    for name in ("l", "out"):
        scratch[name][...] = jnp.zeros(scratch[name].shape, jnp.float32)


def update_softmax(scratch: dict[str, Any], s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Updates the running maximum and sum; returns the weights and the decay of earlier ones.

    Args:
      scratch: float32 [T, 128]: "m" and "l", equal in all lanes.
      s: logits [T, K] in units of log 2.
    """
    m = scratch["m"][...]
    m_new = jnp.maximum(m, jnp.max(s, 1, keepdims=True))
    p, decay = jnp.exp2(s - lanes(m_new, s.shape[1])), jnp.exp2(m - m_new)
    scratch["m"][...] = m_new
    scratch["l"][...] = scratch["l"][...] * decay + jnp.sum(p, 1, keepdims=True)
    return p, decay


def finish_softmax(
    scratch: dict[str, Any], out_ref: Any, dropout_rate: float | None = None
) -> LogSumExp:
    """Writes the output, and returns the log-sum-exp, [T, 128], with `top` in units of log 2."""
    m, total = scratch["m"][...], scratch["l"][...]
    share = 1.0 / jnp.where(total == 0.0, 1.0, total)
    share = share if dropout_rate is None else share / (1.0 - dropout_rate)
    out_ref[...] = (scratch["out"][...] * lanes(share, out_ref.shape[1])).astype(out_ref.dtype)
    return LogSumExp(m, total)


def visible(
    spec: Spec,
    shape: tuple[int, ...],
    q_axis: int,
    offset: Any,
    queries: dict[str, jax.Array],
    keys: dict[str, jax.Array],
    prefix: Any,
) -> jax.Array:
    """Returns bool `shape`, true where the query sees the key.

    Args:
      spec: the static part.
      shape: of the tile.
      q_axis: the axis of the queries.
      offset: slot of the first query minus slot of the first key.
      queries, keys: positions and segments of the tokens, of shapes that broadcast.
      prefix: the prefix length of the row, or None.
    """
    tests = []
    if spec.visibility.ordered:
        before, after = spec.sides
        if spec.by_slot:
            # One operation per pair, the comparison: indices have one axis, not two.
            sizes = [1, 1]
            sizes[q_axis] = shape[q_axis]
            q = jax.lax.broadcasted_iota(jnp.int32, sizes, q_axis) + offset
            sizes = [1, 1]
            sizes[1 - q_axis] = shape[1 - q_axis]
            k = jax.lax.broadcasted_iota(jnp.int32, sizes, 1 - q_axis)
            if after >= 0:
                tests.append(k - after <= q)
            if before >= 0:
                tests.append(q <= k + before)
        else:
            q, k = queries["positions"], keys["positions"]
            if after >= 0:
                tests.append(k <= add_saturated(q, after))
            if before >= 0:
                tests.append(q <= add_saturated(k, before))
            if prefix is not None:
                tests = [functools.reduce(jnp.logical_and, tests) | (k < prefix)]
    if spec.visibility.segments:
        q, k = queries["segments"], keys["segments"]
        tests.append(q == k)  # Padding of queries and of keys has different ids.
    return functools.reduce(jnp.logical_and, tests)
