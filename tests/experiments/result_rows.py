"""Results with scores that are made up, for tests of tables, plots and reports."""

import dataclasses

import posenc_jax as pe
from experiments.runs.run import Result, Run
from experiments.runs.scores import SchemeResults
from experiments.tasks import TASKS

LENGTHS = {"kback": (32, 64, 128), "kth": (32, 64, 128), "text": (128, 256, 512)}
POSITIONS = {"none": pe.NoPE(), "learned": pe.LearnedAbsolute(128, 64), "rope": pe.RoPE(16)}


def make_row(task, scheme, seeds=1, *, fitted=True, raised="", error=None, scores=None, **entries):
    """Returns the results of a scheme; `seeds` are a count or a list, `entries` are of `Result`.

    `scores` is a function of view, index of the length and index of the seed. Seeds with an `error`
    diverged, and a scheme that `raised` has no results.
    """
    level = 0.9 - 0.01 * len(scheme)
    scores = scores or (lambda view, i, n: level - 0.1 * i + 0.01 * n)
    subject = dataclasses.replace(TASKS[task](), test_lengths=LENGTHS[task])
    position = POSITIONS.get(scheme, POSITIONS["none"])
    numbers = range(seeds) if isinstance(seeds, int) else seeds
    views = ["nonoverlapping", "sliding"] if task == "text" else ["plain"]
    views += ["ntk"] if (task, scheme) == ("text", "rope") else []
    results = {}
    for n, seed in enumerate(numbers):
        measured = {
            view: {str(length): scores(view, i, n) for i, length in enumerate(LENGTHS[task])}
            for view in views
        }
        defaults = {
            "parameters": 12345,
            "memory_bytes": 5 * 2**20,
            "fit_rule": "accuracy at the training length >= 0.9",
            "environment": {"jax": "0.10.2"},
            "commit": "abc",
            "curve": {"step": [100, 200, 300], "loss": [2.0, 1.0, 0.1]},
            "compile_seconds": 3.2,
            "train_seconds": 9.0 if scheme == "none" else 9.9,
            "cpu_seconds": 18.0,
        }
        results[seed] = Result(
            settings={"task": task, "scheme": scheme, "seed": seed},
            status="diverged" if error else "done",
            scheme_repr=f"{scheme}(num_heads=4)",
            finished="2026-01-02T03:04:05Z",
            error=error,
            fitted=fitted,
            scores={} if error else measured,
            **(defaults | entries),
        )
    runs = [Run(subject, scheme, {}, position, seed) for seed in numbers]
    ended = () if raised else tuple(results[run.seed] for run in runs)
    return SchemeResults(task, tuple(runs), ended, raised)
