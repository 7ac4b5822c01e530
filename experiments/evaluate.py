"""Evaluation at and beyond the training length; every number says which of both it is."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc_jax as pe
from experiments.corpus import Corpus, pair_bits
from experiments.model import structure
from experiments.tasks import Task, Text
from experiments.tasks.base import Lookup
from experiments.train import seed_keys, token_losses

_TOKENS_PER_CALL = 4096
_MAPS = {"ntk": pe.NTK, "pi": pe.PI}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One number per seed.

    Attributes:
      metric: "accuracy" or "bits_per_byte".
      mode: "plain", "nonoverlapping" or "sliding".
      length: of the context.
      values: one per seed.
      in_distribution: whether the length is the training length.
      variant: "ntk" or "pi" where the scheme was changed after training.
      note: what a reader must know.
    """

    metric: str
    mode: str
    length: int
    values: list[float]
    in_distribution: bool
    variant: str | None = None
    note: str | None = None


def evaluate(
    task: Task, scheme: pe.Scheme, params: nnx.State, seeds: list[int], corpus: Corpus | None
) -> list[Evaluation]:
    """Returns all evaluations of trained parameters.

    Args:
      task: what they were trained on.
      scheme: what they were trained with.
      params: leaves [seeds, ...].
      seeds: of the test data.
      corpus: the text, for the task that reads one.
    """
    if isinstance(task, Text):
        assert corpus is not None
        found = _text(task, scheme, params, corpus.held_out)
    else:
        assert isinstance(task, Lookup)
        found = _lookup(task, scheme, params, seeds)
    note = None
    if hasattr(scheme, "max_length"):
        note = f"rows beyond position {task.train_length - 1} were never trained"
    return [e if e.in_distribution or e.note else dataclasses.replace(e, note=note) for e in found]


def is_fitted(task: Task, found: list[Evaluation], baseline: float | None) -> bool:
    """Returns whether the mean over seeds meets the task's rule at the training length."""
    at_home = [e for e in found if e.in_distribution and e.variant is None]
    value = float(np.mean(at_home[0].values))
    if isinstance(task, Text):
        assert baseline is not None
        return value < baseline
    assert isinstance(task, Lookup)
    return value >= task.threshold


def text_baseline(task: Text, corpus: Corpus) -> float:
    """Returns bits per byte of a table of byte pairs on the bytes that models are scored on."""
    windows, _ = task.windows(corpus.held_out, task.longest, "nonoverlapping")
    return pair_bits(corpus.train, windows)


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


def _lookup(
    task: Lookup, scheme: pe.Scheme, params: nnx.State, seeds: list[int]
) -> list[Evaluation]:
    graphdef = structure(task.model, scheme, task.vocab_size)
    keys = seed_keys(seeds, "test")
    total = np.zeros((len(seeds), 2, len(task.test_lengths)))
    for i in range(task.eval_batches):
        at = jax.vmap(lambda k, i=i: jax.random.fold_in(k, i))(keys)
        total += np.asarray(_count_right(params, at, graphdef=graphdef, task=task))
    accuracy = total[:, 0] / np.maximum(total[:, 1], 1)
    return [
        Evaluation(
            "accuracy",
            "plain",
            length,
            [round(float(x), 5) for x in accuracy[:, i]],
            in_distribution=length == task.train_length,
        )
        for i, length in enumerate(task.test_lengths)
    ]


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _window_losses(params: nnx.State, tokens: jax.Array, *, graphdef: Any) -> jax.Array:
    """Returns nats [seeds, B, T] for tokens uint8 [B, T + 1]."""
    return jax.vmap(lambda p: token_losses(graphdef, p, tokens.astype(jnp.int32)))(params)


def _bits(graphdef: Any, params: nnx.State, windows: np.ndarray, count: int) -> list[float]:
    """Returns bits per byte of each seed, over the last `count` bytes of each window."""
    batch = max(1, _TOKENS_PER_CALL // (windows.shape[1] - 1))
    losses = []
    for i in range(0, len(windows), batch):
        part = windows[i : i + batch]
        padded = np.pad(part, ((0, batch - len(part)), (0, 0)))  # One shape, one compilation.
        out = np.asarray(_window_losses(params, padded, graphdef=graphdef))
        losses.append(out[:, : len(part), -count:].astype(np.float64))
    mean = np.concatenate(losses, 1).mean((1, 2)) / np.log(2)
    return [round(float(x), 5) for x in mean]


def _text(
    task: Text, scheme: pe.Scheme, params: nnx.State, held_out: np.ndarray
) -> list[Evaluation]:
    found = []
    for length in task.test_lengths:
        at_home = length == task.train_length
        variants: dict[str | None, pe.Scheme] = {None: scheme}
        if hasattr(scheme, "scaling") and not at_home:
            factor = length / task.train_length
            variants |= {v: scheme.replace(scaling=_MAPS[v](factor)) for v in task.variants}
        for variant, changed in variants.items():
            graphdef = structure(task.model, changed, task.vocab_size)
            for mode in ("nonoverlapping", "sliding"):
                if mode == "sliding" and (variant or length not in task.sliding_lengths):
                    continue
                windows, count = task.windows(held_out, length, mode)
                bits = _bits(graphdef, params, windows, count)
                found.append(Evaluation("bits_per_byte", mode, length, bits, at_home, variant))
    return found
