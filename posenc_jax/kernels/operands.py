"""The inputs of kernels: the arrays of a problem, padded to whole tiles, and the kinds of tiles."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from posenc_jax.engine.block_mask import BlockMask, OfIndices
from posenc_jax.engine.blocks import Blocks, TokenArrays, Visibility, padded_tokens
from posenc_jax.engine.dropout import dropout_rows
from posenc_jax.engine.lower import Lowered, masked_by_order
from posenc_jax.engine.mask import differentiable_in_units
from posenc_jax.engine.problem import Problem, pad_axis, repeat_heads
from posenc_jax.engine.rules import TableDot
from posenc_jax.engine.simplified import AllPairs, Term
from posenc_jax.engine.tokens import STATIC
from posenc_jax.kernels.elements import Element, scalar_per_key

EMPTY, PLAIN, RULED, MASKED = 0, 1, 2, 3
"""Kinds of tiles: skipped; without rules or masks; with rules alone; with both."""


def kinds(see: Visibility) -> tuple[int, ...]:
    """Returns the kinds of tiles that may occur, without `EMPTY`."""
    has_rules = see.has_terms or see.bias_everywhere or see.mask_in_bias
    possible = {
        PLAIN: not _ruled_everywhere(see),
        RULED: has_rules,
        MASKED: see.ordered or see.segments or see.until or see.block_mask,
    }
    return tuple(kind for kind, occurs in possible.items() if occurs)


def _ruled_everywhere(see: Visibility) -> bool:
    return see.bias_everywhere or (see.has_terms and see.horizon is None)


class Hiding(NamedTuple):
    """Arrays of masks that are not of tokens.

    Attributes:
      prefix: int32 [B], or None.
      block_mask: a function of two tokens with its table, or None.
    """

    prefix: jax.Array | None
    block_mask: BlockMask | None


def tile_kinds(see: Visibility, q: Any, k: Any, hiding: Hiding, blocks: Blocks) -> jax.Array:
    """Returns the kinds of tiles, int32 [B or 1, blocks of queries, blocks of keys].

    Args:
      see: the masks.
      q, k: inputs of `Visibility.summary`, in whole blocks of tokens.
      hiding: the arrays of masks that are not of tokens.
      blocks: queries and keys per tile.
    """
    prefix = hiding.prefix
    of_q = jax.tree.map(lambda x: x[:, :, None], see.summary(q, blocks.q))
    of_k = see.summary(k, blocks.k)

    def classify(**without):
        part: Any = dataclasses.replace(see, **without)
        return jax.vmap(lambda x: part.classify(x, of_k, prefix), 1, 1)(of_q)

    live, _ = classify()
    unordered: dict[str, Any] = {"is_causal": False, "window": None}
    plain = jnp.zeros_like(live)
    if not _ruled_everywhere(see):
        # Causality and the window count where they are part of the bias.
        _, plain = classify(segments=False, until=False, **({} if see.mask_in_bias else unordered))
    _, seen = classify(has_terms=False, **(unordered if see.mask_in_bias else {}))
    if hiding.block_mask is not None:
        counts = of_q.positions.low.shape[1], of_k.positions.low.shape[1]
        lengths = counts[0] * blocks.q, counts[1] * blocks.k
        not_empty, whole = hiding.block_mask.tiles(blocks.q, blocks.k, *lengths)
        live, seen = live & not_empty, seen & whole
    kind = jnp.where(seen, jnp.where(plain, PLAIN, RULED), MASKED)
    return jnp.where(live, kind, EMPTY).astype(jnp.int32)


LOG2E = 1.4426950408889634
_ROWS = 16  # F is padded to a multiple: rows of a register of bfloat16.


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static part of a problem.

    Attributes:
      batch, length, keys: B, and T and S padded to whole blocks.
      heads, kv_heads, dim, value_dim: N, K, H, V.
      forward, backward: queries and keys per tile.
      visibility: which tiles need masks and rules.
      by_slot: whether masks compare slots; else positions, which are operands.
      rules_in_bias: whether the bias has rules; else it has causality and the window alone.
      products: whether there are vectors per distance.
      pairs: whether there are arrays of all pairs.
      prefix: whether there are prefix lengths.
      mask_mod: `mask_mod(q_idx, kv_idx)` of a block mask, or None.
      scale, softcap, dropout_rate: as in `attention`.
      dtype: of the output on TPUs; on GPUs the output has q's dtype.
      interpret: run in the interpreter.
    """

    batch: int
    length: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    forward: Blocks
    backward: Blocks
    visibility: Visibility
    by_slot: bool
    rules_in_bias: bool
    products: bool
    pairs: bool
    prefix: bool
    mask_mod: Callable | None
    scale: float
    softcap: float | None
    dropout_rate: float
    dtype: Any
    interpret: Any

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def unit(self) -> float:
        """The factor of logits before they enter exp2, or the softcap's tanh."""
        return LOG2E if self.softcap is None else 1.0 / self.softcap

    def schedules(self, q: Any, k: Any, hiding: Hiding) -> tuple[Any, ...]:
        """Returns `Operands.schedules`, from what `Visibility.summary` reads."""
        raise NotImplementedError

    def pair_array(self, x: jax.Array) -> jax.Array:
        """Returns an array of all pairs, [B or 1, N or 1, T, S], as the kernels read it."""
        return x

    @property
    def sides(self) -> tuple[int, int]:
        """Positions before and after a query at which it sees keys; negative for no limit."""
        see = self.visibility
        before, after = (-1, -1) if see.window_by_coordinates else see.window or (-1, -1)
        return before, 0 if see.is_causal else after

    @property
    def comparisons(self) -> tuple[tuple[str, int, int], ...]:
        """Numbers of tokens that masks compare, with the greatest differences on both sides."""
        see = self.visibility
        positions, window = ("positions", *self.sides), see.window
        if not see.window_by_coordinates or window is None:
            return (positions,)
        return (*(positions,) * see.is_causal, ("coordinates", *window))

    def reach(self, blocks: Blocks) -> tuple[int, int]:
        """Returns the least and greatest difference, first query minus first key, of tiles.

        Tiles beyond the greatest read the bias of the greatest, which is zero there, or masked.
        """
        see, q, k = self.visibility, blocks.q, blocks.k
        step = math.gcd(q, k, 128)
        before, after = self.sides
        low, high = k - self.keys, self.length - q
        if after >= 0 and not self.prefix:
            low = max(low, -((after + q - 1) // step * step))
        if before >= 0 and not self.prefix:
            high = min(high, (before + k - 1) // step * step)
        constant_from = see.horizon if self.rules_in_bias or self.products else 0
        windowed = see.mask_in_bias and before >= 0
        if constant_from is not None and not see.bias_everywhere and not windowed:
            high = min(high, -(-(constant_from + k) // step) * step)
        return low, max(low, high)


SpecT = TypeVar("SpecT", bound=Spec)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Product:
    """A term that adds features of queries or keys, dot a vector per distance.

    Attributes:
      features: [B, N or K, F, T or S].
      vectors: float32 [N or 1, F, R], by ascending distance from `Operands.first`.
      of_keys: whether keys have the features.
    """

    features: jax.Array
    vectors: jax.Array
    of_keys: bool = dataclasses.field(metadata=STATIC)


class TokenScalars(NamedTuple):
    """Numbers of tokens that masks and rules read, int32 [B or 1, 1, T]; None if none does."""

    coordinates: Any = None
    positions: Any = None
    segments: Any = None
    slots: Any = None
    until: Any = None
    index: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays, padded to whole blocks.

    Attributes:
      q, k, v: [B, T, N, H], [B, S, K, H] and [B, S, K, V].
      bias: float32 [N or 1, R], times `Spec.unit`, by ascending distance from `first`, or
        None.
      rows, columns: of queries and of keys; padding of keys has another segment than padding of
        queries, and only keys have slots, with dropout.
      prefix: int32 [B]; zeros if there is none.
      elements: elementwise terms.
      dropped: of queries, uint32 [B, N, 1, T], see `dropout_rows`, or None without dropout.
      products: vectors of tokens, dot a vector per distance.
      pairs: arrays of all pairs, of `Spec.pair_array`.
      schedules: of the forward and the backward pass, as the kernels need them.
      first: the least distance of `bias` and of the vectors.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    rows: TokenScalars
    columns: TokenScalars
    prefix: jax.Array
    elements: tuple[Element, ...]
    dropped: jax.Array | None
    products: tuple[Product, ...]
    pairs: tuple[AllPairs, ...]
    schedules: tuple[Any, ...]
    first: int = dataclasses.field(metadata=STATIC)


def out_struct(like: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    """Returns the type of a result of a kernel; inside `shard_map`, it varies as `like` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).mat)


class Grads(NamedTuple):
    """Cotangents of the differentiable operands."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    elements: tuple[Element, ...]
    products: tuple[Product, ...]
    pairs: tuple[AllPairs, ...]


def spec_fields(p: Problem, lowered: Lowered) -> dict[str, Any]:
    """Returns the fields of `Spec` that do not depend on the platform."""
    return {
        "batch": p.q.shape[0],
        "heads": p.num_heads,
        "kv_heads": p.k.shape[2],
        "dim": p.q.shape[3],
        "value_dim": p.v.shape[3],
        "visibility": lowered.visibility,
        "by_slot": p.ordered_by_slot,
        "rules_in_bias": lowered.bias is not None,
        "products": any(isinstance(x.term.rule, TableDot) for x in lowered.terms),
        "pairs": bool(lowered.pairs),
        "prefix": p.prefix_length is not None,
        "mask_mod": None if p.block_mask is None else OfIndices(p.block_mask.function),
        "scale": p.scale,
        "softcap": p.softcap,
        "dropout_rate": p.dropout_rate,
        "dtype": jnp.float32 if p.sinks is not None else p.q.dtype,
    }


def prepare(
    p: Problem,
    lowered: Lowered,
    elements: tuple[Element, ...],
    spec: SpecT,
    mask_by_distance: bool,
) -> tuple[SpecT, Operands]:
    """Pads a lowered problem to the lengths of its `Spec`, and returns both.

    Args:
      p, lowered, elements: the problem, its lowering and its elementwise terms.
      spec: the static part, before padding.
      mask_by_distance: whether causality and windows by slot are a bias by distance.
    """
    length, keys = spec.length, spec.keys
    q_tokens, k_tokens, visibility = padded_tokens(p, spec.visibility, length, keys)
    # Masks do not hide NaN or infinity, which a rule of hidden pairs may have.
    any_value = spec.pairs or any(x.term.rule.any_value for x in lowered.terms)
    mask_by_distance &= spec.by_slot and p.softcap is None and not any_value
    mask_by_distance &= lowered.bias is None  # Which has the mask, or must not have it.
    if mask_by_distance and visibility.ordered:
        visibility = dataclasses.replace(visibility, mask_in_bias=True)
    spec = dataclasses.replace(spec, visibility=visibility)
    # Where no key is after its query, distances start at 0.
    first = 0 if p.is_causal and p.prefix_length is None else 1 - p.keys
    products, per_key = _products(p, lowered, spec, first)
    reads_coordinates = any(element.reads_coordinates for element in elements)
    columns = _token_scalars(spec, k_tokens, reads_coordinates)
    if columns.segments is not None:
        # Padding has negative segments; padding of keys gets one that no query has.
        least, ids = jnp.iinfo(jnp.int32).min, columns.segments
        columns = columns._replace(segments=jnp.where(ids < 0, least, ids))
    dropped = None
    if p.dropout_seeds is not None:
        columns = columns._replace(slots=pad_axis(p.k_slots, 1, keys)[:, None])
        dropped = pad_axis(dropout_rows(p.dropout_seeds, p.q_slots), 2, length)[:, :, None]
    return spec, Operands(
        q=pad_axis(p.q, 1, length),
        k=pad_axis(p.k, 1, keys),
        v=pad_axis(lowered.v, 1, keys),
        bias=_bias(p, lowered, spec, first),
        rows=_token_scalars(spec, q_tokens, reads_coordinates),
        columns=columns,
        prefix=jnp.zeros((1,), jnp.int32) if p.prefix_length is None else p.prefix_length,
        elements=tuple(
            dataclasses.replace(
                element,
                q_scalars=tuple(pad_axis(y, 3, length, mode="edge") for y in element.q_scalars),
                k_scalars=tuple(pad_axis(y, 3, keys, mode="edge") for y in element.k_scalars),
            )
            for element in (*elements, *per_key)
        ),
        dropped=dropped,
        products=products,
        pairs=tuple(dataclasses.replace(x, pairs=spec.pair_array(x.pairs)) for x in lowered.pairs),
        schedules=spec.schedules(q_tokens, k_tokens, Hiding(p.prefix_length, p.block_mask)),
        first=first,
    )


def _token_scalars(spec: Spec, x: TokenArrays, reads_coordinates: bool) -> TokenScalars:
    see = spec.visibility
    return TokenScalars(
        coordinates=x.coordinates if reads_coordinates or see.window_by_coordinates else None,
        positions=x.positions if (see.ordered or see.until) and not spec.by_slot else None,
        segments=x.segments,
        until=x.until,
        index=x.index,
    )


def _bias(p: Problem, lowered: Lowered, spec: Spec, first: int) -> jax.Array | None:
    """Returns `Operands.bias`, of distances first to T - 1."""
    if lowered.bias is not None:
        return differentiable_in_units(lowered.bias(first, p.length), spec.unit)
    if not spec.visibility.mask_in_bias:
        return None
    distances = jnp.arange(first, p.length, dtype=jnp.int32)
    return masked_by_order(p, distances, jnp.zeros((1, distances.shape[0]), jnp.float32))


def _products(
    p: Problem, lowered: Lowered, spec: Spec, first: int
) -> tuple[tuple[Product, ...], list[Element]]:
    """Returns the products, and the terms that hold their scalars per key, if there are any."""
    products, per_key = [], []
    for x in lowered.terms:
        if not isinstance(x.term.rule, TableDot):
            continue
        of_keys = x.term.rule.of_keys
        features, length = (x.k_features, spec.keys) if of_keys else (x.q_features, spec.length)
        product, scalars = _product(x.term, x.strip, features, first, p.length)
        padded = pad_axis(product.features, 3, length)
        products.append(dataclasses.replace(product, features=padded))
        if scalars is not None:
            per_key.append(scalar_per_key(scalars))
    return tuple(products), per_key


def _product(
    term: Term, strip: Any, features: jax.Array, first: int, stop: int
) -> tuple[Product, jax.Array | None]:
    """Returns a term as a product, and the scalar per key that it adds at any distance, or None.

    Args:
      term: of a `TableDot`.
      strip: `strip(first, stop) -> float32 [1 or N, stop - first, F]`.
      features: [B, T, N or K, F].
      first, stop: the distances, of integers first to stop - 1.
    """
    # Beyond the ends of a table all distances have one vector. Without it vectors are 0 there, and
    # tiles plain; its product with the features is a scalar per key.
    vectors, scalars = term.factor * strip(first, stop), None
    if term.interior is not None:
        far = term.factor * term.interior.heads[:, None]
        vectors -= far
        repeated = repeat_heads(features, max(features.shape[2], far.shape[0]))
        far = jnp.broadcast_to(far[:, 0], repeated.shape[2:])
        repeated = repeated.astype(jnp.float32)
        scalars = jnp.einsum("bsnf,nf->bsn", repeated, far, precision="highest")
    pad = (0, 0), (0, 0), (0, -features.shape[3] % _ROWS), (0, 0)
    features = jnp.pad(jnp.transpose(features, (0, 2, 3, 1)), pad)
    vectors = jnp.pad(jnp.swapaxes(vectors, 1, 2), pad[1:])
    return Product(features, vectors, term.rule.of_keys), scalars
