"""The base of all tasks: a frozen dataclass of settings that makes batches on the device.

Batches are tokens int32 [B, T + 1] for T inputs of the model: it reads tokens[:, :-1] and
predicts tokens[:, 1:]. The mask float32 [B, T + 1] is 1 on the tokens that count.
"""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import tyro

from experiments.recipe import Model, Train
from experiments.strict import ConfigError, need


def _commas(kind: type) -> Any:
    """A tyro constructor for tuples written with commas: `--schemes rope,alibi`."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B,...",
        instance_from_str=lambda args: tuple(kind(a) for a in args[0].split(",") if a),
        is_instance=lambda x: isinstance(x, tuple) and all(isinstance(i, kind) for i in x),
        str_from_instance=lambda x: [",".join(map(str, x))],
    )


Ints = Annotated[tuple[int, ...], _commas(int)]
Names = Annotated[tuple[str, ...], _commas(str)]
Options = Annotated[dict[str, dict[str, Any]], tyro.conf.Suppress]
"""Settings of schemes by scheme: `[schemes.t5]` in a file."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A task; a subclass says how batches are made and what counts as fitted."""

    train_length: int = 32
    """Inputs T per training sequence."""
    test_lengths: Ints = (32, 48, 64, 128)
    """Lengths of the evaluation; the first is the training length."""
    model: Model = dataclasses.field(default_factory=Model)
    """Sizes of the model."""
    train: Train = dataclasses.field(default_factory=Train)
    """The recipe of the training."""
    schemes: Options = dataclasses.field(default_factory=dict, hash=False)
    """Settings of schemes for this task; on the command line --<task>.schemes.t5.max-distance."""

    name: ClassVar[str] = ""
    metric: ClassVar[str] = "accuracy"
    about: ClassVar[str] = ""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        raise NotImplementedError

    @property
    def longest(self) -> int:
        """The longest sequence of the evaluation: the size of learned tables."""
        return max(self.test_lengths)

    @property
    def fit_rule(self) -> str:
        """When a model counts as fitted, in words."""
        raise NotImplementedError

    def load(self) -> Any:
        """Returns what `sample` reads, a pytree of arrays; None for a task without data."""
        return None

    def sample(
        self, key: jax.Array, batch: int, length: int, data: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns tokens int32 [B, length + 1] and a mask float32 [B, length + 1]."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises ConfigError for settings that contradict one another."""
        at = self.name
        self.model.check(f"{at}.model")
        self.train.check(f"{at}.train")
        need(self.train_length >= 2, f"{at}.train_length", "must be at least 2", self)
        lengths = self.test_lengths
        if not lengths or list(lengths) != sorted(set(lengths)):
            raise ConfigError(f"{at}.test_lengths: must grow, got {list(lengths)}")
        if lengths[0] != self.train_length:
            less = "shorter than" if lengths[0] < self.train_length else "beyond"
            raise ConfigError(
                f"{at}.test_lengths: begins with {lengths[0]}, {less} the training length "
                f"{self.train_length}; the first must be that length"
            )


@dataclasses.dataclass(frozen=True)
class Lookup(Task):
    """A task of exact answers, measured as the share of right ones per length."""

    symbols: int = 16
    """Number of different symbols."""
    eval_batch: int = 128
    """Sequences per batch of the evaluation, each as long as the longest test length."""
    eval_batches: int = 2
    """Batches of the evaluation."""
    threshold: float = 0.9
    """Accuracy at the training length from which on a model counts as fitted."""

    @property
    def fit_rule(self) -> str:
        """When a model counts as fitted, in words."""
        return f"accuracy at the training length >= {self.threshold:g}"

    def sample_test(self, key: jax.Array, batch: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns a batch of the longest length whose answers belong to the test lengths.

        One shape serves all lengths: what comes after a token does not change what a causal
        model says about it.

        Returns:
          tokens int32 [B, longest + 1], mask float32 of the same shape, and for each token
          the index of its test length, int32 of the same shape.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raises ConfigError for settings that contradict one another."""
        super().check()
        for name in ("symbols", "eval_batch", "eval_batches"):
            need(getattr(self, name) >= 1, f"{self.name}.{name}", "must be at least 1", self)
        need(0 < self.threshold <= 1, f"{self.name}.threshold", "must be in (0, 1]", self)
