"""Vectors of tokens dot vectors of distances, on one tile."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.problem import Problem
from posenc_jax.engine.xla_spread import Band, by_band
from posenc_jax.engine.xla_terms import band_of, high_bound
from posenc_jax.rules import DotBias

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DotTerm:
    """A DotBias, as the tiles evaluate it.

    Its vectors are for the distances of a token from those it meets: of query from key, or
    the other way round for the vectors of keys.

    Attributes:
      vectors: float32 [1 or N, R, F], for the distances of `band`. None: each tile is given
        those that it needs.
      far_vector: float32 [1 or N, F], what the vectors of keys meet at `far`, or None.
      factor: what the term is multiplied by.
      of_keys: whether the tokens are keys.
      band: the distances of `vectors`, or None.
      far: from this distance of query from key on, vectors of queries have nothing to add,
        and vectors of keys one number each. None: no such distance.
      transform: of the DotBias.
    """

    vectors: Any
    far_vector: Any
    factor: float = dataclasses.field(metadata=_STATIC)
    of_keys: bool = dataclasses.field(metadata=_STATIC)
    band: Band | None = dataclasses.field(metadata=_STATIC)
    far: int | None = dataclasses.field(metadata=_STATIC)
    transform: Callable | None = dataclasses.field(metadata=_STATIC)

    @property
    def in_all(self) -> bool:
        """Whether plain tiles have the term too."""
        return self.of_keys

    def tile(self, window, rows, cols, q: dict, k: dict, *, plain: bool, flip: bool) -> Any:
        """Returns float32, as `Term.tile`; `window` [1 or N, Q + K - 1, F] where needed."""
        own, other, turned = (k, q, not flip) if self.of_keys else (q, k, flip)
        tokens = cols if self.of_keys else rows
        if plain:
            if not self.of_keys:
                return None
            out = _products(tokens, self.far_vector[:, None], turned)
        elif self.band is None:
            vectors = window[:, ::-1] if self.of_keys else window
            sizes = own["slots"].shape[1], other["slots"].shape[1]
            local = ({"slots": jnp.arange(n, dtype=jnp.int32)[None]} for n in sizes)
            band = Band(1 - sizes[1], sizes[0] - 1, ordered=True, open_low=False, open_high=False)
            out = by_band(
                _products(tokens, vectors, turned), *local, band, flip=turned, pulled=flip
            )
        else:
            table = _products(tokens, self.vectors, turned)
            own, other = (self._moved(x) for x in (own, other))
            out = by_band(table, own, other, self.band, flip=turned, pulled=flip)
        return self.factor * out

    def _moved(self, side: dict) -> dict:
        if self.transform is None:
            return side
        transform = jax.vmap(jax.vmap(self.transform))
        return {"coordinates": transform(side["coordinates"])}


def _products(tokens: jax.Array, vectors: jax.Array, flip: bool) -> jax.Array:
    """[B, Q, N, F] and [1 or N, R, F]: float32 [B, N, Q, R], or [B, N, R, Q] flipped."""
    to = "bnrq" if flip else "bnqr"
    of, vectors = ("rf", vectors[0]) if vectors.shape[0] == 1 else ("nrf", vectors)
    tokens = tokens.astype(jnp.float32)
    # In the order of the result: a product whose result is transposed is a slower one.
    form = f"{of},bqnf->{to}" if flip else f"bqnf,{of}->{to}"
    both = (vectors, tokens) if flip else (tokens, vectors)
    return jnp.einsum(form, *both, precision="highest")


def dot_term(
    dot: DotBias, problem: Problem, shift: bool, most: int
) -> tuple[DotTerm | None, Callable | None]:
    """Returns how tiles evaluate a DotBias; None where it has to be done for every pair.

    Args:
      dot: what to evaluate.
      problem: where.
      shift: whether a number may be left out of all logits of a query.
      most: the number of distances of a tile; for more in all, a tile is given its own.

    Returns:
      The term, and `line(distances) -> [1 or N, L, F]` where tiles are given a part of that.
    """
    at = problem.q_coordinates
    moved = jax.eval_shape(lambda at: dot.moved(at, 2), at)
    if moved.ndim != 2 or moved.dtype != jnp.int32:
        return None, None
    ordered = problem.contiguous and dot.transform is None
    of_keys = dot.q_features is None
    shift = shift and not of_keys and dot.transform is None
    band = band_of(dot, problem, ordered=ordered, shift=shift)
    far = None
    if shift or (of_keys and dot.transform is None):
        far = high_bound(dot, problem, ordered=ordered)

    def vectors(distances):
        made = dot.vectors(distances)
        if not shift or far is None:
            return made
        return made - dot.vectors(jnp.full((1,), far, jnp.int32))

    make: Any = None
    made: Any = None
    if band is not None and (band.size <= most or not ordered):
        made = vectors(jnp.arange(band.low, band.high + 1, dtype=jnp.int32))
        if of_keys:
            made, band = made[:, ::-1], band.mirrored()
    elif ordered:
        make, band = vectors, None
    else:
        return None, None
    far_vector = None
    if of_keys and far is not None:
        far_vector = dot.vectors(jnp.full((1,), far, jnp.int32))[:, 0]
    factor = problem.scale if dot.scaled else 1.0
    return DotTerm(made, far_vector, factor, of_keys, band, far, dot.transform), make


def dot_left_out(dot: DotBias, term: DotTerm) -> jax.Array | None:
    """Returns what a term leaves out of every logit of a query, [B, T, N], or None."""
    if term.far is None or term.of_keys:
        return None
    vector = dot.vectors(jnp.full((1,), term.far, jnp.int32))
    rows: Any = dot.q_features
    return term.factor * jnp.swapaxes(_products(rows, vector, False)[..., 0], 1, 2)
