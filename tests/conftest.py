"""One of every scheme, for the suites that run over all of them."""

import jax
import pytest

import posenc_jax as pe
from tests.support import build, make_batch


@pytest.fixture
def tokens():
    return make_batch()


# Large enough for 130 tokens, the most that `posenc_jax.testing` uses.
WINDOWS = {"swin": {"window": (16, 16)}, "swin_v2": {"window": (16, 16), "width": 16}}


@pytest.fixture(scope="session", params=pe.SCHEMES)
def scheme(request):
    """For the session, so that all tests of one scheme follow each other and share programs."""
    return build(pe.SCHEMES[request.param], **WINDOWS.get(request.param, {}))


@pytest.fixture
def params(scheme):
    return scheme.init(jax.random.key(7))
