"""The same comparison with the installed transformers; needs the extra `parity`."""

import importlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.hf.model_types import MODEL_TYPES
from posenc_jax.hf.rotary_families import Rotating

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def maker():
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.23")
    return importlib.import_module("hf.make_golden")


def test_the_files_are_what_transformers_gives(maker):
    for name in maker.CASES:
        made = maker.make(name)
        with np.load(maker.FOLDER / f"{name}.npz") as file:
            assert sorted(file) == sorted(made), name
            for key in made.keys() - {"about"}:
                np.testing.assert_allclose(made[key], file[key], rtol=1e-6, atol=1e-6)
            was, is_now = (json.loads(str(x["about"])) for x in (file, made))
            assert was["layer"] == is_now["layer"]
            assert read(was["config"]) == read(is_now["config"])


def read(config):
    several = config.get("is_encoder_decoder")
    return pe.from_hf(config, decoder=config.get("is_decoder", False) if several else None)


NEEDS = {
    "helium": {"settings": {"head_dim": 16}},
    "ministral": {"settings": {"head_dim": 16, "layer_types": ["full_attention"] * 4}},
    "persimmon": {"leading": True},
    "phi": {"leading": True},
    "phi3": {"settings": {"pad_token_id": 0}},
    "qwen3_next": {"settings": {"layer_types": ["full_attention"] * 4}},
    "stablelm": {"leading": True},
}
# Called differently; the golden files have Beam and Gemma 4.
APART = {"beam", "gemma4_text"}
ROTATING = {kind for kind, family in MODEL_TYPES.items() if isinstance(family, Rotating)}
ROTATING |= {"gpt_neox", "minimax_m2"}


@pytest.mark.parametrize("kind", sorted(ROTATING - APART))
def test_layers_with_the_defaults_of_a_model_type(maker, kind):
    from hf.make_golden import make_rotary

    for layer in (0, 3):
        with maker.in_double(), maker.torch.no_grad():
            options = {"layer": layer} | NEEDS.get(kind, {})
            config, _, is_causal, arrays = make_rotary.rotated(kind, **options)
        config = json.loads(config.to_json_string(use_diff=False))
        scheme = pe.from_hf(config)[layer].scheme
        arrays = {n: jnp.asarray(x) for n, x in arrays.items()}
        at = arrays["positions"]
        for rotate, x in ((scheme.query, "q"), (scheme.key, "k")):
            np.testing.assert_allclose(rotate({}, arrays[x], at), arrays[f"{x}_rot"], atol=1e-6)
        out, _ = pe.scheme_attention(
            scheme,
            {},
            *(arrays[n] for n in "qkv"),
            positions=at,
            is_causal=is_causal,
            scale=pe.hf_logit_scale(config),
            sinks=arrays.get("sinks"),
            softcap=config.get("attn_logit_softcapping"),
        )
        np.testing.assert_allclose(out, arrays["out"], atol=2e-6)
