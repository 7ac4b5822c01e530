"""The hooks of a scheme, in the order in which attention calls them.

    read      mix, features         padding is zero; states go from chunk to chunk
    encode    query, key, value     followed by the norms of q and k
    attend    attend, output

All attention with a scheme goes through this file: with and without a cache, to another sequence,
Flax's `attention_fn`, the shapes of a new cache, and `posenc_jax.testing`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np

from posenc_jax.checks import array_of_rank, require
from posenc_jax.engine.api import AttentionCall
from posenc_jax.engine.problem import zero_where
from posenc_jax.schemes.scheme import Params, Scheme

Norm = Callable[[jax.Array], jax.Array]
Norms = tuple[Norm, Norm]
"""Functions of q [B, T, N, H] and of k [B, S, K, H]."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Projections:
    """q, k and v of the tokens of one sequence, with the arrays that hooks read and return.

    Attributes:
      q, k, v: [B, T, N, H], [B, T, K, H], [B, T, K, V].
      x: the activations that they were projected from, [B, T, D], or None.
      coordinates: [B, T] or [A, B, T].
      segment_ids: int32 [B, T], or None for one segment without padding.
      tables: the scheme's `tables` of the coordinates. None: hooks compute them.
      q_features, k_features: from `features`.
      state: the states of `mix` and `features` before these tokens; after `read`, with them.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    x: jax.Array | None = None
    coordinates: Any = None
    segment_ids: jax.Array | None = None
    tables: Any = None
    q_features: Any = None
    k_features: Any = None
    state: tuple[Any, Any] | None = None

    def replace(self, **changes: Any) -> Self:
        """Returns the tokens with some arrays changed."""
        return dataclasses.replace(self, **changes)

    def check(self, caller: str, q_name: str = "q", x_name: str = "x") -> None:
        """Raises unless all arrays have the tokens of q; hooks would broadcast other shapes.

        Messages have the names of q and x.
        """
        q = self.q
        for name, axes in (
            ("q", "[B, T, N, H]"),
            ("k", "[B, T, K, H]"),
            ("v", "[B, T, K, V]"),
            ("x", "[B, T, D]"),
        ):
            array = getattr(self, name)
            if array is not None:
                name = {"q": q_name, "x": x_name}.get(name, name)
                array_of_rank(caller, name, array, len(axes.split()), axes)
                require(
                    array.shape[:2] == q.shape[:2],
                    f"{caller}: {name} must be {axes} with the B and T of {q_name} {q.shape}, "
                    f"got {array.shape}.",
                )


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The hooks of a scheme with its parameters, and the norms of q and k after them."""

    scheme: Scheme
    params: Params
    norms: Norms | None = None

    def read(self, tokens: Projections) -> Projections:
        """Calls `mix` and `features`, which read the content of tokens, and updates the state."""
        scheme, params, ids = self.scheme, self.params, tokens.segment_ids
        x, q, k, v = zero_padding((tokens.x, tokens.q, tokens.k, tokens.v), ids)
        mixed, state = (None, None) if tokens.state is None else tokens.state
        q, k, v, mixed = _results(
            scheme, "mix", "(q, k, v, state)", scheme.mix(params, q, k, v, ids, mixed)
        )
        try:
            features = scheme.features(params, x, q, k, tokens.coordinates, ids, state)
        except Exception as error:
            if x is None:
                error.add_note(
                    f"x is None in {type(scheme).__name__}.features: give x=, and new_cache its "
                    "model_dim=; a scheme that reads x sets traits = pe.Traits(reads_x=True)."
                )
            raise
        q_features, k_features, state = _results(
            scheme, "features", "(q_features, k_features, state)", features
        )
        return tokens.replace(
            q=q,
            k=k,
            v=v,
            q_features=q_features,
            k_features=k_features,
            state=None if mixed is None and state is None else (mixed, state),
        )

    def query(self, tokens: Projections) -> jax.Array:
        """Returns q with positions encoded, normalised."""
        q = self._call(self.scheme.query, tokens, tokens.q, tokens.q_features)
        return q if self.norms is None else self.norms[0](q)

    def key(self, tokens: Projections) -> jax.Array:
        """Returns k with positions encoded, normalised."""
        k = self._call(self.scheme.key, tokens, tokens.k, tokens.k_features)
        return k if self.norms is None else self.norms[1](k)

    def value(self, tokens: Projections) -> jax.Array:
        """Returns v with positions encoded."""
        return self._call(self.scheme.value, tokens, tokens.v, tokens.k_features)

    def _call(self, hook: Any, tokens: Projections, x: jax.Array, features: Any) -> jax.Array:
        out = hook(self.params, x, tokens.coordinates, features, tokens.tables)
        out = an_array(self.scheme, hook.__name__, out)
        if out.shape[:2] != x.shape[:2]:
            raise ValueError(
                f"{type(self.scheme).__name__}.{hook.__name__} must return [B, T, ...] = "
                f"{x.shape[:2]}, got {out.shape}."
            )
        return out

    def encode(self, tokens: Projections) -> Projections:
        """Calls `query`, `key` and `value`."""
        return tokens.replace(q=self.query(tokens), k=self.key(tokens), v=self.value(tokens))

    def stored(self, tokens: Projections) -> Projections:
        """Returns tokens with k and v as caches store them: `key` may be left to `loaded`."""
        encoded = self.scheme.traits.cache_transformed_keys
        return tokens.replace(k=self.key(tokens) if encoded else tokens.k, v=self.value(tokens))

    def loaded(self, tokens: Projections) -> Projections:
        """Returns the slots of a cache with k encoded, by `key` if it is stored as projected."""
        if self.scheme.traits.cache_transformed_keys:
            return tokens
        # `key` may read all slots at once; empty ones count as padding.
        features = zero_padding(tokens.k_features, tokens.segment_ids)
        return tokens.replace(k=self.key(tokens.replace(k_features=features)))

    def attend(self, queries: Projections, keys: Projections, call: AttentionCall) -> jax.Array:
        """Returns the output [B, T, N, V] of attention and of the hook `output`.

        Args:
          queries, keys: tokens after `encode`, equal in self-attention.
          call: attention with positions, masks and options set.
        """
        arrays = queries.q, keys.k, keys.v, queries.coordinates, keys.coordinates
        features = queries.q_features, keys.k_features
        out = self.scheme.attend(self.params, *arrays, *features, call)
        out = an_array(self.scheme, "attend", out)
        return self._call(self.scheme.output, queries, out, queries.q_features)


def _results(scheme: Scheme, hook: str, form: str, results: Any) -> tuple[Any, ...]:
    """Returns the results of a hook; raises `TypeError` unless they are a tuple of this form."""
    count = len(form.split(","))
    if not isinstance(results, tuple) or len(results) != count:
        got = f"got {len(results)} values" if isinstance(results, tuple) else _got(results)
        name = type(scheme).__name__
        raise TypeError(f"{name}.{hook} must return {form}, a tuple of {count}, {got}.")
    return results


def an_array(scheme: Scheme, hook: str, result: Any) -> Any:
    """Returns the result of a hook; raises `TypeError` unless it is an array."""
    if not isinstance(result, jax.Array | np.ndarray):
        raise TypeError(f"{type(scheme).__name__}.{hook} must return an array, {_got(result)}.")
    return result


def _got(result: Any) -> str:
    return "got None (is `return` missing?)" if result is None else f"got {type(result).__name__}"


def zero_padding(tree: Any, segment_ids: jax.Array | None) -> Any:
    """Sets padding to zero: hooks would have NaN gradients where it holds NaN."""
    return tree if segment_ids is None else _without_padding(tree, segment_ids)


@functools.partial(jax.jit, inline=True)
def _without_padding(tree: Any, segment_ids: jax.Array) -> Any:
    return zero_where(segment_ids < 0, tree)
