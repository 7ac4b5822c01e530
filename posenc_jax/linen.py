"""Position encodings and attention as Flax Linen modules, for any scheme."""

import functools
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
from flax import linen as nn

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

_kernel_init = nn.initializers.lecun_normal()


class PositionEncoding(EncodingLayer, nn.Module):
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
        check_scheme("PositionEncoding", self.scheme)
        self.learned = bool(jax.tree.leaves(jax.eval_shape(self.scheme.init, jax.random.key(0))))
        if self.learned:
            self.params = self.param("scheme", functools.partial(new_params, self.scheme))

    def values(self) -> Params:
        """Returns the parameters as arrays."""
        return self.params if self.learned else self.scheme.init(jax.random.key(0))

    # Linen sets up the methods of the class itself, not those that it inherits.
    __call__ = EncodingLayer.__call__
    tables = EncodingLayer.tables


class HeadNorm(nn.Module):
    """The norm of the queries or the keys of a layer; see `posenc_jax.QKNorm`.

    Attributes:
      settings: the norm.
    """

    settings: QKNorm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x [B, T, N, H] normalised."""
        made = self.settings.init(*x.shape[-2:])
        return self.settings({n: self.param(n, lambda _, p=p: p) for n, p in made.items()}, x)


class Attention(AttentionLayer, nn.Module):
    """Multi-head self-attention with any scheme, grouped heads, segments and a cache.

    Attributes:
      num_heads: N.
      head_dim: H.
      position: a scheme, whose parameters this layer then owns; a `LayerSpec`, which also has
        `window`, `softcap`, `scale`, `qk_norm` and `sinks`; or a `PositionEncoding` that several
        layers share.
      num_kv_heads: K, a divisor of N. Default: N.
      is_causal, window, softcap, implementation: as in `posenc_jax.attention`.
      scale: the factor on q . k. Default: the scheme's own.
      qk_norm: the norm of queries and keys before the scheme. Default: none.
      sinks: whether each head has a learned logit without a value, as in gpt-oss.
      dropout_rate: share of the attention weights that are dropped.
      deterministic: whether to drop none; the argument of a call comes first.
      use_bias, dtype, param_dtype, kernel_init: of the projections, as in `nn.DenseGeneral`.
        Parameters of the scheme are float32.
      out_init: of the output projection. Default: `kernel_init`.

    >>> import posenc_jax as pe
    >>> layer = Attention(num_heads=4, head_dim=4, position=pe.RoPE(head_dim=4), is_causal=True)
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 16)))
    >>> y.shape
    (2, 5, 16)
    """

    num_heads: int
    head_dim: int
    position: Scheme | LayerSpec | PositionEncoding = NoPE()
    num_kv_heads: int | None = None
    is_causal: bool = False
    window: Window = None
    softcap: float | None = None
    scale: float | None = None
    qk_norm: QKNorm | None = None
    sinks: bool = False
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
        cache: None = None,
        deterministic: bool | None = None,
        **options: Unpack[TokenOptions],
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        cache: KVCache,
        deterministic: bool | None = None,
        **options: Unpack[TokenOptions],
    ) -> tuple[jax.Array, KVCache]: ...

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        cache: KVCache | None = None,
        deterministic: bool | None = None,
        **options: Unpack[TokenOptions],
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Returns [B, T, D], and with a cache also the new cache.

        Args:
          x: [B, T, D].
          cache: keys and values of earlier tokens; see `new_cache`.
          deterministic: whether to drop no weights; otherwise the "dropout" key is used.
          **options: `positions`, `coordinates`, `segment_ids`, `tables`, `mask`,
            `prefix_length` and `sinks`, as in `posenc_jax.scheme_attention`.

        Raises:
          ValueError: for arguments that do not fit, and dropout without `deterministic` or key.
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

        layer = layer_spec(
            self.position, self.window, self.softcap, self.scale, self.qk_norm, self.sinks
        )
        encoding = self.position
        if not isinstance(encoding, PositionEncoding):
            encoding = PositionEncoding(layer.scheme, name="encoding")
        check_acts_in_attention("Attention", encoding.scheme)
        drop = self.drops(deterministic)
        require(
            not drop or self.has_rng("dropout"), 'Attention: dropout needs rngs={"dropout": key}.'
        )
        heads = {"query": self.num_heads, "key": kv_heads, "value": kv_heads}
        q, k, v = (
            dense(name, (n, self.head_dim), -1, self.kernel_init)(x) for name, n in heads.items()
        )
        if layer.qk_norm is not None:
            q = HeadNorm(layer.qk_norm, name="query_norm")(q)
            k = HeadNorm(layer.qk_norm, name="key_norm")(k)
        if layer.sinks:
            made = self.param("sinks", nn.initializers.zeros, (self.num_heads,), jnp.float32)
            options.setdefault("sinks", made)
        dropout_key = self.make_rng("dropout") if drop else None
        out, new = scheme_attention(
            encoding.scheme,
            encoding.values(),
            q,
            k,
            v,
            x=x,
            cache=cache,
            **self.settings(layer, dropout_key),
            **options,
        )
        out_init = self.kernel_init if self.out_init is None else self.out_init
        y = dense("out", x.shape[-1], (-2, -1), out_init)(out)
        return y if new is None else (y, new)


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
