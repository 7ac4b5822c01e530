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

GOLDEN = pathlib.Path(__file__).with_name("golden") / "raw_configs.json"
CASES = json.loads(GOLDEN.read_text())["model_types"]

# Keys outside the rotary dict that transformers ignores if there is a dict: they raise.
IGNORED = {
    "bamba": ("partial_rotary_factor",),
    **dict.fromkeys(("apertus", "cwm", "ministral3", "mistral_large4_text"), ("rope_theta",)),
    **dict.fromkeys(("beam", "gemma4_text", "gemma4_unified_text", "gpt_neox"), ("rope_theta",)),
    "muse_spark_text": ("rope_theta",),
    **dict.fromkeys(
        ("gpt_neox_japanese", "laguna", "lfm3", "mellum", "mimo_v2_flash", "mistral4"),
        ("rope_theta", "partial_rotary_factor"),
    ),
}
# Raw configs that describe no model: layers with a window and none given, heads that do not divide
# the hidden size, another share than the rotary part of a head, no relative attention, rope
# parameters that are not by the kind of layers.
REFUSED = {
    **dict.fromkeys(("afmoe", "cohere2_moe", "granite_swa", "lfm3"), "no sliding_window"),
    **dict.fromkeys(("granitemoe_swa", "vaultgemma"), "no sliding_window"),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text", "laguna", "mellum", "mimo_v2_flash"),
        "not rope parameters for kinds of layers",
    ),
    "minimax_m3_vl_text": "which transformers ignores",
    **dict.fromkeys(("beam", "cohere2", "gemma2", "gemma3_text", "gpt_oss"), "no sliding_window"),
    **dict.fromkeys(("olmo3",), "no sliding_window"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32"), "rotary part of 64"),
    "mistral_large4_text": "rotary part of 64",
    "nemotron_h": "['sliding_window'], which nothing here reads",
    "glm4_moe": "96 heads do not divide 4096",
    "qwen4_exp_text": "sections must add up to 128 pairs",
    "deberta-v2": "relative_attention=False",
}
# Model types whose modeling files read `partial_rotary_factor`.
PARTIAL = """
bamba deepseek_v4 glm glm4 glm4_moe gpt_neox gpt_neox_japanese laguna mimo_v2_flash minimax_m2
minimax_m3_vl_text nemotron persimmon phi phi3 phi4_multimodal qwen3_5_moe_text qwen3_5_text
qwen3_next qwen4_exp_text recurrent_gemma solar_open stablelm
"""


FLAT = "rope_scaling", "rope_parameters", "partial_rotary_factor"


def refusal(model_type, raw):
    """A part of the message for a raw config that describes no model."""
    if model_type == "gemma3_text" and raw.get("attn_logit_softcapping"):
        return "attn_logit_softcapping=30.0, which transformers ignores"
    if model_type == "lfm2_moe":
        return "must have 'layer_types'"
    if model_type in ("beam", "lfm3") and not {*raw}.isdisjoint(FLAT):
        return "not rope parameters for kinds of layers"
    if raw.get("partial_rotary_factor") == 0.25 and model_type not in PARTIAL.split():
        return "partial_rotary_factor=0.25, "
    if model_type == "pixtral":
        return "no rope scaling is supported for its type"
    if model_type in ("hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat"):
        return "depend on the length of each row"
    if model_type == "minimax":
        return "'sliding_attention']"
    if model_type == "muse_spark_text":
        return "no sliding_window" if "sliding_window" in raw else "layer_rope_theta"
    return REFUSED[model_type]


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


def ignored(model_type, raw):
    return {*raw} & {*IGNORED.get(model_type, ())}


def test_every_model_type_has_defaults_and_raw_configs():
    assert set(CASES) == set(MODEL_TYPES) == set(model_type_defaults())


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_a_raw_config_reads_as_transformers_completes_it(model_type):
    for case in CASES[model_type]:
        layers = read(model_type, case["raw"])
        if names := ignored(model_type, case["raw"]):
            assert isinstance(layers, str) and any(name in layers for name in names)
            continue
        expected = read(model_type, completed(model_type, case))
        if model_type == "olmo3" and "rope_theta" in case["raw"]:
            # 5.23 gives the base to global layers alone; version 4, which wrote such configs, to
            # all.
            assert "transformers 5 gives full attention " in layers
            continue
        if model_type == "hyperclovax" and not isinstance(layers, str) and layers[0].scale is None:
            # Its class writes the usual factor.
            assert expected[0].scale == layers[0].scheme.head_dim ** -0.5
            expected = tuple(dataclasses.replace(layer, scale=None) for layer in expected)
        assert layers == expected, case["raw"]
        if isinstance(layers, str):
            assert refusal(model_type, case["raw"]) in layers, case["raw"]


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


def complaint(model_type, **keys):
    """The message for a config with these keys."""
    config = {"model_type": model_type} | CASES[model_type][0]["raw"] | NEEDED.get(model_type, {})
    several = model_type_defaults()[model_type].get("is_encoder_decoder")
    pe.from_hf(config, decoder=False if several else None)
    with pytest.raises(ValueError) as error:
        pe.from_hf(config | keys, decoder=False if several else None)
    return str(error.value)


NEEDED = {
    "deberta-v2": {"relative_attention": True, "pos_att_type": "c2p"},
    "glm4_moe": {"head_dim": 128},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "kimi_linear": {
        "num_hidden_layers": 4,
        "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]},
    },
    "minimax_m3_vl_text": {"rope_parameters": {"partial_rotary_factor": 0.5}},
    "qwen4_exp_text": {"rope_parameters": {"partial_rotary_factor": 0.25}},
}


@pytest.mark.parametrize("model_type", sorted(set(MODEL_TYPES) - {*WINDOWED}))
def test_a_window_that_transformers_ignores_is_refused(model_type):
    message = complaint(model_type, sliding_window=17)
    assert message.endswith("has ['sliding_window'], which nothing here reads.")


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_a_key_that_is_not_read_is_named(model_type):
    keys = ["alibi_slope", "no_position_layers", "rope_style", "window_shape"]
    message = complaint(model_type, **dict.fromkeys(keys, 1))
    assert message.endswith(f"has {keys}, which nothing here reads.")


@pytest.mark.parametrize("model_type", sorted(set(MODEL_TYPES) - {"llama4_text"}))
def test_a_chunk_that_transformers_ignores_is_refused(model_type):
    message = complaint(model_type, attention_chunk_size=17)
    assert message.endswith("has ['attention_chunk_size'], which nothing here reads.")


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
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 4}
    if "depths" in model_type_defaults()[model_type] or model_type == "mpt":
        sizes = {}
    raw = {"model_type": model_type} | sizes | NEEDED.get(model_type, {})
    if model_type == "mpt":
        raw["attn_config"] = {"alibi": True}
    yield raw
    if model_type == "llama":
        for rope in ROPES:
            yield raw | {"rope_parameters": rope}


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
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
