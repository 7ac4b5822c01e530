"""Checks that a position encoding works everywhere: under `jit`, in tiles, packed, in a cache.

    from posenc_jax import testing

    print(testing.check(MyScheme(num_heads=4)))

Each property is measured on a small model: an embedding of random tokens, fixed projections
and one attention with the scheme. All arrays that differ between properties are data, so
that a scheme compiles few programs. The tests of this package check its schemes with the same
properties.

This module needs no test framework. To see the properties one by one in pytest:

    CASE = testing.Case(MyScheme(num_heads=4))

    @pytest.mark.parametrize("name", testing.PROPERTIES)
    def test_my_scheme(name):
        testing.PROPERTIES[name].check(CASE)
"""

from posenc_jax.testing.case import Case, jit_fast
from posenc_jax.testing.properties import PROPERTIES, Property, Report, Row, check

__all__ = ["PROPERTIES", "Case", "Property", "Report", "Row", "check", "jit_fast"]
