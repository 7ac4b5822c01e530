"""Single runs: a scheme on a task with one seed, in a folder named by the hash of its settings.

result.json       scores and provenance (`experiments.runs.results`), when the run has ended
checkpoints/      states of training, about one a minute, until the run has ended; the latest two;
                  checkpoints-DIGEST/ of runs with code or a corpus of your own

A run that was stopped at any time continues from its checkpoint with equal bits.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.errors import ResultsError
from experiments.models.model import Position
from experiments.models.schemes import code_of, parts_of, short
from experiments.runs import hosts, results
from experiments.runs.checkpoints import Checkpoints, Deadline, OutOfTime
from experiments.runs.environment import environment
from experiments.runs.files import locked
from experiments.runs.results import Result
from experiments.settings.config_io import to_tables
from experiments.tasks.base import Data, Evaluation
from experiments.tasks.corpus import SOURCES
from experiments.training.layout import Layout
from experiments.training.train import Trained, of_program, train

_POINTS = 32


@dataclasses.dataclass(frozen=True)
class Run:
    """A scheme on a task with one seed, of parameters and data.

    `scheme` is its name in settings and `options` are its settings there; `position` is the scheme,
    or its layers.
    """

    task: Any
    scheme: str
    options: dict[str, Any] = dataclasses.field(hash=False)
    position: Position
    seed: int

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, of JSON's types."""
        task = {k: v for k, v in to_tables(self.task).items() if k not in ("schemes", "rates")}
        return {
            "task": self.task.name,
            "scheme": self.scheme,
            "options": self.options,
            "seed": self.seed,
            self.task.name: task,
        }

    @functools.cached_property
    def name(self) -> str:
        """The name of the folder: task, scheme, seed, and a hash of all settings."""
        scheme = re.sub(r"[^\w.+-]", "-", short(self.scheme))
        return f"{self.task.name}-{scheme}-s{self.seed}-{results.digest(self.settings)}"

    @functools.cached_property
    def sources(self) -> dict[str, str]:
        """Digests of the files that the settings name: your code, and a corpus."""
        names = (part.partition(":") for part in parts_of(self.scheme))
        modules = [module for module, colon, _ in names if colon]
        corpus = getattr(self.task, "corpus", None)
        facts = load_data(self.task).facts if corpus not in (None, *SOURCES) else {}
        version = {"python": platform.python_version()} if corpus == "stdlib" else {}  # Its text.
        return (
            version
            | code_of([*modules, type(self.task).__module__])
            | {
                f"text of {name}": text[text.index("sha256 ") :]  # Not the part that is held out.
                for name, text in facts.items()
                if name.startswith("corpus ")
            }
        )

    @functools.cached_property
    def program(self) -> str:
        """Identifies the compiled program, which runs with other seeds, rates and steps share."""
        return dataclasses.replace(self, task=of_program(self.task), seed=0).name

    def train(self, data: Data, **options: Any) -> Trained:
        """Trains the model; for options see `train.train`."""
        return train(self.task, self.position, self.seed, data.train, **options)

    def measure(self, trained: Trained, data: Data) -> dict[str, Any]:
        """Returns the entries of a result that training and evaluation determine."""
        every = max(1, len(trained.curve["step"]) // _POINTS)
        points = slice(every - 1, None, every)
        evaluations = self.task.evaluate(self.position, trained.params, self.seed, data)
        return {
            "fitted": self.task.fitted(evaluations, data),
            "fit_rule": self.task.fit_rule(data),
            "scores": _scores(evaluations),
            "places": _places(evaluations, self.task.views[0]),
            "parameters": trained.parameters,
            "memory_bytes": trained.memory,
            "curve": {
                "step": trained.curve["step"][points],
                "loss": trained.curve["loss"][points],
            },
            "compile_seconds": round(trained.compile_seconds, 2),
            "train_seconds": round(trained.train_seconds, 2),
            "cpu_seconds": round(trained.cpu_seconds, 2),
        }


class RunFolder:
    """The folder of a run, in the folder `parent`."""

    def __init__(self, parent: Path, run: Run):
        self.run = run
        self.path = parent / run.name
        self._devices: dict[str, int] = {}

    def result(self) -> Result | None:
        """Returns the result; None if the run has not ended."""
        result = results.stored(self.path.parent, self.run.name)
        if result and result.settings != self.run.settings:
            raise ResultsError(f"{self.path}: has a result with other settings than its name says")
        return result

    def _remove_states(self) -> None:
        for path in self.path.glob("checkpoints*"):
            shutil.rmtree(path, ignore_errors=True)

    @property
    def states(self) -> Path:
        """The folder of states of training, of these `sources` alone."""
        if not self.run.sources:
            return self.path / "checkpoints"
        digest = hashlib.sha256(json.dumps(self.run.sources, sort_keys=True).encode())
        return self.path / f"checkpoints-{digest.hexdigest()[:12]}"

    def carry_out(
        self,
        say: Callable[[str], None] = lambda line: None,
        deadline: Deadline | None = None,
        layout: Layout | None = None,
    ) -> Result:
        """Returns the result, of an earlier call or of training and evaluation now.

        Args:
          say: shows a line.
          deadline: when to stop, with OutOfTime; the next call continues. Default: never.
          layout: of a model on several devices.

        Raises:
          Locked: while another process carries it out.
        """
        deadline = Deadline() if deadline is None else deadline
        if layout:
            layout.check(self.run.task)
        if before := self.result():
            return before
        with locked(self.path):
            if before := self.result():  # Of a process that has just ended it.
                return before
            if deadline.over():
                raise OutOfTime
            checkpoint = Checkpoints(self.states, deadline, say)
            result = self._train(load_data(self.run.task), checkpoint, layout)
            self._remove_states()
            return result

    def follow(self, layout: Layout) -> None:
        """Trains along with the first of several processes, which has the run and its result."""
        checkpoint = Checkpoints(self.states, Deadline(), lambda line: None)
        with contextlib.suppress(OutOfTime):
            self.run.train(load_data(self.run.task), checkpoint=checkpoint, layout=layout)

    def _train(self, data: Data, checkpoint: Checkpoints, layout: Layout | None) -> Result:
        """Trains and evaluates the model, writes the result, and returns it."""
        options = {}
        if layout:
            hosts.agreed(self.run)
            options, self._devices = {"layout": layout}, {"devices": layout.mesh.size}
        trained = self.run.train(data, checkpoint=checkpoint, **options)
        if (step := trained.diverged) is not None:
            return self._write("diverged", error=f"the loss is not finite at step {step}")
        return self._write("done", data.facts, **self.run.measure(trained, data))

    def _write(
        self, status: str, facts: Mapping[str, str] | None = None, **measured: Any
    ) -> Result:
        result = Result(
            settings=self.run.settings,
            status=status,
            scheme_repr=repr(self.run.position),
            environment=here() | self._devices | dict(facts or {}) | self.run.sources,
            commit=commit(),
            finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **measured,
        )
        results.write(self.path.parent, self.run.name, result)
        return result


Lookup = Callable[[Run], Result | None]
"""Returns the result of a run, None if it has none."""


def known(folder: Path) -> Lookup:
    """Returns a function that reads the result of a run once it has one, and then remembers it."""
    by_name: dict[str, Result] = {}

    def result(run: Run) -> Result | None:
        if run.name not in by_name and (read := RunFolder(folder, run).result()):
            by_name[run.name] = read
        return by_name.get(run.name)

    return result


@functools.lru_cache(maxsize=8)
def load_data(task: Any) -> Data:
    """Returns the data of a task, loaded once."""
    return task.load()


def duration(seconds: float) -> str:
    """Returns seconds in words.

    >>> duration(8.4), duration(75), duration(3700)
    ('8 s', '1 min 15 s', '1 h 1 min')
    """
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


def here() -> dict[str, Any]:
    """Returns versions and the machine, as results have them."""
    return {k: v for k, v in environment().items() if k != "platform"}


def _scores(evaluations: list[Evaluation]) -> dict[str, dict[str, float | None]]:
    """Returns scores by view and length."""
    scores: dict[str, dict[str, float | None]] = {}
    for e in evaluations:
        scores.setdefault(e.variant or e.mode, {})[str(e.length)] = e.value
    return scores


def _places(evaluations: list[Evaluation], view: str) -> dict[str, list[float | None]]:
    """Returns the scores of a view by place in the row, by length."""
    shown = (e for e in evaluations if (e.variant or e.mode) == view)
    return {str(e.length): e.places for e in shown if e.places}


@functools.cache
def commit() -> str:
    """Returns the commit of the code and settings, with a plus where files differ from it.

    Later calls return the result of the first. Outside a repository it is "unknown".
    """
    root = Path(__file__).parents[2]

    def git(*words: str) -> str:
        call = ["git", "-C", str(root), *words]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "experiments", "posenc_jax", "configs")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
