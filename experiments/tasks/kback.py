"""kback: fetch the symbol k places back, by relative addressing.

A stream of random symbols with query tokens 0 in it. After a query, the symbol k places before
the query is repeated:

    c a b d [0] a f c ...      k = 3

The answer to a query at t is the token at t - k: a symbol, or the answer to an earlier
query, never a query. Two queries are never adjacent. Guessing among the last few tokens has
an accuracy of about 0.24 for k = 4 and 16 symbols.
"""

import dataclasses
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from pydantic import Field, PositiveInt

from experiments.errors import ConfigError
from experiments.tasks.base import Labels
from experiments.tasks.lookup import Lookup

_QUERY = 0


def _later(x: jax.Array, places: int) -> jax.Array:
    """Returns bool [B, T] moved to the right, false at the beginning."""
    return jnp.pad(x, ((0, 0), (places, 0)))[:, : x.shape[1]]


@dataclasses.dataclass(frozen=True)
class KBack(Lookup):
    """Fetch the symbol k places back: relative addressing."""

    offset: PositiveInt = 4
    """k, the distance from a query back to its answer."""
    query_rate: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Probability that a token is drawn as a query; it is kept if neither the token before it
    nor the one k before it was drawn too."""

    name: ClassVar[str] = "kback"
    labels: ClassVar[Labels] = Labels("fetch the symbol k places back: relative addressing")

    @property
    def vocab_size(self) -> int:
        """The query token and the symbols."""
        return 1 + self.symbols

    def sample(self, key, batch, length, data=None):
        """Returns tokens and mask, [B, length + 1]; the mask is 1 on answers."""
        place = jnp.arange(length + 1)
        # One draw for both: low bits make symbols, the other 16 queries. It compiles faster.
        bits = jax.random.bits(key, (batch, length + 1))
        stream = (1 + (bits & 0xFFFF) % self.symbols).astype(jnp.int32)
        drawn = (bits >> 16) < round(self.query_rate * 65536)
        query = drawn & ~_later(drawn, 1) & ~_later(drawn, self.offset)
        query &= (place >= self.offset) & (place < length)
        stream = jnp.where(query, _QUERY, stream)
        answer = _later(query, 1)
        source = jnp.where(answer, place - 1 - self.offset, place)
        for _ in range((length // (self.offset + 1)).bit_length()):
            source = jnp.take_along_axis(source, source, 1)  # An answer may repeat an answer.
        return jnp.take_along_axis(stream, source, 1), answer.astype(jnp.float32)

    def check(self) -> None:
        super().check()
        if self.offset >= self.train_length - 1:
            raise ConfigError(
                f"kback.offset: {self.offset} leaves no query in "
                f"kback.train_length = {self.train_length}"
            )
