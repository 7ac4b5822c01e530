"""Errors that end a command with one line and status 2.

Files that were written before are complete. Docstrings do not repeat when functions raise them.
"""


class ExperimentError(Exception):
    """An error that the user can correct; the message is one line."""


class ConfigError(ExperimentError, ValueError):
    """An unknown or invalid setting; the message begins with its path."""


class CorpusError(ExperimentError, RuntimeError):
    """A corpus that is missing, damaged or too small."""


class ResultsError(ExperimentError, RuntimeError):
    """A folder of results that cannot be used."""


class Locked(ResultsError):
    """A folder that another process holds."""
