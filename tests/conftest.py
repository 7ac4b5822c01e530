"""Fixtures of several rooms."""

import pytest

from tests.support import make_batch


@pytest.fixture
def tokens():
    return make_batch()
