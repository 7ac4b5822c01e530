"""The benchmark of claims about speed: the time of a training step relative to no encoding.

Nothing is learned. Steps on random tokens are timed in turn with steps of a model without position
encodings; a score is the ratio of the shortest times.

    tokens [B, T]  ->  gradient of the loss  ->  seconds / seconds without encodings
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from pydantic import PositiveInt

import posenc_jax as pe
from experiments.bench.timing import side_by_side
from experiments.models.model import Position, initialize, seed_keys, structure
from experiments.runs.run import Run
from experiments.settings.common import Model
from experiments.settings.config_io import STRICT
from experiments.tasks.base import Data, Labels, Length
from experiments.training.train import mean_loss

_VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Speed:
    """Settings of the benchmark; a claim has them in its table [speed]."""

    __pydantic_config__: ClassVar[Any] = STRICT

    train_length: Length = 512
    """Inputs T per sequence of the first measurement."""
    test_lengths: tuple[int, ...] = (512, 2048)
    """Lengths to measure at."""
    model: Model = dataclasses.field(default_factory=Model)
    """Sizes of the model."""
    tokens: PositiveInt = 4096
    """B T of each step."""
    rounds: PositiveInt = 15
    """Least number of times that each step is timed."""

    name: ClassVar[str] = "speed"
    labels: ClassVar[Labels] = Labels(
        metric="time", unit="times that without encodings", higher_is_better=False
    )
    views: ClassVar[tuple[str, ...]] = ("plain",)
    schemes: ClassVar[Mapping[str, Any]] = {}
    rates: ClassVar[Mapping[str, Any]] = {}

    @property
    def num_coordinates(self) -> int:
        """The longest length."""
        return max(self.test_lengths)

    def check(self) -> None:
        """Raises ConfigError for sizes that contradict one another."""
        self.model.check("speed.model")

    def load(self) -> Data:
        """Returns no data."""
        return Data()

    def ratio(self, position: Position, seed: int, length: int) -> float:
        """Returns the time of a step at a length, as a multiple of the time without encodings."""
        key = seed_keys([seed], "test")[0]
        shape = max(1, self.tokens // length), length + 1
        tokens = jax.random.randint(key, shape, 0, _VOCABULARY)
        steps = {
            name: self._step(scheme, tokens)
            for name, scheme in (("none", pe.NoPE()), ("scheme", position))
        }
        return round(side_by_side(steps, rounds=self.rounds, seconds=0.0)[1].ratio, 3)

    def _step(self, position: Position, tokens: jax.Array) -> Any:
        graphdef = structure(self.model, position, _VOCABULARY)
        params = initialize(self.model, position, _VOCABULARY, seed_keys([0], "parameters"))
        params = jax.tree.map(lambda x: x[0], params)
        gradient = jax.jit(jax.grad(mean_loss), static_argnums=1)
        mask = jnp.ones(tokens.shape, jnp.float32)
        return lambda: gradient(params, graphdef, tokens, mask)


@dataclasses.dataclass(frozen=True)
class SpeedRun(Run):
    """A measurement of the benchmark with one scheme; another seed is a repetition."""

    @property
    def program(self) -> str:
        """Identifies the compiled programs, which all repetitions share."""
        return dataclasses.replace(self, seed=0).name

    def train(self, data: Data, **options: Any) -> None:
        """Returns None: nothing is trained."""

    def measure(self, trained: Any, data: Data) -> dict[str, Any]:
        """Returns the ratios at all lengths."""
        lengths = self.task.test_lengths
        ratios = {str(n): self.task.ratio(self.position, self.seed, n) for n in lengths}
        return {"fitted": True, "scores": {"plain": ratios}}
