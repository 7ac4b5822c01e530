"""Names and arguments that will be removed, with their dates; docs/versions.md has the policy."""

import dataclasses
import datetime
import warnings


@dataclasses.dataclass(frozen=True)
class Deprecation:
    """A name or an argument that still works and warns.

    Attributes:
      since: the version that warned first.
      released: the date of that version.
      until: the last date on which the name works; 90 days after `released`, or later.
      instead: the replacement, as code.
    """

    since: str
    released: datetime.date
    until: datetime.date
    instead: str


DEPRECATIONS: dict[str, Deprecation] = {}
"""By the name as users write it, such as `posenc_jax.old_name` or `attention(old=)`."""


def warn_deprecated(name: str) -> None:
    """Warns the caller of the function that calls this one, with the entry of `DEPRECATIONS`."""
    entry = DEPRECATIONS[name]
    warnings.warn(
        f"{name} is deprecated since {entry.since} and works until {entry.until}: "
        f"write {entry.instead}",
        DeprecationWarning,
        stacklevel=3,
    )


def overdue(today: datetime.date) -> list[str]:
    """Returns the names that should have been removed by `today`."""
    return [name for name, entry in DEPRECATIONS.items() if entry.until < today]
