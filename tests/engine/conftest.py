"""Compiling is most of the time of these tests, and numbers need no optimiser."""

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_to_compile(request):
    if "program" in request.node.name:  # These read what the optimiser makes.
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
