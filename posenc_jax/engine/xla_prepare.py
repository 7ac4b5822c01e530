"""From a problem to what the tiles work on: padded arrays, terms, and one static plan."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.problem import Problem, dropout_seed
from posenc_jax.engine.tiling import Plan, Visibility, pad_axis, plan
from posenc_jax.engine.xla_dots import DotTerm, dot_left_out, dot_term
from posenc_jax.engine.xla_terms import (
    Term,
    ValueTerm,
    band_of,
    bias_term,
    content_term,
    high_bound,
)
from posenc_jax.mask import window_sides
from posenc_jax.rules import DotBias

HIDDEN = -1e30
"""A finite logit that no weight is left of; infinities would make NaN of what they meet."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static about a problem.

    Attributes:
      plan: block sizes.
      visibility: which tiles need what.
      heads: N.
      q_factor: what q is to be multiplied by.
      factor: what q . k is to be multiplied by then.
      softcap, dropout_rate: as in `attention`.
      origin: where distance 0 is in the vector of distances and in the lines.
      dtype: of the output.
    """

    plan: Plan
    visibility: Visibility
    heads: int
    q_factor: float
    factor: float
    softcap: float | None
    dropout_rate: float
    origin: int
    dtype: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays, padded to whole blocks.

    Attributes:
      q, k, v: [B, T, N, H], [B, K, S, H], [B, K, S, V].
      vector: float32 [N, L], what is added at every distance, or None.
      lines: for each term, float32 [1 or N, L, F], the vectors of every distance, or None.
      terms: further rules; `by_q["rows"]` and `by_k["cols"]` have an entry for each.
      value: a table on the values, or None.
      by_q: "slots", "positions" [1 or B, T], "coordinates" [1 or B, T (, A)],
        "segments" [B, T] or None, "rows", a tuple of pytrees [B, T, N, ...].
      by_k: the same of keys, with "cols" for "rows".
      mask: bool [B or 1, N or 1, T, S], or None.
      prefix: int32 [B], or None.
      seed: uint32 [2], or None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    vector: jax.Array | None
    lines: tuple[jax.Array | None, ...]
    terms: tuple[Term | DotTerm, ...]
    value: ValueTerm | None
    by_q: dict[str, Any]
    by_k: dict[str, Any]
    mask: jax.Array | None
    prefix: jax.Array | None
    seed: jax.Array | None


def prepare(p: Problem) -> tuple[Spec, Operands, jax.Array | None]:
    """Returns the static part, the arrays, and what the tiles leave out of every logit.

    The last is [B, T, N] or [1, 1, N]: softmax does not see it, a log-sum-exp does.
    """
    batch, length, heads, _ = p.q.shape
    keys = p.k.shape[1]
    sizes = plan(length, keys, batch * heads)
    flat = p.contiguous and p.q_coordinates.ndim == 2
    on_vector = tuple(b for b in p.biases if flat and b.relative)
    by_pair = tuple(b for b in p.biases if not (flat and b.relative))
    folded = bool(on_vector) and p.softcap is None and p.prefix_length is None
    folded = folded and (p.is_causal or p.window is not None)
    # Where every rule is constant from some distance on, tiles beyond it need none.
    terms, makers = _terms(p, by_pair, sizes, shift=p.softcap is None)
    if any(t.far is None for t in terms):
        terms, makers = _terms(p, by_pair, sizes, shift=False)
    fars: list[Any] = [t.far for t in terms]
    bounds = [high_bound(b, p, ordered=True) for b in on_vector]
    shift = p.softcap is None and None not in fars + bounds
    value, v = _value(p)
    if value is not None:
        fars.append(value.band.high if value.band is not None else None)
    if shift:
        fars += bounds
    far = None if None in fars else max(fars, default=-1)

    # What stands side by side is in the order of its slots.
    by_slot = p.contiguous and p.prefix_length is None
    padded = sizes.length > length or sizes.keys > keys
    segments = p.q_segment_ids, p.k_segment_ids
    hidden_by_order = by_slot and p.is_causal and length == keys
    if padded and segments[0] is None and not hidden_by_order:
        segments = tuple(jnp.zeros((1, n), jnp.int32) for n in (length, keys))
    at_k = [c.k_features for c in p.contents]
    empty = (None,) * (len(terms) - len(p.contents))
    by_q: dict[str, Any] = {"rows": (*empty, *(c.q_features for c in p.contents))}
    by_k: dict[str, Any] = {"cols": (*empty, *at_k)}
    sides = (
        (by_q, sizes.length, p.q_positions, p.q_coordinates, segments[0]),
        (by_k, sizes.keys, p.k_positions, p.k_coordinates, segments[1]),
    )
    for by, to, positions, coordinates, ids in sides:
        by |= jax.tree.map(lambda x, to=to: pad_axis(x, 1, to, mode="edge"), by)
        by["slots"] = jnp.arange(to, dtype=jnp.int32)[None]
        by["positions"] = by["slots"] if by_slot else pad_axis(positions, 1, to, mode="edge")
        coordinates = coordinates[:1] if p.alike else coordinates
        by["coordinates"] = pad_axis(coordinates, 1, to, mode="edge")
        by["segments"] = ids
        if ids is not None:
            by["segments"] = pad_axis(ids + 1, 1, to) - 1
    mask = p.mask
    if mask is not None:
        mask = pad_axis(pad_axis(mask, 2, sizes.length), 3, sizes.keys)

    factors = 1.0, p.scale
    if p.q.dtype == jnp.float32 or math.frexp(p.scale)[0] == 0.5:  # Exact in any dtype.
        factors = p.scale, 1.0
    reach = _Reach.of(p, sizes)
    vector, left_out = _vector(p, on_vector, reach, folded, shift)
    lines = tuple(None if make is None else reach.padded(make(reach.distances)) for make in makers)
    spec = Spec(
        plan=sizes,
        visibility=Visibility(
            is_causal=p.is_causal,
            window=window_sides(p.window),
            folded=folded,
            vector_in_all=vector is not None and not shift,
            segments=by_q["segments"] is not None,
            prefix=p.prefix_length is not None,
            mask=mask is not None,
            far=far,
            ordered=p.contiguous,
        ),
        heads=heads,
        q_factor=factors[0],
        factor=factors[1],
        softcap=p.softcap,
        dropout_rate=p.dropout_rate,
        origin=reach.origin,
        dtype=jnp.float32 if p.sinks is not None else p.q.dtype,
    )
    operands = Operands(
        q=pad_axis(p.q, 1, sizes.length),
        k=pad_axis(jnp.swapaxes(p.k, 1, 2), 2, sizes.keys),
        v=pad_axis(jnp.swapaxes(v, 1, 2), 2, sizes.keys),
        vector=vector,
        lines=lines,
        terms=terms,
        value=value,
        by_q=by_q,
        by_k=by_k,
        mask=mask,
        prefix=p.prefix_length,
        seed=dropout_seed(p),
    )
    return spec, operands, _left_out(p, terms, left_out)


def _terms(p: Problem, biases: tuple, sizes: Plan, shift: bool) -> tuple[tuple, tuple]:
    """Returns the terms, and for each what makes its line, or None."""
    most = max(b.q + b.k - 1 for b in (sizes.forward, sizes.backward))
    made: list[tuple[Any, Any]] = [(bias_term(b, p, shift), None) for b in biases]
    for content in p.contents:
        term = make = None
        if isinstance(content, DotBias):
            term, make = dot_term(content, p, shift, most)
            content = content.by_pair()
        made.append((content_term(content, p) if term is None else term, make))
    return tuple(term for term, _ in made), tuple(make for _, make in made)


def _left_out(p: Problem, terms: tuple, out: jax.Array | None) -> jax.Array | None:
    """Adds to what the vector leaves out of every logit what terms leave out."""
    contents: Any = (None,) * (len(terms) - len(p.contents)) + p.contents
    for term, content in zip(terms, contents, strict=True):
        value = None
        if isinstance(term, DotTerm):
            value = dot_left_out(content, term)
        elif term.far is not None:
            value = term.far_value(p.q_coordinates.dtype)[None, None]
            value = term.factor * value.astype(jnp.float32)
        if value is not None:
            out = value if out is None else out + value
    return out


def _value(p: Problem) -> tuple[ValueTerm | None, jax.Array]:
    """Returns the table on the values, and values that have its far entry already."""
    if p.value is None:
        return None, p.v
    band = band_of(p.value, p, ordered=p.contiguous, shift=True)
    table = p.value.table.astype(jnp.float32)
    if band is None:
        return ValueTerm(table, band=None, bucket=p.value.bucket), p.v
    distances = jnp.arange(band.low, band.high + 1, dtype=jnp.int32)
    buckets = jax.vmap(p.value.bucket, (0, None))(distances, jnp.int32(0))
    table = jnp.take(table, buckets, axis=1, mode="clip")
    far = table[:, -1]
    groups = p.q.shape[2] // p.v.shape[2]
    v = p.v if groups == 1 else jnp.repeat(p.v, groups, 2)
    v = (v.astype(jnp.float32) + far[None, None]).astype(p.v.dtype)
    return ValueTerm(table - far[:, None], band=band, bucket=p.value.bucket), v


@dataclasses.dataclass(frozen=True)
class _Reach:
    """The distances that have an entry where rules are evaluated once per distance.

    They reach from the first key's distance from the last query, or for causal attention
    from one tile into the future, to the last query's distance from the first key.

    Attributes:
      first, length: the first distance that is evaluated, and the one after the last.
      before, after: the number of entries beside those, which nobody sees.
    """

    first: int
    length: int
    before: int
    after: int

    @classmethod
    def of(cls, p: Problem, sizes: Plan) -> "_Reach":
        length, keys = p.q.shape[1], p.k.shape[1]
        first, before = 1 - keys, sizes.keys - keys
        if p.is_causal and p.prefix_length is None:
            first = 0
            before = max(blocks.q + blocks.k for blocks in (sizes.forward, sizes.backward))
        return cls(first, length, before, sizes.length - length)

    @property
    def origin(self) -> int:
        """Where distance 0 is."""
        return self.before - self.first

    @property
    def distances(self) -> jax.Array:
        return jnp.arange(self.first, self.length, dtype=jnp.int32)

    def padded(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """Adds the entries beside those evaluated, on axis 1."""
        widths = [(0, 0)] * x.ndim
        widths[1] = self.before, self.after
        return jnp.pad(x, widths, constant_values=fill)


def _vector(
    p: Problem, biases: tuple, reach: _Reach, folded: bool, shift: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns what is added at every distance, less what it leaves out.

    What is left out, [1, 1, N] or None, is the value at the greatest distance.
    """
    if not biases:
        return None, None
    dtype = p.q_coordinates.dtype
    distances = reach.distances
    zero = jnp.zeros((), dtype)

    def values(bias):
        over = jax.vmap(bias.rule, (None, None, 0, None))
        over = jax.vmap(over, (None, 0, None, None))
        out = over(bias.shared, bias.heads, distances.astype(dtype), zero)
        return (p.scale if bias.scaled else 1.0) * out.astype(jnp.float32)

    vector = values(biases[0])
    for bias in biases[1:]:
        vector += values(bias)
    far = None
    if shift:
        far = vector[:, -1]
        vector -= far[:, None]
    if folded and p.window is not None:
        left, right = window_sides(p.window) or (-1, -1)
        seen = (distances <= left) | (left < 0)
        seen &= (-distances <= right) | (right < 0)
        vector = jnp.where(seen[None], vector, HIDDEN)
    vector = reach.padded(vector, HIDDEN if folded else 0.0)
    return vector, None if far is None else far[None, None]
