"""Reads configs, and refuses keys about positions that no reader looked up."""

import functools
import importlib.resources
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posenc_jax.checks import require

# Keys that change the position encoding, or the tokens that a layer attends to.
_POSITION = re.compile(
    "rope|rotary|alibi|relative|(?<!m)position|nope|pos_att|clamp_len|temperature|window|"
    "layer_types|attention_chunk|dual_chunk|per_layer_config|pos_embds"
)
_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers")
_FOLDER = importlib.resources.files("posenc_jax.hf")
_KEYS = tomllib.loads((_FOLDER / "keys.toml").read_text())
_OTHER_NAMES: dict[str, list[str]] = _KEYS["other_names"]
_HARMLESS: dict[str, list[Any]] = _KEYS["harmless"]
KIND_OF: dict[str, str] = {name: kind for kind, names in _KEYS["kinds"].items() for name in names}


def _number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < math.inf


def _integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _list_of(item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, list | tuple) and all(map(item, x))


KINDS: dict[str, Callable[[Any], Any]] = {
    "a positive integer": lambda x: _integer(x) and x > 0,
    "an integer from 0": lambda x: _integer(x) and x >= 0,
    "an integer": _integer,
    "one or several positive integers": lambda x: all(
        _integer(y) and y > 0 for y in (x if isinstance(x, list | tuple) else [x])
    ),
    "a positive number": lambda x: _number(x) and x > 0,
    "a number": _number,
    "true or false": lambda x: isinstance(x, bool),
    "true, false or an integer from 0": lambda x: isinstance(x, int) and x >= 0,
    "a string": lambda x: isinstance(x, str),
    "a dict": lambda x: isinstance(x, Mapping),
    "a list of strings": lambda x: x and _list_of(lambda y: isinstance(y, str))(x),
    "a list of numbers from 0": _list_of(lambda x: _number(x) and x >= 0),
    "a list of numbers": _list_of(_number),
    "a list of integers from 0": _list_of(lambda x: _integer(x) and x >= 0),
    "a list of 0 and 1": _list_of(lambda x: x in (0, 1)),
}
"""Checks of values by their description in messages."""


@functools.cache
def model_type_defaults() -> dict[str, dict[str, Any]]:
    """Returns the values of keys that a config leaves out, for each model type.

    `defaults.json` names the version of transformers whose config classes they come from;
    `tests/makers/hf_configs.py` writes it.
    """
    return json.loads((_FOLDER / "defaults.json").read_text())["model_types"]


def written_by(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the version of transformers that wrote a config, (5, 16); () if it is unknown."""
    match = re.match(r"(\d+)\.(\d+)\.", str(values.get("transformers_version")))
    return tuple(map(int, match.groups())) if match else ()


def file_of(config: Any) -> dict[str, Any]:
    """Returns the file that a config object of transformers was made from.

    From 4.57 on, the classes of Gemma 3 and 4 replace the window over both sides by the window of
    one side. Their `to_dict` has the window of one side before 5.16 and over both sides from then
    on, and twice the window for Gemma 3n, whose class replaces nothing.
    """
    values = dict(config.to_dict())
    version, window = written_by(values), getattr(config, "sliding_window", None)
    values.pop("transformers_version", None)
    if "text_config" in values and hasattr(getattr(config, "text_config", None), "to_dict"):
        values["text_config"] = file_of(config.text_config)
    if window is not None and "sliding_window" in values:
        both_sides = sees_both_sides(values) and version >= (4, 57)
        values["sliding_window"] = 2 * (window - 1) if both_sides else window
    return values


def sees_both_sides(values: Mapping[str, Any]) -> bool:
    """Returns whether the window of a Gemma 3 or 4 is divided between both sides."""
    gemma = re.match("gemma[34](_unified)?_text$", str(values.get("model_type")))
    return gemma is not None and values.get("use_bidirectional_attention") in (True, "all")


class TrackedConfig:
    """A config, or a dict inside one, that tracks which keys were read.

    As in transformers, a missing key has the default of its model type, and a null one has none.

    Attributes:
      values: the config.
      label: its name in error messages.
      defaults: values of missing keys.
      decoder: whether to read the decoder, or the encoder; None: the caller did not choose.
      read: the keys that were looked up.

    Raises:
      ValueError: if `values` is not a dict.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        label: str,
        defaults: Mapping[str, Any] | None = None,
        decoder: bool | None = None,
    ):
        require(isinstance(values, Mapping), f"{label} must be a dict, got {values!r:.80}.")
        self.values, self.label, self.decoder = values, label, decoder
        self.defaults = defaults or {}
        self.read: set[str] = set()

    def without(self, *names: str) -> "TrackedConfig":
        """Returns the config without some keys, tracking the others together with this one."""
        values = {key: value for key, value in self.values.items() if key not in names}
        out = TrackedConfig(values, self.label, self.defaults, self.decoder)
        out.read = self.read
        return out

    @property
    def model_type(self) -> str:
        """The model type."""
        return self.values["model_type"]

    def _names(self, name: str) -> list[str]:
        """Returns a key and its other names; the length has them in some model types alone."""
        others = _OTHER_NAMES.get(name, ())
        if name == "max_position_embeddings" and name in self.defaults:
            others = ()
        return [name, *others]

    def check(self, condition: bool, text: str) -> None:
        """Raises `ValueError`, "the config has `text`", unless `condition` holds."""
        require(condition, f"{self.label} has {text}.")

    def check_ignored(self, condition: bool, text: str) -> None:
        """Raises for a setting that transformers ignores, unless `condition` holds."""
        self.check(condition, f"{text}, which transformers ignores for its type")

    def check_count(self, name: str, values: Sequence[Any], count: int) -> None:
        """Raises `ValueError` unless a list has one value for each layer."""
        self.check(len(values) == count, f"{len(values)} {name} for {count} layers")

    def implied(self, name: str, *values: Any) -> None:
        """Raises for a key that transformers ignores unless it is absent or one of `values`."""
        value = self.explicit(name)
        self.check_ignored(value is None or value in values, f"{name}={value}")

    def explicit(self, name: str) -> Any:
        """Returns the value in the config under any name of the key, or None.

        Raises:
          ValueError: if it has the wrong type, or its names have different values.
        """
        names = self._names(name)
        self.read.update(names)
        values = {n: self.values[n] for n in names if self.values.get(n) is not None}
        if not values:
            return None
        key, value = next(iter(values.items()))
        self.check(
            all(x == value for x in values.values()),
            " and ".join(f"{n}={x!r}" for n, x in values.items()),
        )
        kind = KIND_OF.get(name)
        require(
            kind is None or KINDS[kind](value),
            f"{self.label} must have {kind} as {key}, got {value!r:.80}.",
        )
        return value

    def ignore(self, *names: str) -> None:
        """Marks keys that transformers ignores as read; raises as `explicit` for their values."""
        for name in names:
            self.explicit(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value in the config; if the key is missing, the model type's default."""
        value = self.explicit(name)
        if value is not None:
            return value
        names = self._names(name)
        if any(n in self.values for n in names):
            return default
        return next((self.defaults[n] for n in names if n in self.defaults), default)

    def part(self, name: str) -> "TrackedConfig":
        """Returns the dict under a key, empty if there is none."""
        return TrackedConfig(self.get(name) or {}, f"{self.label} in {name}")

    def truth(self, name: str, default: bool) -> bool:
        """Returns a flag that is false if null, and `default` if missing."""
        value = self.explicit(name)
        return bool(value) if value is not None or name in self.values else default

    def need(self, name: str) -> Any:
        """Returns a required value.

        Raises:
          ValueError: if neither the config nor the model type has one.
        """
        value = self.get(name)
        require(value is not None, f"{self.label} must have {name!r}.")
        return value

    def only(self, name: str, *values: Any) -> None:
        """Raises `ValueError` unless a key is absent or has one of these values."""
        value = self.get(name)
        self.check(value is None or value in values, f"{name}={value!r}; supported: {values}")

    def finish(self, all_keys: bool = False) -> None:
        """Checks that every key about positions was read.

        Args:
          all_keys: whether every key of this dict is about positions.

        Raises:
          ValueError: for keys that were not read, and if the caller chose between encoder and
            decoder and the model type does not have both.
        """
        unused = _WINDOW if self.values.get("use_sliding_window") is False else ()
        unread = [
            key
            for key, value in self.values.items()
            if key not in self.read
            and value is not None
            and (all_keys or _POSITION.search(str(key)))
            and value not in _HARMLESS.get(key, ())
            and (all_keys or _HARMLESS.get(key) != [])
            and key not in unused
        ]
        self.check(not unread, f"{sorted(unread, key=str)}, which nothing here reads")
        require(
            self.decoder is None or "is_decoder" in self.read,
            f"decoder={self.decoder}, but {self.label} does not describe an encoder and a decoder.",
        )


def query_heads(config: TrackedConfig) -> int:
    """Returns the number of query heads N, of the encoder or of the decoder."""
    key = "decoder_attention_heads"
    return config.need(key if config.decoder and key in config.defaults else "num_attention_heads")


def head_size(config: TrackedConfig) -> int:
    """Returns the head dim H: `head_dim`, or the hidden size divided by the number of heads.

    Raises:
      ValueError: if the heads do not divide the hidden size.
    """
    head_dim = config.get("head_dim")
    if head_dim is not None:
        return head_dim
    size, heads = config.need("hidden_size"), query_heads(config)
    config.check(size % heads == 0, f"no head_dim, and {heads} heads do not divide {size}")
    return size // heads


def layer_count(config: TrackedConfig) -> int:
    """Returns the number of layers: the length of `layer_types`, else `num_hidden_layers`.

    Raises:
      ValueError: if the config has both and they differ.
    """
    kinds, count = config.explicit("layer_types"), config.explicit("num_hidden_layers")
    if kinds is None:
        return config.need("num_hidden_layers")
    config.check(
        count in (None, len(kinds)), f"{len(kinds)} layer_types and num_hidden_layers={count}"
    )
    return len(kinds)


def is_decoder(config: TrackedConfig) -> bool:
    """Returns whether to read the decoder of a model type with an encoder and a decoder.

    Raises:
      ValueError: if the config describes both and the caller chose neither, or if the caller
        chose the encoder of a config with `is_decoder`.
    """
    flag, choice = config.get("is_decoder", False), config.decoder
    require(
        not (flag and choice is False), f"decoder=False, but {config.label} has is_decoder=True."
    )
    if flag or choice is not None:
        return bool(flag or choice)
    require(
        not config.get("is_encoder_decoder", False),
        f"{config.label} describes an encoder and a decoder: give decoder=False or decoder=True.",
    )
    return False


def is_causal(config: TrackedConfig) -> bool:
    """Returns whether tokens see only those before them: a key that all model types read."""
    return config.truth("is_causal", True)


def key_heads(config: TrackedConfig, num_heads: int) -> int:
    """Returns the number of key heads K of N heads."""
    return config.get("num_key_value_heads", num_heads)


def as_many_key_heads(config: TrackedConfig, num_heads: int) -> int:
    """Returns N, for model types with one key head per query head.

    Raises:
      ValueError: for another `num_key_value_heads`.
    """
    config.implied("num_key_value_heads", num_heads)
    return num_heads
