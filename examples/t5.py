"""T5: an encoder and a decoder, each with one table of distances for all of its layers."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc_jax as pe
from examples.decoder import MLP, ModelConfig, check_tokens, choose_tokens, embed_tokens
from examples.weights import Config, State, Weights, fill
from posenc_jax.nnx import Attention, PositionEncoding


class CrossAttention(nnx.Module):
    """Attention to the encoded tokens, without positions and without a factor on q . k."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        heads = config.num_heads, config.head_dim
        project = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.query, self.key, self.value = (project(config.model_dim, heads) for _ in range(3))
        self.out = project(heads, config.model_dim, axis=(-2, -1))

    def keys_values(self, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values [B, S, N, H] of the encoded tokens [B, S, D]."""
        return self.key(memory), self.value(memory)

    def __call__(self, x, keys_values, memory_segment_ids):
        """Returns [B, T, D]."""
        out = pe.attention(
            self.query(x),
            *keys_values,
            q_segment_ids=jnp.zeros(x.shape[:2], jnp.int32),
            k_segment_ids=memory_segment_ids,
            scale=1.0,
        )
        return self.out(out)


class Block(nnx.Module):
    """Attention and MLP, and in the decoder attention to the encoder between them."""

    def __init__(
        self, config: ModelConfig, encoding: PositionEncoding, is_decoder: bool, rngs: nnx.Rngs
    ):
        self.attention_norm, self.mlp_norm = config.new_norm(rngs), config.new_norm(rngs)
        self.cross_norm = config.new_norm(rngs) if is_decoder else None
        self.attention = Attention(
            config.model_dim,
            config.num_heads,
            position=config.layers[0],
            shared_encoding=encoding,
            head_dim=config.head_dim,
            is_causal=is_decoder,
            rngs=rngs,
        )
        self.cross = CrossAttention(config, rngs) if is_decoder else None
        self.mlp = MLP(config, rngs)

    def __call__(self, x, cache=None, memory=(), **tokens):
        """Returns [B, T, D] and the new cache, or None."""
        y, new = self.attention_norm(x), None
        if cache is None:
            x = x + self.attention(y, **tokens)
        else:
            y, new = self.attention(y, cache=cache, **tokens)
            x = x + y
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.cross(self.cross_norm(x), *memory)
        return x + self.mlp(self.mlp_norm(x)), new


class Stack(nnx.Module):
    """The encoder or the decoder."""

    def __init__(self, config: ModelConfig, is_decoder: bool, rngs: nnx.Rngs):
        encoding = PositionEncoding(config.layers[0].scheme, rngs=rngs)
        self.blocks = nnx.List(Block(config, encoding, is_decoder, rngs) for _ in config.layers)
        self.norm = config.new_norm(rngs)

    def __call__(self, x, caches=None, memories=None, **tokens):
        """Returns [B, T, D] and the new caches."""
        count, new = len(self.blocks), []
        for block, cache, memory in zip(
            self.blocks, caches or [None] * count, memories or [()] * count, strict=True
        ):
            x, cache = block(x, cache, memory, **tokens)
            new.append(cache)
        return self.norm(x), new


class T5(nnx.Module):
    """An encoder and a decoder that share their token embedding."""

    def __init__(
        self, encoder: ModelConfig, decoder: ModelConfig, output_scale: float, rngs: nnx.Rngs
    ):
        self.embedding = nnx.Embed(decoder.vocabulary, decoder.model_dim, rngs=rngs)
        self.encoder, self.decoder = Stack(encoder, False, rngs), Stack(decoder, True, rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.output = None if decoder.tied else linear(decoder.model_dim, decoder.vocabulary)
        self.output_scale = output_scale

    def encode(self, tokens: jax.Array, mask: jax.Array) -> list[Any]:
        """Returns keys, values and segments of the tokens [B, S] for each decoder layer."""
        positions, segment_ids = pe.positions.from_padding_mask(mask)
        x = embed_tokens("T5", self.embedding, tokens, segment_ids)
        x, _ = self.encoder(x, positions=positions, segment_ids=segment_ids)
        cross = [block.cross for block in self.decoder.blocks if block.cross is not None]
        return [(attention.keys_values(x), segment_ids) for attention in cross]

    def new_caches(self, batch: int, capacity: int) -> list[pe.KVCache]:
        """Returns an empty cache for each decoder layer."""
        return [block.attention.new_cache(batch, capacity) for block in self.decoder.blocks]

    def __call__(self, tokens, memories, caches=None):
        """Returns logits [B, T, V] after the tokens in the caches, and with caches the new ones."""
        x, new = self.decoder(embed_tokens("T5", self.embedding, tokens), caches, memories)
        x = x * self.output_scale
        logits = self.embedding.attend(x) if self.output is None else self.output(x)
        return logits if caches is None else (logits, new)


def greedy(model: T5, tokens: jax.Array, mask: jax.Array, steps: int, start: int = 0):
    """Greedy decoding.

    Args:
      model: a `T5`.
      tokens: input of the encoder [B, S], padded on either side.
      mask: bool [B, S], true for tokens.
      steps: number of new tokens.
      start: the token before the first.

    Returns:
      The new tokens [B, steps], and the logits [B, steps, V] that chose them. Tokens are -1 from
      where the logits of a row are NaN; see `embed_tokens`.

    Raises:
      ValueError: for tokens outside the vocabulary.
    """
    check_tokens("greedy", "start", start, model.embedding.num_embeddings)
    memories = model.encode(tokens, mask)
    caches = model.new_caches(tokens.shape[0], steps)

    def step(carry, _):
        token, caches = carry
        logits, caches = model(token[:, None], memories, caches)
        token = choose_tokens(logits[:, 0])
        return (token, caches), (token, logits[:, 0])

    first = jnp.full(tokens.shape[:1], start, jnp.int32)
    _, (new, logits) = jax.lax.scan(step, (first, caches), length=steps)
    return new.T, jnp.moveaxis(logits, 0, 1)


_NAMES = {
    "embedding": "shared",
    "output": "lm_head",
    "norm": "final_layer_norm",
    "blocks": "block",
    "attention_norm": "layer.0.layer_norm",
    "attention": "layer.0.SelfAttention",
    "encoding": "relative_attention_bias",
    "cross_norm": "layer.1.layer_norm",
    "cross": "layer.1.EncDecAttention",
    "query": "q",
    "key": "k",
    "value": "v",
    "out": "o",
    "down": "wo",
}


_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_COPIES = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"


class T5Weights(Weights):
    """A state dict of T5 by paths of our modules."""

    def __init__(self, state, num_heads: int, gated: bool):
        super().__init__(State(state), _NAMES, num_heads, num_heads)
        self.gated = gated

    def name(self, *path):
        """The name of a module; layer 1 of a decoder's block is attention to the encoder."""
        names = {"mlp_norm": f"layer.{1 + (path[0] == 'decoder')}.layer_norm"}
        names["mlp"] = f"layer.{1 + (path[0] == 'decoder')}.DenseReluDense"
        names |= {"gate": "wi_0", "up": "wi_1" if self.gated else "wi"}
        return super().name(*(names.get(part, part) for part in path))

    def __call__(self, path):
        """The array for a parameter; tables have one row per distance there."""
        return super().__call__(path).T if path[-1] == "table" else super().__call__(path)


def load(config: Mapping[str, Any], state: Mapping[str, Any]) -> T5:
    """The model of a Hugging Face config, with the weights of a state dict.

    Args:
      config: the dict of a config of T5.
      state: {name: array} of the parameters. The first files of T5 have copies of the embedding,
        and a table of attention to the encoder, which transformers ignores too (its #8518).

    Raises:
      ValueError: for another type of model, missing keys, and weights that are missing, of
        another shape, or left, and copies of the embedding that differ from it.
    """
    config = Config(config, "t5")
    tied = config.get("tie_word_embeddings") is not False
    state = {name: x for name, x in state.items() if name != _UNUSED}
    embedding = State(state).take("shared.weight")
    for name in _COPIES if tied else _COPIES[:2]:
        if name in state and not np.array_equal(state.pop(name), embedding):
            raise ValueError(f"load: {name!r} must be equal to 'shared.weight'.")
    *gate, activation = config.get("feed_forward_proj", "relu").split("-", 1)
    encoder = ModelConfig(
        layers=pe.from_hf(config, decoder=False),
        vocabulary=config["vocab_size"],
        model_dim=config["d_model"],
        num_heads=config["num_heads"],
        num_kv_heads=config["num_heads"],
        head_dim=config["d_kv"],
        mlp_dim=config["d_ff"],
        epsilon=config["layer_norm_epsilon"],
        activation="gelu_new" if gate and activation == "gelu" else activation,
        gated=bool(gate),
        tied=tied,
    )
    decoder = dataclasses.replace(encoder, layers=pe.from_hf(config, decoder=True))
    scale = encoder.model_dim**-0.5 if config.get("scale_decoder_outputs", tied) else 1.0
    weights = T5Weights(state, encoder.num_heads, bool(gate))
    return fill(lambda rngs: T5(encoder, decoder, scale, rngs), weights)
