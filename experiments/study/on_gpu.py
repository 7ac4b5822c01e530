"""A study on a GPU: the lanes of programs, and a forecast before there is a GPU."""

import dataclasses
from collections.abc import Callable, Iterator

from experiments.runs.forecast import GPU, Part, forecast
from experiments.runs.run import Run, duration
from experiments.study.clock import CALLS
from experiments.study.plan import Cell, Study
from experiments.training import cost


def lanes_of(study: Study) -> Callable[[Run], int]:
    """Returns the function from runs of a study to the lanes of their programs."""
    lanes = {
        (cell.task.name, cell.task.model): cell.about.lanes
        for cells in study.cells.values()
        for cell in cells.values()
    }
    return lambda run: lanes[run.task.name, run.task.model]


def plan_in_words(study: Study, minutes: float) -> Iterator[str]:
    """Yields lines with the runs of a study, their programs, and the times that they may take.

    Args:
      study: the study.
      minutes: of a piece.
    """
    gpu = GPU()
    compared = [study.compared(size, lambda run: None) for size in study.cells]
    parts = [
        _part(cell, cells[study.about.baseline], gpu)
        for cells in compared
        for cell in cells.values()
    ]
    title = f"The study {study.name}, with the least number of runs that choose settings:"
    yield from forecast(title, parts, minutes, gpu)
    cells = [cell for cells in compared for cell in cells.values()]
    steps = sum(_step(cell, gpu) * cell.task.train.steps_per_call for cell in cells)
    yield f"The clock comes before: {duration(CALLS * steps)}."


def _part(cell: Cell, baseline: Cell, gpu: GPU) -> Part:
    about, steps = cell.about, cell.task.train.steps
    stages = [[steps] * about.seeds]
    if cell.source is None:
        grid = [steps] * len(about.rates)
        others = [steps] * 2 * (about.selection_seeds - 1)
        stages = [grid, others, [steps], [steps] * about.tries, *stages]
    if cell.scheme == baseline.scheme:
        stages += [[round(steps * budget)] * about.seeds for budget in about.budgets]
    elif cell.has_equal_time:
        stages += [[round(steps * _step(baseline, gpu) / _step(cell, gpu))] * about.seeds]
    run = dataclasses.replace(cell.grid[0], task=cell.task)
    evaluations = len(cell.task.test_lengths)
    return Part(f"{cell.size} {cell.scheme}", run, about.lanes, stages, evaluations)


def _step(cell: Cell, gpu: GPU) -> float:
    of_lane = cost.of_step(cell.task, cell.grid[0].position)
    return gpu.step(of_lane, cell.about.lanes, cell.task.model.dtype)
