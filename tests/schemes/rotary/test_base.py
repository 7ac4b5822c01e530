"""Tables, checks, groups and padding of the abstract base of rotary schemes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import posenc_jax as pe
from tests.oracle import attend, qkv
from tests.support import build, close, forward, make_batch, parameters, run, slow

ROTARY = [n for n, c in pe.SCHEMES.items() if issubclass(c, pe.Rotary)]


def operations(jaxpr):
    """The number of shifts, which angles alone need, in a jaxpr and all that are nested in it."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "shift_right_logical"
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            count += operations(inner) if hasattr(inner, "eqns") else 0
    return count


@slow
def test_layers_that_share_tables_compute_them_once():
    scheme, tokens = pe.RoPE(head_dim=8), make_batch()
    positions = jnp.arange(19)[None]

    def layers(q, k, v, count, share):
        tables = pe.scheme_tables(scheme, {}, positions) if share else None
        options = {"positions": positions, "tables": tables, "is_causal": True}
        for _ in range(count):
            q = q + pe.scheme_attention(scheme, {}, q, k, v, **options)[0]
        return q

    arrays = tokens.q, tokens.k, tokens.v

    def fixed_point_operations(*settings):
        return operations(jax.make_jaxpr(layers, static_argnums=(3, 4))(*arrays, *settings).jaxpr)

    once = fixed_point_operations(1, True)
    assert once > 0
    assert fixed_point_operations(1, False) == once  # q and k of one layer share them too.
    assert fixed_point_operations(3, True) == once
    assert fixed_point_operations(3, False) == 3 * once
    run = jax.jit(layers, static_argnums=(3, 4))
    np.testing.assert_array_equal(run(*arrays, 3, True), run(*arrays, 3, False))


@dataclasses.dataclass(frozen=True)
class Damped(pe.Rotary):
    """A rotary scheme of a user's own, with learned rates and two of the base's settings."""

    layout: str = "interleaved"
    groups: int = 1
    rate: float = 0.5

    def init(self, key):
        return {"rates": jnp.full((self.groups, self.num_rotated // 2), self.rate, jnp.float32)}

    def cos_sin(self, params, coordinates):
        base = jnp.asarray(self.base_frequencies, jnp.float32)[None]
        return pe.cos_sin(coordinates[..., None], params["rates"] * base)


@slow
def test_a_rotary_scheme_is_its_tables():
    scheme = Damped(head_dim=8, groups=3)
    q, k, v = qkv(length=9)
    params = scheme.init(jax.random.key(0))
    out = attend(scheme, params, q, k, v, is_causal=True)
    same = pe.RoPE(head_dim=8, layout="interleaved", scaling=pe.PI(factor=2.0))
    expected = attend(same, {}, q, k, v, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    with pytest.raises(TypeError, match=r"abstract class Rotary .*cos_sin"):
        pe.Rotary(head_dim=8)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *(
            (lambda x, cls=cls: cls(8 * x), f"{cls.name}: head_dim")
            for cls in (pe.RoPE, pe.XPos, pe.ReRoPE, pe.MRoPE, pe.contrib.LieRE, pe.contrib.ComRoPE)
        ),
        (lambda x: pe.Shaw(2, 8, clip=x), "shaw: clip"),
        (lambda x: pe.LearnedAbsolute(8, 16, offset=x), "learned: offset"),
        (lambda x: pe.Sinusoidal(8 * x), "sinusoidal: model_dim"),
        (lambda x: pe.Sinusoidal2D(8 * x), "sinusoidal_2d: model_dim"),
        (lambda x: pe.PaTH(2, 8, 16, num_kv_heads=x), "path: num_kv_heads"),
        (lambda x: pe.PoPE(2, 8, rotary_dim=2 * x), "pope: rotary_dim"),
        (lambda x: pe.RoPE(8, rotary_dim=4, rotary_start=x), "rope: rotary_start"),
        (lambda x: pe.PartialKeyOffset(8, start=x), "partial_key_offset: start"),
        (lambda x: pe.ClippedFrequencies(2 * x), "ClippedFrequencies: pairs"),
        (lambda x: pe.ALiBi(2, num_biased_heads=x), "alibi: num_biased_heads"),
    ],
)
def test_sizes_are_integers(make, name):
    make(1)
    with pytest.raises(TypeError, match=f"{name} must be an integer, got .*0"):
        make(1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: pe.RoPE(head_dim=8, theta=x),
        lambda x: pe.LearnedRoPE(head_dim=8, theta=x),
        lambda x: pe.PoPE(num_heads=1, head_dim=8, theta=x),
        lambda x: pe.RoPEMixed(head_dim=8, theta=x),
        lambda x: pe.PI(factor=x),
        lambda x: pe.YaRN(factor=x, original_max_position=64),
        lambda x: pe.rope_frequencies(8, theta=x),
        lambda x: pe.apply_rope(jnp.ones((1, 3, 1, 8)), jnp.arange(3), theta=x),
    ],
)
def test_a_traced_setting_is_a_type_error_that_names_the_way_to_sweep_it(make):
    message = r"must be a number that is known while tracing, got an array of shape \(\)"
    with pytest.raises(TypeError, match=f"{message}.*cos_sin.*apply_rotation"):
        jax.jit(lambda x: jax.tree.leaves(make(x)))(1e4)


def test_with_scaling_gives_frequency_maps():
    assert pe.RoPE(head_dim=8).with_scaling(YARN) == pe.RoPE(head_dim=8, scaling=YARN)


DAMPED, Q = Damped(head_dim=8, groups=4), np.ones((1, 9, 6, 8), "f4")
YARN = pe.YaRN(factor=4.0, original_max_position=64)
ERRORS = [
    (lambda: DAMPED.query({}, Q, None, tables=(Q, Q)), {}, "must be a multiple of groups=4, got"),
    (Damped, {"head_dim": 8, "groups": 0}, "groups must be >= 1, got 0"),
    (pe.RoPE, {"head_dim": "8"}, "head_dim must be an integer, got '8'", TypeError),
    (pe.RoPE, {"head_dim": True}, "head_dim must be an integer, got True", TypeError),
    (lambda: build(pe.XPos).with_scaling(YARN), {}, "xpos: no frequency map applies .* got YaRN"),
    (lambda: build(pe.RoPEByLength).with_scaling(YARN), {}, ": scaling must be per sequence"),
]


def _derivatives(scheme, point, way):
    """Slopes along `way` and the curvature there, each in two modes."""

    def loss(point):
        out = forward(scheme, *point, implementation="reference")[0]
        return jnp.sin(out).sum()

    def along(point):
        products = jax.tree.map(lambda a, b: (a * b).sum(), jax.grad(loss)(point), way)
        return sum(jax.tree.leaves(products))

    slope, curved = jax.jvp(loss, (point,), (way,))[1], jax.jvp(jax.grad(loss), (point,), (way,))[1]
    return (slope, curved), jax.value_and_grad(along)(point)


# Their derivatives are those of others: the ranges of ReRoPE, and RoPE.
LIKE_OTHERS = {"dual_chunk", "self_extend", "mrope", "axial_rope", "rope_by_length", "vo_rope"}


@slow
@pytest.mark.parametrize("name", [name for name in ROTARY if name not in LIKE_OTHERS])
def test_forward_mode_and_forward_over_reverse_agree_with_reverse_mode(name):
    scheme = build(pe.SCHEMES[name])
    point, way = ((parameters(scheme, seed=i), make_batch(1, 5, seed=i)) for i in range(2))
    (slope, curved), (expected_slope, expected) = run(_derivatives, (scheme,), point, way)
    close(slope, expected_slope, 1e-4)
    jax.tree.map(close, curved, expected)


@slow
@pytest.mark.parametrize(
    ("names", "implementation"),
    [(("rerope",), "xla"), (ROTARY, "reference")],  # The rule of ReRoPE reads no array.
)
def test_gradients_of_a_batch_over_devices_are_those_of_one_device(names, implementation):
    """Parameters and default positions are on every device, tokens are not."""
    params = {name: parameters(build(pe.SCHEMES[name])) for name in names}
    names = [n for n in names if params[n] or implementation == "xla"]
    tokens, weights = make_batch(length=5), make_batch(length=5, seed=1).q

    def gradients(params, tokens, weights):
        def loss(params, tokens):
            outs = (
                forward(build(pe.SCHEMES[n]), params[n], tokens, implementation=implementation)[0]
                for n in names
            )
            return sum((weights * out).sum() for out in outs)

        return jax.grad(loss, (0, 1))(params, tokens)

    everywhere, rows = PartitionSpec(), PartitionSpec("data")
    specs = {"in_specs": (everywhere, rows, rows), "out_specs": (everywhere, rows)}
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spread = jax.shard_map(gradients, mesh=mesh, **specs)
    arguments = params, tokens, weights
    jax.tree.map(close, jax.jit(spread)(*arguments), jax.jit(gradients)(*arguments))


def test_angles_for_another_number_of_pairs_are_refused():
    """Fewer angles would rotate a part of each head, and pair other dimensions."""

    @dataclasses.dataclass(frozen=True)
    class Short(pe.Rotary):
        def cos_sin(self, params, coordinates):
            return pe.cos_sin(coordinates, self.base_frequencies[:-1])

    q = jnp.ones((1, 3, 2, 8))
    message = r"Short: cos_sin must return \[..., 4\], .* got \(1, 3, 3\)"
    for call in (Short(head_dim=8).query, Short(head_dim=8).key):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(call, {}, q, jnp.arange(3)[None])
