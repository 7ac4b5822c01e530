"""The runs of an experiment, one after the other: train, evaluate, write down, show."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.config import Experiment
from experiments.corpus import Corpus
from experiments.evaluate import evaluate, is_fitted, text_baseline
from experiments.folder import MEASURES, Folder, ResultsError
from experiments.model import initialize
from experiments.progress import Progress
from experiments.report import write_report
from experiments.tasks import Task, Text
from experiments.train import seed_keys, train

SECONDS = {"kback": 12.0, "kth": 14.0, "text": 21.0}
"""What a run takes on two idle cores, for the first guess of the time left."""


@dataclasses.dataclass
class Loaded:
    """A task and the data that all its runs share."""

    task: Task
    data: Any
    corpus: Corpus | None = None
    baseline: float | None = None

    @property
    def fit_rule(self) -> str:
        """When a model counts as fitted, with the number it has to beat."""
        beat = "" if self.baseline is None else f", {self.baseline:.3f}"
        return self.task.fit_rule + beat


def load_task(task: Task) -> Loaded:
    """Returns a task with its data.

    Raises:
      CorpusError: if there is none.
    """
    if not isinstance(task, Text):
        return Loaded(task, task.load())
    corpus = task.read()
    return Loaded(task, jnp.asarray(corpus.train), corpus, text_baseline(task, corpus))


def run_one(
    loaded: Loaded,
    name: str,
    scheme: Any,
    seeds: list[int],
    report: Callable[[int, list[float]], None],
    keep: Callable[[Any], None] = lambda params: None,
) -> dict[str, Any]:
    """Trains and evaluates one scheme, and returns the run as it stands in results.json."""
    task = loaded.task
    run: dict[str, Any] = describe_run(loaded, name, scheme, seeds)
    trained = train(task, scheme, seeds, loaded.data, report)
    keep(trained.params)
    found = evaluate(task, scheme, trained.params, seeds, loaded.corpus)
    return run | {
        "status": "done",
        "parameters": trained.parameters,
        "compile_seconds": round(trained.compile_seconds, 3),
        "train_seconds": round(trained.train_seconds, 3),
        "cpu_seconds": round(trained.cpu_seconds, 3),
        "steps_per_second": round(task.train.steps / trained.train_seconds, 3),
        "final_loss": trained.curve["loss"][-1],
        "curve": trained.curve,
        "fitted": is_fitted(task, found, loaded.baseline),
        "evaluations": [dataclasses.asdict(e) for e in found],
    }


def describe_run(loaded: Loaded, name: str, scheme: Any, seeds: list[int]) -> dict[str, Any]:
    """Returns what is known of a run before it begins."""
    task = loaded.task
    return {
        "task": task.name,
        "scheme": name,
        "scheme_repr": repr(scheme),
        "status": "failed",
        "error": None,
        "seeds": seeds,
        "steps": task.train.steps,
        "learning_rate": task.train.learning_rate,
        "train_length": task.train_length,
        "fitted": False,
        "fit_rule": loaded.fit_rule,
        "evaluations": [],
    }


def compare(experiment: Experiment, *, fresh: bool = False, keep: bool = False) -> int:
    """Carries out the plan of an experiment and returns the exit status.

    Runs that are done already are not done again. A run that raises is written down as
    failed and the others go on. Ctrl-C keeps what is finished.

    Args:
      experiment: what to run.
      fresh: whether to remove the results of an earlier experiment of that name.
      keep: whether to keep the trained parameters.

    Returns:
      0, or 1 if a run failed, or 130 after Ctrl-C.

    Raises:
      CorpusError, ResultsError: with one line; what was written before is whole.
    """
    tasks = {name: load_task(experiment.task(name)) for name in experiment.tasks}
    folder = Folder(experiment, fresh=fresh)
    folder.open(**{f"corpus {c.name}": f"{c.size} bytes, sha256 {c.sha256}" for c in _texts(tasks)})
    status = 0
    with Progress() as progress:
        for corpus in _texts(tasks):
            progress.message(corpus.describe())
        guesses = {name: SECONDS[name] * experiment.seeds for name in tasks}
        progress.start(experiment.plan(), guesses)
        try:
            for task, name in experiment.plan():
                run = folder.finished(task, name)
                if run is None:
                    run = _attempt(experiment, folder, progress, tasks[task], name, keep)
                    folder.add(run)
                if run["status"] == "failed":
                    status = 1
                progress.finish(run)
        except KeyboardInterrupt:
            status = 130
    _report(folder)
    if status == 130:
        print("Stopped; what was finished is kept, and the same command goes on from there.")
    return status


def evaluate_again(experiment: Experiment) -> int:
    """Measures kept parameters again, and puts the numbers in place of the earlier ones.

    Raises:
      CorpusError, ResultsError: with one line; what was written before is whole.
    """
    folder = Folder(experiment, may_differ=MEASURES)
    before: dict[tuple[str, str], dict[str, Any]] = {}
    for pair in experiment.plan():
        before[pair] = folder.finished(*pair) or {}
        if not before[pair]:
            raise ResultsError(
                f"{folder.path}: holds no finished run of {pair[1]} on {pair[0]}; make it with "
                "`python -m experiments train`"
            )
    tasks = {name: load_task(experiment.task(name)) for name in experiment.tasks}
    params = {pair: _kept(experiment, folder, *pair) for pair in experiment.plan()}
    folder.open()
    with Progress() as progress:
        progress.start(experiment.plan())
        for (task, name), run in before.items():
            loaded, scheme = tasks[task], experiment.scheme(task, name)
            found = evaluate(loaded.task, scheme, params[task, name], run["seeds"], loaded.corpus)
            run |= {
                "fitted": is_fitted(loaded.task, found, loaded.baseline),
                "fit_rule": loaded.fit_rule,
                "evaluations": [dataclasses.asdict(e) for e in found],
            }
            folder.add(run)
            progress.finish(run)
    _report(folder)
    return 0


def _kept(experiment: Experiment, folder: Folder, task: str, name: str) -> Any:
    settings = experiment.task(task)
    keys = seed_keys(experiment.seed_list, "parameters")
    scheme = experiment.scheme(task, name)
    like = jax.eval_shape(
        lambda k: initialize(settings.model, scheme, settings.vocab_size, k), keys
    )
    return folder.load_parameters(task, name, like)


def _report(folder: Folder) -> None:
    try:
        print(f"Report: {write_report(folder.path)}")
    except OSError as error:
        raise ResultsError(
            f"{folder.path}: the report cannot be written: {error.strerror or error}"
        ) from None


def _texts(tasks: dict[str, Loaded]) -> list[Corpus]:
    return [loaded.corpus for loaded in tasks.values() if loaded.corpus is not None]


def _attempt(
    experiment: Experiment,
    folder: Folder,
    progress: Progress,
    loaded: Loaded,
    name: str,
    keep: bool,
) -> dict[str, Any]:
    """Returns a run, done or failed; only trouble with the folder is raised."""
    task = loaded.task
    scheme = experiment.scheme(task.name, name)
    seeds = experiment.seed_list

    def report(step: int, loss: list[float]) -> None:
        folder.log(task=task.name, scheme=name, step=step, loss=loss)
        progress.update(task.name, name, step, task.train.steps, sum(loss) / len(loss))

    def store(params: Any) -> None:
        if keep:
            folder.save_parameters(task.name, name, params)

    try:
        return run_one(loaded, name, scheme, seeds, report, store)
    except ResultsError:
        raise
    except Exception as error:
        progress.update(task.name, name, 0, task.train.steps, float("nan"))
        return describe_run(loaded, name, scheme, seeds) | {"error": _one_line(error)}


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:300]}"
