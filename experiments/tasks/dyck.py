"""dyck: close brackets in the right order.

    ( [ > ] ( > ) > ) ...        > closes; the bracket after it is the answer

A random walk of opening and closing brackets of `kinds` kinds, at most `depth` deep. After a token
that says that a bracket closes, the kind of the innermost open bracket follows, and counts. The
language is Dyck-(k, m) of Hewitt et al. (2020, https://arxiv.org/abs/2010.07515).
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from pydantic import PositiveInt

from experiments.settings.common import Train
from experiments.tasks.base import Length
from experiments.tasks.labels import Labels
from experiments.tasks.lookup import Lookup

_CLOSE = 1


@dataclasses.dataclass(frozen=True)
class Dyck(Lookup):
    """Close brackets in the right order."""

    train_length: Length = 64
    """Inputs T per training sequence."""
    test_lengths: tuple[int, ...] = (64, 128, 256)
    """Lengths of the evaluation; the first is the training length."""
    kinds: PositiveInt = 2
    """Kinds of brackets, k."""
    depth: PositiveInt = 8
    """The most brackets that are open at once, m."""
    train: Train = dataclasses.field(default_factory=lambda: Train(steps=1000))
    """How the model is trained."""

    name: ClassVar[str] = "dyck"
    labels: ClassVar[Labels] = Labels("close brackets in the right order")
    seconds: ClassVar[float] = 60.0

    @property
    def vocab_size(self) -> int:
        """Padding, the closing token, opening brackets, closing brackets."""
        return 2 + 2 * self.kinds

    def sample(self, key, batch, length, data=None):
        """Returns tokens and mask, [B, length + 1]; the mask is 1 on closing brackets."""
        bits = jax.random.bits(key, (length + 1, batch))
        row = jnp.arange(batch)

        def step(carry, bits):
            stack, depth, closing = carry  # [B, depth], [B], [B]
            top = stack[row, jnp.maximum(depth - 1, 0)]
            opens = ((bits >> 16) % 2 == 0) & (depth < self.depth) | (depth == 0)
            kind = ((bits & 0xFFFF) % self.kinds).astype(jnp.int32)
            token = jnp.where(opens, 2 + kind, _CLOSE)
            token = jnp.where(closing, 2 + self.kinds + top, token)
            opens &= ~closing
            at = jnp.where(opens, depth, self.depth)  # The last column is never read.
            stack = stack.at[row, at].set(kind)
            return (stack, depth + opens - closing, ~closing & ~opens), (token, closing)

        stack = jnp.zeros((batch, self.depth + 1), jnp.int32)
        start = stack, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
        _, (tokens, closing) = jax.lax.scan(step, start, bits)
        return tokens.T.astype(jnp.int32), closing.T.astype(jnp.float32)
