"""induction: continue a repeated piece.

    <begin> c a b d e <separator> a b d e ...

All symbols before the separator differ. After it, a piece of them is repeated from a random place;
its first symbol is given, the others count. Each answer is the symbol after the earlier occurrence
of the previous symbol: an induction head (Olsson et al. 2022, https://arxiv.org/abs/2209.11895)
attends there, and needs a head for the previous token.
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
class Induction(Rows):
    """Continue a repeated piece."""

    symbols: PositiveInt = 128
    """Number of different symbols; no row holds one twice before the separator."""
    repeated: PositiveInt = 4
    """Symbols that are repeated, the first of which is given."""
    shortest: PositiveInt = 8
    """The least number n of symbols before the separator."""
    train: Train = dataclasses.field(default_factory=lambda: Train(steps=1000))
    """How the model is trained."""

    name: ClassVar[str] = "induction"
    labels: ClassVar[Labels] = Labels("continue a repeated piece")

    @property
    def vocab_size(self) -> int:
        """Padding, begin, separator, the symbols."""
        return 3 + self.symbols

    def most(self, length):
        """Returns n, where n + 2 + `repeated` tokens make a row."""
        return length - 1 - self.repeated

    def fill(self, bits, count):
        x = 3 + permutation(bits, self.symbols)
        x = jnp.pad(x, ((0, 0), (0, bits.shape[1])))[:, : bits.shape[1]]
        starts = (count - self.repeated + 1).astype(jnp.uint32)
        start = (bits[:, -2:-1] % starts).astype(jnp.int32)
        places = jnp.minimum(start + jnp.arange(bits.shape[1])[None], bits.shape[1] - 1)
        again = jnp.take_along_axis(x, places, 1)
        tokens, mask = question_and_answer(x, again, count, self.repeated)
        first = jnp.arange(bits.shape[1])[None] == count + 2
        return tokens, jnp.where(first, 0.0, mask)

    def check(self) -> None:
        super().check()
        if not 2 <= self.repeated <= self.shortest:
            raise ConfigError(
                f"induction.repeated: must be 2 to induction.shortest = {self.shortest}, got "
                f"{self.repeated}"
            )
        if self.symbols < self.most(self.longest):
            raise ConfigError(
                f"induction.symbols: {self.symbols} are too few for {self.most(self.longest)} "
                "different symbols in a row"
            )
