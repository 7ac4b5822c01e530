"""Elementwise terms: functions of scalars per query, per key and per head, for every pair.

A term enters the kernels if its rule of one query and one key is a composition of elementwise
operations on scalars. The kernels evaluate it on whole tiles, and differentiate it there.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.block_mask import BlockMask, OfIndices
from posenc_jax.engine.mask import differentiable_in_units
from posenc_jax.engine.simplified import Simplified
from posenc_jax.engine.tokens import STATIC, Tokens
from posenc_jax.engine.tracing import inner_jaxpr, trace_once

_ELEMENTWISE = frozenset(
    "abs add and clamp convert_element_type div eq exp exp2 floor ge gt integer_pow le log "
    "log1p logistic lt max min mul ne neg not or rem round select_n sign sqrt rsqrt square "
    "stop_gradient sub tanh xor".split()
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Element:
    """An elementwise term, and the arrays that it reads.

    Attributes:
      scalars: float32 arrays [N], first per head, then shared.
      q_scalars: float32 arrays [B, N, 1, T].
      k_scalars: float32 arrays [B, K or N, 1, S].
      reads_coordinates: whether the rule reads coordinates.
      everywhere: whether tiles beyond the horizon have it too.
      careful: whether derivatives may be NaN or infinite, which hidden pairs must not add.
      rule: `rule(scalars, q_scalars, k_scalars, q, k)`, a float32 number of scalars.
    """

    scalars: tuple[jax.Array, ...]
    q_scalars: tuple[jax.Array, ...]
    k_scalars: tuple[jax.Array, ...]
    reads_coordinates: bool = dataclasses.field(metadata=STATIC)
    rule: Callable = dataclasses.field(metadata=STATIC)
    everywhere: bool = dataclasses.field(default=False, metadata=STATIC)
    careful: bool = dataclasses.field(default=False, metadata=STATIC)


@dataclasses.dataclass(frozen=True)
class _Scalars:
    """The rule of a term as a function of flat scalars; fields are structures."""

    arrays: Any  # By head, and the rule without them.
    q_features: Any
    k_features: Any
    factor: float

    def __call__(self, scalars, q_scalars, k_scalars, q, k):
        heads, rule = jax.tree.unflatten(self.arrays, scalars)
        query = Tokens(None, q, jax.tree.unflatten(self.q_features, q_scalars))
        key = Tokens(None, k, jax.tree.unflatten(self.k_features, k_scalars))
        out = rule.of_head(heads).logit(query, key).astype(jnp.float32)
        return differentiable_in_units(out, self.factor)


def element_of(
    x: Simplified, coordinates: tuple[jax.Array, jax.Array], heads: int
) -> Element | str:
    """Returns a term as an element, or why the kernels have no such element.

    Args:
      x: has a term.
      coordinates: of queries and keys, [B, T] or [B, T, A] each.
      heads: N.
    """
    if any(x.ndim != 2 or x.dtype != jnp.int32 for x in coordinates):
        return "coordinates of several axes, or not integers"
    term = x.term
    if not term.rule.is_pairwise:
        return "a rule that is no function of one query and one key"
    by_head, bare = term.rule.heads, term.rule.without_heads()
    of_heads, shared = map(jax.tree.leaves, (by_head, bare))
    q_scalars, structure_q = jax.tree.flatten(x.q_features)
    k_scalars, structure_k = jax.tree.flatten(x.k_features)
    small = all(x.ndim == 1 for x in of_heads) and all(x.ndim == 0 for x in shared)
    if not (small and all(x.ndim == 3 for x in (*q_scalars, *k_scalars))):
        return "a rule whose arrays are more than a number per head, query or key"
    leaves = (*of_heads, *shared, *q_scalars, *k_scalars)
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves):
        return "a rule with arrays that are not floating point"
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    coordinate = jax.ShapeDtypeStruct((), jnp.int32)
    rule = _Scalars(jax.tree.structure((by_head, bare)), structure_q, structure_k, term.factor)
    counts = len(of_heads) + len(shared), len(q_scalars), len(k_scalars)
    arguments = (*((scalar,) * count for count in counts), coordinate, coordinate)
    rule, _ = trace_once(rule, *arguments)
    if rule.closed.consts:
        return "a function that closes over an array"
    jaxpr = rule.closed.jaxpr
    other = _missing_operation(jaxpr)
    if other is not None:
        return f"a rule with the operation {other}, which the kernels do not have,"
    scalars = (*of_heads, *shared)
    return Element(
        scalars=tuple(jnp.broadcast_to(x.astype(jnp.float32), (heads,)) for x in scalars),
        q_scalars=tuple(_rows(x) for x in q_scalars),
        k_scalars=tuple(_rows(x) for x in k_scalars),
        reads_coordinates=_reads(jaxpr, jaxpr.invars[-2:]),
        rule=functools.partial(rule, ()),
        careful=term.careful,
    )


def mask_mod_refusal(mask: BlockMask) -> str | None:
    """Returns why the kernels cannot evaluate the function of a block mask, or None."""
    if jax.tree.leaves(mask.arrays) or max(len(mask.rows), len(mask.heads)) > 1:
        return "a block mask of rows, heads or arrays"
    closed = jax.make_jaxpr(OfIndices(mask.function))(*(jax.ShapeDtypeStruct((), jnp.int32),) * 2)
    if closed.consts:
        return "a block mask whose function closes over an array"
    other = _missing_operation(closed.jaxpr)
    return other and f"a block mask with the operation {other}, which the kernels do not have,"


def scalar_per_key(scalars: jax.Array) -> Element:
    """Returns the term that adds a scalar per key, [B, S, K or N], to every logit."""
    return Element((), (), (_rows(scalars),), False, _first_of_key, everywhere=True)


def _first_of_key(scalars, q_scalars, k_scalars, q, k):
    return k_scalars[0]


def _rows(x: jax.Array) -> jax.Array:
    """[B, T, N] to float32 [B, N, 1, T]."""
    return jnp.swapaxes(x.astype(jnp.float32), 1, 2)[:, :, None]


def _reads(jaxpr: Any, variables: list) -> bool:
    """Whether an equation reads one of the variables."""
    return any(x in variables for eqn in jaxpr.eqns for x in eqn.invars)


def _missing_operation(jaxpr: Any) -> str | None:
    """Returns the name of an operation that the kernels do not have, or None."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = inner_jaxpr(eqn)
        if inner is not None:
            name = _missing_operation(inner.jaxpr)
            if name is not None:
                return name
        elif name not in _ELEMENTWISE:
            return name
        elif name == "rem" and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating):
            return "rem of floats"  # x - y * floor(x / y) rounds.
    return None


def evaluate(
    element: Element,
    shape: tuple[int, ...],
    scalars: Any,
    q_scalars: Any,
    k_scalars: Any,
    *coordinates: jax.Array | None,
) -> tuple[jax.Array, Callable]:
    """Returns a term on a tile, and the pullback to its scalars.

    Args:
      element: the term.
      shape: of the tile.
      scalars: of the head.
      q_scalars, k_scalars: arrays that broadcast to the tile.
      *coordinates: of queries and of keys, which broadcast to the tile.
    """

    def wide(x):
        return jnp.broadcast_to(x, shape)

    places = [jnp.zeros(shape, jnp.int32)] * 2
    if element.reads_coordinates:
        places = [wide(x) for x in coordinates]
    arrays = jax.tree.map(wide, (tuple(scalars), tuple(q_scalars), tuple(k_scalars)))
    out, pull = jax.vjp(lambda *x: jax.vmap(jax.vmap(element.rule))(*x, *places), *arrays)
    if not element.careful:
        return out, pull

    def pull_seen(ds):  # Hidden pairs have a cotangent of zero, and 0 * NaN is NaN.
        return jax.tree.map(lambda d: jnp.where(ds == 0.0, 0.0, d), pull(ds))

    return out, pull_seen
