"""Attention over a sequence that is spread over devices (context parallelism).

Batch and heads need nothing: shard the arrays and `attention` follows. A sharded sequence
needs the keys of all devices. Both methods are exact, gradients included:

    "all_gather"   every device gets all keys at once: least latency, memory T x K x H
    "ring"         keys travel from device to device, partial results are merged by their
                   log-sum-exp, and no device holds more than two shards of keys

`SequenceParallel` is an implementation for layers and `attention`, of whole arrays on a mesh.
`sequence_parallel_attention` is called inside `jax.shard_map`, where q, k and v hold this device's
tokens. Positions, coordinates, segments and features travel with the keys. So tokens may be dealt
out in any order; `zigzag` deals them so that causal work is even.

Papers: Liu, Zaharia, Abbeel. Ring Attention with Blockwise Transformers for Near-Infinite
Context. 2023. https://arxiv.org/abs/2310.01889
Zig-zag order: zhuzilin/ring-flash-attention, 2024.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from posenc_jax.checks import divides, one_of, require
from posenc_jax.engine.api import AttentionCall, make_problem, run
from posenc_jax.engine.mask import Window
from posenc_jax.engine.problem import (
    Implementation,
    Implementations,
    LogSumExp,
    Problem,
    combine,
    partition,
    vary_over,
    with_sinks,
)
from posenc_jax.engine.rule import Rule, as_tuple
from posenc_jax.engine.tracing import Traced, trace_once

__all__ = ["SequenceParallel", "carried_in", "sequence_parallel_attention", "zigzag"]


def sequence_parallel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str,
    q_positions: jax.Array,
    k_positions: jax.Array,
    rules: Rule | tuple[Rule, ...] = (),
    q_coordinates: jax.Array | None = None,
    k_coordinates: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    k_segment_ids: jax.Array | None = None,
    is_causal: bool = False,
    window: Window = None,
    prefix_length: jax.Array | None = None,
    k_visible_until: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    method: str = "ring",
    implementation: Implementations = None,
) -> jax.Array:
    """Attention of this device's queries to the keys of all devices along a mesh axis.

    Args:
      q: this device's queries [B, T, N, H].
      k: this device's keys [B, S, K, H].
      v: this device's values [B, S, K, V].
      axis_name: the mesh axis over which the sequence is spread.
      q_positions: integers [B, T], of these queries in the whole sequence.
      k_positions: integers [B, S].
      rules, q_coordinates, k_coordinates, q_segment_ids, k_segment_ids, is_causal, window,
        prefix_length, k_visible_until, scale, softcap, sinks, implementation: as in `attention`,
        for this device's tokens. Arguments by slot, such as `mask` and dropout, are not supported:
        a shard does not know its slots in the whole sequence.
      method: "ring" or "all_gather"; see the module's docstring.

    Returns:
      [B, T, N, V] in q's dtype.

    Raises:
      ValueError: for an unknown method.
      NotImplementedError: for a `DenseBias`, which goes by slots, and in a ring for rules on whole
        rows of logits.
    """
    one_of("sequence_parallel_attention", ("ring", "all_gather"), method=method)
    require(
        q_positions is not None and k_positions is not None,
        "sequence_parallel_attention: q_positions and k_positions must be given; a shard does not "
        "know its place in the whole sequence.",
    )
    call = AttentionCall(
        q_positions=q_positions,
        k_positions=k_positions,
        q_coordinates=q_coordinates,
        k_coordinates=k_coordinates,
        q_segment_ids=q_segment_ids,
        k_segment_ids=k_segment_ids,
        contiguous=False,
        is_causal=is_causal,
        window=window,
        prefix_length=prefix_length,
        k_visible_until=k_visible_until,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
    )
    rules = as_tuple(rules)
    if any(rule.pairs is not None for rule in rules):
        raise NotImplementedError(
            "sequence_parallel_attention: DenseBias is not supported; a shard does not know its "
            "slots in the whole sequence."
        )
    problem = make_problem(q, k, v, rules, call)
    if method == "ring" and problem.whole_rows:
        raise NotImplementedError(f"sequence_parallel_attention: {_WHOLE_ROWS}.")
    out, _ = _over_shards(problem, axis_name, method, implementation)
    return out


_WHOLE_ROWS = (
    'rules on whole rows of logits need all keys of a query at once; use method="all_gather"'
)


@dataclasses.dataclass(frozen=True)
class SequenceParallel(Implementation):
    """Attention of a sequence that is sharded over an axis of the mesh (context parallelism).

    It is called on whole arrays under the mesh of `jax.set_mesh`, whose other axes shard batch and
    heads as usual. Hooks of schemes see whole arrays too: running sums need no care on automatic
    axes, and JAX refuses them on explicit axes. Tokens may be in any order if positions are given.
    Masks, dropout and dense biases, which go by slots, are refused. The axis does not divide the
    one token of a decode step: decode with another implementation.

    Attributes:
      axis: the mesh axis; its size divides T and S.
      method: "ring" or "all_gather"; see the module's docstring. Default: "ring", but "all_gather"
        for rules on whole rows of logits.
      implementation: the implementation of attention within shards, as in `attention`.

    >>> import posenc_jax as pe
    >>> ring = SequenceParallel("sequence")
    >>> q = jnp.ones((1, 16, 2, 4))
    >>> with jax.set_mesh(jax.make_mesh((1,), ("sequence",))):
    ...     pe.attention(q, q, q, is_causal=True, implementation=ring).shape
    (1, 16, 2, 4)
    """

    axis: str
    method: Literal["ring", "all_gather"] | None = None
    implementation: Implementations = None
    name = "sequence_parallel"

    def __post_init__(self):
        if self.method is not None:
            one_of("SequenceParallel", ("ring", "all_gather"), method=self.method)

    def refusal(self, problem: Problem) -> str | None:
        """Returns None, or the reason why it does not support the problem, and an alternative."""
        for name, is_set in (
            ("mask", problem.mask is not None or problem.block_mask is not None),
            ("dropout", problem.dropout_seeds is not None),
            ("DenseBias", any(rule.pairs is not None for rule in problem.rules)),
        ):
            if is_set:
                return f"{name} goes by slots, and tokens may be in any order"
        return _WHOLE_ROWS if self.method == "ring" and problem.whole_rows else None

    def __call__(self, problem: Problem) -> tuple[jax.Array, LogSumExp]:
        """Returns output and log-sum-exp, both sharded over the axis."""
        mesh = jax.sharding.get_abstract_mesh()
        require(
            self.axis in mesh.axis_names and self.axis not in mesh.manual_axes,
            f"SequenceParallel: {self.axis!r} must be an axis of the mesh of jax.set_mesh, which "
            f"has {mesh.axis_names}; inside shard_map use sequence_parallel_attention.",
        )
        if self.axis in mesh.explicit_axes:  # q is not sharded, and neither is the output.
            return self.on_mesh(problem, mesh, (None,) * 4)
        size = mesh.shape[self.axis]
        require(
            problem.length % size == 0 and problem.keys % size == 0,
            f"SequenceParallel: the {size} devices of axis {self.axis!r} must divide T and S, got "
            f"{problem.length} queries and {problem.keys} keys.",
        )
        queries, keys = problem.tokens("q"), problem.tokens("k")
        bare = dataclasses.replace(problem, contiguous=False)
        bare = bare.with_tokens("q", jax.tree.map(lambda _: None, queries))
        bare = bare.with_tokens("k", jax.tree.map(lambda _: None, keys))

        method = self.method or ("all_gather" if problem.whole_rows else "ring")

        def local(bare, queries, keys):
            shard = bare.with_tokens("q", queries).with_tokens("k", keys)
            return _over_shards(shard, self.axis, method, self.implementation)

        spread = PartitionSpec(None, self.axis)
        specs = PartitionSpec(), spread, spread
        mapped = jax.shard_map(local, in_specs=specs, out_specs=spread, axis_names={self.axis})
        return mapped(bare, queries, keys)


def _over_shards(
    problem: Problem, axis_name: str, method: str, implementation: Implementations
) -> tuple[jax.Array, LogSumExp]:
    """Returns output and log-sum-exp of this device's queries and the keys of all devices."""
    whole, problem = problem, dataclasses.replace(problem, sinks=None, needs_lse=True)
    if method == "all_gather":
        keys = jax.tree.map(
            lambda x: jax.lax.all_gather(x, axis_name, axis=1, tiled=True), problem.tokens("k")
        )
        out, lse = run(problem.with_tokens("k", keys), implementation)
    else:
        problem = vary_over(problem, frozenset((axis_name,)))
        attend, captured = trace_once(lambda p: run(p, implementation), problem)
        diff, nondiff = partition((problem, captured))
        out, lse = _ring(axis_name, attend, diff, nondiff)
    return with_sinks(whole, out, lse)


def _onwards(tree: Any, axis_name: str) -> Any:
    """Sends arrays to the next device of the ring."""
    count = jax.lax.axis_size(axis_name)
    return jax.lax.ppermute(tree, axis_name, [(i, (i + 1) % count) for i in range(count)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(axis_name: str, attend: Traced, diff: Any, nondiff: Any) -> Any:
    """Returns float32 output and log-sum-exp; keys go around once.

    Args:
      axis_name: the mesh axis.
      attend: attention of a problem; it reads captured arrays.
      diff, nondiff: the parts of the problem and of the captured arrays.
    """
    problem, captured = combine(diff, nondiff)

    def step(carry, _):
        keys, out, lse = carry
        keys = _onwards(keys, axis_name)
        part, part_lse = attend(captured, problem.with_tokens("k", keys))
        share, part_share, lse = lse.merge(part_lse)
        out = share[..., None] * out + part_share[..., None] * part.astype(jnp.float32)
        return (keys, out, lse), None

    out, lse = attend(captured, problem)
    carry = problem.tokens("k"), out.astype(jnp.float32), lse
    rounds = jax.lax.axis_size(axis_name) - 1
    (_, out, lse), _ = jax.lax.scan(step, carry, length=rounds)
    return out, lse


def _ring_forward(axis_name, attend, diff, nondiff):
    out, lse = _ring(axis_name, attend, diff, nondiff)
    return (out, lse), (diff, nondiff, out, lse)


def _ring_backward(axis_name, attend, saved, cotangents):
    """Sends the keys around again, together with partial sums of their gradients.

    With w the share of a shard in the softmax, out = sum w out_s and w = exp(lse_s - lse),
    so the attention of each shard has the cotangents w d_out and
    w (d_out . (out_s - out) + d_lse).
    """
    diff, nondiff, out, lse = saved
    d_out, d_lse = cotangents  # `d_lse.total` and `d_lse.top` have the same derivative.
    delta = (d_out * out).sum(-1)
    total = jnp.where(lse.total == 0, 1.0, lse.total)

    def step(keys, fixed_keys):
        def attend_to(diff, keys):
            parts = zip((diff, nondiff), (keys, fixed_keys), strict=True)
            trees = [(p.with_tokens("k", tokens), captured) for (p, captured), tokens in parts]
            problem, captured = combine(*trees)
            out, lse = attend(captured, problem)
            return (out, lse.value), lse

        (part, _), pull, part_lse = jax.vjp(attend_to, diff, keys, has_aux=True)
        share = part_lse.total * jnp.exp(part_lse.top - lse.top) / total
        d_part = (share[..., None] * d_out).astype(part.dtype)
        gap = (d_out * part.astype(jnp.float32)).sum(-1) - delta
        return pull((d_part, share * (gap + d_lse.top)))

    def again(carry, _):
        keys, fixed_keys, d_mine, d_keys = carry
        keys, fixed_keys, d_keys = _onwards((keys, fixed_keys, d_keys), axis_name)
        more = step(keys, fixed_keys)
        d_mine, d_keys = jax.tree.map(jnp.add, (d_mine, d_keys), more)
        return (keys, fixed_keys, d_mine, d_keys), None

    keys, fixed_keys = (p.tokens("k") for p, _ in (diff, nondiff))
    carry = keys, fixed_keys, *step(keys, fixed_keys)
    rounds = jax.lax.axis_size(axis_name) - 1
    (*_, d_mine, d_keys), _ = jax.lax.scan(again, carry, length=rounds)
    d_problem, d_captured = d_mine
    return (d_problem.with_tokens("k", _onwards(d_keys, axis_name)), d_captured), None


_ring.defvjp(_ring_forward, _ring_backward)


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

    It starts a running sum, such as FoX's, on a contiguous shard: call `Scheme.features` without a
    state for `total`, and again with the result as its state.

    Args:
      total: the sum over this device's tokens, any shape.
      axis_name: the mesh axis over which the sequence is spread.
    """
    totals = jax.lax.all_gather(total, axis_name)
    before = jnp.arange(totals.shape[0]) < jax.lax.axis_index(axis_name)
    before = before.reshape(-1, *(1,) * total.ndim)
    return jnp.where(before, totals, jnp.zeros((), total.dtype)).sum(0)
