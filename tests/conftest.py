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
    """For the session, so that all tests of one scheme follow each other and share programs."""
    return build(request.param)


@pytest.fixture
def params(scheme):
    return scheme.init(jax.random.key(7))
