"""Progress of a comparison: a table of results that fills in, and the time left.

The display is live on a terminal. Elsewhere (pipes, CI) there is one line per finished run and
the table at the end.
"""

import time
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from experiments.pages import tables
from experiments.pages.scheme_results import collect, mean
from experiments.pages.terminal import final_table
from experiments.runs.run import Result, Run
from experiments.runs.run_queue import Ended, Step, duration


class TimeLeft:
    """Estimates the remaining time of a plan, and learns from each run that ends.

    A bar of `rich.progress` extrapolates one speed; here runs of different tasks take different
    times, and the first estimate is made before any has ended.

    Args:
      guess: seconds of a run, by task.
    """

    def __init__(self, guess: Mapping[str, float]):
        self._guess = guess
        self._seen: dict[str, list[float]] = {}

    def learn(self, task: str, seconds: float) -> None:
        """Records the time of a run."""
        self._seen.setdefault(task, []).append(seconds)

    def of_run(self, task: str) -> float:
        """Returns the mean of this task's runs, or the guess times the error of other tasks'."""
        if seen := self._seen.get(task):
            return mean(seen)
        took = sum(sum(seen) for seen in self._seen.values())
        guessed = sum(self._guess.get(name, 0.0) * len(seen) for name, seen in self._seen.items())
        return self._guess.get(task, 0.0) * (took / guessed if guessed else 1.0)

    def of_plan(self, waiting: Sequence[str], fractions: Sequence[float] = ()) -> float:
        """Returns the seconds of computation left.

        Args:
          waiting: tasks of the runs that have not ended.
          fractions: the completed part of the first of them.
        """
        total = sum(self.of_run(task) for task in waiting)
        done = zip(waiting, fractions, strict=False)
        return total - sum(self.of_run(task) * fraction for task, fraction in done)


class Progress:
    """Shows a plan of runs while a queue carries it out.

    Args:
      console: where to print; default: the terminal.

    Attributes:
      errors: of runs that raised, by name.
    """

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self._runs: dict[str, Run] = {}
        self._results: dict[str, Result | None] = {}
        self.errors: dict[str, str] = {}
        self._steps: dict[str, Step] = {}
        self._workers, self._began, self._left = 1, time.monotonic(), TimeLeft({})
        self._live: Live | None = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.stop()

    def plan(
        self, runs: Sequence[Run], results: Mapping[str, Result | None], workers: int = 1
    ) -> None:
        """Begins to show a plan.

        Args:
          runs: all runs, with several seeds.
          results: of runs that have ended, by name.
          workers: how many runs are carried out at a time.
        """
        self._runs = {run.name: run for run in runs}
        self._results = {name: result for name, result in results.items() if result}
        self._workers, self._began = workers, time.monotonic()
        self._left = TimeLeft({run.task.name: run.task.seconds for run in runs})
        if self._results:
            self.message(f"{len(self._results)} of {len(runs)} runs were done before.")
        if self.console.is_interactive and self._live is None:
            self._live = Live(
                console=self.console,
                get_renderable=self._render,
                refresh_per_second=2,
                vertical_overflow="crop",
            )
            self._live.start()

    def start(self, runs: Sequence[Run]) -> None:
        """Begins with runs of the plan that have no result."""

    def update(self, step: Step) -> None:
        """Records the progress of a run."""
        self._steps[step.run] = step

    def finish(self, ended: Ended) -> None:
        """Records the end of a run."""
        run = self._runs[ended.run]
        self._left.learn(run.task.name, ended.seconds)
        self._steps.pop(ended.run, None)
        if ended.result:
            self._results[ended.run] = ended.result
        else:
            self.errors[ended.run] = ended.error
        if self._live is None:
            self.console.print(Text(self._line(run, ended)))

    def message(self, text: str) -> None:
        """Prints a line above the display."""
        self.console.print(Text(text, no_wrap=True, overflow="ellipsis"))

    def stop(self) -> None:
        """Ends the display and prints the table, once."""
        live, self._live = self._live, None
        self._steps.clear()
        if live is not None:
            live.stop()
        elif self._runs and (self._results or self.errors):
            self.console.print(self.table())
        self._runs = {} if live is None else self._runs

    def results(self) -> list[tables.SchemeResults]:
        """Returns the results by scheme, with those to come."""
        return by_scheme(list(self._runs.values()), self._results, self.errors)

    def table(self) -> Group:
        """Returns the table of all runs, with empty cells for those to come."""
        return final_table(self.results(), self.console.width)

    def _waiting(self) -> list[Run]:
        """Runs that have not ended, those in training first."""
        ended = self._results.keys() | self.errors.keys()
        waiting = [run for name, run in self._runs.items() if name not in ended]
        return sorted(waiting, key=lambda run: run.name not in self._steps)

    def _fraction(self, run: Run) -> float:
        step = self._steps.get(run.name)
        return step.step / run.task.train.steps if step else 0.0

    def _seconds_left(self) -> float:
        waiting = self._waiting()
        tasks, fractions = [run.task.name for run in waiting], list(map(self._fraction, waiting))
        return self._left.of_plan(tasks, fractions) / min(self._workers, max(1, len(waiting)))

    def _title(self, run: Run) -> str:
        several = len({run.seed for run in self._runs.values()}) > 1
        return f"{run.task.name} {run.scheme}" + (f", seed {run.seed}" if several else "")

    def _line(self, run: Run, ended: Ended) -> str:
        count = len(self._results) + len(self.errors)
        parts = [f"[{count}/{len(self._runs)}] {self._title(run)}:"]
        result = ended.result
        if result is None or result.status != "done":
            parts.append(f"failed: {tables.one_line(result.error if result else ended.error)};")
        elif result.curve:
            parts.append(f"loss {result.curve['loss'][-1]:.3f};")
        parts.append(duration(ended.seconds))
        if self._waiting():
            parts.append(f"(about {duration(self._seconds_left())} left)")
        return " ".join(parts)

    def _render(self) -> Group:
        if self._live is None:
            return self.table()
        waiting, total = self._waiting(), len(self._runs)
        ended = total - len(waiting)
        took = duration(time.monotonic() - self._began)
        head = [Text(f"{ended} of {total} runs, {took}")]
        if seconds := self._seconds_left():
            head[0].append(f", about {duration(seconds)} left", "bold")
        for name, step in self._steps.items():
            run, steps = self._runs[name], self._runs[name].task.train.steps
            then = ", evaluating ..." if step.step >= steps else ""
            text = f"{self._title(run)}: step {step.step} of {steps}, loss {step.loss:.3f}{then}"
            head.append(Text(text, "cyan"))
        if not self._steps:
            head.append(Text("compiling ..." if waiting else "", "dim"))
        done = (ended + sum(map(self._fraction, waiting))) / max(1, total)
        bar = ProgressBar(total=1.0, completed=min(1.0, done), width=min(60, self.console.width))
        return Group(*head, bar, self.table())


def by_scheme(
    runs: Sequence[Run], results: Mapping[str, Result | None], errors: Mapping[str, str]
) -> list[tables.SchemeResults]:
    """Returns runs with their results, by task and scheme.

    Args:
      runs: with several seeds.
      results: by name of the run, as far as there are any.
      errors: of runs that raised, by name.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.task.name, run.scheme), []).append(run)
    return [
        collect(
            task,
            seeds,
            lambda run: results.get(run.name),
            next((errors[run.name] for run in seeds if run.name in errors), ""),
        )
        for (task, _), seeds in groups.items()
    ]
