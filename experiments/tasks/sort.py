"""sort: repeat a sequence in ascending order.

    <begin> c a d b <separator> a b c d <separator>

With `kind` "unique" (the default) no symbol occurs twice, as in the task sort of Huang et al.
(2025, https://arxiv.org/abs/2410.02140). The next answer follows from the last answer and the set
of symbols: no position is needed.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from experiments.settings.common import Train
from experiments.tasks.base import Labels
from experiments.tasks.copy import Copy


@dataclasses.dataclass(frozen=True)
class Sort(Copy):
    """Repeat a sequence in ascending order."""

    kind: str = "unique"
    """random, unique (no symbol twice) or same (one symbol only)."""
    train: Train = dataclasses.field(default_factory=lambda: Train(steps=1000))
    """How the model is trained."""

    name: ClassVar[str] = "sort"
    labels: ClassVar[Labels] = Labels("repeat a sequence in ascending order")

    def order(self, x, count):
        """Returns the first `count` tokens of x in ascending order."""
        used = jnp.arange(x.shape[1])[None] < count
        return jnp.sort(jnp.where(used, x, 3 + self.symbols), 1)
