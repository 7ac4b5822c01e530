"""Functions of rules: compared by identity, traced once, with gradients of captured arrays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import posenc_jax as pe
from posenc_jax import testing
from posenc_jax.engine.api import _run
from posenc_jax.engine.blocks import Blocks
from posenc_jax.kernels.tpu.implementation import PallasTPU
from posenc_jax.sharding import sequence_parallel_attention
from tests.kernels.kernel_cases import assert_close
from tests.support import slow

T, N, H, R = 18, 2, 8, 9
TPU = PallasTPU(Blocks(128, 128), Blocks(128, 128), interpret=True)
RANDOM = np.random.default_rng(0)
QKV = RANDOM.normal(size=(3, 1, T, N, H)).astype("f4")
TABLE = RANDOM.normal(size=(N, R, H)).astype("f4")
ONES = np.ones((1, T, N, 1), "f4")


def distance(q, k):
    return 0.1 * jnp.abs(q - k).astype(jnp.float32)


def opposite(shared, head, q, k):
    return -distance(q, k)


# Rules that read a number s from a variable: each adds -0.1 s |q - k|, "values" s |q - k| // 2.
RULES = {
    "logit": lambda s: pe.LogitBias(lambda shared, head, q, k: -s() * distance(q, k)),
    "on": lambda s: pe.LogitBias(opposite).on(lambda x: s() * x.astype(jnp.float32)),
    "content": lambda s: pe.ContentBias(
        lambda shared, head, row, col, q, k: -s() * distance(q, k) * col[0], k_features=ONES
    ),
    "dot": lambda s: pe.DotBias(
        lambda shared, head, d: -s() * distance(d, 0)[None], q_features=ONES
    ),
    "values": lambda s: pe.ValueBias(lambda q, k: jnp.int32(s()) * jnp.abs(q - k) // 2, TABLE),
    "rows": lambda s: pe.LogitsTransform(
        lambda shared, heads, row, cols, logits, seen, q, k: logits - s() * distance(q, k)[None]
    ),
    "score_mod": lambda s: pe.score_mod(
        lambda score, b, h, q, k: score - s() * distance(q, k), QKV[0]
    ),
}
IN_TILES = ("logit", "content", "dot", "values")


@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def plain(q, k, v, s, names=("logit",)):
    """The formula, for queries at the last positions."""
    i, s = jnp.arange(k.shape[1]), jnp.asarray(s, jnp.float32)
    d = jnp.abs(i[-q.shape[1] :, None] - i)
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    logits -= 0.1 * len({*names} - {"values"}) * s * d
    weights = jax.nn.softmax(logits)
    out = jnp.einsum("bnts,bsnv->btnv", weights, v)
    if "values" in names:
        entries = jnp.minimum((s * d).astype(jnp.int32) // 2, R - 1)
        out += jnp.einsum("bnts,ntsv->btnv", weights, jnp.asarray(TABLE)[:, entries])
    return out


AT = jnp.arange(T, dtype=jnp.int32)[None]


def inputs(length=T):
    q, k, v = QKV
    return q[:, T - length :], k, v


def call(names, s, implementation, q, k, v):
    """Attention of the last queries with rules that read `s()`."""
    options = {"q_positions": AT[:, T - q.shape[1] :], "k_positions": AT, "contiguous": False}
    rules = [RULES[name](s) for name in names]
    return pe.attention(q, k, v, rules=tuple(rules), implementation=implementation, **options)


def two_devices(axis):
    return jax.make_mesh((2,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))


def pull_of(function, *arrays):
    """Returns the cotangents of a cotangent that is no constant."""
    out, pull = jax.vjp(function, *arrays)
    weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return lambda: pull(weights)


@slow
@pytest.mark.parametrize("names", [(*IN_TILES, "on"), ("rows",), ("score_mod",)], ids="+".join)
def test_other_functions_are_never_taken_for_equal(names):
    formula = jax.jit(plain, static_argnums=4)
    for s in (1, 4):
        out = call(names, lambda s=s: s, None, *inputs())
        assert_close(out, formula(*inputs(), s, names))


CALLS = {"tiles": (IN_TILES, T, "xla"), "one query": (("logit",), 1, "dense")}


@slow
@pytest.mark.parametrize(
    "names, length, implementation",
    [*CALLS.values(), (("logit",), T, TPU)],
    ids=[*CALLS, "kernels"],
)
def test_derivatives_are_of_the_forward_pass(names, length, implementation):
    """A variable changes before the pullback."""
    arrays, number = inputs(length), [1]
    program = jax.jit(functools.partial(call, names, lambda: number[0], implementation))
    jax.eval_shape(program, *arrays)

    @testing.jit_fast
    def cotangents(*arrays):
        number[0] = 4
        got = pull_of(program, *arrays)()
        return got, pull_of(lambda *a: plain(*a, 1, names), *arrays)()

    assert_close(*cotangents(*arrays))


def test_derivatives_of_a_ring_are_of_the_forward_pass():
    spread, number = PartitionSpec(None, "sequence"), [1]
    specs = {"in_specs": (spread,) * 4, "out_specs": spread}

    @functools.partial(jax.shard_map, mesh=two_devices("sequence"), **specs)
    def attend(q, k, v, at):
        options = {"q_positions": at, "k_positions": at, "axis_name": "sequence"}
        rule = RULES["logit"](lambda: number[0])
        return sequence_parallel_attention(q, k, v, rules=rule, **options)

    @testing.jit_fast
    def cotangents(*arrays):
        pull = pull_of(lambda *a: attend(*a, AT), *arrays)
        number[0] = 4
        _run.clear_cache()  # Both passes may share its trace.
        return pull(), pull_of(lambda *a: plain(*a, 1), *arrays)()

    assert_close(*cotangents(*inputs()))


@pytest.mark.parametrize("names, length, implementation", CALLS.values(), ids=CALLS)
def test_gradients_of_what_a_function_closes_over(names, length, implementation):
    """In a loop of layers, whose derivatives JAX traces outside of the loop."""
    arrays = inputs(length)

    def attend(s, *arrays):
        return call(names, lambda: s, implementation, *arrays)

    def layers(s, *arrays):
        def layer(out, s):
            return out + jax.checkpoint(attend)(s, *arrays), None

        return jax.lax.scan(layer, jnp.zeros_like(arrays[0]), s)[0]

    def both(s, *arrays):
        return plain(*arrays, s[0], names) + plain(*arrays, s[1], names)

    @testing.jit_fast
    def gradients(s):
        return [pull_of(f, s, *arrays)() for f in (layers, both)]

    assert_close(*gradients(jnp.array([1.0, 4.0])))


@slow
def test_gradients_of_what_a_function_closes_over_outside_of_jit():
    def attend(s):
        rule = RULES["logit"](lambda: s)
        return pe.attention(*inputs(), rules=rule, implementation="xla")

    s = jnp.array([1.0, 4.0])
    for f in (lambda f: pull_of(f, s[1])(), lambda f: jax.jit(jax.vmap(f))(s)):
        assert_close(f(attend), jax.jit(lambda f=f: f(lambda s: plain(*inputs(), s)))())


@slow
def test_gradients_under_shard_map_are_of_arrays_of_the_device():
    """A custom derivative has no type for a gradient that devices share."""
    mesh, heads = two_devices("heads"), PartitionSpec(None, None, "heads")

    def attend(s, *arrays):
        rule = RULES["logit"](lambda: s[0])
        return pe.attention(*arrays, rules=rule, implementation="xla")

    def gradients(spec, s):
        specs = (spec, heads, heads, heads)
        spread = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads)
        return testing.jit_fast(lambda s, *a: pull_of(spread, s, *a)())(s, *inputs())

    s = jnp.array([2.0, 2.0])
    got, *others = gradients(PartitionSpec("heads"), s)
    formula = jax.jit(lambda s, *a: pull_of(lambda s, *a: plain(*a, s), s, *a)())
    expected, *other = formula(s[0], *inputs())
    assert_close([got.sum(), *others], [expected, *other])
    with pytest.raises(Exception, match=r"differentiation of a custom_vjp function .* closed-over"):
        gradients(PartitionSpec(), s)


def test_gradients_under_shard_map_of_arrays_that_devices_share():
    """A rule is traced with arrays that vary over the mesh, as they do where it is called."""
    mesh, batch = two_devices("batch"), PartitionSpec("batch")

    def attend(scale, slopes, *arrays):
        def logit(scale, slope, q, k):
            return -scale * slope * distance(q, k)

        rule = pe.LogitBias(logit, slopes, scale)
        return pe.attention(*arrays, rules=rule, implementation="xla")

    def formula(scale, slopes, *arrays):
        return plain(*arrays, scale * slopes[:, None, None])

    specs = (PartitionSpec(),) * 2 + (batch,) * 3
    spread = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=batch)
    arrays = jnp.float32(3), jnp.array([1.0, 4.0]), *np.concatenate([QKV, QKV[::-1]], 1)
    assert_close(
        *(testing.jit_fast(lambda *a, f=f: pull_of(f, *a)())(*arrays) for f in (spread, formula))
    )


def test_kernels_refuse_functions_that_close_over_arrays():
    @jax.jit
    def attend(s):
        return pe.attention(*inputs(), rules=RULES["logit"](lambda: s), implementation=TPU)

    with pytest.raises(NotImplementedError, match="a function that closes over an array needs"):
        attend(1.0)


def test_a_function_that_may_change_is_refused():
    """JAX compares it with itself, and would not see the change."""

    @dataclasses.dataclass
    class Slope:
        slope: float

        def __call__(self, shared, head, q, k):
            return -self.slope * jnp.abs(q - k).astype(jnp.float32)

    q = jnp.ones((1, 5, 2, 4))
    with pytest.raises(TypeError, match=r"LogitBias\.rule must be hashable, got Slope"):
        pe.attention(q, q, q, rules=pe.LogitBias(Slope(1.0), relative=True))
