"""BERT and encoders with its block: RoBERTa, XLM-RoBERTa and CamemBERT; sentence embeddings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import posenc_jax as pe
from examples.decoder import MLP, ModelConfig, embed_tokens
from examples.weights import Config, State, Weights, fill
from posenc_jax.nnx import PositionEncoding


class Block(nnx.Module):
    """Attention and MLP, each followed by a norm of the sum."""

    def __init__(self, config: ModelConfig, layer: pe.LayerSpec, rngs: nnx.Rngs):
        self.attention, self.mlp = config.new_attention(layer, rngs), MLP(config, rngs)
        self.attention_norm, self.mlp_norm = config.new_norm(rngs), config.new_norm(rngs)

    def __call__(self, x, **tokens):
        """Returns [B, T, D]."""
        x = self.attention_norm(x + self.attention(x, **tokens))
        return self.mlp_norm(x + self.mlp(x))


class Encoder(nnx.Module):
    """An encoder; positions count the tokens of each row, without padding."""

    def __init__(self, config: ModelConfig, token_types: int, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(config.vocabulary, config.model_dim, rngs=rngs)
        self.token_types = nnx.Embed(token_types, config.model_dim, rngs=rngs)
        self.position = PositionEncoding(config.layers[0].scheme, rngs=rngs)
        self.embedding_norm = config.new_norm(rngs)
        inside = pe.LayerSpec(pe.NoPE())
        self.blocks = nnx.List(Block(config, inside, rngs) for _ in config.layers)

    def __call__(self, tokens: jax.Array, mask: jax.Array, types: jax.Array | int = 0) -> jax.Array:
        """Returns hidden states [B, T, D].

        Args:
          tokens: integers [B, T], padded on either side.
          mask: bool [B, T], true for tokens.
          types: integers [B, T]: the sentence of a pair that a token is in. Default: the first.
        """
        positions, segment_ids = pe.positions.from_padding_mask(mask)
        types = jnp.broadcast_to(types, tokens.shape)
        x = embed_tokens("Encoder", self.embedding, tokens, segment_ids)
        x += embed_tokens("Encoder", self.token_types, types, segment_ids, "types")
        x = self.embedding_norm(self.position(x, positions))
        for block in self.blocks:
            x = block(x, positions=positions, segment_ids=segment_ids)
        return x


def embed(model: Encoder, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Sentence embeddings [B, D]: means of hidden states over tokens, of length 1.

    Args:
      model: trained for means, as all-MiniLM-L6-v2 and multilingual E5; BGE is trained for the
        hidden state of the first token.
      tokens, mask: see `Encoder`.
    """
    x = jnp.where(mask[..., None], model(tokens, mask), 0.0).sum(1)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


_BERT = {
    "embedding": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position": "embeddings.position_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "blocks": "encoder.layer",
    "query": "self.query",
    "key": "self.key",
    "value": "self.value",
    "out": "output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """How the models of a type are named.

    Attributes:
      names: {name in `Encoder`: name in transformers} of modules, where they differ.
      prefix: of all names but the names of heads, in files of a model with a head.
    """

    names: Mapping[str, str]
    prefix: str


FAMILIES = {
    "bert": Family(_BERT, "bert."),
    "roberta": Family(_BERT, "roberta."),
    "xlm-roberta": Family(_BERT, "roberta."),
    "camembert": Family(_BERT, "roberta."),
}


class EncoderWeights(Weights):
    """A state dict of an encoder by paths of our modules."""

    def name(self, *path):
        """The name of a module in transformers, where the MLP of BERT is no module."""
        return super().name(*(part for part in path if part != "mlp"))


def load(config: Mapping[str, Any], state: Mapping[str, Any]) -> Encoder:
    """The model of a Hugging Face config, with the weights of a state dict.

    Args:
      config: the dict of a whole config of a type in `FAMILIES`.
      state: {name: array} of the parameters of transformers' model of the type, as `BertModel`, or
        of one with a head, as `BertForMaskedLM`. The pooler, heads and position ids, which hidden
        states do not need, are left out.

    Raises:
      ValueError: for another model type, missing keys, and weights that are missing, of another
        shape, or left.
    """
    config = Config(config, *FAMILIES)
    family = FAMILIES[config["model_type"]]
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
        gated=False,
        attention_bias=True,
        mlp_bias=True,
        is_causal=bool(config.get("is_decoder")),
    )
    if any(name.startswith(family.prefix) for name in state):
        state = {
            name.removeprefix(family.prefix): x
            for name, x in state.items()
            if name.startswith(family.prefix)
        }
    # The first files of BERT have other names for the parameters of norms.
    state = {
        name.replace("Norm.gamma", "Norm.weight").replace("Norm.beta", "Norm.bias"): x
        for name, x in state.items()
        if not name.startswith(("pooler.", "embeddings.position_ids"))
    }
    weights = EncoderWeights(State(state), family.names, settings.num_heads, settings.num_heads)
    return fill(lambda rngs: Encoder(settings, config["type_vocab_size"], rngs), weights)
