"""Common parts of the modules of NNX and Linen: arguments, settings and caches."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from posenc_jax.cache.kv_cache import KVCache
from posenc_jax.checks import (
    array_of_rank,
    divides,
    integers_from,
    positive_integers,
    refuse_unknown,
    require,
    token_integers,
)
from posenc_jax.engine.api import AttentionCall
from posenc_jax.engine.mask import SlidingWindow, by_coordinates, window_sides
from posenc_jax.engine.problem import Implementations
from posenc_jax.functional.arguments import TokenOptions, token_positions
from posenc_jax.functional.attention import scheme_embedding, scheme_tables
from posenc_jax.functional.new_cache import CacheOptions, new_cache
from posenc_jax.functional.pipeline import Norm, Norms
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.layer_spec import IDS_PER_SEGMENT, LayerSpec, in_chunks
from posenc_jax.schemes.scheme import Params, Scheme, call_hint, check_direction

AxisNames = Mapping[str, str | tuple[str, ...] | None]
"""Maps sizes of a model to names of the axes with these sizes."""

SIZES = ("num_heads", "num_kv_heads", "head_dim", "model_dim")

KERNELS = {
    "query": ("model_dim", "num_heads", "head_dim"),
    "key": ("model_dim", "num_kv_heads", "head_dim"),
    "value": ("model_dim", "num_kv_heads", "head_dim"),
    "out": ("num_heads", "head_dim", "model_dim"),
}
"""The sizes of the axes of kernels. Biases have the axes of the output."""


class CallOptions(TokenOptions, total=False):
    """Arguments of a call of `Attention` in NNX and Linen, except the inputs and the cache."""

    k_positions: jax.Array | None
    k_coordinates: jax.Array | None
    k_segment_ids: jax.Array | None
    k_visible_until: jax.Array | None
    deterministic: bool | None
    out_sharding: PartitionSpec | None
    qkv_sharding: PartitionSpec | None
    kv_sharding: PartitionSpec | None


class EncodingLayer:
    """Mixin of `PositionEncoding`: a scheme with its parameters."""

    scheme: Scheme

    def values(self) -> Params:
        """Returns the parameters as arrays."""
        raise NotImplementedError

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | None = None,
        coordinates: jax.Array | None = None,
        *,
        segment_ids: jax.Array | None = None,
        cache: KVCache | None = None,
    ) -> jax.Array:
        """Encodes positions into token embeddings, as `posenc_jax.scheme_embedding`.

        Args:
          x: [B, T, D].
          positions: integers [T] or [B, T]. Default: 0, 1, ... in every segment, after its tokens
            in the cache; padding does not count.
          coordinates: the numbers that the scheme encodes. Default: the positions.
          segment_ids: integers [T] or [B, T], as in `scheme_attention`.
          cache: the cache of an attention layer, before these tokens are appended.

        Returns:
          [B, T, D]; x for a scheme that does not act on the embedding.
        """
        return scheme_embedding(
            self.scheme,
            self.values(),
            x,
            positions=positions,
            coordinates=coordinates,
            segment_ids=segment_ids,
            cache=cache,
        )

    def tables(self, coordinates: jax.Array) -> Any:
        """Returns arrays for `Attention(...)(tables=...)`; see `posenc_jax.scheme_tables`."""
        return scheme_tables(self.scheme, self.values(), coordinates)


def scheme_of(caller: str, encoding: Any) -> Scheme:
    """Returns the scheme of a `PositionEncoding`; raises TypeError for another object."""
    if isinstance(encoding, EncodingLayer):
        return encoding.scheme
    hint = "; make one with PositionEncoding(scheme)" if isinstance(encoding, Scheme) else ""
    raise TypeError(
        f"{caller}: shared_encoding must be a PositionEncoding, got {encoding!r:.200}{hint}."
    )


def layer_spec(caller: str, position: Any, shared_encoding: Any, **settings: Any) -> LayerSpec:
    """Returns the settings of a layer, from its arguments or from a `LayerSpec`.

    Args:
      caller: the layer, for messages.
      position, shared_encoding: as in `Attention`.
      **settings: fields of `LayerSpec`.

    Raises:
      TypeError: if an argument has another type.
      ValueError: for a setting that the `LayerSpec` has too, for two different schemes, and for a
        layer without attention.
    """
    shared = None if shared_encoding is None else scheme_of(caller, shared_encoding)
    if not isinstance(position, LayerSpec | Scheme | None):
        hint = call_hint(position)
        if isinstance(position, EncodingLayer):
            hint = "; give an encoding that layers share as shared_encoding"
        raise TypeError(
            f"{caller}: position must be a Scheme or a LayerSpec, got {position!r:.200}{hint}."
        )
    if not isinstance(position, LayerSpec):
        position, settings = LayerSpec(position or shared or NoPE(), **settings), {}
    require(
        position.mixer == "attention",
        f"{caller}: position must be a layer of attention, got mixer={position.mixer!r}.",
    )
    twice = [n for n, value in settings.items() if value is not None and value is not False]
    require(
        not twice,
        f"{caller}: {', '.join(twice)} beside position={position!r}, which has its own; use "
        "dataclasses.replace on the layer.",
    )
    require(
        shared in (None, position.scheme),
        f"{caller}: shared_encoding must have the scheme of position, {position.scheme!r}, got "
        f"{shared!r}.",
    )
    return position


def check_use(scheme: Scheme, spec: LayerSpec, is_causal: bool) -> None:
    """Checks a scheme against the direction of a new layer.

    Raises:
      ValueError: for a scheme for causal attention in another layer.

    Warns:
      UserWarning: for a scheme that is the same in both directions, in a layer that sees both.
    """
    check_direction("Attention", scheme, is_causal, spec.window)
    sides = window_sides(spec.window)
    one_sided = is_causal or (sides is not None and sides[1] == 0)
    if scheme.traits.mirrored and scheme.acts_in_attention and not one_sided:
        warnings.warn(
            f"Attention: without is_causal, {scheme!r} has the same logits for a key before the "
            "query and one as far behind it, so that the layer cannot tell left from right. For an "
            'encoder take RoPE, T5(..., bidirectional=True) or ALiBi(..., symmetry="split"), or '
            "chain one of them with it; for a decoder give is_causal=True.",
            stacklevel=4,
        )


def init_of_projection(argument: str, init: Any, name: str, default: Any) -> Any:
    """Returns the initialiser of a projection, from one for all or from a mapping.

    Args:
      argument: the name of `init` in messages.
      init: an initialiser, or a mapping from names of projections to initialisers.
      name: the projection.
      default: the initialiser of projections without an entry.

    Raises:
      ValueError: for entries of other projections.
    """
    if not isinstance(init, Mapping):
        return init
    unknown = sorted(set(init) - {"query", "key", "value"})
    require(
        not unknown,
        f"Attention: {argument} has entries for 'query', 'key' and 'value', got {unknown}"
        f"{f'; use out_{argument}' if 'out' in unknown else ''}.",
    )
    return init.get(name, default)


def has_bias(use_bias: bool | Mapping[str, bool], name: str) -> bool:
    """Returns whether a projection has a bias.

    Raises:
      ValueError: for another value, and a mapping with missing or unknown projections.
    """
    of_each = use_bias if isinstance(use_bias, Mapping) else dict.fromkeys(KERNELS, use_bias)
    require(
        of_each.keys() == KERNELS.keys() and set(of_each.values()) <= {True, False},
        f"Attention: use_bias must be a bool or have one for each of {sorted(KERNELS)}, got "
        f"{use_bias!r}.",
    )
    return of_each[name]


class AttentionLayer:
    """Mixin of `Attention`: its settings, which the classes document, and its caches."""

    num_heads: int
    num_kv_heads: int | None
    head_dim: int | None
    model_dim: int | None = None
    dtype: Any
    param_dtype: Any
    is_causal: bool
    dropout_rate: float
    deterministic: bool | None
    implementation: Implementations

    def _settings(self) -> LayerSpec:
        """Returns the settings as a `LayerSpec`."""
        raise NotImplementedError

    def _inputs(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None,
        inputs_v: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the inputs of the projections to q, k and v, with defaults filled in."""
        require(
            inputs_k is not None or inputs_v is None,
            "Attention: inputs_v needs inputs_k beside it.",
        )
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs = inputs_q, inputs_k, inputs_k if inputs_v is None else inputs_v
        for name, x, axes in zip(("inputs_q", "inputs_k", "inputs_v"), inputs, "TSS", strict=True):
            array_of_rank("Attention", name, x, 3, f"[B, {axes}, D]")
        return inputs

    def _heads(self) -> dict[str, int]:
        """Returns the number of heads of each projection."""
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        sizes = {"num_heads": self.num_heads, "num_kv_heads": kv_heads}
        positive_integers("Attention", **sizes)
        divides("Attention", **sizes)
        return {"query": self.num_heads, "key": kv_heads, "value": kv_heads}

    def _size_of_heads(self, model_dim: int | None) -> int:
        """Returns H: `head_dim`, or D / N."""
        if self.head_dim is not None:
            positive_integers("Attention", head_dim=self.head_dim)
            return self.head_dim
        if model_dim is None:
            raise ValueError("Attention.new_cache: without head_dim it needs model_dim=.")
        sizes = {"model_dim": model_dim, "num_heads": self.num_heads}
        positive_integers("Attention", **sizes)
        divides("Attention", **sizes)
        return model_dim // self.num_heads

    def _drops(self, deterministic: bool | None) -> bool:
        """Returns whether a call drops weights.

        Raises:
          ValueError: if `deterministic` is set neither in the call nor in the layer, or the rate
            is outside [0, 1).
        """
        require(
            0.0 <= self.dropout_rate < 1.0,
            f"Attention: dropout_rate must be in [0, 1), got {self.dropout_rate}.",
        )
        if self.dropout_rate == 0:
            return False
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError(
                f"Attention: dropout_rate={self.dropout_rate} needs `deterministic`, in the call "
                "or the constructor; in NNX train() and eval() set it, too."
            )
        return not deterministic

    def _attention_call(
        self,
        options: Mapping[str, Any],
        known: Iterable[str],
        shape: tuple[int, ...],
        *,
        to_itself: bool,
        sinks: jax.Array | None,
        cache: KVCache | None,
        dropout_key: jax.Array | None,
    ) -> AttentionCall:
        """Returns the attention of a call of the layer, from its settings and the call's options.

        Args:
          options: options of the call.
          known: names of all options that calls take.
          shape: (B, T) of the queries.
          to_itself: whether queries and keys belong to one sequence.
          sinks: the sinks of the layer.
          cache: the cache of the call.
          dropout_key: None for no dropout.
        """
        names = "positions", "coordinates", "segment_ids", "visible_until"
        other = {f"k_{n}" for n in names} if to_itself else {"tables", "contiguous", names[-1]}
        for name in ("is_causal", "window", "softcap", "scale", "dropout_rate"):
            if name in options:
                raise TypeError(
                    f"Attention: {name} is an argument of the layer, not of its calls; give it to "
                    f"Attention(..., {name}=...)."
                )
        refuse_unknown("Attention", options, set(known) - other)
        spec = self._settings()
        call = AttentionCall(
            sinks=sinks,
            is_causal=self.is_causal,
            window=spec.window,
            softcap=spec.softcap,
            scale=spec.scale,
            dropout_rate=0.0 if dropout_key is None else self.dropout_rate,
            dropout_key=dropout_key,
            implementation=self.implementation,
        )
        sides = {name: f"q_{name}" for name in names[:-1]} | {names[-1]: f"k_{names[-1]}"}
        # None is the default of each: it does not take the layer's sinks away.
        arrays = {n: x for n, x in options.items() if n != "tables" and x is not None}
        call = call.replace(**{sides.get(n, n): x for n, x in arrays.items()})
        require(
            to_itself or (cache is None and spec.chunk_size is None),
            "Attention: keys of another sequence have no cache and no chunks; give a call with "
            "inputs_k no cache, and decode=False.",
        )
        if spec.chunk_size is None:
            return call
        for name in ("prefix_length", "visible_until"):
            if arrays.get(name) is not None:
                raise NotImplementedError(f"Attention: {name} in a layer with chunks.")
        ids = call.q_segment_ids
        if ids is not None:
            ids = jnp.broadcast_to(token_integers("Attention", "segment_ids", ids, shape), shape)
            require(
                isinstance(ids, Tracer) or np.asarray(ids).max(initial=0) < 2**27 - 39,
                "Attention: segment_ids of a layer with chunks must be below 2**27 - 39.",
            )
        by_slot = call.q_positions is None and call.q_coordinates is None and ids is None
        positions = token_positions(
            "Attention", call.q_positions, cache, shape, ids, IDS_PER_SEGMENT
        )
        if cache is not None and ids is None:
            ids = jnp.broadcast_to(cache.next_segment_ids[:, None] // IDS_PER_SEGMENT, shape)
        ids, window = in_chunks(spec.chunk_size, positions, ids, call.window)
        call = call.replace(q_segment_ids=ids, window=window, q_positions=positions)
        return call.replace(contiguous=True) if by_slot and cache is None else call

    def _norms_around(
        self, norms: Norms | None
    ) -> tuple[tuple[Norm | None, Norm | None], Norms | None]:
        """Returns the norms of q and k before the scheme's hooks, and those after them."""
        qk_norm = self._settings().qk_norm
        if norms is None or qk_norm is None:
            return (None, None), None
        return ((None, None), norms) if qk_norm.after_rotation else (norms, None)

    def new_cache(
        self,
        batch: int,
        capacity: int,
        *,
        tokens_per_call: int | None = None,
        shared_encoding: "EncodingLayer | None" = None,
        model_dim: int | None = None,
        dtype: Any = None,
        **options: Unpack[CacheOptions],
    ) -> KVCache:
        """Returns an empty cache for this layer.

        Args:
          batch, capacity: B and the number of slots for the tokens of a row.
          tokens_per_call: the most tokens of a call. A layer with a window of positions has a
            ring of the slots that it then needs, if these are fewer than `capacity`. Default: any
            number of tokens, and a full cache.
          shared_encoding: the argument of that name in calls of an NNX layer.
          model_dim: D, which Linen layers need without `head_dim`, and for schemes that read their
            input.
          dtype: of k and v. Default: the layer's `dtype`, or else `param_dtype`; without a `dtype`,
            wider inputs give wider k and v, which are then rounded.
          **options: `coordinates`, `visible_until`, `ring`, `num_sink_tokens`, `max_rewind`
            and `qkv_sharding`, as in `posenc_jax.new_cache`.

        Raises:
          NotImplementedError: for a ring of a layer with chunks.
          ValueError: for `tokens_per_call` below one, and with a `ring`, whose capacity has it.
        """
        spec, encoding = self._settings(), shared_encoding
        if encoding is None:  # A Linen layer has its parameters in `apply` only.
            encoding = getattr(self, "encoding", None)
        if spec.chunk_size is not None and options.get("ring"):
            raise NotImplementedError(
                f"Attention.new_cache: a ring for chunk_size={spec.chunk_size}; use a full cache."
            )
        if dtype is None:
            dtype = self.param_dtype if self.dtype is None else self.dtype
        scheme = spec.scheme if encoding is None else encoding.scheme
        sides = window_sides(spec.window)
        sinks = spec.window.num_sink_tokens if isinstance(spec.window, SlidingWindow) else 0
        if tokens_per_call is not None:
            positive_integers("Attention.new_cache", tokens_per_call=tokens_per_call)
            require(
                not options.get("ring"),
                "Attention.new_cache: a ring=True of `capacity` slots and tokens_per_call, which "
                "chooses their number; give one of them.",
            )
            # A cache of all tokens, where no ring is smaller, has the first ones too.
            more = options.pop("num_sink_tokens", 0)
            integers_from(0, "Attention.new_cache", num_sink_tokens=more)
            sinks = max(sinks, more)
            if sides is not None and sides[0] >= 0 and spec.chunk_size is None:
                past, back = sides[0], options.get("max_rewind", 0)
                count = max(past + tokens_per_call, back and max(past, 1) + back)
                slots = max(scheme.traits.num_sink_tokens, sinks) + count
                if slots < capacity and not by_coordinates(spec.window):
                    capacity, options["ring"] = slots, True
        if options.get("ring"):
            options["num_sink_tokens"] = max(sinks, options.get("num_sink_tokens", 0))
        model_dim = self.model_dim if model_dim is None else model_dim
        cache = new_cache(
            scheme,
            batch,
            capacity,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self._size_of_heads(model_dim),
            model_dim=model_dim,
            dtype=dtype,
            params=None if encoding is None else encoding.values(),
            **options,
        )
        if spec.chunk_size is None:
            return cache
        return dataclasses.replace(cache, ids_per_segment=IDS_PER_SEGMENT)


def sinks_of(param: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the sinks of a layer: its parameter [N], or x [B, T, D] times its kernel [D, N]."""
    if param.ndim == 1:
        return param
    return jnp.einsum("btd,dn->btn", x.astype(jnp.float32), param, precision="highest")


def new_params(scheme: Scheme, key: jax.Array) -> Params:
    """Returns `scheme.init(key)` as arrays, in float32 also with 64-bit types enabled."""

    def array(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return x.astype(jnp.float32 if x.dtype == jnp.float64 else x.dtype)

    return jax.tree.map(array, scheme.init(key))


def check_axis_names(caller: str, axis_names: AxisNames | None) -> None:
    """Raises `ValueError` for keys other than sizes."""
    unknown = sorted(set(axis_names or ()) - set(SIZES))
    require(
        not unknown,
        f"{caller}: axis_names names axes by their size, {', '.join(SIZES)}; got {unknown}.",
    )


def names(axis_names: AxisNames, sizes: Sequence[str]) -> tuple:
    """Returns the name of each axis, None for an axis of another size."""
    return tuple(axis_names.get(size) for size in sizes)
