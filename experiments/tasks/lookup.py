"""The base of tasks with exact answers, scored by the share of right ones per length."""

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pydantic import Field, PositiveInt

from experiments.model import seed_keys, structure
from experiments.tasks.base import Evaluation, Task


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
    """Accuracy at the training length from which on a model counts as fitted."""

    measure_settings: ClassVar[frozenset[str]] = frozenset({"eval_batch", "eval_batches"})

    def sample_test(self, key: jax.Array, batch: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns a batch of the longest length whose answers belong to the test lengths.

        One shape serves all lengths: later tokens do not change the output of a causal model.

        Returns:
          tokens int32 [B, longest + 1], mask float32 of the same shape, and for each token
          the index of its test length, int32 of the same shape.
        """
        raise NotImplementedError

    def evaluate(self, position, params, seeds, data):
        """Returns the accuracy at each test length."""
        graphdef = structure(self.model, position, self.vocab_size)
        keys = seed_keys(seeds, "test")
        total = np.zeros((len(seeds), 2, len(self.test_lengths)))
        for i in range(self.eval_batches):
            batch_keys = jax.vmap(lambda k, i=i: jax.random.fold_in(k, i))(keys)
            total += np.asarray(_count_right(params, batch_keys, graphdef=graphdef, task=self))
        accuracy = total[:, 0] / np.maximum(total[:, 1], 1)
        return [
            Evaluation(
                self.labels.metric,
                "plain",
                length,
                [round(float(x), 5) for x in accuracy[:, i]],
                in_distribution=length == self.train_length,
            )
            for i, length in enumerate(self.test_lengths)
        ]

    def fits(self, score, data):
        """Returns whether the accuracy reaches the threshold."""
        return score >= self.threshold

    def fit_rule(self, data):
        """Returns the rule of `fits` in words."""
        return f"accuracy at the training length >= {self.threshold:g}"


@functools.partial(jax.jit, static_argnames=("graphdef", "task"))
def _count_right(params: nnx.State, keys: jax.Array, *, graphdef: Any, task: Lookup) -> jax.Array:
    """Returns right answers and answers per test length, [seeds, 2, lengths]."""

    def one_seed(params, key):
        tokens, mask, index = task.sample_test(key, task.eval_batch)
        guess = nnx.merge(graphdef, params)(tokens[:, :-1]).argmax(-1)
        counts = jax.nn.one_hot(index[:, 1:], len(task.test_lengths)) * mask[:, 1:, None]
        right = (guess == tokens[:, 1:])[..., None] * counts
        return jnp.stack([right.sum((0, 1)), counts.sum((0, 1))])

    return jax.vmap(one_seed)(params, keys)
