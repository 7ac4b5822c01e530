"""Deprecated names warn, and are removed after their date."""

import datetime

import pytest

from posenc_jax import _deprecated
from posenc_jax._deprecated import DEPRECATIONS, Deprecation, overdue, warn_deprecated

EXAMPLE = Deprecation(
    "0.2.0", datetime.date(2027, 1, 1), datetime.date(2027, 4, 1), "posenc_jax.new_name"
)


def test_no_deprecated_name_is_past_its_date():
    assert not (late := overdue(datetime.date.today())), f"remove {', '.join(late)}"


def test_names_work_for_three_months():
    for name, entry in DEPRECATIONS.items():
        assert entry.until - entry.released >= datetime.timedelta(days=90), name


def test_names_are_overdue_after_their_last_date(monkeypatch):
    monkeypatch.setattr(_deprecated, "DEPRECATIONS", {"posenc_jax.old_name": EXAMPLE})
    assert overdue(EXAMPLE.until) == []
    assert overdue(EXAMPLE.until + datetime.timedelta(days=1)) == ["posenc_jax.old_name"]


def test_the_warning_says_what_to_write(monkeypatch):
    monkeypatch.setitem(DEPRECATIONS, "posenc_jax.old_name", EXAMPLE)

    def old_name():
        warn_deprecated("posenc_jax.old_name")

    words = "old_name is deprecated since 0.2.0 and works until 2027-04-01: write posenc_jax.new_n"
    with pytest.warns(DeprecationWarning, match=words) as record:
        old_name()
    assert record[0].filename == __file__  # The line of the user, not the library's.
