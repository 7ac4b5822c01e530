"""Rules and masks on a tile of logits in registers.

A tile is [queries, keys] or, for dk and dv, [keys, queries]. Scalars per token are read from
global memory, through its cache; the bias of a tile is a vector in shared memory, where every pair
reads the number at its distance.
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

from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.mask import MASK_VALUE, add_saturated, in_units
from posenc_jax.kernels.elements import Element, evaluate, inner_jaxpr
from posenc_jax.kernels.gpu.gather import by_distance, gather, indices
from posenc_jax.kernels.gpu.pipe import PAIRS, Warpgroup, matrix
from posenc_jax.kernels.gpu.spec import COLUMN, ROW, ROWS, TILE, GPUSpec, Int, Ref, has_rules, load
from posenc_jax.kernels.operands import LOG2E, MASKED, PLAIN, Operands, kinds


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
      bias: reference to the bias by index `origin` + query - key, or None.
      origin: the index of the bias of the first query and the first key.
      band_logits: functions that return the logits of products of tokens and distances.
      pairs: a function that returns the tile of an array of all pairs, or None.
    """

    spec: GPUSpec
    x: Operands
    shape: tuple[int, int]
    q_axis: int
    b: Int
    head: Int
    q: Int
    k: Int
    kind: jax.Array
    bias: Ref | None
    origin: int
    band_logits: tuple[Callable[[], jax.Array], ...]
    pairs: Callable[[], jax.Array] | None

    @property
    def ruled(self) -> bool | jax.Array:
        """Whether rules add to the logits."""
        return has_rules(self.spec, self.kind)

    def logits(self, s: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns logits in units of log 2 from products of q and k, and the slope of the cap."""
        spec, slope = self.spec, None
        if self.pairs is not None and spec.softcap is None:  # One switch takes fewer registers.
            return self._by_kind(self._add_and_hide, s * self._unit), slope
        s = self._by_kind(self._add, s * self._unit)
        if spec.softcap is not None:
            bounded = jnp.tanh(s)
            slope = 1.0 - bounded * bounded
            capped = bounded * (spec.softcap * LOG2E)
            # Rules hide keys by -inf.
            may_hide = spec.rules_in_bias or spec.pairs or self.x.elements
            s = jnp.where(s == -jnp.inf, s, capped) if may_hide else capped
        return self._by_kind(self._hide, s), slope

    def weights(
        self, lse: jax.Array, *pairs: tuple[Ref, Ref]
    ) -> tuple[jax.Array, jax.Array | None, list[jax.Array]]:
        """Returns the weights, the slope of the cap, and other products.

        Args:
          lse: log-sum-exp in units of log 2, on the tile.
          *pairs: operands of `products`: first q and k, then others.
        """
        # There are no registers for all products at once.
        is_large = self.band_logits or (self.pairs is not None and self.spec.wide)
        at_once = 1 if is_large else len(pairs)
        s, *others = products(self.shape, *pairs[:at_once])
        logits, slope = self.logits(s)
        p = jnp.exp2(logits - lse)
        for pair in pairs[at_once:]:
            others += products(self.shape, pair)
        return p, slope, others

    def add_element_grads(self, ds: jax.Array, carry: Any) -> Any:
        """Adds the cotangents of the scalars of rows to sums over columns.

        Args:
          ds: cotangent of the logits.
          carry: for each element, a list of `row_scalar_count` sums [rows].
        """
        if not self.x.elements:
            return carry

        def add(ruled, _, carry):
            carry = list(carry)
            for n, element in enumerate(self.x.elements):
                if not (ruled or element.everywhere):
                    continue
                arguments = self._scalars(element)
                pull = inlined(lambda ds, *x, e=element: evaluate(e, ds.shape, *x)[1](ds))
                grads = row_scalars(pull(ds, *arguments), self.q_axis)
                carry[n] = [c + d.sum(axis=1) for c, d in zip(carry[n], grads, strict=True)]
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
        # Kinds ascend, so this is the place of the tile's kind among the possible ones.
        index = sum((self.kind > kind).astype(jnp.int32) for kind in possible[:-1])
        return jax.lax.switch(index, branches, operand)

    def _add(self, ruled: bool, masked: bool, s: jax.Array) -> jax.Array:
        """Adds the terms of the rules to logits."""
        if ruled and self.bias is not None:
            s = s + by_distance(
                self.bias, self.shape, self.q_axis, self.origin, self.spec.interpret
            )
        for logits in self.band_logits if ruled else ():
            s = s + logits()
        if self.pairs is not None:
            tile = self.pairs()
            if masked and self.spec.softcap is not None:
                # Hidden entries may be NaN, and so would be the derivative of the softcap.
                tile = jnp.where(self._visible(), tile, 0.0)
            s = s + in_units(tile, self.spec.unit * self.x.pairs[0].factor)
            s = jnp.where(tile == MASK_VALUE, MASK_VALUE, s)  # Also where s is NaN.
        for element in self.x.elements:
            # Only `scalar_per_key` adds to tiles beyond the horizon.
            if not (ruled or element.everywhere):
                continue
            term = inlined(lambda *x, e=element: evaluate(e, self.shape, *x)[0])
            term = term(*self._scalars(element))
            if masked and element.careful and self.spec.softcap is not None:
                term = jnp.where(self._visible(), term, 0.0)  # Its slope is multiplied by zero.
            s = s + in_units(term, self.spec.unit)
        return s

    def _hide(self, ruled: bool, masked: bool, s: jax.Array) -> jax.Array:
        """Hides the logits of pairs that are not visible."""
        return jnp.where(self._visible(), s, MASK_VALUE) if masked else s

    def _add_and_hide(self, ruled: bool, masked: bool, s: jax.Array) -> jax.Array:
        return self._hide(ruled, masked, self._add(ruled, masked, s))

    def _scalars(self, element: Element) -> tuple[Any, ...]:
        """Returns the arguments of `evaluate` after the shape."""
        heads = self.spec.heads
        coordinates = [
            None if refs.coordinates is None else side(refs.coordinates)
            for side, refs in ((self._of_q, self.x.rows), (self._of_k, self.x.columns))
        ]
        return (
            [y[self.head] for y in element.scalars],
            [self._of_q(y, self.head) for y in element.q_scalars],
            # Per key head, or per query head.
            [self._of_k(y, self.head // (heads // y.shape[1])) for y in element.k_scalars],
            *coordinates,
        )

    def _of_q(self, y: Any, head: Int = 0, wide: bool = True) -> jax.Array:
        """Returns scalars of queries, [B or 1, 1, T] or [B, N, 1, T], on the tile."""
        return self._read(y, head, self.q, self.q_axis, wide)

    def _of_k(self, y: Any, head: Int = 0, wide: bool = True) -> jax.Array:
        return self._read(y, head, self.k, 1 - self.q_axis, wide)

    def _read(self, y: Any, head: Int, start: Int, axis: int, wide: bool) -> jax.Array:
        row = self.b if y.shape[0] > 1 else 0
        index = (row, head, 0) if len(y.shape) == 4 else (row, 0)
        source = y.at[(*index, pl.ds(start, self.shape[axis]))]
        scalars = load(source, (ROW, COLUMN)[axis])
        return self._wide(scalars, axis) if wide else scalars

    def _wide(self, y: jax.Array, axis: int) -> jax.Array:
        return jax.lax.broadcast_in_dim(y, self.shape, (axis,))

    def _visible(self) -> jax.Array:
        """Returns bool, true where the query sees the key."""
        spec, x, tests = self.spec, self.x, []
        q_axis, k_axis = self.q_axis, 1 - self.q_axis
        if spec.visibility.ordered:
            if spec.by_slot:
                before, after = spec.sides
                index = indices(self.shape, spec.interpret)
                q, k = index[q_axis] + (self.q - self.k), index[k_axis]
                if after >= 0:
                    tests.append(k <= q + after)
                if before >= 0:
                    tests.append(q <= k + before)
            # Sums of positions and windows stay at the ends of int32, where they would wrap around.
            for name, before, after in () if spec.by_slot else spec.comparisons:
                q = self._of_q(getattr(x.rows, name), wide=False)
                k = self._of_k(getattr(x.columns, name), wide=False)
                if after >= 0:
                    latest = self._wide(add_saturated(q, after), q_axis)
                    tests.append(self._wide(k, k_axis) <= latest)
                if before >= 0:
                    latest = self._wide(add_saturated(k, before), k_axis)
                    tests.append(self._wide(q, q_axis) <= latest)
            if spec.prefix:
                # All queries of a row see its prefix, whatever the order says.
                seen = functools.reduce(jnp.logical_and, tests)
                tests = [seen | (self._of_k(x.columns.positions) < x.prefix[self.b])]
        # Queries at this position of a key and later do not see it.
        if spec.visibility.until:
            tests.append(self._of_q(x.rows.positions) < self._of_k(x.columns.until))
        if spec.mask_mod is not None:
            index = self._of_q(x.rows.index), self._of_k(x.columns.index)
            tests.append(inlined(jax.vmap(jax.vmap(spec.mask_mod)))(*index))
        if spec.visibility.segments:
            tests.append(self._of_q(x.rows.segments) == self._of_k(x.columns.segments))
        return functools.reduce(jnp.logical_and, tests)


def products(shape: tuple[int, int], *pairs: tuple[Ref, Ref]) -> tuple[jax.Array, ...]:
    """Returns a @ b.T for pairs of references."""

    def accumulate(*accs):
        for acc, (a, b) in zip(accs, pairs, strict=True):
            plgpu.wgmma(acc, a, b.transpose((1, 0)))
        return tuple(acc[...] for acc in accs)

    return pl.run_scoped(accumulate, *[plgpu.ACC(shape, jnp.float32)] * len(pairs))


def d_logits(p: jax.Array, d_p: jax.Array, delta: jax.Array, slope: jax.Array | None) -> jax.Array:
    """Returns cotangents of products of q and k, before their scale, all on a tile."""
    ds = p * (d_p - delta)
    return ds if slope is None else ds * slope


def rows_to_tile(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts a scalar per row to a tile."""
    return jax.lax.broadcast_in_dim(x, shape, (0,))


def columns_to_tile(ref: Ref, shape: tuple[int, ...]) -> jax.Array:
    """Reads a scalar per column, and broadcasts it to a tile."""
    return jax.lax.broadcast_in_dim(load(ref, COLUMN), shape, (1,))


def zeros(shape: tuple[int, ...], layout: Any) -> jax.Array:
    """Returns float32 zeros in registers."""
    return plgpu.layout_cast(jnp.full(shape, 0.0, jnp.float32), layout)


def inlined(function: Callable) -> Callable:
    """Returns the same function without calls, and with operations that Mosaic lowers."""

    def run(*arguments):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        out = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return run


def _integer_pow(x: jax.Array, *, y: int) -> jax.Array:
    if y < 0:
        return 1.0 / _integer_pow(x, y=-y)
    return x if y == 1 else jax.lax.integer_pow(x, y)


def _floor(x: jax.Array) -> jax.Array:
    whole = x.astype(jnp.int32).astype(x.dtype)  # Towards zero.
    return jnp.where(jnp.abs(x) < 2.0**23, jnp.where(whole > x, whole - 1.0, whole), x)


_LOWERED = {
    "log1p": lambda x, **_: jnp.log(1.0 + x),
    "add_any": lambda x, y: x + y,  # Of derivatives.
    "stop_gradient": lambda x, **_: x,
    "integer_pow": _integer_pow,
    "floor": _floor,
}
"""Replacements of operations that Mosaic does not lower, equal up to rounding."""


def _evaluate(jaxpr: Any, consts: Any, arguments: Any) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(x):
        return x.val if isinstance(x, jax.extend.core.Literal) else values[x]

    for eqn in jaxpr.eqns:
        inputs = [read(x) for x in eqn.invars]
        inner = inner_jaxpr(eqn)
        if inner is not None:
            out = _evaluate(inner.jaxpr, inner.consts, inputs)
        elif eqn.primitive.name in _LOWERED:
            out = [_LOWERED[eqn.primitive.name](*inputs, **eqn.params)]
        else:
            out = eqn.primitive.bind(*inputs, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(x) for x in jaxpr.outvars]


def row_scalar_count(element: Element, q_axis: int) -> int:
    """Returns the number of an element's scalars whose cotangents are sums over columns.

    Where rows are queries, these are the scalars per query and per head; else those per key.
    """
    if q_axis == 0:
        return len(element.scalars) + len(element.q_scalars)
    return len(element.k_scalars)


def row_scalars(cotangents: Any, q_axis: int) -> list[jax.Array]:
    """Returns the cotangents of an element that are summed over columns, as in the count."""
    of_head, of_q, of_k = cotangents
    return [*of_head, *of_q] if q_axis == 0 else list(of_k)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The array of all pairs of a kernel, if there is one.

    Attributes:
      spec: the static part.
      x: the operands.
      blocks: queries and keys per tile.
      q_axis: the axis of the queries in tiles.
    """

    spec: GPUSpec
    x: Operands
    blocks: Blocks
    q_axis: int

    @property
    def type(self) -> Callable[[int], Any] | None:
        """Returns the type of some slots in shared memory, for `pipe`."""
        if not self.x.pairs:
            return None
        shape, dtype = (self.blocks.q, self.blocks.k), self.x.pairs[0].pairs.dtype
        if self.q_axis == 0:
            return lambda slots: matrix(self.spec, slots, *shape, dtype=dtype)
        return lambda slots: plgpu.SMEM((slots, *shape), dtype)  # For `gather`.

    def source(self, wg: Warpgroup, b: Int, head: Int, q: Int, k: Int) -> dict[str, Ref]:
        """Returns the tile in global memory with the first query q and the first key k, by name."""
        if not self.x.pairs:
            return {}
        y = wg.refs["x"].pairs[0].pairs
        index = b if y.shape[0] > 1 else 0, head if y.shape[1] > 1 else 0
        return {PAIRS: y.at[(*index, pl.ds(q, self.blocks.q), pl.ds(k, self.blocks.k))]}

    def reader(self, wg: Warpgroup, slots: dict[str, Ref]) -> Callable[[], jax.Array] | None:
        """Returns a function that reads a warpgroup's part of the tile, float32."""
        if not self.x.pairs:
            return None
        rows = pl.ds(pl.multiple_of(wg.number * ROWS, ROWS), ROWS)
        if self.q_axis == 0:
            return lambda: load(slots[PAIRS].at[rows], TILE).astype(jnp.float32)

        # In memory the tile is [queries, keys], and here rows are keys.
        def read():
            shape = ROWS, self.blocks.q
            part = slots[PAIRS].at[:, rows]
            return gather(part, shape, lambda row, column: (column, row), self.spec.interpret)

        return read
