"""How tables and plots show the results of a task."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from experiments.settings.config_io import STRICT


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
      every_length: whether narrow tables show all lengths, rather than the first and the last.
      modes: ways of evaluating by name, with an explanation of each.
      places: what `Evaluation.places` are, from the first (0) to the last (1).
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    about: str = ""
    metric: str = "accuracy"
    unit: str = "accuracy"
    digits: int = 2
    higher_is_better: bool = True
    limits: tuple[float, float] | None = (-0.03, 1.05)
    length_unit: str = "symbols"
    every_length: bool = False
    modes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    places: str = "place in the row"

    @property
    def better(self) -> str:
        """Which scores are better: higher or lower."""
        return "higher" if self.higher_is_better else "lower"

    @property
    def sign(self) -> int:
        """The sign of a change for the worse."""
        return -1 if self.higher_is_better else 1
