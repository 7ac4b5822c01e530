"""addition: add two numbers of n digits, the least significant digit first.

    <begin> 5 7 + 6 1 <separator> 1 9 0                     75 + 16 = 091       kind = "plain"
    <begin> m 5 n 7 + m 6 n 1 <separator> m 1 n 9 o 0                           kind = "hints"

All n + 1 digits of the sum count. With "hints" each digit comes after a letter for its place; the
letters are consecutive, the first is random, and letters of the sum count too (Zhou et al. 2024,
https://arxiv.org/abs/2402.09371). "abacus" has the tokens of "plain", and coordinates [2, B, T]:
the positions, and the places of digits in their numbers, from 1 on, with one random offset per row
in training (McLeish et al. 2024, https://arxiv.org/abs/2405.17399). Chain schemes of one axis for
them, by `posenc_jax.on_axis`.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from pydantic import PositiveInt

import posenc_jax as pe
from experiments.errors import ConfigError
from experiments.settings.common import Train
from experiments.settings.config_io import near
from experiments.tasks.base import Labels, Length
from experiments.tasks.lookup import Rows, question_and_answer

_PLUS, _DIGITS, _LETTERS = 3, 4, 14
KINDS = ("plain", "hints", "abacus")


@dataclasses.dataclass(frozen=True)
class Addition(Rows):
    """Add two numbers, the least significant digit first."""

    train_length: Length = 33
    """Inputs T per training sequence."""
    test_lengths: tuple[int, ...] = (33, 48, 63)
    """Lengths of the evaluation; the first is the training length."""
    eval_batch: PositiveInt = 126
    """Sequences per batch of the evaluation, each as long as the longest test length."""
    kind: str = "plain"
    """plain, hints (letters for the places) or abacus (coordinates for the places)."""
    shortest: PositiveInt = 1
    """The least number n of digits."""
    train: Train = dataclasses.field(default_factory=lambda: Train(steps=5000))
    """How the model is trained."""

    name: ClassVar[str] = "addition"
    labels: ClassVar[Labels] = Labels(
        "add two numbers",
        length_unit="tokens",
        modes={
            "plain": "Share of digits that are right.",
            "exact": "Share of sums of which every digit is right.",
        },
    )

    @property
    def letters(self) -> int:
        """Number of letters for places, and of coordinates for them without zero."""
        return 2 * self.most(self.longest) + 2

    @property
    def vocab_size(self) -> int:
        """Padding, begin, separator, plus, the digits, the letters."""
        return _LETTERS + self.letters

    def most(self, length):
        """Returns n: a row has 3 n + 4 tokens, with hints 6 n + 5."""
        return (length - 4) // 6 if self.kind == "hints" else (length - 3) // 3

    def fill(self, bits, count):
        """Returns tokens and mask."""
        width = bits.shape[1]
        place = jnp.arange(width)[None]
        a, b = (
            jnp.where(place < count, x % 10, 0).astype(jnp.int32)
            for x in (bits & 0xFFFF, bits >> 16)
        )

        def add(carry, digits):
            total = carry + digits
            return total // 10, total % 10

        carry = jnp.zeros(bits.shape[0], jnp.int32)
        c = jax.lax.scan(add, carry, (a + b).T)[1].T
        starts = (self.letters - count).astype(jnp.uint32)
        letters = _LETTERS + bits[:, -2:-1] % starts + place
        size = 1
        if self.kind == "hints":
            a, b, c = (_interleaved(letters, _DIGITS + x) for x in (a, b, c))
            size = 2
        else:
            a, b, c = (_DIGITS + x for x in (a, b, c))
        later = jnp.take_along_axis(b, jnp.maximum(place - size * count - 1, 0), 1)
        question = jnp.where(
            place < size * count, a, jnp.where(place == size * count, _PLUS, later)
        )
        return question_and_answer(question, c, 2 * size * count + 1, size * (count + 1))

    def draw_coordinates(self, key, tokens, *, training):
        """Returns positions and places of digits [2, B, T] for "abacus"."""
        if self.kind != "abacus":
            return super().draw_coordinates(key, tokens, training=training)
        digits = (tokens >= _DIGITS)[:, :-1]
        shift = jnp.zeros(tokens.shape[0], jnp.int32)
        if training:
            limit = self.letters - self.most(self.train_length) - 1
            shift = jax.random.randint(jax.random.fold_in(key, 1), shift.shape, 0, limit)
        places = pe.positions.digit_places(digits, shift=shift)
        return jnp.stack([pe.positions.count_up(*digits.shape), places])

    def check(self) -> None:
        """Raises ConfigError for settings that contradict one another."""
        super().check()
        if self.kind not in KINDS:
            raise ConfigError(f"addition.kind: unknown kind {self.kind!r}{near(self.kind, KINDS)}")
        if self.kind == "abacus" and self.coordinates != "positions":
            raise ConfigError(
                f"addition.coordinates: {self.coordinates!r}, but addition.kind = 'abacus' has its "
                "own"
            )


def _interleaved(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a0 b0 a1 b1 ... int32 [B, W] for arrays [B, W]."""
    both = jnp.stack([a.astype(jnp.int32), b.astype(jnp.int32)], 2)
    return both.reshape(a.shape[0], -1)[:, : a.shape[1]]
