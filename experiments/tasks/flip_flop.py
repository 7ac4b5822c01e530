"""flip_flop: say the bit that was written last.

    w 1 i 0 i 1 r 1 w 0 i 1 r 0 ...

Instructions write, ignore and read; a bit follows each. Bits after w and i are random; a bit after
r repeats the bit after the last w, and only bits after r count. The first instruction is w. The
mode "sparse" has more ignored instructions than training. The language is from Liu et al. (2023,
https://arxiv.org/abs/2306.00946).
"""

import dataclasses
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from pydantic import Field

from experiments.tasks.base import Labels, Length
from experiments.tasks.lookup import Lookup

_WRITE, _IGNORE, _READ, _BITS = 1, 2, 3, 4
Rate = Annotated[float, Field(ge=0, lt=1)]


@dataclasses.dataclass(frozen=True)
class FlipFlop(Lookup):
    """Say the bit that was written last."""

    train_length: Length = 64
    """Inputs T per training sequence."""
    test_lengths: tuple[int, ...] = (64, 128, 256)
    """Lengths of the evaluation; the first is the training length."""
    ignore_rate: Rate = 0.8
    """Probability of i; w and r are equally probable."""
    sparse_rate: Rate = 0.98
    """Probability of i in the mode "sparse"."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.99
    """Least accuracy of a fitted model at the training length."""

    name: ClassVar[str] = "flip_flop"
    labels: ClassVar[Labels] = Labels(
        "say the bit that was written last",
        digits=3,
        modes={
            "plain": "Instructions are as frequent as in training.",
            "sparse": "More instructions are ignored than in training, so the last write is "
            "farther away.",
        },
    )

    @property
    def vocab_size(self) -> int:
        """Padding, the instructions, the bits."""
        return _BITS + 2

    @property
    def test_modes(self):
        """With the ignored share of training, and with a larger one."""
        sparse = dataclasses.replace(self, ignore_rate=self.sparse_rate)
        return {"plain": self, "sparse": sparse}

    def sample(self, key, batch, length, data=None):
        """Returns tokens and mask, [B, length + 1]; the mask is 1 on bits after r."""
        pairs = (length + 2) // 2
        bits = jax.random.bits(key, (batch, pairs))
        drawn = (bits >> 8).astype(jnp.float32) / 2**24
        kind = jnp.where(drawn < (1 + self.ignore_rate) / 2, _WRITE, _READ)
        kind = jnp.where(drawn < self.ignore_rate, _IGNORE, kind).at[:, 0].set(_WRITE)
        value = (bits & 1).astype(jnp.int32)
        place = jnp.arange(pairs)[None]
        last = jax.lax.cummax(jnp.where(kind == _WRITE, place, 0), axis=1)
        value = jnp.where(kind == _READ, jnp.take_along_axis(value, last, 1), value)
        tokens = jnp.stack([kind, _BITS + value], 2).reshape(batch, -1)
        mask = jnp.stack([jnp.zeros(kind.shape), kind == _READ], 2).reshape(batch, -1)
        return tokens[:, : length + 1].astype(jnp.int32), mask[:, : length + 1]
