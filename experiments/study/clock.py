"""The clock of a study: the time of a training step of all schemes, measured side by side.

Runs of a study share a machine with each other and with other programs, so their times do not
compare. The clock alternates between the schemes of a size in one process of its own: on one
processor, as runs have one, or on an accelerator, which is then free for the runs. Its file is
`clock.json` in the folder of results. The share of the machine's time that other programs had
meanwhile is measured too: above `BUSY`, nothing is concluded from times.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from experiments.bench.timing import side_by_side
from experiments.errors import ExperimentError, ResultsError
from experiments.models.model import initialize, seed_key
from experiments.runs.accelerators import look, variables
from experiments.runs.environment import environment
from experiments.runs.executors import processes
from experiments.runs.files import to_json, write_whole
from experiments.runs.run import load_data
from experiments.settings.config_io import convert
from experiments.settings.trust import in_one_line
from experiments.training.train import compiled, new_state, rates_of

BUSY = 0.05
"""The greatest share of other programs at which something is concluded from times."""
CALLS = 5
"""Calls of each program on accelerators, the first two not timed."""


@dataclasses.dataclass(frozen=True)
class Clock:
    """Times of training steps.

    Attributes:
      steps: milliseconds of a step by size and scheme: the median over rounds.
      rounds: by size, how often each scheme was measured.
      others: by size, the share of the machine's time that other programs had.
      environment: versions and the machine.
      programs: by size and scheme, the names of the programs that were timed; an older file has
        none.
    """

    steps: Mapping[str, Mapping[str, float]]
    rounds: Mapping[str, int]
    others: Mapping[str, float | None]
    environment: Mapping[str, Any]
    programs: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)

    def ratio(self, size: str, scheme: str, baseline: str) -> float | None:
        """Returns the time of a scheme relative to the baseline.

        None where one was not measured, or the machine was busy.
        """
        steps = self.steps.get(size, {})
        if self.busy(size) or scheme not in steps or baseline not in steps:
            return None
        return steps[scheme] / steps[baseline]

    def busy(self, size: str) -> bool:
        """Returns whether other programs disturbed the times of a size, or may have."""
        others = self.others.get(size)
        return others is None or others > BUSY


def read(folder: Path, cells: Mapping[str, Mapping[str, Any]]) -> Clock | None:
    """Returns the clock in a folder of results of a study with these cells, None without one."""
    file = folder / "clock.json"
    try:
        clock = convert(Clock, json.loads(file.read_text(encoding="utf-8")), "")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(f"{file}: cannot be read: {error}") from None
    for size, of_size in cells.items():
        for name, program in clock.programs.get(size, {}).items():
            if name in of_size and of_size[name].grid[0].program != program:
                words = f"has times of other settings of {size}; --clock measures again"
                raise ResultsError(f"{file}: {words}")
    return clock


def measure(cells: Mapping[str, Mapping[str, Any]], folder: Path, say: Any) -> Clock:
    """Measures the schemes of all sizes of a study, and writes the clock."""
    steps, rounds, others, machine, programs = {}, {}, {}, {}, {}
    devices = variables(look())
    for size, of_size in cells.items():
        say(f"Measuring a step of {len(of_size)} schemes of {size} ...")
        unit = {name: (cell.task, cell.grid[0].position) for name, cell in of_size.items()}
        options = {}
        if devices:  # For an H100 a program compiled for up to 50 s, mostly on one core.
            train = next(iter(of_size.values())).task.train
            options = dict(steps_per_call=train.steps_per_call, rounds=CALLS - 2, say=say)
            options["threads"] = len(unit)
        with processes(1, environments=devices[:1]) as pool:
            measured = pool.submit(_measure, unit, **options).result()
        steps[size], rounds[size], others[size], machine = measured
        programs[size] = {name: cell.grid[0].program for name, cell in of_size.items()}
        share = "unknown" if others[size] is None else f"{others[size]:.1%}"
        say(f"{size}: {rounds[size]} rounds; time of other programs: {share}")
    clock = Clock(steps, rounds, others, machine, programs)
    write_whole(folder / "clock.json", to_json(dataclasses.asdict(clock), indent=1) + "\n")
    return clock


def _measure(
    unit: Mapping[str, tuple[Any, Any]],
    steps_per_call: int = 5,
    rounds: int = 15,
    threads: int = 1,
    say: Any = lambda text: None,
) -> tuple[dict[str, float], int, float | None, dict[str, Any]]:
    """Returns milliseconds of a step by scheme, rounds, the share of others, and the machine."""

    def case(name: str) -> Callable[[], Any]:
        began, (task, position) = time.monotonic(), unit[name]
        train = dataclasses.replace(task.train, steps_per_call=steps_per_call)
        task = dataclasses.replace(task, train=train)
        try:
            call = prepare(task, position, load_data(task).train)
        except ExperimentError:
            raise
        except Exception as error:
            raise ResultsError(f"{name} cannot be timed: {in_one_line(error)}") from None
        say(f"{name}: compiled after {time.monotonic() - began:.0f} s")
        return call

    with ThreadPoolExecutor(threads) as pool:
        cases = dict(zip(unit, pool.map(case, unit), strict=True))
    before = _processor_seconds()
    timings = side_by_side(cases, rounds=rounds, seconds=0.0)
    others = _share_of_others(before, _processor_seconds())
    steps = {each.name: round(1e3 * each.median / steps_per_call, 4) for each in timings}
    return steps, timings[0].rounds, others, environment()


def prepare(task: Any, position: Any, data: Any) -> Callable[[], Any]:
    """Returns a function of some training steps of a task, `steps_per_call` of them."""
    call = compiled(task, position, data)
    params = initialize(task.model, position, task.vocab_size, seed_key(0, "parameters"))
    state = new_state(params, task)
    key, rates, first = seed_key(0, "data"), rates_of(task), jnp.int32(0)

    def steps():
        nonlocal state
        state, losses = call(state, key, rates, first, data)
        return losses

    return steps


def _processor_seconds(stat: Path = Path("/proc/stat")) -> tuple[float, float, float] | None:
    """Returns seconds that all processors, and this process, were busy, and seconds of the clock.

    None where the system does not say.
    """
    try:
        words = stat.read_text(encoding="utf-8").partition("\n")[0].split()
    except OSError:
        return None
    user, nice, system, _, _, irq, soft, steal = (float(x) for x in words[1:9])
    ticks = os.sysconf("SC_CLK_TCK")
    busy = (user + nice + system + irq + soft + steal) / ticks
    return busy, time.process_time(), time.monotonic()


def _share_of_others(before: Any, after: Any) -> float | None:
    if before is None or after is None:
        return None
    busy, process, seconds = (b - a for a, b in zip(before, after, strict=True))
    return round(max(0.0, busy - process) / (seconds * (os.cpu_count() or 1)), 4)
