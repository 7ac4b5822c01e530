"""Empty caches for attention with a scheme."""

from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from posenc_jax.cache.kv_cache import KVCache
from posenc_jax.checks import divides, integers_from, positive_integers, require
from posenc_jax.functional.arguments import checked_params
from posenc_jax.functional.pipeline import Pipeline, Projections
from posenc_jax.schemes.scheme import Params, Scheme, check_scheme, check_sizes


class CacheOptions(TypedDict, total=False):
    """Arguments of `new_cache` that attention layers pass on."""

    coordinates: jax.Array | jax.ShapeDtypeStruct | None
    visible_until: bool
    ring: bool
    num_sink_tokens: int
    max_rewind: int
    qkv_sharding: PartitionSpec | None


def new_cache(
    scheme: Scheme,
    batch: int,
    capacity: int,
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    value_dim: int | None = None,
    model_dim: int | None = None,
    dtype: Any = jnp.float32,
    coordinates: jax.Array | jax.ShapeDtypeStruct | None = None,
    visible_until: bool = False,
    ring: bool = False,
    num_sink_tokens: int = 0,
    max_rewind: int = 0,
    qkv_sharding: PartitionSpec | None = None,
    params: Params | None = None,
) -> KVCache:
    """Returns an empty cache for `scheme_attention` with this scheme.

    Args:
      scheme: the position encoding; its hooks determine the arrays of the cache.
      batch: the batch size, B.
      capacity: number of slots for the tokens of a row; padding takes none. A ring needs
        window + tokens per call - 1 + sink tokens.
      num_heads: the number of query heads, N.
      head_dim: the head dim, H.
      num_kv_heads: the number of key/value heads, K. Default: N.
      value_dim: V, the head dim of v. Default: H.
      model_dim: D, for schemes that read `x`.
      dtype: of k and v.
      coordinates: an array, or its `jax.ShapeDtypeStruct`, [T], [B, T] or [A, B, T] with the axes
        and the kind of numbers of the coordinates of calls: integers, or real numbers for float32.
        Default: calls give positions only.
      visible_until: whether calls may give `visible_until`, such as trees of drafts.
      ring: whether a full cache overwrites its oldest slots; needs a window.
      num_sink_tokens: number of first tokens that a ring keeps, as the `SlidingWindow` of calls.
      max_rewind: the most tokens that `rewind` of the cache takes back at once, if the scheme
        has a running state; other schemes take back any number.
      qkv_sharding: on explicit mesh axes, how q, k and v [B, T, heads, H] are sharded, as in
        `nnx.MultiHeadAttention`; all arrays of the cache follow. Needs `jax.set_mesh`.
      params: the scheme's parameters, if they are sharded on explicit mesh axes: features and
        states in the cache are sharded as the hooks return them.

    Raises:
      ValueError: without `model_dim` for a scheme that reads `x`, and for invalid sizes.

    >>> import posenc_jax as pe
    >>> cache = pe.new_cache(pe.RoPE(head_dim=8), 2, 16, num_heads=4, head_dim=8)
    >>> cache.k.shape
    (2, 16, 4, 8)
    """
    check_scheme("new_cache", scheme)
    optional = {"num_kv_heads": num_kv_heads, "model_dim": model_dim}
    sizes = {"capacity": capacity, "num_heads": num_heads, "head_dim": head_dim}
    sizes |= {name: size for name, size in optional.items() if size is not None}
    positive_integers("new_cache", **sizes)
    integers_from(0, "new_cache", batch=batch, max_rewind=max_rewind, value_dim=value_dim or 0)
    integers_from(0, "new_cache", num_sink_tokens=num_sink_tokens)
    require(ring or not num_sink_tokens, "new_cache: num_sink_tokens needs ring=True.")
    heads_of = {"num_heads": num_heads, "num_kv_heads": num_kv_heads or num_heads}
    divides("new_cache", **heads_of)
    check_sizes("new_cache", scheme, head_dim=head_dim, model_dim=model_dim, **heads_of)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    require(
        model_dim is not None or not scheme.traits.reads_x,
        f"new_cache: {scheme!r} reads the input of the layer; give its width, model_dim=.",
    )
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"new_cache: dtype must be a floating type, got {dtype!r:.60}.")
    spec = () if qkv_sharding is None else tuple(qkv_sharding)

    def array(sizes, dtype, spec):
        if qkv_sharding is None:
            return jax.ShapeDtypeStruct(sizes, dtype)
        spec = PartitionSpec(*spec, *(None,) * (len(sizes) - len(spec)))
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), spec)
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    def heads(count, size):
        return array((batch, 1, count, size), dtype, spec)

    lead, real = (), False
    if coordinates is not None:
        if not hasattr(coordinates, "dtype"):
            raise TypeError(
                "new_cache: coordinates must be an array or a jax.ShapeDtypeStruct, got "
                f"{coordinates!r:.60}."
            )
        shape = coordinates.shape
        require(
            1 <= len(shape) <= 3,
            f"new_cache: coordinates must be [T], [B, T] or [A, B, T], got shape {shape}.",
        )
        lead, real = coordinates.shape[:-2], jnp.issubdtype(coordinates.dtype, jnp.floating)
    dtype_of_coordinates = jnp.float32 if real else jnp.int32
    encoded = array((*lead, batch, 1), dtype_of_coordinates, (*(None,) * len(lead), *spec[:1]))
    tokens = Projections(
        q=heads(num_heads, head_dim),
        k=heads(kv_heads, head_dim),
        v=heads(kv_heads, head_dim if value_dim is None else value_dim),
        x=None if model_dim is None else array((batch, 1, model_dim), dtype, spec[:1]),
        coordinates=encoded,
    )

    def stored(params, tokens):
        return Pipeline(scheme, params).stored(Pipeline(scheme, params).read(tokens))

    if params is None:
        params = jax.eval_shape(scheme.init, jax.random.key(0))
    params = checked_params("new_cache", scheme, params)
    tokens = jax.eval_shape(stored, params, tokens)
    return KVCache.empty(
        tokens.k,
        tokens.v,
        capacity,
        coordinates=None if coordinates is None else encoded,
        k_features=tokens.k_features,
        state=tokens.state,
        visible_until=visible_until,
        scheme=scheme,
        max_rewind=max_rewind,
        ring=ring,
        num_sink_tokens=max(scheme.traits.num_sink_tokens, num_sink_tokens) if ring else 0,
    )
