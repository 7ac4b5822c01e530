"""The tasks that models are trained on: an import line per task."""

from experiments.tasks.base import Task as Task
from experiments.tasks.copy import Copy as Copy
from experiments.tasks.copy import Sort as Sort
from experiments.tasks.flip_flop import FlipFlop as FlipFlop
from experiments.tasks.induction import Induction as Induction
from experiments.tasks.kback import KBack as KBack
from experiments.tasks.kth import Kth as Kth
from experiments.tasks.majority import Majority as Majority
from experiments.tasks.masked import Masked as Masked
from experiments.tasks.text import Text as Text

TASKS: dict[str, type[Task]] = {
    thing.name: thing
    for thing in list(globals().values())
    if isinstance(thing, type) and issubclass(thing, Task) and thing.name
}
"""Every task imported above by its name."""
