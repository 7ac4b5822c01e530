"""Carries out the cells of a plan, one after the other."""

import datetime
import functools
import hashlib
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import posenc_jax as pe
from examples import checkpoints, families
from experiments.errors import ConfigError, CorpusError, Locked
from experiments.lengths import texts
from experiments.lengths.plan import Cell, Document, Plan
from experiments.lengths.results import BIN, CELLS, CellResult
from experiments.released.losses import Losses, Program, Scores, set_method
from experiments.released.packages import packaged
from experiments.released.plan import as_code, seen
from experiments.runs import results
from experiments.runs.checkpoints import Deadline
from experiments.runs.files import locked
from experiments.runs.results import FILE
from experiments.runs.run import commit, duration, here
from experiments.runs.run_queue import refuse_versions


class Runner:
    """A checkpoint, the texts of a plan as tokens, and the programs that were compiled."""

    def __init__(self, plan: Plan, checkpoint: checkpoints.Checkpoint):
        """Builds the model."""
        if checkpoint.tokenizer is None:
            raise ConfigError(f"checkpoint: {checkpoint.tokenizer_error}")
        layers, config = {*pe.from_hf(checkpoint.config)}, checkpoint.config
        length = config.get("max_position_embeddings")
        if layers != {plan.trained} or length != plan.checkpoint.trained:
            raise ConfigError(
                f"checkpoint: has {[*layers]} trained at {length} tokens, the plan says "
                f"{plan.trained} and {plan.checkpoint.trained}"
            )
        self.plan, self.tokenizer = plan, checkpoint.tokenizer
        self.model = families.load(checkpoint.config, checkpoint.state)
        self._losses = Losses(self.model)
        self._program: tuple[Any, Program] | None = None

    @functools.cache  # noqa: B019, one runner per process
    def tokens(self, document: Document, count: int) -> np.ndarray:
        """Returns the first tokens of a document, int32 [count]."""
        text = texts.read(document.corpus, document.name)
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        if len(tokens) < count:
            raise CorpusError(
                f"{document.corpus}: {document.name} has {len(tokens):,} tokens, {count:,} are "
                "needed"
            )
        return np.array(tokens[:count], np.int32)

    def program(self, cell: Cell, count: int) -> Program:
        """Returns the program of a cell; the last one is kept."""
        key = cell.layer, count
        if self._program is None or self._program[0] != key:
            set_method(self.model, cell.layer)
            self._program = key, self._losses.compiled(count)
        return self._program[1]

    def __call__(self, cell: Cell) -> CellResult:
        """Returns the result of a cell."""
        probe = None
        if cell.task == "probe":
            text = self.tokens(cell.document, cell.count)
            probe = texts.new_probe(
                text.tolist(), self.tokenizer, cell.document.name, self.plan.probe
            )
            tokens = probe.tokens
        else:
            tokens = self.tokens(cell.document, cell.count + 1)
        program = self.program(cell, len(tokens))
        began = time.process_time()
        scores = program(tokens)
        seconds = time.process_time() - began
        return CellResult(
            settings=cell.settings,
            losses=[] if probe else scores.losses.reshape(-1, BIN).mean(1).tolist(),
            questions=[] if probe is None else _answers(probe, scores),
            copies=[] if probe is None else _copied(probe, scores),
            cpu_seconds=round(seconds, 2),
            compile_seconds=round(program.seconds, 2),
            temporary_mib=round(program.temporary_bytes / 2**20, 1),
            peak_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, 1),
            environment=here(),
            commit=commit(),
            finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )


def _answers(probe: texts.Probe, scores: Scores) -> list[tuple[float, float, float, float, float]]:
    """The scores of answers; the token at place i has the score i - 1."""
    rows = []
    for x in probe.questions:
        part = slice(x.start - 1, x.start - 1 + x.count)
        loss, hit = float(scores.losses[part].sum()), float(scores.hits[part].all())
        rows.append((float(x.context), x.depth, float(x.distance), loss, hit))
    return rows


def _copied(probe: texts.Probe, scores: Scores) -> list[tuple[float, float, float]]:
    """The losses of paragraphs at their first and their second place."""
    rows = []
    for x in probe.copies:
        first, second = (
            float(scores.losses[place - 1 : place - 1 + x.count].mean())
            for place in (x.first, x.second)
        )
        rows.append((float(x.distance), first, second))
    return rows


def open_checkpoint(plan: Plan, path: Path | None = None) -> checkpoints.Checkpoint:
    """Returns the checkpoint of a plan, by default from the file of the package."""
    path = path or packaged(plan.checkpoint.requirement, "*.gguf", "the checkpoint")
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"checkpoint: {path}: cannot be read: {error.strerror}") from None
    if digest != plan.checkpoint.sha256:
        raise ConfigError(
            f"checkpoint: {path} is another file than that of {plan.checkpoint.requirement} "
            f"(sha256 {digest[:16]}, not {plan.checkpoint.sha256[:16]})"
        )
    try:
        return checkpoints.read(path)
    except ValueError as error:
        raise ConfigError(f"checkpoint: {error}") from None


def carry_out(
    plan: Plan,
    folder: Path,
    run: Callable[[Cell], CellResult],
    deadline: Deadline,
    say: Callable[[str], None],
) -> int:
    """Carries out the cells without a result, except cells that another process has begun.

    A result is written whole when its pass has ended, so that the process may end at any time.

    Returns:
      The number of cells without a result.
    """
    commit()  # Files may change while cells run.
    cells = list(plan.cells())
    known = results.read(folder, CELLS)
    environments = [known[cell.name].environment for cell in cells if cell.name in known]
    refuse_versions(environments, str(folder), "take another --results")
    waiting = [cell for cell in cells if cell.name not in known]
    costs = {cell.name: cost(cell) for cell in cells}
    say(f"{len(cells)} cells, {len(cells) - len(waiting)} with a result.")
    seconds = work = 0.0
    for cell in waiting:
        if deadline.over():
            break
        try:
            with locked(folder / cell.name):
                if (folder / cell.name / FILE).exists():
                    continue
                result = run(cell)
                results.write(folder, cell.name, result)
        except Locked:
            continue
        seconds += result.cpu_seconds + result.compile_seconds
        work += costs[cell.name]
        done = results.read(folder, CELLS)
        left = [x for x in cells if x.name not in done]
        remaining = sum(costs[x.name] for x in left) * seconds / work
        say(
            f"[{len(cells) - len(left)}/{len(cells)}] {words(cell)}: {_summary(result)}; "
            f"{result.cpu_seconds:.0f} s of processor time, about {duration(remaining)} left"
        )
    done = results.read(folder, CELLS)
    return sum(cell.name not in done for cell in cells)


def words(cell: Cell) -> str:
    """Returns the name of a cell for people, in a line."""
    window = "" if cell.layer.window is None else f", window {seen(cell.layer)}"
    scheme = as_code(cell.layer.scheme)
    return f"{cell.task} {cell.document.title} {cell.count:,} {scheme}{window}"


def _summary(result: CellResult) -> str:
    if result.losses:
        return f"{np.mean(result.losses):.3f} nats, {result.losses[-1]:.3f} at the end"
    hits = sum(row[-1] for row in result.questions)
    return f"{hits:.0f} of {len(result.questions)} answers"


def cost(cell: Cell) -> float:
    """Returns about how many seconds of a processor a cell takes: SmolLM2 on an AMD EPYC."""
    return cell.count * (1.35e-3 + 5.1e-7 * min(cell.count / 2, seen(cell.layer)))
