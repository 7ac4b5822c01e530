"""Compares `from_hf` with transformers on random configs of every model type.

    python -m tests.makers hf_fuzz --seed 1 --draws 10 [--types llama,phi3] [--rotations]

needs the group `parity`. A draw is the raw config of a small model, most of whose keys are left
out, under the names of transformers 4 or 5. transformers completes it, builds a model with random
weights and runs it in float64. Each of its attention layers is then computed from its projections
by the `LayerSpec` that `from_hf` gives for the raw config, and tables of positions at the input by
its scheme; sizes, biases and causality are from `attention_options_from_hf`. Draws that
transformers refuses do not count, draws that `from_hf` refuses are listed by message.

First, every other model type of transformers must be refused by name. The command ends with code 1
if anything differs. `--rotations` compares frequencies alone, of the mutated configs of
`hf_fuzz_rotations`. With `--golden` it writes `attention_layers.npz`, layers for the suite.
"""

import argparse
import collections
import contextlib
import io
import json
import logging
import pathlib
import random
import traceback
import warnings

import jax.numpy as jnp
import numpy as np
import transformers

import posenc_jax as pe
from tests.makers import hf_draw, hf_fuzz_layers, hf_fuzz_models, hf_fuzz_rotations
from tests.makers.hf_table import NOT_FUZZED
from tests.support import recorded

TOLERANCE = 2e-4  # Of the greatest number of an output; float32 against float64.
FILE = pathlib.Path(__file__).parents[1] / "hf" / "attention_layers.npz"


def check(kind, raw, seed, offset):
    """(outcome, text): "same", "differs", "error", or "refused" by `from_hf` or "transformers"."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            model, layers, tables = hf_fuzz_models.run(kind, raw, seed, offset)
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
    positions = jnp.arange(hf_fuzz_models.TOKENS, dtype=jnp.int32)[None] + offset
    seen = {"alpha": getattr(getattr(model, "rotary_emb", None), "alpha", None)}
    messages, scheme, used = [], specs[0].scheme, set()
    if bool(tables) != (pe.Acts.EMBEDDING in scheme.acts):
        return f"{len(tables)} tables at the input, and {scheme}"
    if (
        tables
        and not (error := hf_fuzz_layers.embedding_error(scheme, tables[0], positions)) <= TOLERANCE
    ):
        messages.append(f"input: {error:.2e} {scheme}")
    for i, layer in enumerate(layers):
        index = hf_fuzz_layers.index_of(layer, i)
        if index < len(specs) and specs[index].mixer != "attention":
            continue
        used |= {*range(len(specs))} if model.config.model_type == "albert" else {index}
        if index >= len(specs):
            return f"{len(specs)} layers, and there is layer {index}"
        if options and (text := hf_fuzz_layers.option_error(options[index], layer, model.config)):
            messages.append(f"layer {index}: {text}")
        want = hf_fuzz_layers.wanted(layer)
        out = hf_fuzz_layers.output(specs[index], layer, model.config, positions, seen)
        error = np.abs(np.asarray(out).reshape(want.shape) - want).max() / np.abs(want).max()
        if not error <= TOLERANCE:
            messages.append(f"layer {index}: {error:.2e} {specs[index]}")
    without = {i for i, spec in enumerate(specs) if spec.mixer != "attention"}
    bare = sorted({*range(len(specs))} - used - without)
    return "; ".join(messages + ([f"no attention in layers {bare}"] if bare else []))


def message(config):
    """The message with which `from_hf` refuses a config, or an empty text."""
    try:
        pe.from_hf(config)
    except ValueError as error:
        return str(error)
    return ""


def model_types():
    """The model types that `from_hf` reads, and how many others it refuses, all by name."""
    read, refused = [], 0
    for kind, cls in transformers.CONFIG_MAPPING.items():
        text = message({"model_type": kind})
        if "unknown model_type" not in text:
            if "text_config" not in cls.sub_configs and kind not in NOT_FUZZED:
                read.append(kind)
        else:
            assert text.startswith(f"from_hf: unknown model_type {kind!r}; "), text
            assert "\n" not in text and len(text) < 200, text
            refused += 1
    return sorted(read), refused


def draws(kind, seed, count):
    """Yields (raw config, offset, outcome, text), until transformers has run `count` draws."""
    done = 0
    for i in range(8 * count):
        rng = random.Random(f"{seed} {kind} {i}")
        raw = hf_draw.draw(kind, rng)
        offset = rng.choice((0, 0, 100)) if hf_draw.takes_positions(kind) else 0
        outcome, text = check(kind, raw, seed, offset)
        yield raw, offset, outcome, text
        done += outcome != "transformers"
        if done == count:
            return


def golden():
    """The first layer of each of some models, with its weights; the file has their configs."""
    configs, arrays = recorded(FILE)[0]["configs"], {}
    for kind, config in configs.items():
        raw = {n: x for n, x in config.items() if n != "model_type"}
        outcome = check(kind, raw, 0, 0)
        assert outcome == ("same", ""), (kind, outcome)
        weights = hf_fuzz_layers.weights(hf_fuzz_models.run(kind, raw, 0)[1][0])
        arrays |= {f"{kind}.{name}": x for name, x in weights.items()}
    origin = f"transformers {transformers.__version__}, attention layers in float64"
    about = {"origin": origin, "configs": configs}
    return {"about": np.array(json.dumps(about)), **arrays}


def main(argv):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--types", help="model types, with commas between them; default: all")
    parser.add_argument("--rotations", action="store_true")
    parser.add_argument("--golden", action="store_true")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if args.golden:
        np.savez_compressed(FILE, **golden())
        return 0
    kinds, refused = model_types()
    print(f"{len(kinds)} model types run; {refused} are refused by name")
    total, messages = collections.Counter(), collections.Counter()
    drawn = hf_fuzz_rotations.draws if args.rotations else draws
    for kind in args.types.split(",") if args.types else kinds:
        counts = collections.Counter()
        for raw, offset, outcome, text in drawn(kind, args.seed, args.draws):
            counts[outcome] += 1
            if outcome in ("differs", "error"):
                print(outcome, kind, f"offset {offset}", json.dumps(raw), text, flush=True)
            elif outcome == "refused":
                messages[text] += 1
        total += counts
        print(kind, dict(counts), flush=True)
    for text, count in sorted(messages.items()):
        print(count, text)
    print(dict(total))
    return 1 if total["differs"] or total["error"] else 0
