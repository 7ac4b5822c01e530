"""Configs that `from_hf` reads or refuses, and `to_hf` back again.

`configs.json` has three tables: configs with a part of the message that refuses them; pairs of
configs that mean the same, by keys of releases without effect, other names and nested parts; and
configs with the scheme or the layers that they describe.
"""

import json
import math
import pathlib

import numpy as np
import pytest
from flax import nnx

import posenc_jax as pe
from posenc_jax.nnx import Attention

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


def test_layers_without_attention_have_no_module():
    config = {"model_type": "lfm2", "num_hidden_layers": 2, "hidden_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "full_attn_idxs": [1]}
    options = pe.attention_options_from_hf(config)
    with pytest.raises(ValueError, match="a layer of attention, got mixer='convolution'"):
        nnx.eval_shape(lambda: Attention(**options[0], rngs=nnx.Rngs(0)))
    attention = nnx.eval_shape(lambda: Attention(**options[1], rngs=nnx.Rngs(0)))
    assert attention.query_norm is not None


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


@pytest.mark.parametrize("read", [pe.from_hf, pe.scheme_from_hf])
def test_an_unknown_model_type_gives_a_short_error_with_similar_ones(read):
    with pytest.raises(ValueError, match="model_type 'lama'; did you mean 'llama'") as error:
        read({"model_type": "lama"})
    assert len(str(error.value)) < 150
    with pytest.raises(ValueError, match=r"model_type 'zzz'; all are in"):
        read({"model_type": "zzz"})


def test_windows_to_both_sides():
    """Masks of transformers 5.23: which distances from the 11th of 20 tokens are visible."""
    windowed = {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": 7}
    windowed["layer_types"] = ["sliding_attention", "full_attention"]

    def of(kind, **more):
        return pe.from_hf({"model_type": kind} | windowed | more)[0].window

    assert of("gemma2", is_causal=False) == (7, 7)
    assert of("gemma3_text", use_bidirectional_attention=True) == 4  # 3 on each side.
    assert of("gemma4_text", use_bidirectional_attention="all") == (4, 4)
    assert of("gemma4_text", use_bidirectional_attention="vision") == 7


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


def test_a_null_truncate_of_yarn_is_false():
    """By the formula of the paper, in float64, whose borders are no integers."""
    dim, theta, factor, length = 128, 5e5, 8.0, 2048
    low, high = (
        dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta)) for turns in (32, 1)
    )
    base = theta ** (-np.arange(0, dim, 2) / dim)
    stretched = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    for kind in ("llama", "qwen2_vl_text"):
        rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "truncate": None}
        rope |= {"original_max_position_embeddings": length}
        rope |= {"mrope_section": [32, 16, 16]} if kind != "llama" else {}
        config = {"model_type": kind, "head_dim": dim, "hidden_size": 512, "rope_parameters": rope}
        config |= {"num_attention_heads": 4, "num_hidden_layers": 1}
        frequencies = pe.from_hf(config)[0].scheme.base_frequencies
        np.testing.assert_allclose(
            frequencies, base * (1 - stretched + stretched / factor), rtol=1e-12
        )


# Keys that differ from those that transformers writes.
DEEPSEEK_V4 = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "compress_ratios": [0, 4, 128, 4, 0, 0],  # One more for the layer that predicts the next token.
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def deepseek_frequencies(dim, length, base, factor, fast, slow):
    """`precompute_freqs_cis` of DeepSeek-V4's inference/model.py, without the positions."""

    def corrected(rotations):
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    freqs = 1.0 / base ** (np.arange(0, dim, 2) / dim)
    if length:
        low = max(math.floor(corrected(fast)), 0)
        high = min(math.ceil(corrected(slow)), dim - 1)
        smooth = 1 - np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        freqs = freqs / factor * (1 - smooth) + freqs * smooth
    return freqs


def test_deepseek_v4_as_released():
    layers = pe.from_hf(DEEPSEEK_V4)
    assert [layer.window for layer in layers] == [128] * 5
    assert all(
        layer.sinks and layer.softcap is layer.scale is layer.qk_norm is None for layer in layers
    )
    main, compress = layers[0].scheme, layers[1].scheme
    assert [layer.scheme for layer in layers] == [main, compress, compress, compress, main]
    for scheme, arguments in [
        (main, (64, 0, 10000, 16, 32, 1)),
        (compress, (64, 65536, 160000, 16, 32, 1)),
    ]:
        assert isinstance(scheme, pe.VORoPE) and scheme.layout == "interleaved"
        assert (scheme.rotary_start, scheme.num_rotated, scheme.attention_factor) == (448, 64, 1.0)
        np.testing.assert_allclose(
            scheme.base_frequencies, deepseek_frequencies(*arguments), rtol=1e-6
        )


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


def test_logit_scales_of_model_types():
    def of(**settings):
        return pe.from_hf(settings)[0].scale

    assert of(model_type="llama") is None
    assert of(model_type="granite", attention_multiplier=0.5) == 0.5
    assert of(model_type="gemma3_text", query_pre_attn_scalar=16) == 0.25
    assert of(model_type="mpt", attn_config={"softmax_scale": 0.1}) == 0.1
    assert of(model_type="gemma4_text") == 1.0
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    scale = of(model_type="deepseek_v3", rope_scaling=yarn, **sizes)
    assert scale == pytest.approx(1.8739 * 192**-0.5, rel=1e-4)
    assert of(model_type="deepseek_v3", **sizes) is None
    assert of(model_type="granite") == 1.0
    assert of(model_type="gpt2") is None
    assert of(model_type="gpt2", scale_attn_weights=False) == 1.0
    layers = pe.from_hf({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True})
    assert [layer.scale for layer in layers] == [0.125 / (i + 1) for i in range(12)]
    for kind in ("t5", "mt5", "umt5"):
        halves = [pe.from_hf({"model_type": kind}, decoder=decoder) for decoder in (False, True)]
        assert {layer.scale for half in halves for layer in half} == {1.0}
    deberta = {"model_type": "deberta-v2", "hidden_size": 64, "num_attention_heads": 4}
    deberta |= {"relative_attention": True}
    for terms, number in (("c2p|p2c", 3), (["p2c"], 2), (["c2p", "c2p"], 2)):
        assert of(**deberta, pos_att_type=terms) == (number * 16) ** -0.5
    sizes = {"head_dim": 64, "swa_head_dim": 32, "num_hidden_layers": 6}
    layers = pe.from_hf({"model_type": "inkling_text"} | sizes)
    assert [layer.scale for layer in layers] == [1 / 32] * 5 + [1 / 64]
    layers = pe.from_hf({"model_type": "inkling2_text", "head_dim": 64, "num_hidden_layers": 6})
    assert {layer.scale for layer in layers} == {None}
    assert of(model_type="swinv2") is of(model_type="xlnet") is None


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
    "kind", ["glm", "glm4", "gpt_neox", "nemotron", "persimmon", "phi", "stablelm", "llama"]
)
def test_from_hf_inverts_to_hf_where_the_default_is_a_part(kind):
    rope = {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 1.0}
    config = {"model_type": kind, "rope_parameters": rope}
    layers = pe.from_hf(config)
    assert layers[0].scheme.rotary_dim is None and pe.to_hf(layers) == rope
    assert pe.from_hf(config | {"rope_parameters": pe.to_hf(layers)}) == layers


def test_a_rotated_end_belongs_to_the_sizes_of_the_model_type():
    config = {"model_type": "deepseek_v3", "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    layers = pe.from_hf(config | {"rope_theta": 5e3})
    assert pe.to_hf(layers) == {"rope_type": "default", "rope_theta": 5e3}
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
    config = {"model_type": "stablelm", "hidden_size": 64, "num_attention_heads": 4}
    for head_dim in (88, 100, 176):
        for dim in range(2, head_dim, 2):
            scheme = pe.RoPE(head_dim, rotary_dim=dim)
            rope = {"head_dim": head_dim, "rope_parameters": pe.to_hf(scheme)}
            assert pe.scheme_from_hf(config | {"num_hidden_layers": 1} | rope) == scheme
    config |= {"model_type": "minimax_m2", "head_dim": 88, "rotary_dim": 60}
    assert pe.from_hf(config)[0].scheme.rotary_dim == 60


def test_a_phi3_of_fewer_positions_than_it_was_trained_with():
    """transformers 5.24 takes no factor on attention then."""
    scaling = {"type": "longrope", "short_factor": [1.05] * 8, "long_factor": [2.0] * 8}
    config = {"model_type": "phi3", "hidden_size": 64, "num_attention_heads": 4}
    config |= {"original_max_position_embeddings": 4096, "rope_scaling": scaling}
    for length, factor in ((2048, 1.0), (8192, 2.0)):
        (layer, *_) = pe.from_hf(config | {"max_position_embeddings": length})
        assert layer.scheme.scaling.factor == factor


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
NO_END = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None}


def test_layer_types_need_no_max_window_layers():
    kinds = ["full_attention", "sliding_attention"]
    layers = pe.from_hf(NO_END | {"num_hidden_layers": 2, "layer_types": kinds})
    assert [layer.window for layer in layers] == [None, 4096]


MPT = {"attn_type": "multiquery_attention", "qk_ln": True, "prefix_lm": True}
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
    (pe.from_hf, {"config": NO_END}, "has a sliding_window and max_window_layers=null"),
    (pe.from_hf, {"config": {"hidden_size": 64}}, "from_hf: the config must have 'model_type'"),
    *(
        (
            pe.from_hf,
            {"config": {"model_type": "mpt", "attn_config": {name: value}}},
            f"{name}={value!r}; supported",
        )
        for name, value in MPT.items()
    ),
    (pe.to_hf, {"scheme": TWO}, "schemes that differ need layer_types"),
    (pe.to_hf, {"scheme": TWO, "layer_types": ["a"] * 2}, "layers of type 'a' differ"),
    (pe.to_hf, {"scheme": TWO, "layer_types": ["a"] * 3}, "3 layer_types need as many schemes"),
    *(
        (pe.to_hf, {"scheme": pe.RoPE(head_dim=8, scaling=scaling)}, "^to_hf: .* no rope_type for")
        for scaling in OTHER_SCALINGS
    ),
]
