"""GGUF files of the models in `golden`, by the rules of llama.cpp's converter (conversion/*.py).

Written from that converter, not from the reader in `examples`.
"""

import math

import gguf
import numpy as np

BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA = BLOCK | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
OUTSIDE |= {name: name for name in ("rope_factors_short", "rope_factors_long")}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}


def tensors(config, state):
    """{name: array} of a file."""
    kind, result = config["model_type"], {}
    for name, x in state.items():
        module, leaf = name.rsplit(".", 1)
        if kind in ("llama", "mistral") and module.endswith(("q_proj", "k_proj")):
            is_q = module.endswith("q_proj")
            heads = config["num_attention_heads" if is_q else "num_key_value_heads"]
            halves = x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:])
            x = halves.swapaxes(1, 2).reshape(x.shape)
        if kind.startswith("gemma") and module.endswith("norm"):
            x = x + 1
        if module in OUTSIDE:
            module = OUTSIDE[module]
        else:
            _, _, i, module = module.split(".", 3)
            module = f"blk.{i}.{(GEMMA if kind.startswith('gemma') else BLOCK)[module]}"
        result[f"{module}.{leaf}"] = x
    return result


def settings(config):
    """{key without the architecture: value}, and the factors on wavelengths."""
    kind, rope = config["model_type"], config["rope_parameters"]
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // heads
    full = rope.get("full_attention", rope)
    values = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": dim,
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": full["rope_theta"],
    }
    if config.get("head_dim"):
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if kind in ("llama", "mistral"):
        values["rope.dimension_count"] = head_dim
    if kind in ("gemma2", "gemma3_text", "phi3") or kind == "mistral":
        values["attention.sliding_window"] = config["sliding_window"]
    if kind == "gemma2":
        del values["rope.freq_base"]
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            values[name] = config[name]
    if kind == "gemma3_text":
        values["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    if kind == "phi3":
        values["rope.dimension_count"] = int(rope["partial_rotary_factor"] * dim) // heads
        values["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    if full["rope_type"] == "yarn":
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": full["factor"]}
        length = full["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = length
    factors = None
    if full["rope_type"] == "llama3":
        factors = [llama3(theta, full) for theta in inverse(full["rope_theta"], head_dim)]
    return values, factors


def inverse(base, dim):
    """Frequencies of pairs."""
    return [base ** (-i / dim) for i in range(0, dim, 2)]


def llama3(frequency, rope):
    """The factor on a wavelength."""
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    if wavelength < length / high:
        return 1.0
    if wavelength > length / low:
        return factor
    smooth = (length / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def write(path, config, state, *, tokenizer=None, quantize=(), **changes):
    """Writes a file.

    Args:
      path: the file.
      config, state: as of transformers.
      tokenizer: {key: value} under tokenizer.ggml.
      quantize: types for names of tensors.
      **changes: keys of metadata with `__` for a dot; None drops one.
    """
    values, factors = settings(config)
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    metadata = {f"{architecture}.{key}": value for key, value in values.items()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in (tokenizer or {}).items()}
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    architecture = metadata.pop("general.architecture", architecture)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {bool: "bool", int: "uint32", float: "float32", str: "string"}[type(value)]
            getattr(writer, f"add_{add}")(key, value)
    arrays = tensors(config, state)
    if factors:
        arrays["rope_freqs.weight"] = np.array(factors, np.float32)
    for name, x in arrays.items():
        kind = dict(quantize).get(name)
        x = x if kind is None else gguf.quantize(x, kind)
        writer.add_tensor(name, x, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
