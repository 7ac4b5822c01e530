"""Settings that all schemes share: the sizes of the model and how it is trained."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from experiments.errors import ConfigError
from experiments.settings.config_io import strict

Seeds = Annotated[int, Field(gt=0, le=10_000)]
"""A number of seeds."""
Steps = Annotated[int, Field(gt=0, le=10**8)]
"""A number of optimiser steps."""


@strict
class Model:
    """Sizes of the transformer."""

    model_dim: PositiveInt = 64
    """Width D."""
    num_layers: Annotated[int, Field(gt=0, le=1000)] = 2
    """Number of blocks."""
    num_heads: PositiveInt = 4
    """Heads N; the head dim is D / N."""
    mlp_factor: PositiveInt = 4
    """Width of the MLP divided by D."""
    conv_size: NonNegativeInt = 0
    """Kernel size of causal depthwise convolutions, added to the inputs of attention and MLP
    (Canon layers A and C, https://arxiv.org/abs/2512.17351); 0: none."""
    is_causal: bool = True
    """Whether tokens see earlier ones only and the next token is predicted; otherwise tokens see
    all, and those to predict are masked."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products, float32 or bfloat16. Parameters, the optimiser's
    state and losses are float32 in either case."""

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    def check(self, path: str) -> None:
        """Raises ConfigError for sizes that contradict one another."""
        if self.model_dim % self.num_heads:
            raise ConfigError(
                f"{path}.model_dim: {self.model_dim} is not divisible by "
                f"{path}.num_heads = {self.num_heads}"
            )
        if self.conv_size and not self.is_causal:
            raise ConfigError(f"{path}.conv_size: {self.conv_size}, but {path}.is_causal = false")


@strict
class Rates:
    """Learning rates of one scheme, which replace the rates of `Train`."""

    learning_rate: PositiveFloat
    """Highest learning rate."""
    scheme_rate: PositiveFloat = 1.0
    """Learning rate of the scheme's own parameters, relative to that of all others."""


@strict
class Train:
    """AdamW with linear warm-up and cosine decay, the same for every scheme."""

    steps: Steps = 300
    """Optimiser steps: a multiple of `steps_per_call`, more than `warmup`."""
    batch: PositiveInt = 32
    """Sequences per step."""
    learning_rate: PositiveFloat = 3e-3
    """Highest learning rate."""
    scheme_rate: PositiveFloat = 1.0
    """Learning rate of the scheme's own parameters, relative to that of all others."""
    warmup: NonNegativeInt = 50
    """Steps of linear warm-up."""
    final_rate: NonNegativeFloat = 0.05
    """Last learning rate as a share of the highest."""
    b2: Annotated[float, Field(gt=0, lt=1)] = 0.98
    """AdamW's second decay."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's weight decay."""
    clip: PositiveFloat = 1.0
    """Largest norm of the gradient."""
    steps_per_call: PositiveInt = 25
    """Steps that one call of the compiled function makes; a point of the curve each."""
    base_width: Literal[0] = 0
    """Always 0; stored results have it in the hash of their settings."""

    def check(self, path: str) -> None:
        """Raises ConfigError for settings that contradict one another."""
        each = self.steps_per_call
        if self.steps % each or self.steps <= self.warmup:
            nearest = max(self.warmup // each + 1, round(self.steps / each)) * each
            raise ConfigError(
                f"{path}.steps: must be a multiple of {path}.steps_per_call = {each} and more than "
                f"{path}.warmup = {self.warmup}, got {self.steps}; the nearest is {nearest}"
            )
