"""Raw configs, with keys left out, against the config classes of transformers.

`makers/hf_configs.py` writes `golden/raw_configs.json`: for every model type raw configs, the
keys that its config class fills in, and the window of every layer by the masks of its modeling
file; and `causal_lm_types.json`, the model types of its causal language models, which are read, or
listed with the reason why not.
"""

import dataclasses
import importlib
import json
import math
import pathlib

import pytest

import posenc_jax as pe
from posenc_jax.hf.config_reader import KIND_OF, KINDS, TrackedConfig, model_type_defaults
from posenc_jax.hf.model_types import MODEL_TYPES, NOT_READ
from tests.makers.hf_table import NEEDED

FOLDER = pathlib.Path(__file__).parent
GOLDEN = json.loads((FOLDER / "golden" / "raw_configs.json").read_text())
CASES = GOLDEN["model_types"]
WINDOWED = sorted(n for n in CASES if any(any(c.get("windows", ())) for c in CASES[n]))

# Of the raw configs that are refused: they describe no model, have keys that transformers ignores,
# or mean something else in version 4, which wrote such configs. {model type: {message: numbers}}.
REFUSED = json.loads((FOLDER / "configs.json").read_text())["raw"]


def read(config):
    """The layers, or the message of the error; of an encoder and a decoder the encoder's."""
    model_type = config.get("text_config", config)["model_type"]
    several = model_type_defaults().get(model_type, {}).get("is_encoder_decoder")
    try:
        return pe.from_hf(config, decoder=False if several else None)
    except ValueError as error:
        return str(error)


def completed(model_type, case):
    """The config as transformers completes it."""
    full = model_type_defaults()[model_type] | case["raw"] | case["filled"]
    full = {n: x for n, x in full.items() if n not in case["dropped"]}
    return {"model_type": model_type} | full


def test_every_model_type_has_defaults_and_raw_configs():
    assert set(CASES) == set(MODEL_TYPES) == set(model_type_defaults())


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_a_raw_config_reads_as_transformers_completes_it(model_type):
    refused = REFUSED.get(model_type, {}).items()
    messages = {number: message for message, numbers in refused for number in numbers}
    for number, case in enumerate(CASES[model_type]):
        layers = read({"model_type": model_type} | case["raw"])
        if number in messages:
            assert messages[number] in layers, case["raw"]
            continue
        expected = read(completed(model_type, case))
        if model_type == "hyperclovax" and layers[0].scale is None:
            # Its class writes the usual factor.
            assert expected[0].scale == layers[0].scheme.head_dim ** -0.5
            expected = tuple(dataclasses.replace(layer, scale=None) for layer in expected)
        assert layers == expected and not isinstance(layers, str), case["raw"]
        if "windows" in case:
            windows = [list(y.window) if isinstance(y.window, tuple) else y.window for y in layers]
            assert windows == case["windows"], case["raw"]
            assert [layer.chunk_size for layer in layers] == case["chunks"], case["raw"]


def small(model_type):
    sizes = {} if "depths" in model_type_defaults()[model_type] else {"num_hidden_layers": 12}
    return {"model_type": model_type} | sizes | NEEDED.get(model_type, {})


# One model type of each row of the table.
ROWS = {id(row): model_type for model_type, row in sorted(MODEL_TYPES.items())}


UNREAD = {"alibi_slope": 1, "no_position_layers": 1, "rope_style": 1, "window_shape": 1}


def test_keys_that_are_not_read_are_named():
    for model_type in ROWS.values():
        cases = [UNREAD]
        cases += [{"sliding_window": 17}] if model_type not in WINDOWED else []
        cases += [{"attention_chunk_size": 17}] if model_type != "llama4_text" else []
        for keys in cases:
            message = str(read(small(model_type) | keys))
            assert message.endswith(f"has {[*keys]}, which nothing here reads."), model_type


def keys_read(config):
    """{(dict, key)} that the readers look up; dict: None, or where it is in the config."""
    keys, explicit = set(), TrackedConfig.explicit
    inner = {"rope parameters": "rope_parameters"}
    inner |= {name: name for name in ("linear_attn_config", "attn_config")}

    def record(self, name):
        keys.add((next((inner[x] for x in inner if self.label.endswith(x)), None), name))
        return explicit(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrackedConfig, "explicit", record)
        read(config)
    return keys


ROPES = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "factor": 2.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]
WRONG = ["x", "64", b"x", object(), [[1]], ["x", None], {"x": 1}, math.nan, math.inf, 1.5j]


def test_kinds_of_keys():
    """Which values of no number are accepted."""
    accepted = {kind: [x for x in WRONG if accepts(x)] for kind, accepts in KINDS.items()}
    assert accepted.pop("a string") == WRONG[:2] and accepted.pop("a dict") == [{"x": 1}]
    assert not any(accepted.values())


DICTS = {"rope_parameters", "rope_scaling", "attn_config", "per_layer_config"}
DICTS |= {"linear_attn_config", "rope_dail_config", "rope_hf_config"}
# Keys of several types, and keys that change nothing.
FREE = {"sliding_window_pattern", "pos_att_type"}
FREE |= {"max_source_positions", "pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"}


def configs_and_keys(model_type):
    """Configs with the keys that readers look up there; in those with a map, those of the map."""
    raw = small(model_type)
    if model_type == "mpt":
        raw["attn_config"] = {"alibi": True}
    yield from ((raw, section, key) for section, key in keys_read(raw))
    for rope in ROPES if model_type == "llama" else ():
        config = raw | {"rope_parameters": rope}
        yield from ((config, section, key) for section, key in keys_read(config) if section)


@pytest.mark.parametrize("model_type", ROWS.values())
def test_a_value_of_the_wrong_type_is_an_error_of_one_line(model_type):
    """No other exception, no number made of a string, for every key that a reader looks up."""
    for config, section, key in configs_and_keys(model_type):
        if key in FREE or "every_n" in key or "interval" in key:
            continue
        # Kinds are checked alike for all keys.
        for wrong in WRONG[3:5] if key in KIND_OF and model_type != "llama" else WRONG:
            if isinstance(wrong, dict) and key in DICTS:
                continue
            inner = (config.get(section) or {}) | {key: wrong} if section else wrong
            message = read(config | {section or key: inner})
            assert isinstance(message, str), f"{section} {key}={wrong!r} is accepted"
            assert message.startswith("from_hf: ") and "\n" not in message


def test_errors_begin_with_the_function_that_was_called():
    for config in (
        {"model_type": "lama"},
        {"model_type": ["llama"]},
        {"model_type": "llava", "text_config": "llama"},
        {"model_type": "deepseek_v3", "rope_parameters": [1]},
        {"model_type": "deepseek_v3", "rope_scaling": {"rope_type": "yarn", "mscale_all_dim": 1}},
    ):
        with pytest.raises(ValueError, match=r"\Aattention_options_from_hf: .*\Z"):
            pe.attention_options_from_hf({"qk_nope_head_dim": "x"} | config)


NAMES = json.loads((FOLDER / "causal_lm_types.json").read_text())["model_types"]
# The text model of configs of several parts, and the model type of a class with two names.
READ_AS = {
    "emu3": "emu3_text_model",
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "got_ocr2": "qwen2",
    "gpt-sw3": "gpt2",
    "llama4": "llama4_text",
    "moss_transcribe_diarize": "qwen3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}
# Listed, though they are no causal language models alone.
OTHERS = {"mlcd_vision_model", "mllama_text_model"}


def test_each_is_read_or_listed_once():
    read = {name for name in NAMES if name in MODEL_TYPES}
    assert sorted([*read, *READ_AS, *(NOT_READ.keys() - OTHERS)]) == NAMES
    assert set(READ_AS.values()) <= set(MODEL_TYPES)


def test_the_count_of_the_docs():
    page = (FOLDER.parents[1] / "docs" / "models.md").read_text()
    read = len(NAMES) - len(NOT_READ.keys() - OTHERS)
    assert f"reads {read} of the {len(NAMES)} causal language models of transformers 5.24" in page


def test_the_error_of_a_type_that_is_not_read_has_the_reason():
    for name, reason in NOT_READ.items():
        message = read({"model_type": name})
        assert message == f"from_hf: unknown model_type {name!r}; {reason}."
        assert len(message) < 200


@pytest.mark.filterwarnings("ignore")
@pytest.mark.needs(GOLDEN["origin"].split(",")[0].replace(" ", "=="))
def test_the_files_are_what_transformers_gives():
    maker = importlib.import_module("tests.makers.hf_configs")
    assert json.loads(json.dumps(maker.golden()["model_types"])) == CASES
    assert maker.all_defaults()["model_types"] == model_type_defaults()
    assert maker.causal_lm_types() == NAMES
    for name, text in READ_AS.items():
        config = maker.CONFIG_MAPPING[name]()
        assert config.get_text_config().model_type == text
