"""Bases of tasks with exact answers, scored by the share of right answers per length.

`Lookup` is for streams, whose answers lie anywhere; `Rows` for rows with one problem each.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pydantic import Field, PositiveInt

from experiments.errors import ConfigError
from experiments.models.model import seed_key, structure
from experiments.tasks.base import PLACES, Evaluation, Task

PAD, BEGIN, SEPARATOR = 0, 1, 2
"""The first tokens of every task of rows."""
_HELD_OUT_BITS = 3
_CANDIDATES = {"train": 2, "test": 16}


@dataclasses.dataclass(frozen=True)
class Lookup(Task):
    """A task with exact answers; a subclass makes batches."""

    symbols: PositiveInt = 16
    """Number of different symbols."""
    eval_batch: PositiveInt = 128
    """Sequences per batch of the evaluation, each as long as the longest test length."""
    eval_batches: PositiveInt = 2
    """Batches of the evaluation."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Least accuracy of a fitted model at the training length."""

    measure_settings: ClassVar[frozenset[str]] = frozenset({"eval_batch", "eval_batches"})

    @property
    def test_modes(self) -> Mapping[str, "Lookup"]:
        """The task by mode of evaluation; a subclass may add tasks with other settings."""
        return {"plain": self}

    @property
    def views(self):
        """The modes of evaluation."""
        return tuple(self.test_modes)

    def in_distribution(self, view, length):
        """Returns whether the mode of evaluation and the length are as in training."""
        return view == "plain" and super().in_distribution(view, length)

    def sample_test(self, key: jax.Array, batch: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns a batch of the longest length whose answers belong to the test lengths.

        One shape serves all lengths: later tokens do not change the output of a causal model. In a
        stream, length n stands for the inputs at positions between the length before it and n.

        Returns:
          tokens int32 [B, longest + 1], mask float32 of the same shape, and for each token
          the index of its test length, int32 of the same shape.
        """
        tokens, mask = self.sample(key, batch, self.longest)
        places = jnp.arange(self.longest + 1) - 1
        index = jnp.searchsorted(jnp.asarray(self.test_lengths), places, side="right")
        return tokens, mask, jnp.broadcast_to(index.astype(jnp.int32), tokens.shape)

    def evaluate(self, position, params, seed, data):
        """Returns the accuracy at each test length in each mode."""
        graphdef = structure(self.model, position, self.vocab_size)
        key, evaluations = seed_key(seed, "test"), []
        for mode, task in self.test_modes.items():
            counts: Any = 0.0
            for i in range(self.eval_batches):
                batch_key = jax.random.fold_in(key, i)
                drawn = _count_right(params, batch_key, graphdef=graphdef, task=task)
                counts = counts + np.asarray(drawn)
            right, every = counts.sum(-1)  # Over places: [lengths].
            for i, length in enumerate(self.test_lengths):
                evaluations.append(
                    Evaluation(
                        mode,
                        length,
                        _share(right[i], every[i]),
                        in_distribution=self.in_distribution(mode, length),
                        places=[_share(a, b) for a, b in counts[:, i].T],
                    )
                )
        return evaluations

    def fits(self, score, data):
        """Returns whether the accuracy reaches the threshold."""
        return score >= self.threshold

    def fit_rule(self, data):
        """Returns the rule of `fits` in words."""
        return f"accuracy at the training length >= {self.threshold:g}"

    def check(self) -> None:
        super().check()
        if not self.model.is_causal and len(self.test_lengths) > 1:
            raise ConfigError(
                f"{self.name}.test_lengths: a model that is not causal is evaluated at the "
                f"training length only, got {list(self.test_lengths)}"
            )


@dataclasses.dataclass(frozen=True)
class Rows(Lookup):
    """Rows with a problem of size n and its answer; a subclass defines `most` and `fill`.

    In training n is random; rows of a longer test length have the largest n that fits. One row in
    eight, chosen by its tokens, is held out of training, and rows at the training length are
    evaluated on these only.
    """

    shortest: PositiveInt = 4
    """The least size n."""
    eval_batches: PositiveInt = 4
    """Batches of the evaluation."""

    @abc.abstractmethod
    def most(self, length: int) -> int:
        """Returns the largest size n for `length` inputs."""

    @abc.abstractmethod
    def fill(self, bits: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns tokens int32 [B, W] and mask float32 [B, W].

        Args:
          bits: random uint32 [B, W]. W - 2 is at least the number of tokens and `symbols`. n comes
            from the last column; the last but one is for another draw per row.
          count: n per row, int32 [B, 1].
        """

    def _candidates(self, key, batch: int, length: int, purpose: str):
        """Returns random bits [B, C, W], to choose rows from, and a random n [B, C, 1]."""
        width = max(length + 1, self.symbols) + 2
        bits = jax.random.bits(key, (batch, _CANDIDATES[purpose], width))
        sizes = self.most(self.train_length) + 1 - self.shortest
        return bits, self.shortest + (bits[..., -1:] >> 3).astype(jnp.int32) % sizes

    def _chosen(self, bits, count, length: int, usable: Callable[[jax.Array], jax.Array]):
        """Returns the first usable candidate of each row; a mask of zeros if no candidate is.

        Args:
          bits, count: of `_candidates`.
          length: inputs T.
          usable: maps whether candidates are held out, bool [B, C], to whether they are usable.
        """
        flat = (x.reshape(-1, x.shape[-1]) for x in (bits, count))
        tokens, mask = (
            x[:, : length + 1].reshape(*bits.shape[:2], length + 1) for x in self.fill(*flat)
        )
        ok = usable(held_out(tokens))
        first = ok.argmax(1)[:, None, None]
        tokens, mask = (jnp.take_along_axis(x, first, 1)[:, 0] for x in (tokens, mask))
        return tokens, mask * ok.any(1, keepdims=True)

    def sample(self, key, batch, length, data=None):
        """Returns tokens and mask, [B, length + 1]; the mask is 1 on the answer."""
        bits, count = self._candidates(key, batch, length, "train")
        return self._chosen(bits, count, length, lambda held: ~held)

    def sample_test(self, key, batch):
        """Returns a batch whose rows cycle through the test lengths.

        At the training length n is random, as in training. Longer rows never occur in training.
        """
        bits, count = self._candidates(key, batch, self.longest, "test")
        index = jnp.arange(batch, dtype=jnp.int32)[:, None] % len(self.test_lengths)
        largest = jnp.asarray([self.most(n) for n in self.test_lengths], jnp.int32)[index]
        longer = largest > self.most(self.train_length)
        count = jnp.where(longer[..., None], largest[..., None], count)
        tokens, mask = self._chosen(bits, count, self.longest, lambda held: held | longer)
        return tokens, mask, jnp.broadcast_to(index, tokens.shape)

    def check(self) -> None:
        super().check()
        if self.most(self.train_length) < self.shortest:
            raise ConfigError(
                f"{self.name}.shortest: a problem of size {self.shortest} does not fit into "
                f"{self.name}.train_length = {self.train_length}"
            )
        if self.eval_batch % len(self.test_lengths):
            raise ConfigError(
                f"{self.name}.eval_batch: {self.eval_batch} is not a multiple of the "
                f"{len(self.test_lengths)} test lengths"
            )


def held_out(tokens: jax.Array) -> jax.Array:
    """Returns whether rows are held out of training: one in eight, by a hash of the tokens.

    Args:
      tokens: int32 [..., T]; zeros at the end do not change the result.
    """
    place = jnp.arange(tokens.shape[-1], dtype=jnp.uint32)
    mixed = tokens.astype(jnp.uint32) * (place * 2 + 1) * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA6B)
    total = mixed.sum(-1, dtype=jnp.uint32)
    total = (total ^ (total >> 16)) * jnp.uint32(0xC2B2AE35)
    return total >> (32 - _HELD_OUT_BITS) == 0


def question_and_answer(
    question: jax.Array, answer: jax.Array, count: jax.Array, answers: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Returns rows `<begin> question <separator> answer`, padded, and the mask of the answers.

    Args:
      question: int32 [B, W]; the first `count` tokens are used.
      answer: int32 [B, W]; the first `answers` tokens are used.
      count: int32 [B, 1].
      answers: int32 [B, 1], or one number.

    Returns:
      tokens int32 and mask float32, [B, W].

    >>> x = jnp.array([[5, 6, 7, 8, 9, 9, 9, 9]])
    >>> question_and_answer(x, x[:, ::-1], jnp.array([[3]]), 2)[0]
    Array([[1, 5, 6, 7, 2, 9, 9, 0]], dtype=int32)
    """
    place = jnp.arange(question.shape[1])[None]
    first = count + 2  # The place of the first answer.
    later = jnp.take_along_axis(answer, jnp.maximum(place - first, 0), 1)
    tokens = jnp.where(place < first, jnp.roll(question, 1, 1), later)
    tokens = jnp.where(place == 0, BEGIN, jnp.where(place == first - 1, SEPARATOR, tokens))
    tokens = jnp.where(place < first + answers, tokens, PAD)
    mask = (place >= first) & (place < first + answers)
    return tokens.astype(jnp.int32), mask.astype(jnp.float32)


def permutation(bits: jax.Array, count: int) -> jax.Array:
    """Returns the numbers below `count` in random order, int32 [B, count], for bits [B, W]."""
    return jnp.argsort(bits[:, :count], axis=1).astype(jnp.int32)


def _share(part: float, every: float) -> float | None:
    return round(float(part / every), 5) if every else None  # NaN stays NaN.


@functools.partial(jax.jit, static_argnames=("graphdef", "task"))
def _count_right(params: nnx.State, key: jax.Array, *, graphdef: Any, task: Lookup) -> jax.Array:
    """Returns numbers of right answers and of all, [2, lengths, PLACES]."""
    lengths = jnp.asarray(task.test_lengths)
    tokens, mask, index = task.sample_test(key, task.eval_batch)
    model = nnx.merge(graphdef, params)
    inputs, targets = model.inputs_and_targets(tokens, mask)
    coordinates = task.draw_coordinates(key, tokens, training=False)
    logits = model(inputs, coordinates)
    right = jnp.where(jnp.isfinite(logits).all(-1), logits.argmax(-1) == targets, jnp.nan)
    right = jnp.where(mask[:, 1:] > 0, right, 0.0)
    places = jnp.arange(right.shape[1]) * PLACES // lengths[index[:, 1:]]
    cells = index[:, 1:], jnp.minimum(places, PLACES - 1)  # Padding lies beyond PLACES.
    none = jnp.zeros((len(lengths), PLACES))
    return jnp.stack([none.at[cells].add(x) for x in (right, mask[:, 1:])])
