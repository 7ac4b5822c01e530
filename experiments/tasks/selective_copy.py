"""selective_copy: repeat the symbols between the blanks, in their order.

    <begin> . c . . a b . <separator> c a b

n places hold `items` symbols, which may repeat, at random places, and blanks elsewhere; the number
of symbols is always the same, the distances between them are not. The task is selective copying of
Gu and Dao (2023, https://arxiv.org/abs/2312.00752), used for CoPE (Golovneva et al. 2024,
https://arxiv.org/abs/2405.18719).
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from pydantic import PositiveInt

from experiments.errors import ConfigError
from experiments.settings.common import Train
from experiments.tasks.labels import Labels
from experiments.tasks.lookup import Rows, question_and_answer

_BLANK = 3


@dataclasses.dataclass(frozen=True)
class SelectiveCopy(Rows):
    """Repeat the symbols between blanks, in their order."""

    items: PositiveInt = 6
    """Symbols per row."""
    shortest: PositiveInt = 12
    """The least number n of places."""
    train: Train = dataclasses.field(default_factory=lambda: Train(steps=2000))
    """How the model is trained."""

    name: ClassVar[str] = "selective_copy"
    labels: ClassVar[Labels] = Labels("repeat the symbols between blanks")
    seconds: ClassVar[float] = 65.0

    @property
    def vocab_size(self) -> int:
        """Padding, begin, separator, blank, the symbols."""
        return 4 + self.symbols

    def most(self, length):
        """Returns n, where n + 2 + `items` tokens make a row."""
        return length - 1 - self.items

    def fill(self, bits, count):
        """Returns tokens and mask."""
        place = jnp.arange(bits.shape[1])[None]
        order = jnp.argsort(jnp.where(place < count, bits >> 1, jnp.uint32(0xFFFFFFFF)), axis=1)
        chosen = jnp.sort(order[:, : self.items], 1)  # The places of the symbols.
        is_item = (place[:, :, None] == chosen[:, None]).any(2)
        symbols = 4 + (bits[:, ::-1] % self.symbols).astype(jnp.int32)
        x = jnp.where(is_item, symbols, _BLANK)
        width = bits.shape[1] - self.items
        answer = jnp.pad(jnp.take_along_axis(symbols, chosen, 1), ((0, 0), (0, width)))
        return question_and_answer(x, answer, count, self.items)

    def check(self) -> None:
        """Raises ConfigError for settings that contradict one another."""
        super().check()
        if self.items > self.shortest:
            raise ConfigError(
                f"selective_copy.items: {self.items} symbols do not fit into "
                f"selective_copy.shortest = {self.shortest} places"
            )
