"""needle: find a marked symbol in a long row of others.

    <begin> c a <needle> d b a c <separator> d

Modes of the evaluation are depths: where in the row the needle lies, from 0 (the beginning) to 1;
in training and in the mode "plain" it is anywhere.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from pydantic import PositiveInt

from experiments.errors import ConfigError
from experiments.settings.common import Train
from experiments.tasks.base import Length
from experiments.tasks.labels import Labels
from experiments.tasks.lookup import Rows, question_and_answer

_NEEDLE = 3


@dataclasses.dataclass(frozen=True)
class Needle(Rows):
    """Find a marked symbol in a long row of others."""

    train_length: Length = 64
    """Inputs T per training sequence."""
    test_lengths: tuple[int, ...] = (64, 128, 256, 512)
    """Lengths of the evaluation; the first is the training length."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Depths of the needle that are evaluated one by one, as shares of the row."""
    depth: float = -1.0
    """Depth of the needle; -1: anywhere."""
    eval_batch: PositiveInt = 32
    """Sequences per batch of the evaluation, each as long as the longest test length."""
    eval_batches: PositiveInt = 8
    """Batches of the evaluation; a row has one answer only."""
    train: Train = dataclasses.field(default_factory=lambda: Train(steps=1000))
    """How the model is trained."""

    name: ClassVar[str] = "needle"
    labels: ClassVar[Labels] = Labels("find a marked symbol", places="depth of the needle")
    seconds: ClassVar[float] = 80.0
    exact_match: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        """Padding, begin, separator, the mark, the symbols."""
        return 4 + self.symbols

    @property
    def test_modes(self):
        """Any depth, and each depth alone: depth_0 to depth_100."""
        depths = {f"depth_{100 * d:g}": dataclasses.replace(self, depth=d) for d in self.depths}
        return {"plain": self} | depths

    def evaluate(self, position, params, seeds, data):
        """Returns the accuracy at each test length in each mode; places are depths."""
        found = super().evaluate(position, params, seeds, data)
        depths: dict[int, list[float | None]] = {}
        for e in found:
            if e.mode != "plain":
                depths.setdefault(e.length, []).append(round(float(np.mean(e.values)), 5))
        return [
            dataclasses.replace(e, places=depths.get(e.length) if e.mode == "plain" else None)
            for e in found
        ]

    def most(self, length):
        """Returns n, where n + 3 tokens make a row."""
        return length - 2

    def fill(self, bits, count):
        """Returns tokens and mask."""
        place = jnp.arange(bits.shape[1])[None]
        places = count - 1  # The mark and its symbol take two.
        if self.depth < 0:
            mark = (bits[:, -2:-1] % places.astype(jnp.uint32)).astype(jnp.int32)
        else:
            mark = jnp.round(self.depth * (places - 1)).astype(jnp.int32)
        symbols = 4 + (bits % self.symbols).astype(jnp.int32)
        answer = jnp.take_along_axis(symbols, mark + 1, 1)
        x = jnp.where(place == mark, _NEEDLE, symbols)
        return question_and_answer(x, jnp.broadcast_to(answer, x.shape), count, 1)

    def check(self) -> None:
        """Raises ConfigError for settings that contradict one another."""
        super().check()
        if any(not 0 <= depth <= 1 for depth in self.depths):
            raise ConfigError(f"needle.depths: must be from 0 to 1, got {list(self.depths)}")
        if self.depth != -1 and not 0 <= self.depth <= 1:
            raise ConfigError(f"needle.depth: must be from 0 to 1, or -1, got {self.depth}")
