"""Errors that end a command with one line and status 2."""


class ExperimentError(Exception):
    """What the user can put right; the message is one line."""


class ConfigError(ExperimentError, ValueError):
    """A setting that is unknown or cannot be; the message begins with its path."""


class CorpusError(ExperimentError, RuntimeError):
    """A corpus that is missing, damaged or too small."""


class ResultsError(ExperimentError, RuntimeError):
    """A folder of results that cannot be used."""
