"""`Attention` with the arguments and the weights of layers of transformers.

`attention_layers.npz` has layers of small models of transformers 5.23, in float64. Outputs of
`torch.nn.Linear` are W x + b.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc_jax as pe
from posenc_jax.nnx import Attention
from tests.makers.hf_table import TABLE, table
from tests.support import recorded, slow_but

ABOUT, ARRAYS = recorded(pathlib.Path(__file__).with_name("attention_layers.npz"))
CONFIGS = ABOUT["configs"]
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}


def arrays_of(kind):
    prefix = f"{kind}."
    return {n.removeprefix(prefix): x for n, x in ARRAYS.items() if n.startswith(prefix)}


def converted(kind, arrays, options):
    """The parameters of a layer, {(module, leaf): array}, from the weights of PyTorch."""
    heads, kv_heads = options["num_heads"], options["num_kv_heads"]
    for leaf, name in (("kernel", "weight"), ("bias", "bias")):
        if f"qkv.{name}" in arrays:
            order = "concatenated" if kind == "phi3" else "by_group"
            parts = pe.split_qkv(arrays[f"qkv.{name}"], heads, kv_heads, order=order)
            parts = dict(zip(("query", "key", "value"), parts, strict=True))
        else:
            parts = {n: arrays.get(f"{n}.{name}") for n in ("query", "key", "value")}
        for n, x in parts.items():
            if x is not None:
                yield (n, leaf), pe.heads_from_linear(x, heads if n == "query" else kv_heads)
    yield ("out", "kernel"), pe.heads_from_linear(arrays["out.weight"], heads, output=True)
    for name in ("out.bias", "query_norm.scale", "key_norm.scale", "sinks"):
        if name in arrays:
            yield tuple(name.split(".")), arrays[name]


@pytest.mark.parametrize("kind", slow_but(CONFIGS, "llama4_text", "olmo2", "gpt_oss", "gemma2"))
def test_layers_equal_those_of_transformers(kind):
    arrays, options = arrays_of(kind), pe.attention_options_from_hf(CONFIGS[kind])[0]
    graph, empty = nnx.split(nnx.eval_shape(lambda: Attention(**options, rngs=nnx.Rngs(0))))
    expected = {path: x for path, x in nnx.to_flat_state(empty) if path[0] != "rngs"}
    params = dict(converted(kind, arrays, options))
    assert params.keys() == expected.keys()
    state = [(path, x.replace(params[path].reshape(x.shape))) for path, x in expected.items()]
    layer = nnx.merge(graph, nnx.from_flat_state(state))
    y = jax.jit(lambda layer, x: layer(x))(layer, arrays["x"])
    np.testing.assert_allclose(y, arrays["y"], atol=1e-5 * np.abs(arrays["y"]).max())


@pytest.mark.parametrize("kind", ["bert", "modernbert", "t5", "gemma3_text", "llama"])
def test_which_layers_are_causal(kind):
    """By the modeling files; `makers/hf_layers.py --check` compares all with masks."""
    config = SIZES | {"model_type": kind, "head_dim": 8, "num_key_value_heads": 4}

    def causal(decoder=None, **more):
        return pe.attention_options_from_hf(config | more, decoder=decoder)[0]["is_causal"]

    patterns = {
        "bert": lambda: (causal(), causal(is_decoder=True)),
        "modernbert": lambda: (causal(), True),
        "t5": lambda: (
            causal(decoder=False) or causal(decoder=True, is_causal=False),
            causal(decoder=True),
        ),
        "gemma3_text": lambda: (causal(use_bidirectional_attention=True), causal()),
        "llama": lambda: (causal(is_causal=False), causal()),
    }
    assert patterns[kind]() == (False, True)


def test_biases_of_each_projection():
    def biases(kind, **config):
        decoder = True if kind == "whisper" else None
        config = SIZES | {"model_type": kind} | config
        config |= {"decoder_attention_heads": 4} if decoder else {"num_key_value_heads": 4}
        return pe.attention_options_from_hf(config, decoder=decoder)[0]["use_bias"]

    all_but_out = {"query": True, "key": True, "value": True, "out": False}
    assert biases("llama") is False and biases("llama", attention_bias=True) is True
    assert biases("qwen2") == all_but_out
    assert biases("glm4_moe", attention_bias=True, head_dim=8) == all_but_out
    assert biases("seed_oss", head_dim=8) == all_but_out
    relative = {"relative_attention": True, "pos_att_type": "c2p"}
    assert biases("deberta", **relative) == all_but_out | {"key": False, "out": True}
    assert biases("whisper") == all_but_out | {"key": False, "out": True}


def test_heads_of_each_half():
    config = {"model_type": "bart", "encoder_attention_heads": 16, "decoder_attention_heads": 8}
    halves = [pe.attention_options_from_hf(config, decoder=x)[0] for x in (False, True)]
    assert [(x["num_heads"], x["head_dim"]) for x in halves] == [(16, 64), (8, 128)]


def test_schemes_of_the_input_are_left_out():
    config = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2}
    (first, _) = pe.attention_options_from_hf(config)
    assert first["position"] == pe.LayerSpec(pe.NoPE())
    assert isinstance(pe.from_hf(config)[0].scheme, pe.LearnedAbsolute)


def test_every_model_type_is_in_the_table_of_the_docs():
    assert TABLE.read_text(encoding="utf-8") == table()


def test_use_bias_of_each_projection():
    with pytest.raises(
        ValueError, match=r"one for each of \['key', 'out', 'query', 'value'\], got"
    ):
        Attention(8, 2, use_bias={"query": True}, rngs=nnx.Rngs(0))
    biases = {"query": True, "key": False, "value": False, "out": True}
    layer = nnx.eval_shape(lambda: Attention(8, 2, use_bias=biases, rngs=nnx.Rngs(0)))
    assert {n for n in biases if getattr(layer, n).bias is not None} == {"query", "out"}
    linen = pe.linen.Attention(2, head_dim=4, use_bias=biases)
    params = jax.eval_shape(linen.init, jax.random.key(0), jnp.ones((1, 3, 8)))["params"]
    assert {n for n, x in params.items() if "bias" in x} == {"query", "out"}


D, N, K, H = 5, 6, 2, 4


@pytest.fixture
def draws():
    return np.random.RandomState(0)


def test_heads_are_those_of_a_linear_layer(draws):
    x = draws.standard_normal((3, D))
    weight, bias = draws.standard_normal((N * H, D)), draws.standard_normal(N * H)
    out = np.einsum("td,dnh->tnh", x, pe.heads_from_linear(weight, N))
    expected = (x @ weight.T + bias).reshape(3, N, H)
    np.testing.assert_allclose(out + pe.heads_from_linear(bias, N), expected, atol=1e-12)
    heads, weight = draws.standard_normal((3, N, H)), draws.standard_normal((D, N * H))
    out = np.einsum("tnh,nhd->td", heads, pe.heads_from_linear(weight, N, output=True))
    np.testing.assert_allclose(out, heads.reshape(3, -1) @ weight.T, atol=1e-12)


def test_one_projection_is_cut_into_three(draws):
    q, k, v = (draws.standard_normal((n, H, D)) for n in (N, K, K))
    concatenated = np.concatenate([q, k, v]).reshape(-1, D)
    groups = [x for i in range(K) for x in (*q[3 * i : 3 * i + 3], k[i], v[i])]
    by_group = np.stack(groups).reshape(-1, D)
    for order, weight in (("concatenated", concatenated), ("by_group", by_group)):
        for source, part in ((weight, slice(None)), (weight[:, 0], 0)):
            parts = pe.split_qkv(source, N, K, order=order)
            for out, expected in zip(parts, (q, k, v), strict=True):
                expected = expected[..., part].reshape(out.shape)
                np.testing.assert_array_equal(out, expected)


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="outputs=24 must be a multiple of num_heads=5"):
        pe.heads_from_linear(np.zeros((24, D)), 5)
    with pytest.raises(ValueError, match="inputs=24 must be a multiple of num_heads=5"):
        pe.heads_from_linear(np.zeros((D, 24)), 5, output=True)
    with pytest.raises(ValueError, match=r"weight must be \[D, N\*H\], got \(5,\)"):
        pe.heads_from_linear(np.zeros(5), 1, output=True)
    with pytest.raises(ValueError, match="outputs=24 must be a multiple of heads=10"):
        pe.split_qkv(np.zeros((24, D)), N, K)
    with pytest.raises(ValueError, match=r"order must be one of .*, got 'neox'"):
        pe.split_qkv(np.zeros((40, D)), N, K, order="neox")
