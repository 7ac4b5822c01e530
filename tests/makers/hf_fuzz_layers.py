"""Attention layers of transformers computed by a `LayerSpec`, from their own projections."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import torch

import posenc_jax as pe
from tests.hf.layer_arrays import computed

BY_GROUP = "gpt_neox", "gpt_neox_japanese", "bloom", "persimmon", "falcon"


def array(x):
    return jnp.asarray(x.detach().numpy(), jnp.float32)


def output(spec, layer, config, positions, seen):
    """The output of attention by our layer [B, T, N, H], for positions `at`."""
    q, k = projected(layer, config)
    if config.model_type == "deepseek_v4":  # Its layers attend to compressed entries, too.
        return jnp.concatenate(
            [spec.scheme.query({}, q, positions), spec.scheme.key({}, k, positions)], 2
        )
    if isinstance(spec.scheme, pe.Inkling):  # Between projection and norm there is a convolution.
        spec = dataclasses.replace(spec, qk_norm=None)
    params = None
    if spec.scheme.acts_in_attention:
        params = scheme_params(spec.scheme, layer, seen)
    clips = config.model_type in ("olmo", "olmoe")
    return computed(
        spec,
        layer_arrays(spec, layer, config),
        positions,
        params=params,
        clip=config.clip_qkv if clips else None,
        is_causal=is_causal(layer),
    )


def layer_arrays(spec, layer, config):
    """The arrays of a layer, for `computed`."""
    q, k = projected(layer, config)
    if isinstance(spec.scheme, pe.Inkling):
        q, k = array(layer["q_norm"]), array(layer["k_norm"])
    arrays = {"q": q, "k": k, "v": values(layer, config), "x": array(layer["x"])}
    if spec.qk_norm is not None:
        for n in "qk":
            params = _norm_params(spec.qk_norm, layer, n, *arrays[n].shape[2:])
            arrays |= {f"{n}_norm.{name}": value for name, value in params.items()}
    if spec.sinks:
        logits = layer["sinks"] if spec.sinks == "projected" else layer["module"].sinks
        arrays["sinks"] = array(logits)
    return arrays


def wanted(layer):
    """The output of attention by transformers."""
    if hasattr(layer["module"], "kv_norm"):
        query, key = (layer["given"][n].transpose(1, 2) for n in ("query", "key"))
        return torch.cat([query, key[:, : query.shape[1]]], 2).numpy()
    if "out" in layer:
        return layer["out"].numpy()
    return layer.get("before_out", layer["y"]).numpy()


def index_of(layer, default):
    """The number of a layer in its model, or a default where transformers keeps none."""
    if match := re.search(r"layers\.(\d+)\.shared_transf", layer["name"]):  # Zamba's.
        return int(match[1])
    index = getattr(layer["module"], "layer_idx", None)
    return default if index is None else index


def is_causal(layer):
    """Whether a layer of transformers hides later tokens, by its mask."""
    if type(layer["module"]).__module__.endswith("modeling_openai"):
        return True  # Its mask is a part of the layer.
    mask = layer.get("given", layer).get("attention_mask")
    if mask is None or mask.ndim != 4:
        return False  # Layers that are causal have a mask, as no fused function runs.
    hidden = mask[0, 0, 0, 1]
    if hasattr(layer["module"], "max_seq_length"):  # MPT's mask is true where it hides.
        return bool(hidden)
    return bool(~hidden) if hidden.dtype == torch.bool else bool(hidden < -1e4)


def option_error(options, layer, config):
    """Arguments of `Attention` that the layer of transformers has not, or an empty text."""
    (q, k), v, roles = projected(layer, config), values(layer, config), layer["roles"]
    arrays = {
        "model_dim": layer["x"].shape[-1],
        "num_heads": q.shape[2],
        "num_kv_heads": k.shape[2],
        "head_dim": q.shape[3],
        "is_causal": is_causal(layer),
    }
    names = {"query": ("q", "qkv"), "key": ("k", "qkv"), "value": ("v", "qkv"), "out": ("out",)}
    biases = options["use_bias"]
    options = options | (biases if isinstance(biases, dict) else dict.fromkeys(names, biases))
    options["v"], arrays["v"] = (options["num_kv_heads"], options["head_dim"]), v.shape[2:]
    for name, parts in names.items():
        part = next((roles[p] for p in parts if p in roles), None)
        if part is not None:
            arrays[name] = part.bias is not None
    return ", ".join(
        f"{n}={options[n]}, {x} in transformers" for n, x in arrays.items() if options[n] != x
    )


def projected(layer, config):
    """q and k [B, T, heads, H] as projected, before norms and rotation."""
    kind, arguments = config.model_type, layer.get("given")
    if "qkv" in layer:
        return _fused(array(layer["qkv"]), config)[:2]
    if hasattr(layer["module"], "kv_b_proj"):
        return _latent(layer)
    heads = config.num_attention_heads
    if kind == "deepseek_v4":
        return array(layer["q_norm"].transpose(1, 2)), array(layer["k_norm"][:, :, None])
    if arguments is None:
        dim = layer["q"].shape[-1] if layer["q"].ndim == 4 else layer["q"].shape[-1] // heads
    else:
        dim = arguments["query"].shape[-1]
    q, k = array(layer["q"]), array(layer["k"])
    if kind.startswith(("qwen3_next", "qwen3_5", "qwen4_exp")):  # Beside the queries, a gate.
        q = q.reshape(*q.shape[:2], heads, 2, dim)[..., 0, :]
    return tuple(x.reshape(*x.shape[:2], -1, dim) for x in (q, k))


def values(layer, config):
    """v [B, T, K, H]."""
    arguments = layer.get("given")
    if arguments is not None:
        return array(arguments["value"].transpose(1, 2))
    if "qkv" in layer:
        return _fused(array(layer["qkv"]), config)[2]
    v, k = array(layer["v"]), projected(layer, config)[1]
    return v.reshape(*v.shape[:2], k.shape[2], -1)


def _fused(x, config):
    """q, k and v of one projection [B, T, outputs]."""
    kind, heads = config.model_type, config.num_attention_heads
    kv = config.num_key_value_heads if kind in ("phi3", "phi4_multimodal", "dbrx") else heads
    if kind == "falcon":
        kv = 1 if config.multi_query else heads
        kv = config.num_kv_heads if config.new_decoder_architecture else kv
    if kind in ("mpt", "dbrx"):
        clip = config.attn_config.clip_qkv
        x = x if clip is None else jnp.clip(x, -clip, clip)
    if kind == "codegen":
        parts = x.reshape(*x.shape[:2], 4, 3, -1)
        q, v, k = (parts[..., i, :].reshape(*x.shape[:2], heads, -1) for i in range(3))
        return q, k, v
    order = "by_group" if kind in BY_GROUP else "concatenated"
    if kind == "gpt_bigcode":
        order, kv = ("concatenated", 1) if config.multi_query else ("by_group", heads)
    parts = pe.split_qkv(jnp.moveaxis(x, -1, 0), heads, kv, order=order)
    counts = heads, kv, kv
    return tuple(
        jnp.moveaxis(p, 0, -1).reshape(*x.shape[:2], n, -1)
        for p, n in zip(parts, counts, strict=True)
    )


def _latent(layer):
    """q and k of latent attention, rotated at their ends."""
    query, key = (layer["given"][n] for n in ("query", "key"))
    q = layer["q"] * getattr(layer["module"], "mla_scale_q_lora", 1.0)
    q = q.reshape(*query.shape[:1], query.shape[2], query.shape[1], -1)
    q = q[..., : query.shape[-1]]  # A.X K2 has a gate beside the queries.
    k = key.transpose(1, 2)
    calls = [args for name, args in layer["rotations"] if name.endswith("interleave")]
    calls = calls or [args for _, args in layer["rotations"]]
    if calls:  # Of the queries and keys; an indexer has further ones.
        part = calls[0][1] if isinstance(calls[0][1], torch.Tensor) else calls[1][0]
        part = part if part.shape[2] == k.shape[1] else part.transpose(1, 2)
        end = part.transpose(1, 2).expand(*k.shape[:3], -1)
        k = torch.cat([k[..., : k.shape[-1] - end.shape[-1]], end], -1)
    return array(q), array(k)


def _norm_params(norm, layer, which, heads, dim):
    part = layer["roles"].get(f"{which}_norm")
    shapes = jax.eval_shape(lambda: norm.init(heads, dim))
    out = {}
    for name, like in shapes.items():
        parts = part.norms if hasattr(part, "norms") else [part]
        arrays = [array(getattr(p, "weight" if name == "scale" else name)) for p in parts]
        out[name] = jnp.stack(arrays).reshape(like.shape)
    return out


def scheme_params(scheme, layer, seen):
    """The parameters of a scheme, from the modules of transformers."""
    module = layer["module"]
    if hasattr(scheme, "schemes"):
        return tuple(scheme_params(part, layer, seen) for part in scheme.schemes)
    if isinstance(scheme, pe.T5):
        if getattr(module, "has_relative_attention_bias", False):
            seen["t5"] = array(module.relative_attention_bias.weight).T
        return {"table": seen["t5"]}
    if isinstance(scheme, pe.Inkling):
        project = array(module.r_proj.weight).T
        project = project.reshape(-1, scheme.num_heads, scheme.rank)
        params = {"project": project, "bank": array(module.rel_logits_proj.proj)}
        return params | ({} if scheme.clip is None else {"scale": array(module.rel_l2_clip.scale)})
    if isinstance(scheme, pe.DeBERTa):
        return _deberta_params(scheme, layer)
    if isinstance(scheme, pe.SSMax):
        scaling = module.softmax_scaling
        return {"scale": array(scaling.scale).ravel(), "offset": array(scaling.bias).ravel()}
    if isinstance(scheme, pe.LearnedRoPE):
        return {"alpha": array(seen["alpha"]).reshape(1, -1)}
    return scheme.init(jax.random.key(0))


def _deberta_params(scheme, layer):
    module, table = layer["module"], layer["rel_embeddings"][: 2 * scheme.span]
    heads = (scheme.num_heads, scheme.head_dim)
    if scheme.projected:
        params = {"keys": module.key_proj(table), "queries": module.query_proj(table)}
        params = {n: array(x).reshape(-1, *heads) for n, x in params.items()}
    else:
        params = {"table": array(table)}
        for name, part in (("keys", "pos_key_proj"), ("queries", "pos_query_proj")):
            if hasattr(module, part):
                params[name] = array(getattr(module, part).weight).T.reshape(-1, *heads)
                params["bias"] = array(getattr(module, part).bias).reshape(heads)  # Of the last.
    return {n: params[n] for n in jax.eval_shape(lambda: scheme.init(jax.random.key(0)))}


def embedding_error(scheme, table, positions):
    """The greatest error of the embedding, relative to its greatest value."""
    weight, rows = table
    scheme = getattr(scheme, "schemes", (scheme,))[0]
    want = rows.reshape(1, -1, rows.shape[-1]).numpy()
    shapes = jax.eval_shape(lambda: scheme.init(jax.random.key(0)))
    params = {"table": array(weight)} if "table" in shapes else {}
    if {n: x.shape for n, x in params.items()} != {n: x.shape for n, x in shapes.items()}:
        return np.inf
    got = scheme.embed(params, jnp.zeros(want.shape, jnp.float32), positions)
    return np.abs(np.asarray(got) - want).max() / np.abs(want).max()


def weights(layer):
    """The input and the output of a layer, and its weights as PyTorch has them."""
    arrays = {"x": layer["x"], "y": layer["y"]}
    names = {"q": "query", "k": "key", "v": "value", "qkv": "qkv", "out": "out"}
    for role, part in layer["roles"].items():
        if role in names:
            arrays |= {f"{names[role]}.{n}": p for n, p in part.named_parameters()}
        else:
            parts = part.norms if hasattr(part, "norms") else [part]
            for name, ours in (("weight", "scale"), ("bias", "bias")):
                if getattr(parts[0], name, None) is not None:
                    which = "query_norm" if role == "q_norm" else "key_norm"
                    arrays[f"{which}.{ours}"] = torch.stack([getattr(p, name) for p in parts])
    if hasattr(layer["module"], "sinks"):
        arrays["sinks"] = layer["module"].sinks
    return {n: x.detach().numpy().astype(np.float32) for n, x in arrays.items()}
