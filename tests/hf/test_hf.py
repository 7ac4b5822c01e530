"""Configs that `from_hf` reads or refuses, and `to_hf` back again."""

import math
import re

import numpy as np
import pytest
from flax import nnx

import posenc_jax as pe
from posenc_jax.nnx import Attention

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
LENGTH = {"original_max_position_embeddings": 2048}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def llama(**settings):
    return pe.scheme_from_hf(LLAMA | settings)


def scaling(**parameters):
    return llama(rope_parameters=parameters, max_position_embeddings=8192).scaling


def test_keys_of_transformers_4_and_5_are_equivalent():
    new = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
    new |= {"original_max_position_embeddings": 2048}
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    expected = pe.RoPE(head_dim=16, theta=5e5, scaling=pe.YaRN(4.0, 2048))
    assert llama(rope_parameters=new) == expected
    assert llama(rope_theta=5e5, rope_scaling=old) == expected
    assert llama(rope_theta=5e5, rope_scaling=old | {"rope_type": "yarn"}) == expected
    assert llama(rope_theta=5e5, rope_scaling=None) == pe.RoPE(head_dim=16, theta=5e5)


def test_model_type_decides_what_the_config_leaves_out():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}

    def of(kind, **settings):
        return pe.scheme_from_hf({"model_type": kind} | sizes | settings)

    assert of("cohere") == pe.RoPE(head_dim=16, theta=5e5, layout="interleaved")
    assert of("glm") == pe.RoPE(head_dim=128, layout="interleaved", rotary_dim=64)
    assert of("gpt_neox", rotary_pct=0.5, rotary_emb_base=1e3) == pe.RoPE(
        head_dim=16, theta=1e3, rotary_dim=8
    )
    assert of("gptj", rotary_dim=4).layout == "interleaved"
    assert of("bloom") == pe.ALiBi(num_heads=4)
    assert of("falcon", alibi=True) == pe.ALiBi(num_heads=4, scaled=True)
    assert of("mixtral").theta == 1e6
    assert of("llama", head_dim=32).head_dim == 32


def test_released_configs_with_keys_that_transformers_does_not_read():
    """Position keys of config.json of releases; a value that would mean more is refused."""
    gemma_2_9b = {"model_type": "gemma2", "head_dim": 256, "num_hidden_layers": 42}
    gemma_2_9b |= {"sliding_window": 4096, "sliding_window_size": 4096}
    assert [layer.window for layer in pe.from_hf(gemma_2_9b)] == [4096, None] * 21
    scout = {"model_type": "llama4_text", "head_dim": 128, "num_hidden_layers": 48}
    scout |= {"attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": 4}
    scout |= {"floor_scale": 8192, "no_rope_layers": [1, 1, 1, 0] * 12, "rope_theta": 500000.0}
    layers = pe.from_hf(scout)
    assert layers[3].scheme == pe.QueryTemperature(form="llama4", length=8192, strength=0.1)
    assert layers == pe.from_hf(scout | {"attn_temperature_tuning": True})
    assert pe.from_hf(scout | {"attn_temperature_tuning": 0})[3].scheme == pe.NoPE()
    bloom_560m = {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16}
    bloom_560m |= {"offset_alibi": 100}
    assert pe.scheme_from_hf(bloom_560m) == pe.ALiBi(num_heads=16)
    opus_mt = {"model_type": "marian", "d_model": 512, "encoder_layers": 6, "decoder_layers": 6}
    opus_mt |= {"static_position_embeddings": True, "max_position_embeddings": 512}
    expected = pe.Sinusoidal(model_dim=512, layout="concat")
    assert pe.scheme_from_hf(opus_mt, decoder=True) == expected
    nomic_1_5 = {"model_type": "nomic_bert", "n_embd": 768, "n_head": 12, "n_layer": 12}
    nomic_1_5 |= {"n_positions": 8192, "max_trained_positions": 2048, "rotary_emb_base": 1000}
    nomic_1_5 |= {"rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False}
    nomic_1_5 |= {"rotary_emb_scale_base": None, "rotary_scaling_factor": None}
    assert pe.scheme_from_hf(nomic_1_5) == pe.RoPE(head_dim=64, theta=1000.0)
    assert pe.scheme_from_hf(nomic_1_5 | {"rotary_emb_base": 10000}).theta == 10000.0
    hunyuan_7b = {"model_type": "hunyuan_v1_dense", "head_dim": 128, "num_hidden_layers": 32}
    hunyuan_7b |= {"rope_theta": 10000.0, "use_rotary_pos_emb": True}
    assert pe.scheme_from_hf(hunyuan_7b) == pe.RoPE(head_dim=128)
    smollm_2 = {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9}
    smollm_2 |= {"num_hidden_layers": 30, "rope_theta": 100000, "rope_interleaved": False}
    smollm_2 |= {"temperature": 1.0}
    assert pe.scheme_from_hf(smollm_2) == pe.RoPE(head_dim=64, theta=1e5)
    glm_5 = {"model_type": "glm_moe_dsa", "qk_nope_head_dim": 192, "qk_rope_head_dim": 64}
    glm_5 |= {"num_hidden_layers": 78, "rope_interleave": True, "indexer_rope_interleave": True}
    glm_5 |= {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}
    rope = pe.RoPE(head_dim=256, theta=1e6, layout="interleaved_to_half", rotary_start=192)
    assert pe.scheme_from_hf(glm_5) == rope
    refused = [
        (smollm_2 | {"rope_interleaved": True}, "rope_interleaved"),
        (glm_5 | {"rope_interleave": False}, "rope_interleave=False"),
        (gemma_2_9b | {"sliding_window_size": 2048}, "sliding_window_size=2048"),
        ({"model_type": "gemma2", "sliding_window_size": 2048}, "and sliding_window=4096"),
        (scout | {"attn_temperature_tuning": -1}, "true, false or an integer from 0"),
        (bloom_560m | {"offset_alibi": 7}, "offset_alibi"),
        (nomic_1_5 | {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction"),
        (nomic_1_5 | {"rotary_scaling_factor": 2}, "rotary_scaling_factor"),
        (nomic_1_5 | {"rope_theta": 500.0}, "rotary_emb_base=1000"),
        (hunyuan_7b | {"use_rotary_pos_emb": False}, "use_rotary_pos_emb"),
    ]
    for config, text in refused:
        with pytest.raises(ValueError, match=text):
            pe.from_hf(config)


def test_releases_under_other_names_and_with_other_forms():
    """Position keys of config.json of releases, beside the configs that mean the same."""
    yarn = {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "type": "yarn"}
    yarn |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    kimi_k2 = {"model_type": "kimi_k2", "rope_scaling": yarn, "rope_theta": 50000.0}
    kimi_k2 |= {"num_hidden_layers": 61, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    layers = pe.from_hf(kimi_k2)
    assert layers == pe.from_hf(kimi_k2 | {"model_type": "deepseek_v3"})
    assert layers[0].scheme.scaling.beta_fast == 1.0 and layers[0].scheme.head_dim == 192
    layered = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "head_dim": 128}
    exaone_4_5 = {"model_type": "exaone4_5_text", "sliding_window": 4096} | layered
    assert pe.from_hf(exaone_4_5) == pe.from_hf(exaone_4_5 | {"model_type": "exaone4"})

    mimo = {"model_type": "mimo_v2_flash", "num_hidden_layers": 48, "head_dim": 192}
    mimo |= {"sliding_window": 128, "sliding_window_size": 128}
    pattern = [0, *[1, 1, 1, 1, 0], *[1, 1, 1, 1, 1, 0] * 7]
    flat = {"rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334}
    released = mimo | flat | {"attention_chunk_size": 128, "hybrid_layer_pattern": pattern}
    assert pe.from_hf(released) == pe.from_hf(mimo)

    full = {"rope_theta": 500000.0, "rope_type": "yarn", "factor": 64.0, "beta_fast": 64.0}
    full |= {"original_max_position_embeddings": 4096, "partial_rotary_factor": 0.5}
    local = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    rope = {"full_attention": full, "sliding_attention": local}
    laguna = {"model_type": "laguna", "head_dim": 128, "sliding_window": 512} | layered
    twice = rope | {"original_max_position_embeddings": 4096}
    released = laguna | {"partial_rotary_factor": 0.5, "rope_parameters": twice}
    assert pe.from_hf(released) == pe.from_hf(laguna | {"rope_parameters": rope})

    yarn = {"beta_fast": 32, "beta_slow": 1, "factor": 16, "type": "yarn"}
    yarn |= {"original_max_position_embeddings": 65536}
    flash = {"model_type": "deepseek_v4", "head_dim": 512, "num_hidden_layers": 4}
    flash |= {"compress_ratios": [0, 0, 4, 128], "qk_rope_head_dim": 64, "sliding_window": 128}
    flash |= {"rope_theta": 10000, "compress_rope_theta": 160000}
    long = yarn | {"partial_rotary_factor": 0.125, "rope_type": "yarn"}
    written = {"rope_parameters": long | {"rope_theta": 10000}, "qk_nope_head_dim": 448}
    written |= {"compress_rope_parameters": long | {"rope_theta": 160000}}
    written |= {"partial_rotary_factor": 0.125, "rope_interleave": True}
    assert pe.from_hf(flash | written) == pe.from_hf(flash | {"rope_scaling": yarn})

    factors = [1.0 + i / 8 for i in range(16)]
    minicpm = {"type": "longrope", "long_factor": factors, "short_factor": factors}
    minicpm = {"rope_scaling": minicpm | {"original_max_position_embeddings": 32768}}
    minicpm |= {"model_type": "minicpm3", "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    minicpm |= {"max_position_embeddings": 32768, "num_hidden_layers": 2}
    assert pe.from_hf(minicpm)[0].scheme.scaling.long is False

    blenderbot = {"model_type": "blenderbot", "static_position_embeddings": False, "d_model": 64}
    assert isinstance(pe.from_hf(blenderbot, decoder=True)[0].scheme, pe.LearnedAbsolute)
    same = [  # Type, keys without effect, keys that are refused.
        ("llama4_text", {"nope_layer_interval": 4}, {"nope_layer_interval": 3}),
        ("modernbert", {"position_embedding_type": "sans_pos"}, {"position_embedding_type": "a"}),
        ("bamba", {"attn_rotary_emb": 64}, {"attn_rotary_emb": 32}),
        ("gemma3n_text", {"query_pre_attn_scalar": 256}, {}),
        ("mimo_v2_flash", {}, {"hybrid_layer_pattern": [1] * 48}),
        ("mimo_v2_flash", {}, {"swa_rope_theta": 5000}),
        ("bart", {}, {"static_position_embeddings": True}),
        # Without effect in one model type, not in these.
        ("cohere", {}, {"rope_interleaved": False}),
        ("gpt_neox", {}, {"rotary_emb_fraction": 1.0}),
        ("bert", {}, {"use_rotary_pos_emb": True}),
        ("llama", {}, {"position_embedding_type": "sans_pos"}),
        ("mimo_v2_flash", {}, {"hybrid_layer_pattern": "LLG"}),
        ("mimo_v2_flash", {}, {"swa_rope_theta": "x"}),
        ("qwen2", {}, {"dual_chunk_attention_config": {"chunk_size": 262144}}),
    ]
    for kind, ignored, refused in same:
        config = {"model_type": kind}
        decoder = True if kind == "bart" else None
        assert pe.from_hf(config | ignored, decoder=decoder) == pe.from_hf(config, decoder=decoder)
        if refused:
            with pytest.raises(ValueError, match=next(iter(refused))):
                pe.from_hf(config | refused, decoder=decoder)


def test_released_configs_with_keys_left_out():
    """Parts of config.json of four releases, and the layers that transformers runs."""
    command_r7b = {"model_type": "cohere2", "head_dim": 128, "rope_theta": 50000}
    command_r7b |= {"num_hidden_layers": 32, "sliding_window": 4096, "sliding_window_pattern": 4}
    rope = pe.RoPE(head_dim=128, theta=5e4, layout="interleaved")
    expected = pe.layer_pattern(32, *[pe.LayerSpec(rope, 4096)] * 3, pe.NoPE())
    assert pe.from_hf(command_r7b) == expected

    gemma_3_4b = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    gemma_3_4b |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    gemma = {"scale": 256**-0.5, "qk_norm": pe.QKNorm(scale_offset=1.0)}
    local = pe.LayerSpec(pe.RoPE(head_dim=256), 1024, **gemma)
    far = pe.LayerSpec(pe.RoPE(head_dim=256, theta=1e6, scaling=pe.PI(8.0)), **gemma)
    assert pe.from_hf(gemma_3_4b) == pe.layer_pattern(34, *[local] * 5, far)

    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    yarn |= {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0}
    olmo_3_7b = {"model_type": "olmo3", "rope_theta": 500000, "rope_scaling": yarn}
    olmo_3_7b |= {"num_hidden_layers": 32, "sliding_window": 4096, "hidden_size": 4096}
    local = pe.RoPE(head_dim=128, theta=5e5)
    far = local.replace(scaling=pe.YaRN(8.0, 8192, attention_factor=1.2079441541679836))
    norm = pe.QKNorm(over="projection", scale="per_head", epsilon=1e-5)
    local, far = pe.LayerSpec(local, 4096, qk_norm=norm), pe.LayerSpec(far, qk_norm=norm)
    assert pe.from_hf(olmo_3_7b) == pe.layer_pattern(32, *[local] * 3, far)

    exaone_4_1b = {"model_type": "exaone4", "rope_theta": 1000000, "sliding_window": None}
    exaone_4_1b |= {"num_hidden_layers": 30, "head_dim": 64, "sliding_window_pattern": None}
    scheme = pe.scheme_from_hf(exaone_4_1b)
    assert scheme == pe.RoPE(head_dim=64, theta=1e6)


def test_keys_of_released_configs_that_change_nothing():
    """config.json of Command R7B, ModernBERT, GPT-J, SmolLM3, Qwen 2.5 and dots.llm1."""
    off = {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}
    for kind, keys in [
        ("cohere2", {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0}),
        ("modernbert", {"position_embedding_type": "absolute"}),
        ("gptj", {"rotary": True}),
        ("smollm3", off),
        ("qwen2", off | {"use_mrope": False}),
        ("dots1", {"use_sliding_window": False}),
        ("llama", off),
    ]:
        config = {"model_type": kind, "head_dim": 64, "num_hidden_layers": 4}
        assert pe.from_hf(config | keys) == pe.from_hf(config)


def test_nemotron_3_nano():
    """config.json of NVIDIA-Nemotron-3-Nano-30B-A3B: its layers do one thing each."""
    config = {"model_type": "nemotron_h", "num_hidden_layers": 52, "rope_theta": 10000}
    config |= {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
    config |= {"partial_rotary_factor": 1.0, "sliding_window": None, "head_dim": 128}
    layers = pe.from_hf(config)
    assert [i for i, x in enumerate(layers) if x == pe.LayerSpec(pe.NoPE())] == [
        *(5, 12, 19, 26, 33, 42),
    ]
    letters = {"state_space": "M", "mlp": "E", "attention": "*"}
    assert "".join(letters[x.mixer] for x in layers) == config["hybrid_override_pattern"]
    for pattern, message in [
        ("MX", "'MX' and num_hidden_layers=52; a letter of M * - E stands for each layer"),
        ("M*", "'M*' and num_hidden_layers=52"),
        (None, "52 layers and no hybrid_override_pattern"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            pe.from_hf(config | {"hybrid_override_pattern": pattern})


def test_bases_that_transformers_5_does_not_read():
    """DBRX and Zamba2; transformers 4.51.3 reads both."""
    dbrx = {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 2}
    dbrx |= {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000}}
    assert pe.scheme_from_hf(dbrx) == pe.RoPE(head_dim=128, theta=5e5)
    for more in ({"rope_theta": 1e4}, {"rope_parameters": {"rope_theta": 1e4}}):
        with pytest.raises(ValueError, match=r"500000.* and .*10000"):
            pe.from_hf(dbrx | more)
    zamba2 = {"model_type": "zamba2", "use_mem_rope": True, "use_long_context": True}
    with pytest.raises(ValueError, match="use_long_context, for which transformers 4 changes"):
        pe.from_hf(zamba2)
    zamba2["use_long_context"] = False
    layers = pe.from_hf(zamba2)
    assert [i for i, x in enumerate(layers) if x.mixer == "attention"] == [
        *(6, 12, 18, 24, 30, 36, 42, 47, 51),
    ]
    assert layers[6] == pe.LayerSpec(pe.RoPE(head_dim=160), scale=80**-0.5)


def test_scaling_of_llama_4_scout_has_no_blend():
    rope = {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    config = {"model_type": "llama4_text", "head_dim": 128, "rope_scaling": rope}
    scheme = pe.from_hf(config)[0].scheme
    plain = 5e5 ** -(np.arange(64) / 64)
    expected = np.where(2 * np.pi / plain > 8192, plain / 16, plain)
    np.testing.assert_allclose(scheme.scaling(plain, 128, 5e5)[0], expected, rtol=1e-12)


def test_layers_that_differ():
    sizes = {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 5}
    rope = pe.RoPE(head_dim=16)

    def of(kind, **settings):
        return pe.from_hf({"model_type": kind} | sizes | settings)

    local = pe.LayerSpec(rope.replace(layout="interleaved"), 5)
    assert of("cohere2", sliding_window_pattern=3) == pe.layer_pattern(6, local, local, pe.NoPE())
    smollm = pe.layer_pattern(6, *[rope.replace(theta=2e6)] * 3, pe.NoPE())
    assert of("smollm3") == smollm
    gemma = of(
        "gemma3_text",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window_pattern=6,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    common = {"scale": 256**-0.5, "qk_norm": pe.QKNorm(scale_offset=1.0)}
    far = pe.LayerSpec(rope.replace(theta=1e6, scaling=pe.PI(8.0)), **common)
    assert gemma == pe.layer_pattern(6, *[pe.LayerSpec(rope, 5, **common)] * 5, far)
    heat = pe.QueryTemperature("llama4", 8192, 0.1)
    rotated = pe.LayerSpec(
        rope.replace(theta=5e5, layout="interleaved"),
        chunk_size=8192,
        qk_norm=pe.QKNorm(scale="none", after_rotation=True, epsilon=1e-5),
    )
    flags = {"no_rope_layers": [1, 1, 0, 1, 1, 0], "sliding_window": None}
    assert of("llama4_text", **flags) == pe.layer_pattern(6, rotated, rotated, heat)
    bare = of("llama4_text", attn_temperature_tuning=False, **flags)
    assert bare == pe.layer_pattern(6, rotated, rotated, pe.NoPE())
    flags["no_rope_layers"] = [1] * 6
    assert of("llama4_text", **flags) == (rotated,) * 6


def test_global_heads_of_gemma_4_are_wider():
    layers = pe.from_hf(
        {
            "model_type": "gemma4_text",
            "head_dim": 16,
            "global_head_dim": 32,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 5,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "partial_rotary_factor": 0.25,
                },
            },
        }
    )
    far = pe.RoPE(head_dim=32, theta=1e6, scaling=pe.Proportional(0.25))
    common = {"scale": 1.0, "qk_norm": pe.QKNorm()}
    near = pe.LayerSpec(pe.RoPE(head_dim=16), 5, **common)
    assert layers == (near, pe.LayerSpec(far, **common))


def test_layers_of_linear_attention_have_no_positions():
    layers = pe.from_hf({"model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 16})
    rope = pe.LayerSpec(pe.RoPE(head_dim=16, rotary_dim=4), qk_norm=pe.QKNorm(scale_offset=1.0))
    linear = pe.LayerSpec(pe.NoPE(), mixer="linear_attention")
    assert layers == pe.layer_pattern(4, *[linear] * 3, rope)
    config = {"model_type": "lfm2", "num_hidden_layers": 2, "hidden_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "full_attn_idxs": [1]}
    assert [layer.mixer for layer in pe.from_hf(config)] == ["convolution", "attention"]
    with pytest.raises(ValueError, match="layers 0: convolution; layers 1: RoPE"):
        pe.scheme_from_hf(config)
    with pytest.raises(ValueError, match="no layer has attention, use from_hf: layers 0-1: conv"):
        pe.scheme_from_hf(config | {"full_attn_idxs": []})
    options = pe.attention_options_from_hf(config)
    with pytest.raises(ValueError, match="a layer of attention, got mixer='convolution'"):
        nnx.eval_shape(lambda: Attention(**options[0], rngs=nnx.Rngs(0)))
    attention = nnx.eval_shape(lambda: Attention(**options[1], rngs=nnx.Rngs(0)))
    assert attention.query_norm is not None


@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5"])
def test_encoder_and_decoder_of_t5_have_different_schemes(kind):
    config = {"model_type": kind, "num_heads": 4, "num_layers": 3, "num_decoder_layers": 2}
    encoder, decoder = pe.T5(num_heads=4, bidirectional=True), pe.T5(num_heads=4)
    assert pe.from_hf(config, decoder=False) == (pe.LayerSpec(encoder),) * 3
    assert pe.from_hf(config, decoder=True) == (pe.LayerSpec(decoder),) * 2
    with pytest.raises(ValueError, match="give decoder=False or decoder=True"):
        pe.from_hf(config)
    alone = config | {"is_encoder_decoder": False}
    assert pe.scheme_from_hf(alone) == encoder
    assert pe.scheme_from_hf(alone | {"is_decoder": True}) == decoder
    with pytest.raises(ValueError, match=r"decoder=False, but .* has is_decoder=True"):
        pe.from_hf(config | {"is_decoder": True}, decoder=False)


def test_encoder_and_decoder_of_whisper_have_different_schemes():
    config = {"model_type": "whisper", "d_model": 8, "max_target_positions": 9}
    assert pe.scheme_from_hf(config, decoder=False) == pe.Sinusoidal(model_dim=8, layout="t2t")
    expected = pe.LearnedAbsolute(max_length=9, model_dim=8)
    assert pe.scheme_from_hf(config, decoder=True) == expected
    with pytest.raises(ValueError, match="give decoder=False or decoder=True"):
        pe.from_hf(config)


def test_a_choice_of_decoder_needs_two_halves():
    with pytest.raises(ValueError, match="the llama config does not describe an encoder"):
        pe.from_hf(LLAMA, decoder=True)


class Config:
    def __init__(self, **values):
        self.values = values

    def to_dict(self):
        return {n: x.to_dict() if isinstance(x, Config) else x for n, x in self.values.items()}


def test_config_objects_are_read():
    assert pe.from_hf(Config(**LLAMA)) == pe.from_hf(LLAMA)
    gemma = Config(model_type="gemma2", query_pre_attn_scalar=64)
    assert pe.from_hf(gemma)[0].scale == 0.125
    with pytest.raises(TypeError, match="from_hf: config must be a dict or have to_dict, got 'a"):
        pe.from_hf("a/path/config.json")  # ty: ignore[invalid-argument-type]


def test_the_text_part_of_a_multimodal_config_is_read():
    expected = pe.from_hf(LLAMA)
    assert pe.from_hf({"model_type": "llava", "text_config": LLAMA}) == expected
    assert pe.from_hf({"model_type": "llava", "text_config": Config(**LLAMA)}) == expected
    text = {"num_hidden_layers": 2, "sliding_window": 7}
    gemma = pe.from_hf({"model_type": "gemma3_text"} | text)
    assert pe.from_hf({"model_type": "gemma3", "text_config": text}) == gemma
    assert gemma[0].scale == 256**-0.5


def test_text_keys_at_the_top_of_a_multimodal_config_are_read():
    text = {"hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [16, 24, 24]}
    expected = pe.MRoPE(head_dim=128, theta=1e6, sections=(16, 24, 24))
    for kind in ("qwen2_5_vl", "qwen2_5_vl_text"):
        assert pe.scheme_from_hf({"model_type": kind, "vision_config": {}} | text) == expected


def test_a_key_beside_the_text_part_is_named():
    config = {"model_type": "llava", "text_config": LLAMA, "rope_theta": 1e6}
    with pytest.raises(ValueError, match=r"beside its text_config has \['rope_theta'\]"):
        pe.from_hf(config)
    with pytest.raises(ValueError, match="text_config of the llava config must have 'model_type'"):
        pe.from_hf({"model_type": "llava", "text_config": {"hidden_size": 64}})


@pytest.mark.parametrize("read", [pe.from_hf, pe.scheme_from_hf])
def test_an_unknown_model_type_gives_a_short_error_with_similar_ones(read):
    with pytest.raises(ValueError, match="model_type 'lama'; did you mean 'llama'") as error:
        read({"model_type": "lama"})
    assert len(str(error.value)) < 150
    with pytest.raises(ValueError, match=r"model_type 'zzz'; all are in"):
        read({"model_type": "zzz"})


def test_one_scheme_stands_only_for_layers_that_are_alike():
    assert pe.scheme_from_hf(LLAMA) == pe.RoPE(head_dim=16)
    config = {"model_type": "gemma2", "num_hidden_layers": 6, "head_dim": 16}
    message = r"layers differ, .* 0, 2, 4: RoPE.* in a window of 4096; layers 1, 3, 5: RoPE"
    with pytest.raises(ValueError, match=message):
        pe.scheme_from_hf(config)
    config = LLAMA | {"model_type": "mistral", "sliding_window": 9}
    with pytest.raises(ValueError, match=r"a scheme holds no window, .* 0-1: .* window of 9"):
        pe.scheme_from_hf(config)
    assert pe.scheme_from_hf(config | {"sliding_window": None}) == pe.RoPE(head_dim=16)


def test_a_single_layer_may_have_another_head_dim():
    config = LLAMA | {"per_layer_config": {"1": {"head_dim": 32, "num_key_value_heads": 1}}}
    assert pe.from_hf(config) == (
        pe.LayerSpec(pe.RoPE(head_dim=16)),
        pe.LayerSpec(pe.RoPE(head_dim=32)),
    )
    config["per_layer_config"]["1"]["sliding_window"] = 9
    with pytest.raises(ValueError, match=r"per_layer_config of layer 1 has \['sliding_window'\]"):
        pe.from_hf(config)
    table = {"model_type": "gpt2", "per_layer_config": {"1": {"n_positions": 8}}}
    with pytest.raises(ValueError, match=r"has \['per_layer_config'\], which nothing here reads"):
        pe.from_hf(table)


def test_rope_parameters_of_another_kind_of_layer_are_refused():
    local, other = {"rope_theta": 1e4}, {"rope_theta": 1e5}
    rope = {"sliding_attention": local, "full_attention": local, "block_attention": other}
    with pytest.raises(ValueError, match=r"rope parameters for \['block_attention'\]"):
        pe.from_hf({"model_type": "gemma3_text", "rope_parameters": rope})


def test_widths_of_learned_tables():
    config = {"hidden_size": 64, "embedding_size": 16, "num_hidden_layers": 2}
    for kind in ("albert", "electra"):
        expected = pe.LearnedAbsolute(max_length=512, model_dim=16)
        assert pe.scheme_from_hf({"model_type": kind} | config) == expected
    expected = pe.LearnedAbsolute(max_length=512, model_dim=64)
    assert pe.scheme_from_hf({"model_type": "distilbert", "dim": 64}) == expected
    # transformers reads this key where it fills the table of a new model.
    filled = {"model_type": "distilbert", "dim": 64, "sinusoidal_pos_embds": True}
    assert pe.scheme_from_hf(filled) == expected
    for kind in ("roberta", "camembert", "xlm-roberta"):
        expected = pe.LearnedAbsolute(max_length=512, model_dim=64, offset=2)
        config = {"model_type": kind, "hidden_size": 64, "max_position_embeddings": 514}
        assert pe.scheme_from_hf(config) == expected


def test_tables_at_the_input_beside_other_schemes():
    config = {"model_type": "deberta-v2", "relative_attention": True, "pos_att_type": "c2p"}
    config |= {"hidden_size": 24, "num_attention_heads": 3, "max_position_embeddings": 16}
    relative = pe.scheme_from_hf(config | {"position_biased_input": False})
    assert isinstance(relative, pe.DeBERTa)
    table = pe.LearnedAbsolute(max_length=16, model_dim=24)
    assert pe.scheme_from_hf(config) == pe.chain(table, relative)
    for kind in ("swin", "swinv2"):
        with pytest.raises(ValueError, match="has use_absolute_embeddings, a table at the input"):
            pe.from_hf({"model_type": kind, "use_absolute_embeddings": True})


def test_contradicting_windows_are_refused():
    mistral = LLAMA | {"model_type": "mistral"}
    with pytest.raises(ValueError, match="use_sliding_window=False, which transformers ignores"):
        pe.from_hf(mistral | {"sliding_window": 9, "use_sliding_window": False})
    with pytest.raises(ValueError, match=r"layer_types=.*, which transformers ignores"):
        pe.from_hf(mistral | {"layer_types": ["full_attention"] * 2})
    gemma = {"model_type": "gemma2", "layer_types": ["block_attention"] * 2}
    with pytest.raises(ValueError, match="has layers of type 'block_attention'"):
        pe.from_hf(gemma)
    with pytest.raises(ValueError, match="has 2 layer_types and num_hidden_layers=3"):
        pe.from_hf(gemma | {"num_hidden_layers": 3})
    with pytest.raises(ValueError, match="sliding_window_pattern='LLLG'; without layer_types it"):
        pe.from_hf({"model_type": "exaone4", "sliding_window_pattern": "LLLG"})


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


def test_files_that_may_hold_a_halved_window_are_refused():
    config = {"sliding_window": 257, "num_hidden_layers": 1, "use_bidirectional_attention": True}
    for file in (
        {"model_type": "gemma3_text", "transformers_version": "4.57.3"} | config,
        {"model_type": "gemma3", "transformers_version": "5.2.0", "text_config": config},
    ):
        with pytest.raises(ValueError, match="which wrote the window of one side over that of bo"):
            pe.from_hf(file)
    released = {"model_type": "gemma3_text", "transformers_version": "4.57.0.dev0"} | config
    assert pe.from_hf(released | {"sliding_window": 512})[0].window == 257


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


def test_keys_that_are_null():
    """By the modeling files: false, or the default of the class."""
    for kind in ("mistral", "gpt_oss", "recurrent_gemma"):
        window = "attention_window_size" if kind == "recurrent_gemma" else "sliding_window"
        config = {"model_type": kind, "num_hidden_layers": 1, window: 3, "is_causal": None}
        config |= {"block_types": ["attention"]} if kind == "recurrent_gemma" else {}
        assert not pe.attention_options_from_hf(config)[0]["is_causal"]
        assert pe.from_hf(config)[0].window == (3, 3)
    config = {"model_type": "llama4_text", "num_hidden_layers": 4, "attn_temperature_tuning": None}
    assert pe.from_hf(config)[3].scheme == pe.NoPE()
    config = {"model_type": "mistral4", "num_hidden_layers": 1, "rope_interleave": None}
    assert pe.from_hf(config)[0].scheme.schemes[0].layout == "half"
    config = {"model_type": "deepseek_v4", "num_hidden_layers": 1, "partial_rotary_factor": None}
    assert pe.from_hf(config)[0].scheme.num_rotated == 64


BY_KIND = {
    kind: {"rope_type": "linear", "rope_theta": 1e3, "factor": 2.0}
    for kind in ("full_attention", "sliding_attention")
}
NESTED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False, **LENGTH}


@pytest.mark.parametrize(
    "message, config",
    [
        ("has use_bidirectional_attention=True, which some", {"model_type": "gemma2"}
         | {"use_bidirectional_attention": True}),
        ("'sliding_attention' without use_sliding_window, which some", {"model_type": "smollm3"}
         | {"layer_types": ["sliding_attention"], "sliding_window": 5}),
        ("rope_theta=10.0, which transformers 5 gives full", {"model_type": "olmo3"}
         | {"rope_theta": 10.0}),
        ("rope_scaling with 'type', which transformers 5 ignores", {"model_type": "gemma3_text"}
         | {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("truncate=false in rope parameters by the kind", {"model_type": "olmo3"}
         | {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), NESTED)}),
        ("truncate=false, which transformers ignores", {"model_type": "deepseek_v4"}
         | {"rope_scaling": NESTED | {"rope_theta": 160000.0}}),
        ("rope_theta=1000.0 in its rope parameters, for which", {"model_type": "deepseek_v4"}
         | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}}),
        *(("DynamicNTK, whose frequencies depend on the length of each row", {"model_type": kind}
           | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
          for kind in ("llama4_text", "deepseek_v3", "deepseek_v4", "qwen2_vl_text")),
        ("rope_type='proportional', which is not supported", {"model_type": "deepseek_v4"}
         | {"rope_scaling": {"rope_type": "proportional"}}),
        ("rope_scaling for kinds of layers; the key is", {"model_type": "olmo3"}
         | {"rope_scaling": BY_KIND}),
        ("rope_theta=10.0, which transformers 5 gives full", {"model_type": "olmo3"}
         | {"rope_theta": 10.0, "rope_parameters": {"full_attention": {"rope_theta": 20.0}}
            | {"sliding_attention": None}}),
        ("embeddings=16 beside rope parameters by the kind", {"model_type": "gemma3_text"}
         | {"original_max_position_embeddings": 16, "rope_parameters": BY_KIND}),
        *(("has one dict, not rope parameters for kinds", {"model_type": kind}
           | {name: {"rope_type": "linear", "factor": 8.0}})
          for kind in ("gemma4_text", "beam", "lfm3") for name in ("rope_scaling",
                                                                  "rope_parameters")),
        *(("partial_rotary_factor=0.3.*which transformers ignores", {"model_type": kind}
           | {"partial_rotary_factor": 0.3, "attn_layer_indices": [0]})
          for kind in ("gpt_neox", "bamba")),
        ("is_causal=false, which transformers ignores in layers", {"model_type": "llama4_text"}
         | {"is_causal": False}),
        *(("is_causal=false, for which its ALiBi is not symmetric", {"model_type": kind}
           | {"is_causal": None, "alibi": kind == "falcon" or None})
          for kind in ("bloom", "mpt", "falcon")),
        (r"has \['rotary_pct'\], which nothing here reads", {"model_type": "mistral"}
         | {"rotary_pct": 0.25}),
    ],
)  # fmt: skip
def test_what_versions_or_attention_functions_read_differently_is_refused(message, config):
    with pytest.raises(ValueError, match=message):
        pe.from_hf(config | {"num_hidden_layers": 1})


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
    with pytest.raises(ValueError, match=r"llama config has attention_multiplier=0\.5, which"):
        of(model_type="llama", attention_multiplier=0.5)
    assert of(model_type="gpt2") is None
    assert of(model_type="gpt2", scale_attn_weights=False) == 1.0
    layers = pe.from_hf({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True})
    assert [layer.scale for layer in layers] == [0.125 / (i + 1) for i in range(12)]


SCHEMES = {
    "plain": pe.RoPE(head_dim=16, theta=5e5),
    "partial": pe.RoPE(head_dim=16, rotary_dim=4),
    "linear": pe.RoPE(head_dim=16, scaling=pe.PI(4.0)),
    "llama3": pe.RoPE(head_dim=16, scaling=pe.Llama3(8.0, 2048, 1.0, 3.0)),
    "yarn": pe.RoPE(head_dim=16, scaling=pe.YaRN(4.0, 2048, beta_fast=16.0, truncate=False)),
    "yarn with a factor": pe.RoPE(head_dim=16, scaling=pe.YaRN(4.0, 2048, attention_factor=1.1)),
    "yarn of DeepSeek": pe.RoPE(
        head_dim=16, scaling=pe.YaRN(4.0, 2048, mscale=0.7, mscale_all_dim=1.0)
    ),
    "proportional": pe.RoPE(head_dim=16, scaling=pe.Proportional(0.5)),
    "proportional and linear": pe.RoPE(head_dim=16, scaling=(pe.Proportional(0.5), pe.PI(8.0))),
    "dynamic": pe.RoPEByLength(head_dim=16, scaling=pe.DynamicNTK(2.0, 8192, None)),
    "longrope": pe.RoPEByLength(
        head_dim=16, scaling=pe.LongRoPE((1.0,) * 8, (2.0,) * 8, 4.0, 2048, long=None)
    ),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_from_hf_inverts_to_hf(name):
    scheme = SCHEMES[name]
    kind = {"model_type": "stablelm"} if name == "partial" else {}  # Llama rotates whole heads.
    more = {"rope_parameters": pe.to_hf(scheme), "max_position_embeddings": 8192}
    assert llama(**kind, **more) == scheme


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
    assert written == {kinds[0]: {"rope_type": "default", "rope_theta": 10.0}, kinds[1]: None}
    assert pe.from_hf(config | {"rope_parameters": written}) == layers


REFUSED = {
    r"in its rope parameters has \['betafast'\]": dict(
        rope_parameters={"rope_type": "yarn", "factor": 2.0, "betafast": 3.0, **LENGTH}
    ),
    r"has \['rope_style'\], which nothing here reads": dict(rope_style="new"),
    "rope_type='swirl'; supported: ": dict(rope_scaling={"type": "swirl"}),
    "rope_type='linear' and type='yarn'": dict(
        rope_scaling={"rope_type": "linear", "type": "yarn", "factor": 2.0}
    ),
    "must have 'factor'": dict(rope_scaling={"type": "linear"}),
    "must have 'low_freq_factor'": dict(
        rope_scaling={"type": "llama3", "factor": 2.0, "original_max_position_embeddings": 9}
    ),
    "PI: factor must be at least 1": dict(rope_scaling={"type": "linear", "factor": 0.5}),
    "rope_theta as 10.0 and as 20.0": dict(rope_theta=20.0, rope_parameters={"rope_theta": 10.0}),
    "has rope_parameters=.* and rope_scaling=": dict(
        rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 10.0}
    ),
    "original_max_position_embeddings 2048 and 4096": dict(
        original_max_position_embeddings=4096,
        rope_parameters={"rope_type": "longrope", "factor": 2.0} | LISTS | LENGTH,
    ),
    "3 heads do not divide 64": dict(num_attention_heads=3),
    "must have 'hidden_size'": dict(hidden_size=None),
    "a factor on attention of 1.1 for short texts, 1.2 for long": dict(
        rope_parameters={"rope_type": "longrope", "short_mscale": 1.1, "long_mscale": 1.2}
        | LISTS | LENGTH | {"factor": 2.0}
    ),
    "max_position_embeddings=8192 is the trained length": dict(
        max_position_embeddings=8192,
        rope_scaling={"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4096},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_contradictions_are_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        llama(**REFUSED[message])


def test_settings_without_a_scheme_are_refused():
    with pytest.raises(ValueError, match="alibi_bias_max=16; supported: "):
        pe.from_hf({"model_type": "mpt", "n_heads": 4, "attn_config": {"alibi_bias_max": 16}})
    with pytest.raises(ValueError, match="position_embedding_type='relative_key'"):
        sizes = {"hidden_size": 8, "max_position_embeddings": 8}
        kind = {"position_embedding_type": "relative_key"}
        pe.from_hf({"model_type": "bert"} | sizes | kind)
    with pytest.raises(ValueError, match="mrope_interleaved=True; its type is contiguous"):
        rope = {"mrope_section": [2, 3, 3], "mrope_interleaved": True}
        pe.from_hf({"model_type": "qwen2_vl_text", "head_dim": 16, "rope_scaling": rope})


def test_schemes_without_rope_parameters_are_refused():
    for scheme, message in [
        (pe.ALiBi(num_heads=4), "only RoPE and MRoPE have rope parameters"),
        (pe.RoPE(head_dim=8, scaling=pe.NTK(2.0)), "no rope_type for .*NTK"),
        (
            pe.RoPE(head_dim=8, scaling=(pe.PI(2.0), pe.HighFrequenciesOnly(64))),
            "no rope_type for .*PI",
        ),
        (
            pe.RoPE(head_dim=8, scaling=pe.YaRN(2.0, 64, ramp="rotations")),
            "no rope_type for .*YaRN",
        ),
        (pe.RoPE(head_dim=8, scaling=pe.YaRN(2.0, 64, mscale=0.5)), "no rope_type for .*YaRN"),
        (pe.RoPE(head_dim=8, scaling=pe.DynamicNTK(2.0, 64, 128)), "no rope_type for .*Dynamic"),
        ((pe.NoPE(), pe.ALiBi(num_heads=4)), "schemes that differ need layer_types"),
    ]:
        with pytest.raises(ValueError, match=message):
            pe.to_hf(scheme)
    two = (pe.RoPE(head_dim=8), pe.RoPE(head_dim=8, theta=2.0))
    with pytest.raises(ValueError, match="layers of type 'full_attention' differ"):
        pe.to_hf(two, ["full_attention"] * 2)
    with pytest.raises(ValueError, match="3 layer_types need as many schemes"):
        pe.to_hf(two, ["full_attention"] * 3)
