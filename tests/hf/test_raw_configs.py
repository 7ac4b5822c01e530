"""Raw configs, with keys left out, against the config classes of transformers.

`golden/raw_configs.json` is written by `make_configs.py`: for every model type raw configs, the
keys that its config class fills in, and the window of every layer by the masks of its modeling
file. `test_live.py` runs those masks.
"""

import importlib
import json
import pathlib

import pytest

import posenc_jax as pe
from posenc_jax.hf.config_reader import model_type_defaults
from posenc_jax.hf.model_types import MODEL_TYPES

GOLDEN = pathlib.Path(__file__).with_name("golden") / "raw_configs.json"
CASES = json.loads(GOLDEN.read_text())["model_types"]

# Keys beside the rotary dict that transformers ignores where it has a dict of its own: they raise.
IGNORED = {
    **dict.fromkeys(("apertus", "cwm", "ministral3", "mistral_large4_text"), ("rope_theta",)),
    **dict.fromkeys(("beam", "gemma4_text", "gpt_neox"), ("rope_theta",)),
    "mistral4": ("rope_theta", "partial_rotary_factor"),
}
# Raw configs that describe no model: layers with a window and none given, heads that do not divide
# the hidden size, another share than the rotary part of a head, no relative attention.
REFUSED = {
    **dict.fromkeys(("beam", "cohere2", "gemma2", "gemma3_text", "gpt_oss"), "no sliding_window"),
    **dict.fromkeys(("olmo3",), "no sliding_window"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32"), "rotary part of 64"),
    "mistral_large4_text": "rotary part of 64",
    "glm4_moe": "96 heads do not divide 4096",
    "deberta-v2": "relative_attention=False",
}


def read(model_type, config):
    """The layers, or the message of the error; and the logit scale."""
    config = {"model_type": model_type} | config
    several = model_type_defaults()[model_type].get("is_encoder_decoder")
    try:
        layers = pe.from_hf(config, decoder=False if several else None)
    except ValueError as error:
        layers = str(error)
    return layers, pe.hf_logit_scale(config)


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
        layers, scale = read(model_type, case["raw"])
        if names := ignored(model_type, case["raw"]):
            assert isinstance(layers, str) and any(name in layers for name in names)
            continue
        wanted, wanted_scale = read(model_type, completed(model_type, case))
        if model_type == "olmo3" and "rope_theta" in case["raw"]:
            # 5.23 gives the base to global layers alone; version 4, which wrote these configs,
            # to all.
            assert {layer.scheme.theta for layer in layers} == {case["raw"]["rope_theta"]}
            continue
        assert layers == wanted, case["raw"]
        if isinstance(layers, str):
            assert REFUSED[model_type] in layers, case["raw"]
        elif scale is None and wanted_scale is not None:  # HyperCLOVA X writes the usual factor.
            assert wanted_scale == layers[0].scheme.head_dim ** -0.5
        else:
            assert scale == wanted_scale


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_layers_have_the_windows_of_the_masks_of_transformers(model_type):
    for case in CASES[model_type]:
        layers, _ = read(model_type, case["raw"])
        if isinstance(layers, str) or "windows" not in case:
            continue
        windows = [list(y.window) if isinstance(y.window, tuple) else y.window for y in layers]
        assert windows == case["windows"], case["raw"]
        assert [layer.chunk_size for layer in layers] == case["chunks"], case["raw"]


WINDOWED = sorted(n for n in CASES if any(any(c.get("windows", ())) for c in CASES[n]))


def test_the_model_types_with_windows():
    """Beside Llama 4, whose layers attend in chunks, and Inkling, whose window is always there."""
    assert WINDOWED == [
        *("beam", "cohere2", "cwm", "dots1", "exaone4", "exaone_moe", "gemma2", "gemma3_text"),
        *("gemma4_text", "gpt_oss", "inkling_text", "ministral", "ministral3", "mistral"),
        *("mixtral", "modernbert", "olmo3", "phi3", "phimoe", "qwen2", "qwen2_5_vl_text"),
        *("qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_moe", "smollm3", "starcoder2"),
    ]


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
}


@pytest.mark.parametrize("model_type", sorted(set(MODEL_TYPES) - {*WINDOWED}))
def test_a_window_that_transformers_ignores_is_refused(model_type):
    found = complaint(model_type, sliding_window=17)
    assert found.endswith("has ['sliding_window'], which nothing here reads.")


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_a_key_that_is_not_read_is_named(model_type):
    for key in ("rope_style", "alibi_slope", "window_shape", "no_position_layers"):
        assert f"has ['{key}'], which nothing here reads" in complaint(model_type, **{key: 1})


@pytest.mark.filterwarnings("ignore")
def test_the_files_are_what_transformers_gives():
    pytest.importorskip("transformers", minversion="5.23")
    made = importlib.import_module("hf.make_configs")
    if made.ORIGIN.split(",")[0] != json.loads(GOLDEN.read_text())["origin"].split(",")[0]:
        pytest.skip("another version of transformers than the files are made with")
    assert json.loads(json.dumps(made.golden()["model_types"])) == CASES
    assert made.all_defaults()["model_types"] == model_type_defaults()
