"""Checkpoints that are read: files by the rules of llama.cpp's converter, and safetensors."""

import dataclasses
import json
import sys

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from examples import families
from examples.checkpoints import read
from tests.models import agreement, gguf_files

TYPES = gguf.GGMLQuantizationType


@pytest.mark.parametrize("name", "llama3 llama_yarn mistral qwen2 qwen3 phi3 gemma2 gemma3".split())
def test_gguf_files_have_config_and_weights_of_transformers(name, tmp_path):
    about, _, state = agreement.read(name)
    config = about["config"]
    if name == "gemma2":  # Not in the file, which is of no released size.
        config["query_pre_attn_scalar"] = config["head_dim"]
    if name == "gemma3":
        config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
        config["query_pre_attn_scalar"] = config["head_dim"]
    checkpoint = read(written(tmp_path, config, state))
    atol = 2e-7 if name.startswith("gemma") else 0.0  # Norms with 1 added and subtracted.
    for weight, x in state.items():
        np.testing.assert_allclose(checkpoint.state[weight], x, atol=atol, rtol=0)
    assert set(checkpoint.state) == set(state)
    expected, settings = (families.model_config(c) for c in (config, checkpoint.config))
    if name == "llama3":  # Of a trained length that no release has, and so known by its factors.
        rotations = [s.layers[0].scheme.scaling for s in (expected, settings)]
        frequencies = 1e4 ** -(np.arange(4) / 4)
        rotations = [np.asarray(scaling(frequencies, 8, 1e4)[0]) for scaling in rotations]
        np.testing.assert_allclose(*rotations, rtol=1e-6)
        settings = dataclasses.replace(settings, layers=expected.layers)
    assert settings == expected


def small(**changes):
    """The config and state of a small Llama."""
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 265,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    block = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32)}
    block |= {"self_attn.v_proj": (16, 32), "self_attn.o_proj": (32, 32)}
    block |= {"mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64)}
    block |= {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in block.items()}
    shapes |= {"model.embed_tokens.weight": (265, 32), "model.norm.weight": (32,)}
    return config | changes, agreement.random_state(shapes)


def written(folder, *model, **options):
    """The path of a GGUF file, of a small Llama unless a config and a state are given."""
    gguf_files.write(folder / "file", *(model or small()), **options)
    return folder / "file"


def refused(path, message):
    """Reads a file or folder, which must end with an error of one line."""
    with pytest.raises(ValueError, match=message) as error:
        dict(read(path).state)
    assert str(error.value).startswith("read: '") and "\n" not in str(error.value)


def test_llama_3_has_the_settings_of_its_releases(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    file = written(tmp_path, *small(max_position_embeddings=131072, rope_parameters=rope))
    assert read(file).config["rope_scaling"] == rope | {"partial_rotary_factor": 1.0}


def test_long_rope_has_both_lists(tmp_path):
    config, state = small()
    short, long = [1.0, 1.1, 1.2, 1.5, 2, 3, 4, 5], [*range(1, 9)]
    for name, factors in (("short", short), ("long", long)):
        state[f"rope_factors_{name}.weight"] = np.array(factors, np.float32)
    options = {"original_context_length": 16, "attn_factor": 1.25}
    options = {f"llama.rope.scaling.{name}": value for name, value in options.items()}
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    scaling |= {"attention_factor": 1.25, "original_max_position_embeddings": 16}
    assert read(written(tmp_path, config, state, **options)).config["rope_scaling"] == scaling


def test_gemma_3_of_27b_has_its_own_scale(tmp_path):
    about, _, state = agreement.read("gemma3")
    layer = {n: x for n, x in state.items() if ".layers.0." in n}
    for i in range(62):
        state |= {n.replace(".0.", f".{i}.", 1): x for n, x in layer.items()}
    config = read(written(tmp_path, about["config"] | {"num_hidden_layers": 62}, state)).config
    assert config["query_pre_attn_scalar"] == 36 // 6
    whole = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert whole == [*range(5, 62, 6)]


def test_quantised_rows_are_in_order(tmp_path):
    config, state = small()
    q, up = (f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "mlp.up_proj"))
    kinds = {"blk.0.attn_q.weight": TYPES.Q8_0, "blk.0.ffn_up.weight": TYPES.BF16}
    new = read(written(tmp_path, config, state, quantize=kinds)).state
    np.testing.assert_allclose(new[q], state[q], atol=np.abs(state[q]).max() / 127)
    half = state[up].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(new[up], half)


REFUSED = {
    "architecture 'mamba'; supported: .*'gemma3', 'phi3'": {"general__architecture": "mamba"},
    "has llama.expert_count=8, which is not": {"llama__expert_count": 8},
    "has llama.logit_scale=0.5, which is not": {"llama__logit_scale": 0.5},
    "has rope.scaling.type='longrope' and no": {"llama__rope__scaling__type": "longrope"},
    "rope.scaling.type='dynamic'": {"llama__rope__scaling__type": "dynamic"},
    "lacks the setting 'llama.block_count'": {"llama__block_count": None},
    "lacks the tensor 'blk.1.attn_norm.weight'": {"llama__block_count": 2},
    "has block_count=0 and 11 tensors": {"llama__block_count": 0},
    "has block_count=4294967295": {"llama__block_count": 2**32 - 1},
    "has block_count='1'": {"llama__block_count": "1"},
    "differs by layer": {"llama__attention__head_count_kv": [1, 2]},
    "llama.rope.dimension_count=8; supported: 16": {"llama__rope__dimension_count": 8},
    "one of several parts": {"split__count": "3"},
    "settings that make no model": {"llama__attention__head_count": 0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_files_are_refused_in_one_line(message, tmp_path):
    changes = {key.replace("__", "."): value for key, value in REFUSED[message].items()}
    refused(written(tmp_path, **changes), message)


@pytest.mark.parametrize("package", ["gguf", "safetensors", "tokenizers"])
def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path, monkeypatch, package):
    file = written(tmp_path, tokenizer=BYTES)
    file = tmp_path if package == "safetensors" else file
    monkeypatch.setitem(sys.modules, package, None)
    if package == "tokenizers":
        error = read(file).tokenizer_error
    else:
        with pytest.raises(ImportError) as raised:
            read(file)
        error = str(raised.value)
    assert package in error and 'pip install ".[released]"' in error


def test_damaged_files_are_refused_in_one_line(tmp_path):
    file = written(tmp_path, tokenizer=BYTES)
    whole = file.read_bytes()

    def replaced(start, new):
        file.write_bytes(whole[:start] + new + whole[start + len(new) :])
        return file

    for size in (0, 3, 6, 20, 70, 1000, len(whole) // 2, len(whole) - 64):
        file.write_bytes(whole[:size])
        refused(file, r"not a GGUF file|truncated or damaged")
    count = whole.index(b"ggml.token_type") + 15 + 8  # After two types.
    assert whole[count : count + 8] == len(_TOKENS).to_bytes(8, "little")
    refused(replaced(count, (10**6).to_bytes(8, "little")), r"damaged \(it ends early\)")
    offset = whole.index(b"output_norm.weight") + 18 + 4 + 8 + 4  # After dimensions and type.
    refused(replaced(offset, bytes(8)), r"'output_norm\.weight' at \d+, not at")
    refused(replaced(4, whole[4:8][::-1]), "big-endian")
    with pytest.raises(ValueError, match="no file or folder"):
        read(tmp_path / "other")
    config, state = small()
    for norm, options, message in (
        (np.zeros(32, np.int8), {}, r"'output_norm\.weight' of type I8"),
        # The reason, not the shapes of experts.
        (np.zeros((2, 2, 2), "f4"), {"llama__expert_count": 2}, "expert_count=2, which is not"),
        (np.zeros(0, "f4"), {}, r"'output_norm\.weight' of shape \[0\]"),
    ):
        refused(written(tmp_path, config, state | {"model.norm.weight": norm}, **options), message)


# All bytes, and a few merges.
_MERGES = "Ġ t,h e,Ġt he,1 2,Ġ 1,Ċ Ċ,Ġ Ġ,' s".split(",")
_TOKENS = [*pre_tokenizers.ByteLevel.alphabet(), *(m.replace(" ", "") for m in _MERGES), "<|x|>"]
_TOKENS = sorted(_TOKENS[:256]) + _TOKENS[256:]
BYTES = {
    "model": "gpt2",
    "pre": "smollm",
    "tokens": _TOKENS,
    "merges": _MERGES,
    "token_type": [1] * (len(_TOKENS) - 1) + [3],
    "bos_token_id": len(_TOKENS) - 1,
    "add_bos_token": False,
}
_PIECES = "▁ t h e 1 2 ▁t he ▁the 12 ▁▁ ▁▁▁▁ ▁▁▁▁▁▁▁▁ ▁1".split()
_BYTES = [f"<0x{i:02X}>" for i in range(256)]
_PIECES = ["<unk>", "<s>", *_BYTES, *_PIECES]
PIECES = {
    "model": "llama",
    "tokens": _PIECES,
    "scores": [0.0] * 258 + [-float(i) for i in range(len(_PIECES) - 258)],
    "token_type": [2, 3] + [6] * 256 + [1] * (len(_PIECES) - 258),
    "bos_token_id": 1,
    "unknown_token_id": 0,
}
TEXT = "the 12 the\n\n 1's <|x|>é               1"
# What llama.cpp makes of them.
SPACES = [262] * 7
IDS = {
    "smollm": [83, 257, 220, 16, 17, 258, 261, 220, 16, 263, 220, 264, 127, 102, *SPACES, 220, 16],
    "gpt-2": [83, 257, 220, 259, 258, 261, 260, 263, 220, 264, 127, 102, *SPACES, 260],
    "qwen2": [83, 257, 220, 16, 17, 258, 261, 220, 16, 263, 220, 264, 127, 102, *SPACES, 220, 16],
    "default": [83, 257, 220, 259, 258, 261, 220, 16, 6, 82, 220, 264, 127, 102, *SPACES, 220, 16],
    "llama": [
        *(1, 266, 258, 267, 266, 12, 12, 271, 41, 117, 258),
        *(62, 126, 122, 126, 64, 197, 171, 270, 269, 268, 271),
    ],
}


@pytest.mark.parametrize("pre", IDS)
def test_tokens_are_those_of_llama_cpp(pre, tmp_path):
    tokenizer = PIECES if pre == "llama" else BYTES | {"pre": pre}
    tokenizer = read(written(tmp_path, tokenizer=tokenizer)).tokenizer
    assert tokenizer.encode(TEXT).ids == IDS[pre]
    assert tokenizer.decode(IDS[pre], skip_special_tokens=pre == "llama") == TEXT


@pytest.mark.parametrize(
    ("name", "after_x", "after_s"), [("Phi-3 mini", [258], []), ("Mini", [258, 12, 268], [258])]
)
def test_special_tokens_of_phi_3_take_the_blanks_after_them(name, after_x, after_s, tmp_path):
    """What llama.cpp makes of the text, by the name in the file."""
    last = ["<|x|>", "</s>", "<|endoftext|>"]
    more = {"tokens": last, "scores": [0.0] * 3, "token_type": [3] * 3}
    tokenizer = PIECES | {key: PIECES[key] + values for key, values in more.items()}
    file = written(tmp_path, tokenizer=tokenizer, general__name=name)
    tokens = read(file).tokenizer.encode("the<|x|>\n  12<s> 1<|endoftext|> 1</s> the<|x|>the")
    assert tokens.ids == [
        *(1, 266, 272, *after_x, 267, 1, 268, 262, 274, 268, 262, 273),
        *(*after_s, 266, 272, 266),
    ]


@pytest.mark.parametrize(
    "tokenizer, message",
    [
        (BYTES | {"pre": "new"}, "tokenizer with pre='new'; supported: ['gpt-2'"),
        (BYTES | {"merges": ["zz zz"]}, "has a damaged tokenizer ("),
        (None, "lacks the setting 'tokenizer.ggml.model'"),
    ],
)
def test_a_checkpoint_says_why_it_has_no_tokenizer(tokenizer, message, tmp_path):
    checkpoint = read(written(tmp_path, tokenizer=tokenizer))
    assert checkpoint.tokenizer is None and message in checkpoint.tokenizer_error


def test_keys_of_other_families_say_nothing():
    """Those that transformers reads, and its defaults."""
    of_others = {"activation_function": "relu", "hidden_activation": "relu", "layer_norm_eps": 0.5}
    config = small()[0]
    changed = config | of_others | {"use_parallel_residual": True}
    assert families.model_config(changed) == families.model_config(config)
    for name, softcap in (("gemma2", 30.0), ("gemma3", None)):
        config = agreement.read(name)[0]["config"] | {"hidden_act": "relu"}
        del config["hidden_activation"], config["final_logit_softcapping"]
        settings = families.model_config(config)
        assert (settings.activation, settings.logit_softcap) == ("gelu_pytorch_tanh", softcap)
        for wrong in (-1.0, float("nan"), "x"):
            with pytest.raises(ValueError, match="must be a positive number or null"):
                families.model_config(config | {"final_logit_softcapping": wrong})
    config = agreement.read("bloom")[0]["config"]
    old = config | {"n_embed": config["hidden_size"]}
    del old["hidden_size"]
    assert families.model_config(old) == families.model_config(config)


def folder_of(folder, config, arrays):
    """Writes a checkpoint as a folder, which it returns."""
    save_file({n: np.array(x) for n, x in arrays.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_folders_as_transformers_writes_them(tmp_path):
    """GPT-NeoX has another name for its head on disk; a whole file goes before parts."""
    about, _, state = agreement.read("gpt_neox")
    assert not about["config"]["tie_word_embeddings"]
    on_disk = {n.replace("lm_head", "embed_out"): x for n, x in state.items()}
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone"}}')
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "<pad>": 1}, "<pad>"))
    tokenizer.enable_padding(length=8)
    tokenizer.enable_truncation(2)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    checkpoint = read(folder_of(tmp_path, about["config"], on_disk))
    assert set(checkpoint.state) == set(state)
    families.load(checkpoint.config, checkpoint.state)
    assert checkpoint.tokenizer.encode("one one one").ids == [0, 0, 0]
    about, _, state = agreement.read("gpt2")  # Tied, with a copy.
    copied = state | {"lm_head.weight": state["transformer.wte.weight"]}
    assert set(read(folder_of(tmp_path, about["config"], copied)).state) == set(state)
    untied = about["config"] | {"tie_word_embeddings": False}
    families.load(untied, read(folder_of(tmp_path, untied, copied)).state)


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_files_of_the_model_without_its_head(tmp_path, name):
    """On the Hub, names of GPT-2 and BLOOM lack a prefix; GPT-2's files have masks, too."""
    about, _, state = agreement.read(name)
    arrays = {n.removeprefix("transformer."): x for n, x in state.items()}
    assert not arrays.keys() & state.keys()
    if name == "gpt2":
        arrays |= {f"h.0.attn.{x}": np.ones((1, 1, 9, 9), "f4") for x in ("bias", "masked_bias")}
    checkpoint = read(folder_of(tmp_path, about["config"], arrays))
    assert set(checkpoint.state) == set(state)
    families.load(checkpoint.config, checkpoint.state)


def test_folders_of_safetensors(tmp_path):
    config, state = small()
    names = sorted(state)
    half = {n: state[n].astype(ml_dtypes.bfloat16) for n in names[:5]}
    rest = {n: state[n].astype(np.float16) for n in names[5:]}
    rest["lm_head.weight"] = (half | rest)["model.embed_tokens.weight"]
    rest["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    parts = {"a.safetensors": half, "b.safetensors": rest}
    for file, arrays in parts.items():
        save_file(arrays, tmp_path / file)
    weight_map = {n: file for file, arrays in parts.items() for n in arrays}
    index, settings = tmp_path / "model.safetensors.index.json", tmp_path / "config.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "consolidated.safetensors").touch()  # Not in the index.
    refused(tmp_path, r"has no config\.json")
    settings.write_text("{")
    refused(tmp_path, r"config\.json' is damaged")
    settings.write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    refused(tmp_path, "is quantised")
    settings.write_text(json.dumps(config))
    checkpoint = read(tmp_path)
    assert checkpoint.config == config
    assert set(checkpoint.state) == set(state)
    assert "has no tokenizer.json" in checkpoint.tokenizer_error
    for name in names:
        expected = (half | rest)[name].astype(np.float32)
        np.testing.assert_array_equal(checkpoint.state[name], expected, strict=True)
    assert set(read(tmp_path / "a.safetensors").state) == set(state)
    wrong = rest | {"lm_head.weight": rest["lm_head.weight"] * 2}
    for file, arrays, message in (
        ("b.safetensors", rest | dict(list(half.items())[:1]), f"has '{names[0]}' in several"),
        ("a.safetensors", {n: x.view(np.int16) for n, x in half.items()}, "' of type I16"),
        ("b.safetensors", wrong, "ties weights that differ"),
    ):
        before = (tmp_path / file).read_bytes()
        save_file(arrays, tmp_path / file)
        refused(tmp_path, message)
        (tmp_path / file).write_bytes(before)
    del config["tie_word_embeddings"]  # Configs leave out what is the default of their type.
    settings.write_text(json.dumps(config))
    assert read(tmp_path).config["tie_word_embeddings"] is False
    (tmp_path / "a.safetensors").write_bytes(b"12345678")
    refused(tmp_path, r"a\.safetensors' is damaged")
    (tmp_path / "a.safetensors").unlink()
    refused(tmp_path, r"has no file 'a\.safetensors'")
    index.write_text('{"weight_map": {"a": 5}}')
    refused(tmp_path, "weight_map must name files")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model_type", (["llama"], None)),
        ("hidden_size", ("32", 32.0, -1)),
        ("num_attention_heads", (0, True)),
        ("intermediate_size", ([64],)),
        ("rms_norm_eps", (float("nan"), -1e-5, "1e-5")),
        ("hidden_act", ("relu2", ["silu"])),
        ("tie_word_embeddings", ("false", 1)),
        ("final_logit_softcapping", (5.0,)),  # transformers ignores it in a Llama.
        ("is_causal", (False,)),
    ],
)
def test_wrong_configs_are_refused(name, values):
    for value in values:
        with pytest.raises(ValueError, match=r"^model_config: .*(must|not supported)"):
            families.model_config(small()[0] | {name: value})


def test_bfloat16_parameters_and_norms_with_an_offset():
    about, _, state = agreement.read("gemma3")
    model = families.load(about["config"], state, param_dtype="bfloat16")
    assert model.blocks[0].mlp.up.kernel.dtype == "bfloat16"
    scale = state["model.norm.weight"] + np.float32(1.0)
    np.testing.assert_array_equal(model.norm.scale, scale, strict=True)


def test_projections_of_phi_3_are_divided():
    about, _, state = agreement.read("phi3")
    mlp = families.load(about["config"], state).blocks[1].mlp
    both = state["model.layers.1.mlp.gate_up_proj.weight"].T
    np.testing.assert_array_equal(mlp.gate.kernel, both[:, :80])
    np.testing.assert_array_equal(mlp.up.kernel, both[:, 80:])
