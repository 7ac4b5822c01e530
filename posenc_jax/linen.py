"""Position encodings and attention as Flax Linen modules, for any scheme."""

import functools
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import linen as nn

from posenc_jax.additive.none import NoPE
from posenc_jax.cache import KVCache
from posenc_jax.checks import array_of_rank, divides, require
from posenc_jax.engine.implementation import Implementation
from posenc_jax.flax_attention_fn import attention_fn, check_acts_in_attention
from posenc_jax.functional import (
    new_cache,
    new_params,
    scheme_attention,
    scheme_embedding,
    scheme_tables,
)
from posenc_jax.mask import Window
from posenc_jax.scheme import Params, Scheme

_kernel_init = nn.initializers.lecun_normal()


class PositionEncoding(nn.Module):
    """A scheme with its parameters; called, it encodes positions into token embeddings.

    Attributes:
      scheme: any scheme. Its parameters are the Linen parameter "scheme", float32.

    >>> import posenc_jax as pe
    >>> encoding = PositionEncoding(pe.LearnedAbsolute(max_length=8, model_dim=4))
    >>> y, variables = encoding.init_with_output(jax.random.key(0), jnp.zeros((1, 3, 4)))
    >>> variables["params"]["scheme"]["table"].shape
    (8, 4)
    """

    scheme: Scheme

    def setup(self):
        """Declares the parameters, if the scheme has any."""
        self.learned = bool(jax.tree.leaves(jax.eval_shape(self.scheme.init, jax.random.key(0))))
        if self.learned:
            self.params = self.param("scheme", functools.partial(new_params, self.scheme))

    def values(self) -> Params:
        """Returns the parameters as arrays."""
        return self.params if self.learned else self.scheme.init(jax.random.key(0))

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | None = None,
        coordinates: jax.Array | None = None,
        *,
        cache: KVCache | None = None,
    ) -> jax.Array:
        """Returns embeddings [B, T, D] with positions encoded, if the scheme acts there.

        Args:
          x: token embeddings [B, T, D].
          positions: integers [T] or [B, T]. Default: 0, 1, ... after the tokens in the cache.
          coordinates: what the scheme encodes. Default: the positions.
          cache: the cache of an attention layer, before it is given these tokens.
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


class Attention(nn.Module):
    """Multi-head self-attention with any scheme, grouped heads, segments and a cache.

    Attributes:
      num_heads: N.
      head_dim: H.
      position: a scheme, whose parameters this layer then owns, or a `PositionEncoding`
        that several layers share.
      num_kv_heads: K, a divisor of N. Default: N.
      is_causal, window, softcap: as in `posenc_jax.attention`.
      scale: the factor on q . k. Default: the scheme's own.
      dropout_rate: share of the attention weights that are dropped.
      deterministic: whether to drop none; the argument of a call comes first.
      use_bias: whether projections have biases.
      dtype: of the computation. Default: that of the inputs and parameters.
      param_dtype: of the projections; those of the scheme are float32.
      kernel_init: of the projections of q, k and v.
      out_init: of the output projection. Default: `kernel_init`.
      implementation: as in `posenc_jax.attention`.

    >>> import posenc_jax as pe
    >>> layer = Attention(num_heads=4, head_dim=4, position=pe.RoPE(head_dim=4), is_causal=True)
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 16)))
    >>> y.shape
    (2, 5, 16)
    """

    num_heads: int
    head_dim: int
    position: Scheme | PositionEncoding = NoPE()
    num_kv_heads: int | None = None
    is_causal: bool = False
    window: Window = None
    softcap: float | None = None
    scale: float | None = None
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: nn.initializers.Initializer = _kernel_init
    out_init: nn.initializers.Initializer | None = None
    implementation: str | Implementation | None = None

    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        coordinates: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: None = None,
        tables: Any = None,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        coordinates: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: KVCache,
        tables: Any = None,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> tuple[jax.Array, KVCache]: ...

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        coordinates: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: KVCache | None = None,
        tables: Any = None,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Returns [B, T, D], and with a cache also the new cache.

        Args:
          x: [B, T, D].
          positions: integers [T] or [B, T]. Default: 0, 1, ... after the tokens in the cache.
          coordinates: what the scheme encodes. Default: the positions.
          segment_ids: integers [T] or [B, T], below zero for padding.
          cache: keys and values of earlier tokens; see `new_cache`.
          tables: `PositionEncoding.tables` of these coordinates, computed once for all
            layers.
          mask: bool [B or 1, N or 1, T, S], true where a query may see a key.
          deterministic: whether to drop no weights; otherwise the "dropout" key is used.

        Raises:
          ValueError: if `dropout_rate` is positive and neither the call nor the layer says
            whether to drop, or there is no key; and for arguments that do not fit.
        """
        array_of_rank("Attention", "x", x, 3, "[B, T, D]")
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        divides("Attention", num_heads=self.num_heads, num_kv_heads=kv_heads)

        def dense(name, features, axis, init):
            return nn.DenseGeneral(
                features,
                axis=axis,
                use_bias=self.use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                kernel_init=init,
                name=name,
            )

        encoding = self.position
        if isinstance(encoding, Scheme):
            encoding = PositionEncoding(encoding, name="encoding")
        check_acts_in_attention("Attention", encoding.scheme)
        deterministic = self.deterministic if deterministic is None else deterministic
        if self.dropout_rate == 0:
            deterministic = True
        require(
            deterministic is not None,
            f"Attention: dropout_rate={self.dropout_rate} needs `deterministic`, in the call or "
            "as an attribute.",
        )
        drop = not deterministic
        require(
            not drop or self.has_rng("dropout"), 'Attention: dropout needs rngs={"dropout": key}.'
        )
        heads = {"query": self.num_heads, "key": kv_heads, "value": kv_heads}
        q, k, v = (
            dense(name, (n, self.head_dim), -1, self.kernel_init)(x) for name, n in heads.items()
        )
        out, new = scheme_attention(
            encoding.scheme,
            encoding.values(),
            q,
            k,
            v,
            x=x,
            positions=positions,
            coordinates=coordinates,
            segment_ids=segment_ids,
            cache=cache,
            tables=tables,
            mask=mask,
            is_causal=self.is_causal,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            dropout_rate=self.dropout_rate if drop else 0.0,
            dropout_key=self.make_rng("dropout") if drop else None,
            implementation=self.implementation,
        )
        out_init = self.kernel_init if self.out_init is None else self.out_init
        y = dense("out", x.shape[-1], (-2, -1), out_init)(out)
        return y if new is None else (y, new)

    def new_cache(
        self,
        batch: int,
        capacity: int,
        *,
        model_dim: int | None = None,
        dtype: Any = None,
        coordinates: jax.Array | jax.ShapeDtypeStruct | None = None,
        ring: bool = False,
    ) -> KVCache:
        """Returns an empty cache for this layer; see `posenc_jax.new_cache`.

        Args:
          batch: B.
          capacity: number of slots.
          model_dim: D, for schemes that read the layer's input.
          dtype: of k and v. Default: the layer's.
          coordinates: shaped like those that calls will be given, if they are.
          ring: whether to write over the oldest tokens once full.
        """
        position = self.position
        own = self.param_dtype if self.dtype is None else self.dtype
        return new_cache(
            position if isinstance(position, Scheme) else position.scheme,
            batch,
            capacity,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            model_dim=model_dim,
            dtype=own if dtype is None else dtype,
            coordinates=coordinates,
            ring=ring,
        )


class AttentionFn(nn.Module):
    """A scheme inside the stock `linen.MultiHeadDotProductAttention`, as its `attention_fn`.

    A decoded query's position is read from its mask, since the layer does not give it, and
    the keys of the whole cache are transformed at each step, since the layer caches them as
    projected. `Attention` avoids both.

    Attributes:
      scheme: any scheme whose `features` does not read the layer's input.

    >>> import posenc_jax as pe
    >>> layer = nn.MultiHeadDotProductAttention(
    ...     num_heads=4, attention_fn=AttentionFn(pe.RoPE(head_dim=4))
    ... )
    >>> x = jnp.ones((2, 5, 16))
    >>> layer.init_with_output(jax.random.key(0), x)[0].shape
    (2, 5, 16)
    """

    scheme: Scheme

    @nn.compact
    def __call__(
        self,
        query,
        key,
        value,
        mask=None,
        dropout_rng=None,
        dropout_rate=0.0,
        broadcast_dropout=True,
        deterministic=True,
        dtype=None,
        precision=None,
        module=None,
        force_fp32_for_softmax=False,
        qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
    ):
        """Attends as `linen.dot_product_attention` does, with the scheme."""
        return attention_fn(
            self.scheme,
            PositionEncoding(self.scheme, name="encoding").values(),
            query,
            key,
            value,
            mask=mask,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            broadcast_dropout=broadcast_dropout,
            deterministic=deterministic,
            dtype=dtype,
            precision=precision,
            module=module,
            force_fp32_for_softmax=force_fp32_for_softmax,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
