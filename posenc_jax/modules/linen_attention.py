"""Attention as a Flax Linen module."""

import functools
from collections.abc import Mapping
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype as _promote_dtype
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from posenc_jax.cache.kv_cache import KVCache
from posenc_jax.checks import require
from posenc_jax.engine.mask import Window
from posenc_jax.engine.problem import Implementations
from posenc_jax.functional.attention import self_attention
from posenc_jax.functional.cross_attention import cross_attention
from posenc_jax.functional.pipeline import Pipeline, Projections
from posenc_jax.modules.attention_fn import check_acts_in_attention, with_heads
from posenc_jax.modules.linen_encoding import HeadNorm, PositionEncoding, named
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
    sinks_of,
)
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.layer_spec import LayerSpec, Sinks
from posenc_jax.schemes.scheme import Scheme, check_sizes

_kernel_init = nn.initializers.lecun_normal()
_Init = nn.initializers.Initializer


class Attention(AttentionLayer, nn.Module):
    """Multi-head attention with any scheme, grouped heads, segments and a cache.

    Parameters have the same names as in `posenc_jax.nnx.Attention`.

    Attributes:
      num_heads: the number of query heads, N.
      head_dim: the head dim, H. Default: D / N.
      position: a scheme; or a `LayerSpec`, which also has `window`, `chunk_size`, `softcap`,
        `scale`, `qk_norm` and `sinks`. Default: the scheme of `shared_encoding`, or `NoPE`.
      shared_encoding: parameters of the scheme that layers share, in a loop over them: `nn.scan`
        scans its table too. Default: the layer's own.
      num_kv_heads: K, a divisor of N. Default: N.
      is_causal, window, softcap, implementation: as in `posenc_jax.attention`.
      scale: the factor on q . k. Default: 1/sqrt(H).
      qk_norm: the norm of queries and keys. Default: none.
      sinks: whether each head has a logit without a value: True, a learned one (gpt-oss), or
        "projected", one that is projected from the input of each query (Inkling-2).
      dropout_rate: share of the attention weights that are dropped.
      deterministic: whether to drop no weights; the argument of a call overrides it.
      decode: whether calls use and update a `KVCache` in the collection "cache", as in
        `nn.MultiHeadDotProductAttention`. The length of the input of `init` is its capacity; calls
        take any number of tokens. It may be replaced by a cache of `new_cache`.
      use_bias: whether the projections have biases: a bool, or a mapping from "query", "key",
        "value" and "out" to bools.
      dtype, param_dtype, precision, dot_general, promote_dtype: of the projections, as in
        `nn.DenseGeneral`. Parameters of the scheme are float32, and so is attention inside.
      kernel_init, bias_init: initialiser of the projections, or a mapping from "query", "key" and
        "value" to initialisers.
      out_kernel_init, out_bias_init: of the output projection. Default: `kernel_init` and
        `bias_init`, unless they are mappings.
      axis_names: logical names of the axes of all parameters, from "model_dim", "num_heads",
        "num_kv_heads" and "head_dim", as `nn.with_logical_partitioning` gives them. Names that an
        initialiser sets take precedence.

    >>> import posenc_jax as pe
    >>> layer = Attention(num_heads=4, head_dim=4, position=pe.RoPE(head_dim=4), is_causal=True)
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 16)))
    >>> y.shape
    (2, 5, 16)
    """

    num_heads: int
    head_dim: int | None = None
    position: Scheme | LayerSpec | None = None
    num_kv_heads: int | None = None
    is_causal: bool = False
    window: Window = None
    softcap: float | None = None
    scale: float | None = None
    qk_norm: QKNorm | None = None
    sinks: Sinks = False
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    decode: bool = False
    use_bias: bool | Mapping[str, bool] = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    dot_general: Any = None
    promote_dtype: Any = _promote_dtype
    kernel_init: _Init | Mapping[str, _Init] = _kernel_init
    out_kernel_init: _Init | None = None
    bias_init: _Init | Mapping[str, _Init] = nn.initializers.zeros
    out_bias_init: _Init | None = None
    axis_names: AxisNames | None = None
    implementation: Implementations = None
    shared_encoding: PositionEncoding | None = None

    def __post_init__(self):
        spec = self._settings()
        check_use(spec.scheme, spec, self.is_causal)
        super().__post_init__()

    @nn.nowrap  # It is called before the module is bound.
    def _settings(self) -> LayerSpec:
        """Returns the settings that a `LayerSpec` has."""
        settings = {n: getattr(self, n) for n in ("window", "softcap", "scale", "qk_norm", "sinks")}
        return layer_spec("Attention", self.position, self.shared_encoding, **settings)

    @overload
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        cache: None = None,
        **options: Unpack[CallOptions],
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        cache: KVCache,
        **options: Unpack[CallOptions],
    ) -> tuple[jax.Array, KVCache]: ...

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        cache: KVCache | None = None,
        deterministic: bool | None = None,
        out_sharding: PartitionSpec | None = None,
        qkv_sharding: PartitionSpec | None = None,
        kv_sharding: PartitionSpec | None = None,
        **options: Any,
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Returns [B, T, D], and with a cache also the new cache.

        Args:
          inputs_q: [B, T, D].
          inputs_k, inputs_v: [B, S, any], for attention to another sequence; see
            `posenc_jax.scheme_cross_attention`. Default: `inputs_q`, and `inputs_k`.
          cache: keys and values of earlier tokens; see `new_cache`.
          deterministic: whether to drop no weights; if not, the "dropout" key is used, without
            which Flax raises `InvalidRngError`.
          out_sharding, qkv_sharding: on explicit mesh axes, how the result [B, T, D] and q, k and
            v [B, T, heads, H] are sharded.
          kv_sharding: of k and v, where fewer devices share their heads. Default: `qkv_sharding`.
          **options: `positions`, `coordinates`, `segment_ids`, `contiguous`, `tables`, `mask`,
            `prefix_length`, `visible_until` and `sinks`, as in `posenc_jax.scheme_attention`; with
            `inputs_k` also `k_positions`, `k_coordinates`, `k_segment_ids` and `k_visible_until`.

        Raises:
          ValueError: for arguments that do not fit, and dropout without `deterministic`.
        """
        inputs = self._inputs(inputs_q, inputs_k, inputs_v)
        heads, spec, model_dim = self._heads(), self._settings(), inputs_q.shape[-1]
        head_dim = self._size_of_heads(model_dim)
        check_axis_names("Attention", self.axis_names)
        dot_general = jax.lax.dot_general if self.dot_general is None else self.dot_general

        def dense(name, features, axis, kernel_init, bias_init, sharding):
            kernel_init = init_of_projection("kernel_init", kernel_init, name, _kernel_init)
            bias_init = init_of_projection("bias_init", bias_init, name, nn.initializers.zeros)
            sizes = KERNELS[name]
            return nn.DenseGeneral(
                features,
                axis=axis,
                use_bias=has_bias(self.use_bias, name),
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                precision=self.precision,
                promote_dtype=self.promote_dtype,
                kernel_init=named(kernel_init, self.axis_names, sizes),
                bias_init=named(bias_init, self.axis_names, sizes[1 if name != "out" else 2 :]),
                dot_general=dot_general
                if sharding is None
                else functools.partial(dot_general, out_sharding=sharding),
                name=name,
            )

        def project(name, x, norm, sharding):
            features = heads[name], head_dim
            y = dense(name, features, -1, self.kernel_init, self.bias_init, sharding)(x)
            # The names that MaxText's policies of rematerialisation use.
            return checkpoint_name(y if norm is None else norm(y), f"{name}_proj")

        check_acts_in_attention("Attention", spec.scheme)
        sizes = {"num_kv_heads": heads["key"], "model_dim": model_dim}
        check_sizes("Attention", spec.scheme, num_heads=self.num_heads, head_dim=head_dim, **sizes)
        encoding = self.shared_encoding
        if encoding is None:
            encoding = PositionEncoding(spec.scheme, self.axis_names, name="encoding")
        drop = self._drops(deterministic)
        norms = sinks = variable = new = None
        if spec.qk_norm is not None:
            norms = (
                HeadNorm(spec.qk_norm, KERNELS["query"][1:], self.axis_names, name="query_norm"),
                HeadNorm(spec.qk_norm, KERNELS["key"][1:], self.axis_names, name="key_norm"),
            )
        (q_norm, k_norm), norms = self._norms_around(norms)
        kv_sharding = qkv_sharding if kv_sharding is None else kv_sharding
        tokens = Projections(
            q=project("query", inputs[0], q_norm, qkv_sharding),
            k=project("key", inputs[1], k_norm, kv_sharding),
            v=project("value", inputs[2], None, kv_sharding),
            x=inputs_q,
            tables=options.get("tables"),
        )
        if spec.sinks:
            init, sizes, shape = nn.initializers.zeros, ("num_heads",), (self.num_heads,)
            if spec.sinks == "projected":
                init = init_of_projection("kernel_init", self.kernel_init, "sinks", _kernel_init)
                sizes, shape = ("model_dim", *sizes), (model_dim, *shape)
            init = named(init, self.axis_names, sizes)
            sinks = sinks_of(self.param("sinks", init, shape, jnp.float32), inputs_q)
        if self.decode:
            require(cache is None, "Attention: decode=True has its own cache; give no cache=.")
            variable, cache = self._stored_cache(
                inputs_q,
                shared_encoding=encoding,
                dtype=tokens.k.dtype,
                coordinates=options.get("coordinates"),
                visible_until=options.get("visible_until") is not None,
                qkv_sharding=kv_sharding,
            )
        call = self._attention_call(
            options,
            CallOptions.__annotations__,
            inputs_q.shape[:2],
            to_itself=inputs_k is None,
            sinks=sinks,
            cache=cache,
            dropout_key=self.make_rng("dropout") if drop else None,
        )
        pipeline = Pipeline(encoding.scheme, encoding.values(), norms)
        if inputs_k is None:
            out, new = self_attention(pipeline, tokens, call, cache)
        else:
            out = cross_attention(pipeline, tokens, inputs_k, call)
        out = with_heads("Attention", encoding.scheme, out, self.num_heads)
        kernel_init = self.kernel_init if self.out_kernel_init is None else self.out_kernel_init
        bias_init = self.bias_init if self.out_bias_init is None else self.out_bias_init
        project_out = dense("out", model_dim, (-2, -1), kernel_init, bias_init, out_sharding)
        out = checkpoint_name(project_out(checkpoint_name(out, "context")), "out_proj")
        if variable is not None and new is not None:
            variable.value = new
            return out
        return out if new is None else (out, new)

    def _stored_cache(self, x: jax.Array, **options: Any) -> tuple[nn.Variable, KVCache | None]:
        """Returns the variable of the cache, and the cache unless the variable is new."""
        batch, length, width = x.shape
        new = not self.has_variable("cache", "kv_cache")
        empty = functools.partial(self.new_cache, batch, length, model_dim=width, **options)
        variable = self.variable("cache", "kv_cache", empty)
        require(
            not new or self.is_initializing(),
            "Attention: decode=True needs the collection 'cache' that init returns, and apply was "
            "given none.",
        )
        return variable, None if new else variable.value
