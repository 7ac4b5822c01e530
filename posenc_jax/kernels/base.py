"""The base of implementations with kernels of this package: derivatives and refusals."""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.engine.lower import Lowered, lower
from posenc_jax.engine.mesh import ShardMapped
from posenc_jax.engine.problem import (
    LogSumExp,
    Problem,
    combine,
    lse_and_delta,
    partition,
    with_sinks,
)
from posenc_jax.engine.rules import TableDot
from posenc_jax.kernels.elements import element_of, mask_mod_refusal
from posenc_jax.kernels.operands import LOG2E, Grads, Operands, prepare, spec_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels(ShardMapped):
    """Attention by the kernels of this package for one platform; settings of `ShardMapped`."""

    name = "pallas"
    mask_by_distance: ClassVar[bool] = False
    """Whether causality and windows by slot are a bias by distance."""

    @abc.abstractmethod
    def platform_refusal(self) -> str | None:
        """Returns why the chip has no kernels, whatever the problem, or None."""

    @abc.abstractmethod
    def make_spec(self, problem: Problem, **fields: Any) -> Any:
        """Returns the platform's `Spec`, with the fields of `spec_fields`."""

    @abc.abstractmethod
    def run_forward(self, spec: Any, x: Operands) -> tuple[jax.Array, LogSumExp]:
        """Returns the output, [B, T, N, V], and the log-sum-exp, float32 [B, N, T].

        Its `top` is in units of log 2.
        """

    @abc.abstractmethod
    def run_backward(
        self, spec: Any, x: Operands, d_out: jax.Array, lse: jax.Array, delta: jax.Array
    ) -> Grads:
        """Returns the cotangents of the operands.

        Args:
          spec: the static part.
          x: the operands.
          d_out: cotangent of the output, [B, T, N, V], in the dtype of v.
          lse: float32 [B, N, T] in units of log 2, finite. With dropout at rate r, log(1 - r) is
            added.
          delta: float32 [B, N, T]: the sum of d_out * out over V minus the cotangent of the
            log-sum-exp. With dropout, times 1 - r.
        """

    def prepared(self, problem: Problem) -> tuple[Any, Operands, Lowered]:
        """Returns the static part of a problem, its operands, and its lowered rules."""
        p, lowered = problem, _lowered(problem)
        elements = tuple(_elements(p, lowered))
        spec = self.make_spec(p, **spec_fields(p, lowered))
        return *prepare(p, lowered, elements, spec, self.mask_by_distance), lowered

    def run(self, problem: Problem) -> tuple[jax.Array, LogSumExp]:
        """Computes a problem of one device by the kernels of both passes."""
        p = problem
        spec, operands, lowered = self.prepared(p)
        diff, nondiff = partition(operands)
        out, lse = _attend(self, spec, diff, nondiff)
        top, total = (jnp.swapaxes(x, 1, 2)[:, : p.length] for x in lse)
        top = top if lowered.lse_shift is None else top + lowered.lse_shift
        return with_sinks(p, out[:, : p.length], LogSumExp(top, total), LOG2E)

    def refusal(self, problem: Problem) -> str | None:
        if problem.whole_rows or not problem.normalized:
            return 'rules on whole rows of logits need implementation="xla"'
        if any(rule.adds_values for rule in problem.rules):
            return 'rules that add to values need implementation="xla"'
        if problem.length == 1:  # A tile of queries would be padding but for one.
            return (
                'one query per row, as in decode steps, needs implementation="dense"; give a layer '
                'that also decodes ("pallas", None)'
            )
        return super().refusal(problem)


def without_hidden(p: Problem) -> Problem:
    """Returns the problem with zeros for keys that no query sees: NaN times zero is NaN."""
    if any(rule.pairs is not None for rule in p.rules):
        return p.without_keys(~_seen_if_not_finite(p))
    if not p.contiguous or p.k_visible_until is not None or p.block_mask is not None:
        return p.without_unseen_keys()
    return p if p.k_segment_ids is None else p.without_keys(p.k_segment_ids < 0)


def _seen_if_not_finite(p: Problem) -> jax.Array:
    """Returns bool [B, S], the keys that some query sees; all keys if their arrays are finite.

    An array of all pairs is read once more, a block of queries at a time, if they are not.
    """
    p = jax.lax.stop_gradient(p)
    leaves = jax.tree.leaves((p.k, p.v, [rule.k_features for rule in p.rules]))
    finite = functools.reduce(jnp.logical_and, (jnp.isfinite(x).all() for x in leaves))
    size = min(p.length, 256)

    def seen_by(block):
        def part(axes, x):  # The last block overlaps the one before.
            at = axes.find("T")
            return x if at < 0 else jax.lax.dynamic_slice_in_dim(x, block * size, size, at)

        return p.map_arrays(part).visible().any((1, 2))

    count = jnp.where(finite, 1, -(-p.length // size)).astype(jnp.int32)
    first, zero = jnp.int32(1), jnp.int32(0)
    seen = jax.lax.fori_loop(first, count, lambda n, seen: seen | seen_by(n), seen_by(zero))
    return seen | finite


def rule_refusal(p: Problem, vector_refusal: Callable[[list[int]], str | None]) -> str | None:
    """Returns why the kernels of training cannot compute a problem, from shapes alone, or None.

    Args:
      p: the problem.
      vector_refusal: returns why there are no kernels for vectors per distance, from the sizes of
        the vectors, or None.
    """
    if p.mask is not None:
        return 'a given mask needs implementation="xla"; segment_ids and window are supported'
    if p.block_mask is not None and (reason := mask_mod_refusal(p.block_mask)):
        return f'{reason} needs implementation="xla"'
    if p.window_by_coordinates and p.sizes().dtype != jnp.int32:
        return 'a window by real coordinates needs implementation="xla"'
    refused = []

    def look(p):
        lowered = _lowered(p)
        refused.extend(x for x in _elements(p, lowered) if isinstance(x, str))
        counts = [
            (x.k_features if x.term.rule.of_keys else x.q_features).shape[3]
            for x in lowered.terms
            if isinstance(x.term.rule, TableDot) and x.strip is not None
        ]
        refused.extend(filter(None, [vector_refusal(counts)]))

    # Without shardings: arrays are not yet divided over devices.
    jax.eval_shape(look, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), p))
    return f'{refused[0]} needs implementation="xla"' if refused else None


def _elements(p: Problem, lowered: Lowered) -> list[Any]:
    """Returns the elementwise terms, or for a term why the kernels cannot evaluate it."""
    coordinates = p.q_coordinates, p.k_coordinates
    return [
        "a vector per distance, where positions are given,"
        if isinstance(x.term.rule, TableDot)
        else element_of(x, coordinates, p.num_heads)
        for x in lowered.terms
        if x.strip is None
    ]


def _lowered(p: Problem) -> Lowered:
    """Lowers the rules of a problem; vectors per distance are strips wherever they can be."""
    return lower(p, max_table=0)


def padded(count: int, *blocks: int) -> int:
    """Returns a number of tokens rounded up to whole blocks of all sizes."""
    step = math.lcm(*blocks)
    return -(-count // step) * step


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_derivative(implementation: str, arrays: Any) -> Any:
    """Returns arrays unchanged; a derivative through them raises `NotImplementedError`.

    Kernels get their arrays through it: those in Pallas' interpreter have wrong derivatives.
    """
    return arrays


@without_derivative.defjvp
def _refuse_derivative(implementation, *_):
    raise NotImplementedError(
        f'attention: implementation="{implementation}" has first derivatives in reverse mode only; '
        'for jax.jvp of a gradient use implementation="xla", for any other "dense".'
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    kernels: Kernels, spec: Any, diff: Operands, nondiff: Operands
) -> tuple[jax.Array, LogSumExp]:
    """Returns the output, [B, T, N, V], and the log-sum-exp, float32 [B, N, T]."""
    return _attend_forward(kernels, spec, diff, nondiff)[0]


def _attend_forward(kernels, spec, diff, nondiff):
    operands = combine(without_derivative("pallas", diff), nondiff)
    out, lse = kernels.run_forward(spec, operands)
    return (out, lse.divided(LOG2E)), (diff, nondiff, out, lse)


def _attend_backward(kernels, spec, saved, cotangents):
    diff, nondiff, out, lse = saved
    d_out, d_lse = cotangents  # `d_lse.total` has the same derivative as `d_lse.top`.
    x = combine(without_derivative("pallas", diff), nondiff)
    kept_share = 1.0 if x.dropped is None else 1.0 - spec.dropout_rate
    lse = lse._replace(total=kept_share * lse.total)
    lse, delta, d_out = lse_and_delta(out, lse, d_out, d_lse.top, LOG2E)
    delta *= kept_share
    of_queries = d_out.astype(x.v.dtype), lse, delta
    grads = kernels.run_backward(spec, x, *without_derivative("pallas", of_queries))
    return dataclasses.replace(diff, **grads._asdict()), None


_attend.defvjp(_attend_forward, _attend_backward)
