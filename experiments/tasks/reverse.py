"""reverse: repeat a sequence backwards.

    <begin> c a b d <separator> d b a c <separator>

The distance from an answer to its source grows with every token. `kind` is as in the task copy.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from experiments.settings.common import Train
from experiments.tasks.base import Labels
from experiments.tasks.copy import Copy


@dataclasses.dataclass(frozen=True)
class Reverse(Copy):
    """Repeat a sequence backwards."""

    train: Train = dataclasses.field(default_factory=lambda: Train(steps=1600))
    """How the model is trained."""

    name: ClassVar[str] = "reverse"
    labels: ClassVar[Labels] = Labels("repeat a sequence backwards")

    def order(self, x, count):
        """Returns the first `count` tokens of x backwards."""
        places = count - 1 - jnp.arange(x.shape[1])[None]
        return jnp.take_along_axis(x, jnp.maximum(places, 0), 1)
