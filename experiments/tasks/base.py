"""The interface of a task: settings, sampling on the device, evaluation, and labels.

Batches are tokens int32 [B, T + 1] for T inputs of the model: it reads tokens[:, :-1] and
predicts tokens[:, 1:]. The mask float32 [B, T + 1] is 1 on the tokens that count. A model without
causality (`Model.is_causal`) reads tokens[:, 1:], with 0 for the tokens that count.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field, NonNegativeInt

import posenc_jax as pe
from experiments.errors import ConfigError
from experiments.models.model import Position
from experiments.settings.common import Model, Rates, Train
from experiments.settings.config_io import near, strict

Length = Annotated[int, Field(ge=2)]
PLACES = 16
"""Number of parts of a row, of equal length, with a score each."""


@dataclasses.dataclass(frozen=True)
class Labels:
    """How tables and plots show the results of a task.

    Attributes:
      about: the function to learn, as a phrase.
      metric: name of the score.
      unit: the score in words.
      digits: of the score behind the point.
      higher_is_better: whether a higher score is.
      limits: the range of scores in plots; None: from the data.
      length_unit: the unit of lengths.
      modes: ways of evaluating by name, with an explanation of each.
    """

    about: str = ""
    metric: str = "accuracy"
    unit: str = "accuracy"
    digits: int = 2
    higher_is_better: bool = True
    limits: tuple[float, float] | None = (-0.03, 1.05)
    length_unit: str = "symbols"
    modes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def better(self) -> str:
        """Which scores are better: higher or lower."""
        return "higher" if self.higher_is_better else "lower"

    @property
    def sign(self) -> int:
        """The sign of a change for the worse."""
        return -1 if self.higher_is_better else 1


@dataclasses.dataclass(frozen=True)
class Data:
    """Data that all runs of a task share.

    Attributes:
      train: a pytree of arrays on the device for `Task.sample`.
      held_out: data for `Task.evaluate`.
      baseline: the score that `fits` compares with, if it depends on the data.
      facts: lines that identify the data, by subject.
    """

    train: Any = None
    held_out: Any = None
    baseline: float | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A score, and the conditions of the measurement.

    Attributes:
      mode: the way of evaluating, one of `Labels.modes`, or "plain".
      length: of the context.
      value: the score, None where no token is scored.
      in_distribution: whether the length is the training length.
      variant: the change of the scheme after training, None for none.
      places: the score in each of `PLACES` parts of the row, None for parts without scored tokens.
        Default: not measured.
    """

    mode: str
    length: int
    value: float | None
    in_distribution: bool
    variant: str | None = None
    places: list[float | None] | None = None


@strict
class Task(abc.ABC):
    """A task. A subclass sets `name`, and defines the abstract methods."""

    train_length: Length = 32
    """Inputs T per training sequence."""
    test_lengths: tuple[int, ...] = (32, 48, 64, 128)
    """Lengths of the evaluation; the first is the training length."""
    model: Model = dataclasses.field(default_factory=Model)
    """Sizes of the model."""
    train: Train = dataclasses.field(default_factory=Train)
    """How the model is trained."""
    coordinates: Literal["positions", "shifted", "randomized", "random_floats"] = "positions"
    """Coordinates of the scheme: positions; shifted (positions plus a random offset per sequence,
    in training only); randomized (sorted random integers, in evaluation too); random_floats (sorted
    random numbers, evenly spaced in evaluation)."""
    coordinate_range: NonNegativeInt = 0
    """All coordinates are below this; 0: the longest test length."""
    schemes: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Settings of schemes for this task; on the command line --<task>.schemes.t5.max-distance."""

    rates: dict[str, Rates] = dataclasses.field(default_factory=dict, hash=False)
    """Learning rates of schemes for this task; the others have that of `train`."""

    name: ClassVar[str] = ""
    """The name in files, flags, tables and plots."""
    labels: ClassVar[Labels] = Labels()
    """Words and units of tables and plots."""
    measure_settings: ClassVar[frozenset[str]] = frozenset()
    """Settings of the evaluation alone: trained parameters do not depend on them."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """The number of different tokens."""

    @property
    def longest(self) -> int:
        """The longest sequence of the evaluation."""
        return max(self.test_lengths)

    @property
    def num_coordinates(self) -> int:
        """All coordinates are below this: the number of rows of a learned table."""
        return self.coordinate_range or self.longest

    @property
    def views(self) -> tuple[str, ...]:
        """The names of the scores at each length, modes and variants; the main score is first."""
        return ("plain",)

    def lengths_of(self, view: str) -> tuple[int, ...]:
        """Returns the lengths at which a view has scores."""
        return self.test_lengths

    def without_score(self, view: str | None, length: int) -> str:
        """Returns why there is no score of a view (None: the main one) at a length, or ""."""
        if view is not None and view not in self.views:
            return f"unknown view{near(view, self.views)}"
        if length not in (lengths := self.lengths_of(view or self.views[0])):
            return f"length {length} is not among {list(lengths)}"
        return ""

    def at_rates_of(self, scheme: str) -> Self:
        """Returns the task with the learning rates in `rates` of a scheme."""
        train = dataclasses.replace(self.train, **dataclasses.asdict(self.rates[scheme]))
        return dataclasses.replace(self, train=train)

    @property
    def selection_view(self) -> str:
        """The view by which settings are chosen: the main score's, unless data are split."""
        return self.views[0]

    def at_trained_length(self) -> Self:
        """Returns the task with an evaluation at the training length alone, to choose settings.

        The range of random coordinates stays: it is of the training, too.
        """
        limit = 0 if self.coordinates == "positions" else self.num_coordinates
        return dataclasses.replace(self, test_lengths=self.test_lengths[:1], coordinate_range=limit)

    def in_distribution(self, view: str, length: int) -> bool:
        """Returns whether the sequences of a view at a length are as in training."""
        return length == self.train_length

    @property
    def zero_shot(self) -> tuple[str, ...]:
        """The views that are zero-shot variants of schemes."""
        return ()

    def load(self) -> Data:
        """Returns the data of the task; empty by default, for tasks that draw their data."""
        return Data()

    @abc.abstractmethod
    def sample(
        self, key: jax.Array, batch: int, length: int, data: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns tokens int32 [B, length + 1] and a mask float32 [B, length + 1].

        Args:
          key: of this batch.
          batch: B.
          length: inputs per sequence.
          data: `Data.train` from `load`.
        """

    def draw_coordinates(
        self, key: jax.Array, tokens: jax.Array, *, training: bool
    ) -> jax.Array | None:
        """Returns coordinates [B, T] for tokens [B, T + 1]; None for the positions.

        Args:
          key: of this batch.
          tokens: the batch.
          training: whether the batch is for training.
        """
        if self.coordinates == "positions" or (self.coordinates == "shifted" and not training):
            return None
        key = jax.random.fold_in(key, 1)
        positions = pe.positions.count_up(tokens.shape[0], tokens.shape[1] - 1)
        limit, length = self.num_coordinates, positions.shape[1]
        if self.coordinates == "shifted":
            return pe.positions.shifted(key, positions, limit - length + 1)
        if self.coordinates == "randomized":
            return pe.positions.randomized(key, positions, limit)
        if training:
            return pe.positions.random_floats(key, positions, float(limit))
        place = jnp.arange(tokens.shape[1])
        inputs = jnp.where(tokens > 0, place, 0).max(1, keepdims=True)  # The padding is left out.
        spaced = pe.positions.spaced_floats(positions, 1, float(limit))
        return spaced / jnp.maximum(inputs, self.train_length)

    @abc.abstractmethod
    def evaluate(
        self, position: Position, params: nnx.State, seed: int, data: Data
    ) -> list[Evaluation]:
        """Returns the scores of trained parameters; the first at the training length.

        Args:
          position: the scheme, or the layers, of the training.
          params: of the model.
          seed: of the test data.
          data: from `load`.
        """

    @abc.abstractmethod
    def fits(self, score: float, data: Data) -> bool:
        """Returns whether a score at the training length means a learned task."""

    @abc.abstractmethod
    def fit_rule(self, data: Data) -> str:
        """Returns the rule of `fits` in words."""

    def fitted(self, evaluations: list[Evaluation], data: Data) -> bool:
        """Returns whether the score at the training length fits."""
        trained = next(e for e in evaluations if e.in_distribution and e.variant is None)
        return trained.value is not None and self.fits(trained.value, data)

    def check(self) -> None:
        """Raises ConfigError for settings that contradict one another."""
        name = self.name
        self.model.check(f"{name}.model")
        self.train.check(f"{name}.train")
        lengths = self.test_lengths
        if not lengths or list(lengths) != sorted(set(lengths)):
            raise ConfigError(f"{name}.test_lengths: must grow, got {list(lengths)}")
        if lengths[0] != self.train_length:
            less = "shorter than" if lengths[0] < self.train_length else "beyond"
            raise ConfigError(
                f"{name}.test_lengths: begins with {lengths[0]}, {less} the training length "
                f"{self.train_length}; the first must be that length"
            )
        if self.coordinates == "positions" and self.coordinate_range:
            raise ConfigError(
                f"{name}.coordinate_range: {self.coordinate_range} is for random coordinates, but "
                f"{name}.coordinates are positions"
            )
        if self.num_coordinates < self.longest:
            raise ConfigError(
                f"{name}.coordinate_range: {self.coordinate_range} is below the longest test "
                f"length {self.longest}"
            )
