"""Rules and masks on a tile of logits in registers.

A tile is [queries, keys] or, for dk and dv, [keys, queries]. Numbers per token are read from
global memory, where they are in the cache; the bias of a tile is a vector in shared memory, of
which every pair reads the number at its distance.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.elements import evaluate, inner_jaxpr
from posenc_jax.engine.gpu.gather import by_distance, places
from posenc_jax.engine.gpu.spec import COLUMN, ROW, Spec, has_rules, load
from posenc_jax.engine.kinds import MASKED, PLAIN, kinds
from posenc_jax.engine.mask import MASK_VALUE, add_saturated
from posenc_jax.engine.operands import LOG2E, Operands


@dataclasses.dataclass(frozen=True)
class Tile:
    """A warpgroup's part of a tile.

    Attributes:
      spec: the static part.
      x: references to the operands.
      shape: rows and columns.
      q_axis: the axis of the queries.
      b, head: row of the batch and query head.
      q, k: first query and first key.
      kind: of the tile.
      bias: reference to the bias, `number at [at + query - key]`, or None.
      at: the index of the first query and the first key.
      added: functions that return what products of tokens and distances add.
    """

    spec: Spec
    x: Operands
    shape: tuple[int, int]
    q_axis: int
    b: Any
    head: Any
    q: Any
    k: Any
    kind: Any
    bias: Any
    at: int
    added: tuple[Callable[[], jax.Array], ...]

    @property
    def ruled(self) -> Any:
        """Whether rules add to the logits."""
        return has_rules(self.spec, self.kind)

    def logits(self, s: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns logits in units of log 2 from products of q and k, and the slope of the cap."""
        spec = self.spec
        s = self._by_kind(lambda ruled, _, s: self._add(s, ruled), s * self._unit)
        slope = None
        if spec.softcap is not None:
            bounded = jnp.tanh(s)
            slope = 1.0 - bounded * bounded
            capped = bounded * (spec.softcap * LOG2E)
            may_hide = spec.rules_in_bias or self.x.elements  # Rules hide keys by -inf.
            s = jnp.where(s == -jnp.inf, s, capped) if may_hide else capped

        def hide(_, masked, s):
            return jnp.where(self._visible(), s, MASK_VALUE) if masked else s

        return self._by_kind(hide, s), slope

    def weights(
        self, lse: jax.Array, *pairs: tuple[Any, Any]
    ) -> tuple[jax.Array, jax.Array | None, list[jax.Array]]:
        """Returns the weights, the slope of the cap, and other products.

        Args:
          lse: log-sum-exp in units of log 2, on the tile.
          *pairs: operands of `products`: those of the logits, and others.
        """
        # There are no registers for all beside what products of vectors take.
        at_once = 1 if self.added else len(pairs)
        s, *others = products(self.shape, *pairs[:at_once])
        logits, slope = self.logits(s)
        p = jnp.exp2(logits - lse)
        for pair in pairs[at_once:]:
            others += products(self.shape, pair)
        return p, slope, others

    def pull(self, ds: jax.Array, carry: Any) -> Any:
        """Adds to sums over columns the cotangents of the numbers of terms by pairs.

        Args:
          ds: cotangent of the logits.
          carry: a list for each term, of `number_count` sums [rows].
        """
        if not self.x.elements:
            return carry

        def add(ruled, _, carry):
            carry = list(carry)
            for n, element in enumerate(self.x.elements):
                if not (ruled or element.everywhere):
                    continue
                given = self._numbers(element)
                back = inlined(lambda ds, *x, e=element: evaluate(e, ds.shape, *x)[1](ds))
                found = of_rows(back(ds, *given), self.q_axis)
                carry[n] = [c + d.sum(axis=1) for c, d in zip(carry[n], found, strict=True)]
            return carry

        return self._by_kind(add, carry)

    @property
    def _unit(self) -> float:
        return self.spec.scale * self.spec.unit

    def _by_kind(self, function: Callable, operand: Any) -> Any:
        """Returns `function(ruled, masked, operand)`, by the kind of the tile."""
        possible = kinds(self.spec.visibility)
        branches = [functools.partial(function, kind != PLAIN, kind == MASKED) for kind in possible]
        if len(branches) == 1:
            return branches[0](operand)
        index = sum((self.kind > kind).astype(jnp.int32) for kind in possible[:-1])
        return jax.lax.switch(index, branches, operand)

    def _add(self, s: jax.Array, ruled: bool) -> jax.Array:
        """Returns logits plus what rules add to them."""
        if ruled and self.bias is not None:
            s = s + by_distance(self.bias, self.shape, self.q_axis, self.at, self.spec.interpret)
        for added in self.added if ruled else ():
            s = s + added()
        for element in self.x.elements:
            if not (ruled or element.everywhere):
                continue
            added = inlined(lambda *x, e=element: evaluate(e, self.shape, *x)[0])
            s = s + self.spec.unit * added(*self._numbers(element))
        return s

    def _numbers(self, element: Any) -> tuple[Any, ...]:
        """Returns the arguments of `evaluate` after the shape."""
        heads = self.spec.heads
        places = [
            {name: side(y) for name, y in of.items() if name == "coordinates"}
            for side, of in ((self._of_q, self.x.rows), (self._of_k, self.x.columns))
        ]
        return (
            [y[self.head] for y in element.scalars],
            [self._of_q(y, self.head) for y in element.q_scalars],
            [self._of_k(y, self.head // (heads // y.shape[1])) for y in element.k_scalars],
            *places,
        )

    def _of_q(self, y: Any, head: Any = 0, wide: bool = True) -> jax.Array:
        """Returns numbers of queries, [B or 1, 1, T] or [B, N, 1, T], on the tile."""
        return self._read(y, head, self.q, self.q_axis, wide)

    def _of_k(self, y: Any, head: Any = 0, wide: bool = True) -> jax.Array:
        return self._read(y, head, self.k, 1 - self.q_axis, wide)

    def _read(self, y: Any, head: Any, start: Any, axis: int, wide: bool) -> jax.Array:
        row = self.b if y.shape[0] > 1 else 0
        at = (row, head, 0) if len(y.shape) == 4 else (row, 0)
        source = y.at[(*at, pl.ds(start, self.shape[axis]))]
        found = load(source, (ROW, COLUMN)[axis])
        return self._wide(found, axis) if wide else found

    def _wide(self, y: jax.Array, axis: int) -> jax.Array:
        return jax.lax.broadcast_in_dim(y, self.shape, (axis,))

    def _visible(self) -> jax.Array:
        """Returns bool, true where the query sees the key."""
        spec, x, tests = self.spec, self.x, []
        q_axis, k_axis = self.q_axis, 1 - self.q_axis
        if spec.visibility.ordered:
            left, right = spec.sides
            if spec.by_slot:
                index = places(self.shape, spec.interpret)
                q, k = index[q_axis] + (self.q - self.k), index[k_axis]
                if right >= 0:
                    tests.append(k <= q + right)
                if left >= 0:
                    tests.append(q <= k + left)
            else:
                q = self._of_q(x.rows["positions"], wide=False)
                k = self._of_k(x.columns["positions"], wide=False)
                if right >= 0:
                    latest = self._wide(add_saturated(q, right), q_axis)
                    tests.append(self._wide(k, k_axis) <= latest)
                if left >= 0:
                    latest = self._wide(add_saturated(k, left), k_axis)
                    tests.append(self._wide(q, q_axis) <= latest)
                if spec.prefix:
                    seen = functools.reduce(jnp.logical_and, tests)
                    tests = [seen | (self._wide(k, k_axis) < x.prefix[self.b])]
        if spec.visibility.segments:
            tests.append(self._of_q(x.rows["segments"]) == self._of_k(x.columns["segments"]))
        return functools.reduce(jnp.logical_and, tests)


def products(shape: tuple[int, int], *pairs: tuple[Any, Any]) -> tuple[jax.Array, ...]:
    """Returns a @ b.T for pairs of references."""

    def all_of(*totals):
        for total, (a, b) in zip(totals, pairs, strict=True):
            plgpu.wgmma(total, a, b.transpose((1, 0)))
        return tuple(total[...] for total in totals)

    return pl.run_scoped(all_of, *[plgpu.ACC(shape, jnp.float32)] * len(pairs))


def d_logits(p: jax.Array, d_p: jax.Array, delta: jax.Array, slope: jax.Array | None) -> jax.Array:
    """Returns cotangents of products of q and k, before their scale, all on a tile."""
    ds = p * (d_p - delta)
    return ds if slope is None else ds * slope


def rows_to_tile(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns a number per row on a tile."""
    return jax.lax.broadcast_in_dim(x, shape, (0,))


def columns_to_tile(ref: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns a number per column, of a reference, on a tile."""
    return jax.lax.broadcast_in_dim(load(ref, COLUMN), shape, (1,))


def zeros(shape: tuple[Any, ...], layout: Any) -> jax.Array:
    """Returns float32 zeros in registers."""
    return plgpu.layout_cast(jnp.full(shape, 0.0, jnp.float32), layout)


def inlined(function: Callable) -> Callable:
    """Returns a function of the same values, of operations that Mosaic lowers."""

    def run(*arguments):
        made, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        out = _evaluate(made.jaxpr, made.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return run


def _evaluate(jaxpr: Any, consts: Any, arguments: Any) -> list[Any]:
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(x):
        return x.val if isinstance(x, jax.extend.core.Literal) else known[x]

    for eqn in jaxpr.eqns:
        given = [read(x) for x in eqn.invars]
        inner = inner_jaxpr(eqn)
        if inner is not None:
            made = _evaluate(inner.jaxpr, inner.consts, given)
        elif eqn.primitive.name == "log1p":
            made = [jnp.log(1.0 + given[0])]
        else:
            made = eqn.primitive.bind(*given, **eqn.params)
            made = made if eqn.primitive.multiple_results else [made]
        known.update(zip(eqn.outvars, made, strict=True))
    return [read(x) for x in jaxpr.outvars]


def number_count(element: Any, q_axis: int) -> int:
    """Returns of how many numbers the cotangents are sums over columns."""
    return len(element.scalars) + len(element.q_scalars) if q_axis == 0 else len(element.k_scalars)


def of_rows(cotangents: Any, q_axis: int) -> list[jax.Array]:
    """Returns those of the cotangents of a term that are summed over columns."""
    of_head, of_q, of_k = cotangents
    return [*of_head, *of_q] if q_axis == 0 else list(of_k)
