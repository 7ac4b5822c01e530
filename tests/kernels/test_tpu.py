"""TPU kernels and splash attention without a TPU: interpreted, and lowered for the platform."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posenc_jax as pe
from posenc_jax.engine import api
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.problem import _AXES, Problem
from posenc_jax.engine.rule import Rule
from posenc_jax.engine.rules import ContentBias, DotBias, LogitBias
from posenc_jax.engine.splash import Splash
from posenc_jax.kernels.base import without_hidden
from posenc_jax.kernels.tpu.implementation import PallasTPU, tile_size
from posenc_jax.kernels.tpu.spec import tile_order
from posenc_jax.kernels.tpu.splash import _CausalMask, _LocalMask
from posenc_jax.kernels.tpu.tile import Strip, shear, sum_diagonals
from tests.kernels.kernel_cases import (
    arrays_of_case,
    assert_close,
    assert_equals_the_reference,
    case_of,
    described,
    exact,
    on_mesh,
    products_in_kernels,
    program,
    refusal,
    rules_of,
)
from tests.support import slow

TILES = Blocks(128, 128)
KERNELS = PallasTPU(TILES, TILES, interpret=True)
SPLASH = Splash(block=128, interpret=True)
EVERYTHING = case_of(segments=True, window=70, softcap=3.0, sinks=True, heads=6, kv_heads=3)
MORE_CASES = [
    (case_of("all pairs", segments=True, softcap=3.0, sinks=True), {"prefix": (100, 40)}, TILES),
    (case_of("several", segments=True, softcap=3.0, sinks=True), {"prefix": (100, 40)}, TILES),
    (case_of("kerple by pair", shuffled=True, window=200, kv_heads=1), {}, Blocks(256, 128)),
    (case_of("wide"), {"prefix": (100, 20)}, TILES),
    (case_of("wide", softcap=3.0), {}, TILES),
    (case_of("scaled"), {}, TILES),
    (case_of("hiding", softcap=3.0), {}, TILES),
    (case_of("unbounded", window=70), {}, TILES),
    (case_of("wide", length=600, kv_heads=1, window=70), {}, Blocks(384, 128)),
    (case_of("hiding", heads=4, kv_heads=4, dim=80), {"value_dim": 96}, TILES),
    (case_of("narrow", heads=6, kv_heads=6, dim=256, length=63), {}, TILES),
    (case_of("table", length=600), {}, Blocks(384, 640)),
    (EVERYTHING, {}, SPLASH),
    *((case_of(causal=False, window=sides), {}, SPLASH) for sides in (None, (60, 3), (-1, 3))),
    (case_of(window=(9, -1)), {}, SPLASH),
    (case_of(heads=12, kv_heads=4, dim=80), {"value_dim": 96}, SPLASH),
    (case_of(causal=False, segments=True, dim=256, heads=6, kv_heads=1, length=256), {}, SPLASH),
]


@pytest.mark.parametrize(
    ("case", "more", "blocks"),
    [
        (case_of(shuffled=True, causal=False, length=256, branches=70), {}, TILES),
        (case_of(images=True, window=(90, -1), length=256), {}, TILES),
        (case_of(causal=False, length=384, blocks=True), {}, TILES),
        (case_of("distance and pairs", length=200, window=(70, 3)), {}, TILES),
        (case_of("table", length=384, kv_heads=1, window=(70, 3), blocks=True), {}, TILES),
        (case_of("past", length=130), {}, TILES),
        (case_of("past", length=130, softcap=3.0), {}, TILES),
        (case_of(length=1100, heads=1, kv_heads=1, batch=1), {}, SPLASH),  # Parts of dq.
        *(pytest.param(*case, marks=slow) for case in MORE_CASES),
    ],
)
def test_equals_the_reference(case, more, blocks):
    """The steps of `posenc_jax.kernels.checks` compare other rules and features with float64."""
    x = arrays_of_case(case, **more)
    if blocks == SPLASH:
        assert_equals_the_reference(case, SPLASH, x, lse=False)
        return
    kernels = PallasTPU(Blocks(blocks.k, blocks.q), blocks, interpret=True)
    expected = exact(case, x) if case.rule == "none" else None
    assert_equals_the_reference(case, kernels, x, expected=expected)


def test_gradients_of_large_logits_in_bfloat16():
    """Scaled in bfloat16, q and k made errors of 3 %; in float32 0.5 %, as with "xla"."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d_out = (jax.random.normal(y, (1, 256, 1, 64), jnp.bfloat16) for y in keys)

    def grads(x, implementation):
        f = functools.partial(pe.attention, is_causal=True, implementation=implementation)
        return jax.vjp(f, *x)[1](d_out.astype(x[0].dtype))

    x = 10 * q, k, v
    expected = grads([y.astype(jnp.float32) for y in x], "reference")
    for y, y_exact in zip(grads(x, KERNELS), expected, strict=True):
        assert jnp.linalg.norm(y.astype(jnp.float32) - y_exact) < 0.01 * jnp.linalg.norm(y_exact)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("sides", [(-1, -1), (-1, 0), (70, 0), (60, 3), (0, 129), (129, 1)])
def test_tiles_without_a_visible_pair_have_no_step(sides, by_key):
    blocks, (before, after) = Blocks(128, 384), sides
    distance = np.arange(768)[:, None] - np.arange(1152)
    seen = (distance <= before) | (before < 0)
    seen &= (distance >= -after) | (after < 0)
    live = seen.reshape(6, 128, 3, 384).any((1, 3))
    live = live.T if by_key else live
    live[-1] |= by_key  # Where the gradients of queries are written.
    live |= by_key and live.mean() > 0.7
    live[~live.any(1), 0] = True
    np.testing.assert_array_equal(tile_order(768, 1152, blocks, sides, by_key), live.nonzero())


def test_default_tiles_are_large_but_pad_little():
    counts = (63, 200, 512, 640, 1100, 2048, 2560, 8192)
    sizes = [tile_size(count, jnp.bfloat16) for count in counts]
    assert sizes == [128, 256, 512, 1024, 512, 1024, 512, 1024]


def test_blocks_that_do_not_fit_are_refused():
    with pytest.raises(NotImplementedError, match="S = 1048704 are more than 8192 blocks"):
        tile_order(128, 2**20 + 128, TILES, (-1, 0), by_key=False)
    with pytest.raises(ValueError, match=r"backward must have multiples of 128 .* k=100"):
        PallasTPU(backward=Blocks(128, 100))


@slow
def test_under_x64():
    """With grouped heads, and head dims that are no whole lanes."""
    case = case_of("scaled", heads=4, kv_heads=1, dim=80, causal=False, window=(60, 3))
    with jax.enable_x64(True):
        assert_equals_the_reference(case, KERNELS)
        assert _lowered(case, arrays_of_case(case)).count("tpu_custom_call") == 2


def _vectors(shared, head, distance):
    return jnp.sin(shared * jnp.clip(distance, -5, 90).astype(jnp.float32))


def test_large_features_do_not_round_those_of_other_tokens():
    """Tiles of bfloat16 move as integers of 16 bits, in units of each token."""
    shared, random = np.linspace(0.1, 1.0, 16, dtype=np.float32), np.random.default_rng(0)
    q, features = random.normal(size=(2, 256, 2, 64)), random.normal(size=(2, 256, 2, 16))
    q, features = jnp.asarray(q, jnp.bfloat16), features.astype(np.float32)
    scaled = features.copy()
    scaled[:, 7] *= 1e4

    @functools.partial(jax.jit, static_argnums=2)
    def attend(features, q=q, implementation=KERNELS):
        rule = DotBias(_vectors, shared=shared, q_features=features, bounds=(-5, 90))
        options = {"is_causal": True, "return_lse": True, "implementation": implementation}
        return pe.attention(q, q, q, rules=rule, **options)[1]

    small, large = (np.asarray(attend(x)) for x in (features, scaled))
    np.testing.assert_array_equal(np.delete(small, 7, 1), np.delete(large, 7, 1))
    exact = attend(features, q.astype(jnp.float32), "reference")
    chex.assert_trees_all_close(small, exact, atol=0.02)


def test_keys_that_no_query_sees_are_zero():
    """Every 300 queries, 256 at a time: by a block mask, a window by coordinates, and order.

    In keys, values and features, which may hold NaN there.
    """
    at, pairs = np.arange(300, dtype=np.int32)[None], np.zeros((1, 1, 300, 300), np.float32)
    pairs[:, :, :, 11], pairs[:, :, :280, 12] = -np.inf, -np.inf
    even = pe.block_mask(lambda b, h, q, k: (q - k) % 2 == 0, 300, 300)
    coordinates = {"q_positions": at // 8, "k_positions": at // 8, "q_coordinates": at}
    window = pe.SlidingWindow((9, 20), by="coordinates")
    far = np.where((at < 5) | (at > 290), at, at + 600)  # Places of keys that few queries see.
    distance, before = at.T - far, np.minimum(at, 140)
    for options, pattern in (
        ({"mask": even}, (at.T - at) % 2 == 0),
        (
            coordinates | {"k_coordinates": far, "window": window},
            (distance >= -20) & (distance <= 8),
        ),
        ({"is_causal": True, "q_positions": before, "k_positions": at}, at <= before.T),
    ):
        seen = (pattern & (pairs[0, 0] == 0)).any(0)
        k = np.where(seen, np.float32(1), np.float32(np.nan))[None, :, None, None]
        rules = pe.DenseBias(pairs), ContentBias(lambda *x: x[3], k_features=k[..., 0])
        problem = api.make_problem(np.ones_like(k), k, k, rules, pe.AttentionCall(**options))
        p = jax.jit(without_hidden)(problem)
        for x in (p.k, p.v, p.rules[1].k_features):
            np.testing.assert_array_equal(np.ravel(x), seen)


@slow
def test_strided_rotation_equals_rotation_in_steps():
    """The compiled kernels use the first, which takes the interpreter long to compile."""
    strip = Strip.of(-256, 128, 128, 128)
    line = jnp.arange(strip.line, dtype=jnp.float32)[None]

    def kernel(line, steps, rotated, back):
        shear(strip, line, steps, rotate=False)
        shear(strip, line, rotated, rotate=True)
        back[...] = jnp.zeros_like(back)
        sum_diagonals(strip, steps, back)

    tile = jax.ShapeDtypeStruct((128, strip.width), jnp.float32)
    shape = tile, tile, jax.ShapeDtypeStruct(line.shape, jnp.float32)
    steps, rotated, back = pl.pallas_call(kernel, out_shape=shape, interpret=True)(line)
    r, x = np.arange(128)[:, None], np.arange(strip.width)[None]
    expected = np.asarray(line)[0, x + 127 - r]
    np.testing.assert_array_equal(steps, expected)
    np.testing.assert_array_equal(rotated, expected)
    # The transpose: each entry of the line once for every pair that reads it.
    count = np.bincount((x + 127 - r).ravel(), minlength=strip.line)
    np.testing.assert_array_equal(back[0], np.asarray(line)[0] * count)


COMPILED = PallasTPU(cross_compile=True)


def _lowered(case, x, kernels=COMPILED):
    shapes = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), x)
    traced = program(case, kernels, lse=kernels == COMPILED).trace(shapes)
    return traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    ("case", "sinks", "kernels"),
    [
        (case_of("table", heads=4), True, COMPILED),
        pytest.param(case_of("wide", heads=4, softcap=3.0), False, COMPILED, marks=slow),
        pytest.param(case_of("pair", causal=False, segments=True), False, COMPILED, marks=slow),
        (EVERYTHING, False, Splash(cross_compile=True)),
        (case_of(causal=False), False, Splash(cross_compile=True)),
    ],
)
def test_lowers_for_tpu(case, sinks, kernels):
    case = dataclasses.replace(case, length=1100, dim=128, dtype="bfloat16")
    x = arrays_of_case(case, sinks_per_query=sinks)
    assert _lowered(case, x, kernels).count("tpu_custom_call") == 2


def _sines(shared, head, q, k):
    return head * jnp.sin((q - k).astype(jnp.float32))


def test_what_has_no_kernel_is_refused_with_the_reason():
    jax.eval_shape(_refusals)  # Nothing is computed: a refusal is known from shapes.


def _refusals():
    positions = {"q_positions": jnp.arange(64), "k_positions": jnp.arange(64)}
    for options, reason in (
        ({"rules": rules_of("fire", 64)}, "a number per head"),
        ({"rules": rules_of("whole", 64)}, "whole rows"),
        ({"rules": rules_of("narrow", 64)} | positions, "per distance, where positions"),
        ({"rules": rules_of("shaw", 64)}, "values"),
        ({"rules": LogitBias(_sines, heads=jnp.ones(2))}, "operation sin"),
        ({"mask": jnp.ones((1, 1, 64, 64), bool)}, "mask"),
        ({"dtype": jnp.float16}, "bfloat16 or"),
        ({"rules": pe.DenseBias(jnp.zeros((1, 1, 64, 64), jnp.float16))}, "bfloat16 or float32"),
        ({"implementation": "pallas"}, "platform is cpu"),
    ):
        assert reason in refusal(**{"implementation": KERNELS} | options)


def _attention_of(length, kind="TPU v5 lite", batch=1, group=1, backward=True, **settings):
    """Traces attention of [batch, length, group, 128] on a TPU of a kind."""
    q = jax.ShapeDtypeStruct((batch, length, group, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((batch, length, 1, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    implementation = PallasTPU(cross_compile=True, **settings)

    def loss(q, k, ids):
        options = {"q_segment_ids": ids, "contiguous": True, "implementation": implementation}
        return jnp.sum(pe.attention(q, k, k, is_causal=True, **options).astype(jnp.float32))

    with described(kind):
        return jax.eval_shape(jax.grad(loss) if backward else loss, q, k, ids).shape


LONG = {"length": 2**17, "group": 4}


def test_a_backward_pass_that_exceeds_the_memory_is_refused_before_the_forward_pass():
    """The gradients of a head's queries stay in memory, and with groups its keys' gradients."""
    message = (
        r"backward pass of T = 131072, .* groups of 4 heads needs 2\d\d MiB of VMEM .* use 100"
    )
    with pytest.raises(NotImplementedError, match=message):
        _attention_of(**LONG, backward=False)
    assert _attention_of(**LONG, backward=False, forward_only=True) == ()
    with pytest.raises(NotImplementedError, match=r"forward_only=True. has no derivatives"):
        _attention_of(**LONG, forward_only=True)


@slow
def test_chips_with_less_memory_or_without_the_rotations_refuse():
    """v5p and 7x have 64 MiB of VMEM, v5e and v6e 128; Mosaic has no strided rotation for v4."""
    for kind in ("TPU v6 lite", "TPU v5", "TPU7x"):
        length = 2**17 if kind == "TPU v6 lite" else 2**16
        assert _attention_of(length, kind) == (1, length, 1, 128)
    for kind in ("TPU v5", "TPU7x"):
        with pytest.raises(NotImplementedError, match="MiB of VMEM and may use 60"):
            _attention_of(2**17, kind)
    with pytest.raises(NotImplementedError, match="TPU v5e, v5p, v6e and 7x, and this is TPU v4"):
        _attention_of(256, "TPU v4")


def test_schedules_that_exceed_the_memory_for_scalars_are_refused():
    """4 bytes per tile and row: of 1024 x 1024 tiles there are 8256, of 128 x 128 32,896."""
    small = {"forward": TILES, "backward": TILES}
    assert _attention_of(2**15, batch=7, **small) == (7, 2**15, 1, 128)
    for sizes in ({"batch": 8, "length": 2**15, **small}, {"batch": 32, "length": 2**17}):
        with pytest.raises(NotImplementedError, match=r"10\d\d KiB of SMEM .* may use 992"):
            _attention_of(**sizes)


def test_the_batch_of_one_device_counts():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    q = jax.ShapeDtypeStruct((32, 2**15, 1, 128), jnp.bfloat16, sharding=sharding)
    ids = jax.ShapeDtypeStruct((32, 2**15), jnp.int32, sharding=sharding)
    kernels = PallasTPU(TILES, TILES, cross_compile=True)
    options = {"is_causal": True, "contiguous": True, "implementation": kernels}

    def attend(q, ids):
        return pe.attention(q, q, q, q_segment_ids=ids, **options)

    with jax.set_mesh(mesh):
        assert jax.eval_shape(attend, q, ids).shape == q.shape


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [(jnp.bfloat16, "highest", "DEFAULT"), (jnp.float32, "default", "HIGHEST")],
)
@pytest.mark.parametrize(
    ("kernels", "rules", "length", "count"),
    [(KERNELS, pe.ALiBi(num_heads=2).rules({}), 256, 7), (SPLASH, (), 1280, 9)],
)
def test_the_dtype_alone_sets_the_precision(
    kernels, rules, length, count, dtype, precision, expected
):
    """In both passes; Mosaic refuses products of bfloat16 under the setting "highest"."""
    q = jax.ShapeDtypeStruct((1, length, 2, 64), dtype)

    def step(q):
        out = pe.attention(q, q, q, rules=rules, is_causal=True, implementation=kernels)
        return jnp.sum(out.astype(jnp.float32))

    with jax.default_matmul_precision(precision):
        products = products_in_kernels(jax.make_jaxpr(jax.grad(step))(q).jaxpr)
    assert len(products) >= count
    assert {p.name for e in products for p in e.params["precision"]} == {expected}


@pytest.mark.parametrize("kernels", [KERNELS, SPLASH])
def test_derivatives_that_they_lack_are_refused(kernels):
    def loss(q):
        return jnp.sum(pe.attention(q, q, q, implementation=kernels) ** 2)

    q = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.float32)
    for twice in (jax.grad(lambda q: jnp.sum(jax.grad(loss)(q) ** 2)), jax.hessian(loss)):
        with pytest.raises(NotImplementedError, match="first derivatives in reverse mode only"):
            jax.eval_shape(twice, q)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jit(jax.jacfwd(loss)).lower(q)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@slow
@pytest.mark.parametrize(
    ("case", "kind", "batch"),
    [
        (case_of("all pairs", dropout=0.3, segments=True, kv_heads=8), EXPLICIT, "data"),
        (case_of("unbounded", causal=False, segments=True, kv_heads=8), EXPLICIT, "data"),
        (case_of("narrow", kv_heads=8), EXPLICIT, "data"),
        (case_of(kv_heads=4), AUTO, "data"),
        (case_of("table", dropout=0.3), AUTO, None),
        (case_of("table", dropout=0.3), AUTO, "data"),
        (case_of("separable", segments=True, kv_heads=8), AUTO, "data"),
    ],
)
def test_batch_and_heads_over_devices(case, kind, batch):
    """Four devices have two key heads; nothing but the sums of gradients is sent."""
    case = dataclasses.replace(case, heads=8)
    mesh = jax.make_mesh((2, 4), ("data", "heads"), axis_types=(kind,) * 2)
    axes = {} if kind == EXPLICIT else {"batch_axes": batch, "head_axes": "heads"}
    x = arrays_of_case(case)
    with jax.set_mesh(mesh):
        spread = on_mesh(mesh, x, batch, "heads")
        compiled = program(case, dataclasses.replace(KERNELS, **axes)).lower(spread).compile()
        got = jax.device_get(compiled(spread))
    assert_close(got, jax.device_get(program(case, "reference")(x)))
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    sent = set(re.findall(rf" = .*? ({kinds})\(", compiled.as_text()))
    # An explicit table is whole on every device, and so is its gradient.
    sums = {"all-reduce", "all-gather"} if kind == EXPLICIT else {"all-reduce"}
    # Whether the tokens of every segment lie side by side is one bool for all rows.
    learns_nothing = case.rule in ("none", "separable") and not case.segments
    assert sent == (set() if learns_nothing else sums)


@slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_arrays_that_are_whole_on_every_device(kind):
    """Without any axis in their sharding; a kernel on several devices must be in a shard_map."""
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(kind,))
    kernels = PallasTPU(cross_compile=True, **({"head_axes": ()} if kind == AUTO else {}))
    case = case_of("table")
    traced = program(case, kernels).trace(on_mesh(mesh, arrays_of_case(case), None, None))
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 2


def test_what_cannot_be_sharded_is_refused():
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(AUTO,))
    whole = NamedSharding(mesh, PartitionSpec())
    q, k = (jax.device_put(np.zeros((2, 128, n, 64), np.float32), whole) for n in (12, 6))
    for axes, message in (
        (("heads",), "6 key heads .* 4 devices"),
        ("model", "'model' is no axis"),
    ):
        with pytest.raises(ValueError, match=message):
            pe.attention(q, k, k, implementation=dataclasses.replace(KERNELS, head_axes=axes))
    with pytest.raises(NotImplementedError, match=r"automatic axes \('heads',\).*batch_axes="):
        pe.attention(q, k, k, implementation=KERNELS)


def test_every_array_of_a_problem_is_sharded_by_its_axes():
    """By letters that fields declare: a field without them is an error, not sharded by row."""
    fields = (x for x in dataclasses.fields(Problem) if not x.metadata.get("static"))
    assert {x.name for x in fields} == {*_AXES, "rules", "block_mask"}
    rules = (x for x in Rule.__subclasses__() if x.__module__.startswith("posenc_jax"))
    for rule in (*rules, pe.BlockMask):
        for field in dataclasses.fields(rule) if dataclasses.is_dataclass(rule) else ():
            assert field.metadata.get("static") or field.name in rule.axes, (rule, field.name)


@slow
def test_layers_of_splash_that_are_scanned_and_computed_again():
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
def test_what_splash_lacks_is_refused_by_name(options, message):
    assert re.search(f'implementation="splash": .*{message}', refusal(SPLASH, **options))


def test_splash_is_named_and_checked():
    assert "for the platform tpu, and the platform is cpu" in refusal("splash")
    with pytest.raises(ValueError, match=r"Splash: block must be a multiple of 128 .* got 100"):
        Splash(block=100)


@pytest.mark.parametrize("sides", ["causal", (None, 0), (None, 100), (200, 0), (300, 150), (0, 0)])
def test_blocks_of_masks_of_splash_are_those_of_jax(sides):
    shape, block = (768, 640), 128
    if sides == "causal":
        ours, theirs = _CausalMask(shape), masks.CausalMask(shape)
    else:
        ours, theirs = _LocalMask(shape, sides, 0), masks.LocalMask(shape, sides, 0)
    for i, j in np.ndindex(6, 5):
        index = slice(block * i, block * (i + 1)), slice(block * j, block * (j + 1))
        np.testing.assert_array_equal(ours[index], theirs[index])


@slow
@pytest.mark.parametrize(("kind", "kv_heads"), [(EXPLICIT, 2), (AUTO, 8)])
def test_splash_over_devices(kind, kv_heads):
    """Each of four devices takes one of two key heads.

    Some queries see nothing: splash attention gives them the mean of all values. Padding holds NaN.
    """
    mesh = jax.make_mesh((2, 4), ("data", "heads"), axis_types=(kind,) * 2)
    case = case_of(causal=False, segments=True, heads=8, kv_heads=kv_heads)
    axes = {"batch_axes": "data", "head_axes": "heads"} if kind == AUTO else {}
    x = arrays_of_case(case)
    ids = x["q_segment_ids"]
    x["k_segment_ids"] = np.where(ids == 0, 5, ids)  # No key has the first segment.

    with jax.set_mesh(mesh):
        run = program(case, dataclasses.replace(SPLASH, **axes), False)
        got = jax.device_get(run(on_mesh(mesh, x, "data", "heads")))
    assert_close(got, jax.device_get(program(case, "reference", False)(x)), 3e-6)
    sees = (ids == 1)[:, None, :, None]
    assert not sees.all() and not np.any(got["output"] * ~sees) and not np.any(got["dq"] * ~sees)


def test_splash_inside_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AUTO,))
    q = jnp.zeros((2, 200, 2, 64))

    def attend(check):
        run = functools.partial(pe.attention, is_causal=True, implementation=SPLASH)
        specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec("data")}
        return jax.shard_map(run, mesh=mesh, **specs, check_vma=check)(q, q, q)

    with pytest.raises(NotImplementedError, match="needs check_vma=False"):
        jax.eval_shape(lambda: attend(True))
    assert jax.eval_shape(lambda: attend(False)).shape == q.shape
