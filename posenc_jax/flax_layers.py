"""What the modules of NNX and Linen share."""

from typing import Any, Unpack

import jax

from posenc_jax.cache import KVCache
from posenc_jax.checks import require
from posenc_jax.engine.problem import Implementation
from posenc_jax.functional import (
    CacheOptions,
    LayerOptions,
    new_cache,
    scheme_embedding,
    scheme_tables,
)
from posenc_jax.layers import LayerSpec
from posenc_jax.mask import Window
from posenc_jax.qk_norm import QKNorm
from posenc_jax.scheme import Params, Scheme


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
      ValueError: for a setting beside that of a `LayerSpec`, and for a layer with chunks.
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
    require(
        position.chunk_size is None,
        f"Attention: the layer has chunk_size={position.chunk_size}: give its scheme as position, "
        "and segment_ids = positions // chunk_size in each call.",
    )
    return position


class AttentionLayer:
    """An `Attention`: settings, which the class itself documents, and caches."""

    position: Any
    num_heads: int
    num_kv_heads: int | None
    head_dim: int
    model_dim: int | None = None
    dtype: Any
    param_dtype: Any
    is_causal: bool
    window: Window
    softcap: float | None
    scale: float | None
    dropout_rate: float
    deterministic: bool | None
    implementation: str | Implementation | None

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

    def settings(self, layer: Any, dropout_key: jax.Array | None) -> LayerOptions:
        """Returns the arguments of `scheme_attention` that are the same in all calls.

        Args:
          layer: has `window`, `softcap` and `scale`.
          dropout_key: of this call; None for no dropout.
        """
        return {
            "is_causal": self.is_causal,
            "window": layer.window,
            "softcap": layer.softcap,
            "scale": layer.scale,
            "dropout_rate": 0.0 if dropout_key is None else self.dropout_rate,
            "dropout_key": dropout_key,
            "implementation": self.implementation,
        }

    def new_cache(
        self,
        batch: int,
        capacity: int,
        *,
        position: EncodingLayer | None = None,
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
          **options: `coordinates`, `ring`, `block_size`, `num_blocks`, `max_rewind` and
            `qkv_sharding`, as in `posenc_jax.new_cache`.
        """
        encoding = self.position if position is None else position
        own = self.param_dtype if self.dtype is None else self.dtype
        return new_cache(
            encoding if isinstance(encoding, Scheme) else encoding.scheme,
            batch,
            capacity,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            model_dim=self.model_dim if model_dim is None else model_dim,
            dtype=own if dtype is None else dtype,
            **options,
        )
