"""speed: the time of a training step, as a multiple of that without position encodings.

Nothing is learned. Steps on random tokens are timed in turn with those of a model that differs in
the scheme alone; the score is the ratio of the shortest times.

    tokens [B, T]  ->  gradient of the loss  ->  seconds / seconds without encodings
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from pydantic import PositiveInt

import posenc_jax as pe
from experiments.bench.timing import side_by_side
from experiments.model import initialize, seed_keys, structure
from experiments.settings import Train
from experiments.tables import Labels
from experiments.tasks.base import Evaluation, Length, Task
from experiments.train import mean_loss


@dataclasses.dataclass(frozen=True)
class Speed(Task):
    """The time of a training step relative to that without position encodings."""

    train_length: Length = 512
    """Inputs T per sequence of the first measurement."""
    test_lengths: tuple[int, ...] = (512, 2048)
    """Lengths to measure at."""
    train: Train = dataclasses.field(
        default_factory=lambda: Train(steps=1, steps_per_call=1, warmup=0, batch=1)
    )
    """How the model is trained before, which changes nothing."""
    tokens: PositiveInt = 4096
    """B T of each step."""
    rounds: PositiveInt = 15
    """Least number of times that each step is timed."""

    name: ClassVar[str] = "speed"
    labels: ClassVar[Labels] = Labels(
        "time of a training step, as a multiple of that without position encodings",
        metric="time",
        unit="times that without encodings",
        higher_is_better=False,
        limits=None,
    )
    seconds: ClassVar[float] = 60.0
    measure_settings: ClassVar[frozenset[str]] = frozenset({"tokens", "rounds"})

    @property
    def vocab_size(self) -> int:
        """Bytes."""
        return 256

    def sample(self, key, batch, length, data=None):
        """Returns random tokens, all of which count."""
        tokens = jax.random.randint(key, (batch, length + 1), 0, self.vocab_size)
        return tokens, jnp.ones(tokens.shape, jnp.float32)

    def evaluate(self, position, params, seeds, data):
        """Returns the ratio of times at each length; parameters are new ones."""
        found = []
        for length in self.test_lengths:
            batch = max(1, self.tokens // length)
            tokens, mask = self.sample(seed_keys(seeds, "test")[0], batch, length)
            steps = {
                name: self._step(scheme, tokens, mask)
                for name, scheme in (("none", pe.NoPE()), ("own", position))
            }
            timing = side_by_side(steps, rounds=self.rounds, seconds=0.0)[1]
            scores = [round(timing.ratio, 3)] * len(seeds)
            trained = length == self.train_length
            found.append(Evaluation(self.labels.metric, "plain", length, scores, trained))
        return found

    def _step(self, position: Any, tokens: jax.Array, mask: jax.Array) -> Any:
        graphdef = structure(self.model, position, self.vocab_size)
        keys = seed_keys([0], "parameters")
        params = initialize(self.model, position, self.vocab_size, keys)
        params = jax.tree.map(lambda x: x[0], params)
        gradient = jax.jit(jax.grad(mean_loss), static_argnums=1)
        return lambda: gradient(params, graphdef, tokens, mask)

    def fits(self, score, data):
        """Returns true: there is nothing to learn."""
        return True

    def fit_rule(self, data):
        """Returns the rule of `fits` in words."""
        return "none: nothing is learned"
