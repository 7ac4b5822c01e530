"""counting: follow variables through increments.

    set_a inc_a . inc_b inc_a ask_a 2 . set_a ask_a 0 ...

Every variable is 0 at the beginning. set makes it 0, inc adds one, a dot changes nothing, and ask
is followed by the value, which counts; values stop at `largest`. The task follows the counting task
of CoPE (Golovneva et al. 2024, https://arxiv.org/abs/2405.18719).
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

_PASS = 1


@dataclasses.dataclass(frozen=True)
class Counting(Lookup):
    """Follow variables through increments."""

    train_length: Length = 64
    """Inputs T per training sequence."""
    test_lengths: tuple[int, ...] = (64, 128, 256)
    """Lengths of the evaluation; the first is the training length."""
    variables: PositiveInt = 1
    """Number of variables."""
    largest: PositiveInt = 9
    """The value at which increments stop."""
    train: Train = dataclasses.field(default_factory=lambda: Train(steps=1000))
    """How the model is trained."""

    name: ClassVar[str] = "counting"
    labels: ClassVar[Labels] = Labels("follow variables through increments")
    seconds: ClassVar[float] = 60.0

    @property
    def vocab_size(self) -> int:
        """Padding, pass, three instructions per variable, the values."""
        return 2 + 3 * self.variables + self.largest + 1

    def sample(self, key, batch, length, data=None):
        """Returns tokens and mask, [B, length + 1]; the mask is 1 on values."""
        bits = jax.random.bits(key, (length + 1, batch))
        variable = ((bits >> 8) % self.variables).astype(jnp.int32)
        at = variable[..., None] == jnp.arange(self.variables)

        def step(carry, drawn):
            values, asked = carry  # [B, variables] each; `asked` for the one whose value follows.
            kind, variable, at = drawn
            answer = (values * asked).sum(1)
            told = asked.any(1)
            # Of 10 instructions: pass 4, increment 3, set 1, ask 2.
            instruction = 2 + 3 * variable + (kind >= 7).astype(jnp.int32) + (kind >= 8)
            token = jnp.where(kind < 4, _PASS, instruction)
            token = jnp.where(told, 2 + 3 * self.variables + answer, token)
            active = at & ~told[:, None] & (kind >= 4)[:, None]
            kind = kind[:, None]
            more = jnp.minimum(values + (active & (kind < 7)), self.largest)
            values = jnp.where(active & (kind == 7), 0, more)
            return (values, active & (kind >= 8)), (token, told)

        start = jnp.zeros((batch, self.variables), jnp.int32)
        kinds = ((bits & 0xFF) * 10 >> 8).astype(jnp.int32)
        _, (tokens, told) = jax.lax.scan(step, (start, start > 0), (kinds, variable, at))
        return tokens.T.astype(jnp.int32), told.T.astype(jnp.float32)
