"""Makes qk_norms.npz: python -m tests.makers hf_qk_norms, with the group parity.

Runs the norms of queries and keys of a small model of every model type, with random weights. An
array has their input, their output, scale and bias. hf_layers.npz has those of further model types.
"""

import dataclasses
import importlib
import json
import pathlib
import re

import numpy as np
import torch
import transformers

from posenc_jax.hf.model_types import MODEL_TYPES
from tests.makers import hf_layers
from tests.makers.hf_record import in_double, randomize, tokens

FILE = pathlib.Path(__file__).parents[1] / "hf" / "qk_norms.npz"
BATCH, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 1, 4, 2, 8, 2
# Small values of the keys that some of these model types have.
SMALL = {
    **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"num_hidden_layers": 4, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1},
    **{"eos_token_id": 2, "intermediate_size": 16, "intermediate_size_mlp": 16},
    **{"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "n_shared_experts": 1},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 1, "topk_group": 1, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
    **{"global_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
    **{"swa_head_dim": 8, "rms_norm_eps": 0.01, "layer_norm_eps": 0.02},
    **{"use_qk_norm": True, "qk_layernorm": True},
}
# Their sizes are named otherwise, and their modeling files have no such norms.
APART = ("ernie4_5_vl_moe_text", "xlnet", "whisper", "swin", "swinv2")
NAME = re.compile(r"layers\.(\d+)\.(?:self_attn|attn|attention)\.(q|k|qk)_?(?:layer)?norm$")


def small_model(kind):
    cls = transformers.CONFIG_MAPPING[kind]
    fields = {field.name for field in dataclasses.fields(cls)} | {*cls.attribute_map}
    settings = {n: x for n, x in SMALL.items() if n in fields}
    config = cls(**settings)
    model = transformers.AutoModel._model_mapping.get(cls, None)
    if model is None:
        file = importlib.import_module(cls.__module__.replace("configuration_", "modeling_"))
        model = next(x for n, x in vars(file).items() if n.endswith("TextModel"))
    return settings, model._from_config(config)


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
    for kind in MODEL_TYPES:
        if kind in APART or kind in hf_layers.CASES:
            continue
        settings, model = small_model(kind)
        with in_double(), torch.no_grad():
            norms = {}
            for name, module in model.named_modules():
                if found := NAME.search(name):
                    norms.setdefault(int(found[1]), {})[found[2]] = randomize(module.double())
            if not norms:
                continue
            first = norms[min(norms)]
            for which, heads in (("q", HEADS), ("k", KV_HEADS)):
                module = first.get(which, first.get("qk"))
                x, given, back = shaped(module, heads)
                made = [x, back(module(given)), *weights(module)]
                flat = torch.cat([value.flatten() for value in made])
                arrays[f"{kind}.{which}"] = flat.numpy().astype(np.float32)
        about[kind] = {
            "config": {"model_type": kind} | settings,
            "layers": sorted(norms),
        }
        print(kind, sorted(norms), flush=True)
    origin = f"transformers {transformers.__version__}, layers of each model type, in float64"
    about = {"origin": origin, "torch": torch.__version__, "model_types": about}
    return {"about": np.array(json.dumps(about)), **arrays}


def main(argv):
    np.savez_compressed(FILE, **make())
