"""The tasks that models are trained on: one file and one import line per task."""

from experiments.tasks.base import Task as Task
from experiments.tasks.kback import KBack as KBack
from experiments.tasks.kth import Kth as Kth
from experiments.tasks.text import Text as Text

TASKS: dict[str, type[Task]] = {
    thing.name: thing
    for thing in list(globals().values())
    if isinstance(thing, type) and issubclass(thing, Task) and thing.name
}
"""Every task imported above by its name."""
