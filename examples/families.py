"""Differences between families of decoders other than attention, and names of their weights."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import posenc_jax as pe
from examples.decoder import ACTIVATIONS, Decoder, ModelConfig
from examples.weights import State, Weights, fill

_LLAMA = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
_QWEN_VL = _LLAMA | {
    "embedding": "model.language_model.embed_tokens",
    "norm": "model.language_model.norm",
    "blocks": "model.language_model.layers",
}
_GEMMA = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_PHI3 = _LLAMA | {"qkv": "qkv_proj", "gate_up": "gate_up_proj"}
_NEOX = {
    "embedding": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "output": "lm_head",
    "blocks": "gpt_neox.layers",
    "attention_norm": "input_layernorm",
    "qkv": "query_key_value",
    "out": "dense",
    "mlp_norm": "post_attention_layernorm",
    "up": "dense_h_to_4h",
    "down": "dense_4h_to_h",
}
_BLOOM = _NEOX | {
    "embedding": "transformer.word_embeddings",
    "embedding_norm": "transformer.word_embeddings_layernorm",
    "norm": "transformer.ln_f",
    "blocks": "transformer.h",
    "attention": "self_attention",
}
_GPT2 = {
    "embedding": "transformer.wte",
    "position": "transformer.wpe",
    "norm": "transformer.ln_f",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    "attention": "attn",
    "qkv": "c_attn",
    "out": "c_proj",
    "mlp_norm": "ln_2",
    "up": "c_fc",
    "down": "c_proj",
    "output": "lm_head",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """How the models of a type are built and named.

    Attributes:
      names: {name in `Decoder`: name in transformers} of modules, where they differ.
      norm, gated, post_norms, embedding_norm: as in `ModelConfig`.
      norm_offset: number that the norms over D add to their scale.
      scaled_embedding: whether token embeddings are multiplied by sqrt(D).
      biases: (attention, MLP): whether they have biases where the config does not say.
      qkv: how one projection holds queries, keys and values; see `posenc_jax.split_qkv`.
      inputs_first: whether the weights of projections have their inputs first.
      unbiased: as in `Weights`.
      activation, epsilon: keys of a config.
      defaults: values of config keys that transformers fills in for the type.
      derived: keys whose values follow from the others where they are missing.
    """

    names: Mapping[str, str]
    norm: str = "rms"
    gated: bool = True
    post_norms: bool = False
    embedding_norm: bool = False
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    biases: tuple[bool, bool] = (False, False)
    qkv: str | None = None
    inputs_first: bool = False
    unbiased: tuple[str, ...] = ()
    activation: str = "hidden_act"
    epsilon: str = "rms_norm_eps"
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    derived: tuple[str, ...] = ("head_dim",)


_OLD: dict[str, Any] = {
    "norm": "layer",
    "gated": False,
    "biases": (True, True),
    "derived": ("head_dim", "num_key_value_heads", "intermediate_size"),
}
_GEMMA_3 = Family(
    _GEMMA,
    post_norms=True,
    norm_offset=1.0,
    scaled_embedding=True,
    activation="hidden_activation",
    defaults={"hidden_activation": "gelu_pytorch_tanh"},
    derived=(),
)
_GEMMA_2 = dataclasses.replace(
    _GEMMA_3, defaults={**_GEMMA_3.defaults, "final_logit_softcapping": 30.0}
)
FAMILIES = {
    "gpt2": Family(
        _GPT2,
        qkv="concatenated",
        inputs_first=True,
        activation="activation_function",
        epsilon="layer_norm_epsilon",
        **_OLD,
    ),
    "gpt_neox": Family(
        _NEOX,
        qkv="by_group",
        epsilon="layer_norm_eps",
        defaults={"use_parallel_residual": True},
        **_OLD,
    ),
    "bloom": Family(
        _BLOOM,
        qkv="by_group",
        embedding_norm=True,
        epsilon="layer_norm_epsilon",
        defaults={"hidden_act": "gelu_pytorch_tanh"},
        **_OLD,
    ),
    "llama": Family(_LLAMA, derived=("head_dim", "num_key_value_heads")),
    "mistral": Family(_LLAMA),
    "ministral3": Family(_LLAMA),
    "qwen2": Family(_LLAMA, biases=(True, False), unbiased=("out",)),
    "qwen2_vl_text": Family(_QWEN_VL, biases=(True, False), unbiased=("out",)),
    "qwen3": Family(_LLAMA, derived=()),
    "smollm3": Family(_LLAMA),
    "phi3": Family(_PHI3, qkv="concatenated"),
    "gpt_oss": Family(_LLAMA, biases=(True, False), derived=()),
    "gemma2": _GEMMA_2,
    "gemma3_text": _GEMMA_3,
}
_SYNONYMS = {
    "hidden_size": ("n_embd", "n_embed"),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner",),
}


def model_config(config: Mapping[str, Any], family: Family | None = None) -> ModelConfig:
    """The decoder that a Hugging Face config describes.

    Args:
      config: the dict of a whole config, as `config.to_dict()` of transformers gives it.
      family: of a model type that `FAMILIES` lacks.

    Raises:
      ValueError: for an unknown model type, a missing key, and settings that it does not support.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind)) if family is None else family
    if family is None:
        raise ValueError(f"model_config: model_type must be one of {[*FAMILIES]}, got {kind!r}.")
    values = {**family.defaults, **config}

    def read(name, *default):
        for key in (*_SYNONYMS.get(name, ()), name):
            if values.get(key) is not None:
                return values[key]
        if not default:
            raise ValueError(f"model_config: the {kind} config must have {name!r}.")
        return default[0]

    def check(name, valid, is_right, *default):
        value = read(name, *default)
        if not is_right(value):
            raise ValueError(f"model_config: {name} must be {valid}, got {value!r}.")
        return value

    def size(name, *default):
        default = default if name in family.derived else ()
        return check(name, "a positive integer", lambda x: type(x) is int and x > 0, *default)

    unsupported = ["apply_residual_connection_post_layernorm", "use_bidirectional_attention"]
    unsupported += [] if str(kind).startswith("gemma") else ["final_logit_softcapping"]
    for name in unsupported:
        if values.get(name):
            raise ValueError(f"model_config: {name}={values[name]} is not supported.")
    if values.get("is_causal") is False:
        raise ValueError("model_config: is_causal=False is not supported.")
    dim, heads = size("hidden_size"), size("num_attention_heads")
    experts = None
    if kind == "gpt_oss":
        experts = read("num_local_experts"), read("num_experts_per_tok")
        if (read("swiglu_alpha", 1.702), read("swiglu_limit", 7.0)) != (1.702, 7.0):
            raise ValueError("model_config: swiglu_alpha and swiglu_limit must be 1.702 and 7.0.")
    return ModelConfig(
        layers=pe.from_hf(config),
        vocabulary=size("vocab_size"),
        model_dim=dim,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", dim // heads),
        mlp_dim=size("intermediate_size", 4 * dim),
        norm=family.norm,
        epsilon=check(
            family.epsilon, "between 0 and 1", lambda x: type(x) in (int, float) and 0 < x < 1
        ),
        activation=check(
            family.activation, f"one of {[*ACTIVATIONS]}", lambda x: f"{x}" in ACTIVATIONS
        ),
        gated=family.gated,
        attention_bias=read("attention_bias", family.biases[0]),
        mlp_bias=read("mlp_bias", family.biases[1]),
        parallel="use_parallel_residual" in family.defaults and read("use_parallel_residual"),
        post_norms=family.post_norms,
        embedding_norm=family.embedding_norm,
        embedding_scale=dim**0.5 if family.scaled_embedding else 1.0,
        tied=check("tie_word_embeddings", "true or false", lambda x: type(x) is bool),
        logit_softcap=check(
            "final_logit_softcapping",
            "a positive number or null",
            lambda x: x is None or (type(x) in (int, float) and 0 < x < math.inf),
            None,
        ),
        experts=experts,
    )


def load(
    config: Mapping[str, Any],
    state: Mapping[str, Any],
    *,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    dot_general: Callable[..., jax.Array] = jax.lax.dot_general,
) -> Decoder:
    """The decoder of a Hugging Face config, with the weights of a state dict.

    Args:
      config: see `model_config`.
      state: {name: array} of the parameters, tied ones once.
      dtype: of activations and cache. Default: `param_dtype`.
      param_dtype: of the parameters; norms of q and k, and norms that add a number to their
        scale, have float32.
      dot_general: of all projections, as in `ModelConfig`.

    Raises:
      ValueError: as `model_config`, and for weights that are missing, of another shape, or left.
    """
    settings, family = model_config(config), FAMILIES[config["model_type"]]
    dtypes = {"dtype": param_dtype if dtype is None else dtype, "param_dtype": param_dtype}
    settings = dataclasses.replace(settings, **dtypes, dot_general=dot_general)
    return fill(lambda rngs: Decoder(settings, rngs=rngs), weights(family, settings, State(state)))


def weights(family: Family, config: ModelConfig, state: State) -> Weights:
    """The weights of a decoder of a family."""
    return Weights(
        state,
        family.names,
        config.num_heads,
        config.num_kv_heads,
        norm_offset=family.norm_offset,
        qkv=family.qkv,
        inputs_first=family.inputs_first,
        unbiased=family.unbiased,
    )
