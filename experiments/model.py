"""A decoder-only transformer into which a position encoding is put.

Pre-RMSNorm, GELU, no biases, a head of its own, normal(0.02) weights with the outputs of
each block scaled by 1/sqrt(2 layers). The logit scale is 1/sqrt(H) for every scheme, T5
too (its published scale of 1 belongs to another initialisation). Traits of the scheme, not
its name, say whether token embeddings are multiplied by sqrt(D) first (`scale_embedding`:
fixed waves of amplitude one would drown embeddings of 0.02), and whether all layers share
its parameters (`shared_over_layers`) or each owns a set.
"""

from typing import Any

import jax
from flax import nnx

import posenc_jax as pe
import posenc_jax.nnx as pnnx
from experiments.recipe import Model

_STDDEV = 0.02


class Block(nnx.Module):
    """Attention and an MLP, each added to the stream."""

    def __init__(self, sizes: Model, position: pe.Scheme | pnnx.PositionEncoding, key: jax.Array):
        """Makes parameters from `key`; the same ones whatever the scheme."""
        rngs = nnx.Rngs(key)
        width, inner = sizes.model_dim, sizes.mlp_factor * sizes.model_dim
        weights = nnx.initializers.normal(_STDDEV)
        outputs = nnx.initializers.normal(_STDDEV / (2 * sizes.num_layers) ** 0.5)
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, inner, use_bias=False, kernel_init=weights, rngs=rngs)
        self.down = nnx.Linear(inner, width, use_bias=False, kernel_init=outputs, rngs=rngs)
        self.attention = pnnx.Attention(  # Last: a scheme draws after everything else has.
            width,
            sizes.num_heads,
            position=position,
            is_causal=True,
            scale=sizes.head_dim**-0.5,
            kernel_init=weights,
            out_init=outputs,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [B, T, D] for x [B, T, D]."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class LanguageModel(nnx.Module):
    """Tokens to logits of the next tokens."""

    def __init__(self, sizes: Model, scheme: pe.Scheme, vocab_size: int, key: jax.Array):
        """Makes parameters from `key`; all but the scheme's are the same for every scheme."""
        keys = jax.random.split(key, sizes.num_layers + 3)
        weights = nnx.initializers.normal(_STDDEV)
        self.embed = nnx.Embed(
            vocab_size, sizes.model_dim, embedding_init=weights, rngs=nnx.Rngs(keys[0])
        )
        self.head = nnx.Linear(
            sizes.model_dim,
            vocab_size,
            use_bias=False,
            kernel_init=weights,
            rngs=nnx.Rngs(keys[1]),
        )
        self.norm = nnx.RMSNorm(sizes.model_dim, rngs=nnx.Rngs(keys[1]))
        used = scheme.traits.shared_over_layers or pe.Acts.EMBEDDING in scheme.acts
        self.position = pnnx.PositionEncoding(scheme, rngs=nnx.Rngs(keys[2])) if used else None
        shared = self.position if scheme.traits.shared_over_layers else None
        in_layers = scheme if shared is None else shared
        self.blocks = nnx.List([Block(sizes, in_layers, k) for k in keys[3:]])
        self.embed_scale = sizes.model_dim**0.5 if scheme.traits.scale_embedding else 1.0

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits [B, T, V] for tokens int32 [B, T]."""
        x = self.embed(tokens) * self.embed_scale
        if self.position is not None:
            x = self.position(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def structure(sizes: Model, scheme: pe.Scheme, vocab_size: int) -> Any:
    """Returns the model's graph definition, without making parameters."""
    make = nnx.eval_shape(lambda k: LanguageModel(sizes, scheme, vocab_size, k), jax.random.key(0))
    return nnx.graphdef(make)


def initialize(sizes: Model, scheme: pe.Scheme, vocab_size: int, keys: jax.Array) -> nnx.State:
    """Returns parameters for each of the keys [seeds], leaves [seeds, ...]."""

    def one(key):
        return nnx.state(LanguageModel(sizes, scheme, vocab_size, key))

    return jax.vmap(one)(keys)


def count_parameters(params: nnx.State) -> int:
    """Returns the number of parameters of one seed, for leaves [seeds, ...]."""
    return sum(leaf.size // leaf.shape[0] for leaf in jax.tree.leaves(params))
