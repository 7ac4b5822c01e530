"""Configs that `from_hf` reads or refuses, and `to_hf` back again.

`configs.json` has three tables: configs with a part of the message that refuses them; pairs of
configs that mean the same, by keys of releases without effect, other names and nested parts; and
configs with the scheme or the layers that they describe.
"""

import json
import pathlib

import numpy as np
import pytest

import posenc_jax as pe

TABLES = json.loads(pathlib.Path(__file__).with_name("configs.json").read_text())
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize("case", TABLES["refused"], ids=lambda case: case["message"][:60])
def test_a_config_is_refused(case):
    function = case.get("function", "from_hf")
    with pytest.raises(ValueError) as error:
        getattr(pe, function)(case["config"], decoder=case.get("decoder"))
    message = str(error.value)
    assert message.startswith((f"{function}: ", "from_hf: ")) and "\n" not in message
    assert case["message"] in message


@pytest.mark.parametrize("case", TABLES["same"], ids=lambda case: case[0]["model_type"])
def test_configs_that_mean_the_same(case):
    config, other, decoder = (*case, None)[:3]
    assert pe.from_hf(config, decoder=decoder) == pe.from_hf(other, decoder=decoder)


@pytest.mark.parametrize("case", TABLES["read"], ids=lambda case: case[0]["model_type"])
def test_a_config_is_read(case):
    config, text, decoder = (*case, None)[:3]
    expected = eval(text, dict(vars(pe)))
    read = pe.scheme_from_hf if isinstance(expected, pe.Scheme) else pe.from_hf
    assert read(config, decoder=decoder) == expected


def test_scaling_of_llama_4_scout_has_no_blend():
    rope = {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    config = {"model_type": "llama4_text", "head_dim": 128, "rope_scaling": rope}
    scheme = pe.from_hf(config)[0].scheme
    plain = 5e5 ** -(np.arange(64) / 64)
    expected = np.where(2 * np.pi / plain > 8192, plain / 16, plain)
    np.testing.assert_allclose(scheme.scaling(plain, 128, 5e5)[0], expected, rtol=1e-12)


class Config:
    def __init__(self, **values):
        self.values = values

    def to_dict(self):
        return {n: x.to_dict() if isinstance(x, Config) else x for n, x in self.values.items()}


def test_config_objects_are_read():
    assert pe.from_hf(Config(**LLAMA)) == pe.from_hf(LLAMA)
    assert pe.from_hf({"model_type": "llava", "text_config": Config(**LLAMA)}) == pe.from_hf(LLAMA)
    with pytest.raises(TypeError, match="from_hf: config must be a dict or have to_dict, got 'a"):
        pe.from_hf("a/path/config.json")  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize(
    "kind, flag, version, in_dict, held, window",
    [
        ("gemma3_text", True, "4.56.2", 512, 512, 257),  # It ignores the flag.
        *(("gemma3_text", True, v, 257, 257, 257) for v in ("4.57.3", "5.0.0", "5.15.1")),
        ("gemma3_text", True, "5.24.0", 512, 257, 257),
        ("gemma3_text", True, "6.0.0.dev0", 512, 257, 257),
        ("gemma3_text", False, "5.0.0", 512, 512, 512),
        ("gemma4_text", "all", "5.15.1", 257, 257, (257, 257)),
        ("gemma4_unified_text", "all", "5.16.0", 512, 257, (257, 257)),
        ("gemma4_text", "vision", "5.15.1", 512, 512, 512),
        ("gemma3n_text", True, "5.24.0", 1022, 512, 512),
    ],
)
def test_windows_of_config_objects(kind, flag, version, in_dict, held, window):
    """What `to_dict` of each version has, what its object holds and its model attends to."""
    config = Config(
        **{"model_type": kind, "use_bidirectional_attention": flag, "sliding_window": in_dict},
        **{"transformers_version": version, "num_hidden_layers": 1},
        layer_types=["sliding_attention"],
    )
    config.sliding_window = held
    outer = Config(model_type=kind.replace("_text", ""), text_config=config)
    outer.text_config = config
    if kind.startswith("gemma4"):
        window = pe.from_hf(config.values | {"sliding_window": 512, "transformers_version": ""})
        window = window[0].window
    for each in (config, outer):
        assert pe.from_hf(each)[0].window == window


SHARED = """
llama mixtral phi glm arcee gpt_neox stablelm gemma falcon cohere2 flint afmoe qwen2 qwen2_vl_text
deepseek_v3 ministral3 granite_swa minimax_m2 hunyuan_v1_dense
"""


@pytest.mark.parametrize("kind", SHARED.split())
def test_rope_parameters_by_kind_are_refused_where_layers_share_a_rotation(kind):
    rope = {"full_attention": {"rope_theta": 777.0}, "sliding_attention": None}
    config = {"model_type": kind, "num_hidden_layers": 6, "sliding_window": 8}
    config = config if kind in ("cohere2", "afmoe", "flint") else config | {"sliding_window": None}
    for name in ("rope_parameters", "rope_scaling"):
        with pytest.raises(ValueError, match=r"has \['full_attention'\], which nothing here reads"):
            pe.from_hf(config | {name: rope})


DEBERTA = {"model_type": "deberta-v2", "hidden_size": 64, "num_attention_heads": 4}
DEBERTA |= {"relative_attention": True}
LATENT = {"model_type": "deepseek_v3", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
MSCALED = {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}
INKLING = {"model_type": "inkling_text", "head_dim": 64, "num_hidden_layers": 6}
SCALES = [  # Of all layers, or of each.
    ({"model_type": "granite"}, 1.0),
    ({"model_type": "mpt", "attn_config": {"softmax_scale": 0.1}}, 0.1),
    ({"model_type": "gpt2"}, None),
    ({"model_type": "gpt2", "scale_attn_weights": False}, 1.0),
    (
        {"model_type": "gpt2", "n_layer": 2, "scale_attn_by_inverse_layer_idx": True},
        [1 / 8, 1 / 16],
    ),
    (LATENT, None),
    (LATENT | {"rope_scaling": MSCALED}, pytest.approx(1.8739 * 192**-0.5, rel=1e-4)),
    (DEBERTA | {"pos_att_type": "c2p|p2c"}, 48**-0.5),
    (DEBERTA | {"pos_att_type": ["p2c"]}, 32**-0.5),
    (DEBERTA | {"pos_att_type": ["c2p", "c2p"]}, 32**-0.5),
    (INKLING | {"swa_head_dim": 32}, [1 / 32] * 5 + [1 / 64]),
    (INKLING | {"model_type": "inkling2_text"}, None),
]


@pytest.mark.parametrize("config, expected", SCALES)
def test_logit_scales(config, expected):
    scales = [layer.scale for layer in pe.from_hf(config)]
    assert scales == (expected if isinstance(expected, list) else [expected] * len(scales))


SCHEMES = {
    "plain": pe.RoPE(head_dim=16, theta=5e5),
    "partial": pe.RoPE(head_dim=16, rotary_dim=4),
    "dynamic": pe.RoPEByLength(head_dim=16, scaling=pe.DynamicNTK(2.0, 8192, None)),
    "longrope": pe.RoPEByLength(
        head_dim=16, scaling=pe.LongRoPE((1.0,) * 8, (2.0,) * 8, 4.0, 2048, long=None)
    ),
}
SCALINGS = {
    "linear": pe.PI(4.0),
    "llama3": pe.Llama3(8.0, 2048, 1.0, 3.0),
    "yarn": pe.YaRN(4.0, 2048, beta_fast=16.0, truncate=False),
    "yarn with a factor": pe.YaRN(4.0, 2048, attention_factor=1.1),
    "yarn of DeepSeek": pe.YaRN(4.0, 2048, mscale=0.7, mscale_all_dim=1.0),
    "proportional": pe.Proportional(0.5),
    "proportional and linear": (pe.Proportional(0.5), pe.PI(8.0)),
}
SCHEMES |= {name: pe.RoPE(head_dim=16, scaling=scaling) for name, scaling in SCALINGS.items()}


@pytest.mark.parametrize("name", SCHEMES)
def test_from_hf_inverts_to_hf(name):
    scheme = SCHEMES[name]
    kind = {"model_type": "stablelm"} if name == "partial" else {}  # Llama rotates whole heads.
    more = {"rope_parameters": pe.to_hf(scheme), "max_position_embeddings": 8192}
    assert pe.scheme_from_hf(LLAMA | kind | more) == scheme


@pytest.mark.parametrize(
    "kind",
    ["glm", "glm4", "gpt_neox", "nemotron", "persimmon", "phi", "stablelm", "llama", "deepseek_v3"],
)
def test_from_hf_inverts_to_hf_where_the_default_is_a_part(kind):
    rope = {"rope_type": "default", "rope_theta": 5e3}
    if kind != "deepseek_v3":  # Its rotated end belongs to its sizes.
        rope["partial_rotary_factor"] = 1.0
    config = {"model_type": kind, "rope_parameters": rope}
    layers = pe.from_hf(config)
    assert pe.to_hf(layers) == rope
    assert pe.from_hf(config | {"rope_parameters": pe.to_hf(layers)}) == layers


@pytest.mark.parametrize(
    "kind, order, layout",
    [
        ("qwen2_vl_text", "contiguous", "half"),
        ("qwen3_vl_text", "interleaved", "half"),
        ("ernie4_5_vl_moe_text", "alternating", "interleaved"),
    ],
)
def test_from_hf_inverts_to_hf_with_several_axes(kind, order, layout):
    scheme = pe.MRoPE(head_dim=16, sections=(4, 2, 2), order=order, layout=layout)
    config = {"model_type": kind, "head_dim": 16, "rope_parameters": pe.to_hf(scheme)}
    assert pe.scheme_from_hf(config) == scheme
    assert pe.to_hf(pe.from_hf(config)) == pe.to_hf(scheme)


def test_from_hf_inverts_to_hf_for_every_part_of_a_head():
    """Readers truncate the product of the head dim and a fraction: 88 * (60 / 88) is below 60."""
    config = {"model_type": "stablelm", "head_dim": 88, "num_hidden_layers": 1}
    for dim in range(2, 88, 2):
        scheme = pe.RoPE(88, rotary_dim=dim)
        assert pe.scheme_from_hf(config | {"rope_parameters": pe.to_hf(scheme)}) == scheme
    config |= {"model_type": "minimax_m2", "rotary_dim": 60}
    assert pe.scheme_from_hf(config).rotary_dim == 60


def test_from_hf_inverts_to_hf_for_layers_that_differ():
    kinds = ["sliding_attention", "full_attention"]
    config = {"model_type": "beam", "head_dim": 16, "layer_types": kinds, "sliding_window": 4}
    layers = pe.from_hf(
        config | {"rope_parameters": {"sliding_attention": {"rope_theta": 10.0}, kinds[1]: None}}
    )
    assert [layer.window for layer in layers] == [4, None]
    assert isinstance(layers[1].scheme, pe.QueryTemperature)
    bare = pe.layer_pattern(2, pe.RoPE(head_dim=16, theta=10.0), pe.NoPE())
    written = pe.to_hf(bare, kinds)
    rope = {"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 1.0}
    assert written == {kinds[0]: rope, kinds[1]: None}
    assert pe.from_hf(config | {"rope_parameters": written}) == layers


OTHER_SCALINGS = [
    pe.NTK(2.0),
    (pe.PI(2.0), pe.HighFrequenciesOnly(64)),
    pe.YaRN(2.0, 64, ramp="rotations"),
    pe.YaRN(2.0, 64, mscale=0.5),
    pe.DynamicNTK(2.0, 64, 128),
]
TWO = (pe.RoPE(head_dim=8), pe.RoPE(head_dim=8, theta=2.0))
ERRORS = [
    (pe.to_hf, {"scheme": pe.ALiBi(num_heads=4)}, "only RoPE and MRoPE have rope parameters"),
    (
        pe.to_hf,
        {"scheme": pe.RoPE(16, rotary_dim=8, rotary_start=2)},
        "the start or the end of a head, got rotary_start=2 and 8 rotary dimensions of 16",
    ),
    (
        pe.to_hf,
        {"scheme": pe.RoPE(16, rotary_dim=8, scaling=pe.Proportional(0.5))},
        r"no rope_type for \(Proportional.* on 0.5 of a head",
    ),
    (pe.to_hf, {"scheme": TWO}, "schemes that differ need layer_types"),
    (pe.to_hf, {"scheme": TWO, "layer_types": ["a"] * 2}, "layers of type 'a' differ"),
    (pe.to_hf, {"scheme": TWO, "layer_types": ["a"] * 3}, "3 layer_types need as many schemes"),
    *(
        (pe.to_hf, {"scheme": pe.RoPE(head_dim=8, scaling=scaling)}, "^to_hf: .* no rope_type for")
        for scaling in OTHER_SCALINGS
    ),
]
