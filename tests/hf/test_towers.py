"""Attention layers of towers of images; `makers/hf_towers.py` writes towers.npz."""

import importlib
import itertools
import pathlib

import numpy as np
import pytest

import posenc_jax as pe
from tests.hf.test_layers import live, norm_params, rotated, softmax_attention
from tests.makers.hf_table import TOWERS
from tests.support import recorded

FILE = pathlib.Path(__file__).with_name("towers.npz")
ABOUT, ARRAYS = recorded(FILE)
TOLERANCE = 3e-6  # Of the greatest number; float32 against float64.


def compared(spec, about, arrays):
    """The greatest error of the rotated queries and keys, if there, and of the output."""
    norms = tuple(norm_params(arrays, n) for n in "qk")
    norms = tuple({n: np.float32(x) for n, x in p.items()} for p in norms)
    q, k = (np.float32(arrays[n]) for n in "qk")
    coordinates = np.float32(arrays["coordinates"])
    q, k = rotated(spec.scheme, spec.qk_norm, {}, norms, q, k, coordinates)
    ends = np.cumsum(about["lengths"])  # Tokens see those of their image or region.
    outputs = [
        softmax_attention(
            *(x[:, a:b] for x in (q, k, arrays["v"])), np.ones((b - a, b - a), bool), spec.scale
        )
        for a, b in itertools.pairwise([0, *ends])
    ]
    ours = {"q_rot": q, "k_rot": k, "out": np.concatenate(outputs, 1)}
    return max(np.abs(ours[n] - x).max() / np.abs(x).max() for n, x in arrays.items() if n in ours)


@pytest.mark.parametrize("kind", TOWERS)
def test_layers_equal_those_of_transformers(kind):
    about = ABOUT["model_types"][kind]
    spec = next(s for s in pe.from_hf(about["config"]) if s.mixer == "attention")
    prefix = f"{kind}."
    arrays = {n.removeprefix(prefix): x for n, x in ARRAYS.items() if n.startswith(prefix)}
    assert compared(spec, about, arrays) < TOLERANCE


def test_parts_of_configs_are_read_by_name():
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    tower = {"depth": 2, "hidden_size": 64, "num_heads": 4}
    grid, grid16 = pe.AxialRoPE(16, theta=1e4), {"head_dim": 16, "theta": 1e4, "axes": (1, 0)}
    for kind, inner, scheme in [
        ("qwen2_5_vl", tower, grid),  # Released files have no model type of the part,
        ("qwen2_5_vl", tower | {"model_type": "qwen2_5_vl"}, grid),  # or that of the whole.
        ("qwen3_omni_moe_thinker", tower | {"model_type": "qwen3_omni_moe_vision_encoder"}, grid),
        ("step3p7", STEP, pe.AxialRoPE(**grid16)),
    ]:
        config = {"model_type": kind, "vision_config": inner}
        config["text_config"] = sizes | {"model_type": "qwen2"}
        assert pe.from_hf(config, part="vision_config") == (pe.LayerSpec(scheme),) * 2
        assert pe.scheme_from_hf(config, part="vision_config") == scheme
        assert pe.scheme_from_hf(config) == pe.RoPE(16)


def vision(kind, **config):
    return {"config": {"model_type": kind} | config, "part": "vision_config"}


STEP = {"layers": 2, "width": 64, "heads": 4}
GRID = "^attention_options_from_hf: the attention of step3p5_vision has a grid of an image"
ERRORS = [
    (pe.attention_options_from_hf, vision("step3p7", vision_config=STEP), GRID),
    (pe.from_hf, vision("llava"), r"^from_hf: the llava config has no 'vision_config'\.$"),
    (pe.from_hf, vision("gemma3", vision_config={"model_type": "gemma3"}), "'gemma3_vision'"),
]


@live
@pytest.mark.parametrize("kind", TOWERS)
def test_all_layers_equal_those_of_the_installed_transformers(kind):
    maker = importlib.import_module("tests.makers.hf_towers")
    assert maker.error(kind, maker.small(kind)) < TOLERANCE
