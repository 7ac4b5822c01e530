"""Raw configs, with keys left out, against the config classes of transformers.

`makers/hf_configs.py` writes `golden/raw_configs.json`: for every model type raw configs, the
keys that its config class fills in, and the window of every layer by the masks of its modeling
file. `test_live.py` runs those masks.
"""

import dataclasses
import importlib
import json
import math
import pathlib

import pytest

import posenc_jax as pe
from posenc_jax.hf.config_reader import TrackedConfig, model_type_defaults
from posenc_jax.hf.model_types import MODEL_TYPES
from tests.makers.hf_table import NEEDED

GOLDEN = pathlib.Path(__file__).with_name("golden") / "raw_configs.json"
CASES = json.loads(GOLDEN.read_text())["model_types"]

# Of the raw configs that are refused: they describe no model, have keys that transformers ignores,
# or mean something else in version 4, which wrote such configs. {model type: {message: numbers}}.
REFUSED = json.loads(pathlib.Path(__file__).with_name("configs.json").read_text())["raw"]


def read(model_type, config):
    """The layers, or the message of the error."""
    config = {"model_type": model_type} | config
    several = model_type_defaults()[model_type].get("is_encoder_decoder")
    try:
        return pe.from_hf(config, decoder=False if several else None)
    except ValueError as error:
        return str(error)


def completed(model_type, case):
    """The config as transformers completes it."""
    full = model_type_defaults()[model_type] | case["raw"] | case["filled"]
    return {n: x for n, x in full.items() if n not in case["dropped"]}


def test_every_model_type_has_defaults_and_raw_configs():
    assert set(CASES) == set(MODEL_TYPES) == set(model_type_defaults())


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_a_raw_config_reads_as_transformers_completes_it(model_type):
    messages = {
        number: message
        for message, numbers in REFUSED.get(model_type, {}).items()
        for number in numbers
    }
    for number, case in enumerate(CASES[model_type]):
        layers = read(model_type, case["raw"])
        if number in messages:
            assert messages[number] in layers, case["raw"]
            continue
        expected = read(model_type, completed(model_type, case))
        if model_type == "hyperclovax" and layers[0].scale is None:
            # Its class writes the usual factor.
            assert expected[0].scale == layers[0].scheme.head_dim ** -0.5
            expected = tuple(dataclasses.replace(layer, scale=None) for layer in expected)
        assert layers == expected and not isinstance(layers, str), case["raw"]


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_layers_have_the_windows_of_the_masks_of_transformers(model_type):
    for case in CASES[model_type]:
        layers = read(model_type, case["raw"])
        if isinstance(layers, str) or "windows" not in case:
            continue
        windows = [list(y.window) if isinstance(y.window, tuple) else y.window for y in layers]
        assert windows == case["windows"], case["raw"]
        assert [layer.chunk_size for layer in layers] == case["chunks"], case["raw"]


WINDOWED = sorted(n for n in CASES if any(any(c.get("windows", ())) for c in CASES[n]))


def test_the_model_types_with_windows():
    """Beside Llama 4, whose layers attend in chunks, and Inkling, whose window is always there."""
    assert (
        WINDOWED
        == """
    afmoe beam cohere2 cohere2_moe cwm deepseek_v4 dots1 exaone4 exaone_moe flint gemma2 gemma3_text
    gemma3n_text gemma4_text gemma4_unified_text gpt_neo gpt_oss granite_swa granitemoe_swa
    inkling2_text inkling_text kolibri1 laguna lfm3 mellum mimo_v2_flash minimax ministral
    ministral3 mistral mixtral modernbert modernbert-decoder muse_spark_text olmo3 phi3
    phi4_multimodal phimoe qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe
    recurrent_gemma smollm3 starcoder2 vaultgemma
    """.split()
    )


def small(model_type):
    sizes = {} if "depths" in model_type_defaults()[model_type] else {"num_hidden_layers": 12}
    return {"model_type": model_type} | sizes | NEEDED.get(model_type, {})


def complaint(model_type, **keys):
    """The message for a config with these keys."""
    config = small(model_type)
    several = model_type_defaults()[model_type].get("is_encoder_decoder")
    pe.from_hf(config, decoder=False if several else None)
    with pytest.raises(ValueError) as error:
        pe.from_hf(config | keys, decoder=False if several else None)
    return str(error.value)


UNREAD = {"alibi_slope": 1, "no_position_layers": 1, "rope_style": 1, "window_shape": 1}


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_a_key_that_is_not_read_is_named(model_type):
    cases = [UNREAD]
    if model_type not in WINDOWED:
        cases.append({"sliding_window": 17})
    if model_type != "llama4_text":
        cases.append({"attention_chunk_size": 17})
    for keys in cases:
        message = complaint(model_type, **keys)
        assert message.endswith(f"has {[*keys]}, which nothing here reads.")


def keys_read(model_type, config, decoder):
    """{(dict, key)} that the readers look up; dict: None, or where it is in the config."""
    keys = set()
    explicit = TrackedConfig.explicit

    def record(self, name):
        inner = {"rope parameters": "rope_parameters", "linear_attn_config": "linear_attn_config"}
        inner["attn_config"] = "attn_config"
        keys.add((next((inner[x] for x in inner if self.label.endswith(x)), None), name))
        return explicit(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrackedConfig, "explicit", record)
        pe.from_hf(config, decoder=decoder)
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
DICTS = {"rope_parameters", "rope_scaling", "attn_config", "per_layer_config"}
DICTS |= {"linear_attn_config"}
# Keys of several types, and keys that change nothing.
FREE = {"sliding_window_pattern", "pos_att_type"}
FREE |= {"max_source_positions", "pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"}


def whole_configs(model_type):
    raw = small(model_type)
    if model_type == "mpt":
        raw["attn_config"] = {"alibi": True}
    yield raw
    if model_type == "llama":
        for rope in ROPES:
            yield raw | {"rope_parameters": rope}


# One model type of each row of the table.
ROWS = {id(row): model_type for model_type, row in sorted(MODEL_TYPES.items())}


@pytest.mark.parametrize("model_type", ROWS.values())
def test_a_value_of_the_wrong_type_is_an_error_of_one_line(model_type):
    """No other exception, no number made of a string, for every key that a reader looks up."""
    decoder = False if model_type_defaults()[model_type].get("is_encoder_decoder") else None
    for config in whole_configs(model_type):
        for section, key in sorted(keys_read(model_type, config, decoder), key=str):
            if key in FREE or "every_n" in key or "interval" in key:
                continue
            for wrong in WRONG:
                if isinstance(wrong, dict) and key in DICTS:
                    continue
                inner = (config.get(section) or {}) | {key: wrong} if section else wrong
                broken = config | {section or key: inner}
                with pytest.raises(ValueError, match=r"\Afrom_hf: .*\Z"):
                    pe.from_hf(broken, decoder=decoder)
                    pytest.fail(f"{section} {key}={wrong!r} is accepted")


@pytest.mark.parametrize("read", [pe.from_hf, pe.attention_options_from_hf])
def test_errors_begin_with_the_function_that_was_called(read):
    name = read.__name__
    for config in (
        {"model_type": "lama"},
        {"model_type": ["llama"]},
        {"model_type": "llava", "text_config": "llama"},
        {"model_type": "deepseek_v3", "rope_parameters": [1]},
        {"model_type": "deepseek_v3", "rope_scaling": {"rope_type": "yarn", "mscale_all_dim": 1}},
    ):
        with pytest.raises(ValueError, match=rf"\A{name}: .*\Z"):
            read({"qk_rope_head_dim": 64, "qk_nope_head_dim": "x"} | config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.needs(json.loads(GOLDEN.read_text())["origin"].split(",")[0].replace(" ", "=="))
def test_the_files_are_what_transformers_gives():
    module = importlib.import_module("tests.makers.hf_configs")
    assert json.loads(json.dumps(module.golden()["model_types"])) == CASES
    assert module.all_defaults()["model_types"] == model_type_defaults()
