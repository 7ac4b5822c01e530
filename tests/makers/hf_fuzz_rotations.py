"""Compares the rotations of `from_hf` with the rotary modules of transformers on mutated configs.

`hf_fuzz --rotations` runs it. A draw is a raw config of `hf_draw`, with null, zero, missing and
moved keys of its rope parameters: under the names of transformers 4 or 5 or both, for all layers
or by their kind.
"""

import copy
import importlib
import inspect
import json
import random
import re

import numpy as np
from transformers import CONFIG_MAPPING

import posenc_jax as pe
from posenc_jax.schemes.rotary.frequencies import rope_frequencies
from tests.makers import hf_draw

ROTARY = re.compile(r"^(?!.*(Vision|Audio)).*RotaryEmbedding$")
KINDS = hf_draw.FULL, hf_draw.LOCAL
YARN = {
    "truncate": (None, False, True),
    **dict.fromkeys(("beta_fast", "beta_slow"), (None, 0, 3.0)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), (None, 0, 0.7)),
    "attention_factor": (None, 1.3),
}
"""Keys that transformers tests by truth, or whose null it takes for a missing one."""
OTHERS = {
    **{"rope_type": (None,), "factor": (None, 1.0), "rope_theta": (None, 777.0)},
    **{"partial_rotary_factor": (None, 0.5), "original_max_position_embeddings": (None, 16)},
    **{"high_freq_factor": (None,), "truncate": (None,)},
}
OUTSIDE = {
    **{"rope_theta": (None, 1e3), "rope_local_base_freq": (None, 1e3)},
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (None, 0.5)),
    "original_max_position_embeddings": (None, 16),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (None, {})),
}


def rotary_class(kind):
    """The rotary module of a model type that has one."""
    if "rope_parameters" not in hf_draw.fields_of(kind):
        return None
    path = CONFIG_MAPPING[kind].__module__.replace("configuration_", "modeling_")
    try:
        file = importlib.import_module(path)
    except ModuleNotFoundError:  # Those of other model types.
        return None
    return next((x for n, x in vars(file).items() if ROTARY.match(n) and inspect.isclass(x)), None)


def draw(kind, rng):
    """A mutated raw config."""
    cls, raw = CONFIG_MAPPING[kind], hf_draw.draw(kind, rng)
    # A class sets other names of its keys after its rope parameters.
    raw = {cls.attribute_map.get(key, key): x for key, x in raw.items() if x is not None}
    raw.pop("layer_rope_theta", None)
    name = "rope_scaling" if "rope_scaling" in raw else "rope_parameters"
    rope = raw.pop(name, None) or hf_draw._part(cls, raw, 8, rng)
    parts = [x for x in rope.values() if isinstance(x, dict)]
    if "[layer_type]" in hf_draw._modeling(cls) and rng.random() < 0.8:
        labels = KINDS if kind != "deepseek_v4" else ("main", "compress")
        parts = [hf_draw._part(cls, raw, 8, rng) for _ in labels]
        rope = dict(zip(labels, parts, strict=True))
    for part in parts or [rope]:
        for key, values in YARN.items() if "yarn" in part.values() else ():
            if rng.random() < 0.25:
                part[key] = rng.choice(values)
        for key, values in OTHERS.items():
            if rng.random() < 0.03:
                part[key] = rng.choice(values)
    if not parts and rng.random() < 0.1:
        rope = {key: rng.choice((rope, None)) for key in KINDS}
    elif parts and rng.random() < 0.2:
        rope[rng.choice(KINDS)] = None
    elif parts and rng.random() < 0.1:
        rope["truncate"] = rng.choice((None, False))
    if rng.random() < 0.9:
        raw[rng.choice((name, "rope_parameters", "rope_scaling"))] = rope
    for key, values in OUTSIDE.items():
        if rng.random() < 0.04:
            raw[key] = rng.choice(values)
    return json.loads(json.dumps(raw))  # No dict twice, which transformers would change in both.


def theirs(kind, raw):
    """By layer, the frequencies of the module before its longest text, and its factor."""
    config = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(raw))
    module, out = rotary_class(kind)(config), {}
    labels = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    for i, label in enumerate(labels):
        if kind == "deepseek_v4":
            label = "main" if label == hf_draw.LOCAL else "compress"
        prefix = "" if hasattr(module, "inv_freq") else f"{label}_"
        if hasattr(module, f"{prefix}inv_freq"):
            frequencies = getattr(module, f"{prefix}inv_freq").double().numpy()
            out[i] = frequencies, float(getattr(module, f"{prefix}attention_scaling"))
    return out


def ours(kind, raw):
    """The same of the schemes that rotate."""
    out = {}
    for i, layer in enumerate(pe.from_hf({"model_type": kind} | raw)):
        for x in getattr(layer.scheme, "schemes", [layer.scheme]):
            if hasattr(x, "base_frequencies"):
                scaling = x.scaling.frozen(1) if isinstance(x, pe.RoPEByLength) else x.scaling
                out[i] = rope_frequencies(x.num_rotated, x.theta, scaling)
    return out


def compare(kind, raw):
    """(outcome, text): "same", "differs", or "refused" by `from_hf` or "transformers"."""
    try:
        want = theirs(kind, raw)
        if "qk_rope_head_dim" in raw:  # Other modules raise in the first call.
            assert {2 * len(x) for x, _ in want.values()} <= {raw["qk_rope_head_dim"]}
    except Exception as error:
        return "transformers", f"{type(error).__name__}: {error}"
    try:
        got = ours(kind, raw)
    except ValueError as error:
        return "refused", str(error)
    for i in want.keys() & got.keys():
        (frequencies, factor), (a, b) = want[i], got[i]
        if a.shape != frequencies.shape:
            return "differs", f"layer {i}: {len(a)} pairs, not {len(frequencies)}"
        error = max(np.abs(a - frequencies).max(), abs(b - factor))
        if not error <= 1e-6:
            return "differs", f"layer {i}: {error:.1e}"
    return "same" if want.keys() & got.keys() else "nothing", ""


def draws(kind, seed, count):
    """Yields (raw config, offset, outcome, text) of `count` draws of a model type that rotates."""
    for i in range(count if rotary_class(kind) else 0):
        raw = draw(kind, random.Random(f"{seed} {kind} {i}"))
        yield raw, 0, *compare(kind, raw)
