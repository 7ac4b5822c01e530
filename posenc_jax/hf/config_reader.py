"""Reads configs, and refuses keys about positions that no reader looked up."""

import functools
import importlib.resources
import json
import re
from collections.abc import Mapping
from typing import Any

from posenc_jax.checks import require

# Keys that change the position encoding, or the tokens that a layer attends to.
_POSITION = re.compile(
    "rope|rotary|alibi|relative|position|nope|pos_att|clamp_len|temperature|window|layer_types|"
    "attention_chunk|per_layer_config|pos_embds"
)
_HARMLESS = {
    "max_position_embeddings",  # Of rotary models: the longest text.
    "n_positions",
    "layer_norm_position",
    "position_ids",
    "mlp_layer_types",
    "mtp_layer_types",
}
# Values that change nothing, or repeat what the model type implies.
_HARMLESS_VALUES = {
    "position_embedding_type": ("absolute", "rope_gptj"),  # ModernBERT's and Cohere 2's.
    "rotary": (True,),  # GPT-J's.
    "use_mrope": (False,),  # Qwen 2.5's.
}
_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers")
_OTHER_NAMES = {
    "hidden_size": ("d_model", "n_embd", "n_embed", "embed_dim", "dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "encoder_attention_heads"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "encoder_layers"),
    "num_decoder_layers": ("decoder_layers",),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "head_dim": ("d_head", "d_kv", "attention_head_size"),
    "sliding_window": ("sliding_window_size",),
    "sliding_window_pattern": ("_sliding_window_pattern",),
}


@functools.cache
def model_type_defaults() -> dict[str, dict[str, Any]]:
    """Values of keys that a config leaves out, for each model type.

    `defaults.json` names the version of transformers whose config classes they come from;
    `tests/hf/make_configs.py` writes it.
    """
    file = importlib.resources.files("posenc_jax.hf") / "defaults.json"
    return json.loads(file.read_text())["model_types"]


class TrackedConfig:
    """A config, or a dict inside one, that tracks which keys were read.

    As in transformers, a missing key has the default of its model type, and a null one has none.

    Attributes:
      values: the config.
      where: its name in error messages.
      defaults: values of missing keys.
      decoder: whether the caller wants the decoder, or the encoder; None: no choice.
      read: the keys that were looked up.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        defaults: Mapping[str, Any] | None = None,
        decoder: bool | None = None,
    ):
        self.values, self.where, self.decoder = values, where, decoder
        self.defaults = defaults or {}
        self.read: set[str] = set()

    def given(self, name: str) -> Any:
        """The value in the config under any name of the key, or None."""
        names = (name, *_OTHER_NAMES.get(name, ()))
        self.read.update(names)
        return next((self.values[n] for n in names if self.values.get(n) is not None), None)

    def get(self, name: str, default: Any = None) -> Any:
        """The value in the config; if the key is missing, the default of the model type."""
        value = self.given(name)
        if value is not None:
            return value
        names = (name, *_OTHER_NAMES.get(name, ()))
        if any(n in self.values for n in names):
            return default
        return next((self.defaults[n] for n in names if n in self.defaults), default)

    def need(self, name: str) -> Any:
        """A required value.

        Raises:
          ValueError: if neither the config nor the model type has one.
        """
        value = self.get(name)
        require(value is not None, f"from_hf: {self.where} must have {name!r}.")
        return value

    def only(self, name: str, *values: Any) -> None:
        """Checks that a key is absent or has one of these values.

        Raises:
          ValueError: for any other value.
        """
        value = self.get(name)
        require(
            value is None or value in values,
            f"from_hf: {self.where} has {name}={value!r}; supported: {values}.",
        )

    def finish(self, all_keys: bool = False) -> None:
        """Checks that every key about positions was read.

        Args:
          all_keys: whether every key of this dict is about positions.

        Raises:
          ValueError: with the keys that were not read; if the caller chose between encoder and
            decoder and the model type does not have both.
        """
        unused = _WINDOW if self.values.get("use_sliding_window") is False else ()
        left = [
            key
            for key, value in self.values.items()
            if key not in self.read
            and value is not None
            and (all_keys or (_POSITION.search(key) and key not in _HARMLESS))
            and value not in _HARMLESS_VALUES.get(key, ())
            and key not in unused
        ]
        require(not left, f"from_hf: {self.where} has {sorted(left)}, which nothing here reads.")
        require(
            self.decoder is None or "is_decoder" in self.read,
            f"from_hf: decoder={self.decoder}, but {self.where} does not describe an encoder and a "
            "decoder.",
        )


def head_size(config: TrackedConfig) -> int:
    """The head dim H: `head_dim`, or the hidden size divided by the number of heads.

    Raises:
      ValueError: if the heads do not divide the hidden size.
    """
    given = config.get("head_dim")
    if given is not None:
        return given
    size, heads = config.need("hidden_size"), config.need("num_attention_heads")
    require(
        size % heads == 0,
        f"from_hf: {config.where} has no head_dim, and {heads} heads do not divide {size}.",
    )
    return size // heads


def layer_count(config: TrackedConfig) -> int:
    """The number of layers: the length of `layer_types`, else `num_hidden_layers`.

    Raises:
      ValueError: if the config has both and they differ.
    """
    kinds, count = config.given("layer_types"), config.given("num_hidden_layers")
    if kinds is None:
        return config.need("num_hidden_layers")
    require(
        count in (None, len(kinds)),
        f"from_hf: {config.where} has {len(kinds)} layer_types and num_hidden_layers={count}.",
    )
    return len(kinds)


def is_decoder(config: TrackedConfig) -> bool:
    """Whether to read the decoder of a model type with an encoder and a decoder.

    Raises:
      ValueError: if the config describes both and the caller chose neither, or if the caller
        chose the encoder of a config with `is_decoder`.
    """
    flag, choice = config.get("is_decoder", False), config.decoder
    require(
        not (flag and choice is False),
        f"from_hf: decoder=False, but {config.where} has is_decoder=True.",
    )
    if flag or choice is not None:
        return bool(flag or choice)
    require(
        not config.get("is_encoder_decoder", False),
        f"from_hf: {config.where} describes an encoder and a decoder, whose positions differ: "
        "give decoder=False or decoder=True.",
    )
    return False
