"""Learned positions: the row of each position, and NaN or an error outside the table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.schemes.additive.learned import lookup
from tests.oracle import embed
from tests.support import initial, parameters

OPTIONS = {pe.LearnedAbsolute: {"offset": 2, "stddev": initial(0.1)}}

TABLE = np.arange(1.0, 41.0, dtype=np.float32).reshape(10, 4)


def test_adds_the_row_of_each_position():
    length = 63
    scheme = pe.LearnedAbsolute(max_length=70, model_dim=6)
    table = parameters(scheme)["table"]
    x = np.random.default_rng(1).normal(size=(2, length, 6)).astype(np.float32)
    table = np.asarray(table)
    positions = np.random.default_rng(0).integers(0, 70, (2, length))
    embed = jax.jit(functools.partial(pe.scheme_embedding, scheme, {"table": table}))
    out = np.asarray(embed(x, positions=positions))
    for b, t in np.ndindex(2, length):
        np.testing.assert_array_equal(out[b, t], x[b, t] + table[positions[b, t]])
    default = embed(x)
    np.testing.assert_array_equal(default, x + table[None, :length])


def test_offset_skips_the_reserved_rows():
    scheme = pe.LearnedAbsolute(max_length=8, model_dim=4, offset=2)
    out = embed(scheme, {"table": TABLE}, np.zeros((1, 2, 4), "f4"), np.array([[0, 7]]))
    np.testing.assert_array_equal(out[0], TABLE[[2, 9]])


@pytest.mark.parametrize("offset, beyond", [(0, 10), (0, -1), (3, 7), (3, -1), (3, -3)])
def test_positions_outside_the_table_raise(offset, beyond):
    message = rf"learned: positions must be in \[0, {10 - offset}\).*got .*{beyond}"
    with pytest.raises(ValueError, match=message):
        lookup(TABLE, jnp.array([0, beyond]), offset)


@pytest.mark.parametrize("offset", [0, 3])
def test_positions_outside_the_table_make_their_row_nan_and_no_other_under_jit(offset):
    last = 10 - offset - 1
    positions = jnp.array([0, last + 1, last, -1, 1, 2**31 - 1, -(2**31), -2])
    out = np.asarray(jax.jit(lookup, static_argnums=2)(jnp.asarray(TABLE), positions, offset))
    good = np.array([0, 2, 4])
    np.testing.assert_array_equal(out[good], TABLE[np.array([0, last, 1]) + offset])
    assert np.isnan(np.delete(out, good, 0)).all()


ERRORS = [
    (
        lookup,
        {"table": TABLE, "positions": np.zeros(3, bool)},
        "learned: coordinates must be integers",
        TypeError,
    ),
]


def test_concrete_positions_outside_the_table_raise_under_jit_too():
    scheme = pe.LearnedAbsolute(max_length=4, model_dim=2)
    params, positions = scheme.init(jax.random.key(0)), jnp.array([[0, 4]])
    with pytest.raises(ValueError, match=r"must be in \[0, 4\)"):
        jax.jit(lambda x: scheme.embed(params, x, positions))(jnp.zeros((1, 2, 2)))


def test_resize_learned_interpolates_patches_and_keeps_the_prefix():
    """As DeiT and MAE: [1, R, C, D] to [1, D, R, C], interpolate, and back."""
    table = np.random.default_rng(0).normal(size=(2 + 6, 5)).astype("f4")
    new = pe.resize_learned(table, (2, 3), (4, 5), prefix=2)
    np.testing.assert_array_equal(new[:2], table[:2])
    grids = pe.resize_grid(table[2:].T.reshape(5, 2, 3), 4, 5)
    np.testing.assert_allclose(new[2:], np.reshape(grids, (5, 20)).T, atol=1e-6)
    options = {"method": "bilinear", "align_corners": True}
    other = pe.resize_learned(table, (2, 3), (4, 5), prefix=2, **options)
    np.testing.assert_allclose(np.asarray(other)[[2, 6]], table[[2, 4]], atol=1e-6)  # Corners.
    with pytest.raises(ValueError, match=r"table must be \[7, D\] .*, got \(8, 5\)"):
        pe.resize_learned(table, (2, 3), (4, 5), prefix=1)
