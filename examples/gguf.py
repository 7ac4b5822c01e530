"""GGUF files, the checkpoints of llama.cpp, in the terms of transformers.

llama.cpp's converter changes some weights, and a reader that does not change them back gets wrong
numbers and no error: in llama files the rows of q and k are ordered for pairs of adjacent features,
and in Gemma files all norms have 1 added.
"""

import pathlib
import re
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import posenc_jax as pe

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
# {architecture: names of the modules of a block}.
ARCHITECTURES = {
    "llama": _BLOCK,
    "qwen2": _BLOCK,
    "qwen3": _BLOCK | _QK_NORM,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA | _QK_NORM,
    "phi3": _PHI3,
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Settings that change no number here.
_IGNORED = ("vocab_size", "pooling_type", "tensor_data_layout", "rope.scaling.finetuned")


def read(
    path: pathlib.Path,
) -> tuple[dict, dict[str, Callable[[], np.ndarray]], Callable, dict[str, str]]:
    """Reads a GGUF file.

    Returns:
      The config as a dict of transformers; {name in transformers: function that reads the float32
      array}; a function that makes the tokenizer; and the name and licence that are stated.

    Raises:
      ValueError: if the file is damaged, or has settings, tensors or types that are not supported.
    """
    import gguf

    file = _File(path)
    names = ARCHITECTURES.get(file.architecture)
    if names is None:
        raise file.error(
            f"has the architecture {file.architecture!r}; supported: {[*ARCHITECTURES]}"
        )
    config = _config(file)
    readers = {}

    def reader(tensor, stem):
        def array():
            x = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
            if file.architecture == "llama" and stem in ("attn_q", "attn_k"):
                head_dim, x = config["head_dim"], jnp.asarray(x)
                x = pe.permute_qk(x, "interleaved", "half", head_dim=head_dim, axis=0)
                return np.asarray(x)
            plus_one = file.architecture.startswith("gemma") and stem.endswith("norm")
            return x - 1.0 if plus_one else x

        return array

    for name, tensor in file.tensors.items():
        parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        block, stem, leaf = parts.groups() if parts else (None, name, None)
        module = (_OUTSIDE if block is None else names).get(stem)
        if module is None or int(block or 0) >= config["num_hidden_layers"]:
            raise file.error(f"has the tensor {name!r}, which {file.architecture!r} does not have")
        prefix = "" if block is None else f"model.layers.{block}."
        readers[f"{prefix}{module}.{leaf}"] = reader(tensor, stem)
    for i in range(config["num_hidden_layers"]):
        for stem in names:
            if f"blk.{i}.{stem}.weight" not in file.tensors:
                raise file.error(f"lacks the tensor 'blk.{i}.{stem}.weight'")
    if "output_norm.weight" not in file.tensors:
        raise file.error("lacks the tensor 'output_norm.weight'")
    stated = {"name": file.get("general.name", None), "licence": file.get("general.license", None)}
    about = {key: str(value) for key, value in stated.items() if value}
    return config, readers, lambda: _tokenizer(file), about


class _File:
    """Metadata and tensors of a file, which knows the keys that were read."""

    def __init__(self, path):
        import gguf

        self.path = path
        with path.open("rb") as file:
            start = file.read(8)
        if start[:4] != b"GGUF":
            raise self.error("is not a GGUF file")
        if start[4:6] == b"\0\0":
            raise self.error("is big-endian, which is not supported")
        try:
            reader = gguf.GGUFReader(path)
        except Exception as error:
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise self.error(f"is truncated or damaged ({message})") from None
        self.fields, self.used = reader.fields, set()
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        if self.get("split.count", 1) > 1:
            raise self.error("is one of several parts; llama-gguf-split --merge joins them")
        self.architecture = self.get("general.architecture")
        self._check_types()

    def error(self, text):
        """An error about the file."""
        return ValueError(f"read: {str(self.path)!r} {text}.")

    def get(self, key, *default):
        """The value of a key."""
        self.used.add(key)
        if key in self.fields:
            value = self.fields[key].contents()
            return float(str(np.float32(value))) if isinstance(value, float) else value
        if not default:
            raise self.error(f"lacks the setting {key!r}")
        return default[0]

    def _check_types(self):
        import gguf

        for name, tensor in self.tensors.items():
            _, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
            try:
                gguf.dequantize(np.zeros((1, size), np.uint8), tensor.tensor_type)
            except NotImplementedError:
                kind = tensor.tensor_type.name
                raise self.error(
                    f"has the tensor {name!r} of type {kind}, which gguf does not dequantize"
                ) from None


def _config(file):
    """The config of transformers."""
    kind = file.architecture

    def get(key, *default):
        value = file.get(f"{kind}.{key}", *default)
        if isinstance(value, list):
            if len({*value}) != 1:
                raise file.error(f"has {kind}.{key}={value}, which differs by layer")
            value = value[0]
        return value

    if "token_embd.weight" not in file.tensors:
        raise file.error("lacks the tensor 'token_embd.weight'")
    dim, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", dim // heads)
    config = {
        "model_type": {"gemma3": "gemma3_text"}.get(kind, kind),
        "hidden_size": dim,
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": get("rope.freq_base", 10000.0),
    }
    _check_value(file, "attention.value_length", head_dim)
    _check_value(file, "rope.dimension_count", head_dim)
    _check_value(file, "attention.causal", True)
    return config


def _check_value(file, key, expected):
    value = file.get(f"{file.architecture}.{key}", expected)
    if value != expected:
        raise file.error(f"has {file.architecture}.{key}={value}; supported: {expected}")


# {tokenizer.ggml.pre: pattern of the words that merges do not cross}.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_WORDS + r"\p{N}" + _REST,),
    "llama-bpe": (_WORDS + r"\p{N}{1,3}" + _REST,),
}
_CONTROL, _USER_DEFINED = 3, 4


def _tokenizer(file):
    """The tokenizer in the metadata."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    def get(key, *default):
        return file.get(f"tokenizer.ggml.{key}", *default)

    kind, tokens = get("model"), get("tokens")
    if kind != "gpt2":
        raise file.error(f"has a tokenizer of the kind {kind!r}; supported: ['gpt2']")
    pre = get("pre", "default")
    if pre not in _PATTERNS:
        raise file.error(f"has a tokenizer with pre={pre!r}; supported: {[*_PATTERNS]}")
    merges = [tuple(pair.split(" ", 1)) for pair in get("merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(tokenizers.Regex(x), "isolated") for x in _PATTERNS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = get("token_type", [])
    for which in (_CONTROL, _USER_DEFINED):
        added = [
            tokenizers.AddedToken(token, normalized=False, special=which == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind == which
        ]
        tokenizer.add_tokens(added)
    ends = [""] * 2
    for i, (name, default) in enumerate((("bos", pre == "llama-bpe"), ("eos", False))):
        if get(f"add_{name}_token", default):
            ends[i] = tokens[get(f"{name}_token_id")]
    if any(ends):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(filter(None, [ends[0], "$A", ends[1]])),
            special_tokens=[(token, tokens.index(token)) for token in ends if token],
        )
    return tokenizer
