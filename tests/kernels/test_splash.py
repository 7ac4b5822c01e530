"""Splash attention without a TPU: interpreted against the reference, and lowered for TPUs."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posenc_jax as pe
from posenc_jax.engine import api, chips
from posenc_jax.engine.api import choose, make_problem
from posenc_jax.engine.problem import platform_of
from posenc_jax.engine.rule import as_tuple
from posenc_jax.engine.splash import Splash
from posenc_jax.kernels.tpu.splash import _CausalMask, _LocalMask
from tests.kernels.kernel_cases import (
    arrays_of_case,
    assert_close,
    assert_equals_the_reference,
    case_of,
    described,
    products_in_kernels,
    program,
)
from tests.support import slow, slow_but

SPLASH = Splash(block=128, interpret=True)


EVERYTHING = case_of(segments=True, window=70, softcap=3.0, sinks=True, heads=6, kv_heads=3)
MORE_CASES = [
    *(case_of(causal=False, window=sides) for sides in (None, (60, 3), (-1, 3))),
    case_of(window=(9, -1)),
    case_of(heads=12, kv_heads=4, dim=80),
    case_of(causal=False, segments=True, dim=256, heads=6, kv_heads=1, length=256),
]


PARTS_OF_DQ = case_of(length=1100, heads=1, kv_heads=1, batch=1)


@pytest.mark.parametrize("case", slow_but([EVERYTHING, PARTS_OF_DQ, *MORE_CASES], PARTS_OF_DQ))
def test_equals_the_reference(case):
    value_dim = 96 if case.dim == 80 else None
    assert_equals_the_reference(case, SPLASH, arrays_of_case(case, value_dim=value_dim), lse=False)


@slow
def test_layers_that_are_scanned_and_computed_again():
    """As models call it: `jax.checkpoint` in `jax.lax.scan`, under `jax.vmap`; traced once."""
    scales = jnp.array([0.5, 1.0])
    arrays = arrays_of_case(case_of(batch=1, heads=1, kv_heads=1, dim=32))

    def outcome(implementation):
        def layer(x, scale):
            options = {"is_causal": True, "implementation": implementation}
            return x + pe.attention(scale * x, x, x, **options), None

        def loss(scales, x):
            return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, scales)[0]))

        step = jax.vmap(jax.grad(loss, (0, 1)), (None, 0))
        return jax.jit(step)(scales, jnp.stack([arrays["q"], arrays["v"]]))

    assert_close(outcome(SPLASH), outcome("reference"))  # Layers amplify rounding.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": pe.ALiBi(num_heads=2).rules({})}, "rules"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "dropout"),
        ({"is_causal": True, "prefix_length": np.zeros(1, np.int32)}, "prefix_length"),
        ({"mask": np.ones((1, 1, 64, 64), bool)}, "mask"),
        ({"is_causal": True, "q_positions": np.arange(64), "k_positions": np.arange(64)}, "posit"),
        ({"return_lse": True}, "log-sum-exp"),
        ({"sinks": np.zeros((1, 64, 2), np.float32)}, "sinks per query"),
        ({"dim": 264}, "beyond 256"),
        ({"dtype": jnp.float16}, "bfloat16 or all float32"),
    ],
)
def test_what_it_lacks_is_refused_by_name(options, message):
    dim, dtype = options.pop("dim", 64), options.pop("dtype", jnp.float32)
    q = jax.ShapeDtypeStruct((1, 64, 2, dim), dtype)
    with pytest.raises(NotImplementedError, match=f'implementation="splash": .*{message}'):
        jax.eval_shape(lambda q: pe.attention(q, q, q, **options, implementation=SPLASH), q)


def test_it_is_named_and_checked():
    q = jnp.zeros((1, 64, 2, 64))
    with pytest.raises(NotImplementedError, match="for the platform tpu, and the platform is cpu"):
        pe.attention(q, q, q, implementation="splash")
    with pytest.raises(ValueError, match=r"Splash: block must be a multiple of 128 .* got 100"):
        Splash(block=100)


def test_derivatives_that_it_lacks_are_refused():
    q = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.float32)

    def loss(q):
        return jnp.sum(pe.attention(q, q, q, implementation=SPLASH) ** 2)

    message = 'implementation="splash" has first derivatives in reverse mode only'
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(jax.hessian(loss), q)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jit(jax.jacfwd(loss)).lower(q)


@pytest.mark.parametrize(
    ("dtype", "precision"), [(jnp.bfloat16, "highest"), (jnp.float32, "default")]
)
def test_the_dtype_alone_sets_the_precision(dtype, precision):
    """In both passes; Mosaic refuses products of bfloat16 under the setting "highest"."""
    q = jax.ShapeDtypeStruct((1, 1280, 2, 64), dtype)

    def step(q):
        out = pe.attention(q, q, q, is_causal=True, implementation=SPLASH)
        return jnp.sum(out.astype(jnp.float32))

    with jax.default_matmul_precision(precision):
        products = products_in_kernels(jax.make_jaxpr(jax.grad(step))(q).jaxpr)
    expected = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    assert len(products) >= 9
    assert {p for e in products for p in e.params["precision"]} == {expected}


@pytest.mark.parametrize("case", [EVERYTHING, case_of(causal=False)])
def test_lowers_for_tpu(case):
    case = dataclasses.replace(case, dtype="bfloat16")
    traced = program(case, Splash(cross_compile=True), False).trace(arrays_of_case(case))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2


@pytest.mark.parametrize("sides", [(None, 0), (None, 100), (200, 0), (300, 150), (0, 0)])
def test_blocks_of_masks_are_those_of_jax(sides):
    shape, block = (768, 640), 128
    ours, theirs = _LocalMask(shape, sides, 0), masks.LocalMask(shape, sides, 0)
    pairs = [(ours, theirs)]
    if sides == (None, 0):
        pairs.append((_CausalMask(shape), masks.CausalMask(shape)))
    for ours, theirs in pairs:
        for i, j in np.ndindex(6, 5):
            index = slice(block * i, block * (i + 1)), slice(block * j, block * (j + 1))
            np.testing.assert_array_equal(ours[index], theirs[index])


@slow
@pytest.mark.parametrize(
    ("kind", "kv_heads"), [(AxisType.Explicit, 2), pytest.param(AxisType.Auto, 8, marks=slow)]
)
def test_batch_and_heads_over_devices(kind, kv_heads):
    """Each of four devices takes one of two key heads.

    Some queries see nothing: splash attention gives them the mean of all values. Padding holds NaN.
    """
    mesh = jax.make_mesh((2, 4), ("data", "heads"), axis_types=(kind,) * 2)
    case = case_of(causal=False, segments=True, heads=8, kv_heads=kv_heads)
    axes = {"batch_axes": "data", "head_axes": "heads"} if kind == AxisType.Auto else {}
    x = arrays_of_case(case)
    ids = x["q_segment_ids"]
    x["k_segment_ids"] = np.where(ids == 0, 5, ids)  # No key has the first segment.

    def spread(y):
        heads = "heads" if y.ndim > 2 and y.shape[2] % 4 == 0 else None
        spec = PartitionSpec("data", None, heads) if y.ndim > 2 else PartitionSpec("data")
        return jax.device_put(y, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        run = program(case, dataclasses.replace(SPLASH, **axes), False)
        got = jax.device_get(run({name: jax.tree.map(spread, y) for name, y in x.items()}))
    assert_close(got, jax.device_get(program(case, "reference", False)(x)), 3e-6)
    sees = (ids == 1)[:, None, :, None]
    assert not sees.all() and not np.any(got["output"] * ~sees) and not np.any(got["dq"] * ~sees)


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    q = jnp.zeros((2, 200, 2, 64))

    def attend(check):
        run = functools.partial(pe.attention, is_causal=True, implementation=SPLASH)
        specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec("data")}
        return jax.shard_map(run, mesh=mesh, **specs, check_vma=check)(q, q, q)

    with pytest.raises(NotImplementedError, match="needs check_vma=False"):
        jax.eval_shape(lambda: attend(True))
    assert jax.eval_shape(lambda: attend(False)).shape == q.shape


@pytest.fixture
def on_tpu(monkeypatch):
    """One TPU, as far as the choice of an implementation asks."""
    devices = jax.local_devices()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "local_devices", lambda **_: devices)
    monkeypatch.setattr(chips, "warn_of_tiles", lambda *_: None)
    return monkeypatch


def _chosen(
    length=512,
    kind: str | None = "TPU v5 lite",
    sharding=None,
    dim=64,
    dtype=jnp.bfloat16,
    **options,
):
    """Returns the word of the implementation that `None` takes for [1, length, 2, dim]."""
    needs_lse, rules = options.pop("needs_lse", False), as_tuple(options.pop("rules", ()))
    words = []

    def ask(q):
        k = jnp.zeros((1, options.pop("keys", length), 2, dim), dtype)
        problem = make_problem(q, k, k, rules, pe.AttentionCall(**options))
        problem = dataclasses.replace(problem, needs_lse=needs_lse, platform="tpu")
        words.append(choose(problem).name)

    with contextlib.nullcontext() if kind is None else described(kind):
        jax.eval_shape(ask, jax.ShapeDtypeStruct((1, length, 2, dim), dtype, sharding=sharding))
    return words[0]


def test_none_takes_it_on_tpus_where_it_serves(on_tpu):
    segments = {"q_segment_ids": jnp.zeros((1, 512), jnp.int32)}
    for options in ({}, {"is_causal": True, "window": 64}, {"softcap": 3.0, **segments}):
        assert _chosen(**options) == "splash"
    assert _chosen(keys=128) == "xla" and _chosen(length=1) == "dense"
    assert _chosen(length=1024, keys=256) == "splash"
    for options in (
        {"rules": pe.ALiBi(num_heads=2).rules({})},
        {"needs_lse": True},
        {"dim": 320},
        {"dtype": jnp.float16},
        {"kind": "TPU v3"},
        {"is_causal": True, "q_positions": jnp.arange(512), "k_positions": jnp.arange(512)},
    ):
        assert _chosen(**options) == "xla", options
    for kind in ("TPU v4", "TPU v5", "TPU v6 lite", "TPU7x"):
        assert _chosen(kind=kind) == "splash"


@pytest.mark.parametrize(
    ("scheme", "takes_it"), [(pe.RoPE(head_dim=32), True), (pe.T5(num_heads=2), False)]
)
def test_rotary_schemes_take_it(on_tpu, scheme, takes_it):
    q = jax.ShapeDtypeStruct((1, 512, 2, 32), jnp.bfloat16)
    params = jax.eval_shape(scheme.init, jax.random.key(0))
    options = {"is_causal": True, "segment_ids": np.zeros((1, 512), np.int32)}

    def attend(params, q):
        return pe.scheme_attention(scheme, params, q, q, q, **options)[0]

    with described("TPU v5 lite"):
        assert ("splash_mha" in str(jax.make_jaxpr(attend)(params, q))) == takes_it


def test_none_takes_it_where_the_devices_are_known(on_tpu):
    """The compiler cannot partition a kernel, and `in_shardings` of `jit` are unknown to traces."""
    on_tpu.setattr(jax, "device_count", lambda: 8)
    on_tpu.setattr("posenc_jax.kernels.tpu.chip.device_kind", lambda: "TPU v5 lite")

    def on(kind, *axes):
        mesh = jax.make_mesh((2, 4), ("data", "heads"), axis_types=(kind,) * 2)
        return NamedSharding(mesh, PartitionSpec(*axes))

    def chosen(sharding):
        return _chosen(kind=None, sharding=sharding)

    assert chosen(on(AxisType.Explicit)) == "splash"
    assert chosen(on(AxisType.Explicit, None, None, "data")) == "splash"
    assert chosen(on(AxisType.Explicit, None, "data")) == "xla"  # The sequence.
    assert chosen(on(AxisType.Auto)) == "xla"
    assert chosen(None) == "xla"


def test_programs_of_another_device_take_its_default(on_tpu):
    q = jnp.zeros((1, 512, 2, 64))
    committed = jax.device_put(q, jax.devices("cpu")[0])
    assert platform_of(q) == platform_of(np.zeros(q.shape)) == "tpu"
    for word in ("pallas", "splash", "cudnn"):  # Whatever the default is.
        call = pe.AttentionCall(is_causal=True)
        half = committed.astype(jnp.bfloat16)
        problem = api.make_problem(half, half, half, (), call)
        problem = dataclasses.replace(problem, needs_lse=False)
        assert api.IMPLEMENTATIONS[word].refusal(problem).endswith("the platform is cpu")
    for device in ("cpu", jax.devices("cpu")[0]):
        with jax.default_device(device), described("TPU v5 lite"):
            text = str(jax.make_jaxpr(lambda q: pe.attention(q, q, q))(q))
        assert "pallas_call" not in text
    with described("TPU v5 lite"):
        assert "pallas_call" in str(jax.make_jaxpr(lambda q: pe.attention(q, q, q))(q))
