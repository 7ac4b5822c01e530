"""The decode kernel without a TPU: interpreted against the reference, and lowered."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posenc_jax as pe
from posenc_jax.engine.rules import LogitBias
from posenc_jax.kernels.tpu.decode import _schedule
from posenc_jax.kernels.tpu.implementation import PallasTPU
from tests.engine.rules import KINDS
from tests.kernels.kernel_cases import assert_close
from tests.support import build, decode, empty_cache, make_batch, output, slow

_close = functools.partial(assert_close, tolerance=1e-5)
KERNEL = PallasTPU(decode=128, interpret=True)
B, S = 3, 200
LENGTHS = (S, 70, 0)  # Tokens in the cache, by row; the last row sees nothing.


@dataclasses.dataclass(frozen=True)
class Case:
    """A decode step whose cache holds NaN in unused slots.

    Attributes:
      rule: of `KINDS`.
      length: T, the last tokens of each row.
      heads, kv_heads, dim, value_dim, dtype: N, K, H, V and the dtype of q, k and v.
      keys: S.
      ring: the slots of the cache are in another order.
      packed: rows hold two segments.
      sinks, masked: whether there are any.
      options: more arguments of `attention`.
    """

    rule: str = "none"
    length: int = 1
    heads: int = 6
    kv_heads: int = 2
    dim: int = 128
    value_dim: int | None = None
    dtype: str = "float32"
    keys: int = S
    ring: bool = False
    packed: bool = False
    sinks: bool = False
    masked: bool = False
    options: tuple = ()


def _arrays(case):
    """Returns the parameters, q, k, v and the dynamic options of a case."""
    numbers = np.random.default_rng(0)
    tokens = (case.length, case.heads, case.dim), (case.keys, case.kv_heads, case.dim)
    tokens += ((case.keys, case.kv_heads, case.value_dim or case.dim),)
    q, k, v = (numbers.normal(size=(B, *shape)).astype(np.float32) for shape in tokens)
    lengths = np.minimum(LENGTHS, case.keys)[:, None].astype(np.int32)
    positions = np.repeat(np.arange(case.keys, dtype=np.int32)[None], B, 0)
    ids = np.where(
        positions >= lengths, -1, (positions >= 40).astype(np.int32) if case.packed else 0
    )
    k, v = (np.where((ids < 0)[..., None, None], np.nan, x) for x in (k, v))
    if case.ring:
        order = numbers.permutation(case.keys)
        positions, ids, k, v = (x[:, order] for x in (positions, ids, k, v))
    q_at = lengths - case.length + np.arange(case.length, dtype=np.int32)[None]
    dynamic = {"q_positions": q_at, "k_positions": positions, "k_segment_ids": ids.astype(np.int32)}
    dynamic["q_segment_ids"] = np.full_like(q_at, int(case.packed))
    if case.sinks:
        shape = B, case.length, case.heads
        dynamic["sinks"] = np.linspace(-1.0, 1.0, math.prod(shape)).reshape(shape)
    if case.masked:
        dynamic["mask"] = numbers.random((B, case.heads, case.length, case.keys)) < 0.7
    params = KINDS[case.rule].make(np.random.default_rng(5), case.heads, case.dim)
    return (params, *(jnp.asarray(x.astype(case.dtype)) for x in (q, k, v))), dynamic


@functools.partial(jax.jit, static_argnums=(0, 1))
def _outcome(implementation, case, arrays, dynamic):
    params, q, k, v = arrays
    return pe.attention(
        q,
        k,
        v,
        rules=KINDS[case.rule].rules(params, q, k),
        return_lse=True,
        implementation=implementation,
        **dynamic,
        **{"is_causal": True} | dict(case.options),
    )


CASES = {
    "chunk, ring and window": Case("alibi", 5, ring=True, options=(("window", 60),)),
    "a mask by head": Case("fire", 5, dim=256, value_dim=64, masked=True),
}
MORE_CASES = {
    "both ways": Case("narrow", 5, dim=64, ring=True, options=(("is_causal", False),)),
    "segments": Case("scaled", 5, kv_heads=3, packed=True),
    "numbers per token": Case("separable", kv_heads=6, dim=64, keys=63),
    "an array of all pairs": Case("all_pairs", 5, keys=64),
    "softcap and sinks": Case("t5", dim=80, sinks=True, options=(("softcap", 3.0),)),
    "content": Case("fox", 5, kv_heads=1, dim=64),
}
ALL_CASES = CASES | MORE_CASES


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(n, marks=slow) for n in MORE_CASES)])
def test_equals_the_reference(name):
    case = ALL_CASES[name]
    arrays, dynamic = _arrays(case)
    got, expected = (_outcome(x, case, arrays, dynamic) for x in (KERNEL, "reference"))
    _close(got, expected)
    assert np.all(np.isneginf(np.asarray(expected[1])[2])) == (not case.sinks)
    assert not np.any(np.asarray(got[0])[2])


def test_rules_may_hide_distances():
    """Entries are picked by products with zeros and ones, and zero times -inf is NaN."""

    def near(shared, head, q, k):
        return jnp.where(jnp.abs(q - k) <= 20, head, -jnp.inf)

    bounds = {"relative": True, "bounds": (-30, 30)}
    rule = LogitBias(near, heads=np.arange(6, dtype=np.float32), scaled=True, **bounds)
    (_, q, k, v), dynamic = _arrays(Case(dim=64))
    # Distances of the second row are all hidden.
    dynamic["q_positions"] = dynamic["q_positions"] + np.array([[0], [40], [0]], np.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def outcome(implementation):
        options = {"rules": rule, "is_causal": True, "return_lse": True} | dynamic
        return pe.attention(q, k, v, softcap=3.0, implementation=implementation, **options)

    got, expected = outcome(KERNEL), outcome("reference")
    assert np.all(np.isneginf(np.asarray(expected[1])[1]))
    _close(got, expected)


def test_the_checking_interpreter_finds_nothing():
    """No races, and no reads of memory that was never written.

    It cannot reshape references, so the cache is in another order of axes than for H = 128.
    """
    case = ALL_CASES["softcap and sinks"]
    checked = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    kernel = dataclasses.replace(KERNEL, interpret=checked)
    _close(*(_outcome(x, case, *_arrays(case)) for x in (kernel, "reference")))


def test_the_schedule_reads_each_live_block_once():
    """And has it in memory before it is needed, in the order of the grid."""
    seen = np.zeros((4, 1, 2, 330), bool)
    seen[0, 0, 0, 128:256], seen[0, 0, 1, 200:300], seen[2, 0, 1, 329] = True, True, True
    schedule = jax.jit(_schedule, static_argnums=(1, 2))
    count, entries = map(np.asarray, schedule(seen, 128, 3))
    assert count == 2
    # Rows 1 and 3 have no block; of the blocks of rows 0 and 2, one is seen as a whole.
    np.testing.assert_array_equal(entries % 3, [1, 2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(entries // 3, [1, 2, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8])
    assert schedule(seen[1:2], 128, 3)[0] == 1


def test_derivatives_equal_the_reference():
    """ "dense" computes them; unused slots hold NaN here too."""
    case = Case("t5", 2, heads=4, dim=64)
    arrays, dynamic = _arrays(case)

    def gradient(implementation):
        def loss(arrays):
            out, lse = _outcome(implementation, case, arrays, dynamic)
            return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

        return jax.jit(jax.grad(loss))(arrays)

    got = gradient(KERNEL)
    chex.assert_tree_all_finite(got)
    _close(got, gradient("reference"))


@slow
@pytest.mark.parametrize(
    ("scheme", "chunk", "ring"), [("t5", 1, True), ("fox", 5, False), ("deberta", 1, False)]
)
def test_steps_with_a_cache_equal_one_pass(scheme, chunk, ring):
    scheme, tokens = build(pe.SCHEMES[scheme]), make_batch(length=15)
    params = jax.jit(lambda: jax.tree.map(lambda x: 3 * x, scheme.init(jax.random.key(1))))()
    options = {"window": 6} if ring else {}
    cache = empty_cache(scheme, capacity=6 if ring else 24, ring=ring)
    kernel = PallasTPU(interpret=True)
    got, _ = decode(
        scheme, params, tokens, (chunk,) * (15 // chunk), cache, implementation=kernel, **options
    )
    _close(got, output(scheme, params, tokens, **options))


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=slow)], ids=str
)
def test_batch_and_heads_over_devices(kind):
    case = Case("t5", heads=4, dim=64, sinks=True, masked=True)
    mesh = jax.make_mesh((3, 2), ("data", "heads"), axis_types=(kind,) * 2)
    options = {"batch_axes": "data", "head_axes": "heads"} if kind == AxisType.Auto else {}
    (params, *qkv), dynamic = _arrays(case)
    on = functools.partial(NamedSharding, mesh)
    by_token, by_row = on(PartitionSpec("data", None, "heads")), on(PartitionSpec("data"))
    arrays = jax.device_put(params, on(PartitionSpec())), *(jax.device_put(qkv, by_token))
    placed = {name: jax.device_put(x, by_row) for name, x in dynamic.items()}
    with jax.set_mesh(mesh):
        got = jax.device_get(_outcome(dataclasses.replace(KERNEL, **options), case, arrays, placed))
    _close(got, _outcome("reference", case, (params, *qkv), dynamic))


@pytest.mark.parametrize(
    ("name", "x64"),
    [("chunk, ring and window", False), ("softcap and sinks", True), ("segments", False)],
)
def test_lowers_for_tpu(name, x64):
    """The cache in each order of axes."""
    case = dataclasses.replace(ALL_CASES[name], dtype="bfloat16", keys=600)
    abstract = jax.eval_shape(lambda: _arrays(case))
    with jax.enable_x64(x64):
        traced = _outcome.trace(PallasTPU(cross_compile=True), case, *abstract)
        program = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert program.count("tpu_custom_call") == 1


def test_more_queries_go_to_the_forward_kernel():
    def lowered(length):
        q, k = (jax.ShapeDtypeStruct((1, n, 2, 64), jnp.float32) for n in (length, 256))
        attend = functools.partial(pe.attention, implementation=PallasTPU(cross_compile=True))
        return jax.jit(attend).trace(q, k, k).lower(lowering_platforms=("tpu",)).as_text()

    assert "attention_decode" in lowered(16) and "attention_forward" in lowered(17)


def test_what_decodes_with_other_implementations_is_refused():
    jax.eval_shape(_refusals)  # Nothing is computed: a refusal is known from shapes.
    with pytest.raises(ValueError, match="decode must be a multiple of 128 keys, got 100"):
        PallasTPU(decode=100)


def _refusals():
    q, k = jnp.zeros((1, 1, 2, 64)), jnp.zeros((1, 64, 2, 64))
    positions = {"q_positions": jnp.array([63]), "k_positions": jnp.arange(64)}
    for name, reason in (("shaw", "add to values"), ("whole", "whole rows")):
        rules = KINDS[name].rules(KINDS[name].make(np.random.default_rng(0), 2, 64), q, k)
        with pytest.raises(NotImplementedError, match=reason):
            pe.attention(q, k, k, rules=rules, implementation=KERNEL, **positions)
