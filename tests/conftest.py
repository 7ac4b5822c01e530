"""One of every scheme, for the suites that run over all of them."""

import jax
import pytest
from support import build, make_batch

import posenc_jax as pe


@pytest.fixture
def tokens():
    return make_batch()


@pytest.fixture(scope="session", params=pe.SCHEMES.values(), ids=pe.SCHEMES.keys())
def scheme(request):
    """For the session, so that all tests of one scheme follow each other.

    They share what they compile, which then goes: a process may map only so many programs.
    """
    yield build(request.param)
    jax.clear_caches()


@pytest.fixture
def params(scheme):
    return scheme.init(jax.random.key(7))
