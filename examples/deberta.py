"""DeBERTa-v2 and v3: an encoder whose table of distances every layer projects with its own weights.

The parameters of the position encoding are computed in each call, so the layer calls
`pe.scheme_attention` instead of having an `Attention`.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import posenc_jax as pe
from examples.decoder import ACTIVATIONS, ModelConfig, embed_tokens
from examples.weights import Config, State, Weights, fill


class DisentangledAttention(nnx.Module):
    """Attention with terms by content and distance."""

    def __init__(self, config: ModelConfig, layer: pe.LayerSpec, rngs: nnx.Rngs):
        heads = config.num_heads, config.head_dim
        project = functools.partial(nnx.LinearGeneral, rngs=rngs)
        self.query, self.key, self.value = (project(config.model_dim, heads) for _ in range(3))
        self.out = project(heads, config.model_dim, axis=(-2, -1))
        assert isinstance(layer.scheme, pe.DeBERTa), layer.scheme
        self.scheme, self.scale = layer.scheme, layer.scale

    def __call__(self, x, table, **tokens):
        """Returns [B, T, D].

        Args:
          x: [B, T, D].
          table: a vector for each distance, [2 span, D].
          **tokens: `positions` and `segment_ids`.
        """
        params = {}
        if self.scheme.content_to_position:
            params["keys"] = self.key(table)
        if self.scheme.position_to_content:
            params["queries"] = self.query(table)
        q, k, v = self.query(x), self.key(x), self.value(x)
        out, _ = pe.scheme_attention(self.scheme, params, q, k, v, scale=self.scale, **tokens)
        return self.out(out)


class Block(nnx.Module):
    """Attention and MLP, each followed by a norm of the sum."""

    def __init__(self, config: ModelConfig, layer: pe.LayerSpec, rngs: nnx.Rngs):
        self.attention = DisentangledAttention(config, layer, rngs)
        self.attention_norm, self.mlp_norm = config.new_norm(rngs), config.new_norm(rngs)
        self.up = nnx.Linear(config.model_dim, config.mlp_dim, rngs=rngs)
        self.down = nnx.Linear(config.mlp_dim, config.model_dim, rngs=rngs)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x, table, **tokens):
        """Returns [B, T, D]."""
        x = self.attention_norm(x + self.attention(x, table, **tokens))
        return self.mlp_norm(x + self.down(self.activation(self.up(x))))


class DeBERTa(nnx.Module):
    """A masked language model."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        scheme = config.layers[0].scheme
        assert isinstance(scheme, pe.DeBERTa), scheme
        self.embedding = nnx.Embed(config.vocabulary, config.model_dim, rngs=rngs)
        self.distances = nnx.Embed(2 * scheme.span, config.model_dim, rngs=rngs)
        self.embedding_norm, self.distance_norm = config.new_norm(rngs), config.new_norm(rngs)
        self.blocks = nnx.List(Block(config, layer, rngs) for layer in config.layers)
        self.transform = nnx.Linear(config.model_dim, config.model_dim, rngs=rngs)
        self.transform_norm = config.new_norm(rngs)
        self.output_bias = nnx.Param(jnp.zeros((config.vocabulary,)))
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns logits [B, T, V].

        Args:
          tokens: integers [B, T], padded on either side.
          mask: bool [B, T], true for tokens.
        """
        positions, segment_ids = pe.positions.from_padding_mask(mask)
        x = self.embedding_norm(embed_tokens("DeBERTa", self.embedding, tokens, segment_ids))
        table = self.distance_norm(self.distances.embedding[...])
        for block in self.blocks:
            x = block(x, table, positions=positions, segment_ids=segment_ids)
        x = self.transform_norm(self.activation(self.transform(x)))
        return self.embedding.attend(x) + self.output_bias[None, None]


_NAMES = {
    "embedding": "deberta.embeddings.word_embeddings",
    "embedding_norm": "deberta.embeddings.LayerNorm",
    "distances": "deberta.encoder.rel_embeddings",
    "distance_norm": "deberta.encoder.LayerNorm",
    "blocks": "deberta.encoder.layer",
    "query": "self.query_proj",
    "key": "self.key_proj",
    "value": "self.value_proj",
    "out": "output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
}
_SUPPORTED = {
    "share_att_key": (True,),
    "position_biased_input": (False,),
    "norm_rel_ebd": ("layer_norm",),
    "type_vocab_size": (0,),
    "conv_kernel_size": (0, None),
}


class DeBERTaWeights(Weights):
    """A state dict of DeBERTa by paths of our modules."""

    def __call__(self, path):
        """The array for a parameter."""
        return (
            self.state.take("cls.predictions.bias")
            if path == ("output_bias",)
            else super().__call__(path)
        )


def load(config: Mapping[str, Any], state: Mapping[str, Any]) -> DeBERTa:
    """The model of a Hugging Face config, with the weights of a state dict.

    Args:
      config: the dict of a whole config of DeBERTa-v2.
      state: {name: array} of the parameters, tied ones once.

    Raises:
      ValueError: for settings that are not supported, missing keys, and weights that are missing,
        of another shape, or left.
    """
    config = Config(config, "deberta-v2")
    for name, values in _SUPPORTED.items():
        if config.get(name) not in values:
            raise ValueError(f"load: {name} must be one of {values}, got {config.get(name)!r}.")
    settings = ModelConfig(
        layers=pe.from_hf(config),
        vocabulary=config["vocab_size"],
        model_dim=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_attention_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        mlp_dim=config["intermediate_size"],
        norm="layer",
        epsilon=config["layer_norm_eps"],
        activation=config["hidden_act"],
    )
    weights = DeBERTaWeights(State(state), _NAMES, settings.num_heads, settings.num_heads)
    return fill(lambda rngs: DeBERTa(settings, rngs), weights)
