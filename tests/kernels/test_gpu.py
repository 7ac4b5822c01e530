"""GPU kernels without a GPU: interpreted against the reference, and lowered for the platform.

The interpreter simulates warpgroups, shared memory, copies and barriers. Products there take
float32 operands too, which shows errors that the rounding of bfloat16 would hide. It compiles each
block of threads anew, so two small cases run by default: features of tokens, with gradients, and
half precision, whose pipes have two slots. Slow cases are the others.
"""

import dataclasses
import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.kernels.checks.steps import steps
from posenc_jax.kernels.gpu import forward, implementation, tile
from posenc_jax.kernels.gpu.implementation import PallasGPU
from tests.kernels import tma
from tests.kernels.kernel_cases import (
    arrays_of_case,
    assert_equals_the_reference,
    case_of,
    program,
    refusal,
    rules_of,
)
from tests.support import gpu_interpreted, gpu_lowered, slow

KERNELS = PallasGPU(interpret=True)
COMPILED = PallasGPU(cross_compile=True)
MORE_CASES = [
    (case_of("hiding", softcap=3.0, length=128), {}),
    (case_of("past", softcap=3.0, length=128), {}),
    (case_of("table", length=384, kv_heads=1, window=70, blocks=True), {}),
    (case_of("pair", segments=True, kv_heads=1), {}),
    (case_of("narrow", causal=False, segments=True), {}),
    (case_of("narrow", softcap=3.0), {}),
    (case_of("wide", segments=True, kv_heads=1), {}),
    (case_of("wide", causal=False, window=(60, 3), length=300), {}),
    (case_of("unbounded"), {}),
    (case_of("by query head", segments=True, kv_heads=1), {}),
    (case_of("kerple by pair", shuffled=True, window=200, kv_heads=1), {}),
    (case_of("separable"), {}),
    (case_of("table"), {"sinks_per_query": True}),
    (case_of("table", heads=6, dim=256, length=63, batch=1), {}),
    (case_of("pair", heads=4, kv_heads=4, dim=128, length=63, batch=1), {"value_dim": 64}),
    (case_of(), {"prefix": (100, 20)}),
    (case_of("table", segments=True, kv_heads=1, branches=90), {}),
    (case_of(shuffled=True, causal=False, length=300, branches=70), {}),
    (case_of("slopes", images=True, window=(90, 20), kv_heads=1), {}),
    (case_of(images=True, causal=False, window=(90, 20), length=128), {}),
]


@gpu_interpreted
@pytest.mark.parametrize(
    ("case", "more"),
    [
        (case_of("pair", causal=False, segments=True, length=120, batch=1, branches=50), {}),
        *(pytest.param(*case, marks=slow) for case in MORE_CASES),
    ],
)
def test_equals_the_reference(case, more):
    assert_equals_the_reference(case, KERNELS, arrays_of_case(case, **more))


@slow
@gpu_interpreted
@pytest.mark.parametrize(
    ("moves_registers", "case"),
    [
        (True, case_of("pair", segments=True, kv_heads=1, length=63, batch=1)),
        (False, case_of("narrow", softcap=3.0, kv_heads=1, length=130, batch=1)),
    ],
)
def test_a_third_warpgroup_copies_or_the_second(moves_registers, case, monkeypatch):
    """By the version of JAX, in the backward pass: in float32 the forward pass has one slot."""
    monkeypatch.setattr(implementation, "MOVES_REGISTERS", moves_registers)
    assert_equals_the_reference(case, KERNELS, arrays_of_case(case))


@gpu_interpreted
def test_the_second_warpgroup_copies_in_the_forward_pass():
    """One block of queries goes through three tiles of keys: the last one takes a slot again."""
    (step,) = (x for x in steps(KERNELS, small=True) if x.name == "forward: last queries")
    changes = {"batch": 1, "heads": 1, "kv_heads": 1, "dim": 64, "length": 128, "later": 250}
    case = dataclasses.replace(step.case, softcap=3.0, **changes)
    assert dataclasses.replace(step, case=case).run() is None


@gpu_lowered
def test_the_second_warpgroup_copies_before_it_waits_for_its_turn(monkeypatch):
    """The first one hands over its turn when it has keys: the other order waits for ever."""
    calls = []

    def record(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: calls.append(name) or function(*args))

    monkeypatch.setattr(implementation, "MOVES_REGISTERS", False)
    record(forward.Forward, "start")
    record(forward, "_next_turn")
    q = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    attend = functools.partial(pe.attention, softcap=3.0, implementation=COMPILED)
    jax.eval_shape(attend, q, q, q)
    assert calls[:2] == ["start", "_next_turn"]


@gpu_lowered
def test_entries_are_read_where_there_are_some():
    """Of blocks without tiles too: the second warpgroup copies, and counts tiles with rules."""
    from posenc_jax.engine.blocks import Visibility
    from posenc_jax.kernels.gpu.backward import KeyGrads
    from posenc_jax.kernels.gpu.forward import Refilled

    flags = {field.name: False for field in dataclasses.fields(Visibility)}
    see = Visibility(**flags | {"window": None, "horizon": None})
    wg, read = types.SimpleNamespace(number=1), []
    for count, t in ((0, 0), (3, 2), (3, 7)):
        kernel = types.SimpleNamespace(
            spec=types.SimpleNamespace(visibility=see),
            count=lambda wg, count=count: jnp.int32(count),
            entry=lambda wg, t: read.append(int(t)) or jnp.int32(1),
            fill=lambda wg, t, ruled: None,
        )
        Refilled._fill_if(kernel, wg, jnp.int32(t), jnp.int32(0))
    assert read == [0, 2, 2]
    group = types.SimpleNamespace(group=4)  # Dividing by 0 may return any number.
    kernel = types.SimpleNamespace(spec=group, _tiles=lambda wg: (jnp.int32(0), None))
    assert KeyGrads._split(kernel, wg, jnp.int32(0)) == (0, 0)


def _values(x, thread):
    """Evaluates integer arithmetic of MLIR for the numbers of threads."""
    operation = x.owner.operation if hasattr(x.owner, "operation") else x.owner
    name = operation.name.removeprefix("arith.")
    if name == "constant":
        return np.int64(operation.attributes["value"].value)
    if name in ("gpu.thread_id", "gpu.block_dim"):
        if "x" not in str(operation.attributes["dimension"]).removeprefix("#gpu<dim "):
            return np.int64(name == "gpu.block_dim")
        return thread if name == "gpu.thread_id" else np.int64(len(thread))
    operands = [_values(y, thread) for y in operation.operands]
    casts = ("index_cast", "index_castui", "trunci", "extui", "extsi", "llvm.inline_asm")
    if name in casts:  # The only assembly hides a value from the compiler.
        return operands[0]
    functions = {"addi": np.add, "subi": np.subtract, "muli": np.multiply, "andi": np.bitwise_and}
    functions |= {"divui": np.floor_divide, "divsi": np.floor_divide, "remui": np.remainder}
    functions |= {"remsi": np.remainder, "shrui": np.right_shift, "shli": np.left_shift}
    return functions[name](*operands)


@gpu_lowered
@pytest.mark.parametrize("columns", [128, 64, 32])
def test_the_compiled_gather_reads_the_place_of_each_register(columns, monkeypatch):
    """The branch of `gather` that no interpreter runs, evaluated for the 128 threads of a group.

    Rows and columns are those that PTX documents for accumulators of wgmma (m64nNk16, "D"), and
    those of JAX's layout; addresses are functions of them.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import func

    from posenc_jax.kernels.gpu import gather

    of_layout, places, addresses, shape = [], [], [], (64, columns)
    for_each = mgpu.FragmentedArray.foreach

    def recorded(tile, function, **options):
        def both(value, place):
            of_layout.append(place)
            return function(value, place)

        return for_each(tile, both, **options)

    def element(*place):
        places.append(place)
        row, column = map(gather._Index, place)
        addresses.append(((row - column + 5) & 63).value)
        return mgpu.c(0.0, ir.F32Type.get())

    monkeypatch.setattr(mgpu.FragmentedArray, "foreach", recorded)
    with mgpu.core.mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("f", ir.FunctionType.get([], []))
            with ir.InsertionPoint(function.add_entry_block()):
                gather._from_indices(shape, element)
                func.ReturnOp([])
        thread = np.arange(128)
        emitted, layout = (
            np.array([[np.broadcast_to(_values(x, thread), 128) for x in p] for p in group])
            for group in (places, of_layout)
        )
        computed = np.array([_values(x, thread) for x in addresses])
    register = np.arange(columns // 2)[:, None]
    rows = thread // 32 * 16 + thread % 32 // 4 + register // 2 % 2 * 8
    ptx = np.stack([rows, thread % 4 * 2 + register // 4 * 8 + register % 2], 1)
    np.testing.assert_array_equal(emitted, ptx)
    np.testing.assert_array_equal(layout, ptx)
    np.testing.assert_array_equal(computed, (ptx[:, 0] - ptx[:, 1] + 5) & 63)
    assert len({*zip(ptx[:, 0].flat, ptx[:, 1].flat, strict=True)}) == 64 * columns


@gpu_interpreted
def test_slots_of_a_pipe_are_read_before_they_are_filled_again():
    """Threads read five blocks through two slots, one by distance; the interpreter finds races."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from posenc_jax.kernels.gpu import gather, pipe
    from posenc_jax.kernels.gpu.spec import ROWS

    checked = plgpu.InterpretGPUParams(detect_races=True)
    x = np.arange(5 * ROWS * ROWS).reshape(5, ROWS, ROWS).astype(np.float16) % 1021
    line = np.arange(5 * 2 * ROWS, dtype=np.float32).reshape(5, 2 * ROWS)

    def compute(wg):
        for n in map(jnp.int32, range(5)):
            blocks = wg.scratch["pipe"].wait(n)
            added = gather.by_distance(blocks["line"], (ROWS, ROWS), 0, ROWS, checked)
            tile = blocks["x"][...].astype(jnp.float32) + added
            wg.scratch["pipe"].release(n)
            wg.out_refs.at[wg.number, n][...] = tile

    def copy(wg):
        for n in map(jnp.int32, range(5)):
            sources = {name: ref.at[n] for name, ref in wg.refs.items()}
            wg.scratch["pipe"].fill(n, **sources)

    spec = types.SimpleNamespace(wide=False)
    sizes = {"x": (ROWS, ROWS), "line": (2 * ROWS,)}
    got = pipe.launch(
        "test",
        compute,
        copy,
        grid={"i": 1},
        inputs={"x": x, "line": line},
        out_types=jax.ShapeDtypeStruct((2, *x.shape), jnp.float32),
        scratch_types={"pipe": pipe.pipe(spec, 2, jnp.float16, **sizes)},
        moves_registers=True,
        interpret=checked,
    )
    row, column = np.indices((ROWS, ROWS))
    want = x.astype(np.float32) + line[:, ROWS + row - column]
    np.testing.assert_array_equal(got, np.stack([want] * 2))


@slow
@gpu_interpreted
def test_under_vmap():
    """Several seeds at once with a table each, as experiments train them."""
    random, scheme = np.random.default_rng(0), pe.T5(num_heads=2)
    q, k, v, weights = random.normal(size=(4, 2, 1, 70, 2, 64)).astype(np.float32)
    table = random.normal(size=(2, 2, 32)).astype(np.float32)

    def outcome(implementation):
        def loss(table, q, k, v, weights):
            rules = scheme.rules({"table": table})
            out = pe.attention(q, k, v, rules=rules, is_causal=True, implementation=implementation)
            return (out * weights).sum()

        return jax.vmap(jax.value_and_grad(loss, (0, 1, 2, 3)))(table, q, k, v, weights)

    chex.assert_trees_all_close(outcome(KERNELS), outcome("reference"), rtol=1e-5, atol=3e-4)


@slow
@gpu_interpreted
@pytest.mark.parametrize(("rule", "value_dim"), [("table", 96), ("unbounded", 64)])
def test_the_checking_interpreter_finds_nothing(rule, value_dim):
    """Races, and memory that was never written, where slots of shared memory are used again."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    checked = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    case = case_of(rule, segments=True, kv_heads=1, length=300, batch=1)
    kernels = dataclasses.replace(KERNELS, interpret=checked)
    assert_equals_the_reference(case, kernels, arrays_of_case(case, value_dim=value_dim))


@slow
@gpu_interpreted
@pytest.mark.parametrize(
    ("rule", "dtype", "times"),
    [
        ("table", "bfloat16", 1.05),
        ("table", "float16", 1.05),
        ("narrow", "float16", 1.8),
        ("narrow", "bfloat16", 1.3),
    ],
)
def test_errors_are_near_those_of_tiles_in_xla(rule, dtype, times):
    """Both round outputs before the backward pass reads them, which the reference does not."""
    case = case_of(rule, length=100, batch=1, dtype=dtype)
    x = arrays_of_case(case)
    wide = {name: np.asarray(x[name], np.float32) for name in ("q", "k", "v", "d_out")}
    got, tiles = (jax.device_get(program(case, y)(x)) for y in (KERNELS, "xla"))
    exact = jax.device_get(program(case, "reference")(x | wide))
    for a, b, y in zip(*map(jax.tree.leaves, (got, tiles, exact)), strict=True):
        a, b, y = (np.asarray(z, np.float32) for z in (a, b, y))
        size = np.linalg.norm(y)
        assert np.linalg.norm(a - y) <= times * np.linalg.norm(b - y) + 3e-5 * size


@slow
@gpu_lowered
@pytest.mark.parametrize(
    ("case", "sinks", "kernels"),
    [
        (case_of("table"), True, 4),
        (case_of("by query head"), False, 6),
        (case_of("hiding", softcap=3.0), False, 4),
        (case_of("wide", softcap=3.0), False, 7),
    ],
)
def test_lowers_for_gpus(case, sinks, kernels):
    sizes = {"length": 1100, "heads": 4, "dim": 64 if kernels > 4 else 128, "dtype": "bfloat16"}
    x = arrays_of_case(dataclasses.replace(case, **sizes), sinks_per_query=sinks)
    shapes = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), x)
    with tma.audited() as descriptors:
        traced = program(case, COMPILED).trace(shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels
    assert len(descriptors) > 2 * kernels


@gpu_lowered
@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=slow)])
def test_gradients_over_devices(inside):
    """Inside of the caller's `shard_map` or our own, results vary over the axes of the mesh."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    kernels = COMPILED if inside else dataclasses.replace(COMPILED, batch_axes="data")
    batch, whole = (jax.sharding.PartitionSpec(*axes) for axes in (("data",), ()))
    scheme = pe.T5(num_heads=2)

    def attend(params, q):
        options = {"is_causal": True, "implementation": kernels}
        out, _ = pe.scheme_attention(scheme, params, q, q, q, **options)
        assert jax.typeof(out).mat.varying == ({"data"} if inside else set())
        return out

    if inside:
        attend = jax.shard_map(attend, mesh=mesh, in_specs=(whole, batch), out_specs=batch)
    q = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)
    loss = jax.grad(lambda *args: attend(*args).astype(jnp.float32).sum(), (0, 1))
    with jax.set_mesh(mesh):
        traced = jax.jit(loss).trace(scheme.init(jax.random.key(0)), q)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 4


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"sizes": [2] * 6, "strides": [16] * 5 + [1], "box": [1] * 6}, "1 to 5 axes"),
        ({"strides": [8192, 68, 1]}, "multiples of 16 bytes"),
        ({"strides": [8192, 64, 2]}, "is contiguous"),
        ({"box": [2, 16, 64]}, "inside of the array"),
        ({"sizes": [1, 512, 64], "box": [1, 257, 64]}, "1 to 256"),
        ({"sizes": [1, 128, 0]}, "1 to 2^32"),
        ({"box": [1, 16, 4]}, "row of a box is a multiple of 16"),
        ({"swizzle": 64}, "at most the swizzle"),
    ],
)
def test_what_the_driver_refuses_is_found(change, fault):
    """By the documentation of cuTensorMapEncodeTiled; a copy of 16 x 64 numbers of 16 bits."""
    right = {"sizes": [1, 128, 64], "strides": [8192, 64, 1], "box": [1, 16, 64]}
    broken = tma.faults(**right | {"item": 2, "swizzle": 128} | change)
    assert any(fault in rule for rule in broken) if fault else not broken


def _operations(shared, head, q, k):
    """Operations, in derivatives too, for which Mosaic has no rule."""
    x = (q - k).astype(jnp.float32)
    powers = (2 + jnp.abs(x)) ** -1 + (2 + jnp.abs(x)) ** -3
    return head * x * head * x + head * (jnp.floor(x / 3) + powers) + x / (1 + (head * x) ** 2)


@slow
@gpu_lowered
def test_operations_of_rules_lower_for_gpus():
    q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    heads = jax.ShapeDtypeStruct((2,), jnp.float32)

    def loss(q, heads):
        rule = pe.LogitBias(_operations, heads)
        return pe.attention(q, q, q, rules=rule, implementation=COMPILED).astype("f4").sum()

    traced = jax.jit(jax.grad(loss, (0, 1))).trace(q, heads)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("custom_call @mosaic_gpu") >= 3


def test_the_floor_of_gpu_kernels_is_exact():
    x = np.r_[-7:7:0.25, 1e9, -1e9, 2.0**23 - 0.5, 2.0**23 + 1].astype(np.float32)
    np.testing.assert_array_equal(tile._LOWERED["floor"](x), np.floor(x))


def _remainder(shared, head, q, k):
    """x - y floor(x / y) rounds: the remainder of 1e9 by 3 would be 0, not 1."""
    return head * jnp.remainder((q - k).astype(jnp.float32), 3.0)


def test_what_has_no_kernel_is_refused_with_the_reason():
    jax.eval_shape(_refusals)  # Nothing is computed: a refusal is known from shapes.


def _refusals():
    if jax.__version_info__ < (0, 11, 2):
        assert "jax 0.11.2" in refusal(COMPILED)
        return
    pair, many = (pe.DenseBias(jnp.zeros((n, 2, 64, 64), jnp.bfloat16)) for n in (1, 40_000))
    places = {"q_coordinates": jnp.zeros((1, 64), int), "k_coordinates": jnp.zeros((1, 64))}
    for options, reason in (
        # The shared memory has no room for two kinds of vectors.
        ({"rules": rules_of("narrow", 128), "dim": 128}, "per distance, with [128, 3] numbers"),
        ({"rules": rules_of("narrow", 256), "dim": 256}, "per distance, with [256, 3] numbers"),
        ({"rules": rules_of("fire", 64)}, "a number per head"),
        ({"rules": (pair, pair)}, "add them up"),
        ({"rules": (pair, *rules_of("wide", 64))}, "with a vector of a token"),
        ({"rules": many, "batch": 40_000}, "more than 65,535 rows and heads"),
        ({"rules": pe.ALiBi(num_heads=2).rules({})} | places, "or not integers"),
        (
            {"rules": pe.LogitBias(_remainder, jnp.ones(2))},
            "the operation rem of floats, which the kernels do not have, needs",
        ),
        ({"mask": jnp.ones((1, 1, 64, 64), bool)}, "mask"),
        ({"dtype": jnp.float32}, "bfloat16 or"),
        ({"dim": 512}, "beyond 256"),
        ({"batch": 70_000}, "beyond 65,535 rows"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "dropout"),
        ({"implementation": PallasGPU()}, "platform is cpu"),
    ):
        assert reason in refusal(**{"implementation": COMPILED} | options)
