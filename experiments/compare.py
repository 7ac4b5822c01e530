"""The runs of an experiment in sequence: train, evaluate, store, show."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from experiments import mesh as on_mesh
from experiments.config import Experiment
from experiments.errors import ExperimentError, ResultsError
from experiments.files import locked
from experiments.model import Position, initialize, seed_keys
from experiments.progress import Progress
from experiments.report import write_report
from experiments.results_store import ResultsStore
from experiments.schemes import has_table
from experiments.tasks.base import Data, Task
from experiments.train import train


@dataclasses.dataclass(frozen=True)
class Run:
    """A scheme on a task, with the data that all schemes share."""

    task: Task
    data: Data
    name: str
    position: Position
    seeds: list[int]
    mesh: jax.sharding.Mesh | None = None

    @property
    def key(self) -> tuple[str, str]:
        """The names of the task and the scheme."""
        return self.task.name, self.name

    def describe(self) -> dict[str, Any]:
        """Returns the entries of results.json that are known before the run."""
        task = self.task
        return {
            "task": task.name,
            "scheme": self.name,
            "scheme_repr": repr(self.position),
            "status": "failed",
            "error": None,
            "seeds": self.seeds,
            "steps": task.train.steps,
            "learning_rate": task.train.learning_rate,
            "train_length": task.train_length,
            "fitted": False,
            "fit_rule": task.fit_rule(self.data),
            "evaluations": [],
            **({"mesh": on_mesh.describe(self.mesh)} if self.mesh else {}),
        }

    def train(
        self, report: Callable[[int, list[float]], None], keep: Callable[[Any], None]
    ) -> dict[str, Any]:
        """Trains and evaluates the scheme; returns the entries of results.json."""
        trained = train(
            self.task, self.position, self.seeds, self.data.train, report, mesh=self.mesh
        )
        keep(trained.params)
        return {
            **self.describe(),
            "status": "done",
            "parameters": trained.parameters,
            "memory_bytes": trained.memory,
            "compile_seconds": round(trained.compile_seconds, 3),
            "train_seconds": round(trained.train_seconds, 3),
            "cpu_seconds": round(trained.cpu_seconds, 3),
            "final_loss": trained.curve["loss"][-1],
            "curve": trained.curve,
            **self.evaluate(trained.params),
        }

    def evaluate(self, params: Any) -> dict[str, Any]:
        """Returns the entries of results.json that depend on trained parameters."""
        found = self.task.evaluate(self.position, params, self.seeds, self.data)
        if has_table(self.position):
            last = self.task.train_length - 1
            note = f"rows beyond position {last} were never trained"
            found = [
                dataclasses.replace(e, note=e.note or (None if e.in_distribution else note))
                for e in found
            ]
        return {
            "fitted": self.task.fitted(found, self.data),
            "fit_rule": self.task.fit_rule(self.data),
            "evaluations": [dataclasses.asdict(e) for e in found],
        }


def plan_runs(experiment: Experiment, mesh: jax.sharding.Mesh | None = None) -> list[Run]:
    """Returns all runs of an experiment with their data, in order.

    Raises:
      CorpusError: if data are missing or damaged.
    """
    data = {name: task.load() for name, task in experiment.tasks.items()}
    return [
        Run(
            experiment.tasks[task],
            data[task],
            name,
            experiment.scheme(task, name),
            experiment.seed_list,
            mesh,
        )
        for task, name in experiment.plan()
    ]


def compare(
    experiment: Experiment,
    *,
    fresh: bool = False,
    keep: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> int:
    """Carries out the plan of an experiment and returns the exit status.

    Finished runs are skipped, unless `keep` and their parameters were not kept. A run that raises
    is stored as failed and the others continue. Ctrl-C keeps finished runs. Of several processes,
    the first writes the results.

    Args:
      experiment: what to run.
      fresh: whether to remove the results of an earlier experiment of that name.
      keep: whether to keep the trained parameters.
      mesh: of `experiments.mesh`, to train on all its devices; default: on one.

    Returns:
      0, or 1 if a run failed, or 130 after Ctrl-C.

    Raises:
      CorpusError, ResultsError: with one line; files written before are complete.
    """
    runs = plan_runs(experiment, mesh)
    if jax.process_index() > 0:
        return _take_part(runs)
    with contextlib.ExitStack() as held:
        missing = [False] * len(runs)
        try:
            held.enter_context(locked(experiment.folder))
            store = ResultsStore(experiment, fresh=fresh)
            store.open(_facts(runs))
            found = [store.finished(*run.key, kept=keep) for run in runs]
            missing = [result is None for result in found]
        finally:  # Other processes wait for it.
            on_mesh.agreed(missing)
        return _compare(experiment, runs, found, store, keep)


def _compare(
    experiment: Experiment,
    runs: list[Run],
    found: list[dict[str, Any] | None],
    store: ResultsStore,
    keep: bool,
) -> int:
    status = 0
    with _progress(experiment) as progress:
        for name, words in _facts(runs).items():
            progress.message(f"{name}: {words}")
        guess = {name: t.seconds * experiment.seeds for name, t in experiment.tasks.items()}
        progress.start([run.key for run in runs], guess)
        try:
            # Finished runs come first, so that the estimate of the time left is of the others.
            for run, result in sorted(zip(runs, found, strict=True), key=lambda pair: not pair[1]):
                if result is None:
                    result = _attempt(run, store, progress, keep)
                    store.add(result)
                if result["status"] == "failed":
                    status = 1
                progress.finish(result)
        except KeyboardInterrupt:
            status = 130
    print(f"Report: {write_report(store.path)}")
    if status == 130:
        print("Stopped; finished runs are kept, and the same command continues with the others.")
    return status


def _take_part(runs: list[Run]) -> int:
    """Computes what process 0 computes; returns the exit status."""
    status = 0
    for run, missing in zip(runs, on_mesh.agreed([False] * len(runs)), strict=True):
        try:
            if missing:
                run.train(lambda step, loss: None, lambda params: None)
        except Exception:  # Process 0 has it in its results.
            status = 1
    return status


def evaluate_again(experiment: Experiment) -> int:
    """Measures kept parameters again, and replaces the earlier numbers.

    Raises:
      CorpusError, ResultsError: with one line; files written before are complete.
    """
    store = ResultsStore(experiment, measure=True)
    for task, name in experiment.plan():
        if store.finished(task, name) is None:
            raise ResultsError(
                f"{store.path}: holds no finished run of {name} on {task}; make it with "
                "`python -m experiments train`"
            )
    runs = plan_runs(experiment)
    params = {run.key: _kept(run, store) for run in runs}
    store.open(_facts(runs))
    with _progress(experiment) as progress:
        progress.start([run.key for run in runs])
        for run in runs:
            result = {**(store.finished(*run.key) or {}), **run.evaluate(params[run.key])}
            store.add(result)
            progress.finish(result)
    print(f"Report: {write_report(store.path)}")
    return 0


def _progress(experiment: Experiment) -> Progress:
    return Progress({name: task.labels for name, task in experiment.tasks.items()})


def _facts(runs: list[Run]) -> dict[str, str]:
    return {name: words for run in runs for name, words in run.data.facts.items()}


def _kept(run: Run, store: ResultsStore) -> Any:
    keys, task = seed_keys(run.seeds, "parameters"), run.task
    like = jax.eval_shape(lambda k: initialize(task.model, run.position, task.vocab_size, k), keys)
    return store.load_parameters(*run.key, like)


def _attempt(run: Run, store: ResultsStore, progress: Progress, keep: bool) -> dict[str, Any]:
    """Returns a run, done or failed; only errors of the folder are raised."""
    task, name = run.key
    steps = run.task.train.steps

    def report(step: int, loss: list[float]) -> None:
        store.log(task=task, scheme=name, step=step, loss=loss)
        progress.update(task, name, step, steps, sum(loss) / len(loss))

    def save(params: Any) -> None:
        if keep:
            store.save_parameters(task, name, params)

    try:
        return run.train(report, save)
    except ExperimentError:
        raise
    except Exception as error:
        progress.update(task, name, 0, steps, float("nan"))
        words = " ".join(str(error).split())[:300]
        return {**run.describe(), "error": f"{type(error).__name__}: {words}"}
