"""kth: fetch the k-th symbol, by absolute addressing.

    <begin> x_0 x_1 ... x_{n-1} <index j> x_j

n and j are random. The distance from the index token to its answer varies with n; the position of
the answer does not.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from pydantic import PositiveInt

from experiments.errors import ConfigError
from experiments.settings.common import Train
from experiments.tasks.base import Labels
from experiments.tasks.lookup import Lookup

_PAD, _BEGIN = 0, 1


@dataclasses.dataclass(frozen=True)
class Kth(Lookup):
    """Fetch the k-th symbol: absolute addressing."""

    train: Train = dataclasses.field(default_factory=lambda: Train(steps=400))
    """How the model is trained."""
    eval_batches: PositiveInt = 8
    """Batches of the evaluation; a row has one answer only."""
    shortest: PositiveInt = 4
    """The least number n of symbols."""
    indices: PositiveInt = 16
    """Number of different index tokens; j is below this and below n."""

    name: ClassVar[str] = "kth"
    labels: ClassVar[Labels] = Labels("fetch the k-th symbol: absolute addressing")

    @property
    def vocab_size(self) -> int:
        """Padding, begin, the symbols, the indices."""
        return 2 + self.symbols + self.indices

    def _fill(self, bits: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns tokens and mask [B, T + 1] for `count` [B, 1] symbols per row, at most T - 2.

        The first column of bits uint32 [B, T + 1], never a symbol, makes the index.
        """
        symbols = (2 + bits % self.symbols).astype(jnp.int32)
        index = (bits[:, :1] >> 1).astype(jnp.int32) % jnp.minimum(self.indices, count)
        answer = jnp.take_along_axis(symbols, index + 1, 1)
        place = jnp.arange(bits.shape[1])[None]
        tokens = jnp.where(place == 0, _BEGIN, symbols)
        tokens = jnp.where(place == count + 1, 2 + self.symbols + index, tokens)
        tokens = jnp.where(place == count + 2, answer, tokens)
        tokens = jnp.where(place > count + 2, _PAD, tokens)
        return tokens.astype(jnp.int32), (place == count + 2).astype(jnp.float32)

    def _random_count(self, bits: jax.Array, length: int) -> jax.Array:
        """Returns n [B, 1] for sequences of `length` inputs, from the last column of `bits`."""
        return self.shortest + (bits[:, -1:] >> 1).astype(jnp.int32) % (length - 1 - self.shortest)

    def sample(self, key, batch, length, data=None):
        """Returns tokens and mask, [B, length + 1]; the mask is 1 on the answer."""
        bits = jax.random.bits(key, (batch, length + 1))  # One draw: it compiles faster.
        return self._fill(bits, self._random_count(bits, length))

    def sample_test(self, key, batch):
        """Returns a batch whose rows cycle through the test lengths.

        At the training length n is random, as in training; longer lengths are filled.
        """
        bits = jax.random.bits(key, (batch, self.longest + 1))
        index = jnp.arange(batch, dtype=jnp.int32)[:, None] % len(self.test_lengths)
        count = jnp.asarray(self.test_lengths)[index] - 2
        trained = self._random_count(bits, self.train_length)
        tokens, mask = self._fill(bits, jnp.where(index == 0, trained, count))
        return tokens, mask, jnp.broadcast_to(index, tokens.shape)

    def check(self) -> None:
        super().check()
        if self.shortest > self.train_length - 2:
            raise ConfigError(
                f"kth.shortest: {self.shortest} symbols do not fit into "
                f"kth.train_length = {self.train_length}"
            )
        if self.eval_batch % len(self.test_lengths):
            raise ConfigError(
                f"kth.eval_batch: {self.eval_batch} is not a multiple of the "
                f"{len(self.test_lengths)} test lengths"
            )
