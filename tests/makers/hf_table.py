"""Writes docs/model_types.csv, the table of model types: python -m tests.makers hf_table."""

import csv
import io
import pathlib

import posenc_jax as pe
from posenc_jax.hf.config_reader import model_type_defaults
from posenc_jax.hf.model_types import MODEL_TYPES

TABLE = pathlib.Path(__file__).parents[2] / "docs" / "model_types.csv"
# Their inputs are images or sounds, and XLNet has attention of its own; golden files have layers of
# them, and `hf_towers.py` runs others.
NOT_RUN = "dinov3_vit pixtral swin swinv2 wav2vec2-bert whisper xlnet".split()
TOWERS = sorted(
    kind
    for kind, row in MODEL_TYPES.items()
    if "grid of an image" in str(row.biases) and kind not in NOT_RUN
)
NOT_RUN += TOWERS
# Keys that a config needs in addition to the defaults of its model type.
NEEDED = {
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p"]},
    "esm": {"pad_token_id": 1},
    "glm4_moe": {"head_dim": 128},
    "gemma4_text": {"sliding_window": 512},
    "gemma4_unified_text": {"sliding_window": 512},
    "gpt_neo": {"attention_types": [[["global", "local"], 6]]},
    "bamba": {"attn_layer_indices": [1, 3, 5]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 6},
    "nemotron_h": {"hybrid_override_pattern": "ME*-" * 3},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 6},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 6},
    "minimax_m3_vl_text": {"rope_parameters": {"partial_rotary_factor": 0.5}},
    "qwen4_exp_text": {"rope_parameters": {"partial_rotary_factor": 0.25}},
}


def layer_text(layer):
    """A layer in a few words."""
    if layer.mixer != "attention":
        return layer.mixer.replace("_", " ")
    schemes = getattr(layer.scheme, "schemes", [layer.scheme])
    text = " and ".join(type(scheme).__name__ for scheme in schemes)
    text += "" if layer.window is None else " in a window"
    return text + ("" if layer.chunk_size is None else " in chunks")


def settings_text(layers):
    """Settings of attention that some layer has."""
    settings = {
        "scale": any(x.scale is not None for x in layers),
        "softcap": any(x.softcap is not None for x in layers),
        "sinks": any(x.sinks for x in layers),
        "QK-norm": any(x.qk_norm is not None for x in layers),
    }
    return ", ".join(name for name, present in settings.items() if present)


def row(kind):
    """(layers, settings, Attention) of a model type, by its defaults."""
    config = {"model_type": kind, "num_hidden_layers": 12} | NEEDED.get(kind, {})
    if "depths" in model_type_defaults()[kind]:
        del config["num_hidden_layers"]
    several = model_type_defaults()[kind].get("is_encoder_decoder")
    decoder = [False, True] if several else [None]
    layers = [x for d in decoder for x in pe.from_hf(config, decoder=d)]
    try:
        pe.attention_options_from_hf(config, decoder=decoder[-1])
        whole = "yes"
    except ValueError as error:
        whole = str(error).split(" has ", 1)[1].removesuffix(", which Attention does not have.")
    texts = dict.fromkeys(map(layer_text, layers))
    return "; ".join(texts), settings_text(layers), whole


def table():
    """The text of the file."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["model type", "layers by default", "settings", "attention_options_from_hf"])
    writer.writerows((kind, *row(kind)) for kind in sorted(MODEL_TYPES))
    return buffer.getvalue()


def main(argv):
    TABLE.write_text(table(), encoding="utf-8")
