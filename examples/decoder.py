"""One decoder for many families, from GPT-2 to Gemma 3 and gpt-oss.

Attention follows from `pe.from_hf`, one `LayerSpec` per layer; `families.py` has the other
differences between them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import posenc_jax as pe
from posenc_jax.nnx import Attention, PositionEncoding

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Settings of a transformer.

    Attributes:
      layers: the attention of each layer.
      vocabulary, model_dim, num_heads, num_kv_heads, head_dim, mlp_dim: sizes.
      norm: "rms" or "layer".
      epsilon: of the norms.
      activation: a name in `ACTIVATIONS`.
      gated: whether the MLP multiplies by a second projection of its input.
      attention_bias, mlp_bias: whether projections have biases.
      parallel: whether attention and MLP of a layer read the same activations.
      post_norms: whether there are norms after attention and after the MLP.
      embedding_norm: whether there is a norm after the embedding.
      embedding_scale: the factor on token embeddings.
      tied: whether the embedding is the output projection, too.
      logit_softcap: of the output.
      is_causal: whether tokens see only those before them.
      experts: the number of experts and how many a token uses. Default: an MLP.
    """

    layers: tuple[pe.LayerSpec, ...]
    vocabulary: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    norm: str = "rms"
    epsilon: float = 1e-6
    activation: str = "silu"
    gated: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    parallel: bool = False
    post_norms: bool = False
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    tied: bool = False
    logit_softcap: float | None = None
    is_causal: bool = True
    experts: tuple[int, int] | None = None

    def new_norm(self, rngs: nnx.Rngs) -> nnx.Module:
        """Returns a norm over D."""
        if self.norm == "rms":
            return nnx.RMSNorm(self.model_dim, epsilon=self.epsilon, rngs=rngs)
        return nnx.LayerNorm(
            self.model_dim, epsilon=self.epsilon, use_fast_variance=False, rngs=rngs
        )

    def new_attention(self, layer: pe.LayerSpec, rngs: nnx.Rngs) -> Any:
        """Returns the attention of a layer."""
        return Attention(
            self.model_dim,
            self.num_heads,
            position=layer,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            use_bias=self.attention_bias,
            is_causal=self.is_causal,
            rngs=rngs,
        )

    def new_mlp(self, index: int, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the MLP of layer `index`, or its experts."""
        mixed = self.experts
        return MLP(self, rngs) if mixed is None else MixtureOfExperts(self, mixed, rngs)


class MLP(nnx.Module):
    """Two projections, or three with a gate."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=config.mlp_bias, rngs=rngs)
        wide, narrow = config.mlp_dim, config.model_dim
        self.up = linear(narrow, wide)
        self.gate = linear(narrow, wide) if config.gated else None
        self.down = linear(wide, narrow)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x):
        """Returns [B, T, D]."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Experts(nnx.Module):
    """The experts of gpt-oss, all of them computed for every token."""

    def __init__(self, count: int, config: ModelConfig, rngs: nnx.Rngs):
        narrow, wide, init = config.model_dim, config.mlp_dim, nnx.initializers.lecun_normal()
        self.gate_up_proj = nnx.Param(init(rngs.params(), (count, narrow, 2 * wide)))
        self.gate_up_proj_bias = nnx.Param(jnp.zeros((count, 2 * wide)))
        self.down_proj = nnx.Param(init(rngs.params(), (count, wide, narrow)))
        self.down_proj_bias = nnx.Param(jnp.zeros((count, narrow)))

    def __call__(self, x):
        """Returns [B, T, E, D] for x [B, T, D]."""
        y = jnp.einsum("btd,edf->btef", x, self.gate_up_proj[...])
        y += self.gate_up_proj_bias[None, None]
        gate, up = jnp.minimum(y[..., ::2], 7.0), jnp.clip(y[..., 1::2], -7.0, 7.0)
        y = (up + 1.0) * gate * jax.nn.sigmoid(1.702 * gate)
        y = jnp.einsum("btef,efd->bted", y, self.down_proj[...])
        return y + self.down_proj_bias[None, None]


class MixtureOfExperts(nnx.Module):
    """The experts that a router chooses for each token."""

    def __init__(self, config: ModelConfig, experts: tuple[int, int], rngs: nnx.Rngs):
        count, self.per_token = experts
        self.router = nnx.Linear(config.model_dim, count, rngs=rngs)
        self.experts = Experts(count, config, rngs)

    def __call__(self, x):
        """Returns [B, T, D]."""
        logits, chosen = jax.lax.top_k(self.router(x), self.per_token)
        y = jnp.take_along_axis(self.experts(x), chosen[..., None], 2)
        return jnp.einsum("btkd,btk->btd", y, jax.nn.softmax(logits))


class Block(nnx.Module):
    """Attention and MLP with their norms."""

    def __init__(self, config: ModelConfig, index: int, layer: pe.LayerSpec, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = config.new_norm(rngs), config.new_norm(rngs)
        self.post_attention_norm = config.new_norm(rngs) if config.post_norms else None
        self.post_mlp_norm = config.new_norm(rngs) if config.post_norms else None
        self.attention = config.new_attention(layer, rngs)
        self.mlp = config.new_mlp(index, rngs)
        self.parallel = config.parallel

    def __call__(self, x, cache=None, **tokens):
        """Returns [B, T, D] and the new cache, or None."""
        normed, new = self.attention_norm(x), None
        if cache is None:
            y = self.attention(normed, **tokens)
        else:
            y, new = self.attention(normed, cache=cache, **tokens)
        if self.post_attention_norm is not None:
            y = self.post_attention_norm(y)
        z = self.mlp(self.mlp_norm(x if self.parallel else x + y))
        if self.post_mlp_norm is not None:
            z = self.post_mlp_norm(z)
        return x + y + z, new


class Decoder(nnx.Module):
    """A language model."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(config.vocabulary, config.model_dim, rngs=rngs)
        self.embedding_norm = config.new_norm(rngs) if config.embedding_norm else None
        first = config.layers[0].scheme
        at_input = pe.Acts.EMBEDDING in first.acts
        self.position = PositionEncoding(first, rngs=rngs) if at_input else None
        layers = config.layers
        if not first.acts_in_attention:
            layers = [dataclasses.replace(layer, scheme=pe.NoPE()) for layer in layers]
        self.blocks = nnx.List(Block(config, i, layer, rngs) for i, layer in enumerate(layers))
        self.norm = config.new_norm(rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.output = None if config.tied else linear(config.model_dim, config.vocabulary)

    def new_caches(self, batch: int, capacity: int, **options: Any) -> list[pe.KVCache]:
        """Returns an empty cache for each layer."""
        return [block.attention.new_cache(batch, capacity, **options) for block in self.blocks]

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Returns token embeddings [B, T, D], before positions and norms."""
        return self.embedding(tokens) * self.config.embedding_scale

    def __call__(self, tokens, caches=None, *, inputs=None, positions=None, **options):
        """Returns logits [B, T, V], and with caches also the new caches.

        Args:
          tokens: integers [B, T].
          caches: caches of earlier tokens; see `new_caches`.
          inputs: [B, T, D] instead of `embed(tokens)`, as with images in the text.
          positions: integers [B, T]. Default: 0, 1, ... after the tokens in the caches.
          **options: `segment_ids` and `coordinates`, as in `posenc_jax.scheme_attention`.
        """
        x = self.embed(tokens) if inputs is None else inputs
        if self.position is not None:
            x = self.position(x, positions, cache=None if caches is None else caches[0])
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        new = []
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x, cache = block(x, cache, positions=positions, **options)
            new.append(cache)
        x = self.norm(x)
        logits = self.embedding.attend(x) if self.output is None else self.output(x)
        if self.config.logit_softcap is not None:
            logits = self.config.logit_softcap * jnp.tanh(logits / self.config.logit_softcap)
        return logits if caches is None else (logits, new)


def greedy(
    model: Decoder,
    tokens: jax.Array,
    mask: jax.Array,
    steps: int,
    delta: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Greedy decoding of a padded batch: one prefill, and a scan over steps.

    Args:
      model: a `Decoder`.
      tokens: prompts [B, T], padded on the left.
      mask: bool [B, T], true for tokens.
      steps: number of new tokens.
      delta: coordinates minus positions of new tokens, [B]. Default: zero.
      **options: `inputs` and `coordinates` of the prompts, as calls of a `Decoder` take them.

    Returns:
      The new tokens [B, steps], and the logits [B, T + steps - 1, V] that chose them, after those
      of the prompt.
    """
    positions, segment_ids = pe.positions.from_padding_mask(mask)
    caches = model.new_caches(tokens.shape[0], tokens.shape[1] + steps - 1)
    options |= {"positions": positions, "segment_ids": segment_ids}
    first, caches = model(tokens, caches, **options)

    def step(carry, _):
        token, caches = carry
        moved = None if delta is None else (caches[0].next_positions + delta)[:, None]
        logits, caches = model(token[:, None], caches, coordinates=moved)
        return (jnp.argmax(logits[:, 0], -1), caches), (token, logits[:, 0])

    start = jnp.argmax(first[:, -1], -1), caches
    (last, _), (new, logits) = jax.lax.scan(step, start, length=steps - 1)
    new = jnp.concatenate([new, last[None]]).T
    return new, jnp.concatenate([first, jnp.moveaxis(logits, 0, 1)], 1)
