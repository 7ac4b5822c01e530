"""Reads a config so that nothing in it which concerns positions goes unread."""

import re
from collections.abc import Mapping
from typing import Any

from posenc_jax.checks import require

_MISSING = object()
_POSITION = re.compile(r"rope|rotary|alibi|relative|position|nope|pos_att|clamp_len|temperature")
_HARMLESS = {
    "max_position_embeddings",  # Of rotary models: how long a text may be.
    "layer_norm_position",
    "position_ids",
}
_OTHER_NAMES = {
    "hidden_size": ("d_model", "n_embd", "embed_dim", "dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "encoder_attention_heads"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}


class Part:
    """A config, or a dict in it, that remembers what was read. None is as good as absent."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where, self.read = values, where, set()

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value under any of its names, or the default."""
        for key in (name, *_OTHER_NAMES.get(name, ())):
            self.read.add(key)
            if self.values.get(key) is not None:
                return self.values[key]
        return default

    def need(self, name: str) -> Any:
        """Returns a value that has to be there.

        Raises:
          ValueError: if it is not.
        """
        value = self.get(name, _MISSING)
        require(value is not _MISSING, f"from_hf: {self.where} must have {name!r}.")
        return value

    def only(self, name: str, *values: Any) -> None:
        """Raises `ValueError` for a value that is none of these; absent is fine."""
        value = self.get(name)
        require(
            value is None or value in values,
            f"from_hf: {self.where} has {name}={value!r}; what is known is {values}.",
        )

    def finish(self, all_keys: bool = False) -> None:
        """Raises `ValueError` for what was not read and concerns positions.

        Args:
          all_keys: whether everything in this dict does.
        """
        left = [
            key
            for key, value in self.values.items()
            if key not in self.read
            and value is not None
            and (all_keys or (_POSITION.search(key) and key not in _HARMLESS))
        ]
        require(not left, f"from_hf: {self.where} has {sorted(left)}, which nothing here reads.")


def head_size(config: Part) -> int:
    """Returns H: `head_dim`, or the hidden size by the number of heads."""
    given = config.get("head_dim")
    if given is not None:
        return given
    size, heads = config.need("hidden_size"), config.need("num_attention_heads")
    require(
        size % heads == 0,
        f"from_hf: {config.where} has no head_dim, and {heads} heads do not divide {size}.",
    )
    return size // heads
