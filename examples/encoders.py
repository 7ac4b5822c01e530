"""One encoder for the families with BERT's block, from BERT to GTE, and sentence embeddings."""

import dataclasses
import functools
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

    def __init__(self, config: ModelConfig, embedding_dim: int, token_types: int, rngs: nnx.Rngs):
        table = functools.partial(nnx.Embed, features=embedding_dim, rngs=rngs)
        self.embedding = table(config.vocabulary)
        self.token_types = table(token_types) if token_types else None
        self.position = PositionEncoding(config.layers[0].scheme, rngs=rngs)
        self.embedding_norm = dataclasses.replace(config, model_dim=embedding_dim).new_norm(rngs)
        sizes = embedding_dim, config.model_dim
        self.projection = nnx.Linear(*sizes, rngs=rngs) if sizes[0] != sizes[1] else None
        in_layers = self.position.scheme.acts_in_attention
        layers = config.layers if in_layers else [pe.LayerSpec(pe.NoPE())] * len(config.layers)
        self.blocks = nnx.List(Block(config, layer, rngs) for layer in layers)
        for block in self.blocks if in_layers else ():  # MPNet's layers share a table.
            block.attention.encoding = self.position

    def __call__(
        self, tokens: jax.Array, mask: jax.Array, types: jax.Array | int | None = None
    ) -> jax.Array:
        """Returns hidden states [B, T, D].

        Args:
          tokens: integers [B, T], padded on either side.
          mask: bool [B, T], true for tokens.
          types: integers [B, T]: the sentence of a pair that a token is in. Default: the first.

        Raises:
          ValueError: for known tokens and types that are not in the tables.
        """
        positions, segment_ids = pe.positions.from_padding_mask(mask)
        x = embed_tokens("Encoder", self.embedding, tokens, segment_ids)
        if self.token_types is not None:
            types = jnp.broadcast_to(0 if types is None else types, tokens.shape)
            x += embed_tokens("Encoder", self.token_types, types, segment_ids, "types")
        elif types is not None:
            raise ValueError("Encoder: the model has no types of tokens; leave out types.")
        x = self.embedding_norm(self.position(x, positions))
        if self.projection is not None:
            x = self.projection(x)
        for block in self.blocks:
            x = block(x, positions=positions, segment_ids=segment_ids)
        return x


def embed(model: Encoder, tokens: jax.Array, mask: jax.Array, pooling: str = "mean") -> jax.Array:
    """Sentence embeddings [B, D] of length 1, from hidden states; zeros for a row without tokens.

    Args:
      model: the encoder.
      tokens, mask: see `Encoder`.
      pooling: the mean of a row's tokens, for which all-MiniLM-L6-v2, all-mpnet-base-v2 and E5 are
        trained, or its first token, "cls", as for BGE and GTE.

    Raises:
      ValueError: for another pooling.
    """
    if pooling not in ("mean", "cls"):
        raise ValueError(f'embed: pooling must be "mean" or "cls", got {pooling!r}.')
    pooled = mask & (jnp.cumsum(mask, axis=1) == 1) if pooling == "cls" else mask
    x = jnp.where(pooled[..., None], model(tokens, mask), 0.0).sum(1)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


_WITHOUT_TYPES = {
    "embedding": "embeddings.word_embeddings",
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
_BERT = _WITHOUT_TYPES | {"token_types": "embeddings.token_type_embeddings"}
_ELECTRA = _BERT | {"projection": "embeddings_project"}
_DISTILBERT = _WITHOUT_TYPES | {
    "blocks": "transformer.layer",
    "query": "q_lin",
    "key": "k_lin",
    "value": "v_lin",
    "out": "out_lin",
    "attention_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "mlp_norm": "output_layer_norm",
}
_MPNET = _WITHOUT_TYPES | {
    "buckets": "encoder.relative_attention_bias",
    "query": "attn.q",
    "key": "attn.k",
    "value": "attn.v",
    "out": "attn.o",
    "attention_norm": "attention.LayerNorm",
}
_ROTATED = {
    "embedding": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "blocks": "layers",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "attention_norm": "post_attention_layernorm",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "mlp_norm": "post_mlp_layernorm",
}
_GATED = _ROTATED | {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}


@dataclasses.dataclass(frozen=True)
class Family:
    """How the models and configs of a type are named.

    Attributes:
      names: {name in `Encoder`: name in transformers} of modules, where they differ. Tokens have
        types if the names have "token_types", an MLP a gate if they have "gate", and token
        embeddings a size of their own if they have "projection".
      prefix: of names in files of a model with a head, except the names of the head.
      unbiased: as in `Weights`.
      keys: {key of BERT's configs: the type's} where they differ.
      fixed: {key of BERT's configs: value} where the type has no choice.
    """

    names: Mapping[str, str]
    prefix: str
    unbiased: tuple[str, ...] = ()
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FAMILIES = {
    "bert": Family(_BERT, "bert."),
    "roberta": Family(_BERT, "roberta."),
    "xlm-roberta": Family(_BERT, "roberta."),
    "camembert": Family(_BERT, "roberta."),
    "electra": Family(_ELECTRA, "electra."),
    "distilbert": Family(
        _DISTILBERT,
        "distilbert.",
        keys={"hidden_size": "dim", "intermediate_size": "hidden_dim", "hidden_act": "activation"},
        fixed={"layer_norm_eps": 1e-12},
    ),
    "mpnet": Family(_MPNET, "mpnet."),
    "jina_embeddings_v3": Family(_ROTATED, "roberta."),
    "nomic_bert": Family(_GATED, "nomic_bert."),
    "gte": Family(_GATED, "gte.", unbiased=("gate", "up")),
}


class EncoderWeights(Weights):
    """A state dict of an encoder by paths of our modules."""

    def name(self, *path):
        """The name of a module in transformers, where the MLP of BERT is no module."""
        if "encoding" in path:  # Of MPNet: positions at the input, and buckets of all layers.
            path = (("position", "buckets")[path[-1]],)
        return super().name(*(part for part in path if part != "mlp"))

    def __call__(self, path):
        """The array for a parameter; tables of buckets have one row per bucket there."""
        x = super().__call__(path)
        return x.T if path[-2:] == (1, "table") else x


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
    layers, attention = pe.from_hf(config), pe.attention_options_from_hf(config)[0]
    config |= {**family.fixed, **{key: config[other] for key, other in family.keys.items()}}
    settings = ModelConfig(
        layers=layers,
        vocabulary=config["vocab_size"],
        model_dim=config["hidden_size"],
        num_heads=attention["num_heads"],
        num_kv_heads=attention["num_kv_heads"],
        head_dim=attention["head_dim"],
        mlp_dim=config["intermediate_size"],
        norm="layer",
        epsilon=config["layer_norm_eps"],
        activation=config["hidden_act"],
        gated="gate" in family.names,
        attention_bias=attention["use_bias"],
        mlp_bias=attention["use_bias"],
        is_causal=attention["is_causal"],
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
    heads = settings.num_heads, settings.num_kv_heads
    weights = EncoderWeights(State(state), family.names, *heads, unbiased=family.unbiased)
    embedding_dim = config["embedding_size" if "projection" in family.names else "hidden_size"]
    token_types = config["type_vocab_size"] if "token_types" in family.names else 0
    return fill(lambda rngs: Encoder(settings, embedding_dim, token_types, rngs), weights)
