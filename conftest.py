"""Strict settings for all tests, and the names that docstring examples may use."""

import atexit
import functools
import gc
import os
import shutil
import tempfile
import types
from collections import Counter
from importlib.metadata import PackageNotFoundError, version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is most of the time of these tests. A program that is not split for several threads
# takes less of the processors, and each worker has one. The older of jaxlib 0.10's two ways to make
# code for CPUs takes half as long; later versions do not have it. XLA_FLAGS="" is what users run.
if "XLA_FLAGS" not in os.environ and version("jaxlib").startswith(("0.10.", "0.11.", "0.12.")):
    os.environ["XLA_FLAGS"] = "--xla_cpu_parallel_codegen_split_count=1"
    if version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# All processes of one run share what they compile. A cache that is given, as by `make test`, also
# serves the next run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.mkdtemp(prefix="posenc_jax-tests-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.requirements import Requirement

jax.config.update("jax_num_cpu_devices", 8)
# Tests compile more than they compute, and numbers need no optimiser. It is LLVM's alone that goes:
# the arrays of a program and their memory stay as they are for users.
jax.config.update("jax_disable_most_optimizations", True)

# Makers need packages of their own.
collect_ignore = ["tests/makers", "experiments/bench/accelerator_torch.py"]


@pytest.fixture(autouse=True)
def strict(request):
    """No silent promotion of ranks or dtypes; optimisers need standard promotion."""
    chex.clear_trace_counter()
    if "experiments" in request.node.path.parts:
        yield
        return
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


programs = 0


def count(event, seconds, **_):
    global programs
    programs += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(count)


@pytest.fixture(autouse=True, scope="module")
def forget():
    """A process may map only so many programs: with those of all tests it would crash."""
    global programs
    yield
    if programs > 500:
        jax.clear_caches()
        programs = 0


@functools.cache
def is_installed(requirement):
    """Whether a package is installed, in a version that a requirement allows."""
    requirement = Requirement(requirement)
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def missing(item):
    """Returns the requirements of a test, from its marks `needs`, that are not installed."""
    needed = dict.fromkeys(name for mark in item.iter_markers("needs") for name in mark.args)
    return [name for name in needed if not is_installed(name)]


DESELECTED = []  # Of each deselected test, the requirements that are missing.


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Deselects tests whose packages are not installed."""
    if without := [item for item in items if missing(item)]:
        items[:] = [item for item in items if not missing(item)]
        config.hook.pytest_deselected(items=without)


def pytest_deselected(items):
    DESELECTED.extend(missing(x) if isinstance(x, pytest.Item) else x.missing for x in items)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = DESELECTED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Reports what the first worker deselected: all collect the same tests."""
    if not DESELECTED:
        deselected = getattr(node, "workeroutput", {}).get("deselected", [])
        items = [types.SimpleNamespace(missing=names) for names in deselected]
        node.config.hook.pytest_deselected(items=items)


def pytest_terminal_summary(terminalreporter):
    """Names the packages that deselected tests need."""
    for names, count in Counter(tuple(names) for names in DESELECTED if names).items():
        tests = "1 test needs" if count == 1 else f"{count} tests need"
        packages = " ".join(f"'{name}'" for name in names)
        terminalreporter.write_line(f"{tests} packages: pip install {packages}")


def pytest_collection_finish():
    """The garbage collector leaves the test files and their imports alone, and runs less often."""
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(autouse=True)
def names(doctest_namespace):
    """Examples in docstrings are written after these imports."""
    import posenc_jax as pe

    doctest_namespace.update(jax=jax, jnp=jnp, np=np, pe=pe)
