"""The plan of a study of lengths, from a TOML file: cells in the order in which they run.

`configs/lengths.toml` is an example. A stage reads one document of each kind, by its
number, `without` the methods that earlier stages settled; `probe_within` is up to the trained
length, for RoPE alone. In `answer` and `remark`, braces hold means over documents of
scores; `silent` is a reason of claims whose gates failed.

A cell is one pass over one document with the layers of a method, for losses or a probe. Losses do
not depend on later tokens, so that a pass to a longer target serves a shorter one with the same
layers.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PositiveInt

import posenc_jax as pe
from experiments.claims import Claim, Condition, check, parse
from experiments.errors import ConfigError
from experiments.lengths.results import BIN, CELLS, CellResult
from experiments.lengths.texts import CITIES, Design
from experiments.models.methods import METHODS, changed_if_whole, window_of
from experiments.runs.results import digest
from experiments.runs.run import Work
from experiments.settings.config_io import convert, near, read_toml, strict
from experiments.tasks.corpus import SOURCES

VIEWS = {
    "at": "loss at the 2,048 places that end there",
    "far": "the same in the pass to the longest target",
    "within": "loss up to the trained length, with that target",
    "found": "part of answers that are right, at that context",
    "answer": "loss of an answer, at that context",
    "copied": "loss of a paragraph at its second place minus the first, at that distance",
    "copied_within": "the same in RoPE's text of the trained length, for gates",
}
"""Views of scores in criteria: method.view[length]."""
WIDTH = 2048
"""Places of a score of the view `at`."""


@dataclasses.dataclass(frozen=True)
class Document:
    kind: str
    title: str
    corpus: str
    name: str


@strict
class Checkpoint:
    """A package with the file of a model, the hash of the file, and its config."""

    requirement: str
    sha256: str
    name: str
    trained: PositiveInt
    config: dict[str, Any] = dataclasses.field(hash=False)

    @functools.cached_property
    def layers(self) -> tuple[pe.LayerSpec, ...]:
        return pe.from_hf(self.config)


@dataclasses.dataclass(frozen=True)
class Cell(Work):
    """One pass.

    Attributes:
      method: its name, or of another with the same layers.
      count: the number of tokens N.
      probe: of questions and copies; None for losses.
      settings: all that its result depends on.
      file: of the checkpoint; None: of its package.
    """

    document: Document
    method: str
    layers: tuple[pe.LayerSpec, ...]
    count: int
    checkpoint: Checkpoint
    probe: Design | None
    settings: dict[str, Any] = dataclasses.field(compare=False, repr=False)
    file: Path | None = None
    kind: ClassVar = CELLS

    @property
    def name(self) -> str:
        document = self.document.corpus, Path(self.document.name).stem
        parts = self.settings["task"], *document, self.count, digest(self.settings)
        return "-".join(map(str, parts))

    @property
    def title(self) -> str:
        return f"{self.settings['task']} {self.document.title} {self.count:,} {self.method}"

    def measured(self, *_: Any, **__: Any) -> CellResult:
        """Returns the result of the pass, which does not stop within it."""
        from experiments.lengths.read import measure  # A page does not need its packages.

        return measure(self)


@strict
class Kind:
    """Documents of one kind: {title: name in the corpus}."""

    corpus: str
    rule: str
    documents: dict[str, str]


@strict
class Stage:
    """Targets and the probe for one document of each kind, by all methods without some."""

    document: int
    targets: tuple[int, ...] = ()
    probe: bool = False
    without: tuple[str, ...] = ()


@strict
class Picture:
    """The methods whose losses and answers are drawn, and the one that losses are minus."""

    methods: tuple[str, ...]
    minus: str
    caption: str
    legend: str
    answers: tuple[str, ...]


@strict
class Plan:
    """A study of lengths: methods, documents by kind, stages in their order, words of its page."""

    checkpoint: Checkpoint
    methods: tuple[str, ...]
    kinds: dict[str, Kind]
    stages: tuple[Stage, ...]
    probe: Design
    probe_within: Design | None = dataclasses.field(default=None, kw_only=True)
    picture: Picture
    claims: tuple[Claim, ...]
    title: str
    answer: str = ""
    remark: str = ""
    silent: str = ""
    protocol: tuple[str, ...] = ()

    def in_braces(self, name: str) -> dict[str, Condition]:
        """Returns the expressions in braces of the answer or the remark.

        They are conditions whose margins are their values.
        """
        texts = re.findall(r"{(.+?)}", getattr(self, name))
        return {text: each for text in texts for each in parse(f"{text} > 0", name)}

    def layers(self, method: str, target: int) -> tuple[pe.LayerSpec, ...]:
        layers, trained = self.checkpoint.layers, self.checkpoint.trained
        new = {x: changed_if_whole(x, method, trained, target) for x in dict.fromkeys(layers)}
        return tuple(new[x] for x in layers)

    @property
    def longest(self) -> int:
        return max(target for stage in self.stages for target in stage.targets)

    @property
    def shortest(self) -> int:
        """The shortest target, which all documents have."""
        return min(target for stage in self.stages for target in stage.targets)

    def documents(self, index: int) -> list[Document]:
        """Returns the documents of a stage, one of each kind."""
        everything = self.all_documents
        return [[x for x in everything if x.kind == name][index] for name in self.kinds]

    @property
    def all_documents(self) -> list[Document]:
        return [
            Document(name, title, kind.corpus, file)
            for name, kind in self.kinds.items()
            for title, file in kind.documents.items()
        ]

    def lengths_of(self, view: str) -> Sequence[int]:
        """Returns the lengths at which a view has scores."""
        if view in ("at", "far"):
            return range(WIDTH, (self.shortest if view == "at" else self.longest) + 1, BIN)
        if view == "within":
            return sorted({target for stage in self.stages for target in stage.targets})
        probe = self.probe_within if view == "copied_within" else self.probe
        assert probe
        return probe.distances if view.startswith("copied") else probe.contexts

    def targets(self, document: Document) -> set[int]:
        return {
            target
            for stage in self.stages
            if document in self.documents(stage.document)
            for target in stage.targets
        }

    def cell(self, task: str, document: Document, method: str, target: int) -> Cell:
        """Returns the cell of a method, whose task is losses, probe or probe_within."""
        layers, count = self.layers(method, target), target
        probe = None if task == "losses" else getattr(self, task)
        if task == "losses":
            others = self.targets(document) | {target}
            count = max(n for n in others if self.layers(method, n) == layers)
        settings = {
            "task": "losses" if probe is None else "probe",
            "corpus": f"{document.corpus} {SOURCES[document.corpus].sha256[:12]}",
            "document": document.name,
            "layer": ", ".join(map(repr, dict.fromkeys(layers))),
            "count": count,
            "checkpoint": self.checkpoint.sha256,
        }
        if probe:
            settings["probe"] = repr(probe)
        return Cell(document, method, layers, count, self.checkpoint, probe, settings)

    def cells(self) -> Iterator[Cell]:
        """Yields all cells once, in the order in which they run."""
        seen = set()
        for stage in self.stages:
            methods = [name for name in self.methods if name not in stage.without]
            tasks = [("losses", target, methods) for target in stage.targets]
            if stage.probe:
                tasks.append(("probe", self.probe.contexts[-1], methods))
                if self.probe_within:
                    tasks.append(("probe_within", self.probe_within.contexts[-1], ["rope"]))
            for task, target, names in tasks:
                for document in self.documents(stage.document):
                    for method in names:
                        cell = self.cell(task, document, method, target)
                        if cell.name not in seen:
                            seen.add(cell.name)
                            yield cell


def load(path: Path) -> Plan:
    tables = read_toml(path)
    try:
        plan = convert(Plan, tables, "")
        for name in plan.methods:
            if name not in METHODS and window_of(name) is None:
                raise ConfigError(f"methods: unknown method {name!r}{near(name, METHODS)}")
        if "rope" not in plan.methods:
            raise ConfigError("methods: must have rope, to which others are compared")
        if not (plan.kinds and plan.stages and any(stage.targets for stage in plan.stages)):
            raise ConfigError("kinds and stages: must not be empty, and a stage must have targets")
        picture = plan.picture
        for name in (*picture.methods, picture.minus, *picture.answers):
            if name not in plan.methods:
                hint = near(name, plan.methods)
                raise ConfigError(f"picture: has {name!r}, which is not in methods{hint}")
        count = min(len(kind.documents) for kind in plan.kinds.values())
        for kind in plan.kinds.values():
            if kind.corpus not in SOURCES:
                raise ConfigError(
                    f"kinds: unknown corpus {kind.corpus!r}{near(kind.corpus, SOURCES)}"
                )
        trained, probe = plan.checkpoint.trained, plan.probe
        try:
            for name in plan.methods:
                plan.layers(name, trained)
        except ValueError as error:
            raise ConfigError(f"checkpoint: {error}") from None
        for target in (trained, *(n for stage in plan.stages for n in stage.targets)):
            if target < trained or target % WIDTH:
                raise ConfigError(
                    f"stages: targets must be multiples of {WIDTH} from the trained length on, "
                    f"got {target}"
                )
        for each in filter(None, (probe, plan.probe_within)):
            if len(each.contexts) * each.facts > len(CITIES):
                raise ConfigError(f"probe: must have at most {len(CITIES)} facts in all contexts")
        if not probe.contexts or max(probe.distances, default=0) <= trained:
            raise ConfigError(f"probe: must have contexts, and a distance above {trained}")
        within = plan.probe_within
        if within and max(within.contexts, default=trained + 1) > trained:
            raise ConfigError(f"probe_within: contexts must end at {trained} or before")
        for stage in plan.stages:
            if not 0 <= stage.document < count:
                raise ConfigError(f"stages: document must be from 0 to {count - 1}")
            for name in {*stage.without} - {*plan.methods}:
                raise ConfigError(f"stages: without has {name!r}, which is not in methods")
        numbers = (
            Claim("", (each.text,))
            for name in ("answer", "remark")
            for each in plan.in_braces(name).values()
        )
        check([*plan.claims, *numbers], functools.partial(_without_score, plan))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return plan


def _without_score(plan: Plan, name: str, view: str | None, length: int) -> str:
    """Returns why there is no score, or ""."""
    if name not in plan.methods:
        return f"no method {name!r}{near(name, plan.methods)}"
    if view not in VIEWS:
        return f"no view {view!r}{near(str(view), VIEWS)}"
    if view == "copied_within" and (name != "rope" or plan.probe_within is None):
        return f"{view} needs [probe_within], and is of rope alone"
    lengths = plan.lengths_of(view)
    return "" if length in lengths else f"{view} has lengths {[*lengths]}"
