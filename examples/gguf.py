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
    try:
        config = _config(file)
    except (IndexError, TypeError, ZeroDivisionError):
        raise file.error("has settings that make no model") from None
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
        shape = tensor.shape.tolist()
        if not 0 < len(shape) < 3 or 0 in shape:
            raise file.error(f"has the tensor {name!r} of shape {shape}")
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

    def tokenizer():
        try:
            return _tokenizer(file)
        except (ImportError, ValueError):
            raise
        except Exception as error:  # tokenizers raises Exception itself.
            raise file.error(f"has a damaged tokenizer ({error})") from None

    return config, readers, tokenizer, about


class _File:
    """Metadata and tensors of a file, which knows the keys that were read."""

    def __init__(self, path):
        import gguf

        class Reader(gguf.GGUFReader):
            def _get(self, offset, dtype, count=1, override_order=None):
                # Else a damaged count of 2^40 is a loop as long.
                if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                    raise ValueError("it ends early")
                return super()._get(offset, dtype, count, override_order)

        self.path = path
        with path.open("rb") as file:
            start = file.read(8)
        if start[:4] != b"GGUF":
            raise self.error("is not a GGUF file")
        if start[4:6] == b"\0\0":
            raise self.error("is big-endian, which is not supported")
        try:
            reader = Reader(path)
        except Exception as error:
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise self.error(f"is truncated or damaged ({message})") from None
        self.fields, self.used = reader.fields, set()
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        if self.get("split.count", 1) not in (0, 1):
            raise self.error("is one of several parts; llama-gguf-split --merge joins them")
        self.architecture = self.get("general.architecture")
        self._check_tensors(int(reader.data_offset), int(reader.alignment))

    def error(self, text):
        """An error about the file."""
        return ValueError(f"read: {str(self.path)!r} {text}.")

    def get(self, key, *default):
        """The value of a key."""
        self.used.add(key)
        if key in self.fields:
            try:
                value = self.fields[key].contents()
            except UnicodeDecodeError:
                raise self.error(f"has a setting {key!r} that is no text") from None
            return float(str(np.float32(value))) if isinstance(value, float) else value
        if not default:
            raise self.error(f"lacks the setting {key!r}")
        return default[0]

    def _check_tensors(self, offset, alignment):
        import gguf

        for name, tensor in self.tensors.items():
            if tensor.data_offset != offset:  # As llama.cpp wants it.
                raise self.error(
                    f"has the tensor {name!r} at {tensor.data_offset}, not at {offset}"
                )
            offset += -(-int(tensor.n_bytes) // alignment) * alignment
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
    kind, tensors = file.architecture, file.tensors

    def get(key, *default):
        value = file.get(f"{kind}.{key}", *default)
        if isinstance(value, list):
            if len({*value}) > 1:
                raise file.error(f"has {kind}.{key}={value}, which differs by layer")
            value = value[0]
        return value

    def only(key, expected):
        value = get(key, expected)
        if value != expected:
            raise file.error(f"has {kind}.{key}={value}; supported: {expected}")

    if "token_embd.weight" not in tensors:
        raise file.error("lacks the tensor 'token_embd.weight'")
    dim, heads, layers = get("embedding_length"), get("attention.head_count"), get("block_count")
    if type(layers) is not int or not 0 < layers <= len(tensors):
        raise file.error(f"has block_count={layers!r} and {len(tensors)} tensors")
    head_dim = get("attention.key_length", dim // heads)
    only("attention.value_length", head_dim)
    only("attention.causal", True)
    config = {
        "model_type": kind,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",  # Gemma has "hidden_activation".
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": get("rope.freq_base", 10000.0),
    }
    rotated = get("rope.dimension_count", head_dim)
    if kind == "phi3":
        config["partial_rotary_factor"] = rotated / head_dim
        config["original_max_position_embeddings"] = get(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
        config["sliding_window"] = get("attention.sliding_window") or None
    else:
        only("rope.dimension_count", head_dim)
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
        if window := get("attention.sliding_window", 0):
            config |= {"model_type": "mistral", "sliding_window": window}
    if kind.startswith("gemma"):
        config |= _gemma(file, get, config)
    config["rope_scaling"] = _rope_scaling(file, get, only, rotated)
    for key in file.fields.keys() - file.used:
        unknown = key.startswith(f"{kind}.") and key.removeprefix(f"{kind}.") not in _IGNORED
        if unknown and (value := file.get(key)):
            raise file.error(f"has {key}={value}, which is not supported")
    return config


def _gemma(file, get, config):
    """The settings of Gemma 2 and 3."""
    two, layers = file.architecture == "gemma2", config["num_hidden_layers"]
    window = get("attention.sliding_window", 4096 if two else 0)
    pattern = f"{file.architecture}.attention.sliding_window_pattern"
    local = file.get(pattern, 2 if two else 6)
    if not isinstance(local, list):
        local = [(i + 1) % local > 0 for i in range(layers)]
    scale = config["head_dim"]
    if layers == (46 if two else 62):  # 27B.
        scale = config["hidden_size"] // config["num_attention_heads"]
    settings = {
        "sliding_window": window or None,
        "layer_types": [f"{'sliding' if x and window else 'full'}_attention" for x in local],
        "query_pre_attn_scalar": scale,
        "final_logit_softcapping": get("final_logit_softcapping", 30.0 if two else None),
    }
    if two:
        return settings | {"attn_logit_softcapping": get("attn_logit_softcapping", 50.0)}
    theta = get("rope.freq_base_swa", 10000.0)
    return settings | {"model_type": "gemma3_text", "rope_local_base_freq": theta}


def _rope_scaling(file, get, only, rotated):
    """The scaling of rotary frequencies, or None."""

    def factors(name):
        tensor = file.tensors.pop(f"rope_{name}.weight", None)
        if tensor is None:
            return None
        if tensor.shape.tolist() != [rotated // 2]:
            raise file.error(f"has rope_{name} of {tensor.shape}, and {rotated // 2} frequencies")
        return [float(str(x)) for x in tensor.data]

    kind, factor = get("rope.scaling.type", "linear"), get("rope.scaling.factor", 0.0)
    factor = factor or get("rope.scale_linear", 0.0)
    length = get("rope.scaling.original_context_length", get("context_length"))
    if file.architecture in ("llama", "phi3") and "rope_factors_long.weight" in file.tensors:
        return {
            "rope_type": "longrope",
            "short_factor": factors("factors_short"),
            "long_factor": factors("factors_long"),
            "attention_factor": get("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": length,
        }
    only("rope.scaling.attn_factor", 1.0)
    if file.architecture == "llama" and "rope_freqs.weight" in file.tensors:
        only("rope.scaling.factor", 0.0)
        only("rope.scale_linear", 0.0)
        return _llama3(factors("freqs"), get("rope.freq_base", 10000.0), length)
    if kind == "yarn":
        only("rope.scaling.yarn_ext_factor", 1.0)
        scaling = {ours: get(f"rope.scaling.yarn_{theirs}", None) for ours, theirs in _YARN.items()}
        scaling = {name: value for name, value in scaling.items() if value is not None}
        scaling |= {"factor": get("rope.scaling.factor"), "rope_type": "yarn"}
        return scaling | {"original_max_position_embeddings": length}
    if kind not in ("none", "linear"):
        raise file.error(f"has rope.scaling.type={kind!r} and no tensors with its factors")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor else None


_YARN = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}


def _llama3(factors, theta, length):
    """The scaling that divides frequencies by these factors; Llama 3's, if they are its."""
    frequencies = theta ** -(np.arange(len(factors)) / len(factors))
    llama3 = pe.Llama3(max(1.0, *factors))  # 8192, 1 and 4, as in all releases of Meta.
    scaled, _ = llama3(frequencies, 2 * len(factors), theta)
    if np.allclose(frequencies / scaled, factors, 1e-5, 0.0):
        return pe.to_hf(pe.RoPE(2 * len(factors), theta=theta, scaling=llama3))
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": length,
    }


# Patterns of the words that merges do not cross, and the values of tokenizer.ggml.pre.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_KINDS = {
    "gpt-2 phi-2 mpt olmo": [_GPT2],
    "smollm starcoder refact command-r codeshell exaone": [r"\p{N}", _GPT2],
    "qwen2 deepseek-r1-qwen stablelm2": [_SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST],
    "llama-bpe llama3 llama-v3 falcon3 pixtral dbrx smaug-bpe": [
        _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
    ],
    "tekken": [_CASED % ("", "") + r"|\p{N}" + _REST.replace("n]*", "n/]*")],
    "gpt-4o": [
        _CASED % (_SHORT + "?", _SHORT + "?") + r"|\p{N}{1,3}" + _REST.replace("n]*", "n/]*")
    ],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
_PATTERNS = {name: patterns for names, patterns in _KINDS.items() for name in names.split()}
# Vocabularies whose words need no merges, and which begin texts with a token.
_WHOLE_WORDS = "llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"
_CONTROL, _USER_DEFINED = 3, 4


def _tokenizer(file):
    """The tokenizer in the metadata."""
    import tokenizers
    from tokenizers import processors

    def get(key, *default):
        return file.get(f"tokenizer.ggml.{key}", *default)

    kind, tokens, kinds = get("model"), get("tokens"), get("token_type", [])
    if kind not in ("gpt2", "llama"):
        raise file.error(f"has a tokenizer of the kind {kind!r}; supported: ['gpt2', 'llama']")
    tokenizer = (_byte_level if kind == "gpt2" else _sentencepiece)(file, get, tokens)
    name = str(file.get("general.name", "")).lower()
    phi3 = "phi-3" in name or "phi3" in name  # As llama.cpp tells files of Phi-3.
    for which in (_CONTROL, _USER_DEFINED):
        texts = [token for token, kind in zip(tokens, kinds, strict=False) if kind == which]
        special = which == _CONTROL
        for text in texts:
            rstrip = phi3 and text not in ("<unk>", "<s>", "<|endoftext|>")
            options = {"normalized": False, "special": special, "rstrip": rstrip}
            tokenizer.add_tokens([tokenizers.AddedToken(text, **options)])
    defaults = {"bos": kind == "llama" or get("pre", None) in _WHOLE_WORDS, "eos": False}
    ids = [
        get(f"{name}_token_id") if get(f"add_{name}_token", default) else -1
        for name, default in defaults.items()
    ]
    bos, eos = (tokens[i] if i >= 0 else None for i in ids)
    if bos or eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[text for text in (bos, "$A", eos) if text],
            special_tokens=[(text, tokens.index(text)) for text in (bos, eos) if text],
        )
    return tokenizer


def _byte_level(file, get, tokens):
    """Byte-level BPE, as of GPT-2."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = get("pre", "default")
    if pre not in _PATTERNS:
        raise file.error(f"has a tokenizer with pre={pre!r}; supported: {[*_PATTERNS]}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ", 1)) for pair in get("merges")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, whole])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file, get, tokens):
    """SentencePiece's BPE, whose merges follow from the scores of tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: i for i, token in enumerate(tokens)}
    scores = get("scores")
    merges = [
        (-scores[i], -cut, token[:cut], token[cut:])
        for token, i in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges = [merge[2:] for merge in sorted(merges)]
    unknown = tokens[get("unknown_token_id", 0)]
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    space = normalizers.Replace(" ", "\u2581")
    after = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if get("add_space_prefix", True):
        space = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
        after.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = space, decoders.Sequence(after)
    return tokenizer
