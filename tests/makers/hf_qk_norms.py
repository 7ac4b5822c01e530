"""Makes qk_norms.npz: python -m tests.makers hf_qk_norms, with the group parity.

Runs the norms of queries and keys of small models, whose configs are in the file, with random
weights. An array has their input, their output, scale and bias. layers.npz has those of further
model types, and of every new one.
"""

import importlib
import json
import pathlib
import re

import numpy as np
import torch
import transformers

from tests.hf.test_attention_settings import NORMED
from tests.makers.hf_record import in_double, randomize, tokens

FILE = pathlib.Path(__file__).parents[1] / "hf" / "qk_norms.npz"
BATCH, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 1, 4, 2, 8, 2
NAME = re.compile(r"layers\.(\d+)\.(?:self_attn|attn|attention)\.(q|k|qk)_?(?:layer)?norm$")


def small_model(kind):
    cls = transformers.CONFIG_MAPPING[kind]
    config = cls(**{n: x for n, x in NORMED[kind]["config"].items() if n != "model_type"})
    model = transformers.AutoModel._model_mapping.get(cls, None)
    if model is None:
        file = importlib.import_module(cls.__module__.replace("configuration_", "modeling_"))
        model = next(x for n, x in vars(file).items() if n.endswith("TextModel"))
    return model._from_config(config)


def shaped(module, heads):
    """Inputs [B, T, N, H], and as the norm takes them, and back."""
    x = tokens(BATCH, LENGTH, heads, HEAD_DIM)
    size = getattr(module, "weight", torch.zeros(HEAD_DIM)).shape
    if size == (heads * HEAD_DIM,):  # Of the whole projection.
        return x, x.flatten(2), lambda y: y.unflatten(2, (heads, HEAD_DIM))
    if hasattr(module, "norms"):  # StableLM's, of one head each.
        return x, x.transpose(1, 2), lambda y: y.transpose(1, 2)
    return x, x, lambda y: y


def weights(module):
    """The scale and the bias, as far as there are any."""
    parts = module.norms if hasattr(module, "norms") else [module]
    for name in ("weight", "bias"):
        found = [x for part in parts if (x := getattr(part, name, None)) is not None]
        if found:
            yield torch.stack(found)


def make():
    about, arrays = {}, {}
    for kind in NORMED:
        model = small_model(kind)
        with in_double(), torch.no_grad():
            norms = {}
            for name, module in model.named_modules():
                if found := NAME.search(name):
                    norms.setdefault(int(found[1]), {})[found[2]] = randomize(module.double())
            first = norms[min(norms)]
            for which, heads in (("q", HEADS), ("k", KV_HEADS)):
                module = first.get(which, first.get("qk"))
                x, given, back = shaped(module, heads)
                made = [x, back(module(given)), *weights(module)]
                flat = torch.cat([value.flatten() for value in made])
                arrays[f"{kind}.{which}"] = flat.numpy().astype(np.float32)
        about[kind] = NORMED[kind] | {"layers": sorted(norms)}
        print(kind, sorted(norms), flush=True)
    origin = f"transformers {transformers.__version__}, layers of each model type, in float64"
    about = {"origin": origin, "torch": torch.__version__, "model_types": about}
    return {"about": np.array(json.dumps(about)), **arrays}


def main(argv):
    np.savez_compressed(FILE, **make())
