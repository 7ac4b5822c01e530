"""Attention over a sequence that is spread over devices (context parallelism).

Batch and heads need nothing: shard the arrays and `attention` follows. A sharded sequence
needs the keys of all devices. Both ways here are called inside `jax.shard_map`, where q, k
and v hold this device's tokens, and both are exact, gradients included:

    "all_gather"   every device gets all keys at once: the least waiting, T x K x H memory
    "ring"         keys travel from device to device: partial results are merged by their
                   log-sum-exp, and no device ever holds more than two shards of keys

What a rule reads travels with the keys: positions, coordinates, segments and the scheme's
own arrays. So tokens may be dealt out in any order; `zigzag` deals them so that causal
work is even.

Papers: Liu, Zaharia, Abbeel. Ring Attention with Blockwise Transformers for Near-Infinite
Context. 2023. https://arxiv.org/abs/2310.01889
Zig-zag order: zhuzilin/ring-flash-attention, 2024.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import divides, require
from posenc_jax.engine.api import attention
from posenc_jax.rules import LogitsTransform, Rule, as_tuple

_BY_KEY = ("k_coordinates", "k_segment_ids")
_STATIC = ("is_causal", "window", "scale", "softcap", "implementation")


def sequence_parallel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str,
    q_positions: jax.Array,
    k_positions: jax.Array,
    method: str = "ring",
    sinks: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Attention of this device's queries to the keys of all devices along a mesh axis.

    Args:
      q: this device's queries [B, T, N, H].
      k: this device's keys [B, S, K, H].
      v: this device's values [B, S, K, V].
      axis_name: the mesh axis over which the sequence is spread.
      q_positions: integers [B, T], of these queries in the whole sequence.
      k_positions: integers [B, S].
      method: "ring" or "all_gather"; see the top of the file.
      sinks: [N], as in `attention`.
      **options: further arguments of `attention`, each for this device's tokens. `mask`
        and dropout, which go by slots and not by positions, are refused.

    Returns:
      [B, T, N, V] in q's dtype.

    Raises:
      ValueError: for an unknown method.
      NotImplementedError: for options that go by slots.
    """
    require(
        method in ("ring", "all_gather"),
        f"sequence_parallel_attention: method must be 'ring' or 'all_gather', got {method!r}.",
    )
    for name in ("mask", "dropout_key", "contiguous", "return_lse"):
        if options.get(name) is not None:
            raise NotImplementedError(
                f"sequence_parallel_attention: {name} is not supported; a shard does not know "
                "its slots in the whole sequence."
            )
    rules = as_tuple(options.pop("rules", ()))
    if method == "ring" and any(isinstance(r, LogitsTransform) for r in rules):
        raise NotImplementedError(
            "sequence_parallel_attention: rules on whole rows of logits need all keys of a query "
            'at once; use method="all_gather".'
        )
    held: dict[str, Any] = {"k": k, "v": v, "k_positions": k_positions}
    held |= {n: options.pop(n) for n in _BY_KEY if options.get(n) is not None}
    held["k_features"] = tuple(getattr(r, "k_features", None) for r in rules)
    static = {n: options.pop(n) for n in _STATIC if n in options}
    mine = {"q": q, "q_positions": q_positions, **options}
    mine["rules"] = tuple(_with_keys(r, None) for r in rules)
    settings = _Settings(axis_name, tuple(static.items()))

    if method == "all_gather":
        whole = {name: _gathered(name, part, axis_name) for name, part in held.items()}
        return _partial(settings, mine, whole, return_lse=False, sinks=sinks)
    operands = _varying((mine, held), axis_name)
    moving = jax.tree.map(lambda x: x if _moves(x) else None, operands)
    fixed = jax.tree.map(lambda x: None if _moves(x) else x, operands)
    out, lse = _ring(settings, moving, fixed)
    if sinks is not None:
        out *= _share(lse, jnp.broadcast_to(sinks.astype(jnp.float32)[None, None], lse.shape))
    return out.astype(q.dtype)


@dataclasses.dataclass(frozen=True)
class _Settings:
    axis_name: str
    options: tuple[tuple[str, Any], ...]


def _partial(settings: _Settings, mine: dict, held: dict, **more: Any) -> Any:
    """Attention of these queries to the keys held, and its log-sum-exp if not refused."""
    mine, held = dict(mine), dict(held)
    carried = zip(mine.pop("rules"), held.pop("k_features"), strict=True)
    rules = tuple(_with_keys(rule, features) for rule, features in carried)
    arrays = mine.pop("q"), held.pop("k"), held.pop("v")
    options = {"return_lse": True} | dict(settings.options) | more
    return attention(*arrays, rules=rules, **mine, **held, **options)


def _with_keys(rule: Any, k_features: Any) -> Rule:
    if not hasattr(rule, "k_features"):
        return rule
    return dataclasses.replace(rule, k_features=k_features)


def _gathered(name: str, part: Any, axis_name: str) -> Any:
    def gather(x):
        axis = x.ndim - 1 if name == "k_coordinates" else 1
        return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)

    return jax.tree.map(gather, part)


def _moves(x: jax.Array) -> bool:
    """Whether an array can have a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _varying(tree: Any, axis_name: str) -> Any:
    """Lets every array vary over the axis, so that gradients of shared ones are summed."""

    def vary(x):
        x = jnp.asarray(x)
        axes = frozenset((axis_name,)) - jax.typeof(x).mat.varying
        return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x

    return jax.tree.map(vary, tree)


def _merged(moving: Any, fixed: Any) -> Any:
    pick = functools.partial(jax.tree.map, is_leaf=lambda x: x is None)
    return pick(lambda a, b: b if a is None else a, moving, fixed)


def _onwards(tree: Any, axis_name: str) -> Any:
    """Sends arrays to the next device of the ring."""
    count = jax.lax.axis_size(axis_name)
    return jax.lax.ppermute(tree, axis_name, [(i, (i + 1) % count) for i in range(count)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(settings: _Settings, moving: Any, fixed: Any) -> tuple[jax.Array, jax.Array]:
    """Returns float32 output and log-sum-exp; keys go around once."""
    mine, held = _merged(moving, fixed)

    def step(carry, _):
        held, out = carry
        held = _onwards(held, settings.axis_name)
        return (held, _merge(out, _partial(settings, mine, held))), None

    out, lse = _partial(settings, mine, held)
    rounds = jax.lax.axis_size(settings.axis_name) - 1
    carry = held, (out.astype(jnp.float32), lse)
    (_, out), _ = jax.lax.scan(step, carry, length=rounds)
    return out


def _ring_forward(settings, moving, fixed):
    out, lse = _ring(settings, moving, fixed)
    return (out, lse), (moving, fixed, out, lse)


def _ring_backward(settings, saved, cotangents):
    """Sends the keys around again, and with them what is known of their gradients.

    With w the share of a shard in the softmax, out = sum w out_s and w = exp(lse_s - lse),
    so each shard's attention gets the cotangents w d_out and w (d_out . (out_s - out) + d_lse).
    """
    (mine, held), (fixed_mine, fixed_held), out, lse = saved
    d_out, d_lse = cotangents
    inner = (d_out * out).sum(-1)

    def step(held, fixed_held):
        def attend(mine, held):
            return _partial(settings, _merged(mine, fixed_mine), _merged(held, fixed_held))

        (part, part_lse), pull = jax.vjp(attend, mine, held)
        share = jnp.exp(part_lse - jnp.where(jnp.isneginf(lse), 0.0, lse))
        d_part = (share[..., None] * d_out).astype(part.dtype)
        gap = (d_out * part.astype(jnp.float32)).sum(-1) - inner
        return pull((d_part, share * (gap + d_lse)))

    def again(carry, _):
        held, fixed_held, d_mine, d_held = carry
        held, fixed_held, d_held = _onwards((held, fixed_held, d_held), settings.axis_name)
        more = step(held, fixed_held)
        d_mine, d_held = jax.tree.map(jnp.add, (d_mine, d_held), more)
        return (held, fixed_held, d_mine, d_held), None

    carry = held, fixed_held, *step(held, fixed_held)
    rounds = jax.lax.axis_size(settings.axis_name) - 1
    (*_, d_mine, d_held), _ = jax.lax.scan(again, carry, length=rounds)
    return (d_mine, _onwards(d_held, settings.axis_name)), None


_ring.defvjp(_ring_forward, _ring_backward)


def _share(lse: jax.Array, other: jax.Array) -> jax.Array:
    """The part [..., 1] of the softmax's mass that `lse` has beside `other`."""
    nothing = jnp.isneginf(lse)
    gap = jnp.where(jnp.isneginf(other), -1e30, other) - jnp.where(nothing, 0.0, lse)
    return jnp.where(nothing, 0.0, jax.nn.sigmoid(-gap))[..., None]


def _merge(a: tuple, b: tuple) -> tuple[jax.Array, jax.Array]:
    """Attention to two sets of keys, from attention to each; float32."""
    (x, p), (y, q) = a, b
    out = x * _share(p, q) + y.astype(jnp.float32) * _share(q, p)
    return out, jnp.logaddexp(p, q)


def zigzag(length: int, shards: int) -> np.ndarray:
    """Returns the order of tokens that makes causal work even, int [length].

    Of 2n equal pieces, device i holds pieces i and 2n - 1 - i. Index the token axis with
    it before sharding, and the output with its `argsort` to undo it.

    Args:
      length: T, a multiple of twice the number of shards.
      shards: n.

    Raises:
      ValueError: if the pieces would not be equal.

    >>> zigzag(8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    divides("zigzag", length=length, twice_the_shards=2 * shards)
    pieces = np.arange(length).reshape(2 * shards, -1)
    return np.concatenate([pieces[[i, 2 * shards - 1 - i]].ravel() for i in range(shards)])


def carried_in(total: jax.Array, axis_name: str) -> jax.Array:
    """Returns the sum of `total` over the devices before this one (0 on the first).

    The start of a running sum, such as FoX's, on a contiguous shard: give `side` this as
    its state, made of what `side` without a state returns.

    Args:
      total: what this device's tokens add, any shape.
      axis_name: the mesh axis over which the sequence is spread.
    """
    everyone = jax.lax.all_gather(total, axis_name)
    before = jnp.arange(everyone.shape[0]) < jax.lax.axis_index(axis_name)
    before = before.reshape(-1, *(1,) * total.ndim)
    return jnp.where(before, everyone, jnp.zeros((), total.dtype)).sum(0)
