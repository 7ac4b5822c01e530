"""A decoder-only transformer with any position encoding.

Pre-RMSNorm, GELU, no biases, an untied head, normal(0.02) weights with the outputs of each
block scaled by 1/sqrt(2 layers). Activations have `Model.dtype`, logits are float32. The logit
scale is 1/sqrt(H) for every scheme, also for T5 (its published scale of 1 belongs to another
initialisation). Traits of the scheme decide whether token embeddings are multiplied by sqrt(D)
(`scale_embedding`: fixed waves of amplitude one would dominate embeddings of 0.02), and whether
layers share its parameters (`shared_over_layers`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import posenc_jax as pe
import posenc_jax.nnx as pnnx
from experiments.settings.common import Model

Position = pe.Scheme | tuple[pe.LayerSpec, ...]
"""A scheme for all layers, or the settings of each layer."""
MASK_TOKEN = 0
"""Input of a model without causality at the tokens that it predicts."""
_STDDEV = 0.02


class ShortConv(nnx.Module):
    """A causal depthwise convolution, added to its input."""

    def __init__(self, width: int, size: int, rngs: nnx.Rngs):
        """Draws the kernel [K, D] from within 1 / sqrt(K), as PyTorch does."""
        bound = size**-0.5
        self.kernel = nnx.Param(
            jax.random.uniform(rngs.params(), (size, width), minval=-bound, maxval=bound)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [B, T, D] for x [B, T, D]; the last row of the kernel is for the same token."""
        return x + pe.short_convolution(x, self.kernel[...].astype(x.dtype))[0]


class Block(nnx.Module):
    """Attention and an MLP, each added to the stream."""

    def __init__(
        self,
        sizes: Model,
        layer: pe.LayerSpec,
        key: jax.Array,
        shared_encoding: pnnx.PositionEncoding | None = None,
    ):
        """Draws parameters from `key`, the same for every scheme.

        `shared_encoding` is the scheme with parameters for all layers, if they share them.
        """
        rngs = nnx.Rngs(key)
        width, inner = sizes.model_dim, sizes.mlp_factor * sizes.model_dim
        weights = nnx.initializers.normal(_STDDEV)
        outputs = nnx.initializers.normal(_STDDEV / (2 * sizes.num_layers) ** 0.5)
        self.norm1 = nnx.RMSNorm(width, dtype=sizes.dtype, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, dtype=sizes.dtype, rngs=rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=sizes.dtype, rngs=rngs)
        self.up = linear(width, inner, kernel_init=weights)
        self.down = linear(inner, width, kernel_init=outputs)
        self.convs = nnx.List(
            [ShortConv(width, sizes.conv_size, rngs) for _ in range(2 if sizes.conv_size else 0)]
        )
        self.attention = pnnx.Attention(  # Last: schemes draw different numbers of parameters.
            width,
            sizes.num_heads,
            position=layer,
            shared_encoding=shared_encoding,
            is_causal=sizes.is_causal,
            kernel_init=weights,
            out_kernel_init=outputs,
            dtype=sizes.dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, **tokens: Any) -> jax.Array:
        """Returns [B, T, D] for x [B, T, D]; `tokens` are options of `pnnx.Attention`."""
        y = self.norm1(x)
        y = self.convs[0](y) if self.convs else y
        return self._mlp(x + self.attention(y, **tokens))

    def _mlp(self, x: jax.Array) -> jax.Array:
        z = self.norm2(x)
        if self.convs:
            z = self.convs[1](z)
        return x + by_rows(lambda rows: self.down(jax.nn.gelu(self.up(rows))), z)


class LanguageModel(nnx.Module):
    """Tokens to logits of the next tokens; without causality, of the tokens that are masked."""

    def __init__(self, sizes: Model, position: Position, vocab_size: int, key: jax.Array):
        """Draws parameters from `key`; all but the schemes' are the same for every scheme."""
        keys = jax.random.split(key, sizes.num_layers + 3)
        weights = nnx.initializers.normal(_STDDEV)
        self.embed = nnx.Embed(
            vocab_size,
            sizes.model_dim,
            embedding_init=weights,
            dtype=sizes.dtype,
            rngs=nnx.Rngs(keys[0]),
        )
        self.head = nnx.Linear(
            sizes.model_dim,
            vocab_size,
            use_bias=False,
            kernel_init=weights,
            dtype=sizes.dtype,
            preferred_element_type=jnp.float32,
            rngs=nnx.Rngs(keys[1]),
        )
        self.norm = nnx.RMSNorm(sizes.model_dim, dtype=sizes.dtype, rngs=nnx.Rngs(keys[1]))
        layers = position if isinstance(position, tuple) else (position,)
        layers = pe.layer_pattern(sizes.num_layers, *layers)
        schemes, rngs = list(dict.fromkeys(layer.scheme for layer in layers)), nnx.Rngs(keys[2])
        encodings = {
            s: pnnx.PositionEncoding(s, rngs=rngs)
            for s in schemes
            if s.traits.shared_over_layers or pe.Acts.EMBEDDING in s.acts
        }
        self.positions = nnx.List(list(encodings.values()))

        def block(layer, key):
            scheme = layer.scheme
            if not scheme.acts_in_attention:
                layer = dataclasses.replace(layer, scheme=pe.NoPE())
            shared = encodings[scheme] if scheme.traits.shared_over_layers else None
            return Block(sizes, layer, key, shared)

        self.blocks = nnx.List(map(block, layers, keys[3:]))
        scaled = any(s.traits.scale_embedding for s in schemes)
        self.embed_scale = sizes.model_dim**0.5 if scaled else 1.0
        self.is_causal = sizes.is_causal

    def __call__(self, tokens: jax.Array, coordinates: jax.Array | None = None) -> jax.Array:
        """Returns logits [B, T, V].

        Args:
          tokens: int32 [B, T].
          coordinates: input of the scheme, [B, T] or [A, B, T]. Default: the positions.
        """
        x = self.embed(tokens) * self.embed_scale
        for encoding in self.positions:
            x = encoding(x, coordinates=coordinates)
        for block in self.blocks:
            x = block(x, coordinates=coordinates)
        return by_rows(self.head, self.norm(x))

    def inputs_and_targets(self, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns inputs and targets, int32 [B, T], of tokens and a mask of tokens to predict."""
        targets = tokens[:, 1:]
        if self.is_causal:
            return tokens[:, :-1], targets
        return jnp.where(mask[:, 1:] > 0, MASK_TOKEN, targets), targets


def by_rows(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns function(x) [B, T, F] for x [B, T, D], computed on rows [B * T, D].

    On CPU, XLA computes gradients of kernels 1.5 times as fast from rows: it transposes neither.
    """
    out = function(x.reshape(-1, x.shape[-1]))
    return out.reshape(*x.shape[:-1], out.shape[-1])


def of_scheme(params: Any) -> Any:
    """Returns a tree of booleans, true at the parameters of position encodings."""
    names = {"positions", "encoding"}
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(getattr(key, "key", None) in names for key in path), params
    )


def structure(sizes: Model, position: Position, vocab_size: int) -> Any:
    """Returns the model's graph definition, without making parameters."""
    make = nnx.eval_shape(
        lambda k: LanguageModel(sizes, position, vocab_size, k), jax.random.key(0)
    )
    return nnx.graphdef(make)


def initialize(sizes: Model, position: Position, vocab_size: int, key: jax.Array) -> nnx.State:
    """Returns parameters, drawn from a key."""
    return nnx.state(LanguageModel(sizes, position, vocab_size, key))


def count_parameters(params: nnx.State) -> int:
    """Returns the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def seed_key(seed: int, purpose: str) -> jax.Array:
    """Returns the key of a seed, different for each purpose."""
    number = {"parameters": 0, "data": 1, "test": 2}[purpose]
    return jax.random.fold_in(jax.random.key(seed), number)


def token_losses(graphdef: Any, params: nnx.State, tokens: jax.Array) -> jax.Array:
    """Returns -log p of each token after the first, nats [B, T], for tokens [B, T + 1]."""
    logits = nnx.merge(graphdef, params)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
