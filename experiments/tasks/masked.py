"""masked: fill in masked symbols of a sequence that repeats itself (an encoder).

    c a ? d c a b d ? a b d        period = 4

The first `period` symbols are random and are repeated to the end. A share of the tokens is masked,
and counts. Tokens at multiples of the period hold the answer, but the set of all tokens tells only
which symbols occur: without positions, an encoder can only guess among them (as masked language
models of Haviv et al. 2022, https://arxiv.org/abs/2203.16634, Table 4).
"""

import dataclasses
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from pydantic import Field, PositiveInt

from experiments.errors import ConfigError
from experiments.settings.common import Model
from experiments.tasks.base import Labels
from experiments.tasks.lookup import Lookup


@dataclasses.dataclass(frozen=True)
class Masked(Lookup):
    """Fill in masked symbols of a sequence that repeats itself, without causality."""

    test_lengths: tuple[int, ...] = (32,)
    """The training length."""
    period: PositiveInt = 8
    """Distance after which symbols repeat."""
    mask_rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens that are masked."""
    model: Model = dataclasses.field(default_factory=lambda: Model(is_causal=False))
    """Sizes of the model."""

    name: ClassVar[str] = "masked"
    labels: ClassVar[Labels] = Labels("fill in masked symbols that the order decides")

    @property
    def vocab_size(self) -> int:
        """The mask and the symbols."""
        return 1 + self.symbols

    def sample(self, key, batch, length, data=None):
        """Returns tokens and mask, [B, length + 1]; the mask is 1 on masked tokens."""
        bits = jax.random.bits(key, (batch, length + 1))
        first = 1 + (bits & 0xFFFF) % self.symbols
        tokens = first[:, jnp.arange(length + 1) % self.period].astype(jnp.int32)
        mask = (bits >> 16) < round(self.mask_rate * 65536)
        return tokens, mask.at[:, 0].set(False).astype(jnp.float32)

    def check(self) -> None:
        super().check()
        if self.model.is_causal:
            raise ConfigError("masked.model.is_causal: must be false")
        if 2 * self.period > self.train_length:
            raise ConfigError(
                f"masked.period: {self.period} does not repeat within masked.train_length = "
                f"{self.train_length}"
            )
