"""Settings that all schemes share: the sizes of the model and how it is trained."""

import dataclasses
from typing import Any, ClassVar

from experiments.config_io import STRICT, need
from experiments.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of the decoder-only transformer."""

    __pydantic_config__: ClassVar[Any] = STRICT

    model_dim: int = 64
    """Width D."""
    num_layers: int = 2
    """Number of blocks."""
    num_heads: int = 4
    """Heads N; the head dim is D / N."""
    mlp_factor: int = 4
    """Width of the MLP divided by D."""

    @property
    def head_dim(self) -> int:
        """H = D / N."""
        return self.model_dim // self.num_heads

    def check(self, path: str) -> None:
        """Raises ConfigError for sizes that cannot be."""
        for field in dataclasses.fields(self):
            need(getattr(self, field.name) >= 1, f"{path}.{field.name}", "must be at least 1", self)
        if self.model_dim % self.num_heads:
            raise ConfigError(
                f"{path}.model_dim: {self.model_dim} is not divisible by "
                f"{path}.num_heads = {self.num_heads}"
            )


@dataclasses.dataclass(frozen=True)
class Train:
    """AdamW with linear warm-up and cosine decay, the same for every scheme."""

    __pydantic_config__: ClassVar[Any] = STRICT

    steps: int = 300
    """Optimiser steps."""
    batch: int = 32
    """Sequences per step."""
    learning_rate: float = 3e-3
    """Highest learning rate."""
    warmup: int = 50
    """Steps of linear warm-up."""
    final_rate: float = 0.05
    """Last learning rate as a share of the highest."""
    b2: float = 0.98
    """AdamW's second decay."""
    weight_decay: float = 0.01
    """AdamW's weight decay."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    steps_per_call: int = 25
    """Steps that one call of the compiled function makes; a point of the curve each."""

    def check(self, path: str) -> None:
        """Raises ConfigError for settings that cannot be."""
        for name in ("steps", "batch", "steps_per_call"):
            need(getattr(self, name) >= 1, f"{path}.{name}", "must be at least 1", self)
        for name in ("learning_rate", "clip"):
            need(getattr(self, name) > 0, f"{path}.{name}", "must be positive", self)
        for name in ("weight_decay", "warmup", "final_rate"):
            need(getattr(self, name) >= 0, f"{path}.{name}", "must not be negative", self)
        need(0 < self.b2 < 1, f"{path}.b2", "must be between 0 and 1", self)
        if self.warmup >= self.steps:
            raise ConfigError(
                f"{path}.warmup: {self.warmup} leaves nothing of {path}.steps = {self.steps}"
            )
        if self.steps % self.steps_per_call:
            raise ConfigError(
                f"{path}.steps: {self.steps} is not a multiple of "
                f"{path}.steps_per_call = {self.steps_per_call}"
            )
