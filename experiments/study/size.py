"""The settings of a size of a study."""

import dataclasses
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveFloat

from experiments.settings.common import Seeds
from experiments.settings.config_io import STRICT


@dataclasses.dataclass(frozen=True)
class Size:
    """Settings of a size without settings of runs."""

    __pydantic_config__: ClassVar[Any] = STRICT

    rates: tuple[PositiveFloat, ...] = ()
    """Learning rates, at least three, growing."""
    rates_of: str = ""
    """In place of `rates`: the size whose chosen settings this one has, see `Train.base_width`."""
    task: str = ""
    """The task; empty: that of the study."""
    seeds: Seeds = 5
    """Paired seeds at the best rate: 0, 1, ..."""
    selection_seeds: Annotated[int, Field(ge=1, le=6)] = 3
    """Seeds by which settings are chosen: `first_selection_seed` and the next ones."""
    tries: Annotated[int, Field(ge=0, le=2)] = 0
    """Further settings of each scheme at its best rate: with parameters of its own, other learning
    rates for these, 10 and 3 times that of the rest; without, rates half a step up and down."""
    unstable: PositiveFloat = 0.1
    """A rate is unstable, and not chosen, if the scores of its selection seeds have a greater
    standard deviation, or its score with other rounding differs by more."""
    equal_time: bool | tuple[str, ...] = False
    """Whether to run with the baseline's training time too, or the schemes that do."""
    budgets: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = ()
    """Other numbers of steps for the baseline, relative to its own, growing."""
    best: NonNegativeInt = 0
    """With `rates_of`: the number of schemes with the best mean scores there that run; 0: all. If
    this size has more selection seeds, these choose their settings anew."""
    always: tuple[str, ...] = ()
    """With `best`: further schemes that run, besides the baseline."""
