"""Runs small models of transformers, and compares their attention layers with `from_hf`.

Layers have random weights and are run as they stand, but in float64: theirs compute angles in
float32, which at position 4095 leaves four digits. `in_double` lets every mention of float32
mean float64 while they run; no line of their code is replaced.
"""

import contextlib
import copy
import dataclasses
import importlib
import inspect
import io
import json
import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import posenc_jax as pe
from tests.hf.test_layers import computed

TOKENS = 20
TOLERANCE = 2e-4  # Of the greatest number of an output; float32 against float64.
BY_GROUP = "gpt_neox", "gpt_neox_japanese", "bloom", "persimmon", "falcon", "deberta"
ROLES = {
    "q": "q_b_proj q_gate_proj q_proj query query_proj q q_lin linear_q Wq",
    "k": "k_proj key key_proj k k_lin linear_k Wk",
    "v": "v_proj value value_proj v v_lin linear_v Wv",
    "qkv": "qkv_proj query_key_value Wqkv c_attn",
    "out": "o_proj out_proj dense o out_lin linear_out c_proj Wo",
    "q_norm": "q_norm q_b_norm q_layernorm query_layernorm qk_norm",
    "k_norm": "k_norm kv_norm k_layernorm key_layernorm",
}


@contextlib.contextmanager
def in_double():
    originals = torch.float, torch.float32, torch.Tensor.float
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float, torch.float32, torch.Tensor.float = originals
        torch.set_default_dtype(torch.float32)


def randomize(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if not parameter.requires_grad:  # A fixed table.
            continue
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = values * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5)
    return module.eval()


def about(config, **facts):
    """Returns the description that a golden file has as its array `about`: JSON."""
    described = {
        "origin": f"transformers {transformers.__version__}, {type(config).__module__}",
        "torch": torch.__version__,
        "config": json.loads(config.to_json_string(use_diff=False)),
    }
    return np.array(json.dumps(described | facts))


def write(file, layers, model_types, arrays):
    """Writes a file of layers of several model types."""
    described = {"origin": f"transformers {transformers.__version__}, {layers} in float64"}
    described |= {"torch": torch.__version__, "model_types": model_types}
    np.savez_compressed(file, about=np.array(json.dumps(described)), **arrays)
    print(file.stat().st_size)


def build(kind, raw):
    """A model with random weights, in float64, and its file."""
    cls = transformers.CONFIG_MAPPING[kind]
    config = cls.from_dict({"model_type": kind} | copy.deepcopy(raw))
    # Falcon's eager attention adds ALiBi twice.
    config._attn_implementation = "sdpa" if kind == "falcon" else "eager"
    config._experts_implementation = "eager"
    config.dtype = None
    model = transformers.AutoModel._model_mapping.get(cls, None)
    path = cls.__module__.replace("configuration_", "modeling_")
    file = importlib.import_module(path if model is None else model.__module__)
    if model is None:
        model = next(x for n, x in vars(file).items() if n.endswith("TextModel"))
    return randomize(model._from_config(config)), file


@contextlib.contextmanager
def recorded(model, file):
    """Yields the events of a model that runs, in order: (name, module, arguments, options, result).

    They are the calls of all modules, named "call", and of its file's functions that rotate or
    attend, without a module.
    """
    events = []

    def called(module, args, options, out):
        if isinstance(out, torch.Tensor):
            out = out.clone()  # Longformer scales its queries in place.
        events.append(("call", module, args, options, out))

    def watched(name, function):
        def wrapped(*args, **options):
            out = function(*args, **options)
            events.append((name, None, args, options, out))
            return out

        return wrapped

    watch = "eager_attention_forward", "apply_rotary"
    originals = {name: x for name, x in vars(file).items() if name.startswith(watch)}
    hooks = [m.register_forward_hook(called, with_kwargs=True) for m in model.modules()]
    try:
        for name, function in originals.items():
            setattr(file, name, watched(name, function))
        yield events
    finally:
        for name, function in originals.items():
            setattr(file, name, function)
        for hook in hooks:
            hook.remove()


def run(kind, raw, seed, offset=0):
    """A model, and the calls of its attention layers and of its tables of positions."""
    with in_double(), torch.no_grad():
        model, file = build(kind, raw)
        names = inspect.signature(model.forward).parameters
        torch.manual_seed(seed)
        ids = torch.randint(3, 60, (1, TOKENS))
        positions = torch.arange(TOKENS)[None] + offset if offset else None
        options = {"position_ids": positions, "decoder_input_ids": ids, "use_cache": False}
        with recorded(model, file) as events:
            model(input_ids=ids, **{n: x for n, x in options.items() if n in names})
        return model, layers(model, events), tables(model, events)


def attended(args, options):
    """The arguments of the eager function of attention by name, without the module."""
    names = "query", "key", "value", "attention_mask", "scaling"
    return dict(zip(names, args[1:], strict=False)) | options


def layers(model, events):
    """The layers that attended to their own input, in order, as dicts.

    "module"; "roles", its parts by the keys of `ROLES`, and under the same keys their outputs;
    "x" and "y", its input and output; "before_out", the input of its output projection. Of the
    eager function of attention: "given", its arguments, and "out"; "rotations", (name, arguments)
    of the functions that rotated before.
    """
    records, rotations = {}, []
    for name, _, args, options, result in events:
        if name.startswith("apply_rotary"):
            rotations.append((name, args))
        elif name == "eager_attention_forward":
            arguments = attended(args, options)
            layer = records.setdefault(id(args[0]), {"module": args[0]})
            if "out" not in layer:  # Albert's layers are one.
                layer |= {"given": arguments, "out": result[0], "rotations": rotations}
            rotations = []
    for module in model.modules():
        children = dict(module.named_children())
        roles = {
            role: getattr(children[word], "linear", children[word])  # Inkling-2's have a norm.
            for role, words in ROLES.items()
            for word in words.split()
            if word in children
        }
        if hasattr(module, "q_bias"):  # DeBERTa's, beside a projection without bias.
            roles["qkv"] = module.in_proj
        if ("q" in roles and "k" in roles) or "qkv" in roles or id(module) in records:
            records.setdefault(id(module), {"module": module})["roles"] = roles
    names = {id(module): name for name, module in model.named_modules()}
    for layer in records.values():
        layer["name"] = names[id(layer["module"])]
        _add_calls(layer, events)
    # Inkling-2's inputs attend to outputs of earlier layers.
    others = "EncDecAttention", "encoder_attn", "crossattention", "indexer", "_input"
    called = [
        x for x in records.values() if "order" in x and not any(c in x["name"] for c in others)
    ]
    if model.config.model_type == "longformer":  # Batches come second, and padding last.
        for x in called:
            x |= {n: x[n].transpose(0, 1)[:, :TOKENS] for n in "qkv"} | {"y": x["y"][:, :TOKENS]}
    if model.config.model_type == "deberta":
        for x in called:
            q_bias, v_bias = (x["module"].get_parameter(f"{n}_bias") for n in "qv")
            biases = torch.stack([q_bias, torch.zeros_like(q_bias), v_bias])
            heads = model.config.num_attention_heads
            x["qkv"] = x["qkv"] + biases.reshape(3, heads, -1).transpose(0, 1).flatten()
    return sorted(called, key=lambda x: x["order"])


def tables(model, events):
    """(weight or `None`, rows) of the tables of positions that were used at the input."""
    names = {id(module): name for name, module in model.named_modules()}
    suffixes = "position_embeddings", "embed_positions", "wpe", "positions_embed"
    if model.config.model_type == "roformer":
        return []  # Its table has the sines and cosines of the rotation.
    if model.config.model_type == "ctrl":
        return [(model.pos_encoding, model.pos_encoding[:TOKENS])]
    return [
        (getattr(part, "weight", None), result[..., :TOKENS, :])  # Longformer's go on in padding.
        for kind, part, _, _, result in events
        if kind == "call" and names.get(id(part), "").endswith(suffixes) and result.ndim < 4
    ]


def _add_calls(layer, events):
    """Adds the projections, and the output of the module."""
    by_part = {id(part): role for role, part in layer["roles"].items()}
    for i, (kind, part, args, options, result) in enumerate(events):
        if kind == "call" and part is layer["module"] and "order" not in layer:
            layer["x"] = args[0] if args else options.get("hidden_states")
            names = inspect.signature(part.forward).parameters
            arguments = dict(zip(names, args, strict=False)) | options
            layer |= {n: arguments.get(n) for n in ("attention_mask", "rel_embeddings")}
            layer["y"] = result[0] if isinstance(result, tuple) else result
            layer["order"] = i
        elif kind == "call" and id(part) in by_part:
            role = by_part[id(part)]
            if role == "out":
                role, result = "before_out", args[0]
            layer.setdefault(role, result)


def check(kind, raw, seed, offset):
    """(outcome, text): "same", "differs", "error", or "refused" by `from_hf` or "transformers"."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            model, layers, tables = run(kind, raw, seed, offset)
    except Exception as error:
        return "transformers", f"{type(error).__name__}: {error}"
    config = {"model_type": kind} | raw
    halves = ("encoder", "decoder") if model.config.is_encoder_decoder else (None,)
    try:
        for half in halves:
            decoder = None if half is None else half == "decoder"
            specs = pe.from_hf(config, decoder=decoder)
            of_half = [x for x in layers if x["name"].startswith(half or "")]
            options = options_of(config, decoder)
            if text := compare(specs, options, of_half, tables, model, offset):
                return "differs", text
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("from_hf:"):
            return "refused", str(error)
        return "error", traceback.format_exc()
    return "same", ""


def options_of(config, decoder):
    """The arguments of `Attention` for each layer; None where it is another attention."""
    try:
        return pe.attention_options_from_hf(config, decoder=decoder)
    except ValueError as error:
        if str(error).startswith("attention_options_from_hf:"):
            return None
        raise


def compare(specs, options, layers, tables, model, offset):
    """Returns the differences, or an empty text."""
    if not layers and {spec.scheme for spec in specs} != {pe.NoPE()}:
        return "no attention found"
    positions = jnp.arange(TOKENS, dtype=jnp.int32)[None] + offset
    seen = {"alpha": getattr(getattr(model, "rotary_emb", None), "alpha", None)}
    shared = getattr(getattr(model, "encoder", None), "relative_attention_bias", None)
    if shared is not None:  # MPNet's.
        seen["t5"] = array(shared.weight).T
    messages, scheme, used = [], specs[0].scheme, set()
    if bool(tables) != (pe.Acts.EMBEDDING in scheme.acts):
        return f"{len(tables)} tables at the input, and {scheme}"
    if tables and not (error := embedding_error(scheme, tables[0], positions)) <= TOLERANCE:
        messages.append(f"input: {error:.2e} {scheme}")
    for i, layer in enumerate(layers):
        index = index_of(layer, i)
        if index < len(specs) and specs[index].mixer != "attention":
            continue
        used |= {*range(len(specs))} if model.config.model_type == "albert" else {index}
        if index >= len(specs):
            return f"{len(specs)} layers, and there is layer {index}"
        if options and (text := option_error(options[index], layer, model.config)):
            messages.append(f"layer {index}: {text}")
        want = expected_output(layer)
        out = output(specs[index], layer, model.config, positions, seen)
        error = np.abs(np.asarray(out).reshape(want.shape) - want).max() / np.abs(want).max()
        if not error <= TOLERANCE:
            messages.append(f"layer {index}: {error:.2e} {specs[index]}")
    without = {i for i, spec in enumerate(specs) if spec.mixer != "attention"}
    bare = sorted({*range(len(specs))} - used - without)
    return "; ".join(messages + ([f"no attention in layers {bare}"] if bare else []))


def array(x):
    return jnp.asarray(x.detach().numpy(), jnp.float32)


def output(spec, layer, config, positions, seen):
    """The output of attention by our layer [B, T, N, H], for positions `at`."""
    q, k = projected(layer, config)
    if config.model_type == "deepseek_v4":  # Its layers attend to compressed entries, too.
        q, k = spec.scheme.query({}, q, positions), spec.scheme.key({}, k, positions)
        return jnp.concatenate([q, k], 2)
    if isinstance(spec.scheme, pe.Inkling) and spec.scheme.clip is None:
        # Between projection and norm there is a convolution.
        spec = dataclasses.replace(spec, qk_norm=None)
    options = {"is_causal": is_causal(layer)}
    if spec.scheme.acts_in_attention:
        options["params"] = scheme_params(spec.scheme, layer, seen)
    if config.model_type in ("olmo", "olmoe"):
        options["clip"] = config.clip_qkv
    return computed(spec, layer_arrays(spec, layer, config), positions, **options)


def layer_arrays(spec, layer, config):
    """The arrays of a layer, for `computed`."""
    q, k = projected(layer, config)
    if isinstance(spec.scheme, pe.Inkling) and spec.scheme.clip is None:
        q, k = array(layer["q_norm"]), array(layer["k_norm"])
    elif isinstance(spec.scheme, pe.Inkling):  # Clipped keys stay as they are.
        k = array(layer["given"]["key"].transpose(1, 2))
    arrays = {"q": q, "k": k, "v": values(layer, config), "x": array(layer["x"])}
    if spec.qk_norm is not None:
        for n in "qk":
            params = _norm_params(spec.qk_norm, layer, n, *arrays[n].shape[2:])
            arrays |= {f"{n}_norm.{name}": value for name, value in params.items()}
    if spec.sinks == "projected":
        arrays["sinks"] = array(layer["given"]["sinks"][..., 0].transpose(1, 2))
    elif spec.sinks:
        arrays["sinks"] = array(layer["module"].sinks)
    if hasattr(layer["module"], "sqk"):  # Dory's.
        factor = array(layer["module"].sqk * layer["module"].sqk_scale) ** 2
        arrays["q_factor"] = factor.reshape(q.shape[2:])
    return arrays


def expected_output(layer):
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
            bias = getattr(layer["module"], f"{name[0]}_bias", part.bias)  # DeBERTa's.
            arrays[name] = bias is not None
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
    parts = zip(parts, (heads, kv, kv), strict=True)
    return tuple(jnp.moveaxis(p, 0, -1).reshape(*x.shape[:2], n, -1) for p, n in parts)


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
    if norm.kind == "clip":
        part = layer["module"].q_proj.norm
        return {"scale": array(part.scale) if which == "q" else jnp.ones((heads, dim))}
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
        bias = getattr(module, "relative_position_bias", None)
        linear = module.r_proj if scheme.clip is None else bias.linear
        project = array(linear.weight).T.reshape(-1, scheme.num_heads, scheme.rank)
        if scheme.clip is None:
            return {"project": project, "bank": array(module.rel_logits_proj.proj)}
        return {"project": project, "bank": array(bias.proj), "scale": array(bias.norm.scale)}
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
        names = {"pos_key_proj": "keys", "pos_query_proj": "queries"}
        for part, name in (names | {"pos_proj": "keys", "pos_q_proj": "queries"}).items():
            if hasattr(module, part):
                params[name] = array(getattr(module, part).weight).T.reshape(-1, *heads)
                if name == "queries":
                    params["bias"] = array(getattr(module, part).bias).reshape(heads)
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
