"""The same comparison with the installed transformers; needs the group `parity`."""

import collections
import dataclasses
import importlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.mask import visible
from posenc_jax.hf.model_types import MODEL_TYPES
from posenc_jax.hf.rotary import Rotating
from tests.hf import test_layers

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.needs("torch", "transformers>=5.23"),
]


@pytest.fixture(scope="module")
def maker():
    return importlib.import_module("tests.makers.hf_golden")


def test_the_files_are_what_transformers_gives(maker):
    for name in maker.CASES:
        made_again = maker.make(name)
        with np.load(maker.FOLDER / f"{name}.npz") as file:
            assert sorted(file) == sorted(made_again), name
            for key in made_again.keys() - {"about"}:
                np.testing.assert_allclose(made_again[key], file[key], rtol=1e-6, atol=1e-6)
            was, is_now = (json.loads(str(x["about"])) for x in (file, made_again))
            assert was["layer"] == is_now["layer"]
            assert read(was["config"]) == read(is_now["config"])


def read(config):
    several = config.get("is_encoder_decoder")
    return pe.from_hf(config, decoder=config.get("is_decoder", False) if several else None)


def test_rotations_of_mutated_configs(maker):
    """Frequencies and factors of every rotary module, with null, missing and moved keys."""
    from tests.makers import hf_fuzz_rotations

    outcomes = collections.Counter()
    for kind in MODEL_TYPES:
        for raw, _, outcome, text in hf_fuzz_rotations.draws(kind, seed=0, count=8):
            assert outcome != "differs", (kind, raw, text)
            outcomes[outcome] += 1
    assert outcomes["same"] > 300


def test_windows_of_config_objects(maker):
    """A model of an object against what `from_hf` reads from the object."""
    import torch
    import transformers

    config = transformers.Gemma3TextConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1, "sliding_window": 12},
        **{"layer_types": ["sliding_attention"], "use_bidirectional_attention": True},
        attn_implementation="eager",
    )
    model = transformers.Gemma3TextModel(config).eval()
    with torch.no_grad():
        weights = model(torch.arange(40)[None], output_attentions=True).attentions[0][0, 0]
    reach = max(abs(i - j) for i, j in weights.nonzero().tolist())
    assert pe.from_hf(config)[0].window == reach + 1 == 7


# Model types whose modeling files read `partial_rotary_factor`.
PARTIAL = """
bamba deepseek_v4 glm glm4 glm4_moe gpt_neox gpt_neox_japanese laguna mimo_v2_flash minimax_m2
minimax_m3_vl_text nemotron persimmon phi phi3 phi4_multimodal qwen3_5_moe_text qwen3_5_text
qwen3_next qwen4_exp_text recurrent_gemma solar_open stablelm
"""


def test_model_types_that_rotate_a_part_of_a_head(maker):
    from transformers import CONFIG_MAPPING

    partial = []
    for kind in MODEL_TYPES:
        module = CONFIG_MAPPING[kind].__module__
        spec = importlib.util.find_spec(module.replace("configuration_", "modeling_"))
        if spec is None:  # Llama's modeling file.
            continue
        with open(spec.origin, encoding="utf-8") as file:
            if "partial_rotary_factor" in file.read():
                partial.append(kind)
    # Tables of a part of a head, which attention of these two cannot apply.
    assert sorted({*partial} - {"glm4_moe_lite", "mellum"}) == PARTIAL.split()


NEEDS = {
    "helium": {"settings": {"head_dim": 16}},
    "ministral": {"settings": {"head_dim": 16, "layer_types": ["full_attention"] * 4}},
    "persimmon": {"leading": True},
    "phi": {"leading": True},
    "phi3": {"settings": {"pad_token_id": 0}},
    "qwen3_next": {"settings": {"layer_types": ["full_attention"] * 4}},
    "stablelm": {"leading": True},
}
# Called differently; the golden files have these. test_layers.py runs the others.
APART = {"beam", "gemma4_text", "llama4_text"} | set(test_layers.KINDS)
ROTATING = {kind for kind, model in MODEL_TYPES.items() if isinstance(model.layers, Rotating)}


@pytest.mark.parametrize("kind", sorted(ROTATING - APART))
def test_layers_with_the_defaults_of_a_model_type(maker, kind):
    from tests.makers import hf_rotary

    for layer in (0, 3):
        with maker.in_double(), maker.torch.no_grad():
            options = {"layer": layer} | NEEDS.get(kind, {})
            config, _, is_causal, arrays = hf_rotary.rotated(kind, **options)
        config = json.loads(config.to_json_string(use_diff=False))
        spec = pe.from_hf(config)[layer]
        scheme = spec.scheme
        arrays = {n: jnp.asarray(x) for n, x in arrays.items()}
        positions = arrays["positions"]
        for rotate, x in ((scheme.query, "q"), (scheme.key, "k")):
            np.testing.assert_allclose(
                rotate({}, arrays[x], positions), arrays[f"{x}_rot"], atol=1e-6
            )
        out, _ = pe.scheme_attention(
            scheme,
            {},
            *(arrays[n] for n in "qkv"),
            positions=positions,
            is_causal=is_causal,
            scale=spec.scale,
            sinks=arrays.get("sinks"),
            softcap=config.get("attn_logit_softcapping"),
        )
        np.testing.assert_allclose(out, arrays["out"], atol=2e-6)


SWITCHED = {
    **{"num_hidden_layers": 7, "num_key_value_heads": 2, "head_dim": 8, "local_attention": 6},
    **{"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3},
    "attention_chunk_size": 5,
}
WINDOWED = """
beam cohere2 cwm deepseek_v4 dots1 exaone4 exaone_moe gemma2 gemma3_text gemma4_text gpt_oss
inkling2_text inkling_text llama4_text ministral ministral3 mistral mixtral modernbert olmo3 phi3
phimoe qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe smollm3 starcoder2
"""


@pytest.mark.parametrize("kind", WINDOWED.split())
def test_windows_are_the_masks_of_a_whole_model(maker, kind):
    """Runs a small model, and compares the mask that each of its layers is given."""
    import torch
    import transformers

    from tests.makers import hf_draw

    cls = transformers.CONFIG_MAPPING[kind]
    fields = {field.name for field in dataclasses.fields(cls)} | {*cls.attribute_map}
    settings = {n: x for n, x in (hf_draw.SIZES | SWITCHED).items() if n in fields}
    if kind in ("qwen2_vl_text", "qwen2_5_vl_text"):
        settings["rope_parameters"] = {"rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    if kind == "deepseek_v4":
        settings["partial_rotary_factor"] = 0.5
    config = cls(**settings)
    config._attn_implementation = "eager"
    file = importlib.import_module(cls.__module__.replace("configuration_", "modeling_"))
    model = transformers.AutoModel._model_mapping.get(cls, None)
    if model is None:
        model = next(x for n, x in vars(file).items() if n.endswith("TextModel"))
    model = model._from_config(config).eval()
    masks = {}

    def keep(module, args, options):
        masks[module.layer_idx] = options.get("attention_mask")

    for name, module in model.named_modules():
        if name.endswith(("self_attn", ".attn", "attention")) and hasattr(module, "layer_idx"):
            module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.arange(1, 17)[None])
    positions = jnp.arange(16)[None]
    layers = pe.from_hf(json.loads(config.to_json_string(use_diff=False)))
    assert any(layer.window or layer.chunk_size for layer in layers)
    for i, layer in enumerate(layers):
        chunks = None if layer.chunk_size is None else positions // layer.chunk_size
        is_causal = kind != "modernbert"
        seen = visible(
            positions, positions, chunks, chunks, is_causal=is_causal, window=layer.window
        )[0]
        mask = np.ones((16, 16), bool)
        if masks[i] is not None:
            mask = masks[i][0, 0].numpy()
            mask = mask if mask.dtype == bool else mask == 0.0
        np.testing.assert_array_equal(seen, mask)
