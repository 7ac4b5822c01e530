"""What the modules of NNX and Linen share."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from posenc_jax.cache.kv_cache import KVCache
from posenc_jax.checks import array_of_rank, divides, require
from posenc_jax.engine.mask import Window
from posenc_jax.engine.problem import Implementation
from posenc_jax.functional.attention import (
    CacheOptions,
    TokenOptions,
    new_cache,
    scheme_attention,
    scheme_embedding,
    scheme_tables,
)
from posenc_jax.functional.cross_attention import scheme_cross_attention
from posenc_jax.functional.tokens import Norms, token_positions
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.layer_spec import LayerSpec, in_chunks
from posenc_jax.schemes.scheme import Params, Scheme


class SequenceOptions(TokenOptions, total=False):
    """Arguments of a call of `Attention` about its tokens."""

    k_positions: jax.Array | None
    k_coordinates: jax.Array | None
    k_segment_ids: jax.Array | None


class EncodingLayer:
    """A `PositionEncoding`: a scheme with its parameters."""

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
        cache: KVCache | None = None,
    ) -> jax.Array:
        """Encodes positions into token embeddings, as `posenc_jax.scheme_embedding`.

        Args:
          x: [B, T, D].
          positions: integers [T] or [B, T]. Default: 0, 1, ... after the tokens in the cache.
          coordinates: what the scheme encodes. Default: the positions.
          cache: the cache of an attention layer, before it is given these tokens.

        Returns:
          [B, T, D]; x for a scheme that does not act on the embedding.
        """
        return scheme_embedding(
            self.scheme,
            self.values(),
            x,
            positions=positions,
            coordinates=coordinates,
            cache=cache,
        )

    def tables(self, coordinates: jax.Array) -> Any:
        """Returns arrays for `Attention(...)(tables=...)`; see `posenc_jax.scheme_tables`."""
        return scheme_tables(self.scheme, self.values(), coordinates)


def layer_spec(
    position: Any,
    window: Window,
    softcap: float | None,
    scale: float | None,
    qk_norm: QKNorm | None,
    sinks: bool,
) -> LayerSpec:
    """Returns the settings of an `Attention`, from its arguments or from a `LayerSpec`.

    Raises:
      TypeError: if position is no scheme, layer or encoding.
      ValueError: for a setting beside that of a `LayerSpec`.
    """
    if not isinstance(position, LayerSpec):
        scheme = getattr(position, "scheme", position)
        return LayerSpec(scheme, window, scale=scale, softcap=softcap, sinks=sinks, qk_norm=qk_norm)
    given = {"window": window, "softcap": softcap, "scale": scale, "qk_norm": qk_norm}
    given["sinks"] = sinks or None
    both = [name for name, value in given.items() if value is not None]
    require(
        not both,
        f"Attention: {', '.join(both)} beside position={position!r}, which has its own; use "
        "dataclasses.replace on the layer.",
    )
    return position


def of_projection(argument: str, given: Any, name: str, default: Any) -> Any:
    """Returns the initialiser of a projection: `given`, or its entry there, or the default.

    Raises:
      ValueError: for entries of other projections.
    """
    if not isinstance(given, Mapping):
        return given
    unknown = sorted(set(given) - {"query", "key", "value"})
    require(
        not unknown,
        f"Attention: {argument} has entries for 'query', 'key' and 'value', got {unknown}"
        f"{f'; use out_{argument}' if 'out' in unknown else ''}.",
    )
    return given.get(name, default)


def has_bias(use_bias: bool | Mapping[str, bool], name: str) -> bool:
    """Returns whether a projection has a bias.

    Raises:
      ValueError: for a mapping without an entry for each projection, or with others.
    """
    if not isinstance(use_bias, Mapping):
        return use_bias
    wanted = {"query", "key", "value", "out"}
    require(
        set(use_bias) == wanted,
        f"Attention: use_bias must be a bool or have entries for {sorted(wanted)}, got "
        f"{dict(use_bias)}.",
    )
    return use_bias[name]


class AttentionLayer:
    """An `Attention`: settings, which the class itself documents, its inside, and caches."""

    position: Any
    num_heads: int
    num_kv_heads: int | None
    head_dim: int
    model_dim: int | None = None
    dtype: Any
    param_dtype: Any
    is_causal: bool
    dropout_rate: float
    deterministic: bool | None
    implementation: str | Implementation | None

    def spec(self) -> LayerSpec:
        """Returns the settings that a `LayerSpec` has."""
        raise NotImplementedError

    def inputs(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None,
        inputs_v: jax.Array | None,
        widths: tuple[int | None, int | None] = (None, None),
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns what q, k and v are projected from.

        Raises:
          ValueError: for other shapes, and widths other than those of queries and keys if known.
        """
        given = {"inputs_q": inputs_q, "inputs_k": inputs_k, "inputs_v": inputs_v}
        for (name, x), width in zip(given.items(), (*widths, widths[1]), strict=True):
            if x is not None:
                axes = f"[B, {'T' if x is inputs_q else 'S'}, {width or 'D'}]"
                array_of_rank("Attention", name, x, 3, axes)
                require(
                    width in (None, x.shape[-1]),
                    f"Attention: {name} must be {axes}, got {x.shape}.",
                )
        require(
            inputs_k is not None or inputs_v is None,
            "Attention: inputs_v needs inputs_k beside it.",
        )
        inputs_k = inputs_q if inputs_k is None else inputs_k
        return inputs_q, inputs_k, inputs_k if inputs_v is None else inputs_v

    def heads(self) -> dict[str, int]:
        """Returns the number of heads of each projection."""
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        divides("Attention", num_heads=self.num_heads, num_kv_heads=kv_heads)
        return {"query": self.num_heads, "key": kv_heads, "value": kv_heads}

    def drops(self, deterministic: bool | None) -> bool:
        """Returns whether a call drops weights.

        Raises:
          ValueError: if neither the call nor the layer says whether to.
        """
        if self.dropout_rate == 0:
            return False
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError(
                f"Attention: dropout_rate={self.dropout_rate} needs `deterministic`, in the call "
                "or the constructor; in NNX train() and eval() set it, too."
            )
        return not deterministic

    def attend(
        self,
        encoding: "EncodingLayer",
        projected: tuple[jax.Array, jax.Array, jax.Array],
        x: jax.Array,
        memory: jax.Array | None,
        *,
        norms: Norms | None,
        sinks: jax.Array | None,
        cache: KVCache | None,
        dropout_key: jax.Array | None,
        options: dict[str, Any],
    ) -> tuple[jax.Array, KVCache | None]:
        """Returns the output [B, T, N, H] of a call, before its projection, and the new cache.

        Args:
          encoding: the scheme with its parameters.
          projected: q, k and v.
          x: what q was projected from.
          memory: what k was projected from, if that is another sequence.
          norms: those of queries and keys.
          sinks: the layer's own.
          cache: that of the call.
          dropout_key: None for no dropout.
          options: `SequenceOptions`.
        """
        spec, (q, k, v) = self.spec(), projected
        after = spec.qk_norm is not None and spec.qk_norm.after_rotation
        if norms is not None and not after:
            q, k = norms[0](q), norms[1](k)
        # The names that MaxText's policies of rematerialisation use.
        names = "query_proj", "key_proj", "value_proj"
        q, k, v = map(checkpoint_name, (q, k, v), names)
        options = {
            "sinks": sinks,
            "is_causal": self.is_causal,
            "window": spec.window,
            "softcap": spec.softcap,
            "scale": spec.scale,
            "norms": norms if after else None,
            "dropout_rate": 0.0 if dropout_key is None else self.dropout_rate,
            "dropout_key": dropout_key,
            "implementation": self.implementation,
        } | options
        scheme, params = encoding.scheme, encoding.values()
        if memory is None:
            if spec.chunk_size is not None:
                options |= _chunks(spec.chunk_size, spec.window, x, cache, options)
            out, new = scheme_attention(scheme, params, q, k, v, x=x, cache=cache, **options)
        else:
            require(
                cache is None and spec.chunk_size is None,
                "Attention: keys of another sequence have no cache and no chunks; give a call "
                "with inputs_k no cache, and decode=False.",
            )
            out, new = (
                scheme_cross_attention(scheme, params, q, k, v, x=x, memory=memory, **options),
                None,
            )
        return checkpoint_name(out, "context"), new

    def new_cache(
        self,
        batch: int,
        capacity: int,
        *,
        position: "EncodingLayer | None" = None,
        model_dim: int | None = None,
        dtype: Any = None,
        **options: Unpack[CacheOptions],
    ) -> KVCache:
        """Returns an empty cache for this layer.

        Args:
          batch, capacity: B and the number of slots.
          position: the encoding that calls of an NNX layer will be given, if one.
          model_dim: D, which Linen layers need for schemes that read their input.
          dtype: of k and v. Default: the layer's.
          **options: `coordinates`, `ring`, `max_rewind` and `qkv_sharding`, as in
            `posenc_jax.new_cache`.

        Raises:
          NotImplementedError: for a ring of a layer with chunks.
        """
        spec, encoding = self.spec(), position
        if encoding is None:  # A Linen layer has its parameters in `apply` only.
            encoding = getattr(self, "encoding", None)
        if spec.chunk_size is not None and options.get("ring"):
            raise NotImplementedError(
                f"Attention.new_cache: a ring for chunk_size={spec.chunk_size}; use a full cache."
            )
        own = self.param_dtype if self.dtype is None else self.dtype
        return new_cache(
            spec.scheme if encoding is None else encoding.scheme,
            batch,
            capacity,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            model_dim=self.model_dim if model_dim is None else model_dim,
            dtype=own if dtype is None else dtype,
            params=None if encoding is None else encoding.values(),
            **options,
        )


def _chunks(
    size: int, window: Window, x: jax.Array, cache: KVCache | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Returns the segments and the window of a layer with chunks."""
    if options.get("prefix_length") is not None:
        raise NotImplementedError("Attention: prefix_length in a layer with chunks.")
    ids, shape = options.get("segment_ids"), x.shape[:2]
    if ids is not None:
        ids = jnp.broadcast_to(jnp.atleast_2d(ids), shape)
    at = token_positions("Attention", options.get("positions"), cache, *shape, ids)
    ids, window = in_chunks(size, at, ids, window)
    return {"segment_ids": ids, "window": window}


def zeros_are_empty(cache: KVCache) -> KVCache:
    """Returns the cache; one whose arrays are all zero, from their shapes alone, is empty."""
    unused = jnp.arange(cache.capacity, dtype=jnp.int32)[None] >= cache.written[:, None]
    return dataclasses.replace(cache, segment_ids=jnp.where(unused, -1, cache.segment_ids))
