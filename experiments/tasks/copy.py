"""copy: repeat a sequence.

    <begin> c a b a <separator> c a b a <separator>         kind = "random"
    <begin> c a b d <separator> c a b d <separator>         kind = "unique": no symbol twice

All tokens after the first separator count; the second separator ends the answer. "unique" is
unique_copy of Huang et al. (2025, https://arxiv.org/abs/2410.02140), in which the token before
the one to be copied can be found by content.

sort: repeat a sequence in ascending order.

    <begin> c a d b <separator> a b c d <separator>

With `kind` "unique" (the default) no symbol occurs twice, as in the task sort of Huang et al.
(2025, https://arxiv.org/abs/2410.02140). The next answer follows from the last answer and the set
of symbols: no position is needed.
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from pydantic import PositiveInt

from experiments.errors import ConfigError
from experiments.settings.common import Train
from experiments.tasks.base import Labels
from experiments.tasks.lookup import SEPARATOR, Rows, permutation, question_and_answer


@dataclasses.dataclass(frozen=True)
class Copy(Rows):
    """Repeat a sequence."""

    symbols: PositiveInt = 64
    """Number of different symbols."""
    kind: Literal["random", "unique"] = "random"
    """random, or unique (no symbol twice)."""
    train: Train = dataclasses.field(default_factory=lambda: Train(steps=800))
    """How the model is trained."""

    name: ClassVar[str] = "copy"
    labels: ClassVar[Labels] = Labels("repeat a sequence")

    @property
    def vocab_size(self) -> int:
        """Padding, begin, separator, the symbols."""
        return 3 + self.symbols

    def most(self, length):
        """Returns n, where 2 n + 3 tokens make a row."""
        return (length - 2) // 2

    def fill(self, bits, count):
        if self.kind == "unique":
            drawn = jnp.pad(permutation(bits, self.symbols), ((0, 0), (0, bits.shape[1])))
            drawn = drawn[:, : bits.shape[1]]
        else:
            drawn = (bits % self.symbols).astype(jnp.int32)
        x = 3 + drawn
        return question_and_answer(x, ended(self.order(x, count), count), count, count + 1)

    def order(self, x, count):
        """Returns the answer to x [B, W]: x itself."""
        return x

    def check(self) -> None:
        super().check()
        if self.kind == "unique" and self.symbols < self.most(self.longest):
            raise ConfigError(
                f"{self.name}.symbols: {self.symbols} are too few for {self.most(self.longest)} "
                "different symbols in a row"
            )


def ended(x, count):
    """Returns x [B, W] with a separator after the first `count` [B, 1] tokens."""
    return jnp.where(jnp.arange(x.shape[1])[None] == count, SEPARATOR, x)


@dataclasses.dataclass(frozen=True)
class Sort(Copy):
    """Repeat a sequence in ascending order."""

    kind: Literal["random", "unique"] = "unique"
    """random, or unique (no symbol twice)."""
    train: Train = dataclasses.field(default_factory=lambda: Train(steps=1000))
    """How the model is trained."""

    name: ClassVar[str] = "sort"
    labels: ClassVar[Labels] = Labels("repeat a sequence in ascending order")

    def order(self, x, count):
        """Returns the first `count` tokens of x in ascending order."""
        used = jnp.arange(x.shape[1])[None] < count
        return jnp.sort(jnp.where(used, x, 3 + self.symbols), 1)
