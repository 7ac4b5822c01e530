"""What configs say, what they must not leave out, and back."""

import pytest

import posenc_jax as pe

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
LENGTH = {"original_max_position_embeddings": 2048}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def llama(**settings):
    return pe.from_hf(LLAMA | settings)


def scaling(**parameters):
    return llama(rope_parameters=parameters, max_position_embeddings=8192).scaling


def test_names_of_version_4_and_5_are_read_alike():
    new = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
    new |= {"original_max_position_embeddings": 2048}
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    wanted = pe.RoPE(head_dim=16, theta=5e5, scaling=pe.YaRN(4.0, 2048))
    assert llama(rope_parameters=new) == wanted
    assert llama(rope_theta=5e5, rope_scaling=old) == wanted
    assert llama(rope_theta=5e5, rope_scaling=old | {"rope_type": "yarn"}) == wanted
    assert llama(rope_theta=5e5, rope_scaling=None) == pe.RoPE(head_dim=16, theta=5e5)


def test_the_model_type_decides_what_the_config_leaves_out():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}

    def of(kind, **settings):
        return pe.from_hf({"model_type": kind} | sizes | settings)

    assert of("cohere") == pe.RoPE(head_dim=16, theta=5e5, layout="interleaved")
    assert of("glm") == pe.RoPE(head_dim=16, layout="interleaved", rotary_dim=8)
    assert of("gpt_neox", rotary_pct=0.5, rotary_emb_base=1e3) == pe.RoPE(
        head_dim=16, theta=1e3, rotary_dim=8
    )
    assert of("gptj", rotary_dim=4).layout == "interleaved"
    assert of("bloom") == pe.ALiBi(num_heads=4)
    assert of("falcon", alibi=True) == pe.ALiBi(num_heads=4, scaled=True)
    assert of("t5") == pe.T5(num_heads=4, bidirectional=True)
    assert of("t5", is_decoder=True) == pe.T5(num_heads=4)
    assert of("umt5") == (pe.LayerSpec(pe.T5(num_heads=4, bidirectional=True)),) * 4
    assert of("mixtral").theta == 1e6
    assert pe.from_hf({"model_type": "llama", "head_dim": 32}).head_dim == 32


def test_layers_that_differ():
    sizes = {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 5}
    rope = pe.RoPE(head_dim=16)

    def of(kind, **settings):
        return pe.from_hf({"model_type": kind} | sizes | settings)

    local = pe.LayerSpec(rope.replace(layout="interleaved"), 5)
    assert of("cohere2", sliding_window_pattern=3) == pe.layer_pattern(6, local, local, pe.NoPE())
    assert of("smollm3") == pe.layer_pattern(6, *[rope.replace(theta=2e6)] * 3, pe.NoPE())
    gemma = of(
        "gemma3_text",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window_pattern=6,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    far = rope.replace(theta=1e6, scaling=pe.PI(8.0))
    assert gemma == pe.layer_pattern(6, *[pe.LayerSpec(rope, 5)] * 5, far)
    heat = pe.QueryTemperature("llama4", 8192, 0.1)
    turned = rope.replace(theta=5e5, layout="interleaved")
    flags = {"no_rope_layers": [1, 1, 0, 1, 1, 0]}
    assert of("llama4_text", **flags) == pe.layer_pattern(6, turned, turned, heat)
    bare = of("llama4_text", attn_temperature_tuning=False, **flags)
    assert bare == pe.layer_pattern(6, turned, turned, pe.NoPE())
    assert of("llama4_text", no_rope_layers=[1] * 6) == turned


def test_gemma_4_has_wider_global_heads():
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
    assert layers == (pe.LayerSpec(pe.RoPE(head_dim=16), 5), pe.LayerSpec(far))


def test_logit_scales_of_models():
    def of(**settings):
        return pe.hf_logit_scale(settings)

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
    with pytest.raises(ValueError, match="unknown model_type 'nobody'"):
        of(model_type="nobody")


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
def test_there_and_back(name):
    scheme = SCHEMES[name]
    assert llama(rope_parameters=pe.to_hf(scheme), max_position_embeddings=8192) == scheme


@pytest.mark.parametrize(
    "kind, order, layout",
    [
        ("qwen2_vl_text", "contiguous", "half"),
        ("qwen3_vl_text", "interleaved", "half"),
        ("ernie4_5_vl_moe_text", "alternating", "interleaved"),
    ],
)
def test_there_and_back_with_several_axes(kind, order, layout):
    scheme = pe.MRoPE(head_dim=16, sections=(4, 2, 2), order=order, layout=layout)
    config = {"model_type": kind, "head_dim": 16, "rope_parameters": pe.to_hf(scheme)}
    assert pe.from_hf(config) == scheme


def test_there_and_back_for_layers_that_differ():
    kinds = ["sliding_attention", "full_attention"]
    config = {"model_type": "beam", "head_dim": 16, "layer_types": kinds, "sliding_window": 4}
    layers = pe.from_hf(
        config | {"rope_parameters": {"sliding_attention": {"rope_theta": 10.0}, kinds[1]: None}}
    )
    assert [layer.window for layer in layers] == [4, None]
    assert isinstance(layers[1].scheme, pe.QueryTemperature)
    bare = pe.layer_pattern(2, pe.RoPE(head_dim=16, theta=10.0), pe.NoPE())
    made = pe.to_hf(bare, kinds)
    assert made == {kinds[0]: {"rope_type": "default", "rope_theta": 10.0}, kinds[1]: None}
    assert pe.from_hf(config | {"rope_parameters": made}) == layers


REFUSED = {
    "model_type must be one of .*, got 'nobody'": dict(model_type="nobody"),
    r"in its rope parameters has \['betafast'\]": dict(
        rope_parameters={"rope_type": "yarn", "factor": 2.0, "betafast": 3.0, **LENGTH}
    ),
    r"has \['rope_style'\], which nothing here reads": dict(rope_style="new"),
    "rope_type='swirl'; known are": dict(rope_scaling={"type": "swirl"}),
    "rope_type='linear' and type='yarn'": dict(
        rope_scaling={"rope_type": "linear", "type": "yarn", "factor": 2.0}
    ),
    "must have 'factor'": dict(rope_scaling={"type": "linear"}),
    "must have 'original_max_position_embeddings'": dict(
        rope_scaling={"type": "yarn", "factor": 2.0}
    ),
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
    "max_position_embeddings=8192 is what counts": dict(
        max_position_embeddings=8192,
        rope_scaling={"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4096},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        llama(**REFUSED[message])


def test_what_a_family_cannot_be_is_refused():
    with pytest.raises(ValueError, match="alibi_bias_max=16; what is known is"):
        pe.from_hf({"model_type": "mpt", "n_heads": 4, "attn_config": {"alibi_bias_max": 16}})
    with pytest.raises(ValueError, match="position_embedding_type='relative_key'"):
        sizes = {"hidden_size": 8, "max_position_embeddings": 8}
        kind = {"position_embedding_type": "relative_key"}
        pe.from_hf({"model_type": "bert"} | sizes | kind)
    with pytest.raises(ValueError, match="mrope_interleaved=True; its type is contiguous"):
        given = {"mrope_section": [2, 3, 3], "mrope_interleaved": True}
        pe.from_hf({"model_type": "qwen2_vl_text", "head_dim": 16, "rope_scaling": given})


def test_what_has_no_words_in_transformers_is_refused():
    for scheme, message in [
        (pe.ALiBi(num_heads=4), "only RoPE and MRoPE have rope parameters"),
        (pe.RoPE(head_dim=8, scaling=pe.NTK(2.0)), "no word for .*NTK"),
        (pe.RoPE(head_dim=8, scaling=(pe.PI(2.0), pe.PI(2.0))), "no word for .*PI"),
        (pe.RoPE(head_dim=8, scaling=pe.YaRN(2.0, 64, ramp="rotations")), "no word for .*YaRN"),
        (pe.RoPE(head_dim=8, scaling=pe.YaRN(2.0, 64, mscale=0.5)), "no word for .*YaRN"),
        (pe.RoPE(head_dim=8, scaling=pe.DynamicNTK(2.0, 64, 128)), "no word for .*Dynamic"),
        ((pe.NoPE(),), "several schemes need layer_types"),
    ]:
        with pytest.raises(ValueError, match=message):
            pe.to_hf(scheme)
    two = (pe.RoPE(head_dim=8), pe.RoPE(head_dim=8, theta=2.0))
    with pytest.raises(ValueError, match="layers of type 'full_attention' differ"):
        pe.to_hf(two, ["full_attention"] * 2)
    with pytest.raises(ValueError, match="3 layer_types need as many schemes"):
        pe.to_hf(two, ["full_attention"] * 3)
