"""mqar: associative recall with many queries.

    <begin> k1 v1 k2 v2 k3 v3 <separator> k3 v3 k1 v1 k2 v2

Keys are all different and come from a vocabulary of their own; values may repeat. After the
separator each key is asked once, in random order; the values count. The task is that of Arora et
al. (2023, https://arxiv.org/abs/2312.04927), without the gaps between queries.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from pydantic import PositiveInt

from experiments.errors import ConfigError
from experiments.settings.common import Train
from experiments.tasks.labels import Labels
from experiments.tasks.lookup import Rows, permutation, question_and_answer


@dataclasses.dataclass(frozen=True)
class MQAR(Rows):
    """Recall the values of keys: associative recall with many queries."""

    keys: PositiveInt = 32
    """Number of different keys."""
    shortest: PositiveInt = 2
    """The least number n of pairs."""
    train: Train = dataclasses.field(default_factory=lambda: Train(steps=4000))
    """How the model is trained."""

    name: ClassVar[str] = "mqar"
    labels: ClassVar[Labels] = Labels("recall the values of keys")
    seconds: ClassVar[float] = 120.0

    @property
    def vocab_size(self) -> int:
        """Padding, begin, separator, the keys, the values."""
        return 3 + self.keys + self.symbols

    @property
    def different(self) -> int:
        """The number of keys, or of values if there are more."""
        return max(self.keys, self.symbols)

    def most(self, length):
        """Returns n, where 4 n + 2 tokens make a row."""
        return (length - 1) // 4

    def fill(self, bits, count):
        """Returns tokens and mask."""
        width = bits.shape[1]
        used = jnp.arange(width)[None] < count
        keys = jnp.pad(permutation(bits, self.keys), ((0, 0), (0, width)))[:, :width]
        values = (bits >> 4) % self.symbols
        # Used pairs in random order, then the others.
        order = jnp.argsort(
            jnp.where(used, bits * jnp.uint32(0x9E3779B1) >> 1, jnp.uint32(0xFFFFFFFF)), axis=1
        )
        asked, told = (jnp.take_along_axis(x, order, 1) for x in (keys, values))
        question = interleaved(3 + keys, 3 + self.keys + values)
        answer = interleaved(3 + asked, 3 + self.keys + told)
        tokens, mask = question_and_answer(question, answer, 2 * count, 2 * count)
        value = (jnp.arange(width)[None] - 2 * count) % 2 == 1
        return tokens, jnp.where(value, mask, 0.0)

    def check(self) -> None:
        """Raises ConfigError for settings that contradict one another."""
        super().check()
        if self.keys < self.most(self.longest):
            raise ConfigError(
                f"mqar.keys: {self.keys} are too few for {self.most(self.longest)} pairs in a row"
            )


def interleaved(a, b):
    """Returns a0 b0 a1 b1 ... int32 [B, W] for arrays [B, W]."""
    both = jnp.stack([a.astype(jnp.int32), b.astype(jnp.int32)], 2)
    return both.reshape(a.shape[0], -1)[:, : a.shape[1]]
