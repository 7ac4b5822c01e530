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
from tests.hf.test_layers import below
from tests.makers.hf_table import TABLE, table
from tests.support import recorded, slow_but

ABOUT, ARRAYS = recorded(pathlib.Path(__file__).with_name("attention_layers.npz"))
CONFIGS = ABOUT["configs"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4}


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
    arrays, options = below(ARRAYS, f"{kind}."), pe.attention_options_from_hf(CONFIGS[kind])[0]
    graph, empty = nnx.split(nnx.eval_shape(lambda: Attention(**options, rngs=nnx.Rngs(0))))
    expected = {path: x for path, x in nnx.to_flat_state(empty) if path[0] != "rngs"}
    params = dict(converted(kind, arrays, options))
    assert params.keys() == expected.keys()
    state = [(path, x.replace(params[path].reshape(x.shape))) for path, x in expected.items()]
    layer = nnx.merge(graph, nnx.from_flat_state(state))
    y = jax.jit(lambda layer, x: layer(x))(layer, arrays["x"])
    np.testing.assert_allclose(y, arrays["y"], atol=1e-5 * np.abs(arrays["y"]).max())


ALL_BUT_OUT = {"query": True, "key": True, "value": True, "out": False}
HALVES = {"encoder_attention_heads": 16, "decoder_attention_heads": 8}
DEBERTA = {"relative_attention": True, "pos_att_type": "c2p"}
OF_CONFIGS = [  # Model type, config, decoder, options, by the modeling files.
    ("bert", {}, None, {"is_causal": False}),
    ("bert", {"is_decoder": True}, None, {"is_causal": True}),
    ("modernbert", {}, None, {"is_causal": False}),
    ("t5", {}, False, {"is_causal": False}),
    ("t5", {"is_causal": False}, True, {"is_causal": False}),
    ("t5", {}, True, {"is_causal": True}),
    ("gemma3_text", {}, None, {"is_causal": True}),
    ("gemma3_text", {"use_bidirectional_attention": True}, None, {"is_causal": False}),
    ("llama", {}, None, {"is_causal": True, "use_bias": False}),
    ("llama", {"is_causal": False}, None, {"is_causal": False}),
    ("llama", {"attention_bias": True}, None, {"use_bias": True}),
    ("qwen2", {}, None, {"use_bias": ALL_BUT_OUT}),
    ("glm4_moe", {"attention_bias": True, "head_dim": 8}, None, {"use_bias": ALL_BUT_OUT}),
    ("seed_oss", {"head_dim": 8}, None, {"use_bias": ALL_BUT_OUT}),
    ("deberta", DEBERTA, None, {"use_bias": ALL_BUT_OUT | {"key": False, "out": True}}),
    ("whisper", HALVES, True, {"use_bias": ALL_BUT_OUT | {"key": False, "out": True}}),
    ("bart", HALVES, False, {"num_heads": 16, "head_dim": 64}),
    ("bart", HALVES, True, {"num_heads": 8, "head_dim": 128}),
]


@pytest.mark.parametrize("kind, config, decoder, expected", OF_CONFIGS)
def test_options_of_configs(kind, config, decoder, expected):
    sizes = {} if "encoder_attention_heads" in config else SIZES
    options, *_ = pe.attention_options_from_hf(
        {"model_type": kind} | sizes | config, decoder=decoder
    )
    assert options | expected == options


def test_schemes_of_the_input_are_left_out():
    config = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2}
    (first, _) = pe.attention_options_from_hf(config)
    assert first["position"] == pe.LayerSpec(pe.NoPE())
    assert isinstance(pe.from_hf(config)[0].scheme, pe.LearnedAbsolute)


def test_every_model_type_is_in_the_table_of_the_docs():
    assert TABLE.read_text(encoding="utf-8") == table()


def test_use_bias_of_each_projection():
    biases = {"query": True, "key": False, "value": False, "out": True}
    layer = nnx.eval_shape(lambda: Attention(8, 2, use_bias=biases, rngs=nnx.Rngs(0)))
    assert {n for n in biases if getattr(layer, n).bias is not None} == {"query", "out"}
    linen = pe.linen.Attention(2, head_dim=4, use_bias=biases)
    params = jax.eval_shape(linen.init, jax.random.key(0), jnp.ones((1, 3, 8)))["params"]
    assert {n for n, x in params.items() if "bias" in x} == {"query", "out"}


@pytest.mark.parametrize("order", ["concatenated", "by_group"])
@pytest.mark.parametrize("columns", [(), (5,)])
def test_one_projection_is_cut_into_three(order, columns):
    q, k, v = (np.random.RandomState(n).standard_normal((n, 4, *columns)) for n in (6, 2, 2))
    parts = [q, k, v] if order == "concatenated" else [q[:3], k[:1], v[:1], q[3:], k[1:], v[1:]]
    out = pe.split_qkv(np.concatenate(parts).reshape(-1, *columns), 6, 2, order=order)
    for part, expected in zip(out, (q, k, v), strict=True):
        np.testing.assert_array_equal(part, expected.reshape(part.shape))


TWO_BIASES = {"model_dim": 8, "num_heads": 2, "use_bias": {"query": True, "key": True}}
VECTOR, MATRIX = ({"weight": np.zeros(shape), "num_heads": 5} for shape in (24, (24, 24)))
ERRORS = [
    (Attention, TWO_BIASES | {"rngs": None}, r"one for each of \['key', 'out', 'query', 'value'\]"),
    (pe.heads_from_linear, MATRIX, "outputs=24 must be a multiple of num_heads=5"),
    (pe.heads_from_linear, MATRIX | {"output": True}, "inputs=24 must be a multiple of"),
    (pe.heads_from_linear, VECTOR | {"output": True}, r"weight must be \[D, N\*H\], got \(24,\)"),
    (pe.split_qkv, MATRIX, "outputs=24 must be a multiple of heads=15"),
    (pe.split_qkv, MATRIX | {"order": "neox"}, "order must be one of .*, got 'neox'"),
]
