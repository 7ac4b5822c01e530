"""Runs attention layers of transformers and records their inputs and outputs.

Layers have random weights and are run as they stand, but in float64: theirs compute angles in
float32, which at position 4095 leaves four digits. `in_double` lets every mention of float32
mean float64 while they run; no line of their code is replaced.
"""

import contextlib
import importlib
import json
import re
import sys

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

POSITIONS = [0, 1, 2, 257, 1023, 4095]
SMALL = dict(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=4,
    max_position_embeddings=4096,
)


@contextlib.contextmanager
def in_double():
    kept = torch.float, torch.float32, torch.Tensor.float
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float, torch.float32, torch.Tensor.float = kept
        torch.set_default_dtype(torch.float32)


RECORDS: list[dict] = []


def _record(module, query, key, value, *mask, **options):
    """The eager attention of the module's own file, recorded."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    out, weights = own(module, query, key, value, *mask, **options)
    made = {"q_rot": query, "k_rot": key, "v": value}
    RECORDS.append({n: x.transpose(1, 2) for n, x in made.items()} | {"out": out})
    return out, weights


ALL_ATTENTION_FUNCTIONS.register("record", _record)


def make_config(model_type, **settings):
    config = CONFIG_MAPPING[model_type](**settings)
    config._attn_implementation = "record"
    return config


def modeling(config):
    path = type(config).__module__.replace("configuration_", "modeling_")
    return importlib.import_module(path)


def find(module, pattern):
    """The only class of a file whose name matches."""
    names = [n for n in vars(module) if re.search(pattern, n) and isinstance(vars(module)[n], type)]
    names = [n for n in names if vars(module)[n].__module__ == module.__name__]
    assert len(names) == 1, (pattern, names)
    return vars(module)[names[0]]


def randomize(module, seed=0):
    made = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if not parameter.requires_grad:  # A fixed table.
            continue
        values = torch.randn(parameter.shape, generator=made, dtype=torch.float64)
        parameter.data = values * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5)
    return module.eval()


def tokens(*shape, seed=1):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made, dtype=torch.float64)


def causal(length):
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return torch.zeros(1, 1, length, length).masked_fill(hidden, -1e30)


@contextlib.contextmanager
def watch(owner, name):
    """Yields a list of (arguments, result), one for each call of a function of `owner`."""
    kept, calls = getattr(owner, name), []

    def called(*args, **options):
        out = kept(*args, **options)
        calls.append((args, out))
        return out

    setattr(owner, name, called)
    try:
        yield calls
    finally:
        setattr(owner, name, kept)


@contextlib.contextmanager
def hooked(module, **names):
    """Yields a dict of the outputs of submodules, or for "<name" their inputs."""
    store, hooks = {}, []
    for key, name in names.items():
        part = module.get_submodule(name.removeprefix("<"))
        if name.startswith("<"):
            hook = part.register_forward_pre_hook(lambda _, a, key=key: store.update({key: a[0]}))
        else:
            hook = part.register_forward_hook(lambda _, a, y, key=key: store.update({key: y}))
        hooks.append(hook)
    try:
        yield store
    finally:
        for hook in hooks:
            hook.remove()


def heads(x, count):
    """[B, T, N H] to [B, T, N, H]."""
    return x.reshape(*x.shape[:2], count, -1)


def arrays(**named):
    """NumPy float32 or int32 arrays, without Nones."""
    out = {}
    for name, x in named.items():
        if x is not None:
            x = x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
            out[name] = x.astype(np.int32 if x.dtype.kind in "iu" else np.float32)
    return out


def about(config, **facts):
    """Returns the description that a golden file has as its array `about`: JSON."""
    described = {
        "origin": f"transformers {transformers.__version__}, {type(config).__module__}",
        "torch": torch.__version__,
        "config": json.loads(config.to_json_string(use_diff=False)),
    }
    return np.array(json.dumps(described | facts))
