"""Every causal language model of transformers is read, or listed with the reason why not.

`makers/hf_configs.py` writes `causal_lm_types.json`, their model types.
"""

import json
import pathlib

import pytest

import posenc_jax as pe
from posenc_jax.hf.model_types import MODEL_TYPES, NOT_READ

FILE = pathlib.Path(__file__).with_name("causal_lm_types.json")
NAMES = json.loads(FILE.read_text())["model_types"]
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
TEXT_MODELS = {"mllama_text_model"}  # Listed, though they are no causal language models alone.


def test_each_is_read_or_listed_once():
    read = {name for name in NAMES if name in MODEL_TYPES}
    assert sorted([*read, *READ_AS, *(NOT_READ.keys() - TEXT_MODELS)]) == NAMES
    assert set(READ_AS.values()) <= set(MODEL_TYPES)


def test_the_count_of_the_docs():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "models.md").read_text()
    read = len(NAMES) - len(NOT_READ.keys() - TEXT_MODELS)
    assert f"reads {read} of the {len(NAMES)} causal language models of transformers 5.23" in page


@pytest.mark.parametrize("name", sorted(NOT_READ))
def test_the_error_has_the_reason(name):
    with pytest.raises(ValueError) as error:
        pe.from_hf({"model_type": name})
    assert str(error.value) == f"from_hf: unknown model_type {name!r}; {NOT_READ[name]}."
    assert len(str(error.value)) < 200


@pytest.mark.filterwarnings("ignore")
@pytest.mark.needs(json.loads(FILE.read_text())["origin"].replace(" ", "=="))
def test_the_names_are_those_of_transformers():
    from tests.makers import hf_configs

    assert hf_configs.causal_lm_types() == NAMES
    for name, text in READ_AS.items():
        config = hf_configs.CONFIG_MAPPING[name]()
        assert config.get_text_config().model_type == text
