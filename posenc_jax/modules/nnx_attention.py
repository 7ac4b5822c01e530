"""Attention as a Flax NNX module."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as _promote_dtype
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from posenc_jax.cache.kv_cache import KVCache
from posenc_jax.checks import require
from posenc_jax.engine.mask import Window
from posenc_jax.engine.problem import Implementations
from posenc_jax.functional.attention import self_attention
from posenc_jax.functional.cross_attention import cross_attention
from posenc_jax.functional.new_cache import CacheOptions
from posenc_jax.functional.pipeline import Pipeline, Projections
from posenc_jax.modules.attention_fn import check_acts_in_attention, with_heads
from posenc_jax.modules.nnx_encoding import HeadNorm, PositionEncoding, metadata_of
from posenc_jax.modules.shared import (
    KERNELS,
    AttentionLayer,
    AxisNames,
    CallOptions,
    check_axis_names,
    check_use,
    has_bias,
    init_of_projection,
    layer_spec,
    scheme_of,
    sinks_of,
)
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.layer_spec import LayerSpec, Sinks
from posenc_jax.schemes.scheme import Scheme, check_direction, check_sizes

_kernel_init = nnx.initializers.lecun_normal()
_Inits = nnx.Initializer | Mapping[str, nnx.Initializer]


class NNXCallOptions(CallOptions, total=False):
    """Arguments of a call of `Attention`, except the inputs and the cache."""

    shared_encoding: PositionEncoding | None
    decode: bool | None
    rngs: nnx.Rngs | nnx.RngStream | jax.Array | None


class Attention(AttentionLayer, nnx.Module):
    """Multi-head attention with any scheme, grouped heads, segments and a cache.

    >>> import posenc_jax as pe
    >>> layer = Attention(16, 4, position=pe.RoPE(head_dim=4), is_causal=True, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 16))).shape
    (2, 5, 16)
    >>> y, cache = layer(jnp.ones((2, 5, 16)), cache=layer.new_cache(2, capacity=8))
    >>> y, cache = layer(jnp.ones((2, 1, 16)), cache=cache)  # The sixth token.

    Calls read these attributes, so that they may be assigned. Others cannot, or without effect.

    Attributes:
      encoding: the `PositionEncoding`.
      window, chunk_size, scale, softcap: as in a `LayerSpec`.
      is_causal, dropout_rate, deterministic, decode, implementation: as in the constructor.
      settings: a `LayerSpec` of these, with the scheme of the constructor; read-only.
      position: the scheme of `encoding`; read-only.
    """

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        *,
        position: Scheme | LayerSpec | None = None,
        shared_encoding: PositionEncoding | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        in_kv_features: int | None = None,
        is_causal: bool = False,
        window: Window = None,
        softcap: float | None = None,
        scale: float | None = None,
        qk_norm: QKNorm | None = None,
        sinks: Sinks = False,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        decode: bool | None = None,
        use_bias: bool | Mapping[str, bool] = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        dot_general: Any = jax.lax.dot_general,
        promote_dtype: Any = _promote_dtype,
        kernel_init: _Inits = _kernel_init,
        out_kernel_init: nnx.Initializer | None = None,
        bias_init: _Inits = nnx.initializers.zeros,
        out_bias_init: nnx.Initializer | None = None,
        axis_names: AxisNames | None = None,
        implementation: Implementations = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections, and the parameters of the scheme unless layers share them.

        Args:
          model_dim: the model dim, D.
          num_heads: the number of query heads, N.
          position: a scheme; or a `LayerSpec`, which also has `window`, `chunk_size`, `softcap`,
            `scale`, `qk_norm` and `sinks`. Default: the scheme of `shared_encoding`, or `NoPE`.
          shared_encoding: parameters of the scheme that layers share. Default: the layer's own.
          num_kv_heads: K, a divisor of N. Default: N.
          head_dim: the head dim, H. Default: D / N.
          in_kv_features: width of `inputs_k` and `inputs_v`. Default: D.
          is_causal, window, softcap, implementation: as in `posenc_jax.attention`.
          scale: the factor on q . k. Default: 1/sqrt(H).
          qk_norm: the norm of queries and keys. Default: none.
          sinks: whether each head has a logit without a value: True, a learned one (gpt-oss), or
            "projected", one that is projected from the input of each query (Inkling-2).
          dropout_rate: share of the attention weights that are dropped.
          deterministic: whether to drop no weights, as in `nnx.MultiHeadAttention`; `train()` and
            `eval()` set it, and the argument of a call overrides it.
          decode: whether calls use and update the cache that `init_cache` makes, as in
            `nnx.MultiHeadAttention`; the argument of a call overrides it. Default: no.
          use_bias: whether the projections have biases: a bool, or a mapping from "query", "key",
            "value" and "out" to bools.
          dtype, param_dtype, precision, dot_general, promote_dtype: of the projections, as in
            `nnx.LinearGeneral`. Parameters of the scheme are float32, and so is attention inside.
          kernel_init, bias_init: initialiser of the projections, or a mapping from "query", "key"
            and "value" to initialisers.
          out_kernel_init, out_bias_init: of the output projection. Default: `kernel_init` and
            `bias_init`, unless they are mappings.
          axis_names: names of the axes of all parameters, from "model_dim", "num_heads",
            "num_kv_heads" and "head_dim" to a logical name, or an axis of the mesh. They become
            `out_sharding` of each `nnx.Param`, which needs a mesh, as with `nnx.with_partitioning`.
            Names that an initialiser sets take precedence.
          rngs: for the keys of parameters, and of dropout in calls without `rngs`.

        Raises:
          ValueError: for sizes that do not divide, a scheme that acts on the token embedding
            alone, one for causal attention (T5 without `bidirectional`, CoPE, DualChunk, Inkling,
            PaTH, StickBreaking, XPos) without `is_causal`, and a setting that the `LayerSpec` has
            too.
        """
        settings = dict(window=window, softcap=softcap, scale=scale, qk_norm=qk_norm, sinks=sinks)
        spec = layer_spec("Attention", position, shared_encoding, **settings)
        self._spec = spec
        self.window, self.chunk_size = spec.window, spec.chunk_size
        # An array would be a part of the state.
        self.scale, self.softcap = (x and float(x) for x in (spec.scale, spec.softcap))
        check_axis_names("Attention", axis_names)
        self.model_dim, self.num_heads, self.head_dim = model_dim, num_heads, head_dim
        self.head_dim = head_dim = self._size_of_heads(model_dim)
        self.in_kv_features = model_dim if in_kv_features is None else in_kv_features
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        heads = self._heads()

        def project(name, features, out_features, axis, kernel_init, bias_init):
            sizes = KERNELS[name]
            return nnx.LinearGeneral(
                features,
                out_features,
                axis=axis,
                use_bias=has_bias(use_bias, name),
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                dot_general=dot_general,
                promote_dtype=promote_dtype,
                kernel_init=init_of_projection("kernel_init", kernel_init, name, _kernel_init),
                bias_init=init_of_projection("bias_init", bias_init, name, nnx.initializers.zeros),
                kernel_metadata=metadata_of(axis_names, sizes),
                bias_metadata=metadata_of(axis_names, sizes[1 if name != "out" else 2 :]),
                rngs=rngs,
            )

        width = {"query": model_dim, "key": self.in_kv_features, "value": self.in_kv_features}
        self.query, self.key, self.value = (
            project(name, width[name], (n, head_dim), -1, kernel_init, bias_init)
            for name, n in heads.items()
        )
        self.out = project(
            "out",
            (num_heads, head_dim),
            model_dim,
            (-2, -1),
            kernel_init if out_kernel_init is None else out_kernel_init,
            bias_init if out_bias_init is None else out_bias_init,
        )
        scheme = spec.scheme
        check_acts_in_attention("Attention", scheme)
        check_use(scheme, spec, is_causal)
        kv_heads = {"num_kv_heads": self.num_kv_heads, "head_dim": head_dim}
        check_sizes("Attention", scheme, num_heads=num_heads, model_dim=model_dim, **kv_heads)
        if shared_encoding is None:
            shared_encoding = PositionEncoding(scheme, axis_names=axis_names, rngs=rngs)
        self.encoding = shared_encoding

        def norm(name):
            sizes, qk_norm = KERNELS[name][1:], spec.qk_norm
            return qk_norm and HeadNorm(qk_norm, heads[name], head_dim, sizes, axis_names)

        self.query_norm, self.key_norm = norm("query"), norm("key")
        logits, sizes = jnp.zeros((num_heads,), jnp.float32), ("num_heads",)
        if spec.sinks == "projected":
            init = init_of_projection("kernel_init", kernel_init, "sinks", _kernel_init)
            logits = init(rngs.params(), (model_dim, num_heads), jnp.float32)
            sizes = ("model_dim", *sizes)
        param = nnx.Param(logits, **metadata_of(axis_names, sizes))
        self.sinks = param if spec.sinks else None
        self.deterministic, self.decode = deterministic, decode
        self.kv_cache: nnx.Cache[KVCache] | None = nnx.data(None)
        self.rngs = rngs.dropout.fork() if dropout_rate > 0 else None
        self.is_causal, self.dropout_rate = is_causal, dropout_rate
        self._drops(True)  # Raises for a rate outside [0, 1).
        self._dtype = jnp.result_type(param_dtype if dtype is None else dtype)
        self.implementation = implementation

    def _settings(self) -> LayerSpec:
        """Returns the settings as assigned, with the scheme of the constructor."""
        names = "window", "chunk_size", "scale", "softcap"
        return dataclasses.replace(self._spec, **{name: getattr(self, name) for name in names})

    settings = property(_settings)
    dtype = property(lambda self: self._dtype)
    qk_norm = property(lambda self: self._spec.qk_norm)
    shared_encoding = property(doc="An argument only. Assign `encoding` to share parameters later.")
    position = property(lambda self: self.encoding.scheme)

    @overload
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        cache: None = None,
        **options: Unpack[NNXCallOptions],
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        cache: KVCache,
        **options: Unpack[NNXCallOptions],
    ) -> tuple[jax.Array, KVCache]: ...

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        cache: KVCache | None = None,
        shared_encoding: PositionEncoding | None = None,
        deterministic: bool | None = None,
        decode: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        out_sharding: PartitionSpec | None = None,
        qkv_sharding: PartitionSpec | None = None,
        kv_sharding: PartitionSpec | None = None,
        **options: Any,
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Returns [B, T, D], and with a cache also the new cache.

        Args:
          inputs_q: [B, T, D].
          inputs_k, inputs_v: [B, S, in_kv_features], for attention to another sequence; see
            `posenc_jax.scheme_cross_attention`. Default: `inputs_q`, and `inputs_k`.
          cache: keys and values of earlier tokens; see `new_cache`.
          shared_encoding: an encoding that replaces the layer's (for layers that share one under
            `nnx.scan`).
          deterministic: whether to drop no weights. Default: the setting of the layer.
          decode: whether to use and update the cache of `init_cache`. Default: the setting of the
            layer.
          rngs: for the dropout key. Default: `rngs` of the constructor.
          out_sharding, qkv_sharding: on explicit mesh axes, how the result [B, T, D] and q, k and
            v [B, T, heads, H] are sharded, as in `nnx.MultiHeadAttention`.
          kv_sharding: of k and v, where fewer devices share their heads. Default: `qkv_sharding`.
          **options: `positions`, `coordinates`, `segment_ids`, `contiguous`, `tables`, `mask`,
            `prefix_length`, `visible_until` and `sinks`, as in `posenc_jax.scheme_attention`; with
            `inputs_k` also `k_positions`, `k_coordinates`, `k_segment_ids` and `k_visible_until`.

        Raises:
          ValueError: for arguments that do not fit, dropout without `deterministic` or rngs, and
            decoding without a cache.
        """
        inputs = self._inputs(inputs_q, inputs_k, inputs_v)
        for name, x in zip(("query", "key", "value"), inputs, strict=True):
            width = self.model_dim if name == "query" else self.in_kv_features
            require(
                x.shape[-1] == width,
                f"Attention: the {name} projection reads {width} features, got {x.shape}.",
            )
        encoding = self.encoding if shared_encoding is None else shared_encoding
        scheme = scheme_of("Attention", encoding)
        check_acts_in_attention("Attention", scheme)
        check_direction("Attention", scheme, self.is_causal, self.window)
        dataclasses.replace(self._settings(), scheme=scheme)  # Raises if they do not go together.
        stored = None
        if self.decode if decode is None else decode:
            require(cache is None, "Attention: decode=True has its own cache; give no cache=.")
            stored = self.kv_cache
            if stored is None:
                raise ValueError("Attention: decode=True needs a cache; call init_cache first.")
            cache = stored.get_value()
        call = self._attention_call(
            options,
            NNXCallOptions.__annotations__,
            inputs_q.shape[:2],
            to_itself=inputs_k is None,
            sinks=None if self.sinks is None else sinks_of(self.sinks[...], inputs_q),
            cache=cache,
            dropout_key=self._dropout_key(rngs) if self._drops(deterministic) else None,
        )

        def project(name, x, norm, sharding):
            y = getattr(self, name)(x, out_sharding=sharding)
            # The names that MaxText's policies of rematerialisation use.
            return checkpoint_name(y if norm is None else norm(y), f"{name}_proj")

        norms = None if self.query_norm is None else (self.query_norm, self.key_norm)
        (q_norm, k_norm), norms = self._norms_around(norms)
        kv_sharding = qkv_sharding if kv_sharding is None else kv_sharding
        tokens = Projections(
            q=project("query", inputs[0], q_norm, qkv_sharding),
            k=project("key", inputs[1], k_norm, kv_sharding),
            v=project("value", inputs[2], None, kv_sharding),
            x=inputs_q,
            tables=options.get("tables"),
        )
        pipeline, new = Pipeline(encoding.scheme, encoding.values(), norms), None
        if inputs_k is None:
            out, new = self_attention(pipeline, tokens, call, cache)
        else:
            out = cross_attention(pipeline, tokens, inputs_k, call)
        out = with_heads("Attention", encoding.scheme, out, self.num_heads)
        out = self.out(checkpoint_name(out, "context"), out_sharding=out_sharding)
        out = checkpoint_name(out, "out_proj")
        if stored is not None and new is not None:
            stored.set_value(new)
            return out
        return out if new is None else (out, new)

    def init_cache(
        self, input_shape: tuple[int, ...], dtype: Any = None, **options: Unpack[CacheOptions]
    ) -> None:
        """Makes the cache for `decode=True`, as in `nnx.MultiHeadAttention`.

        It is `layer.kv_cache`, an `nnx.Cache` of a `KVCache`; calls take any number of tokens.

        Args:
          input_shape: [B, S, ...], for up to S tokens in each row.
          dtype: of k and v. Default: the layer's.
          **options: as in `new_cache`.
        """
        require(
            len(input_shape) > 1,
            f"Attention.init_cache: input_shape must be (B, S, ...), got {input_shape}.",
        )
        batch, capacity = input_shape[:2]
        self.kv_cache = nnx.Cache(self.new_cache(batch, capacity, dtype=dtype, **options))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | None = None,
        max_length: int | None = None,
    ) -> None:
        """Sets modes for `nnx.view`; sizes make a cache, as in Flax's attention."""
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if batch_size is not None and max_length is not None:
            self.init_cache((batch_size, max_length))

    def _dropout_key(self, rngs: nnx.Rngs | nnx.RngStream | jax.Array | None) -> jax.Array:
        """Returns the key of this call's dropout."""
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError("Attention: dropout needs rngs, in the call or the constructor.")
        stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        return stream() if isinstance(stream, nnx.RngStream) else stream
