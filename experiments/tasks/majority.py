"""majority: the more frequent of two symbols.

    <begin> 1 0 1 1 0 <separator> 1

One answer per row; n is odd, so there are no ties. The share of ones is drawn for every row. The
task is bin_majority of Huang et al. (2025, https://arxiv.org/abs/2410.02140): the mean over all
tokens decides, so no position is needed.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from pydantic import PositiveInt

from experiments.tasks.base import Labels
from experiments.tasks.lookup import Rows, question_and_answer


@dataclasses.dataclass(frozen=True)
class Majority(Rows):
    """Say which of two symbols is more frequent."""

    eval_batches: PositiveInt = 8
    """Batches of the evaluation; a row has one answer only."""

    name: ClassVar[str] = "majority"
    labels: ClassVar[Labels] = Labels("say which symbol is more frequent")

    @property
    def vocab_size(self) -> int:
        """Padding, begin, separator, two symbols."""
        return 5

    def most(self, length):
        """Returns n, where n + 3 tokens make a row."""
        return length - 2

    def fill(self, bits, count):
        count = count - 1 + count % 2  # The next lower odd number.
        used = jnp.arange(bits.shape[1])[None] < count
        x = (bits & 0xFFFF) < (bits[:, -2:-1] >> 16)
        ones = (x & used).sum(1, keepdims=True)
        answer = 3 + (2 * ones > count)
        x = 3 + x.astype(jnp.int32)
        return question_and_answer(x, jnp.broadcast_to(answer, x.shape), count, 1)
