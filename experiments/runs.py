"""Single runs: a scheme on a task with one seed, in a folder named by the hash of its settings.

result.json       scores and how they were made; written once, when the run has ended
checkpoints/      states of training, about one a minute, until the run has ended; the latest two
parameters.npz    trained parameters, where other runs begin with them

A run that was stopped at any time continues from its checkpoint with equal bits. Only result.json
is worth committing.
"""

import dataclasses
import functools
import hashlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from experiments.checkpoints import (
    Deadline,
    OrbaxCheckpoint,
    OutOfTime,
    fits,
    read_arrays,
    write_arrays,
)
from experiments.config_io import convert, to_tables
from experiments.environment import environment
from experiments.errors import ResultsError
from experiments.files import locked, to_json, write_whole
from experiments.model import Position, initialize, seed_keys
from experiments.tasks import Task
from experiments.tasks.base import Data, Evaluation
from experiments.train import train

VERSIONS = ("jax", "jaxlib", "flax", "optax", "numpy", "device")
"""Entries of the environment that must be equal where runs are compared."""
_POINTS = 32


@dataclasses.dataclass(frozen=True)
class Result:
    """What result.json holds.

    Attributes:
      settings: of the run, all of them.
      status: "done", or "diverged" where the loss was not finite.
      scores: by view (`Task.views`), then by length.
      places: of the first view, by length, as `Evaluation.places` has them.
      curve: some points of the curve of the loss, "step" and "loss".
      environment: versions and the machine.
      commit: of the code, with a plus where files differed from it.
      finished: when, ISO 8601.
    """

    settings: dict[str, Any]
    status: str
    scheme_repr: str
    environment: dict[str, Any]
    commit: str
    finished: str
    error: str | None = None
    parameters: int | None = None
    memory_bytes: int | None = None
    fitted: bool = False
    fit_rule: str = ""
    scores: dict[str, dict[str, float | None]] = dataclasses.field(default_factory=dict)
    places: dict[str, list[float | None]] = dataclasses.field(default_factory=dict)
    curve: dict[str, list[float | None]] = dataclasses.field(default_factory=dict)
    compile_seconds: float = 0.0
    train_seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions that must be equal where runs are compared."""
        return tuple(f"{name} {self.environment.get(name)}" for name in VERSIONS)

    @property
    def on_cpu(self) -> bool:
        """Whether it was trained on a CPU."""
        return str(self.environment.get("device")).startswith("cpu")

    @property
    def seconds(self) -> float:
        """Time of training: CPU time on CPUs, which other programs disturb less, or wall time."""
        return self.cpu_seconds if self.on_cpu else self.train_seconds

    @property
    def processor(self) -> str:
        """The name of the processor."""
        return str(self.environment.get("processor"))


@dataclasses.dataclass(frozen=True)
class Run:
    """A scheme on a task with one seed.

    Attributes:
      task: the task.
      scheme: its name in settings.
      options: of the scheme, as given.
      position: the scheme, or its layers.
      seed: of parameters and data.
      start: the run whose trained parameters this one begins with, None for new ones.
    """

    task: Task
    scheme: str
    options: dict[str, Any] = dataclasses.field(hash=False)
    position: Position
    seed: int
    start: "Run | None" = None

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, of JSON's types."""
        task = {k: v for k, v in to_tables(self.task).items() if k != "schemes"}
        settings = {
            "task": self.task.name,
            "scheme": self.scheme,
            "options": self.options,
            "seed": self.seed,
            self.task.name: task,
        }
        return settings | ({"start": self.start.settings} if self.start else {})

    @functools.cached_property
    def name(self) -> str:
        """The name of the folder: task, scheme, seed, and a hash of all settings."""
        text = json.dumps(self.settings, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        scheme = re.sub(r"[^\w.+-]", "-", self.scheme.rpartition(":")[2])
        return f"{self.task.name}-{scheme}-s{self.seed}-{digest}"

    @property
    def batches_before(self) -> int:
        """How many batches the parameters have seen that it begins with."""
        return self.start.batches_before + self.start.task.train.steps if self.start else 0

    @functools.cached_property
    def program(self) -> str:
        """The same for all runs that one compiled program serves: other seeds, other rates."""
        train = {"learning_rate": 1.0, "scheme_rate": 1.0}
        task = dataclasses.replace(self.task, train=dataclasses.replace(self.task.train, **train))
        return dataclasses.replace(self, task=task, seed=0, start=None).name

    @property
    def root(self) -> "Run":
        """The run without a start from which this one descends."""
        return self.start.root if self.start else self


class RunFolder:
    """The folder of a run.

    Args:
      parent: where folders of runs are.
      run: the run.
    """

    def __init__(self, parent: Path, run: Run):
        self.run = run
        self.path = parent / run.name

    def result(self) -> Result | None:
        """Returns the result; None if the run has not ended.

        Raises:
          ResultsError: if it cannot be read, or is that of other settings.
        """
        source = self.path / "result.json"
        try:
            found = convert(Result, json.loads(source.read_text(encoding="utf-8")), "")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ResultsError(f"{source}: cannot be read: {error}") from None
        if found.settings != self.run.settings:
            raise ResultsError(f"{source}: has other settings than its name says")
        return found

    def forget(self) -> None:
        """Removes the result and what was kept for it."""
        for name in ("result.json", "parameters.npz"):
            (self.path / name).unlink(missing_ok=True)
        self._checkpoint().remove()

    def carry_out(
        self,
        data: Callable[[Task], Data],
        say: Callable[[str], None] = lambda line: None,
        deadline: Deadline | None = None,
        keep: bool = False,
    ) -> Result:
        """Returns the result, of an earlier call or of training and evaluation now.

        Args:
          data: loads the data of a task.
          say: shows a line.
          deadline: when to stop; default: never.
          keep: whether the trained parameters must be there afterwards.

        Raises:
          OutOfTime: at the deadline; the next call continues.
          ResultsError: if another process works in the folder, or it cannot be written.
        """
        deadline = Deadline() if deadline is None else deadline
        with locked(self.path):
            found = self.result()
            if found and (not keep or (self.path / "parameters.npz").exists()):
                return found
            params = None
            if self.run.start:
                parent = RunFolder(self.path.parent, self.run.start)
                if parent.carry_out(data, say, deadline, keep=True).status != "done":
                    return found or self._write("diverged", error="the run before it diverged")
                params = parent.parameters()
            if deadline.over():
                raise OutOfTime
            return self._train(found, data(self.run.task), params, say, deadline, keep)

    def parameters(self) -> Any:
        """Returns the kept parameters, leaves [1, ...]."""
        like = _new_parameters(self.run)
        arrays = read_arrays(self.path / "parameters.npz")
        if arrays is None or not fits(arrays, like):
            raise ResultsError(f"{self.path / 'parameters.npz'}: cannot be read; remove it")
        return jax.tree.unflatten(jax.tree.structure(like), arrays)

    def _train(
        self,
        before: Result | None,
        data: Data,
        params: Any,
        say: Callable[[str], None],
        deadline: Deadline,
        keep: bool,
    ) -> Result:
        run = self.run
        checkpoint = self._checkpoint(deadline, say)
        try:
            trained = train(
                run.task,
                run.position,
                [run.seed],
                data.train,
                params=params,
                batches_before=run.batches_before,
                checkpoint=checkpoint,
            )
        except FloatingPointError as error:
            checkpoint.remove()
            return before or self._write("diverged", error=str(error))
        if keep:
            write_arrays(self.path / "parameters.npz", jax.tree.leaves(trained.params))
        if before:
            checkpoint.remove()
            return before
        found = run.task.evaluate(run.position, trained.params, [run.seed], data)
        every = max(1, len(trained.curve["step"]) // _POINTS)
        points = slice(every - 1, None, every)
        result = self._write(
            "done",
            data.facts,
            parameters=trained.parameters,
            memory_bytes=trained.memory,
            fitted=run.task.fitted(found, data),
            fit_rule=run.task.fit_rule(data),
            scores=_scores(found),
            places=_places(found, run.task.views[0]),
            curve={
                "step": trained.curve["step"][points],
                "loss": [x for (x,) in trained.curve["loss"][points]],
            },
            compile_seconds=round(trained.compile_seconds, 2),
            train_seconds=round(trained.train_seconds, 2),
            cpu_seconds=round(trained.cpu_seconds, 2),
        )
        checkpoint.remove()
        return result

    def _checkpoint(
        self, deadline: Deadline | None = None, say: Callable[[str], None] = lambda line: None
    ) -> OrbaxCheckpoint:
        deadline = Deadline() if deadline is None else deadline
        return OrbaxCheckpoint(self.path / "checkpoints", deadline, say)

    def _write(
        self, status: str, facts: Mapping[str, str] | None = None, **measured: Any
    ) -> Result:
        result = Result(
            settings=self.run.settings,
            status=status,
            scheme_repr=repr(self.run.position),
            environment=here() | dict(facts or {}),
            commit=commit(),
            finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **measured,
        )
        write_whole(self.path / "result.json", text(result))
        return result


def here() -> dict[str, Any]:
    """Returns versions and the machine, as results have them."""
    return {k: v for k, v in environment().items() if k != "platform"}


def text(result: Result) -> str:
    """Returns a result as JSON, with lists on one line each."""
    words = to_json(dataclasses.asdict(result), indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), words) + "\n"


def _new_parameters(run: Run) -> Any:
    keys = seed_keys([run.seed], "parameters")
    task = run.task
    return jax.eval_shape(lambda k: initialize(task.model, run.position, task.vocab_size, k), keys)


def _scores(found: list[Evaluation]) -> dict[str, dict[str, float | None]]:
    """Returns scores of one seed by view and length."""
    scores: dict[str, dict[str, float | None]] = {}
    for e in found:
        scores.setdefault(e.variant or e.mode, {})[str(e.length)] = e.values[0]
    return scores


def _places(found: list[Evaluation], view: str) -> dict[str, list[float | None]]:
    """Returns the scores of a view by place in the row, by length."""
    return {str(e.length): e.places for e in found if (e.variant or e.mode) == view and e.places}


@functools.cache
def commit() -> str:
    """Returns the commit of the code and settings, with a plus where files differ from it.

    The answer is that of the first call. Outside a repository it is "unknown".
    """
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        call = ["git", "-C", str(folder), *words]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", "../posenc_jax", "../configs")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
