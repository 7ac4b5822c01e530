"""What a position encoding is: a frozen dataclass of settings with pure functions as methods.

A scheme may act in these places. Every hook defaults to doing nothing, so a scheme is as
long as what it does:

    embed     on the token embedding                      learned, sinusoidal
    query/key on q and k after their projection           RoPE
    bias      on the logits, from two positions           ALiBi, T5
    content   on the logits, from content and positions   Shaw, FoX
    row_rule  on all logits of a query at once            CoPE, stick-breaking
    value     on the output, from two positions           Shaw
    attend    on all of it, in place of one attention     ReRoPE

`side` lets a scheme make arrays of its own per token (a forget gate, a second projection
of q). Those of keys are cached beside k and v.

Two arrays say where a token is. Positions, int32 [B, T], are its place in the order and
decide what is visible; no scheme reads them. Coordinates are what a scheme encodes: the
positions unless something else was given, int32 or float32, [B, T], or [A, B, T] where a
scheme reads A axes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax

from posenc_jax.rules import STATIC as STATIC
from posenc_jax.rules import Content as Content
from posenc_jax.rules import ContentBias as ContentBias
from posenc_jax.rules import DotBias as DotBias
from posenc_jax.rules import LogitBias as LogitBias
from posenc_jax.rules import RowRule as RowRule
from posenc_jax.rules import ValueBias as ValueBias

Params = Any  # A pytree of arrays; {} where nothing is learned.


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A position encoding. Subclass it, override what the scheme does, and it is complete.

    Fields are settings: numbers, strings, tuples and frozen dataclasses, so that a scheme
    is hashable, compares by value and is static under `jit`. Fields without a default are
    sizes that the model supplies, from one vocabulary: `num_heads`, `head_dim`,
    `model_dim`, `max_length`.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Shouting(Scheme):
    ...     volume: float = 2.0
    ...
    ...     def embed(self, params, x, coordinates):
    ...         return x * self.volume
    >>> Shouting(volume=3.0).embed({}, jnp.ones((1, 1, 1)), jnp.zeros((1, 1), int)).item()
    3.0
    """

    name: ClassVar[str] = ""
    """The word for the scheme in configs and tables; empty for one that is not exported."""
    relative: ClassVar[bool] = False
    """Whether attention stays the same when all coordinates of a row move by one number."""
    num_axes: ClassVar[int] = 1
    """How many axes A of coordinates the scheme reads; [B, T] it has to understand anyway."""
    shared_over_layers: ClassVar[bool] = False
    """Whether the authors use one set of parameters for all layers."""
    scale_embedding: ClassVar[bool] = False
    """Whether token embeddings are multiplied by sqrt(D) before `embed`, as published."""
    by_order: ClassVar[bool] = False
    """Whether the order of tokens is all that the scheme reads of their coordinates."""
    reads_x: ClassVar[bool] = False
    """Whether `side` reads x, which stock attention does not hand on."""
    reads_segments: ClassVar[bool] = False
    """Whether `side` takes a further `segment_ids`, so that padding stays out of running sums."""
    caches_mapped_keys: ClassVar[bool] = True
    """Whether `key` can run once, before k is cached. False where it depends on later tokens."""
    kept_tokens: ClassVar[int] = 0
    """How many first tokens of a sequence stay visible beside a window: a ring keeps them."""

    def init(self, key: jax.Array) -> Params:
        """Returns new parameters."""
        return {}

    def embed(self, params: Params, x: jax.Array, coordinates: jax.Array) -> jax.Array:
        """Returns token embeddings [B, T, D] with positions in them."""
        return x

    def side(
        self,
        params: Params,
        x: jax.Array | None,
        q: jax.Array,
        k: jax.Array,
        coordinates: jax.Array,
        state: Any,
    ) -> tuple[Any, Any, Any]:
        """Returns `(rows, cols, state)`: arrays per query, per key, and per sequence.

        Args:
          params: the scheme's parameters.
          x: what q and k were projected from, [B, T, D]. None in bare function calls.
          q: [B, T, N, H], before `query`.
          k: [B, T, K, H], before `key`.
          coordinates: [B, T] or [A, B, T].
          state: what the call for the tokens before these returned (running sums), leaves
            [B, ...]; None at the beginning of a sequence, where zeros must mean the same.
        """
        return None, None, state

    def query(
        self, params: Params, q: jax.Array, coordinates: jax.Array, rows: Any = None
    ) -> jax.Array:
        """Returns q [B, T, N, H] as attention shall see it; the last axis may change."""
        return q

    def key(
        self, params: Params, k: jax.Array, coordinates: jax.Array, cols: Any = None
    ) -> jax.Array:
        """Returns k [B, S, K, H] as attention shall see it; its last axis is that of q."""
        return k

    def bias(self, params: Params) -> LogitBias | tuple[LogitBias, ...] | None:
        """Returns what is added to the logits from positions alone."""
        return None

    def content(self, params: Params, rows: Any, cols: Any) -> Content | tuple[Content, ...] | None:
        """Returns what is added to the logits from content and positions."""
        return None

    def row_rule(self, params: Params, rows: Any) -> RowRule | None:
        """Returns what becomes of all logits of a query together."""
        return None

    def value(self, params: Params) -> ValueBias | None:
        """Returns what is added to the values from positions."""
        return None

    def attend(
        self,
        params: Params,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        at: tuple[jax.Array, jax.Array],
        rows: Any,
        cols: Any,
        attention: Callable[..., Any],
    ) -> jax.Array:
        """Returns the output [B, T, N, V]: one attention with the scheme's rules.

        A scheme that needs another one, or several, says so here.

        Args:
          params: the scheme's parameters.
          q, k, v: queries and keys after `query` and `key`, and values. Keys may be those
            of a cache, in any order.
          at: coordinates of queries and of keys.
          rows, cols: what `side` made for them.
          attention: `posenc_jax.attention` that knows all else: positions, masks, options.
            `argument_of` says what it knows.
        """
        return attention(
            q,
            k,
            v,
            bias=self.bias(params),
            content=self.content(params, rows, cols),
            row_rule=self.row_rule(params, rows),
            value_bias=self.value(params),
        )

    def logit_scale(self, head_dim: int) -> float | None:
        """Returns the factor on q . k that the scheme was published with; None: 1/sqrt(H)."""
        return None

    @property
    def acts_on(self) -> tuple[str, ...]:
        """Where the scheme acts: "embedding", "q, k", "logits", "output", "attention"."""
        places = {
            "embedding": ("embed",),
            "q, k": ("query", "key"),
            "logits": ("bias", "content", "row_rule"),
            "output": ("value",),
            "attention": ("attend",),
        }
        own = type(self)
        return tuple(
            place
            for place, hooks in places.items()
            if any(getattr(own, h) is not getattr(Scheme, h) for h in hooks)
        )

    @property
    def acts_in_attention(self) -> bool:
        """Whether attention layers have anything to do for the scheme."""
        return any(place != "embedding" for place in self.acts_on)

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some settings changed."""
        return dataclasses.replace(self, **changes)


def side_arrays(
    scheme: Scheme,
    params: Params,
    x: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    coordinates: jax.Array,
    state: Any,
    segment_ids: jax.Array | None = None,
) -> tuple[Any, Any, Any]:
    """Returns what `scheme.side` does, which is given segments only if it reads them."""
    more = {"segment_ids": segment_ids} if scheme.reads_segments else {}
    return scheme.side(params, x, q, k, coordinates, state, **more)


def as_tuple(x: Any) -> tuple:
    """None, one thing or a tuple of things, as a tuple."""
    if x is None:
        return ()
    return x if isinstance(x, tuple) else (x,)


def argument_of(attention: Callable, name: str) -> Any:
    """Returns what the `attention` of `Scheme.attend` was given for an argument, or None."""
    return getattr(attention, "keywords", {}).get(name)
