"""indirect_index: the symbol at a given distance from a given symbol.

    <begin> c a b d e <separator> b -1 a        one to the left of b is a
    <begin> c a b d e <separator> b +2 e

All symbols of a row differ. The source is found by content and the answer by its distance from the
source. The task is from PoPE (Gopalakrishnan et al. 2025, https://arxiv.org/abs/2509.10534).
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from pydantic import PositiveInt

from experiments.errors import ConfigError
from experiments.settings.common import Train
from experiments.tasks.base import Labels
from experiments.tasks.lookup import Rows, permutation, question_and_answer


@dataclasses.dataclass(frozen=True)
class IndirectIndex(Rows):
    """Say the symbol at a given distance from a given one."""

    symbols: PositiveInt = 128
    """Number of different symbols; no row holds one twice."""
    largest_shift: PositiveInt = 4
    """Shifts are up to this in either direction, and never zero."""
    shortest: PositiveInt = 8
    """The least number n of symbols."""
    eval_batches: PositiveInt = 8
    """Batches of the evaluation; a row has one answer only."""
    train: Train = dataclasses.field(default_factory=lambda: Train(steps=4000))
    """How the model is trained."""

    name: ClassVar[str] = "indirect_index"
    labels: ClassVar[Labels] = Labels("say the symbol at a distance from another")
    exact_match: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        """Padding, begin, separator, the shifts, the symbols."""
        return 3 + 2 * self.largest_shift + self.symbols

    def most(self, length):
        """Returns n, where n + 5 tokens make a row."""
        return length - 4

    def fill(self, bits, count):
        """Returns tokens and mask."""
        width, shifts = bits.shape[1], 2 * self.largest_shift
        x = 3 + shifts + permutation(bits, self.symbols)
        x = jnp.pad(x, ((0, 0), (0, width)))[:, :width]
        index = (bits[:, -2:-1] % shifts).astype(jnp.int32)
        shift = index - self.largest_shift
        shift += shift >= 0  # Never zero.
        # The source leaves room for the shift.
        low, high = jnp.maximum(-shift, 0), count - jnp.maximum(shift, 0)
        source = low + ((bits[:, -2:-1] >> 12) % (high - low).astype(jnp.uint32)).astype(jnp.int32)
        question, answer = (jnp.take_along_axis(x, i, 1) for i in (source, source + shift))
        asked = jnp.concatenate([question, 3 + index, answer], 1)
        asked = jnp.pad(asked, ((0, 0), (0, width - 3)))
        tokens, mask = question_and_answer(x, asked, count, 3)
        return tokens, jnp.where(jnp.arange(width)[None] < count + 4, 0.0, mask)

    def check(self) -> None:
        """Raises ConfigError for settings that contradict one another."""
        super().check()
        if self.largest_shift >= self.shortest:
            raise ConfigError(
                f"indirect_index.largest_shift: {self.largest_shift} is not below "
                f"indirect_index.shortest = {self.shortest}"
            )
        if self.symbols < self.most(self.longest):
            raise ConfigError(
                f"indirect_index.symbols: {self.symbols} are too few for "
                f"{self.most(self.longest)} different symbols in a row"
            )
