"""The head of the page of a scheme or a frequency map: when to take it, a layer, and its score.

`WHEN` is the one place that says when; docs/choose.md has the schemes by situation.
"""

import csv
import inspect
from pathlib import Path

import posenc_jax as pe

DOCS = Path(__file__).resolve().parents[1]
SIZES = {
    **dict.fromkeys(("num_heads", "num_kv_heads"), 4),
    **{"head_dim": 16, "model_dim": 64, "max_length": 16, "trained_length": 16},
    **{"factor": 8.0, "original_max_position": 4096},
}
"""Arguments of the examples, where a signature needs them."""
WITHOUT_TRAINING = "to run a trained RoPE beyond its length, without training"
IMAGES = "for patches of an image"
WHEN = {
    # Added to the embedding.
    "NoPE": "in layers beside others that have positions, as the global layers of Cohere 2",
    "LearnedAbsolute": "for slots with a meaning, or a model that has it, such as GPT-2 or BERT",
    "Sinusoidal": "for a model that has it; RoPE is ahead after equal steps",
    "LearnableFourier": "for points with real coordinates, such as patches or boxes",
    "Sinusoidal2D": f"{IMAGES}, as in MAE and DETR",
    # Biases.
    "ALiBi": "for text beyond the trained length, without parameters, as in BLOOM and MPT",
    "BAM": "for text beyond the trained length, with a prior on the distance that is learned",
    "DAPE": "for a bias that content can override, at several times the time of a step",
    "FIRE": "for a learned bias of any shape; beyond the trained length `KERPLELog` is flatter",
    "KERPLELog": "for text beyond the trained length, with a penalty that is learned",
    "KERPLEPower": "as `KERPLELog`, to try the paper's other kernel",
    "Sandwich": "for text beyond the trained length, without parameters",
    "Swin": f"{IMAGES} in windows of one size",
    "SwinV2": f"{IMAGES} in windows that grow after training",
    "T5": "for a model that has it, such as UMT5, or where you can tune its learning rate",
    "TUPE": "for encoders of up to `max_length` tokens with [CLS]",
    # Position and content.
    "CABLE": "as `FoX`, whose gates it has",
    "CoPE": "to count by content, such as sentences, in causal models",
    "DeBERTa": "for encoders, or a model that has it",
    "FoX": "for text beyond the trained length, where content decides what is forgotten",
    "GRAPEA": "for a penalty on the distance whose slope depends on content",
    "Inkling": "for a model that has it, within the trained length",
    "PartialKeyOffset": "chained with another scheme, to find what followed a token in one layer",
    "PaTH": "to track states that tokens change, in causal models",
    "Shaw": "for short distances that each matter, as in wav2vec2-BERT and the Music Transformer",
    "ShortConv": "chained with another scheme, to mix neighbours before attention",
    "StickBreaking": "in causal models where the latest match should win, in slower steps",
    "TransformerXL": "for a model that has it, such as XLNet",
    # Factors on the logits.
    "SSMax": "chained with another scheme, so that attention stays sharp over more keys",
    "QueryTemperature": "chained with another scheme, as in Llama 4 and Ministral 3",
    # Rotary.
    "AxialRoPE": f"{IMAGES}, as in DINOv3, Pixtral and the encoder of Qwen2-VL",
    "ComRoPE": f"{IMAGES}, to train rotations of more than two dimensions",
    "DualChunk": WITHOUT_TRAINING,
    "FoPE": "in place of RoPE, to try a series of frequencies for each pair",
    "LearnedRoPE": "in place of RoPE, to train its frequencies, as in Mistral-Large-4",
    "LieRE": f"{IMAGES} or volumes, to train rotations of all axes together",
    "MRoPE": "for video, or images in text, as in Qwen2-VL",
    "PoPE": "in place of RoPE, so that position cannot change what content matches",
    "RePo": "in some layers of a causal model, to ignore positions that mean nothing",
    "ReRoPE": WITHOUT_TRAINING,
    "RoPE": "first: most language models have it, and caches and kernels need nothing more",
    "RoPEByLength": "for a checkpoint with LongRoPE or dynamic NTK, and rows of different lengths",
    "RoPEMixed": f"{IMAGES} where diagonals matter, as in RoPE-ViT",
    "RoPEPlusPlus": "in place of RoPE, to give some heads larger weights of distant tokens",
    "SelectiveRoPE": "in place of RoPE, to rotate by content as gated recurrent models do",
    "SelfExtend": WITHOUT_TRAINING,
    "VORoPE": "for a model whose keys and values are one array, as DeepSeek-V4",
    "XPos": "in place of RoPE in causal models, so that distant keys fade",
    # Frequency maps.
    "ClippedFrequencies": "after another map, so that the slowest pairs stay within trained angles",
    "DynamicNTK": f"{WITHOUT_TRAINING}, where the length at use is known",
    "HighFrequenciesOnly": "for a model to be trained whose slow pairs carry content alone",
    "Llama3": "for checkpoints of Llama 3.1 and later",
    "LongRoPE": "for checkpoints whose config has its two lists of factors, such as Phi-3",
    "NTK": WITHOUT_TRAINING,
    "NTKByParts": "as `YaRN`, without its factor on the logits",
    "PI": "to run a trained RoPE beyond its length, after further training",
    "Proportional": "for a model to be trained whose slow pairs carry content alone, as in Gemma 4",
    "Resonance": "after a map that extends the length: `(YaRN(...), Resonance())`",
    "YaRN": "to run a trained RoPE beyond its length, with little or no training",
}
"""Completes the sentence "Take it ...", by the name of a class."""
CHAINED = ("SSMax", "QueryTemperature", "ShortConv", "PartialKeyOffset")
MORE = {
    "ClippedFrequencies": ["pairs=4"],
    "DynamicNTK": ["length=32768"],
    "LongRoPE": ["short_factor=(1.0,) * 8", "long_factor=(4.0,) * 8", "long=True"],
}
"""Further arguments of an example."""
COORDINATES = {
    2: ["coordinates = pe.grid_coordinates(batch=2, rows=4, columns=4)"],
    3: [
        "is_patch = jnp.tile(jnp.arange(16) >= 4, (2, 1))  # Text, then an image of 3 x 4.",
        "coordinates, _ = pe.mrope_coordinates(is_patch, jnp.array(2 * [[[1, 3, 4]]]))",
    ],
}
"""Lines of an example, by the number of axes."""
THREATS = "[threats](../evidence.md#threats)"
NOT_IN_STUDY = "It was not in the [study](../study.md)."


def use(cls: type) -> list[str]:
    """Returns the lines above the documentation of a class, as Markdown."""
    code = ["```python", example(cls), "```", ""]
    return [f"Take it {WHEN[cls.__name__]}.", "", *code, score(cls), ""]


def example(cls: type) -> str:
    """Returns code that calls a layer with a scheme, or with RoPE that has a frequency map."""
    home = "pe" if cls.__name__ in pe.__all__ else "pe.contrib"
    arguments = [f"{name}={value}" for name, value in _sizes(cls).items()]
    thing = _call(f"{home}.{cls.__name__}", [*arguments, *MORE.get(cls.__name__, [])])
    lines, axes, embeds = [f"position = {thing}"], 1, False
    if cls.__name__ in CHAINED:
        lines = [f"position = {_call('pe.chain', ['pe.RoPE(head_dim=16)', thing])}"]
    if issubclass(cls, pe.FrequencyMap):
        lines = [f"scaling = {thing}", "position = pe.RoPE(head_dim=16, scaling=scaling)"]
    else:
        scheme = cls(**_sizes(cls))
        axes, embeds = scheme.traits.num_axes, scheme.acts == pe.Acts.EMBEDDING
    lines += [*COORDINATES.get(axes, []), "x = jnp.ones((2, 16, 64))  # [batch, tokens, model dim]"]
    inputs = "x, coordinates=coordinates" if axes > 1 else "x"
    if embeds:
        lines += ["encoding = PositionEncoding(position, rngs=nnx.Rngs(0))"]
        lines += [f"x = encoding({inputs})  # Once, before the first layer."]
        inputs = "x"
    options = [] if embeds else ["position=position"]
    options += [] if axes == 2 or cls in (pe.TUPE, pe.DeBERTa) else ["is_causal=True"]
    lines += [f"layer = Attention(64, 4, {', '.join([*options, 'rngs=nnx.Rngs(0)'])})"]
    imports = ["import jax.numpy as jnp", "from flax import nnx", "", "import posenc_jax as pe"]
    imports += [f"from posenc_jax.nnx import Attention{', PositionEncoding' if embeds else ''}"]
    return "\n".join([*imports, "", *lines, f"y = layer({inputs})"])


def _sizes(cls: type) -> dict[str, float]:
    """Returns the arguments that a scheme requires, and the factor and length of a map."""
    every = issubclass(cls, pe.FrequencyMap)
    parameters = inspect.signature(cls).parameters.values()
    names = (p.name for p in parameters if every or p.default is p.empty)
    return {name: SIZES[name] for name in names if name in SIZES}


def _call(name: str, arguments: list[str]) -> str:
    line = f"{name}({', '.join(arguments)})"
    if len(line) < 80:
        return line
    return "\n    ".join([f"{name}(", *(f"{argument}," for argument in arguments)]) + "\n)"


def score(cls: type) -> str:
    """Returns the sentence on the results of a scheme or a frequency map."""
    study, screen = ({r["scheme"]: r for r in _table(n)} for n in ("study", "study_catalogue"))
    rope, source = study["rope"], "[study](../study.md)"
    if issubclass(cls, pe.FrequencyMap):
        longer = rope.get(f"{cls.__name__.lower()} 1024")
        if not longer:
            return NOT_IN_STUDY
        text = f"RoPE, trained on 128 bytes, has {longer} bits per byte at 1024 with it"
        return f"{text}, {rope['nonoverlapping 1024']} without ({source}, {THREATS})."
    name, how = cls.name, ""
    if cls.__name__ in CHAINED:
        name, how = (f"rope+{name}", " with RoPE") if f"rope+{name}" in screen else (name, " alone")
    if name not in study and name not in screen:
        return NOT_IN_STUDY
    row, column = study.get(name), "nonoverlapping "
    if row is None:
        row, column, source = screen[name], "", "two seeds, [catalogue](../study_catalogue.md)"
    text = f"After training on 128 bytes it has{how} {row[f'{column}128']} bits per byte at 128"
    text += f" and {row[f'{column}1024']} at 1024"
    if row is not rope:
        text += f"; RoPE has {rope['nonoverlapping 128']} and {rope['nonoverlapping 1024']}"
    return f"{text} ({source}, {THREATS})."


def _table(name: str) -> list[dict[str, str]]:
    with (DOCS / f"{name}.csv").open() as lines:
        return [row for row in csv.DictReader(lines) if row.get("size", "small") == "small"]
