"""Units of work, and runs: a scheme on a task with one seed, in a folder named by its settings.

result.json       scores and provenance (`experiments.runs.results`), when the run has ended
checkpoints/      states of training, about one a minute, until the run has ended; the latest two;
                  checkpoints-DIGEST/ of runs with code or a corpus of your own

A run that was stopped at any time continues from its checkpoint with equal bits.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.models.model import Position
from experiments.models.schemes import code_of, parts_of, short
from experiments.runs import hosts, results
from experiments.runs.checkpoints import Checkpoints, Deadline, OutOfTime
from experiments.runs.environment import environment
from experiments.runs.files import locked
from experiments.runs.results import Result
from experiments.settings.config_io import to_tables
from experiments.settings.trust import code_of_task
from experiments.tasks import TASKS, Task
from experiments.tasks.base import Data, Evaluation
from experiments.tasks.corpus import SOURCES
from experiments.training.layout import Layout, check_batch
from experiments.training.train import Trained, of_program, train

_POINTS = 32


class Work:
    """A unit of a queue, in a folder of its name: a run, or a pass over a text.

    `kind` is of its result.
    """

    kind: ClassVar[results.Kind]

    @property
    def name(self) -> str:
        """Its name, which ends with a digest of its settings."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        return self.name

    @property
    def sources(self) -> Mapping[str, str]:
        """Digests of files that its settings name."""
        return {}

    def unlike(self, result: Any) -> str:
        """Returns in words how a result of its name differs from it, or ""."""
        return ""

    def measured(
        self,
        folder: Path,
        say: Callable[[str], None],
        deadline: Deadline,
        layout: Layout | None = None,
    ) -> Any:
        """Returns the result, measured now; for arguments and errors see `carry_out`."""
        raise NotImplementedError

    def result(self, folder: Path) -> Any:
        """Returns the result in a folder of folders; None if the work has not ended."""
        return results.stored(folder, self.name, self.kind)

    def carry_out(
        self,
        folder: Path,
        say: Callable[[str], None] = lambda line: None,
        deadline: Deadline | None = None,
        layout: Layout | None = None,
    ) -> Any:
        """Returns the result, of an earlier call or measured now.

        Args:
          folder: of the folders of units.
          deadline: when to stop, with OutOfTime; the next call continues. Default: never.

        Raises:
          Locked: while another process carries it out.
        """
        deadline = Deadline() if deadline is None else deadline
        if before := self.result(folder):
            return before
        with locked(folder / self.name):
            if before := self.result(folder):  # Of a process that has just ended it.
                return before
            if deadline.over():
                raise OutOfTime
            result = self.measured(folder, say, deadline, layout)
            results.write(folder, self.name, result)
            for states in (folder / self.name).glob("checkpoints*"):
                shutil.rmtree(states, ignore_errors=True)
            return result


@dataclasses.dataclass(frozen=True)
class Run(Work):
    """A scheme on a task with one seed, of parameters and data.

    `scheme` is its name in settings and `options` are its settings there; `position` is the scheme,
    or its layers.
    """

    task: Any
    scheme: str
    options: dict[str, Any] = dataclasses.field(hash=False)
    position: Position
    seed: int
    kind: ClassVar = results.RUNS

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, of JSON's types."""
        task = {k: v for k, v in to_tables(self.task).items() if k not in ("schemes", "rates")}
        return {
            "task": reference(type(self.task)),
            "scheme": self.scheme,
            "options": self.options,
            "seed": self.seed,
            self.task.name: task,
        }

    @functools.cached_property
    def name(self) -> str:
        scheme = re.sub(r"[^\w.+-]", "-", short(self.scheme))
        return f"{self.task.name}-{scheme}-s{self.seed}-{results.digest(self.settings)}"

    @functools.cached_property
    def sources(self) -> dict[str, str]:
        names = [part.split(":") for part in parts_of(self.scheme) if ":" in part]
        modules = [module for module, _ in names]
        # Checked when the plan was made: a worker process does not know what --trust allows.
        objects = (getattr(importlib.import_module(module), name) for module, name in names)
        defined = (getattr(each, "__module__", None) for each in objects)
        modules += filter(None, defined)  # Another module may import the object.
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

    def unlike(self, result: Result) -> str:
        """Compares numbers of rows: a study's grid has no test lengths, which determine them."""
        texts = result.scheme_repr, repr(self.position)
        old, new = (", ".join(re.findall(r"max_length=\d+", text)) for text in texts)
        return f"has a result with {old}, not {new}" if old != new else ""

    @functools.cached_property
    def program(self) -> str:
        """Identifies the compiled program, which runs with other seeds, rates and steps share."""
        return dataclasses.replace(self, task=of_program(self.task), seed=0).name

    def train(self, data: Data, **options: Any) -> Trained:
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

    def measured(
        self,
        folder: Path,
        say: Callable[[str], None],
        deadline: Deadline,
        layout: Layout | None = None,
    ) -> Result:
        options: dict[str, Any] = {}
        facts: dict[str, Any] = {}
        if layout:
            check_batch(self.task, layout.mesh.size)
        data = load_data(self.task)
        if layout:
            hosts.agreed(self)
            options, facts = {"layout": layout}, {"devices": layout.mesh.size}
        checkpoint = Checkpoints(self.states(folder), deadline, say)
        trained = self.train(data, checkpoint=checkpoint, **options)
        if (step := trained.diverged) is not None:
            return self.ended("diverged", facts, error=f"the loss is not finite at step {step}")
        return self.ended("done", {**facts, **data.facts}, **self.measure(trained, data))

    def follow(self, folder: Path, layout: Layout) -> None:
        """Trains along with the first of several processes, which writes the result."""
        checkpoint = Checkpoints(self.states(folder), Deadline(), lambda line: None)
        with contextlib.suppress(OutOfTime):
            self.train(load_data(self.task), checkpoint=checkpoint, layout=layout)

    def states(self, folder: Path) -> Path:
        """Returns the folder of states of training, of these `sources` alone."""
        if not self.sources:
            return folder / self.name / "checkpoints"
        digest = hashlib.sha256(json.dumps(self.sources, sort_keys=True).encode())
        return folder / self.name / f"checkpoints-{digest.hexdigest()[:12]}"

    def ended(self, status: str, facts: Mapping[str, Any] | None = None, **measured: Any) -> Result:
        """Returns the result with a status, `facts` of its environment, and measured entries."""
        return Result(
            settings=self.settings,
            status=status,
            scheme_repr=repr(self.position),
            environment=here() | dict(facts or {}) | self.sources,
            commit=commit(),
            finished=now(),
            **measured,
        )


def reference(task: type[Task]) -> str:
    """Returns the name by which `find_task` finds a task."""
    known = TASKS.get(task.name) is task
    return task.name if known else f"{task.__module__}:{task.__qualname__}"


Lookup = Callable[[Run], Result | None]
"""Returns the result of a run, None if it has none."""


def known(folder: Path) -> Callable[[Any], Any]:
    """Returns a function that reads a result once it is there, and then remembers it."""
    by_name: dict[str, Any] = {}

    def result(work: Work) -> Any:
        if work.name not in by_name and (read := work.result(folder)):
            by_name[work.name] = read
        return by_name.get(work.name)

    return result


@functools.lru_cache(maxsize=8)
def load_data(task: Any) -> Data:
    with code_of_task(task.name):
        data = task.load()
        if not isinstance(data, Data):
            raise TypeError(f"load() must return Data, got {data!r:.80}")
        return data


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


def now() -> str:
    """Returns the time as results have it, ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def here() -> dict[str, Any]:
    """Returns versions and the machine, as results have them."""
    return {k: v for k, v in environment().items() if k != "platform"}


def _scores(evaluations: list[Evaluation]) -> dict[str, dict[str, float | None]]:
    scores: dict[str, dict[str, float | None]] = {}
    for e in evaluations:
        scores.setdefault(e.variant or e.mode, {})[str(e.length)] = e.value
    return scores


def _places(evaluations: list[Evaluation], view: str) -> dict[str, list[float | None]]:
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
