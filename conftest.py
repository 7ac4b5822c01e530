"""Strict settings for all tests, and the names that docstring examples may use."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# Tests compile more than they compute.
jax.config.update("jax_disable_most_optimizations", True)

collect_ignore_glob = ["*make_*.py"]  # They make golden files, with packages of their own.


@pytest.fixture(autouse=True)
def strict(request):
    """No silent promotion of ranks or dtypes; optimisers need standard promotion."""
    chex.clear_trace_counter()
    if "experiments" in request.node.path.parts:
        yield
        return
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True)
def names(doctest_namespace):
    """Examples in docstrings are written after these imports."""
    import posenc_jax as pe

    doctest_namespace.update(jax=jax, jnp=jnp, np=np, pe=pe)
