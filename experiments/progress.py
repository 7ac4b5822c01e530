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

from experiments import tables
from experiments.terminal import final_table as final_table


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


class TimeLeft:
    """Estimates what remains of a plan, and learns from each run that ends.

    A bar of `rich.progress` extrapolates one speed; here runs of different tasks take different
    times, and the first estimate is made before any has ended.

    Args:
      guess: seconds of a run, by task.
    """

    def __init__(self, guess: Mapping[str, float]):
        self._guess = guess
        self._seen: dict[str, list[float]] = {}

    def learn(self, task: str, seconds: float):
        """Records the time of a run."""
        self._seen.setdefault(task, []).append(seconds)

    def of_run(self, task: str) -> float:
        """Returns the mean of this task's runs, or the guess times the error of other tasks'."""
        if seen := self._seen.get(task):
            return tables.mean(seen)
        took = sum(sum(seen) for seen in self._seen.values())
        guessed = sum(self._guess.get(name, 0.0) * len(seen) for name, seen in self._seen.items())
        return self._guess.get(task, 0.0) * (took / guessed if guessed else 1.0)

    def of_plan(self, waiting: Sequence[str], elapsed=0.0, fraction=0.0) -> float:
        """Returns the seconds left: the first of the waiting tasks runs since `elapsed`."""
        total = sum(self.of_run(task) for task in waiting)
        if not waiting:
            return 0.0
        first = self.of_run(waiting[0])
        current = max(first - elapsed, first * (1 - fraction) * 0.5 if fraction else 0.0, 0.0)
        return total - first + current


class Progress:
    """Shows a plan of runs while it is carried out.

    >>> with Progress() as progress:  # doctest: +SKIP
    ...     progress.start([("kback", "rope")], {"kback": 10.0})
    ...     progress.update("kback", "rope", step=25, steps=300, loss=2.1)
    ...     progress.finish(run)
    """

    def __init__(
        self, labels: Mapping[str, tables.Labels] | None = None, console: Console | None = None
    ):
        """Takes the labels of tasks by name, and where to print."""
        self.console = console or Console()
        self._tasks = {task: vars(words) for task, words in (labels or {}).items()}
        self._plan: list[tuple[str, str]] = []
        self._runs: dict[tuple[str, str], dict] = {}
        self._left = TimeLeft({})
        self._current: dict | None = None
        self._since = self._began = time.monotonic()
        self._live: Live | None = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.stop()

    def start(self, plan: Sequence[tuple[str, str]], seconds: Mapping[str, float] | None = None):
        """Begins to show a plan.

        Args:
          plan: (task, scheme) of each run, in order.
          seconds: a guess of what a run takes, by task.
        """
        self._plan = list(plan)
        self._left = TimeLeft(seconds or {})
        self._since = self._began = time.monotonic()
        if self.console.is_interactive and self._live is None:
            self._live = Live(
                console=self.console,
                get_renderable=self._render,
                refresh_per_second=2,
                vertical_overflow="crop",
            )
            self._live.start()

    def update(self, task: str, scheme: str, step: int, steps: int, loss: float):
        """Records the step and the loss of the current run."""
        self._current = dict(task=task, scheme=scheme, step=step, steps=steps, loss=loss)

    def finish(self, run: dict):
        """Records the result of a run; one without an update was done by an earlier call."""
        key, now = (run["task"], run["scheme"]), time.monotonic()
        ran = self._current is not None and key == (self._current["task"], self._current["scheme"])
        seconds = now - self._since if ran else None
        if seconds is not None:
            self._left.learn(run["task"], seconds)
        self._runs[key], self._current, self._since = run, None, now
        if self._live is None:
            self.console.print(Text(self._line(run, seconds)))

    def message(self, text: str):
        """Prints a line above the display."""
        self.console.print(Text(text, no_wrap=True, overflow="ellipsis"))

    def stop(self):
        """Ends the display and prints the table, once."""
        live, self._live, plan, self._plan = self._live, None, self._plan, []
        self._current = None
        if live is not None:
            live.stop()
        elif plan and self._runs:
            self.console.print(self.table())

    def table(self) -> Group:
        """Returns the table of all runs, with empty cells for those to come."""
        plan = tables.ordered([*self._plan, *self._runs])
        waiting = {"status": "waiting"}
        runs = [self._runs.get(key, dict(waiting, task=key[0], scheme=key[1])) for key in plan]
        return final_table({"runs": runs, "tasks": self._tasks}, self.console.width)

    def _waiting(self) -> list[str]:
        return [task for task, scheme in self._plan if (task, scheme) not in self._runs]

    def _seconds_left(self) -> float:
        now, current = self._current, time.monotonic() - self._since
        return self._left.of_plan(
            self._waiting(), current, now["step"] / max(1, now["steps"]) if now else 0.0
        )

    def _line(self, run: dict, seconds: float | None) -> str:
        parts = [f"[{len(self._runs)}/{len(self._plan)}] {run['task']} {run['scheme']}:"]
        if not tables.done(run):
            parts.append(f"failed: {tables.one_line(run.get('error'))};")
        elif run.get("final_loss"):
            parts.append(f"loss {tables.mean(run['final_loss']):.3f};")
        parts.append(duration(seconds) if seconds is not None else "done before")
        if self._waiting():
            parts.append(f"(about {duration(self._seconds_left())} left)")
        return " ".join(parts)

    def _render(self) -> Group:
        if not self._plan:
            return self.table()
        finished, total = len(self._plan) - len(self._waiting()), len(self._plan)
        head = [Text(f"{finished} of {total} runs, {duration(time.monotonic() - self._began)}")]
        if left := self._seconds_left():
            head[0].append(f", about {duration(left)} left", "bold")
        if now := self._current:
            where = f"{now['task']} {now['scheme']}: step {now['step']} of {now['steps']}"
            then = ", evaluating ..." if now["step"] >= now["steps"] else ""
            head.append(Text(f"{where}, loss {now['loss']:.3f}{then}", "cyan"))
            done = (finished + now["step"] / max(1, now["steps"])) / max(1, total)
        else:
            head.append(Text("compiling ..." if finished < total else "", "dim"))
            done = finished / max(1, total)
        bar = ProgressBar(total=1.0, completed=min(1.0, done), width=min(60, self.console.width))
        return Group(*head, bar, self.table())
