"""Whole models against transformers: logits, and every token of greedy decoding.

`makers/models.py` writes the files. Weights are drawn again from names and shapes.
"""

import csv
import importlib
import itertools
import re

import chex
import numpy as np
import pytest
from flax import nnx

from examples import deberta, deepseek, encoders, families, qwen2_vl, swin, t5
from examples.decoder import ACTIVATIONS
from tests.models.agreement import ENCODERS, FOLDER, NAMES, TABLE, agreement, read
from tests.support import slow_but

# Encoders; `ONE_PASS` has decoders.
QUICK = "bert", "gte"
ONE_PASS = "ministral3", "gpt_oss"


@pytest.mark.parametrize("name", slow_but(NAMES, *QUICK))
def test_models_agree_with_transformers(name):
    error, steps = agreement(name)
    assert error < 1e-4
    assert steps in (None, 64)


@pytest.mark.parametrize("name", slow_but(ONE_PASS, "gpt_oss"))
def test_one_pass_over_a_packed_batch_has_the_logits_of_greedy_decoding(name):
    """Two of the sequences share a row; not compiled, as models share operations."""
    about, arrays, state = read(name)
    tokens = np.concatenate([arrays["tokens"], arrays["new"][:, :-1]], 1)
    start = np.argmax(arrays["mask"], 1)
    parts = [tokens[b, start[b] :] for b in (2, 1)]
    lengths = [len(part) for part in parts]
    model = families.load(about["config"], state)
    logits = nnx.jit(lambda model, *x, **options: model(*x, **options))(
        model,
        np.concatenate(parts)[None],
        positions=np.concatenate([*map(np.arange, lengths)])[None].astype(np.int32),
        segment_ids=np.repeat([0, 1], lengths)[None].astype(np.int32),
    )[0]
    for b, part in zip((2, 1), np.split(np.asarray(logits), lengths[:1]), strict=True):
        places = arrays["at"][arrays["at"] >= start[b]]
        expected = arrays["logits"][b, len(arrays["at"]) - len(places) :]
        np.testing.assert_allclose(part[places - start[b]], expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.needs("torch", "transformers>=5.23")
def test_the_files_are_what_transformers_gives():
    maker = importlib.import_module("tests.makers.models")
    for name in maker.CASES:
        golden, file = maker.make(name), read(name)[1]
        for key in golden.keys() - {"about"}:
            np.testing.assert_allclose(golden[key], file[key], rtol=1e-5, atol=1e-5)


def test_activations_and_causality_are_of_the_config():
    """As T5Config, DeepseekV3MoE and BertModel of transformers 5.24 read them."""
    about, _, state = read("t5_gated")
    for name, expected in {"gated-silu": "silu", "gated-gelu": "gelu_new"}.items():
        model = t5.load(about["config"] | {"feed_forward_proj": name}, state)
        assert model.encoder.blocks[0].mlp.activation is ACTIVATIONS[expected]
    about, _, state = read("deepseek_v3")
    model = deepseek.load(about["config"] | {"hidden_act": "gelu"}, state)
    assert model.blocks[-1].mlp.experts.activation is ACTIVATIONS["gelu"]
    about, _, state = read("bert")
    model = encoders.load(about["config"] | {"is_decoder": True}, state)
    assert model.blocks[0].attention.is_causal


def test_the_first_files_of_t5_have_more_arrays_and_fewer_settings():
    """Those of t5-small name no feed_forward_proj; see transformers' #8518 for the table."""
    about, _, state = read("t5")
    config = {k: x for k, x in about["config"].items() if k != "feed_forward_proj"}
    copy = state["shared.weight"]
    copies = {f"{name}.embed_tokens.weight": copy for name in ("encoder", "decoder")}
    table = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    more = copies | {"lm_head.weight": copy, table: np.ones((32, 6), np.float32)}
    loaded = nnx.state(t5.load(config, state | more))
    chex.assert_trees_all_equal(loaded, nnx.state(t5.load(about["config"], state)))
    for name in more.keys() - {table}:
        with pytest.raises(ValueError, match=f"'{name}' must be equal to 'shared.weight'"):
            t5.load(config, state | {name: copy + 1})
    without = {name: x for name, x in state.items() if name != "shared.weight"}
    with pytest.raises(ValueError, match=r"lacks 'shared.weight'"):
        t5.load(config, without | copies)


def test_latent_attention_caches_latents_alone():
    about, _, state = read("deepseek_v3")
    caches = deepseek.load(about["config"], state).new_caches(3, 7)
    assert [(c.k.shape, c.v.size) for c in caches] == [((3, 7, 1, 20 + 6), 0)] * 2


def test_sentence_embeddings_are_of_hidden_states_on_either_side_of_padding():
    about, arrays, state = read("bert")
    tokens, mask = arrays["tokens"], arrays["mask"]
    rows = [row[is_token] for row, is_token in zip(arrays["logits"], mask, strict=True)]
    pooled = {"mean": [row.mean(0) for row in rows], "cls": [row[0] for row in rows]}
    # Named as in the file of bert-base-uncased, which has two heads.
    renamed = {
        "bert." + re.sub("Norm.weight", "Norm.gamma", re.sub("Norm.bias", "Norm.beta", name)): x
        for name, x in (state | {"pooler.dense.bias": np.zeros(48)}).items()
    }
    model = encoders.load(about["config"], renamed | {"cls.predictions.bias": np.zeros(9)})
    embed = nnx.jit(encoders.embed, static_argnums=3)
    right = [np.stack([*map(np.roll, x, mask.sum(1))]) for x in (tokens, mask)]
    for inputs, pooling in itertools.product(((tokens, mask), right), pooled):
        expected = pooled[pooling] / np.linalg.norm(pooled[pooling], axis=1, keepdims=True)
        np.testing.assert_allclose(embed(model, *inputs, pooling), expected, atol=1e-5)
    empty = mask & (np.arange(len(mask)) != 1)[:, None]
    assert not np.any(embed(model, tokens, empty, "mean")[1])
    with pytest.raises(ValueError, match=r'pooling must be "mean" or "cls", got \'max\'.'):
        encoders.embed(model, tokens, mask, "max")


@pytest.mark.parametrize("name", slow_but(ENCODERS, *QUICK))
def test_heads_of_encoders_are_left_out(name):
    about, _, state = read(name)
    prefix = encoders.FAMILIES[about["config"]["model_type"]].prefix
    file = {prefix + name: x for name, x in state.items()} | {"lm_head.bias": np.zeros(44)}
    loaded = (nnx.state(encoders.load(about["config"], x)) for x in (file, state))
    chex.assert_trees_all_equal(*loaded)
    with pytest.raises(ValueError, match=r"no place for \['lm_head.bias'\]"):
        encoders.load(about["config"], state | {"lm_head.bias": np.zeros(44)})


def test_layers_of_mpnet_share_their_tables():
    about, _, state = read("mpnet")
    model = encoders.load(about["config"], state)
    assert all(block.attention.encoding is model.position for block in model.blocks)


def test_weights_that_do_not_fit_are_refused():
    about, _, state = read("llama3")
    config, name = about["config"], "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"the state dict lacks '{name}'"):
        families.load(config, {n: x for n, x in state.items() if n != name})
    about, _, old = read("gpt2")
    left_out = {n: x for n, x in old.items() if n != "transformer.h.0.attn.c_proj.bias"}
    with pytest.raises(ValueError, match=r"lacks 'transformer.*attn.c_proj.bias'"):
        families.load(about["config"], left_out)
    with pytest.raises(ValueError, match=r"no place for \['model.rotary_emb.inv_freq'\]"):
        families.load(config, state | {"model.rotary_emb.inv_freq": np.zeros(4)})
    with pytest.raises(ValueError, match=r"'up', 'kernel'\) must be \(36, 80\), got \(36, 79\)"):
        families.load(config, state | {name: state[name][:-1]})
    with pytest.raises(ValueError, match=r"no place for \['a0', .* 'a4'\] and 2 more"):
        families.load(config, state | {f"a{i}": np.zeros(4) for i in range(7)})
    for kind in ("opt", "deepseek_v3"):
        with pytest.raises(ValueError, match=f"model_type must be one of .*, got '{kind}'"):
            families.load({"model_type": kind}, {})
    about, _, bert_state = read("bert")
    for change, message in (
        ({"model_type": None}, "'bert' or .*, got None"),
        ({"hidden_act": "new"}, "activation must be one of .*, got 'new'"),
    ):
        with pytest.raises(ValueError, match=message):
            encoders.load(about["config"] | change, bert_state)
    for load in (t5.load, deepseek.load, deberta.load, swin.load, qwen2_vl.load):
        with pytest.raises(ValueError, match=r"model_type must be .*, got 'bert'"):
            load(about["config"], bert_state)
    experts = read("deepseek_v3")[0]["config"] | {"num_experts_per_tok": 99}
    with pytest.raises(ValueError, match="num_experts_per_tok=99 is more than"):
        deepseek.load(experts, {})
    for name, load, key in (
        ("bert", encoders.load, "layer_norm_eps"),
        ("distilbert", encoders.load, "hidden_dim"),
        ("t5", t5.load, "d_kv"),
        ("deepseek_v3", deepseek.load, "n_group"),
    ):
        about, _, of_model = read(name)
        del about["config"][key]
        with pytest.raises(ValueError, match=f"must have '{key}'"):
            load(about["config"], of_model)
    about, _, of_model = read("qwen2_vl")
    del about["config"]["vision_config"]["in_channels"]
    with pytest.raises(ValueError, match="the qwen2_vl config must have 'in_channels'"):
        qwen2_vl.load(about["config"], of_model)
    del config["intermediate_size"]
    with pytest.raises(ValueError, match="the llama config must have 'intermediate_size'"):
        families.load(config, state)
    with pytest.raises(ValueError, match="use_bidirectional_attention=True is not supported"):
        families.load(config | {"use_bidirectional_attention": True}, state)


def test_every_model_is_in_the_table():
    with TABLE.open(newline="") as file:
        rows = [*csv.reader(file)][1:]
    assert [name for name, *_ in rows] == NAMES
    assert {read(n)[0]["config"]["model_type"] for n in ENCODERS} == encoders.FAMILIES.keys()
    assert sorted(path.stem for path in FOLDER.glob("*.npz")) == sorted(NAMES)
    assert all(float(error) < 1e-4 and steps in ("64", "-") for *_, error, steps in rows)
