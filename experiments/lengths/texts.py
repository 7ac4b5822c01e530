"""Long texts as tokens, with facts to retrieve and paragraphs to copy for the probe."""

import dataclasses
import functools
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from experiments.errors import CorpusError
from experiments.settings.config_io import strict
from experiments.tasks.corpus import SOURCES

CITIES = tuple(
    """Lisbon Oslo Cairo Lima Seoul Delhi Tokyo Paris Berlin Madrid Rome Vienna Prague Warsaw Dublin
    London Athens Sofia Ankara Tehran Baghdad Kabul Hanoi Manila Jakarta Sydney Perth Nairobi Accra
    Lagos Tunis Rabat Dakar Havana Quito Bogota Santiago Toronto Boston Chicago""".split()
)


@functools.cache
def _files(corpus: str) -> dict[str, bytes]:
    """Returns the documents of a corpus by name; books of the American Standard Version."""
    files = SOURCES[corpus].read(corpus)
    if corpus != "pythonbible":
        return dict(files)
    books: dict[str, list[str]] = {}
    for verse, text in sorted(json.loads(files[0][1]).items(), key=lambda item: int(item[0])):
        books.setdefault(str(int(verse) // 10**6), []).append(text)
    return {name: "\n".join(verses).encode() for name, verses in books.items()}


def read(corpus: str, name: str) -> str:
    """Returns a document of `SOURCES` by its file, of pythonbible by the number of the book."""
    documents = _files(corpus)
    if name not in documents:
        raise CorpusError(f"corpus {corpus}: has no document {name}")
    return documents[name].decode()


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about a fact.

    Attributes:
      context: the number of tokens before the end of the questions with this one.
      depth: the place of the fact, as a part of the tokens before these questions.
      distance: tokens from the answer in the fact to this one.
      start, count: the place of the answer in the tokens, and its length.
    """

    context: int
    depth: float
    distance: int
    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class Copy:
    """A paragraph that occurs twice.

    Attributes:
      distance: the intended number of tokens between its places.
      first, second: the places of its first scored token.
      count: the number of scored tokens.
    """

    distance: int
    first: int
    second: int
    count: int


@dataclasses.dataclass(frozen=True)
class Probe:
    """A text with questions and copies; `tokens` is int32 [N]."""

    tokens: np.ndarray
    questions: tuple[Question, ...]
    copies: tuple[Copy, ...]

    @property
    def scored(self) -> np.ndarray:
        """The tokens but the first whose predictions are scored, bool [N - 1]."""
        parts = [(x.start, x.count) for x in self.questions]
        parts += [(place, x.count) for x in self.copies for place in (x.first, x.second)]
        scored = np.zeros(len(self.tokens) - 1, bool)
        for start, count in parts:
            scored[start - 1 : start - 1 + count] = True
        return scored


@strict
class Design:
    """Sizes of the probe.

    Attributes:
      contexts: where questions end.
      facts: their number in each context, at equally spaced depths.
      distances: of copies, all at the end of the text.
      paragraph: tokens of a copy.
      unscored: of these, before which a copy cannot be recognised.
    """

    contexts: tuple[int, ...]
    facts: int
    distances: tuple[int, ...]
    paragraph: int = 96
    unscored: int = 8


def new_probe(text: Sequence[int], tokenizer: Any, seed: str, design: Design) -> Probe:
    """Returns a text with facts, questions about them, and copies of its own paragraphs.

    "The secret number of Oslo is 48213." stands at a depth of each context, after a sentence of the
    text. All questions of a context stand at its end, in random order, with answers. No fact is
    asked for twice, so that earlier answers do not help. Paragraphs follow the last questions.

    Args:
      text: tokens of a document, up to the last context.
      seed: a text; cities, numbers and orders follow from it.
    """
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    encode = lambda words: tokenizer.encode(words, add_special_tokens=False).ids  # noqa: E731
    ends = functools.cache(lambda token: tokenizer.decode([token]).rstrip(" ").endswith(_ENDS))
    cities = rng.permutation(CITIES)
    numbers = rng.choice(np.arange(10000, 100000), len(cities), replace=False)
    total = design.contexts[-1]
    copies_begin = total - len(design.distances) * (design.paragraph + len(encode(_GAP)))
    stream = _Stream(list(text), ends)
    facts: dict[str, tuple[int, int, float]] = {}  # City: context, place of the answer, depth.
    events: list[tuple[int, Callable[[], None]]] = []

    def write(words: str, city: str, number: int) -> tuple[int, int]:
        """Returns the place and the length of the number in the tokens."""
        before = encode(words.format(city))
        whole = encode(words.format(city) + f" {number}")
        assert whole[: len(before)] == before
        stream.insert(whole)
        return len(stream.tokens) - len(whole) + len(before), len(whole) - len(before)

    questions: list[Question] = []
    for index, context in enumerate(design.contexts):
        chosen = slice(index * design.facts, (index + 1) * design.facts)
        pairs = [(str(c), int(n)) for c, n in zip(cities[chosen], numbers[chosen], strict=True)]
        size = sum(len(encode(_QUESTION.format(c) + f" {n}")) + len(encode(".")) for c, n in pairs)
        begin = (copies_begin if context == total else context) - size

        def fact(city: str, number: int, context: int, depth: float) -> None:
            stream.end_sentence()
            place, _ = write(_FACT, city, number)
            stream.insert(encode(".\n"))
            facts[city] = context, place, depth

        def ask(pairs: list[tuple[str, int]], context: int) -> None:
            for i in rng.permutation(len(pairs)):
                city, number = pairs[i]
                place, count = write(_QUESTION, city, number)
                stream.insert(encode("."))
                _, source, depth = facts[city]
                questions.append(Question(context, depth, place - source, place, count))

        for i, (city, number) in enumerate(pairs):
            depth = (i + 0.5) / design.facts
            run = functools.partial(fact, city, number, context, depth)
            events.append((round(depth * begin), run))
        events.append((begin, functools.partial(ask, pairs, context)))
    for place, run in sorted(events, key=lambda event: event[0]):
        stream.fill(place)
        run()
    stream.fill(copies_begin)
    copies = []
    for distance in rng.permutation(np.array(design.distances)):
        stream.insert(encode(_GAP))
        place = len(stream.tokens)
        first = stream.paragraph(place - int(distance), design.paragraph)
        stream.insert(stream.tokens[first : first + design.paragraph])
        scored = design.paragraph - design.unscored
        skipped = design.unscored
        copies.append(Copy(int(distance), first + skipped, place + skipped, scored))
    tokens = np.array(stream.tokens[:total], np.int32)
    assert len(tokens) == total == len(stream.tokens), (total, len(stream.tokens))
    copies.sort(key=lambda copy: copy.distance)
    return Probe(tokens, tuple(questions), tuple(copies))


_ENDS = (".", "!", "?", "\n")
_FACT = "\nThe secret number of {} is"
_QUESTION = "\nWhat is the secret number of {0}? The secret number of {0} is"
_GAP = "\n\n"


class _Stream:
    """Tokens of a document with others between them."""

    def __init__(self, source: list[int], ends: Callable[[int], bool]):
        self.source, self.ends = source, ends
        self.tokens: list[int] = []
        self.of_source: list[bool] = []
        self.used = 0

    def insert(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.of_source.append(False)

    def _next(self) -> None:
        self.tokens.append(self.source[self.used])
        self.of_source.append(True)
        self.used += 1

    def fill(self, place: int) -> None:
        """Continues the document up to a place."""
        while len(self.tokens) < place:
            self._next()

    def end_sentence(self, most: int = 48) -> None:
        for _ in range(most):
            if self.tokens and self.ends(self.tokens[-1]):
                return
            self._next()

    def paragraph(self, place: int, count: int) -> int:
        """Returns where a sentence of the document begins, with `count` of its tokens after it.

        It is the nearest to a place that has not been returned before.
        """
        whole = np.convolve(self.of_source, np.ones(count, int), "valid") == count
        starts = [
            i
            for i in np.flatnonzero(whole).tolist()
            if i and self.of_source[i - 1] and self.ends(self.tokens[i - 1])
        ]
        best = min(starts, key=lambda i: abs(i - place))
        self.of_source[best : best + count] = [False] * count  # Copied once.
        return best
