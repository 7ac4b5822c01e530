"""GPU kernels without a GPU: interpreted against the reference, and lowered for the platform.

The interpreter simulates warpgroups, shared memory, copies and barriers. Products there take
float32 operands too, which shows errors that the rounding of bfloat16 would hide. It compiles each
block of threads anew, so two small cases run by default: a bias by distance, and features of
tokens. Slow cases are the others.
"""

import dataclasses
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.rules import LogitBias
from posenc_jax.kernels.gpu import tile
from posenc_jax.kernels.gpu.implementation import PallasGPU
from tests.engine.rules import KINDS
from tests.kernels import tma
from tests.kernels.kernel_cases import B, assert_close, case_of, outcome
from tests.support import gpu_interpreted, gpu_lowered, slow

KERNELS = PallasGPU(interpret=True)
COMPILED = PallasGPU(cross_compile=True)


CASES = [("same_for_all", "softcap", 128), ("gate", "both_ways_segments", 128)]
CASES += [("hiding", "softcap", 128)]
CASES += [("narrow", "both_ways_segments", 200), ("wide", "segments", 200)]
CASES += [("unbounded", "causal", 200), ("by_query_head", "segments", 200)]
CASES += [("narrow", "softcap", 200), ("wide", "two_sided_window", 300)]
CASES += [("none", "both_ways_segments", 200), ("kerple_by_pair", "permuted", 200)]
CASES += [("gate", "segments", 200)]
CASES += [("none", f, 200) for f in ("plain", "permuted", "two_sided_window", "prefix")]
CASES += [("alibi", "two_sided_window", 200), ("t5", "sinks", 200), ("t5", "window", 200)]
CASES += [("kerple", "causal", 200), ("separable", "causal", 200)]


TOLERANCE = {"unbounded": 1e-4}  # Its logits are about 100, which float32 rounds to 1e-5.


@slow
@gpu_interpreted
@pytest.mark.parametrize(("rule", "feature", "length"), CASES)
def test_equals_the_reference(rule, feature, length):
    kv_heads = 1 if feature in ("segments", "permuted") else 2
    sizes = {"length": length, "kv_heads": kv_heads}
    got = outcome(KERNELS, *case_of(feature, rule, **sizes))
    expected = outcome("reference", *case_of(feature, rule, explicit=True, **sizes))
    assert_close(got, expected, TOLERANCE.get(rule, 3e-5))
    for leaf in jax.tree.leaves(got[0]):
        assert np.any(np.asarray(leaf) != 0)


def _one_row(case):
    rule, static, *inputs = case
    rows = ("q", "k", "v", "weights", "lse_weights", "q_segment_ids")
    return rule, static, *({n: x[:1] if n in rows else x for n, x in y.items()} for y in inputs)


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
@pytest.mark.parametrize(
    ("rule", "feature", "heads"),
    [
        ("gate", "both_ways_segments", 2),
        pytest.param("narrow", "causal", 1, marks=slow),
    ],
)
def test_one_row_equals_the_reference(rule, feature, heads):
    case = _one_row(case_of(feature, rule, length=120, heads=heads, kv_heads=heads))
    assert_close(outcome(KERNELS, *case), outcome("reference", *case))


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
        interpret=checked,
    )
    row, column = np.indices((ROWS, ROWS))
    want = x.astype(np.float32) + line[:, ROWS + row - column]
    np.testing.assert_array_equal(got, np.stack([want] * 2))


@gpu_interpreted
@pytest.mark.parametrize(
    ("rule", "sizes"),
    [
        pytest.param("t5", {"heads": 2, "dim": 80, "value_dim": 96}, marks=slow),
        pytest.param("unbounded", {"heads": 1}, marks=slow),
    ],
)
def test_the_checking_interpreter_finds_nothing(rule, sizes):
    """Races, and memory that was never written, where slots of shared memory are used again."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    checked = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    case = _one_row(case_of("segments", rule, kv_heads=1, length=300, **sizes))
    kernels = dataclasses.replace(KERNELS, interpret=checked)
    expected = outcome("reference", *case)
    assert_close(outcome(kernels, *case), expected, TOLERANCE.get(rule, 3e-5))


@slow
@gpu_interpreted
@pytest.mark.parametrize(
    ("rule", "sizes"),
    [
        ("t5", {"heads": 3, "kv_heads": 1, "dim": 80, "value_dim": 96}),
        ("t5", {"heads": 6, "kv_heads": 2}),
        ("t5", {"heads": 2, "kv_heads": 1, "dim": 256}),
        ("gate", {"heads": 4, "dim": 128, "value_dim": 64}),
    ],
)
def test_sizes_and_grouped_heads_equal_the_reference(rule, sizes):
    case = _one_row(case_of("causal", rule, length=63, **sizes))
    assert_close(outcome(KERNELS, *case), outcome("reference", *case))


@slow
@gpu_interpreted
@pytest.mark.parametrize(
    ("rule", "dtype", "times"),
    [
        ("t5", jnp.bfloat16, 1.05),
        ("t5", jnp.float16, 1.05),
        ("narrow", jnp.float16, 1.8),
        ("narrow", jnp.bfloat16, 1.3),
    ],
)
def test_errors_are_near_those_of_tiles_in_xla(rule, dtype, times):
    """Both round outputs before the backward pass reads them, which the reference does not."""
    rule, static, arrays, dynamic = _one_row(case_of("causal", rule, length=100, dtype=dtype))
    got = outcome(KERNELS, rule, static, arrays, dynamic)
    tiles = outcome("xla", rule, static, arrays, dynamic)
    arrays = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    exact = outcome("reference", rule, static, arrays, dynamic)
    for a, b, x in zip(*map(jax.tree.leaves, (got, tiles, exact)), strict=True):
        a, b, x = (np.asarray(y, np.float32) for y in (a, b, x))
        size = np.linalg.norm(x)
        assert np.linalg.norm(a - x) <= times * np.linalg.norm(b - x) + 3e-5 * size


def _attend(rules=(), changed=lambda x: x, **options):
    tokens = np.random.default_rng(0).normal(size=(3, B, 128, 2, 64)).astype(np.float32)
    q, k, v = map(changed, tokens)

    def run(q, k, v):
        out, lse = pe.attention(
            q, k, v, rules=rules, return_lse=True, implementation=KERNELS, **options
        )
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0)), (out, lse)

    return jax.jit(jax.grad(run, (0, 1, 2), has_aux=True))(q, k, v)


@gpu_interpreted
@slow
def test_a_bias_of_zeros_changes_no_bit():
    def zero(shared, head, q, k):
        return head * (q - k).astype(jnp.float32)

    zeros = LogitBias(zero, heads=jnp.zeros(2), relative=True)
    chex.assert_trees_all_equal(_attend(zeros, is_causal=True), _attend(is_causal=True))


@gpu_interpreted
@slow
def test_nan_in_padding_has_no_effect():
    ids = jnp.where(jnp.arange(128) < 90, 0, -1)[None].repeat(B, 0)

    def with_nan(x):
        return jnp.where((ids < 0)[..., None, None], jnp.nan, x)

    rules = pe.T5(num_heads=2).rules({"table": jnp.ones((2, 32))})
    options = {"q_segment_ids": ids, "contiguous": True}
    clean, spoilt = (_attend(rules, f, **options) for f in (lambda x: x, with_nan))
    chex.assert_tree_all_finite(spoilt[0])
    chex.assert_trees_all_equal(clean, spoilt)
    assert np.all(np.isneginf(np.asarray(spoilt[1][1])[:, 90:]))


LOWERED = [
    ("t5", "sinks", 4),
    ("by_query_head", "causal", 6),
    pytest.param("kerple_by_pair", "segments", 3, marks=slow),
    pytest.param("none", "permuted", 3, marks=slow),
    pytest.param("separable", "causal", 3, marks=slow),
    pytest.param("same_for_all", "softcap", 4, marks=slow),
    pytest.param("wide", "softcap", 7, marks=slow),
]


@gpu_lowered
@pytest.mark.parametrize(("rule", "feature", "kernels"), LOWERED)
def test_lowers_for_gpus(rule, feature, kernels):
    dim = 64 if kernels > 4 else 128
    case = case_of(feature, rule, length=1100, heads=4, dim=dim, dtype=jnp.bfloat16)
    abstract = jax.eval_shape(lambda: case[2:])
    if "sinks" in case[2]:
        abstract[0]["sinks"] = jax.ShapeDtypeStruct((2, 1100, 4), jnp.float32)
    with tma.audited() as descriptors:
        traced = outcome.trace(COMPILED, *case[:2], *abstract)
        program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("custom_call @mosaic_gpu") == kernels
    assert len(descriptors) > 2 * kernels


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
    said = tma.faults(**right | {"item": 2, "swizzle": 128} | change)
    assert any(fault in rule for rule in said) if fault else not said


OPERATIONS = {
    "a number twice": lambda h, x: h * x * h * x,
    "add_any": lambda h, x: h * jnp.abs(x),
    "floor": lambda h, x: h * jnp.floor(x / 3),
    "powers": lambda h, x: h * (2 + jnp.abs(x)) ** -1 + h * (2 + jnp.abs(x)) ** -3,
    "division": lambda h, x: x / (1 + (h * x) ** 2),
}
"""Operations, in derivatives too, for which Mosaic has no rule."""


@dataclasses.dataclass(frozen=True)
class OfDistance:
    """A rule evaluated for each pair."""

    operation: str

    def __call__(self, shared, head, q, k):
        return OPERATIONS[self.operation](head, (q - k).astype(jnp.float32))


@gpu_lowered
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_of_rules_lower_for_gpus(operation):
    q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    heads = jax.ShapeDtypeStruct((2,), jnp.float32)

    def loss(q, heads):
        rule = pe.LogitBias(OfDistance(operation), heads)
        return pe.attention(q, q, q, rules=rule, implementation=COMPILED).astype("f4").sum()

    traced = jax.jit(jax.grad(loss, (0, 1))).trace(q, heads)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("custom_call @mosaic_gpu") >= 3


def test_the_floor_of_gpu_kernels_is_exact():
    x = np.r_[-7:7:0.25, 1e9, -1e9, 2.0**23 - 0.5, 2.0**23 + 1].astype(np.float32)
    np.testing.assert_array_equal(tile._LOWERED["floor"](x), np.floor(x))


def test_remainders_of_floats_are_refused():
    """x - y floor(x / y) rounds: the remainder of 1e9 by 3 would be 0, not 1."""
    message = _refusal(pe.LogitBias(_remainder, jnp.ones(2)))
    assert (
        'the operation rem of floats, which the kernels do not have, needs implementation="xla"'
        in message
    )


def _remainder(shared, head, q, k):
    return head * jnp.remainder((q - k).astype(jnp.float32), 3.0)


def _refusal(rules=(), dtype=jnp.bfloat16, dim=64, implementation=COMPILED, batch=1, **options):
    q = jnp.zeros((batch, 64, 2, dim), dtype)
    with pytest.raises(NotImplementedError) as error:
        pe.attention(q, q, q, rules=rules, implementation=implementation, **options)
    return str(error.value)


def test_what_has_no_kernel_is_refused_with_the_reason():
    jax.eval_shape(_refusals)  # Nothing is computed: a refusal is known from shapes.


def _refusals():
    if jax.__version_info__ < (0, 11, 2):
        assert "jax 0.11.2" in _refusal()
        return
    for dim in (128, 256):  # The shared memory has no room for two kinds of vectors.
        q = jnp.zeros((1, 64, 2, dim))
        narrow = KINDS["narrow"].rules(KINDS["narrow"].make(np.random.default_rng(0), 2, dim), q, q)
        assert f"per distance, with [{dim}, 3] numbers" in _refusal(narrow, dim=dim)
    fire = pe.FIRE(num_heads=2)
    assert "a number per head" in _refusal(fire.rules(fire.init(jax.random.key(0))))
    assert "mask" in _refusal(mask=jnp.ones((1, 1, 64, 64), bool))
    assert "bfloat16 or" in _refusal(dtype=jnp.float32)
    assert "beyond 256" in _refusal(dim=512)
    assert "beyond 65,535 rows" in _refusal(batch=70_000)
    assert "dropout" in _refusal(dropout_rate=0.1, dropout_key=jax.random.key(0))
    assert "platform is cpu" in _refusal(implementation=PallasGPU())
