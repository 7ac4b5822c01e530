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

from examples import encoders, t5
from examples.decoder import ACTIVATIONS
from tests.models.agreement import ENCODERS, FOLDER, LOAD, NAMES, TABLE, agreement, load, read
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
    _, arrays, _ = read(name)
    tokens = np.concatenate([arrays["tokens"], arrays["new"][:, :-1]], 1)
    start = np.argmax(arrays["mask"], 1)
    parts = [tokens[b, start[b] :] for b in (2, 1)]
    lengths = [len(part) for part in parts]
    logits = nnx.jit(lambda model, *x, **options: model(*x, **options))(
        load(name),
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
    for name, expected in {"gated-silu": "silu", "gated-gelu": "gelu_new"}.items():
        model = load("t5_gated", feed_forward_proj=name)
        assert model.encoder.blocks[0].mlp.activation is ACTIVATIONS[expected]
    experts = load("deepseek_v3", hidden_act="gelu").blocks[-1].mlp.experts
    assert experts.activation is ACTIVATIONS["gelu"]
    assert load("bert", is_decoder=True).blocks[0].attention.is_causal


def test_the_first_files_of_t5_have_more_arrays_and_fewer_settings():
    """Those of t5-small name no feed_forward_proj; see transformers' #8518 for the table."""
    about, _, state = read("t5")
    config = {k: x for k, x in about["config"].items() if k != "feed_forward_proj"}
    copy = state["shared.weight"]
    copies = {f"{name}.embed_tokens.weight": copy for name in ("encoder", "decoder")}
    table = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    more = copies | {"lm_head.weight": copy, table: np.ones((32, 6), np.float32)}
    loaded = nnx.state(t5.load(config, state | more))
    chex.assert_trees_all_equal(loaded, nnx.state(load("t5")))
    for name in more.keys() - {table}:
        with pytest.raises(ValueError, match=f"'{name}' must be equal to 'shared.weight'"):
            t5.load(config, state | {name: copy + 1})
    without = {name: x for name, x in state.items() if name != "shared.weight"}
    with pytest.raises(ValueError, match=r"lacks 'shared.weight'"):
        t5.load(config, without | copies)


def test_latent_attention_caches_latents_alone():
    caches = load("deepseek_v3").new_caches(3, 7)
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


def test_layers_of_mpnet_share_their_tables():
    model = load("mpnet")
    assert all(block.attention.encoding is model.position for block in model.blocks)


UP, BIAS = "model.layers.1.mlp.up_proj.weight", "transformer.h.0.attn.c_proj.bias"
MISSING = {"bert": "layer_norm_eps", "distilbert": "hidden_dim", "t5": "d_kv"}
MISSING |= {"deepseek_v3": "n_group", "llama3": "intermediate_size"}
REFUSED = [  # Model, changes of its config and of its weights, message; None drops an entry.
    ("llama3", {}, {UP: None}, f"the state dict lacks '{UP}'"),
    ("gpt2", {}, {BIAS: None}, f"lacks '{BIAS}'"),
    ("llama3", {}, {"model.rotary_emb.inv_freq": np.zeros(4)}, r"no place for \['model.rotary_"),
    ("llama3", {}, {UP: np.zeros((79, 36))}, r"'kernel'\) must be \(36, 80\), got \(36, 79\)"),
    ("llama3", {}, {f"a{i}": np.zeros(4) for i in range(7)}, r"\['a0', .* 'a4'\] and 2 more"),
    ("bert", {}, {"lm_head.bias": np.zeros(44)}, r"no place for \['lm_head.bias'\]"),
    ("llama3", {"model_type": "opt"}, {}, "model_type must be one of .*, got 'opt'"),
    ("llama3", {"model_type": "deepseek_v3"}, {}, "must be one of .*, got 'deepseek_v3'"),
    ("bert", {"model_type": None}, {}, "'bert' or .*, got None"),
    ("bert", {"hidden_act": "new"}, {}, "activation must be one of .*, got 'new'"),
    *(
        (name, {"model_type": "bert"}, {}, "model_type must be .*, got 'bert'")
        for name in ("t5", "deepseek_v3", "deberta_v2", "swin", "qwen2_vl")
    ),
    ("deepseek_v3", {"num_experts_per_tok": 99}, {}, "num_experts_per_tok=99 is more than"),
    *((name, {key: None}, {}, f"must have '{key}'") for name, key in MISSING.items()),
    ("qwen2_vl", {"vision_config": {}}, {}, "the qwen2_vl config must have '"),
    ("llama3", {"use_bidirectional_attention": True}, {}, "attention=True is not supported"),
]


@pytest.mark.parametrize("name, config, state, message", REFUSED)
def test_models_that_do_not_fit_are_refused(name, config, state, message):
    about, _, whole = read(name)
    config, state = (
        {key: x for key, x in (values | changes).items() if x is not None}
        for values, changes in ((about["config"], config), (whole, state))
    )
    with pytest.raises(ValueError, match=message):
        LOAD[name](config, state)


def test_every_model_is_in_the_table():
    with TABLE.open(newline="") as file:
        rows = [*csv.reader(file)][1:]
    assert [name for name, *_ in rows] == NAMES
    assert {read(n)[0]["config"]["model_type"] for n in ENCODERS} == encoders.FAMILIES.keys()
    assert sorted(path.stem for path in FOLDER.glob("*.npz")) == sorted(NAMES)
    assert all(float(error) < 1e-4 and steps in ("64", "-") for *_, error, steps in rows)
