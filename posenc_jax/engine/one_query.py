"""Products and rules of one query, as in decoding, which read the arrays of each key once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.blocks import pad_axis
from posenc_jax.engine.rules import DotBias, Rule

_BLOCK = 128  # Slots whose keys have consecutive coordinates.


def by_platform(by_head: Callable, of_token: Callable, *arrays: jax.Array) -> jax.Array:
    """Returns a product of one query for each head, or where it is faster for a whole token.

    For a product for each head, XLA for CPUs copies the cache to heads before tokens, and values
    to S behind V, element by element. A product with the heads of a token as one vector, which for
    each query is zero but for its own head, reads the cache once: it has K times the operations
    and takes a fifth of the time. On a mesh it would be a sum over heads of other devices.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return by_head(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=of_token, default=by_head)


def products_of_token(q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns q . k, [B, K, G, 1, S]; a key with NaN in one head is NaN in all.

    Args:
      q: [B, 1, K, G, H].
      k: [B, S, K, H].
    """
    batch, _, heads, group, _ = q.shape
    own_head = jnp.eye(heads, dtype=bool)[:, None, :, None]
    q = jnp.where(own_head, jnp.moveaxis(q, 1, 3), 0).reshape(batch, heads * group, -1)
    k = k.reshape(*k.shape[:2], -1)
    out = jnp.einsum("bsc,bnc->bsn", k, q, precision="highest")
    out = jnp.swapaxes(jax.lax.optimization_barrier(out), 1, 2)  # Products have S in front.
    return out.reshape(batch, heads, group, 1, -1)


def sums_of_token(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Returns the sums of values, [B, 1, K, G, V].

    Args:
      weights: [B, K, G, 1, S].
      v: [B, S, K, V].
    """
    batch, heads, group, _, keys = weights.shape
    weights = jnp.moveaxis(weights, 4, 1).reshape(batch, keys, -1)
    weights, v = jax.lax.optimization_barrier(weights), v.reshape(batch, keys, -1)
    out = jnp.einsum("bsn,bsc->bnc", weights, v, precision="highest")
    out = out.reshape(batch, heads, group, heads, -1)
    return jnp.einsum("bkgkv->bkgv", out)[:, None]


def added_to_row(rule: Rule, q: jax.Array, k: jax.Array, seen: jax.Array) -> jax.Array | None:
    """Returns `rule.added_to_rows` of one query; keys that it does not see get any number.

    Args:
      rule: the rule, with features of every query head.
      q, k: coordinates [B, 1] and [B, S], or with more axes.
      seen: bool [B, N or 1, 1, S].
    """
    counted = q.ndim == 2 and q.dtype == k.dtype == jnp.int32
    if isinstance(rule, DotBias) and rule.transform is None and counted:
        used, high = jnp.any(seen, axis=(1, 2)), rule.bounds[1]
        if rule.k_features is None and rule.pair is not None and rule.bounds == (None, None):
            return _by_blocks(rule, q, k, used)
        if rule.q_features is None and high is not None and k.shape[1] >= 2 * _room(high):
            return _of_near_keys(rule, q, k, used)
    return rule.added_to_rows(q, k)


def _by_blocks(rule: DotBias, q: jax.Array, k: jax.Array, used: jax.Array) -> jax.Array:
    """Returns the logits of a rule with `pair`, which reads both coordinates.

    The rule depends on their difference alone, so both may count from the first key of a block.
    Where the keys of every block are consecutive, all blocks then have the same coordinates, and
    what `pair` computes of a key is computed for one block.

    Args:
      rule: the rule.
      q, k: int32 [B, 1] and [B, S].
      used: bool [B, S], the keys that some head sees.
    """
    batch, keys = k.shape
    padded, offsets = _up_to_blocks(keys), jnp.arange(_BLOCK, dtype=jnp.int32)
    starts = pad_axis(k, 1, padded).reshape(batch, -1, _BLOCK) - offsets[None, None]
    unused = ~pad_axis(used, 1, padded).reshape(-1, *starts.shape[1:])
    first = jnp.max(jnp.where(unused, jnp.iinfo(jnp.int32).min, starts), axis=2)
    # Differences of larger coordinates may overflow.
    small = jnp.all((q >= -(2**30)) & (q < 2**30))
    consecutive = (starts == first[:, :, None]) & (starts >= -(2**30)) & (starts < 2**30)
    pairs = rule.by_pair()

    def in_blocks():
        over = jax.vmap(pairs.rule, (None, None, None, None, None, 0))
        over = jax.vmap(over, (None, None, None, None, 0, None))
        over = jax.vmap(over, (None, 0, 0, None, None, None))
        over = jax.vmap(over, (None, None, 0, None, 0, None))
        out = over(pairs.shared, pairs.heads, pairs.q_features[:, 0], None, q - first, offsets)
        return out.astype(jnp.float32).reshape(batch, out.shape[1], 1, -1)[..., :keys]

    in_order = small & jnp.all(consecutive | unused)
    return jax.lax.cond(in_order, in_blocks, lambda: pairs.added_to_rows(q, k))


def _of_near_keys(rule: DotBias, q: jax.Array, k: jax.Array, used: jax.Array) -> jax.Array:
    """Returns the logits of a rule on features of keys, most of them beyond its upper bound.

    These have the same vector: one product reads all features, in their order. The features of
    keys before the bound are picked.

    Args:
      rule: the rule.
      q, k: int32 [B, 1] and [B, S].
      used: bool [B, S], the keys that some head sees.
    """
    features: Any = rule.k_features
    batch, keys, heads, _ = features.shape
    high: Any = rule.bounds[1]
    near, room = used & (q - k < high), _room(high)

    def with_near_keys(far, features, q, k, near):
        (slots,) = jnp.nonzero(near, size=room, fill_value=keys)
        features, k = (jnp.take(x, slots, axis=0, mode="clip") for x in (features, k))
        return far.at[:, :, slots].set(rule.added_logits(None, features, q, k), mode="drop")

    def few():
        vector = jnp.swapaxes(rule.vectors(jnp.full((1,), high, jnp.int32)), 0, 1)
        vector = jnp.broadcast_to(vector[None], (batch, 1, heads, vector.shape[2]))
        by_head = functools.partial(jnp.einsum, "btkgh,bskh->bkgts", precision="highest")
        arrays = vector[:, :, :, None], features.astype(jnp.float32)
        far = by_platform(by_head, products_of_token, *arrays)[:, :, 0]
        return jax.vmap(with_near_keys)(far, features, q, k, near)

    fit = jnp.all(jnp.sum(near, axis=1) <= room)
    return jax.lax.cond(fit, few, lambda: rule.added_to_rows(q, k))


def _room(high: int) -> int:
    """Returns the number of keys before a bound that have a place in `_of_near_keys`."""
    return _up_to_blocks(max(high, 1))


def _up_to_blocks(count: int) -> int:
    return -(-count // _BLOCK) * _BLOCK
