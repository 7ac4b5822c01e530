"""Learned positions: the row of each position, and NaN or an error outside the table."""

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


@pytest.mark.parametrize("offset", [0, 2])
def test_adds_the_row_of_each_position_after_the_reserved_rows(offset):
    scheme = pe.LearnedAbsolute(max_length=70, model_dim=6, offset=offset)
    params, random = parameters(scheme), np.random.default_rng(1)
    x, positions = random.normal(size=(2, 63, 6)).astype("f4"), random.integers(0, 70, (2, 63))
    out = embed(scheme, params, x, positions)
    np.testing.assert_array_equal(out, x + params["table"][offset:][positions])


def test_positions_outside_the_table_make_their_row_nan_and_no_other_under_jit():
    positions = np.array([0, 7, 6, -1, 1, 2**31 - 1, -(2**31), -2])
    out = np.asarray(jax.jit(lookup, static_argnums=2)(TABLE, positions, 3))
    inside = np.array([0, 2, 4])
    np.testing.assert_array_equal(out[inside], TABLE[np.array([3, 9, 4])])
    assert np.isnan(np.delete(out, inside, 0)).all()


def test_concrete_positions_outside_the_table_raise_under_jit_too():
    scheme, positions = pe.LearnedAbsolute(max_length=4, model_dim=2), jnp.array([[0, 4]])
    params = parameters(scheme)
    with pytest.raises(ValueError, match=r"must be in \[0, 4\)"):
        jax.eval_shape(lambda x: scheme.embed(params, x, positions), jnp.zeros((1, 2, 2)))


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


ERRORS = [
    *(
        (
            lookup,
            {"table": TABLE, "positions": np.array([0, x]), "offset": offset},
            rf"learned: positions must be in \[0, {10 - offset}\).*got .*{x}",
        )
        for offset, x in [(0, 10), (0, -1), (3, 7), (3, -1)]
    ),
    (lookup, {"table": TABLE, "positions": np.zeros(3, bool)}, "learned: .* integers", TypeError),
    (
        lambda: pe.resize_learned(TABLE, (2, 3), (4, 5), prefix=1),
        {},
        r"table must be \[7, D\] .*, got \(10, 4\)",
    ),
]
