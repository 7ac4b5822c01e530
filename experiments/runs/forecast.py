"""The forecast of runs on a GPU that is not there: `--plan` of `study` and `scoreboard`.

A step of a lane takes time for its FLOPs and its bytes (`experiments.training.cost`), at stated
shares of the peaks of the GPU; a step of all lanes takes at least the launches of its operations.
Compilation and evaluation have assumed times. Nothing of this has been measured.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from experiments.runs.run import Run, duration
from experiments.training import cost


@dataclasses.dataclass(frozen=True)
class GPU:
    """The peaks of a GPU, and assumptions about their use.

    Peaks are from https://www.nvidia.com/en-us/data-center/h200 and h100 (SXM), which state them
    with sparsity.

    Attributes:
      name: of the GPU.
      flops: peak by dtype, per second, without sparsity; float32 products have TF32 inputs.
      bandwidth: peak of the memory, bytes per second.
      flops_share, bandwidth_share: of the peaks.
      launch: seconds per counted operation; XLA makes 1.4 to 2.8 kernels of one, compiled for an
        H100 that is only described.
      compile, compile_evaluation: seconds per layer, of programs of training and of evaluation.
      threads: programs that are compiled at once.
      evaluate: seconds per run.
    """

    name: str = "H200"
    flops: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"bfloat16": 989e12, "float32": 494e12}
    )
    bandwidth: float = 4.8e12
    flops_share: float = 0.3
    bandwidth_share: float = 0.6
    launch: float = 6e-6
    compile: float = 2.5
    compile_evaluation: float = 0.5
    threads: int = 8
    evaluate: float = 0.7

    def step(self, of_lane: cost.Cost, lanes: int, dtype: str) -> float:
        """Returns the seconds of a step of all lanes."""
        products = of_lane.flops / (self.flops_share * self.flops[dtype])
        memory = of_lane.traffic / (self.bandwidth_share * self.bandwidth)
        return max(lanes * (products + memory), of_lane.operations * self.launch)

    def assumptions(self) -> str:
        """Returns the assumptions in words."""
        peaks = ", ".join(f"{x / 1e12:g} TFLOP/s in {name}" for name, x in self.flops.items())
        return (
            f"Assumed of one {self.name}, not measured: {self.flops_share:.0%} of {peaks}; "
            f"{self.bandwidth_share:.0%} of {self.bandwidth / 1e12:g} TB/s; at least "
            f"{1e6 * self.launch:g} us per operation; {self.compile:g} s per layer to compile a "
            f"program of training, {self.threads} at once, and {self.compile_evaluation:g} s per "
            f"layer for one of evaluation; {self.evaluate:g} s to evaluate a run. FLOPs, bytes and "
            "operations are counted from the programs."
        )


H100 = GPU("H100", bandwidth=3.35e12)


@dataclasses.dataclass(frozen=True)
class Part:
    """Runs with one program.

    Attributes:
      name: for readers.
      run: one of them.
      lanes: of the program.
      steps: of the runs; the runs of one list are known at once, and go into groups of `lanes`.
      evaluations: programs of evaluation.
    """

    name: str
    run: Run
    lanes: int
    steps: Sequence[Sequence[int]]
    evaluations: int = 1

    @property
    def runs(self) -> int:
        """How many runs."""
        return sum(len(stage) for stage in self.steps)

    @property
    def groups(self) -> list[int]:
        """The steps of each group."""
        return [
            steps
            for stage in self.steps
            for steps in sorted(set(stage))
            for _ in range(math.ceil(stage.count(steps) / self.lanes))
        ]


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Adds the flag of a command that can forecast its runs."""
    parser.add_argument(
        "--plan",
        action="store_true",
        help="run nothing: print the runs and programs of a GPU, and a forecast of their times",
    )


def forecast(
    title: str, parts: Sequence[Part], minutes: float, gpu: GPU | None = None
) -> Iterator[str]:
    """Yields lines with the times of parts, in pieces of some minutes.

    Args:
      title: the first line.
      parts: in the order in which they run.
      minutes: of a piece; 9 if it is infinite or 0.
      gpu: default: an H200. The last line states the time on an H100.
    """
    gpu, evaluations = gpu or GPU(), sum(part.evaluations for part in parts)
    minutes = minutes if 0 < minutes < math.inf else 9.0
    rows: list[list[str]] = []
    total = compilation = _compilation(parts, gpu)
    for part in parts:
        of_lane = cost.of_step(part.run.task, part.run.position)
        seconds = _seconds(part, gpu)
        total += seconds
        numbers = {
            "piece": f"{math.ceil(total / (60 * minutes))}",
            "": part.name,
            "million": f"{of_lane.parameters / 1e6:.1f}",
            "lanes": f"{part.lanes}",
            "runs": f"{part.runs}",
            "groups": f"{len(part.groups)}",
            "TFLOP": f"{of_lane.flops / 1e12:.3f}",
            "GB": f"{of_lane.traffic / 1e9:.2f}",
            "operations": f"{of_lane.operations:.0f}",
            "ms/step": f"{1e3 * _step(part, gpu):.1f}",
            "s": f"{seconds:.0f}",
        }
        rows += [list(numbers)] if not rows else []
        rows.append(list(numbers.values()))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield title
    yield ""
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        cells[1] = row[1].ljust(widths[1])
        yield "  ".join(cells)
    yield ""
    yield "TFLOP, GB and operations are of a step of one lane; ms/step is of all lanes."
    yield gpu.assumptions()
    yield (
        f"{sum(part.runs for part in parts)} runs; {len(parts)} programs of training and "
        f"{evaluations} of evaluation, {duration(compilation)} without a cache; "
        f"{duration(total)} in all; pieces of {minutes:g} minutes: "
        f"{math.ceil(total / (60 * minutes))}."
    )
    slower = _compilation(parts, H100) + sum(_seconds(part, H100) for part in parts)
    yield (
        f"An {H100.name}, with {H100.bandwidth / 1e12:g} TB/s and else the same: "
        f"{duration(slower)} in all."
    )


def _step(part: Part, gpu: GPU) -> float:
    """Returns the seconds of a step of all lanes."""
    of_lane = cost.of_step(part.run.task, part.run.position)
    return gpu.step(of_lane, part.lanes, part.run.task.model.dtype)


def _seconds(part: Part, gpu: GPU) -> float:
    """Returns the seconds of all steps and evaluations."""
    return _step(part, gpu) * sum(part.groups) + gpu.evaluate * part.runs


def _compilation(parts: Sequence[Part], gpu: GPU) -> float:
    """Returns the seconds of compiling all programs."""
    training, evaluation = gpu.compile / gpu.threads, gpu.compile_evaluation
    return sum(
        part.run.task.model.num_layers * (training + evaluation * part.evaluations)
        for part in parts
    )
