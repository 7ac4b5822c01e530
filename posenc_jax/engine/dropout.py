"""Dropout of attention weights by a hash of their place, so that no mask is stored."""

import jax
import jax.numpy as jnp


def make_dropout_seeds(key: jax.Array, batch: int, heads: int) -> jax.Array:
    """Returns uint32 [B, N, 2]: two words for each batch row and head."""
    seed = jax.random.bits(key, (2,), jnp.uint32)
    b, n = (jnp.arange(count, dtype=jnp.uint32) for count in (batch, heads))
    words = _mix(_mix(seed[0] ^ b)[:, None] + n[None])
    return jnp.stack([words, jnp.full_like(words, seed[1])], -1)


def keep_mask(seeds: jax.Array, rate: float, q_slots: jax.Array, k_slots: jax.Array) -> jax.Array:
    """Returns bool [B, N, T, S], false for the weights that dropout removes.

    A hash of seed, batch row, head, query slot and key slot: every implementation drops the
    same weights, whatever its tiles and devices, and stores nothing.

    Args:
      seeds: uint32 [B, N, 2].
      rate: the share of the weights that is dropped.
      q_slots: int32 [1, T], the slots of the queries.
      k_slots: int32 [1 or B, S], the slots of the keys.
    """
    rows = dropout_rows(seeds, q_slots)[..., None]
    return is_kept(rows, k_slots.astype(jnp.uint32)[:, None, None], rate)


def dropout_rows(seeds: jax.Array, q_slots: jax.Array) -> jax.Array:
    """Returns uint32 [B, N, T], the hash of a query without its keys."""
    return _mix(seeds[..., :1] + q_slots.astype(jnp.uint32)[:, None]) ^ seeds[..., 1:]


def is_kept(rows: jax.Array, k_slots: jax.Array, rate: float) -> jax.Array:
    """Returns `keep_mask` from `dropout_rows` and uint32 slots of keys, which broadcast."""
    return _mix(rows + k_slots) >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))


def _mix(h: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: every input bit changes half of the output bits."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
