"""Softcaps, sinks and norms of model types; `makers/hf_qk_norms.py` writes qk_norms.npz."""

import math
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.hf.model_types import MODEL_TYPES
from tests.hf import test_layers
from tests.support import recorded

ABOUT, ARRAYS = recorded(pathlib.Path(__file__).with_name("qk_norms.npz"))
NORMED = ABOUT["model_types"]


@pytest.mark.parametrize("kind", NORMED)
def test_norms_of_queries_and_keys_equal_transformers(kind):
    sections = {"rope_parameters": {"mrope_section": [2, 1, 1]}} if "_vl_" in kind else {}
    layers = pe.from_hf(NORMED[kind]["config"] | sections)
    with_norm = [i for i, layer in enumerate(layers) if layer.qk_norm is not None]
    assert with_norm == NORMED[kind]["layers"]
    norm = layers[with_norm[0]].qk_norm
    for which, heads in (("q", 4), ("k", 2)):
        fresh = norm.init(heads, 8)
        shapes = [(1, 2, heads, 8)] * 2 + [x.shape for x in fresh.values()]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        *parts, remainder = np.split(ARRAYS[f"{kind}.{which}"], ends)
        x, y, *params = (jnp.asarray(p).reshape(s) for p, s in zip(parts, shapes, strict=True))
        assert remainder.size == 0
        got = norm(dict(zip(fresh, params, strict=True)), x)
        np.testing.assert_allclose(got, y, atol=1e-6)


def test_other_model_types_have_no_norms():
    for kind in set(MODEL_TYPES) - set(NORMED) - set(test_layers.KINDS) - {"inkling2_text"}:
        decoder = True if kind in ("t5", "mt5", "umt5", "whisper") else None
        config = {"model_type": kind}
        if kind == "deberta-v2":
            config |= {"relative_attention": True, "pos_att_type": ["c2p"]}
        for layer in pe.from_hf(config, decoder=decoder):
            assert layer.qk_norm is None, kind
            assert layer.sinks == (kind in ("deepseek_v4", "gpt_oss"))
            assert layer.softcap == (50.0 if kind == "gemma2" else None)


@pytest.mark.parametrize("kind", ["cohere", "phi", "stablelm", "glm4_moe"])
def test_norms_that_a_config_switches_on(kind):
    assert pe.from_hf({"model_type": kind, "head_dim": 64})[0].qk_norm is None


def test_scheme_from_hf_is_of_layers_with_settings_too():
    granite = {"model_type": "granite", "attention_multiplier": 0.5, "head_dim": 8}
    assert pe.scheme_from_hf(granite) == pe.RoPE(head_dim=8)
    gemma2 = {"model_type": "gemma2", "attn_logit_softcapping": None}
    assert pe.from_hf(gemma2)[0].softcap is None
