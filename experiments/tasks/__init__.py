"""What models are trained on; one task per file behind the base in `base.py`."""

from experiments.tasks.base import Task as Task
from experiments.tasks.kback import KBack as KBack
from experiments.tasks.kth import Kth as Kth
from experiments.tasks.text import Text as Text

TASKS: dict[str, type[Task]] = {task.name: task for task in (KBack, Kth, Text)}
"""Every task by its name."""
