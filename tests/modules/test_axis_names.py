"""Parameters of the layers: names of their axes, initialisers, and one tree for NNX and Linen."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import posenc_jax as pe
import posenc_jax.linen as pl
import posenc_jax.nnx as pn
from posenc_jax.schemes.scheme import param_axes

N, K, H, D = 6, 3, 8, 20
NAMES = {"model_dim": "embed", "num_heads": "heads", "num_kv_heads": "kv_heads"}
WANTED = {
    "query": {"kernel": P("embed", "heads", None), "bias": P("heads", None)},
    "key": {"kernel": P("embed", "kv_heads", None), "bias": P("kv_heads", None)},
    "value": {"kernel": P("embed", "kv_heads", None), "bias": P("kv_heads", None)},
    "out": {"kernel": P("heads", None, "embed"), "bias": P("embed")},
    "query_norm": {"scale": P("heads", None)},
    "key_norm": {"scale": P("kv_heads", None)},
    "sinks": P("heads"),
    "encoding": {"parameters": {"table": P("heads", None)}},
}
LAYER = {
    "position": pe.T5(N, bidirectional=True),
    "num_kv_heads": K,
    "head_dim": H,
    "qk_norm": pe.QKNorm(scale="per_head"),
    "sinks": True,
    "use_bias": True,
    "axis_names": NAMES,
}
X = np.random.default_rng(0).normal(size=(3, 7, D)).astype(np.float32)


def nnx_layer(**options):
    with nnx.use_eager_sharding(False):  # Without a mesh, as Flax's own modules.
        return pn.Attention(D, N, rngs=nnx.Rngs(0), **LAYER | options)


def linen_variables(**options):
    module = pl.Attention(num_heads=N, **LAYER | options)
    return jax.eval_shape(module.init, jax.random.key(0), X)


def test_all_parameters_of_nnx_and_linen_have_names():
    specs = nnx.get_partition_spec(nnx.state(nnx_layer(), nnx.Param))
    is_variable = {"is_leaf": lambda x: isinstance(x, nnx.Variable)}
    specs = jax.tree.map(lambda v: v.get_value(), specs, **is_variable)
    assert nnx.to_pure_dict(specs) == WANTED
    variables = linen_variables()
    assert nn.get_partition_spec(variables)["params"] == WANTED
    boxed = jax.tree.leaves(variables, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))
    assert all(isinstance(x, nn.LogicallyPartitioned) for x in boxed)


def test_initialisers_with_names_keep_them():
    init = nnx.with_partitioning(nnx.initializers.zeros, ("a", "b", "c"))
    kernel = nnx_layer(out_kernel_init=init).out.kernel
    assert kernel.get_metadata("out_sharding") == ("a", "b", "c")
    init = nn.with_partitioning(nn.initializers.zeros, ("a", "b", "c"))
    specs = nn.get_partition_spec(linen_variables(out_kernel_init=init))["params"]
    assert specs["out"]["kernel"] == P("a", "b", "c")


def test_each_projection_has_an_initialiser():
    """Deep-norm and muP scale the parts apart; Flax's names where Flax has one."""
    constant = nnx.initializers.constant
    inits = {
        "kernel_init": {"query": constant(0.0), "value": constant(3.0)},
        "out_kernel_init": constant(4.0),
        "bias_init": {"key": constant(5.0)},
        "out_bias_init": constant(6.0),
    }
    sizes = {"num_kv_heads": K, "head_dim": H, "use_bias": True}
    layer = pn.Attention(D, N, rngs=nnx.Rngs(0), **sizes, **inits)
    variables = pl.Attention(num_heads=N, **sizes, **inits).init(jax.random.key(0), X)
    for params in (nnx.to_pure_dict(nnx.state(layer, nnx.Param)), variables["params"]):
        kernels = {name: np.unique(params[name]["kernel"]) for name in WANTED if name in params}
        assert len(kernels.pop("key")) > 100  # Those left out have Flax's.
        assert kernels == {"query": [0], "value": [3], "out": [4]}
        biases = {name: np.unique(params[name]["bias"]).item() for name in params}
        assert biases == {"query": 0, "key": 5, "value": 0, "out": 6}
    same = pn.Attention(D, N, rngs=nnx.Rngs(0), kernel_init=constant(2.0), **sizes)
    assert np.unique(same.out.kernel[...]) == [2.0]
    with pytest.raises(ValueError, match=r"kernel_init has entries .*got \['out'\]; use out_kerne"):
        pn.Attention(D, N, rngs=nnx.Rngs(0), kernel_init={"out": constant(1.0)}, **sizes)


@dataclasses.dataclass(frozen=True)
class Undeclared(pe.T5):
    """Of a user: its parameters are replicated."""

    param_axes = pe.Scheme.param_axes


@dataclasses.dataclass(frozen=True)
class Misdeclared(pe.T5):
    @property
    def param_axes(self):
        return {"table": "num_heads"}


def test_a_scheme_without_a_declaration_is_replicated():
    assert param_axes(Undeclared(N)) == [["-", "-"]]
    layer = nnx_layer(position=Undeclared(N, bidirectional=True))
    assert layer.encoding.parameters["table"].get_metadata("out_sharding") == (None, None)
    message = r"Misdeclared.param_axes: \['table'\] has shape \(6, 32\), got 'num_heads'"
    with pytest.raises(ValueError, match=message):
        param_axes(Misdeclared(N))


def test_names_of_anything_but_sizes_are_refused():
    message = r"axis_names names axes by their size, num_heads, .*; got \['heads'\]"
    with pytest.raises(ValueError, match=f"Attention: {message}"):
        pn.Attention(D, N, head_dim=H, axis_names={"heads": "tensor"}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=f"PositionEncoding: {message}"):
        pl.PositionEncoding(pe.T5(N), axis_names={"heads": "tensor"}).init(jax.random.key(0), X)
