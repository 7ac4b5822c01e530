"""kback: fetch the symbol k places back. It needs relative addresses.

A stream of random symbols; here and there a query token 0, after which the symbol that
stands k places before the query comes again:

    c a b d [0] a f c ...      k = 3

The answer to a query at t is the token at t - k, whatever that is (an answer, too). Two
queries never follow one another. Guessing among the last tokens is right more often than
chance: about 0.24 for k = 4 and 16 symbols.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from experiments.strict import ConfigError, need
from experiments.tasks.base import Lookup

_QUERY = 0


@dataclasses.dataclass(frozen=True)
class KBack(Lookup):
    """Fetch the symbol k places back: relative addressing."""

    offset: int = 4
    """k, the distance from a query back to its answer."""
    query_rate: float = 0.25
    """Probability that a token becomes a query."""

    name: ClassVar[str] = "kback"
    about: ClassVar[str] = "fetch the symbol k places back (relative addressing)"

    @property
    def vocab_size(self) -> int:
        """The query token and the symbols."""
        return 1 + self.symbols

    def sample(self, key, batch, length, data=None):
        """Returns tokens and mask, [B, length + 1]; the mask is 1 on answers."""
        key_symbols, key_queries = jax.random.split(key)
        shape = (batch, length + 1)
        stream = jax.random.randint(key_symbols, shape, 1, 1 + self.symbols, jnp.int32)
        place = jnp.arange(length + 1)
        query = jax.random.bernoulli(key_queries, self.query_rate, shape)
        query &= (place >= self.offset) & (place < length)
        query &= ~jnp.pad(query, ((0, 0), (1, 0)))[:, :-1]
        stream = jnp.where(query, _QUERY, stream)
        answer = jnp.pad(query, ((0, 0), (1, 0)))[:, :-1]

        def fill(recent, column):  # recent [B, k + 1]: the tokens before this one
            token, is_answer = column
            token = jnp.where(is_answer, recent[:, 0], token)
            return jnp.concatenate([recent[:, 1:], token[:, None]], 1), token

        start = jnp.zeros((batch, self.offset + 1), jnp.int32)
        _, tokens = jax.lax.scan(fill, start, (stream.T, answer.T))
        return tokens.T, answer.astype(jnp.float32)

    def sample_test(self, key, batch):
        """Returns a batch whose answers belong to the length in which their query falls.

        Length n stands for queries at positions between the length before it and n.
        """
        tokens, mask = self.sample(key, batch, self.longest)
        query = jnp.arange(self.longest + 1) - 1
        index = jnp.searchsorted(jnp.asarray(self.test_lengths), query, side="right")
        return tokens, mask, jnp.broadcast_to(index.astype(jnp.int32), tokens.shape)

    def check(self) -> None:
        """Raises ConfigError for settings that contradict one another."""
        super().check()
        need(self.offset >= 1, "kback.offset", "must be at least 1", self)
        need(0 < self.query_rate <= 1, "kback.query_rate", "must be in (0, 1]", self)
        if self.offset >= self.train_length - 1:
            raise ConfigError(
                f"kback.offset: {self.offset} leaves no query in "
                f"kback.train_length = {self.train_length}"
            )
