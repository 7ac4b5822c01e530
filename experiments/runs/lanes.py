"""Runs side by side in one compiled program, on accelerators.

A model of some million parameters leaves most of a GPU idle, and its program takes longer to
compile than to run. So runs that differ in seeds and rates alone are trained as lanes of one
`jax.vmap`; the last group of a program is filled up with copies of a run, so that there is one
program. A lane has the numbers of a run alone, to rounding. On CPUs lanes are slower than runs one
after the other.

Every run has its folder and its result, in which memory and times are shares: the group's, divided
by the number of lanes, without compilation. All end at once, and are then evaluated one after the
other.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp

from experiments.models.model import Position
from experiments.runs.checkpoints import Deadline, OrbaxCheckpoint
from experiments.runs.files import locked
from experiments.runs.run import Result, Run, RunFolder, load_data
from experiments.training.train import compiled, rates_of, train

_THREADS = 8
_SECONDS = 300.0
"""Between two states of a group, which are larger than those of a run."""


def groups(units: Iterable[list[Run]], lanes: Callable[[Run], int]) -> list[list[Run]]:
    """Returns runs in groups of at most `lanes` that one program can train side by side.

    Args:
      units: lists of runs that begin with the same run and stay together.
      lanes: returns the number of lanes of a run's program.
    """
    by_program: dict[tuple, list[list[Run]]] = {}
    for unit in units:
        (first, *others) = unit
        alone = others or first.start or type(first) is not Run
        key = (first.name,) if alone else (*_program(first), first.task.train.steps)
        parts = by_program.setdefault(key, [[]])
        if len(parts[-1]) >= lanes(first) and not alone:
            parts.append([])
        parts[-1] += unit
    return [part for parts in by_program.values() for part in parts]


def _program(run: Run) -> tuple[str, Position]:
    """Identifies the program: the scheme may depend on lengths on which training does not."""
    return run.program, run.position


def is_group(runs: Sequence[Run]) -> bool:
    """Returns whether runs are lanes of a program, rather than a run and others that follow it."""
    return all(type(run) is Run and not run.start for run in runs)


def compile_all(parts: Sequence[Sequence[Run]], lanes: Callable[[Run], int]) -> int:
    """Compiles the programs of groups, several at once; returns how many there are.

    One that cannot be compiled raises where its runs are trained.
    """
    firsts = {_program(part[0]): part[0] for part in parts if is_group(part)}

    def compile_one(run: Run) -> None:
        with contextlib.suppress(Exception):
            compiled(run.task, run.position, lanes(run), load_data(run.task).train)

    for run in firsts.values():
        load_data(run.task)  # Threads would load it several times.
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, firsts.values()))
    return len(firsts)


def carry_out(
    folder: Path,
    runs: Sequence[Run],
    lanes: int,
    deadline: Deadline,
    keep: bool = False,
    say: Callable[[str], None] = lambda line: None,
    report: Callable[[int, list[float]], None] = lambda step, losses: None,
) -> Iterator[tuple[Run, Result]]:
    """Trains a group, then yields each run with its result.

    Args:
      folder: of the folders of runs.
      runs: a group of `groups`.
      lanes: of the program.
      deadline: when to stop.
      keep: whether to keep trained parameters.
      say: shows a line.
      report: called with the step and the losses of the runs during training.

    Raises:
      OutOfTime: at the deadline; the next call continues.
      ResultsError: if another process works in a folder, or it cannot be written.
    """
    folders = [RunFolder(folder, run) for run in runs]
    digest = hashlib.sha256(
        " ".join([str(lanes), *(run.name for run in runs), str(runs[0].sources)]).encode()
    ).hexdigest()
    with contextlib.ExitStack() as held:
        for each in folders:
            held.enter_context(locked(each.path))
        before = [each.result() for each in folders]
        filled = [*runs, *[runs[-1]] * (lanes - len(runs))]
        path = folders[0].path / f"checkpoints-{digest[:12]}"
        checkpoint = OrbaxCheckpoint(path, deadline, say, every=_SECONDS)
        trained = train(
            runs[0].task,
            runs[0].position,
            [run.seed for run in filled],
            load_data(runs[0].task).train,
            lambda step, losses: report(step, losses[: len(runs)]),
            rates=jnp.concatenate([rates_of(run.task, 1) for run in filled]),
            checkpoint=checkpoint,
        )
        facts = {"lanes": f"{lanes} in one program; memory and times are shares"}
        facts = facts if lanes > 1 else {}
        for i, (run, each) in enumerate(zip(runs, folders, strict=True)):
            yield run, each.finish(trained.of_seed(i), load_data(run.task), before[i], keep, facts)
        checkpoint.remove()
