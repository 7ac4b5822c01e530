"""One of every scheme, for the suites that run over all of them."""

import jax
import pytest
from support import build, make_batch

import posenc_jax as pe


@pytest.fixture
def tokens():
    return make_batch()


@pytest.fixture(params=pe.SCHEMES.values(), ids=pe.SCHEMES.keys())
def scheme(request):
    return build(request.param)


@pytest.fixture
def params(scheme):
    return scheme.init(jax.random.key(7))
