"""The base type of position encodings: a frozen dataclass of settings with pure hooks.

Every hook has a default that does nothing, so a scheme overrides only the hooks that it needs:

    embed         changes the token embedding                  learned, sinusoidal
    mix           changes q, k and v by earlier tokens         short convolution
    query, key    change q and k after their projection        RoPE
    value, output change v and the output of attention         RoPE on values
    rules         change logits or values                      ALiBi, T5, Shaw, CoPE
    attend        replaces the attention call                  ReRoPE, PaTH

`features` computes arrays per token from content (forget gates, second projections of q)
that the other hooks read. Caches store the arrays of keys together with k and v. `tables` computes
arrays from coordinates alone, which q, k and all layers can share.

Two arrays locate a token. Positions, int32 [B, T], order the tokens: masks, windows and
caches use them, schemes never read them. Coordinates are the numbers that a scheme encodes: int32
or float32, [B, T], or [A, B, T] for a scheme of A axes. They default to the positions.
"""

import dataclasses
import difflib
import enum
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Self, final

import jax

from posenc_jax.checks import require
from posenc_jax.engine.api import AttentionCall
from posenc_jax.engine.mask import Window, window_sides
from posenc_jax.engine.rule import Rule

Params = Any  # A pytree of arrays; {} where nothing is learned.


class Acts(enum.Flag):
    """Where a scheme acts."""

    EMBEDDING = enum.auto()
    QK = enum.auto()
    V = enum.auto()  # v itself; VALUES are terms that rules add per pair.
    LOGITS = enum.auto()
    VALUES = enum.auto()
    ATTENTION = enum.auto()
    OUTPUT = enum.auto()

    def __str__(self) -> str:
        names = ("q, k" if place is Acts.QK else str(place.name).lower() for place in self)
        return ", ".join(names) or "nothing"


@dataclasses.dataclass(frozen=True)
class Traits:
    """Static facts about a scheme that layers, caches and models need.

    Attributes:
      relative: attention is invariant to adding a constant to all coordinates of a sequence.
      num_axes: number A of coordinate axes. Coordinates [B, T] must be accepted too.
      shared_over_layers: the authors share one set of parameters between all layers.
      scale_embedding: the authors multiply token embeddings by sqrt(D) before `embed`.
      order_only: the order of coordinates matters, not their values.
      reads_x: `features` reads x, which Flax's stock attention does not provide.
      transforms_rows: a rule is a `LogitsTransform`; attention takes only one.
      cache_transformed_keys: k is cached after `key`. False: `key` depends on later tokens,
        so k is cached as projected and transformed at every step.
      norm_after: norms of q and k may follow `query` and `key`. False: these scale q or k, which
        norms would undo, and `streaming` refuses.
      reads_segments: `attend` compares segment_ids beyond the window. A layer with `chunk_size`,
        whose ids of chunks repeat, refuses the scheme.
      num_sink_tokens: number of initial tokens of a sequence that stay visible outside the
        window; a ring cache keeps them.
      mirrored: without causality, outputs are the same for the reversed sequence: nothing tells
        past from future.
      causal_only: why the scheme is for causal attention alone; empty for the others.
    """

    relative: bool = False
    num_axes: int = 1
    shared_over_layers: bool = False
    scale_embedding: bool = False
    order_only: bool = False
    reads_x: bool = False
    transforms_rows: bool = False
    cache_transformed_keys: bool = True
    norm_after: bool = True
    reads_segments: bool = False
    num_sink_tokens: int = 0
    mirrored: bool = False
    causal_only: str = ""

    @classmethod
    def join(cls, *traits: "Traits") -> "Traits":
        """Returns the traits of several schemes at once."""
        return cls(
            relative=all(t.relative for t in traits),
            num_axes=max(t.num_axes for t in traits),
            shared_over_layers=all(t.shared_over_layers for t in traits),
            scale_embedding=any(t.scale_embedding for t in traits),
            order_only=all(t.order_only for t in traits),
            reads_x=any(t.reads_x for t in traits),
            transforms_rows=any(t.transforms_rows for t in traits),
            cache_transformed_keys=all(t.cache_transformed_keys for t in traits),
            norm_after=all(t.norm_after for t in traits),
            reads_segments=any(t.reads_segments for t in traits),
            num_sink_tokens=max(t.num_sink_tokens for t in traits),
            mirrored=all(t.mirrored for t in traits),
            causal_only="; ".join(t.causal_only for t in traits if t.causal_only),
        )


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A position encoding. Subclass it and override the hooks that the scheme needs.

    Fields are settings: numbers, strings, tuples and frozen dataclasses, so that a scheme
    is hashable, compares by value and is static under `jit`. Fields without a default are
    sizes that the model supplies, from one vocabulary: `num_heads`, `num_kv_heads`,
    `head_dim`, `model_dim`, `max_length`, `trained_length`.

    The schemes of this package raise `ValueError`, when they are made, for sizes below one, unknown
    words, numbers out of range, and settings that contradict each other, and `TypeError` for sizes
    that are not integers; the message names them.

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
    """Name in configs and tables; empty for a scheme that is not exported."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # A subclass whose settings are not compared is refused: all would be equal.
        for base in cls.__mro__[: cls.__mro__.index(Scheme)]:
            kinds = map(str, inspect.get_annotations(base).values())
            settings = "__init__" in vars(base) or any("ClassVar" not in kind for kind in kinds)
            if not (settings and issubclass(base, Scheme)) or "__dataclass_fields__" in vars(base):
                continue
            raise TypeError(
                f"{base.__name__} must be a dataclass, whose fields are its settings: put "
                "@dataclasses.dataclass(frozen=True) above it, without an __init__ of its own."
            )
        return object.__new__(cls)

    @property
    def traits(self) -> Traits:
        """Static facts; see `Traits`. A class attribute if they are alike for all settings."""
        return Traits()

    @property
    def acts(self) -> Acts:
        """Where the scheme acts, by default inferred from the hooks that it overrides.

        Raises:
          TypeError: if the scheme overrides none of them (a misspelt hook, for one).
        """
        cls = type(self)
        if not (acts := acts_of_hooks(cls)):
            hints = [f"`{x}` a misspelt `{hook}`" for x, hook in resembling_hooks(cls).items()]
            raise TypeError(
                f"{cls.__name__} overrides none of embed, mix, query, key, value, rules, attend "
                "and output, so it encodes nothing; is "
                f"{' or '.join(hints) or 'a hook misspelt'}?"
            )
        return acts

    @property
    def acts_in_attention(self) -> bool:
        """Whether the scheme acts anywhere but on the embedding."""
        return bool(self.acts & ~Acts.EMBEDDING)

    def init(self, key: jax.Array) -> Params:
        """Returns new parameters, float32."""
        return {}

    @property
    def param_axes(self) -> Any:
        """The axes of parameters in words, nested as in `init`.

        For example, {"table": "num_heads buckets"}. Axes called "num_heads", "num_kv_heads",
        "head_dim" or "model_dim" can be sharded by `axis_names` of the Flax layers. Other words are
        free. Parameters that are not mentioned are replicated.
        """
        return {}

    def embed(self, params: Params, x: jax.Array, coordinates: jax.Array) -> jax.Array:
        """Returns token embeddings [B, T, D] with positions encoded."""
        return x

    def tables(self, params: Params, coordinates: jax.Array) -> Any:
        """Returns arrays that depend on coordinates alone, or None.

        Compute them once per step to share them between q, k and all layers; `query` and
        `key` compute them if they get None.
        """
        return None

    def mix(
        self,
        params: Params,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None,
        state: Any,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        """Returns `(q, k, v, state)`, changed by earlier tokens of their segment.

        It precedes all other hooks except `embed`.

        Args:
          params: the scheme's parameters.
          q, k, v: as projected, zero in padding.
          segment_ids, state: as for `features`, with a separate state.
        """
        return q, k, v, state

    def features(
        self,
        params: Params,
        x: jax.Array | None,
        q: jax.Array,
        k: jax.Array,
        coordinates: jax.Array,
        segment_ids: jax.Array | None,
        state: Any,
    ) -> tuple[Any, Any, Any]:
        """Returns `(q_features, k_features, state)`: arrays per query, key and sequence.

        Args:
          params: the scheme's parameters.
          x: the activations that q and k were projected from, [B, T, D]. None in calls
            without a layer.
          q: [B, T, N, H], after `mix`, before `query`.
          k: [B, T, K, H], after `mix`, before `key`.
          coordinates: [B, T] or [A, B, T].
          segment_ids: int32 [B, T], or None for one segment. Tokens below zero are padding,
            which may be anywhere; x, q and k are zero there. They must not change `state`.
            Other tokens of a segment are consecutive where there is a `state`.
          state: the state returned for the preceding tokens (running sums), leaves
            [B, ...]; None at sequence start, which must equal an all-zero state (caches are
            zero-filled).
        """
        return None, None, state

    def query(
        self,
        params: Params,
        q: jax.Array,
        coordinates: jax.Array,
        features: Any = None,
        tables: Any = None,
    ) -> jax.Array:
        """Returns q [B, T, N, H] with positions encoded; the last axis may change."""
        return q

    def key(
        self,
        params: Params,
        k: jax.Array,
        coordinates: jax.Array,
        features: Any = None,
        tables: Any = None,
    ) -> jax.Array:
        """Returns k [B, S, K, H] with positions encoded; q and k have equal last axes."""
        return k

    def value(
        self,
        params: Params,
        v: jax.Array,
        coordinates: jax.Array,
        features: Any = None,
        tables: Any = None,
    ) -> jax.Array:
        """Returns v [B, S, K, V] with positions encoded; caches store the result."""
        return v

    def output(
        self,
        params: Params,
        out: jax.Array,
        coordinates: jax.Array,
        features: Any = None,
        tables: Any = None,
    ) -> jax.Array:
        """Returns the output of attention [B, T, N, V], changed by the query's position."""
        return out

    def rules(
        self, params: Params, q_features: Any = None, k_features: Any = None
    ) -> Rule | tuple[Rule, ...]:
        """Returns the rules that attention applies to logits and values."""
        return ()

    def attend(
        self,
        params: Params,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        q_coordinates: jax.Array,
        k_coordinates: jax.Array,
        q_features: Any,
        k_features: Any,
        attention: AttentionCall,
    ) -> jax.Array:
        """Returns the output [B, T, N, V]; by default one attention call with `rules`.

        Args:
          params: the scheme's parameters.
          q, k, v: arrays after `query`, `key` and `value`. Keys of a cache may be in any order.
          q_coordinates, k_coordinates: [B, T] and [B, S], or [A, B, ...].
          q_features, k_features: from `features`.
          attention: the attention function, with positions, masks and options set.
        """
        rules = self.rules(params, q_features, k_features)
        if rules is None:
            raise TypeError(
                f"{type(self).__name__}.rules must return a rule or a tuple of rules, got None (is "
                "`return` missing?)."
            )
        return attention(q, k, v, rules)

    @final
    def logit_scale(self, head_dim: int) -> float:
        """Returns the factor on q . k where no `scale` is given: 1/sqrt(H), for every scheme.

        H is the head dim of projections, also where `query` and `key` append dimensions.
        """
        return head_dim**-0.5

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some settings changed."""
        return dataclasses.replace(self, **changes)


def acts_of_hooks(scheme: type[Scheme]) -> Acts:
    """Returns where a scheme acts by the hooks that it overrides."""
    places = {
        Acts.EMBEDDING: ("embed",),
        Acts.QK: ("mix", "query", "key"),
        Acts.V: ("value",),
        Acts.LOGITS: ("rules",),
        Acts.ATTENTION: ("attend",),
        Acts.OUTPUT: ("output",),
    }
    acts = Acts(0)
    for place, hooks in places.items():
        if any(getattr(scheme, hook) is not getattr(Scheme, hook) for hook in hooks):
            acts |= place
    return acts


HOOKS = tuple("embed tables mix features query key value rules attend output".split())
"""The methods of a scheme that attention calls."""


def resembling_hooks(scheme: type[Scheme]) -> dict[str, str]:
    """Returns the names in a class that may be misspelt hooks, each with the hook."""
    names = [name for name in dir(scheme) if not (name[0] == "_" or hasattr(Scheme, name))]
    close = {name: difflib.get_close_matches(name, HOOKS, 1, 0.8) for name in names}
    return {
        name: hook
        for name, hooks in close.items()
        for hook in hooks
        if callable(getattr(scheme, name)) and getattr(scheme, hook) is getattr(Scheme, hook)
    }


def check_scheme(caller: str, scheme: Any) -> None:
    """Raises `TypeError` for other types, and for a scheme with a field such as an array."""
    if not isinstance(scheme, Scheme):
        raise TypeError(f"{caller}: scheme must be a Scheme, got {scheme!r}{call_hint(scheme)}.")
    try:
        hash(scheme)
    except TypeError as error:
        raise TypeError(
            f"{caller}: the fields of {type(scheme).__name__} are static under jit and must be "
            f"numbers, strings, tuples or frozen dataclasses ({error}); arrays are parameters, "
            "which `init` returns."
        ) from None


def call_hint(thing: Any) -> str:
    """Returns a hint for the class of a scheme, for a `LayerSpec`, or nothing."""
    if isinstance(getattr(thing, "scheme", None), Scheme):
        return "; give its scheme here, and its other settings to Attention"
    if not (isinstance(thing, type) and issubclass(thing, Scheme)):
        return ""
    sizes = [f.name for f in dataclasses.fields(thing) if f.default is dataclasses.MISSING]
    return f"; call it: {thing.__name__}({', '.join(f'{name}=...' for name in sizes)})"


def check_direction(
    caller: str,
    scheme: Scheme,
    is_causal: bool = False,
    window: Window = None,
    prefix_length: jax.Array | None = None,
) -> None:
    """Raises `ValueError` where a scheme for causal attention alone may see later keys."""
    if not (reason := scheme.traits.causal_only):
        return
    name, sides = type(scheme).__name__, window_sides(window)
    require(
        is_causal or (sides is not None and sides[1] == 0),
        f"{caller}: {name} needs is_causal=True: {reason}.",
    )
    require(
        prefix_length is None,
        f"{caller}: prefix_length shows keys after the query, and for {name} {reason}.",
    )


def check_sizes(caller: str, scheme: Scheme, **sizes: int | None) -> None:
    """Raises `ValueError` if a scheme, or one inside it, was made for other sizes of a layer."""
    for field in dataclasses.fields(scheme):
        value = getattr(scheme, field.name)
        expected = sizes.get(field.name)
        if None not in (expected, value) and value != expected:
            raise ValueError(
                f"{caller}: {field.name} is {expected}, and {scheme!r} was made for {value}."
            )
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Scheme):
                check_sizes(caller, inner, **sizes)


def param_axes(scheme: Scheme) -> list[list[str]]:
    """Returns the words of `Scheme.param_axes` for each parameter, in the order of its leaves."""
    axes = []
    params = jax.eval_shape(scheme.init, jax.random.key(0))
    for path, param in jax.tree.leaves_with_path(params):
        words = _words(scheme.param_axes, path) or ["-"] * param.ndim
        require(
            len(words) == param.ndim,
            f"{type(scheme).__name__}.param_axes: {jax.tree_util.keystr(path)} has shape "
            f"{param.shape}, got {' '.join(words)!r}.",
        )
        axes.append(words)
    return axes


def _words(axes: Any, path: tuple[Any, ...]) -> list[str]:
    """Returns the words at a path, none where there is no entry."""
    for key in path:
        if isinstance(axes, str):  # The same axes for all leaves below.
            break
        index = getattr(key, "key", getattr(key, "idx", None))
        axes = (axes if isinstance(axes, Mapping) else dict(enumerate(axes))).get(index, "")
    return axes.split() if isinstance(axes, str) else []
