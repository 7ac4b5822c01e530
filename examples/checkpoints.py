"""Released checkpoints: a config, weights and a tokenizer from GGUF or safetensors files."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from examples import gguf
from examples.families import FAMILIES

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A released model.

    Attributes:
      config: the settings, as config.json of transformers has them.
      state: {name in transformers: float32 array}, read when asked for; `dict(state)` reads all.
      tokenizer: of the `tokenizers` package, or None.
      tokenizer_error: why there is no tokenizer, or None.
      about: name and licence, as far as the file states them.
    """

    config: dict[str, Any]
    state: Mapping[str, np.ndarray]
    tokenizer: "Tokenizer | None"
    tokenizer_error: str | None = None
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)


class LazyState(Mapping[str, np.ndarray]):
    """Arrays by name, each read from its file when asked for."""

    def __init__(self, readers: Mapping[str, Callable[[], np.ndarray]]):
        self.readers = readers

    def __getitem__(self, name: str) -> np.ndarray:
        return self.readers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self.readers  # `Mapping.__contains__` reads the array.

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)


_INSTALL = 'pip install ".[released]" in a clone has gguf, safetensors and tokenizers.'
_NO_WEIGHT = re.compile(r"\.((attn|attention)\.(masked_)?bias|rotary_emb\.inv_freq)$")


def read(path: str | pathlib.Path) -> Checkpoint:
    """Reads a checkpoint.

    Args:
      path: a .gguf file; or a folder with config.json, *.safetensors and perhaps tokenizer.json; or
        a .safetensors file in such a folder.

    Returns:
      Its config, weights and tokenizer. Rows of weights are in the order of transformers, and norms
      of Gemma lack the 1 that llama.cpp adds.

    Raises:
      ValueError: if the file is damaged, or has settings, tensors or types that are not supported.
      ImportError: without the package that reads such files.
    """
    path = pathlib.Path(path)
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"read: there is no file or folder {str(path)!r}.")
    about: dict[str, str] = {}
    try:
        if path.is_dir() or path.suffix == ".safetensors":
            config, readers, new_tokenizer = _read_safetensors(path)
        else:
            config, readers, new_tokenizer, about = gguf.read(path)
    except ImportError as reason:
        raise ImportError(f"read: {reason}; {_INSTALL}") from None
    tokenizer, error = None, None
    try:
        tokenizer = new_tokenizer()
    except ImportError as reason:
        error = f"read: {reason}; {_INSTALL}"
    except ValueError as reason:
        error = str(reason)
    return Checkpoint(config, LazyState(readers), tokenizer, error, about)


def _read_safetensors(path):
    """As `gguf.read`, without name and licence."""
    from safetensors import SafetensorError, safe_open

    folder = path if path.is_dir() else path.parent
    config = _json(folder / "config.json")
    if config.get("quantization_config"):
        raise ValueError(f"read: {str(folder)!r} is quantised, which is read from GGUF files only.")
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    weight_map = {} if whole.exists() or not index.exists() else _json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
        raise ValueError(f"read: {str(index)!r} is damaged: weight_map must name files.")
    parts = weight_map.values()
    if path.is_dir() or path.name in parts:
        files = [folder / name for name in sorted({*parts})]
        files = files or ([whole] if whole.exists() else sorted(folder.glob("*.safetensors")))
    else:
        files = [path]
    if not files:
        raise ValueError(f"read: {str(folder)!r} has no *.safetensors.")
    readers = {}

    def reader(file, name):
        def array():
            with safe_open(file, "np") as arrays:
                kind = arrays.get_slice(name).get_dtype()
                if kind not in ("BF16", "F16", "F32", "F64"):
                    raise ValueError(f"read: {str(file)!r} has {name!r} of type {kind}.")
                return np.asarray(arrays.get_tensor(name), np.float32)

        return array

    for file in files:
        if not file.is_file():
            raise ValueError(f"read: {str(folder)!r} has no file {file.name!r}.")
        try:
            with safe_open(file, "np") as arrays:
                new = {name: reader(file, name) for name in arrays.keys()}
        except SafetensorError as error:
            raise ValueError(f"read: {str(file)!r} is damaged: {error}.") from None
        if twice := new.keys() & readers.keys():
            raise ValueError(f"read: {str(folder)!r} has {min(twice)!r} in several files.")
        readers |= new
    # Older files have frequencies and masks besides weights, and some repeat a tied embedding.
    # Files of a model without its head have names without the first part.
    readers = {name: x for name, x in readers.items() if not _NO_WEIGHT.search(name)}
    family = FAMILIES.get(str(config.get("model_type")))
    embedding_name = "" if family is None else family.names["embedding"] + ".weight"
    prefix = embedding_name[: embedding_name.find(".") + 1]
    if not any(name.startswith(prefix) for name in readers):
        readers = {prefix + name: x for name, x in readers.items()}
    if "embed_out.weight" in readers:  # GPT-NeoX.
        readers["lm_head.weight"] = readers.pop("embed_out.weight")
    if family is not None:
        config.setdefault("tie_word_embeddings", "lm_head.weight" not in readers)
    embedding = readers.get(embedding_name)
    if config.get("tie_word_embeddings") and embedding and "lm_head.weight" in readers:
        if not np.array_equal(readers.pop("lm_head.weight")(), embedding()):
            raise ValueError(f"read: {str(folder)!r} ties weights that differ.")
    return config, readers, lambda: _tokenizer_json(folder)


def _json(file):
    if not file.is_file():
        raise ValueError(f"read: {str(file.parent)!r} has no {file.name}.")
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"read: {str(file)!r} is damaged: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"read: {str(file)!r} has no settings.")
    return value


def _tokenizer_json(folder):
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"read: {str(folder)!r} has no tokenizer.json.")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself.
        raise ValueError(f"read: {str(file)!r} is damaged: {error}.") from None
    tokenizer.no_padding()  # Of training, as is the next.
    tokenizer.no_truncation()
    return tokenizer
