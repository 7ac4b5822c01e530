"""`python -m experiments released` on files that the tests write."""

import io
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel

import posenc_jax as pe
from examples import checkpoints, families
from experiments.__main__ import main
from experiments.models.methods import changed
from experiments.released import equality, plan
from experiments.released.by_place import ByPlace
from experiments.released.losses import compiled, set_method
from tests.experiments.one_line import refusal
from tests.models import gguf_files
from tests.support import slow

LENGTH, TOKENS = 96, 144
SIZES = {"hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 257}
CONFIG = SIZES | {
    **{"model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 1},
    **{"max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5},
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
SHAPES = {
    **{"input_layernorm": (24,), "post_attention_layernorm": (24,), "self_attn.o_proj": (24, 24)},
    **{"self_attn.q_proj": (24, 24), "self_attn.k_proj": (8, 24), "self_attn.v_proj": (8, 24)},
    **{"mlp.gate_proj": (32, 24), "mlp.up_proj": (32, 24), "mlp.down_proj": (24, 32)},
}
SHAPES = {f"model.layers.0.{name}.weight": shape for name, shape in SHAPES.items()}
SHAPES |= {"model.embed_tokens.weight": (257, 24), "model.norm.weight": (24,)}
TOKENIZER = {
    **{"model": "gpt2", "pre": "smollm", "merges": ["o n"]},
    "tokens": [*sorted(ByteLevel.alphabet()), "on"],
}


def write(path, tokenizer=TOKENIZER, **changes):
    """Writes a model of one layer with a token for each byte, and one more."""
    random = np.random.default_rng(0)
    state = {
        name: (random.normal(0.0, 0.6, shape) + (len(shape) == 1)).astype("f4")
        for name, shape in SHAPES.items()
    }
    about = {"general__name": "Tiny", "general__license": "cc0-1.0"}
    gguf_files.write(path, CONFIG, state, tokenizer=tokenizer, **about, **changes)


def test_a_window_with_sinks_is_subtracted_from_others_alone():
    losses = {"sinks_4_window_8": np.linspace(3.0, 2.0, TOKENS)}
    assert ">nats per token<" in ByPlace("text", LENGTH, losses).picture()
    losses |= {"rope": np.full(TOKENS, 2.5)}
    assert ">nats per token, minus sinks_4_window_8<" in ByPlace("text", LENGTH, losses).picture()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder to work in, with a model and a text."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tiny.gguf")
    words = np.random.default_rng(1).choice(["one", "two", "three", "four"], 60)
    (tmp_path / "text.txt").write_text(" ".join(words))
    return tmp_path


def test_everything(files, capsys):
    methods = ["rope", "sinks_1_window_23"]
    arguments = ["tiny.gguf", "--text", "text.txt", "--methods", ",".join(methods)]
    assert main(["released", *arguments, "--prompt", "one"]) == 0
    shown, page = capsys.readouterr().out, (files / "results/released/report.html").read_text()
    assert (
        "Tiny, licence cc0-1.0, llama, 10,080 parameters in float32, 1 layers, 3 heads, "
        "1 of keys and values, RoPE(head_dim=8, theta=100.0)" in shown
    )

    checkpoint = checkpoints.read(files / "tiny.gguf")
    model = families.load(checkpoint.config, checkpoint.state)
    tokens = np.array(checkpoint.tokenizer.encode((files / "text.txt").read_text()).ids)
    (layer,) = pe.from_hf(checkpoint.config)
    for name in methods:
        set_method(model, changed(layer, name, LENGTH, TOKENS))
        losses = compiled(model, TOKENS + 1)(tokens[: TOKENS + 1]).losses
        means = [f"{x:.3f}" for x in losses.reshape(6, -1).mean(1)]
        assert re.search(rf"{name} +{' +'.join(means)}\n", shown)
        cells = rf"<td>{name}</td>" + "".join(rf"\s*<td[^>]*>(<strong>)?{x}.*" for x in means)
        assert re.search(cells, page)

    set_method(model, layer)
    graph, state = nnx.split(model)
    ids, most = checkpoint.tokenizer.encode("one").ids, 24
    logits = jax.jit(lambda x: nnx.merge(graph, state)(x)[0])
    while len(ids) < most:
        padded = jnp.array([ids + [0] * (most - len(ids))])
        ids.append(int(logits(padded)[len(ids) - 1].argmax()))
    assert checkpoint.tokenizer.decode(ids).rstrip("\ufffd") in shown
    assert "<svg" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.gguf"], "there is no file or folder 'no.gguf'"),
        (["tiny.gguf", "--tokens", "5000"], "text.txt has 261 tokens, 5,001 are needed"),
        (["more.gguf"], "has token 257, and the embedding 257 rows"),
        (["tiny.gguf", "--methods", "yam"], "did you mean 'yarn'?"),
        (["tiny.gguf", "--methods", "window"], "did you mean 'window_2048'?"),
        (["tiny.gguf", "--methods", ","], "--methods: names no method"),
        (["tiny.gguf", "--prompt", "\udc80"], "--prompt: must be text of UTF-8"),
        (["words.gguf"], "the trained length must be a positive integer, got 'many'"),
        (["zero.gguf", "--methods", "ntk"], "the checkpoint must state its trained length"),
        (["zero.gguf", "--tokens", "99"], "--tokens: no losses are measured: the checkpoint must"),
        (["mute.gguf"], "--text: no losses are measured: read: 'mute.gguf' has a tokenizer"),
        (["tiny.gguf", "--name", "../x"], "--name: must be letters"),
    ],
)
def test_bad_input_is_one_line(files, capsys, arguments, message):
    tokens = [*TOKENIZER["tokens"][:-1], "unused", "on"]
    write(files / "more.gguf", tokenizer=TOKENIZER | {"tokens": tokens})
    write(files / "words.gguf", llama__context_length="many")
    write(files / "zero.gguf", llama__context_length=0)
    write(files / "mute.gguf", tokenizer=TOKENIZER | {"pre": "unheard"})
    assert message in refusal(capsys, "released", *arguments, "--text", "text.txt")
    assert not (files / "results").exists()


def test_a_model_larger_than_the_memory_is_one_line(files, capsys, monkeypatch):
    monkeypatch.setattr(plan, "_free_memory", lambda: 4.0 * 10_080 - 1.0)
    err = refusal(capsys, "released", "tiny.gguf", "--text", "text.txt")
    assert "10,080 parameters take 0.0 GB in float32" in err


def test_a_missing_package_is_one_line(files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert 'pip install ".[released]"' in refusal(capsys, "released", "tiny.gguf")


def test_characters_that_the_terminal_lacks_are_replaced(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["released", "\u00e9.gguf"]) == 2
    assert sys.stdout.buffer.getvalue() == b"Reading ?.gguf ...\n"


def write_folder(folder, config, shapes):
    """Writes a checkpoint of safetensors with the tokenizer of the file beside it."""
    random = np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {n: random.normal(0.0, 0.5, shape).astype("f4") for n, shape in shapes.items()}
    save_file(arrays, folder / "model.safetensors")
    tokenizer = checkpoints.read(folder.with_name("tiny.gguf")).tokenizer
    tokenizer.save(str(folder / "tokenizer.json"))


@slow
def test_a_model_without_rope_writes_text(files, capsys):
    """Methods that change RoPE do not apply."""
    sizes = {"n_embd": 12, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 257}
    config = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    config |= sizes | {"num_hidden_layers": 1, "tie_word_embeddings": True}
    shapes = {"wte.weight": (257, 12), "wpe.weight": (64, 12)}
    layers = {"ln_f": (12,), "h.0.ln_1": (12,), "h.0.ln_2": (12,), "h.0.attn.c_attn": (12, 36)}
    layers |= {"h.0.attn.c_proj": (12, 12), "h.0.mlp.c_fc": (12, 48), "h.0.mlp.c_proj": (48, 12)}
    for name, shape in layers.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[-1:]}
    write_folder(files / "gpt2", config, {f"transformer.{n}": x for n, x in shapes.items()})
    assert main(["released", "--checkpoint", "gpt2", "--prompt", "one", "--text", "text.txt"]) == 0
    shown = capsys.readouterr().out
    assert re.search("No losses by place: .*RoPE", shown) and "32 tokens, one by one" in shown
    assert main(["released", "gpt2", "--methods", "ntk", "--text", "text.txt"]) == 2


@slow
def test_methods_change_the_layers_that_see_all_tokens(files, capsys):
    """Qwen 2 may have a window from some layer on; scaled RoPE takes windows alone."""
    config = CONFIG | {"model_type": "qwen2", "num_hidden_layers": 2, "tie_word_embeddings": True}
    config |= {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    config["hidden_act"] = "silu"
    scaling = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 48}
    config["rope_parameters"] = scaling | {"rope_theta": 100.0}
    shapes = SHAPES | {name.replace("s.0", "s.1"): shape for name, shape in SHAPES.items()}
    for i in range(2):
        for name, width in (("q", 24), ("k", 8), ("v", 8)):
            shapes[f"model.layers.{i}.self_attn.{name}_proj.bias"] = (width,)
    write_folder(folder := files / "qwen", config, shapes)
    assert main(["released", "qwen", "--prompt", "one", "--text", "text.txt"]) == 0
    shown = capsys.readouterr().out
    assert "Methods change 1 of 2 layers" in shown
    reason = "changes RoPE without scaling, and a layer has RoPE with Llama3"
    assert f"Left out: ntk, yarn ({reason})." in shown

    checkpoint = checkpoints.read(folder)
    model = families.load(checkpoint.config, checkpoint.state)
    tokens = np.array(checkpoint.tokenizer.encode((files / "text.txt").read_text()).ids)
    assert [block.attention.window for block in model.blocks] == [None, 16]
    for name, window in (("rope", None), ("window_24", LENGTH // 4)):
        model.blocks[0].attention.window = window
        means = compiled(model, TOKENS + 1)(tokens[: TOKENS + 1]).losses.reshape(6, -1).mean(1)
        assert re.search(rf"{name} +{' +'.join(f'{x:.3f}' for x in means)}\n", shown)
    words = ["released", "qwen", "--text", "text.txt", "--methods"]
    assert f"yarn {reason}" in refusal(capsys, *words, "rope,yarn")
    (folder / "config.json").write_text(json.dumps(config | {"max_window_layers": 0}))
    message = "window_24 changes no layer of this checkpoint"
    assert message in refusal(capsys, *words, "rope,window_24")


def test_equality_is_that_of_the_next_tokens():
    random = np.random.default_rng(0)
    ours, tokens = random.normal(size=(5, 7)), np.array([3, 1, 4, 1, 5])
    theirs = ours.copy()
    theirs[2, 0] += 9.0
    exps = np.exp(ours)
    losses = [-np.log(exps[i, tokens[i + 1]] / exps[i].sum()) for i in range(4)]
    text = equality.compare(ours, theirs, tokens)
    assert "at most 9.0e+00 of a range" in text and "same at 80.0% of" in text
    assert f"loss {np.mean(losses):.6f}, there" in text
