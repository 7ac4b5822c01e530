"""Runs a small model of transformers, and records the calls of each of its attention layers."""

import contextlib
import copy
import importlib
import inspect

import torch
import transformers

from tests.makers.hf_record import in_double, randomize

TOKENS = 20
ROLES = {
    "q": (
        "q_b_proj",
        "q_gate_proj",
        "q_proj",
        "query",
        "query_proj",
        "q",
        "q_lin",
        "linear_q",
        "Wq",
    ),
    "k": ("k_proj", "key", "key_proj", "k", "k_lin", "linear_k", "Wk"),
    "v": ("v_proj", "value", "value_proj", "v", "v_lin", "linear_v", "Wv"),
    "qkv": ("qkv_proj", "query_key_value", "Wqkv", "c_attn"),
    "out": ("o_proj", "out_proj", "dense", "o", "out_lin", "linear_out", "c_proj", "Wo"),
    "q_norm": ("q_norm", "q_b_norm", "q_layernorm", "query_layernorm", "qk_norm", "q_l2_clip"),
    "k_norm": ("k_norm", "kv_norm", "k_layernorm", "key_layernorm", "k_l2_clip"),
    "sinks": ("sink_proj",),
}


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
        events.append(("call", module, args, options, out))

    def watched(name, function):
        def wrapped(*args, **options):
            out = function(*args, **options)
            events.append((name, None, args, options, out))
            return out

        return wrapped

    names = [n for n in vars(file) if n.startswith(("eager_attention_forward", "apply_rotary"))]
    originals = {name: getattr(file, name) for name in names}
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
            names = ("query", "key", "value", "attention_mask", "scaling")
            arguments = dict(zip(names, args[1:], strict=False)) | options
            layer = records.setdefault(id(args[0]), {"module": args[0]})
            if "out" not in layer:  # Albert's layers are one.
                layer |= {"given": arguments, "out": result[0], "rotations": rotations}
            rotations = []
    for module in model.modules():
        children = dict(module.named_children())
        roles = {
            role: children[word]
            for role, words in ROLES.items()
            for word in words
            if word in children
        }
        if ("q" in roles and "k" in roles) or "qkv" in roles or id(module) in records:
            records.setdefault(id(module), {"module": module})["roles"] = roles
    names = {id(module): name for name, module in model.named_modules()}
    for layer in records.values():
        layer["name"] = names[id(layer["module"])]
        _add_calls(layer, events)
    others = "EncDecAttention", "encoder_attn", "crossattention", "indexer"
    called = [
        x for x in records.values() if "order" in x and not any(c in x["name"] for c in others)
    ]
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
        (getattr(part, "weight", None), result)
        for kind, part, _, _, result in events
        if kind == "call" and names.get(id(part), "").endswith(suffixes) and result.ndim < 4
    ]


def _add_calls(layer, events):
    """Adds the projections, and the output of the module."""
    by_part = {id(part): role for role, part in layer["roles"].items()}
    for i, (kind, part, args, options, result) in enumerate(events):
        if kind == "call" and part is layer["module"] and "order" not in layer:
            layer["x"] = args[0] if args else options.get("hidden_states")
            layer["attention_mask"] = options.get("attention_mask")
            layer["rel_embeddings"] = options.get("rel_embeddings")
            layer["y"] = result[0] if isinstance(result, tuple) else result
            layer["order"] = i
        elif kind == "call" and id(part) in by_part:
            role = by_part[id(part)]
            if role == "out":
                role, result = "before_out", args[0]
            layer.setdefault(role, result)
