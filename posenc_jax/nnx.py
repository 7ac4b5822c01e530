"""Position encodings and attention as Flax NNX modules, for any scheme."""

from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from posenc_jax.additive.none import NoPE
from posenc_jax.cache import KVCache
from posenc_jax.checks import array_of_rank, divides, require
from posenc_jax.engine.problem import Implementation
from posenc_jax.flax_attention_fn import attention_fn, check_acts_in_attention
from posenc_jax.flax_layers import AttentionLayer, EncodingLayer, layer_spec
from posenc_jax.functional import TokenOptions, new_params, scheme_attention
from posenc_jax.layers import LayerSpec
from posenc_jax.mask import Window
from posenc_jax.qk_norm import QKNorm
from posenc_jax.scheme import Params, Scheme, check_scheme

_kernel_init = nnx.initializers.lecun_normal()


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


class PositionEncoding(EncodingLayer, nnx.Module):
    """A scheme with its parameters; called, it encodes positions into token embeddings.

    Attributes:
      scheme: the scheme; static.
      params: its parameters, a pytree of `nnx.Param`, float32.

    >>> import posenc_jax as pe
    >>> encoding = PositionEncoding(pe.LearnedAbsolute(max_length=8, model_dim=4), rngs=nnx.Rngs(0))
    >>> encoding(jnp.zeros((1, 3, 4))).shape
    (1, 3, 4)
    """

    def __init__(self, scheme: Scheme, *, rngs: nnx.Rngs):
        """Makes new parameters.

        Args:
          scheme: any scheme.
          rngs: for the key of the parameters.

        Raises:
          TypeError: if `scheme` is not a `Scheme`.
        """
        check_scheme("PositionEncoding", scheme)
        self.scheme = scheme
        self.params = nnx.data(jax.tree.map(nnx.Param, new_params(scheme, rngs.params())))

    def values(self) -> Params:
        """Returns the parameters as arrays."""
        return jax.tree.map(lambda p: p[...], self.params, is_leaf=_is_variable)


class HeadNorm(nnx.Module):
    """The norm of the queries or the keys of a layer; see `posenc_jax.QKNorm`.

    Attributes:
      settings: the norm; static.
      params: its scale and bias as `nnx.Param`, as far as there are any.
    """

    def __init__(self, settings: QKNorm, num_heads: int, head_dim: int):
        self.settings = settings
        self.params = nnx.data(jax.tree.map(nnx.Param, settings.init(num_heads, head_dim)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x [B, T, N, H] normalised."""
        return self.settings({name: p[...] for name, p in self.params.items()}, x)


class CallOptions(TokenOptions, total=False):
    """Arguments of a call of `Attention`, except the cache."""

    position: PositionEncoding | None
    deterministic: bool | None
    rngs: nnx.Rngs | nnx.RngStream | jax.Array | None
    out_sharding: PartitionSpec | None
    qkv_sharding: PartitionSpec | None


class Attention(AttentionLayer, nnx.Module):
    """Multi-head self-attention with any scheme, grouped heads, segments and a cache.

    >>> import posenc_jax as pe
    >>> layer = Attention(16, 4, position=pe.RoPE(head_dim=4), is_causal=True, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 16))).shape
    (2, 5, 16)
    >>> y, cache = layer(jnp.ones((2, 5, 16)), cache=layer.new_cache(2, capacity=8))
    >>> y, cache = layer(jnp.ones((2, 1, 16)), cache=cache)  # The sixth token.
    """

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        *,
        position: Scheme | LayerSpec | PositionEncoding = NoPE(),  # noqa: B008, frozen
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        is_causal: bool = False,
        window: Window = None,
        softcap: float | None = None,
        scale: float | None = None,
        qk_norm: QKNorm | None = None,
        sinks: bool = False,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = _kernel_init,
        out_init: nnx.Initializer | None = None,
        implementation: str | Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections, and the scheme's parameters unless `position` owns them.

        Args:
          model_dim: D.
          num_heads: N.
          position: a scheme, whose parameters this layer then owns; a `LayerSpec`, which also
            has `window`, `softcap`, `scale`, `qk_norm` and `sinks`; or a `PositionEncoding` that
            several layers share.
          num_kv_heads: K, a divisor of N. Default: N.
          head_dim: H. Default: D / N.
          is_causal, window, softcap, implementation: as in `posenc_jax.attention`.
          scale: the factor on q . k. Default: the scheme's own.
          qk_norm: the norm of queries and keys before the scheme. Default: none.
          sinks: whether each head has a learned logit without a value, as in gpt-oss.
          dropout_rate: share of the attention weights that are dropped.
          deterministic: whether to drop none, as in `nnx.MultiHeadAttention`; `train()` and
            `eval()` set it, and the argument of a call comes first.
          use_bias, dtype, param_dtype, kernel_init: of the projections, as in
            `nnx.LinearGeneral`. Parameters of the scheme are float32.
          out_init: of the output projection. Default: `kernel_init`.
          rngs: for the keys of parameters, and of dropout where calls give none.

        Raises:
          ValueError: for sizes that do not divide, a scheme that acts on the token embedding
            alone, a setting beside that of a `LayerSpec`, and a layer with chunks.
        """
        layer = layer_spec(position, window, softcap, scale, qk_norm, sinks)
        position = position if isinstance(position, PositionEncoding) else layer.scheme
        if head_dim is None:
            divides("Attention", model_dim=model_dim, num_heads=num_heads)
            head_dim = model_dim // num_heads
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        divides("Attention", num_heads=num_heads, num_kv_heads=kv_heads)

        def project(heads):
            return nnx.LinearGeneral(
                model_dim,
                (heads, head_dim),
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                rngs=rngs,
            )

        self.query, self.key, self.value = project(num_heads), project(kv_heads), project(kv_heads)
        self.out = nnx.LinearGeneral(
            (num_heads, head_dim),
            model_dim,
            axis=(-2, -1),
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init if out_init is None else out_init,
            rngs=rngs,
        )
        if not isinstance(position, PositionEncoding):
            position = PositionEncoding(position, rngs=rngs)
        check_acts_in_attention("Attention", position.scheme)
        self.position = position
        norm = layer.qk_norm
        self.query_norm = None if norm is None else HeadNorm(norm, num_heads, head_dim)
        self.key_norm = None if norm is None else HeadNorm(norm, kv_heads, head_dim)
        self.sinks = nnx.Param(jnp.zeros((num_heads,), jnp.float32)) if layer.sinks else None
        self.deterministic = deterministic
        self.rngs = rngs.dropout.fork() if dropout_rate > 0 else None
        self.model_dim, self.num_heads = model_dim, num_heads
        self.num_kv_heads, self.head_dim = kv_heads, head_dim
        self.is_causal, self.window, self.softcap = is_causal, layer.window, layer.softcap
        self.scale, self.dropout_rate = layer.scale, dropout_rate
        self.dtype = jnp.result_type(param_dtype if dtype is None else dtype)
        self.implementation = implementation

    @overload
    def __call__(
        self, x: jax.Array, *, cache: None = None, **options: Unpack[CallOptions]
    ) -> jax.Array: ...

    @overload
    def __call__(
        self, x: jax.Array, *, cache: KVCache, **options: Unpack[CallOptions]
    ) -> tuple[jax.Array, KVCache]: ...

    def __call__(
        self,
        x: jax.Array,
        *,
        cache: KVCache | None = None,
        position: PositionEncoding | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        out_sharding: PartitionSpec | None = None,
        qkv_sharding: PartitionSpec | None = None,
        **options: Unpack[TokenOptions],
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Returns [B, T, D], and with a cache also the new cache.

        Args:
          x: [B, T, D].
          cache: keys and values of earlier tokens; see `new_cache`.
          position: an encoding to use instead of the layer's own (for layers that share
            one under `nnx.scan`).
          deterministic: whether to drop no weights. Default: as the layer is set.
          rngs: for the dropout key. Default: those given to the constructor.
          out_sharding, qkv_sharding: on explicit mesh axes, how the result [B, T, D] and q, k and
            v [B, T, heads, H] are sharded, as in `nnx.MultiHeadAttention`.
          **options: `positions`, `coordinates`, `segment_ids`, `tables`, `mask`,
            `prefix_length` and `sinks`, as in `posenc_jax.scheme_attention`.

        Raises:
          ValueError: for arguments that do not fit, and dropout without `deterministic` or rngs.
        """
        array_of_rank("Attention", "x", x, 3, "[B, T, D]")
        require(
            x.shape[-1] == self.model_dim,
            f"Attention: x must be [B, T, {self.model_dim}], got {x.shape}.",
        )
        if position is None:
            position = self.position
        elif not isinstance(position, PositionEncoding):
            raise TypeError(
                f"Attention: position must be a PositionEncoding in a call, got {position!r}."
            )
        else:
            check_acts_in_attention("Attention", position.scheme)
        dropout_key = self._dropout_key(rngs) if self.drops(deterministic) else None
        projections = self.query, self.key, self.value
        q, k, v = (project(x, out_sharding=qkv_sharding) for project in projections)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.sinks is not None:
            options.setdefault("sinks", self.sinks[...])
        out, new = scheme_attention(
            position.scheme,
            position.values(),
            q,
            k,
            v,
            x=x,
            cache=cache,
            **self.settings(self, dropout_key),
            **options,
        )
        y = self.out(out, out_sharding=out_sharding)
        return y if new is None else (y, new)

    def _dropout_key(self, rngs: nnx.Rngs | nnx.RngStream | jax.Array | None) -> jax.Array:
        """Returns the key of this call's dropout."""
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError("Attention: dropout needs rngs, in the call or the constructor.")
        stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        return stream() if isinstance(stream, nnx.RngStream) else stream


class AttentionFn(nnx.Module):
    """A scheme inside the stock `nnx.MultiHeadAttention`, as its `attention_fn`.

    A decoded query's position is read from its mask, since the layer does not give it, and
    the keys of the whole cache are transformed at each step, since the layer caches them as
    projected. `Attention` avoids both.

    >>> import posenc_jax as pe
    >>> rngs = nnx.Rngs(0)
    >>> rope = AttentionFn(pe.RoPE(head_dim=4), rngs=rngs)
    >>> layer = nnx.MultiHeadAttention(4, 16, decode=False, attention_fn=rope, rngs=rngs)
    >>> layer(jnp.ones((2, 5, 16)), is_causal=True).shape
    (2, 5, 16)
    """

    def __init__(self, position: Scheme | PositionEncoding, *, rngs: nnx.Rngs | None = None):
        """Makes the scheme's parameters, unless `position` owns them.

        Args:
          position: a scheme, or a `PositionEncoding` that several layers share.
          rngs: for the parameters of a scheme that has any.

        Raises:
          ValueError: for a scheme with parameters without `rngs`.
        """
        if not isinstance(position, PositionEncoding):
            check_scheme("AttentionFn", position)
            shapes = jax.eval_shape(position.init, jax.random.key(0))
            if rngs is None and jax.tree.leaves(shapes):
                raise ValueError(f"AttentionFn: {position!r} has parameters, so it needs rngs.")
            position = PositionEncoding(position, rngs=nnx.Rngs(0) if rngs is None else rngs)
        self.position = position

    def __call__(self, query, key, value, **options):
        """Attends as `nnx.dot_product_attention` does, with the scheme."""
        encoding = self.position
        return attention_fn(encoding.scheme, encoding.values(), query, key, value, **options)
