"""Results of a study as `compare` has them, each size as a task: for its report.html and plots."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from experiments import plots
from experiments.report import render
from experiments.runs import Result, Run
from experiments.study.plan import Cell, Lookup, Study
from experiments.tables import mean


def report(study: Study, results: Lookup, command: str) -> str:
    """Returns the page, with the schemes whose seeds have all ended.

    Args:
      study: the study.
      results: of its runs.
      command: that makes it.
    """
    return render(_everything(study, results, command))


def lengths(study: Study, results: Lookup) -> str:
    """Returns the plot of scores against length at the first size, as <svg>, or nothing."""
    size, cells = next(iter(study.cells.items()))
    main = next(iter(cells.values())).grid[0].task.views[0]
    return plots.lengths(_everything(study, results, ""), size, main)


def maps(study: Study, results: Lookup) -> str:
    """Returns the maps of scores by length and place at the last size that has them, as <svg>."""
    everything = _everything(study, results, "")
    found = (plots.maps(everything, size) for size in list(study.cells)[::-1])
    return next((svg for svg in found if svg), "")


def _everything(study: Study, results: Lookup, command: str) -> dict[str, Any]:
    runs, labels, facts = [], {}, {}
    for size, cells in study.cells.items():
        for cell in cells.values():
            made = cell.finals(results)
            found = [result for run in made if (result := results(run))]
            if made and len(found) == len(made):
                runs.append(_run(size, cell, made, found))
                facts = found[0].environment
        task = next(iter(cells.values())).grid[0].task
        labels[size] = dataclasses.asdict(task.labels)
        modes = dict(task.labels.modes)
        labels[size] |= {"modes": modes, "about": f"{size}: {task.labels.about}"}
    return {
        "name": study.name,
        "command": command,
        "created": max(
            (r.finished for run in study.runs(results) if (r := results(run))), default=""
        ),
        "runs": runs,
        "tasks": labels,
        "environment": facts,
    }


def _run(size: str, cell: Cell, made: Sequence[Run], found: Sequence[Result]) -> dict[str, Any]:
    """A scheme with all its seeds, as results.json has it."""
    train, first = made[0].task.train, found[0]
    diverged = [result.error for result in found if result.status != "done"]
    return {
        "task": size,
        "scheme": cell.scheme,
        "scheme_repr": first.scheme_repr,
        "status": "failed" if diverged else "done",
        "error": f"{len(diverged)} of {len(found)} seeds: {diverged[0]}" if diverged else None,
        "seeds": [run.seed for run in made],
        "steps": train.steps,
        "learning_rate": train.learning_rate,
        "train_length": made[0].task.train_length,
        "fitted": all(result.fitted for result in found),
        "fit_rule": first.fit_rule,
        "parameters": first.parameters,
        "memory_bytes": first.memory_bytes,
        "curve": {
            "step": first.curve.get("step", []),
            "loss": [list(x) for x in zip(*(r.curve.get("loss", []) for r in found), strict=False)],
        },
        "final_loss": [r.curve["loss"][-1] for r in found if r.curve.get("loss")],
        "train_seconds": sum(r.seconds for r in found) / len(found),
        "compile_seconds": max(r.compile_seconds for r in found),
        "cpu_seconds": sum(r.cpu_seconds for r in found) / len(found),
        "evaluations": [] if diverged else list(_evaluations(made[0], found)),
    }


def _evaluations(run: Run, found: Sequence[Result]) -> Iterator[dict[str, Any]]:
    modes, main = run.task.labels.modes or {"plain": ""}, run.task.views[0]
    for view, scores in found[0].scores.items():
        for length in scores:
            yield {
                "mode": view if view in modes else next(iter(modes)),
                "variant": None if view in modes else view,
                "length": int(length),
                "values": [result.scores[view][length] for result in found],
                "in_distribution": int(length) == run.task.train_length,
                "places": _places(found, length) if view == main else None,
            }


def _places(found: Sequence[Result], length: str) -> list[float | None] | None:
    """The mean scores by place in the row, None where results do not have them."""
    rows = [result.places.get(length, ()) for result in found]
    return [None if None in column else mean(column) for column in zip(*rows, strict=True)] or None
